"""Holds the daemon's last answers for all viewers, who share one poll, and the changes of each
poll.

:mod:`malletrain.web.guard` decides what a viewer may see. Used only from the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.live import PollAnswers
from malletrain.web.history import NodeTimeline, SeenHistory

MAX_CHANGES = 60
"""Number of changes that are kept for viewers that are behind. A viewer that is further behind gets
everything again.
"""
MAX_EVENTS = 1000
"""Number of events that are kept."""


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
