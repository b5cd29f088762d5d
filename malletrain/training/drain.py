"""The drain wait: after a snapshot on demand, a worker reports it and waits to be stopped, because
further steps would be lost.

Decides how long to wait and how often to report. Open files and experiment trackers are flushed
before the process is stopped. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.worker_channel import DrainDone
from malletrain.training import open_files, report, tracking

DRAIN_WAIT_S = 60.0
"""Maximum time for which a worker waits to be stopped, seconds."""
RESEND_S = 0.5
"""Time between two reports of the same snapshot, seconds."""
_POLL_S = 0.005


def wait_to_be_stopped(
    flags: FlagsReader,
    number: int,
    limit_s: float | None = None,
    again: Callable[[int], bool] = lambda number: True,
) -> int:
    """Answer a drain request, and wait until it is withdrawn or the launcher stops this process.

    Args:
        flags: the agent's flags.
        number: number of the request.
        limit_s: maximum time to wait, seconds. Default: DRAIN_WAIT_S.
        again: called with the number of a later request; returns whether the current state is on
            the nodes, or on the disk, that this request needs.

    Returns:
        The number of the newest request that was answered.
    """
    limit_s = DRAIN_WAIT_S if limit_s is None else limit_s
    open_files.flush()
    tracking.flush_rows()
    with tracking.finish_wandb_on_sigterm():
        return _wait(flags, number, limit_s, again)


def _wait(flags: FlagsReader, number: int, limit_s: float, again: Callable[[int], bool]) -> int:
    deadline = time.monotonic() + limit_s
    served, repeat, saved = number, 0.0, True
    while number and time.monotonic() < deadline:
        # repeatedly: a datagram may be lost, and the launcher waits for it
        if time.monotonic() >= repeat:
            reached(FaultPoint.WORKER_SAVED)
            report.send(DrainDone, number=number, saved=saved)
            reached(FaultPoint.WORKER_DRAINED)
            repeat = time.monotonic() + RESEND_S
        time.sleep(_POLL_S)
        latest = flags.drain_request()
        # withdrawn, or requested again: the saved state is still the current one
        if latest != number:
            number, repeat = latest, 0.0
            served = latest or served
            saved = again(latest) if latest else saved
    if number:
        report.tell(
            f"Waited {limit_s:.0f} s to be stopped after a snapshot on demand, but the launcher "
            "did not stop this process; training goes on."
        )
    return served
