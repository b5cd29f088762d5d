"""A model that needs no weights: the next id is a hash of all ids before it. Pure.

So an answer that was continued can be compared with the undisturbed one byte by byte, and one that
was continued from the wrong id differs in all ids that follow. Some ids are the first half of a
character, as the tokens of a byte-level tokeniser may be: the text is complete only after the id
that follows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

VOCABULARY = 32_000
HALF_CHARACTER = 16
"""One of so many ids is the first half of a character."""
_FACTOR = 2_654_435_761
"""Knuth's multiplicative hash: the checksum alone is linear in the ids."""


def digest_of(ids: Sequence[int], digest: int = 0) -> int:
    """Returns the state of the model after ``ids``, which follow those of ``digest``."""
    return zlib.crc32(array("I", ids).tobytes(), digest)


def next_token(digest: int) -> int:
    """Returns the id that follows in a state."""
    return (digest * _FACTOR >> 7) % VOCABULARY


def generate(digest: int, count: int) -> tuple[list[int], int]:
    """Returns ``count`` ids that follow, and the state after them."""
    ids = []
    for _ in range(count):
        token = next_token(digest)
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        ids.append(token)
    return ids, digest


def complete_until(ids: Sequence[int], *, whole: bool = True) -> int:
    """Returns the number of ids after which the text was complete the last time.

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
