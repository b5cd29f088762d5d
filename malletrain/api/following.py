"""The logic of following a job: what to request next, and how to handle the answer. Pure;
:mod:`malletrain.api.aio` sends the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from malletrain.client import operations
from malletrain.client.operations import Operation
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobView, LogView

ENDED = frozenset(("completed", "failed", "cancelled"))
"""States of a job that has ended."""
ENDINGS = frozenset((EventKind.JOB_COMPLETED, EventKind.JOB_FAILED, EventKind.JOB_CANCELLED))
LISTEN_S = 5.0
"""Time that the daemon is asked to wait for news, seconds."""
AGAIN_S = 1.0
"""Time between two attempts to reach a daemon that is gone, seconds."""
PACE_S = 0.3
"""Time between two requests for a log if the daemon answers at once, seconds."""
LOG_BYTES = 256 * 1024


class Endings:
    """Tracks which of some jobs have not ended yet. Call :meth:`request` and :meth:`receive` in
    turn, and :meth:`update` for each job that :meth:`receive` returns. A job whose state could not
    be requested then is returned again.
    """

    def __init__(self, jobs: Iterable[str]) -> None:
        self.waiting = dict.fromkeys(jobs)
        """Ids of the jobs that are not known to have ended."""
        self._due = dict.fromkeys(self.waiting)
        """Ids of the jobs whose state has to be requested."""
        self._since = 0
        self._listening = False

    def add(self, job: str) -> None:
        """Track one more job. It may have ended already. Can be called from another thread."""
        self.waiting[job] = None
        self._due[job] = None

    def request(self, max_wait_s: float) -> Operation[list[EventView]]:
        """Return the request for news; the first one only finds the current position in
        the log."""
        if not self._listening:
            return operations.events(since=-1, limit=1)
        wait_s = 0.0 if self._due else max(0.0, min(LISTEN_S, max_wait_s))
        return operations.events(since=self._since, limit=1000, wait_s=wait_s)

    def receive(self, news: Sequence[EventView]) -> list[str]:
        """Return the jobs whose state to request after these news; all jobs at the first call."""
        if not self._listening:
            self._listening = True
            self._since = news[-1].seq if news else 0
            self._due.update(self.waiting)
        else:
            if news:
                self._since = news[-1].seq
            ended = {event.job for event in news if event.kind in ENDINGS}
            self._due.update((job, None) for job in list(self.waiting) if job in ended)
        return list(self._due)

    def update(self, view: JobView) -> None:
        """Set the state of one of the jobs."""
        self._due.pop(view.id, None)
        if view.state in ENDED:
            self.waiting.pop(view.id, None)

    def drop(self, job: str) -> None:
        """Track a job no longer."""
        self._due.pop(job, None)
        self.waiting.pop(job, None)

    def restart(self) -> None:
        """Begin again with the state of every job: the daemon was away, and its log may be another
        one, such as that of a restored database.
        """
        self._listening = False


class LogTail:
    """A log, read from its beginning, line by line.

    Args:
        job: id or name of the job.
        stream: name of the log (:func:`stream_of`).
        follow: whether to continue until the job has ended.
    """

    def __init__(self, job: str, stream: str, follow: bool) -> None:
        self.over = False
        """Whether the end of the log is reached: the final end or, without following, the current
        one."""
        self.pause_s = 0.0
        """Time to wait before the next request, seconds."""
        self._job, self._stream, self._follow = job, stream, follow
        self._cursor = ""
        self._rest = ""

    def request(self) -> Operation[LogView]:
        """Return the request for the next piece."""
        waits = LISTEN_S if self._follow and self._cursor else 0.0
        return operations.logs(
            self._job, stream=self._stream, cursor=self._cursor, limit=LOG_BYTES, wait_s=waits
        )

    def receive(self, piece: LogView) -> list[str]:
        """Return the lines that this piece completes, without their line feeds."""
        progressed = piece.cursor != self._cursor
        self._cursor = piece.cursor
        *lines, self._rest = (self._rest + piece.text).split("\n")
        self.over = not (piece.more and progressed) and (
            piece.ended or not (self._follow or piece.arriving)
        )
        self.pause_s = 0.0 if progressed else PACE_S
        if self.over and self._rest:
            lines.append(self._rest)
            self._rest = ""
        return lines


def stream_of(rank: int, launcher: bool, service: bool) -> str:
    """Return the name of a log.

    Args:
        rank: global rank of the worker.
        launcher: whether it is the launcher's log.
        service: whether it is that of a service's processes.
    """
    return "launcher" if launcher else "service" if service else f"rank{rank}"


def overdue(waiting: Iterable[str], timeout: float) -> str:
    """Return the message about jobs that have not ended in time."""
    names = list(waiting)
    if len(names) == 1:
        return f"Job {names[0]} has not ended within {timeout:g} s."
    return f"{len(names)} jobs have not ended within {timeout:g} s, among them {names[0]}."
