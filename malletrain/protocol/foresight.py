"""What a daemon that foretells how long nodes last tells the agent of a job's first node."""

from __future__ import annotations

from malletrain.protocol.message import Message


class ExpectLoss(Message, frozen=True):
    """On average a node of the job is lost after ``in_s`` seconds: it may save the more often.
    Infinite: none is expected.
    """

    job: str
    in_s: float
