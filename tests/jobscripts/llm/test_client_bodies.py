"""What clients ask for: read, and refused with a sentence."""

from __future__ import annotations

import json

import pytest
from llmserve.client_bodies import CHAT, COMPLETIONS, ClientOrder, read_client_body
from llmserve.openai_messages import ApiRefusal
from llmserve.text import SimulatedTokenizer

TOKENIZER = SimulatedTokenizer()
HI = [{"role": "user", "content": "Hi"}]


def read(body: object, path: str = COMPLETIONS, limit: int | None = None) -> ClientOrder:
    if isinstance(body, dict):
        body = json.dumps({"model": "m", **body}).encode()
    return read_client_body(
        body, path, models=("m",), tokenizer=TOKENIZER, max_request_tokens=limit
    )


def test_a_completion_is_ids_and_fields_for_the_engine():
    order = read({"prompt": "Hi", "temperature": 0, "stop": ["x"], "user": "u", "stream": True})
    assert order.prompt == TOKENIZER.encode("Hi")
    assert (order.max_tokens, order.stream, order.continuable) == (16, True, True)
    assert order.parameters == {"temperature": 0, "stop": ["x"]}
    request = order.request("r", "alice", "chatbot", interaction="i")
    assert (request.user, request.application, request.interaction) == ("alice", "chatbot", "i")
    assert request.stream
    assert read({"prompt": [1, 2], "max_tokens": 7}).prompt == [1, 2]


def test_a_chat_is_ids():
    order = read({"messages": HI, "max_completion_tokens": 5, "max_tokens": 9}, CHAT)
    assert order.prompt == TOKENIZER.encode_chat(HI)
    assert (order.max_tokens, order.is_chat) == (5, True)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert read({"messages": parts}, CHAT).prompt == order.prompt
    assert read({"messages": HI}, CHAT).max_tokens == 256


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("logprobs", 0),
        ("logprobs", True),
        ("tools", [{}]),
        ("guided_regex", "a"),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
    ],
)
def test_what_cannot_be_continued_goes_whole(field, value):
    order = read({"prompt": "Hi", field: value, "stream": True})
    assert not order.continuable
    assert order.body[field] == value
    assert not order.request("r", "alice").stream


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("bad_words", ["two words"]),
        ("repetition_detection", {"max_pattern_size": 8}),
    ],
)
def test_what_looks_at_generated_ids_only_is_continued_in_streams(field, value):
    """An answer that is not streamed starts again, so it is as an undisturbed one."""
    fields = {"prompt": "Hi", field: value}
    assert not read(fields).continuable
    order = read({**fields, "stream": True})
    assert (order.continuable, order.parameters) == (True, {field: value})
    assert order.request("r", "alice").stream


def test_several_choices_count_each():
    order = read({"prompt": "Hi", "n": 3, "best_of": 2, "max_tokens": 5}, limit=50)
    assert (order.max_tokens, order.tokens - len(order.prompt)) == (5, 15)
    assert order.request("r", "alice").tokens == order.tokens
    with pytest.raises(ApiRefusal, match="the answer up to 60; the maximum of both together is 50"):
        read({"prompt": "Hi", "n": 3, "max_tokens": 20}, limit=50)
    for number in ("8", 8.0, 0, True):
        with pytest.raises(ApiRefusal, match=r"best_of is .*; it must be a whole number"):
            read({"prompt": "Hi", "n": 1, "best_of": number})


@pytest.mark.parametrize(("fields", "tokens"), [({}, 256), ({"max_completion_tokens": 7}, 7)])
def test_a_body_that_goes_whole_has_the_length_that_is_counted(fields, tokens):
    """An engine would fill its whole context by default."""
    assert read({"messages": HI, "n": 2, **fields}, CHAT).body["max_tokens"] == tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("presence_penalty", None),
        ("bad_words", []),
    ],
)
def test_what_changes_nothing_is_continued(field, value):
    assert read({"prompt": "Hi", field: value}).continuable


def test_a_penalty_that_counts_the_prompt_too_is_continued():
    order = read({"prompt": "Hi", "repetition_penalty": 1.2})
    assert (order.continuable, order.parameters) == (True, {"repetition_penalty": 1.2})


@pytest.mark.parametrize(
    ("body", "path", "sentence"),
    [
        (b"{", COMPLETIONS, "The body is not JSON"),
        (b"[]", COMPLETIONS, "The body is not a JSON object"),
        (b"{}", COMPLETIONS, "names no model"),
        ({"model": "other", "prompt": "Hi"}, COMPLETIONS, "no model 'other'; served: m"),
        ({}, COMPLETIONS, "has no prompt"),
        ({"prompt": ""}, COMPLETIONS, "The prompt is empty"),
        ({"prompt": ["a", "b"]}, COMPLETIONS, "Send several"),
        ({"prompt": [-1]}, COMPLETIONS, "Send several"),
        ({"prompt": "Hi", "max_tokens": 0}, COMPLETIONS, "max_tokens is 0"),
        ({"prompt": "Hi", "max_tokens": "9"}, COMPLETIONS, "max_tokens is '9'"),
        ({"prompt": "Hi", "stream": 1}, COMPLETIONS, "stream is 1"),
        ({"prompt": "Hi", "stop": [1]}, COMPLETIONS, "stop is neither"),
        ({"prompt": "Hi", "stream_options": 1}, COMPLETIONS, "stream_options is not an object"),
        ({"prompt": "Hi", "max_tokens": 99}, COMPLETIONS, "the maximum of both together is 100"),
        ({"messages": []}, CHAT, "has no messages"),
        ({"messages": ["Hi"]}, CHAT, "Message 1 has no role"),
        ({"messages": [{"role": "user", "content": 1}]}, CHAT, "content of message 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            CHAT,
            "send only text",
        ),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence(body, path, sentence):
    with pytest.raises(ApiRefusal, match=sentence.replace("(", "\\(")) as refusal:
        read(body, path, limit=100)
    assert refusal.value.status == (404 if "other" in sentence else 400)
