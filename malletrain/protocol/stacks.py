"""Stacks of the workers of a hung job: the daemon requests them, and its agents answer for each
live worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import Count, Id, Sentence
from malletrain.protocol.message import Message

MOST_BYTES = 8192
MOST_WORKERS = 16
"""Maximum number of workers whose stacks one node sends, and one event keeps."""


class ShowStacks(Message, frozen=True):
    """Get the stacks of each worker of this round; answer Stacks for each."""

    job: str
    generation: int


class Stacks(Message, frozen=True):
    """The stacks of one worker. ``state``: its state in the kernel, if it is neither running nor
    sleeping; ``text``: the stacks of its threads, the innermost frame first; empty: it reported
    none.
    """

    job: Id
    generation: Count
    rank: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)]
    """-1: not known, because it has not reported."""
    pid: Count
    state: Sentence = ""
    text: Annotated[str, msgspec.Meta(max_length=MOST_BYTES)] = ""
