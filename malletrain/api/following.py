"""What following a job takes, without asking anybody: what to ask next, and what came of it. Pure;
:mod:`malletrain.api.job` and its asyncio twin do the asking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from malletrain.client import operations
from malletrain.client.operations import Operation
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobView, LogView

ENDED = frozenset(("completed", "failed", "cancelled"))
"""States of a job that is over."""
ENDINGS = frozenset((EventKind.JOB_COMPLETED, EventKind.JOB_FAILED, EventKind.JOB_CANCELLED))
LISTEN_S = 5.0
"""How long the daemon is asked to wait for news."""
AGAIN_S = 1.0
"""Time between two tries to reach a daemon that went away."""
PACE_S = 0.3
"""Time between two looks at a log where the daemon answers at once."""
LOG_BYTES = 256 * 1024


class Endings:
    """Which of some jobs have not ended yet. Do :meth:`request` first, then look at each
    job, then ask for news again and again.
    """

    def __init__(self, jobs: Iterable[str]) -> None:
        self.waiting = dict.fromkeys(jobs)
        """Ids of those that have not ended, as far as is known."""
        self._since = 0
        self._listening = False

    def request(self, patience_s: float) -> Operation[list[EventView]]:
        """News of jobs; at first only where the news begins."""
        if not self._listening:
            return operations.events(since=-1, limit=1)
        return operations.events(
            since=self._since, limit=1000, wait_s=max(0.0, min(LISTEN_S, patience_s))
        )

    def receive(self, news: Sequence[EventView]) -> list[str]:
        """The jobs to look at because of these news, all at first."""
        if news:
            self._since = news[-1].seq
        if not self._listening:
            self._listening = True
            return list(self.waiting)
        ended = {event.job for event in news if event.kind in ENDINGS}
        return [job for job in self.waiting if job in ended]

    def update(self, view: JobView) -> None:
        """How one of the jobs is."""
        if view.state in ENDED:
            self.waiting.pop(view.id, None)


class LogTail:
    """A log, read from its beginning on, line by line."""

    def __init__(self, job: str, stream: str, follow: bool) -> None:
        self.over = False
        """There is nothing more to read, for ever or, without following, for now."""
        self.pause_s = 0.0
        """How long to wait before the next request."""
        self._job, self._stream, self._follow = job, stream, follow
        self._cursor = ""
        self._rest = ""

    def request(self) -> Operation[LogView]:
        """The next piece."""
        waits = LISTEN_S if self._follow and self._cursor else 0.0
        return operations.logs(
            self._job, stream=self._stream, cursor=self._cursor, limit=LOG_BYTES, wait_s=waits
        )

    def receive(self, piece: LogView) -> list[str]:
        """The lines that are whole with this piece, without their line feeds."""
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
    """The name of the log of a rank, of the launcher or of a service."""
    return "launcher" if launcher else "service" if service else f"rank{rank}"


def overdue(waiting: Iterable[str], timeout: float) -> str:
    """What is said of jobs that have not ended in time."""
    names = list(waiting)
    if len(names) == 1:
        return f"Job {names[0]} has not ended within {timeout:g} s."
    return f"{len(names)} jobs have not ended within {timeout:g} s, among them {names[0]}."
