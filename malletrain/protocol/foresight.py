"""The message of a daemon with forecasts of gaps to the agent of a job's first node."""

from __future__ import annotations

from malletrain.protocol.message import Message


class ExpectLoss(Message, frozen=True):
    """A node of the job is lost after ``in_s`` seconds on average; the job can adapt how often it
    saves. Infinite: no loss is expected.
    """

    job: str
    in_s: float
