"""The stop wait: after the snapshot that a drain requests, a worker reports it and waits to be
stopped, because further steps would be lost. Standard library only.

:func:`wait_to_be_stopped` decides how long to wait and how often to report. Open files and
experiment trackers are flushed before the process is stopped.

:func:`flush` flushes the files that the script has open for writing, at each snapshot. A process
that is stopped for a rescale ends by a signal, and loses the content of Python's buffers. A row in
such a buffer would be missing, because the process that resumes from the snapshot does not write it
again. It decides which files are flushed: regular files that Python's own file objects write to.
Temporary files without a name are not flushed, because they end with the process.
:class:`StepFlush` does the same at each step on the ranks that take no snapshot: they do not know
which step is the last one before they are stopped.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.worker_channel import DrainDone
from malletrain.training import report, tracking

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
LOOK_S = 1.0
"""Time between two looks for open files, seconds."""
_MAX_OUTPUT_DESCRIPTOR = 2
"""Highest descriptor of standard output and standard error, which MalleTrain flushes elsewhere."""


def flush() -> None:
    """Flush all open files of this process. Errors, such as a full disk, are ignored: the script
    gets them itself. Takes about 20 ms if a file is open, else almost nothing.
    """
    for file in _writers(set(_written_files())):
        with contextlib.suppress(Exception):
            file.flush()


class StepFlush:
    """Flushes the files that the script has open for writing at each step. Takes about a
    microsecond for each file, and 20 ms after the script has opened or closed one.
    """

    def __init__(self) -> None:
        self._look_at = 0.0
        """Time (monotonic, seconds) at which open files are looked up again."""
        self._open: dict[int, int] = {}
        self._files: list[IO[Any]] = []

    def after_step(self) -> None:
        """Flush the files."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            if (files := _written_files()) != self._open:
                self._open, self._files = files, _writers(set(files))
        for file in self._files:
            with contextlib.suppress(Exception):
                file.flush()


def _writers(descriptors: set[int]) -> list[IO[Any]]:
    """Return the file objects that write to ``descriptors``."""
    if not descriptors:
        return []
    writers: list[IO[Any]] = []
    kinds = _kinds_of_writers()
    # isinstance() would call proxies of other packages, and takes several times as long
    for file in [each for each in gc.get_objects() if type(each) in kinds]:
        with contextlib.suppress(Exception):
            if not file.closed and file.fileno() in descriptors:
                writers.append(file)
    return writers


def _kinds_of_writers() -> set[type[Any]]:
    """Return the classes of file objects that write, and all classes derived from them."""
    kinds: set[type[Any]] = set()
    further: list[type[Any]] = list(_WRITERS)
    while further:
        kind = further.pop()
        if kind not in kinds:
            kinds.add(kind)
            further += kind.__subclasses__()
    return kinds


def _written_files() -> dict[int, int]:
    """Return the regular files with a name that are open for writing: inode by descriptor."""
    files = {}
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        with contextlib.suppress(OSError, ValueError, StopIteration):
            status = os.fstat(number)
            if (
                number > _MAX_OUTPUT_DESCRIPTOR
                and stat.S_ISREG(status.st_mode)
                and status.st_nlink > 0
                and _is_writable(number)
            ):
                files[number] = status.st_ino
    return files


def _is_writable(number: int) -> bool:
    """Return whether the descriptor is open for writing."""
    lines = Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
    flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


STOP_WAIT_S = 60.0
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
        limit_s: maximum time to wait, seconds. Default: STOP_WAIT_S.
        again: called with the number of a later request; returns whether the saved state is
            where that request needs it (on other nodes, or on the disk).

    Returns:
        The number of the newest request that was answered.
    """
    limit_s = STOP_WAIT_S if limit_s is None else limit_s
    flush()
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
