"""Between text and ids: decoders, strings that end an answer, and tokenizers of models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmserve.model_tokenizer import ModelTokenizer, tokenizer_of
from llmserve.simulated_model import complete_until, detokenize, digest_of, generate
from llmserve.text import SimulatedTokenizer, StopStrings, Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """The folder of a model whose tokens are bytes: each character of three bytes is three ids."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def parts_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> tuple[str, int]:
    """Text of ids that come in parts, and the number of those whose text was complete."""
    decoder, text, done, complete = tokenizer.decoder([]), "", 0, 0
    for size in [*sizes, len(ids)]:
        more = ids[done : done + size]
        shown, count = decoder.add(more)
        complete = done + count if count else complete
        text, done = text + shown, done + len(more)
    return text + decoder.end(), complete


@given(st.integers(0, 1 << 30), st.lists(st.integers(1, 5), max_size=20))
def test_the_text_of_a_simulated_answer_does_not_depend_on_how_it_comes(seed, sizes):
    ids, _ = generate(digest_of([seed]), 40)
    assert parts_of(SimulatedTokenizer(), ids, sizes) == (detokenize(ids), complete_until(ids))


@given(st.text(min_size=1, max_size=20), st.lists(st.integers(1, 5), max_size=20))
def test_the_text_of_a_model_does_not_depend_on_how_it_comes(byte_model, text, sizes):
    tokenizer = ModelTokenizer(byte_model)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode("utf-8"))
    assert parts_of(tokenizer, ids, sizes) == (text, len(ids))


def test_ids_within_a_character_are_forgotten_at_a_move(byte_model):
    tokenizer = ModelTokenizer(byte_model)
    ids = tokenizer.encode("ab€")
    decoder = tokenizer.decoder([])
    assert decoder.add(ids[:4]) == ("ab", 2)
    decoder.rewind()
    assert decoder.add(ids[2:]) == ("€", 3)


def test_an_answer_that_begins_with_a_word_has_its_space(tmp_path):
    """Decoders such as that of Llama 2 leave out the space before their first word."""
    from transformers import PreTrainedTokenizerFast

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast.train_from_iterator(["the capital is Paris"] * 2, trainers.BpeTrainer(show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=fast).save_pretrained(tmp_path)
    tokenizer = ModelTokenizer(tmp_path)
    prompt, answer = tokenizer.encode("the capital is"), tokenizer.encode("Paris is the capital")
    decoder = tokenizer.decoder(prompt)
    assert "".join(decoder.add([token])[0] for token in answer) == " Paris is the capital"


def test_a_prompt_that_ends_within_a_character_is_no_context(byte_model):
    tokenizer = ModelTokenizer(byte_model)
    prompt, answer = tokenizer.encode("a€")[:-1], tokenizer.encode("b")
    assert tokenizer.decoder(prompt).add(answer) == ("b", 1)


@pytest.mark.parametrize("token", [9_999, 1 << 32, -1])
def test_a_prompt_with_an_id_that_is_not_in_the_vocabulary_is_no_context(byte_model, token):
    """Tokenizers raise errors for some of these ids, and leave others out."""
    tokenizer = ModelTokenizer(byte_model)
    prompt, answer = [*tokenizer.encode("a"), token], tokenizer.encode("b€")
    decoder = tokenizer.decoder(prompt)
    assert decoder.add(answer[:2]) == ("b", 1)
    assert decoder.add(answer[2:]) == ("€", 2)


def test_a_chat_has_the_form_of_the_model(byte_model):
    tokenizer = ModelTokenizer(byte_model)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.encode_chat(messages) == tokenizer.encode("[user]Hi[assistant]")
    with pytest.raises(ValueError, match="no tools here"):
        tokenizer.encode_chat([{"role": "tool", "content": "Hi"}])


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer"):
        tokenizer_of(str(tmp_path))
    assert isinstance(tokenizer_of("simulated"), SimulatedTokenizer)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), max_size=30),
)
def test_an_answer_ends_at_the_first_stop_string(text, stops, sizes):
    matcher, shown, done = StopStrings(stops), "", 0
    for size in [*sizes, len(text)]:
        # What was shown before is not taken back.
        shown, done = shown + matcher.add(text[done : done + size]), done + size
        assert text.startswith(shown)
    if not matcher.has_stopped:
        shown += matcher.end()
    assert matcher.has_stopped == any(stop in text for stop in stops)
    if not matcher.has_stopped:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
