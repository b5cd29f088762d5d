"""A simulated model without weights: the next id is a hash of all ids before it. Pure.

This makes errors visible: a continued answer must equal the uninterrupted one byte by byte, and an
answer that was continued from a wrong id differs in all further ids. Some ids are the first half of
a character, like some tokens of a byte-level tokenizer: the text is complete only after the next
id.

The text of an id is a space and its number; a character of two ids is written ``first·second``. So
:func:`tokenize` recovers the ids of generated text; other text has one id for each byte.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence

VOCABULARY = 32_000
HALF_CHARACTER = 16
"""One of this many ids is the first half of a character."""
_FACTOR = 2_654_435_761
"""Factor of Knuth's multiplicative hash, because the checksum alone is linear in the ids."""


def digest_of(ids: Sequence[int], digest: int = 0) -> int:
    """Return the state of the model after ``ids``, which follow those of ``digest``."""
    return zlib.crc32(array("I", ids).tobytes(), digest)


def next_token(digest: int) -> int:
    """Return the id that follows in a state."""
    return (digest * _FACTOR >> 7) % VOCABULARY


def generate(digest: int, count: int) -> tuple[list[int], int]:
    """Return ``count`` ids that follow, and the state after them."""
    ids = []
    for _ in range(count):
        token = next_token(digest)
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        ids.append(token)
    return ids, digest


def complete_until(ids: Sequence[int], *, whole: bool = True) -> int:
    """Return the number of the first ids up to the last one after which the text is complete.

    Args:
        ids: the newest ids of an answer.
        whole: whether the text before them is complete.
    """
    if not len(ids):
        return 0
    last = 0
    for number, token in enumerate(ids, 1):
        whole = not whole or token % HALF_CHARACTER != HALF_CHARACTER - 1
        if whole:
            last = number
    return last


_GENERATED = re.compile(r" (0|[1-9]\d{0,4})(?:·(0|[1-9]\d{0,4}))?(?!\d)")


def detokenize(ids: Sequence[int]) -> str:
    """Return the text of generated ids, which begin with a whole character."""
    parts, first = [], None
    for token in ids:
        if first is not None:
            parts.append(f" {first}·{token}")
            first = None
        elif token % HALF_CHARACTER == HALF_CHARACTER - 1:
            first = token
        else:
            parts.append(f" {token}")
    if first is not None:  # the answer ends within a character
        parts.append(f" {first}")
    return "".join(parts)


def tokenize(text: str) -> list[int]:
    """Return the ids of a text."""
    ids, position = [], 0
    for match in _GENERATED.finditer(text):
        numbers = [int(number) for number in match.groups() if number is not None]
        if max(numbers) >= VOCABULARY:
            continue
        ids += _bytes(text[position : match.start()])
        ids += numbers
        position = match.end()
    return ids + _bytes(text[position:])


def _bytes(text: str) -> list[int]:
    return [VOCABULARY + byte for byte in text.encode("utf-8", "surrogatepass")]
