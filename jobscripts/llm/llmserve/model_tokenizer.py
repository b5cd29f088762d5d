"""The tokenizer of a real model, from its folder. Needs ``transformers`` (extra ``models``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.text import AnswerDecoder, SimulatedTokenizer, Tokenizer

SIMULATED = "simulated"
"""Name of the tokenizer of the simulated engine."""
INCOMPLETE = "\ufffd"
"""Character that tokenizers return for an incomplete character."""
PROMPT_IDS = 5
"""Number of last ids of a prompt with which an answer is decoded, as in vLLM. Tokenizers such as
that of Llama 2 drop the space before the first word that they decode.
"""


class ModelTokenizer:
    """The tokenizer of a model.

    Args:
        folder: folder of the model, with the files of its tokenizer. Nothing is downloaded.

    Raises:
        ValueError: there is no tokenizer, or ``transformers`` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ValueError(
                "The tokenizer of a model needs transformers. In the clone: "
                "pip install -e 'jobscripts/llm[models]'"
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no tokenizer that can be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, including the special tokens with which prompts begin."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat, by the model's template.

        Raises:
            ValueError: the model has no template, or it refuses these messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the model's authors
            raise ValueError(str(error)) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decoder(self, prompt: Sequence[int]) -> AnswerDecoder:
        """Return a decoder for one answer."""
        return _WindowDecoder(self._tokenizer, prompt[-PROMPT_IDS:])


class _WindowDecoder:
    """Decodes a window of ids twice, without and with the newest ids; the difference is their text.
    This keeps the spaces between words, and the cost does not grow with the answer.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(before)
        """The window: the context, then ids whose text is not complete yet."""
        try:
            is_complete = not self._decode(self._ids).endswith(INCOMPLETE)
        except Exception:  # a prompt of ids may have some that are not in the vocabulary
            is_complete = False
        if not is_complete:
            self._ids.clear()
        self._context = len(self._ids)
        """Number of ids of the window whose text is known."""

    def add(self, ids: Sequence[int]) -> tuple[str, int]:
        parts, complete = [], 0
        for number, token in enumerate(ids, 1):
            self._ids.append(token)
            before = self._decode(self._ids[: self._context])
            text = self._decode(self._ids)
            if text.endswith(INCOMPLETE):
                continue
            parts.append(text[len(before) :])
            complete = number
            # The ids of the previous text are the context of the next.
            del self._ids[: self._context]
            self._context = len(self._ids)
        return "".join(parts), complete

    def rewind(self) -> None:
        del self._ids[self._context :]

    def end(self) -> str:
        before = self._decode(self._ids[: self._context])
        text = self._decode(self._ids)[len(before) :]
        self._context = len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def tokenizer_of(name: str) -> Tokenizer:
    """Return a tokenizer: ``simulated``, or the folder of a model.

    Raises:
        ValueError: there is none.
    """
    return SimulatedTokenizer() if name == SIMULATED else ModelTokenizer(name)
