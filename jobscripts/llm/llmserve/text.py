"""Converts between text and ids: the interface of tokenizers, the tokenizer of the simulated
engine, and stop strings. Pure. ``model_tokenizer`` has the tokenizer of real models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from llmserve.openai_messages import ChatMessage, chat_text
from llmserve.simulated_model import complete_until, detokenize, tokenize


class AnswerDecoder(Protocol):
    """Decodes the ids of one answer as they are generated. The text may be incomplete after an id,
    because a character can have several ids.
    """

    def add(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add ids. Return the text that is complete now, and the number of ``ids`` up to the last
        one after which the text was complete; 0 if it was complete after none of them.
        """
        ...

    def rewind(self) -> None:
        """Forget the newest ids, whose text is not complete: other ids will follow."""
        ...

    def end(self) -> str:
        """Return the text of the newest ids, whose text is not complete: no ids will follow."""
        ...


class Tokenizer(Protocol):
    """The tokenizer of a model. Used in one thread."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat, up to where the answer begins.

        Args:
            messages: each with ``role`` and ``content``, as in the OpenAI API.

        Raises:
            ValueError: the model has no template for chats, or it refuses these messages.
        """
        ...

    def decoder(self, prompt: Sequence[int]) -> AnswerDecoder:
        """Return a decoder for one answer.

        Args:
            prompt: ids that the answer follows.
        """
        ...


class SimulatedTokenizer:
    """The tokenizer of the simulated engine."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        return tokenize(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat."""
        return tokenize(
            chat_text([ChatMessage(str(m["role"]), m.get("content")) for m in messages])
        )

    def decoder(self, prompt: Sequence[int]) -> AnswerDecoder:
        """Return a decoder for one answer."""
        return _SimulatedDecoder()


class _SimulatedDecoder:
    def __init__(self) -> None:
        self._rest: list[int] = []
        """Ids after which the text is not complete."""

    def add(self, ids: Sequence[int]) -> tuple[str, int]:
        complete = complete_until(ids, whole=not self._rest)
        if not complete:
            self._rest += ids
            return "", 0
        text = detokenize([*self._rest, *ids[:complete]])
        self._rest = list(ids[complete:])
        return text, complete

    def rewind(self) -> None:
        self._rest = []

    def end(self) -> str:
        rest, self._rest = self._rest, []
        return detokenize(rest)


class StopStrings:
    """Ends an answer before the first occurrence of a stop string.

    The dispatcher applies stop strings, and not the engine: an engine that continues an answer does
    not see the text before, and a string may begin before a move and end after it.

    Args:
        stops: the strings; if there are none, no answer is ended.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self.has_stopped = False
        """Whether a stop string was found."""

    def add(self, text: str) -> str:
        """Add text. Return the text that can be sent; its end cannot be the beginning of a stop
        string.
        """
        if self.has_stopped:
            return ""
        text = self._pending + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._pending, self.has_stopped = "", True
            return text[: min(places)]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[shown:]
        return text[:shown]

    def clear(self) -> None:
        """Start again with a new answer."""
        self._pending, self.has_stopped = "", False

    def end(self) -> str:
        """Return the text that is not sent yet, because no more text follows."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
