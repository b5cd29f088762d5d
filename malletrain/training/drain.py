"""After a snapshot on demand: say so, and do nothing more, because what would be done now would be
lost.

Decides how long to stand still and how often to say so. Standard library only.
"""

from __future__ import annotations

import time

from malletrain.protocol.worker_channel import Drained, FlagsReader
from malletrain.training import report

RESEND_S = 0.5
_POLL_S = 0.005


def stand_still(flags: FlagsReader, number: int, limit_s: float) -> int:
    """Answer the drain request ``number`` and wait until it is taken back or the launcher ends this
    process; after ``limit_s`` go on.

    Returns the newest request that was answered.
    """
    deadline = time.monotonic() + limit_s
    served, repeat = number, 0.0
    while number and time.monotonic() < deadline:
        if (
            time.monotonic() >= repeat
        ):  # again and again: the datagram may be lost, the launcher waits for it
            report.send(Drained, number=number, saved=True)
            repeat = time.monotonic() + RESEND_S
        time.sleep(_POLL_S)
        latest = flags.drain_request()
        if (
            latest != number
        ):  # taken back, or asked again: what is on disk still is the state of this moment
            number, repeat = latest, 0.0
            served = latest or served
    if number:
        report.tell(
            f"Stood still for {limit_s:.0f} s after a snapshot on demand, but nobody came; "
            "training goes on."
        )
    return served
