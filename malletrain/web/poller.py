"""What the page asks of the daemon for all its viewers: its state, polled once for all of them, and
their requests, over a few connections.

:class:`Poller` polls in a thread of its own, and decides how often. While viewers watch, it polls
every second, and less often if a poll takes the daemon long. So the page takes at most a small
fraction of the daemon's time, for any number of viewers.

:class:`Board` holds the answers and the changes of each poll. It is used only from the server's
event loop. :mod:`malletrain.web.guard` decides what a viewer may see.

:class:`ConnectionPool` runs requests in threads. Equal requests at the same time share one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from malletrain.client import ClientError, Connection
from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.live import Follower, PollAnswers, Screen
from malletrain.web.history import NodeTimeline, SeenHistory

WATCHED_S = 1.0
"""Interval between two polls while viewers watch, seconds."""
UNWATCHED_S = 10.0
"""Interval between two polls without viewers, seconds. They continue the timeline of the nodes."""
MAX_POLL_FRACTION = 0.03
"""Maximum fraction of the time that is spent on polls."""
MAX_INTERVAL_S = 20.0
"""Maximum interval between two polls, seconds."""
HARVEST_EVERY_S = 60.0
"""Interval between two queries of the day's usage, seconds."""
RETRY_INTERVAL_S = 0.5
"""Interval between two tries to reach a daemon that does not answer, seconds."""
DAY_S = 86400.0
MAX_CHANGES = 60
"""Number of changes that are kept for viewers that are behind. A viewer that is further behind gets
everything again.
"""
MAX_EVENTS = 1000
"""Number of events that are kept."""


def rest_s(took_s: float, watched: bool) -> float:
    """Return the pause after a poll that took ``took_s``, seconds."""
    min_pause_s = WATCHED_S if watched else UNWATCHED_S
    return min(MAX_INTERVAL_S, max(min_pause_s, took_s / MAX_POLL_FRACTION - took_s))


class Poller(threading.Thread):
    """Polls until :meth:`end` is called.

    Args:
        connect: opens a connection to the daemon; raises ClientError.
        tell: called with the answers of a poll and the harvest of the day.
        away: called with a sentence that says why a poll failed.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        tell: Callable[[PollAnswers, HarvestView | None], None],
        away: Callable[[str], None],
    ) -> None:
        super().__init__(name="poller", daemon=True)
        self._connect, self._tell, self._away = connect, tell, away
        self._poll_now = threading.Event()
        self._ended = False
        self._watchers = 0
        self._harvest: HarvestView | None = None
        self._harvest_due = 0.0
        self._since: int | None = None

    def run(self) -> None:
        """Poll until :meth:`end` is called."""
        while not self._ended:
            try:
                client = self._connect()
            except ClientError as error:
                self._poll_failed(error)
                continue
            try:
                self._follow(client)
            except ClientError as error:
                self._poll_failed(error)
            finally:
                client.close()

    def _follow(self, client: Connection) -> None:
        follower = Follower(Screen(), client)
        # The whole audit log of an old site would take long.
        follower.since = -1000 if self._since is None else self._since
        while not self._ended:
            started_at = time.monotonic()
            answers = follower.ask()
            self._since = max(0, follower.since)
            took_s = time.monotonic() - started_at
            self._tell(answers, self._current_harvest(client, answers.status.now))
            self._pause(rest_s(took_s, self._watchers > 0))

    def _current_harvest(self, client: Connection, now: float) -> HarvestView | None:
        if time.monotonic() >= self._harvest_due:
            midnight = now - now % DAY_S
            rows = client.usage(since=midnight)
            self._harvest = HarvestView(
                midnight, sum(row.leased_nh for row in rows), sum(row.trained_nh for row in rows)
            )
            self._harvest_due = time.monotonic() + HARVEST_EVERY_S
        return self._harvest

    def _poll_failed(self, error: ClientError) -> None:
        self._away(str(error))
        self._pause(RETRY_INTERVAL_S)

    def _pause(self, seconds: float) -> None:
        self._poll_now.wait(seconds)
        self._poll_now.clear()

    def watched(self, more: int) -> None:
        """Change the number of viewers by ``more``."""
        self._watchers += more
        if more > 0:
            self.now()

    def now(self) -> None:
        """Poll at once."""
        self._poll_now.set()

    def end(self) -> None:
        """Stop polling."""
        self._ended = True
        self._poll_now.set()


def connector(state_dir: Path | None) -> Callable[[], Connection]:
    """Return a function that connects to the daemon of ``state_dir``. Each call looks up its
    address, because it may have moved.
    """
    return lambda: Connection.of(state_dir)


class HarvestView(msgspec.Struct, frozen=True):
    """Node-hours since midnight (UTC): leased, and the part of them in which samples were
    processed.
    """

    since: float
    """Midnight (UTC), seconds since the epoch."""
    leased_nh: float
    """Leased node-hours."""
    trained_nh: float
    """Node-hours in training."""


class MachineView(msgspec.Struct, frozen=True):
    """The daemon at a glance. ``away``: why it does not answer, as a sentence; empty if it does.
    ``looked``: time of its last answer. ``user``: the viewer. ``own``: user as whom the page runs.
    """

    status: StatusView | None
    """The daemon's status; None before the first poll."""
    away: str
    looked: float | None
    harvest: HarvestView | None
    """Node-hours of the day; None before the first poll."""
    user: str
    own: str


class BoardChange(msgspec.Struct, frozen=True):
    """Difference between ``version`` and the previous version. ``full``: whether it has everything.

    ``gone``, ``nodes_gone``: ids of jobs and names of nodes that no longer exist.
    """

    version: int
    full: bool
    machine: MachineView
    """The daemon at a glance."""
    jobs: tuple[JobView, ...] = ()
    """New and changed jobs."""
    gone: tuple[str, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    """New and changed nodes."""
    nodes_gone: tuple[str, ...] = ()
    events: tuple[EventView, ...] = ()
    """New events."""


class Board:
    """The last poll and the last changes. ``own``: user as whom the daemon is polled."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.machine = MachineView(None, "", None, None, own, own)
        self.jobs: dict[str, JobView] = {}
        self.nodes: dict[str, NodeView] = {}
        self.events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self.timeline = NodeTimeline()
        self.history = SeenHistory()
        self.version = 0
        self.over = False
        """Whether the server ends, so that streams have to end."""
        self._changes: deque[BoardChange] = deque(maxlen=MAX_CHANGES)
        self._news = asyncio.Event()

    # --- updates of the poller ---

    def update(self, answers: PollAnswers, harvest: HarvestView | None) -> None:
        """Take over the answers of a poll."""
        now = answers.status.now
        jobs = {job.id: job for job in answers.jobs}
        nodes = {node.node: node for node in answers.nodes}
        self.timeline.feed(answers.events, answers.nodes, now)
        self.history.feed(answers.jobs, now)
        self.machine = msgspec.structs.replace(
            self.machine, status=answers.status, away="", looked=now, harvest=harvest
        )
        change = BoardChange(
            self.version + 1,
            False,
            self.machine,
            tuple(job for job in answers.jobs if self.jobs.get(job.id) != job),
            tuple(sorted(self.jobs.keys() - jobs.keys())),
            tuple(node for node in answers.nodes if _differs(self.nodes.get(node.node), node)),
            tuple(sorted(self.nodes.keys() - nodes.keys())),
            tuple(answers.events),
        )
        self.jobs, self.nodes = jobs, nodes
        self.events.extend(answers.events)
        self._publish(change)

    def away(self, sentence: str) -> None:
        """Record that the daemon does not answer. Its last answers stay."""
        if sentence == self.machine.away:
            return
        self.machine = msgspec.structs.replace(self.machine, away=sentence)
        self._publish(BoardChange(self.version + 1, False, self.machine))

    def end(self) -> None:
        """End the streams, because the server ends."""
        self.over = True
        self._news.set()

    def _publish(self, change: BoardChange) -> None:
        self.version = change.version
        self._changes.append(change)
        self._news.set()
        self._news = asyncio.Event()

    # --- queries of viewers ---

    def everything(self, events: int = 100) -> BoardChange:
        """Return everything, with the newest ``events`` events."""
        newest = list(self.events)[-events:]
        return BoardChange(
            self.version,
            True,
            self.machine,
            tuple(self.jobs.values()),
            (),
            tuple(self.nodes.values()),
            (),
            tuple(newest),
        )

    def since(self, version: int) -> Sequence[BoardChange]:
        """Return the changes after ``version``; everything if some of them are no longer kept."""
        if version == self.version:
            return ()
        if version > self.version or not self._changes or self._changes[0].version > version + 1:
            return (self.everything(),)
        return [change for change in self._changes if change.version > version]

    async def news(self, version: int, within_s: float) -> bool:
        """Wait for a version after ``version``, ``within_s`` seconds at most. Return whether there
        is one.
        """
        if self.version == version and not self.over:
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait({news}, timeout=within_s)
            finally:
                news.cancel()
        return self.version != version


def _differs(before: NodeView | None, now: NodeView) -> bool:
    """Whether a node has changed for viewers. Its horizon and its memory are ignored, because they
    change all the time.
    """
    return before is None or (
        (before.state, before.job, before.lease, before.owner, before.gone_in_s is None)
        != (now.state, now.job, now.lease, now.owner, now.gone_in_s is None)
    )


MAX_CONNECTIONS = 4
"""Maximum number of connections to the daemon."""
CACHE_TTL_S = 1.0
"""Time for which an answer is reused for equal requests, seconds."""

T = TypeVar("T")


class ConnectionPool:
    """Pool of connections to one daemon. ``connect`` opens one and may raise ClientError."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: queue.LifoQueue[Connection] = queue.LifoQueue()
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="call")
        self._closed = False
        self._cache: dict[Hashable, tuple[float, asyncio.Task[object]]] = {}

    async def run(self, call: Callable[[Connection], T]) -> T:
        """Run ``call`` in a thread with a connection, and return its result. Its exceptions
        propagate.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, self._run_in_thread, call
        )

    async def run_cached(self, key: Hashable, call: Callable[[Connection], T]) -> T:
        """Like :meth:`run`, but calls with the same ``key`` within CACHE_TTL_S share one result."""
        now = time.monotonic()
        self._cache = {
            k: (expires_at, task)
            for k, (expires_at, task) in self._cache.items()
            if expires_at > now or not task.done()
        }
        if key not in self._cache:
            task = asyncio.ensure_future(self.run(call))
            self._cache[key] = (now + CACHE_TTL_S, cast("asyncio.Task[object]", task))
        # A caller that is cancelled must not cancel the call for the others.
        return cast(T, await asyncio.shield(self._cache[key][1]))

    def close(self) -> None:
        """Close all connections. Those in use are closed when their call ends."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.close_idle()

    def close_idle(self) -> None:
        """Close all idle connections, because the daemon was unreachable and may have moved. Later
        calls open new ones.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def _run_in_thread(self, call: Callable[[Connection], T]) -> T:
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = self._connect()
        try:
            result = call(connection)
        except ClientError as error:
            if error.code == "unreachable":
                connection.close()
            else:
                self._release(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._release(connection)
        return result

    def _release(self, connection: Connection) -> None:
        self._idle.put(connection)
        if self._closed:
            self.close_idle()
