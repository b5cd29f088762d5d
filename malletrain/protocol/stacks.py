"""Where the workers of a job stand: asked by the daemon of one that hangs, and answered by its
agents for each worker that lives.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import Count, Id, Sentence
from malletrain.protocol.message import Message

MOST_BYTES = 8192
MOST_WORKERS = 16
"""Workers whose stacks one node sends, and one event keeps."""


class ShowStacks(Message, frozen=True):
    """Have each worker of this round say where it stands; answer Stacks for each."""

    job: str
    generation: int


class Stacks(Message, frozen=True):
    """Where one worker stands. ``state``: what the kernel says of it, where it is not running or
    sleeping; ``text``: the stacks of its threads, the innermost frame first; empty: it gave none.
    """

    job: Id
    generation: Count
    rank: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)]
    """-1: it has not reported, so that its rank is not known."""
    pid: Count
    state: Sentence = ""
    text: Annotated[str, msgspec.Meta(max_length=MOST_BYTES)] = ""
