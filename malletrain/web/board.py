"""What the daemon said last, for all viewers: one look shared by everybody, and what changed with
each look.

Decides nothing about what a viewer may see; see :mod:`malletrain.web.viewers`. Lives in the event
loop of the server: nothing here is called from another thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from malletrain.protocol.views import EventView, JobView, NodeView, StatusView
from malletrain.render.follow import Look
from malletrain.web.history import SeenHistory
from malletrain.web.timeline import NodeTimeline

MOST_CHANGES = 60
"""Changes kept for viewers that are behind; who is further behind gets everything anew."""
MOST_EVENTS = 1000


class HarvestView(msgspec.Struct, frozen=True):
    """Node-hours since midnight (UTC): leased, and of these with samples processed."""

    since: float
    leased_nh: float
    trained_nh: float


class MachineView(msgspec.Struct, frozen=True):
    """The daemon at a glance. ``away``: why it does not answer, as a sentence; empty while it
    does. ``looked``: when it answered last; ``user``: who looks, ``own``: as who the page runs.
    """

    status: StatusView | None
    away: str
    looked: float | None
    harvest: HarvestView | None
    user: str
    own: str


class BoardChange(msgspec.Struct, frozen=True):
    """What is different in ``version`` from the version before; ``full``: everything there is.

    ``gone``, ``nodes_gone``: ids of jobs and names of nodes that are there no more.
    """

    version: int
    full: bool
    machine: MachineView
    jobs: tuple[JobView, ...] = ()
    gone: tuple[str, ...] = ()
    nodes: tuple[NodeView, ...] = ()
    nodes_gone: tuple[str, ...] = ()
    events: tuple[EventView, ...] = ()


class Board:
    """The latest look and the last changes. ``own``: the user as whom the daemon is asked."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.machine = MachineView(None, "", None, None, own, own)
        self.jobs: dict[str, JobView] = {}
        self.nodes: dict[str, NodeView] = {}
        self.events: deque[EventView] = deque(maxlen=MOST_EVENTS)
        self.timeline = NodeTimeline()
        self.history = SeenHistory()
        self.version = 0
        self.over = False
        """The server ends: whoever follows is to leave."""
        self._changes: deque[BoardChange] = deque(maxlen=MOST_CHANGES)
        self._news = asyncio.Event()

    # --- what the poller says ---

    def look(self, look: Look, harvest: HarvestView | None) -> None:
        """Take in what the daemon answered."""
        now = look.status.now
        jobs = {job.id: job for job in look.jobs}
        nodes = {node.node: node for node in look.nodes}
        self.timeline.feed(look.events, look.nodes, now)
        self.history.feed(look.jobs, now)
        self.machine = msgspec.structs.replace(
            self.machine, status=look.status, away="", looked=now, harvest=harvest
        )
        change = BoardChange(
            self.version + 1,
            False,
            self.machine,
            tuple(job for job in look.jobs if self.jobs.get(job.id) != job),
            tuple(sorted(self.jobs.keys() - jobs.keys())),
            tuple(node for node in look.nodes if _differs(self.nodes.get(node.node), node)),
            tuple(sorted(self.nodes.keys() - nodes.keys())),
            tuple(look.events),
        )
        self.jobs, self.nodes = jobs, nodes
        self.events.extend(look.events)
        self._publish(change)

    def away(self, sentence: str) -> None:
        """The daemon does not answer. What it said last stays."""
        if sentence == self.machine.away:
            return
        self.machine = msgspec.structs.replace(self.machine, away=sentence)
        self._publish(BoardChange(self.version + 1, False, self.machine))

    def end(self) -> None:
        """The server ends."""
        self.over = True
        self._news.set()

    def _publish(self, change: BoardChange) -> None:
        self.version = change.version
        self._changes.append(change)
        self._news.set()
        self._news = asyncio.Event()

    # --- what viewers ask ---

    def everything(self, events: int = 100) -> BoardChange:
        """All there is, with the newest events."""
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
        """The changes after ``version``; everything, where they are not all kept."""
        if version == self.version:
            return ()
        if version > self.version or not self._changes or self._changes[0].version > version + 1:
            return (self.everything(),)
        return [change for change in self._changes if change.version > version]

    async def news(self, version: int, within_s: float) -> bool:
        """Wait until there is something after ``version``; whether there is."""
        if self.version == version and not self.over:
            news = asyncio.ensure_future(self._news.wait())
            try:
                await asyncio.wait({news}, timeout=within_s)
            finally:
                news.cancel()
        return self.version != version


def _differs(before: NodeView | None, now: NodeView) -> bool:
    """Whether a node is to be told again; its horizon and its memory change all the time."""
    return before is None or (
        (before.state, before.job, before.lease, before.owner, before.gone_in_s is None)
        != (now.state, now.job, now.lease, now.owner, now.gone_in_s is None)
    )
