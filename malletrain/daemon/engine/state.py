"""The state that the transactions of the daemon work on: the controller, the rows in the store, the
agents, pending events and pending messages.

Decides which news about jobs are kept for clients that wait for them, and which nodes a restarted
daemon still leaves alone as sick or slow, according to the audit log.
:mod:`malletrain.daemon.engine.transactions` opens and ends transactions.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from malletrain.config.model import Config
from malletrain.core.controller import Controller
from malletrain.core.events import Event
from malletrain.core.slow_nodes import SlowNode, SlowNodes
from malletrain.core.unleased_nodes import FailingNodes, SickNode, SickNodes
from malletrain.daemon.engine.agents import Agents, LivenessMonitor
from malletrain.daemon.engine.parties import Accounts, Parties, ShareKeeper
from malletrain.daemon.engine.round_shell import RoundShell
from malletrain.daemon.jobs.curves import Curves
from malletrain.daemon.jobs.goals import JobGoals
from malletrain.daemon.jobs.layouts import Layouts
from malletrain.daemon.jobs.repository import ActiveJob, JobRepository
from malletrain.daemon.jobs.worker_counts import DataReads
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.records import LeaseRow
from malletrain.store.store import Store
from malletrain.waits import happens
from scavenger.interface import Gap, Lease


class LeaseRows:
    """Rows of leases by id. Change them within a transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.active: dict[str, LeaseRow] = {row.id: row for row in store.active_leases()}

    def add(self, rows: Sequence[LeaseRow]) -> None:
        """Add new leases."""
        self._store.add_leases(rows)
        self.active.update((row.id, row) for row in rows)

    def update(self, lease: str, **changes: Any) -> LeaseRow:
        """Change fields of a lease that has not ended. Return the new row."""
        self.update_all({lease: changes})
        return self.active[lease]

    def update_all(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change leases (by id) that have not ended: the same fields of each. Unchanged rows are
        not written, because after a restart all agents report what the store already has.
        """
        updates = [
            (row, fields)
            for row, fields in ((self.active[lease], fields) for lease, fields in changes.items())
            if any(getattr(row, name) != value for name, value in fields.items())
        ]
        self.active.update((row.id, row) for row in self._store.change_leases(updates))

    def end(self, lease: str, reason: str, now: float) -> LeaseRow | None:
        """Record the end of a lease.

        Args:
            lease: id of the lease.
            reason: why it ended, words without a full stop.
            now: time of its end, seconds.

        Returns:
            Its previous row; None if it had ended already.
        """
        row = self.active.pop(lease, None)
        if row is not None:
            ended = {"state": LeaseStatus.ENDED, "ended": now, "end_reason": reason}
            self._store.change_leases([(row, ended)])
        return row

    def on(self, node: str) -> str | None:
        """Return the first lease on the node; None if there is none."""
        return next((row.id for row in self.active.values() if row.node == node), None)


MAX_JOBS = 10_000
"""Maximum number of jobs whose newest number is kept."""


class JobNews:
    """The news of all jobs since the daemon's start."""

    def __init__(self, most: int = MAX_JOBS) -> None:
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()
        self._newest_dropped = 0
        """Newest number of the jobs that are no longer kept."""
        self._news = asyncio.Event()
        self.number = 0
        """Number of the newest piece of news."""

    def came(self, job: str) -> None:
        """Record news of ``job``."""
        self.number += 1
        self._newest[job] = self.number
        self._newest.move_to_end(job)
        while len(self._newest) > self._most:
            _, self._newest_dropped = self._newest.popitem(last=False)
        self._news.set()
        self._news = asyncio.Event()

    def since(self, number: int, jobs: Sequence[str]) -> list[str]:
        """Return those of ``jobs`` with news after ``number``, and those that may have had news."""
        return [job for job in jobs if self._newest.get(job, self._newest_dropped) > number]

    async def more(self, wait_s: float) -> None:
        """Return at the next news, or after ``wait_s``."""
        await happens(self._news, wait_s)


WOKEN_AT_ONCE = 8
"""Maximum number of waiting clients that are answered in one round of the event loop. Hundreds at
once would hold up all other messages.
"""


class MemberNews:
    """Wakes clients that wait for changes of the members of a service, or of what nodes are worth
    to it. Clients of other services are not woken.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        """Service → the clients that wait, in order."""

    def came(self, job: str) -> None:
        """Wake the clients that wait for news of ``job``."""
        self._wake(list(self._waiting.pop(job, ())))

    def _wake(self, waiting: list[asyncio.Future[None]]) -> None:
        for future in waiting[:WOKEN_AT_ONCE]:
            if not future.done():
                future.set_result(None)
        if rest := waiting[WOKEN_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._wake, rest)

    async def more(self, job: str, wait_s: float) -> None:
        """Return at the next news of ``job``, or after ``wait_s``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, {})[future] = None
        try:
            await asyncio.wait({future}, timeout=wait_s)
        finally:
            future.cancel()
            waiting = self._waiting.get(job, {})
            waiting.pop(future, None)
            if not waiting:
                self._waiting.pop(job, None)


Send = Callable[[bytes, messages.Message], bool]
"""Sends a message to a peer; returns False if the peer cannot be reached."""


class TransactionOutbox:
    """Holds the messages and the answers of a batch, in order, until its transactions are saved.
    Outside a batch it sends at once.
    """

    def __init__(self, send: Send) -> None:
        self.send = send
        self._is_batching = False
        """Whether a batch is open."""
        self._waiting: list[tuple[bytes, messages.Message, bool]] = []

    def begin_batch(self) -> None:
        """Hold messages from now on."""
        self._is_batching = True

    def end_batch(self) -> None:
        """Send messages at once from now on. Call :meth:`flush` or :meth:`rollback` for those that
        are held.
        """
        self._is_batching = False

    def post(self, peer: bytes, message: messages.Message) -> bool:
        """Send a message now, or after the batch. Return whether the peer was reached; True if
        that is not known yet.
        """
        if not self._is_batching:
            return self.send(peer, message)
        self._waiting.append((peer, message, True))
        return True

    def answer(self, peer: bytes, message: messages.Message) -> None:
        """Send an answer now, or after the batch. The requester asks again if it does not
        arrive.
        """
        if self._is_batching:
            self._waiting.append((peer, message, False))
        else:
            self.send(peer, message)

    def savepoint(self) -> int:
        """Return the number of held messages, for :meth:`rollback`."""
        return len(self._waiting)

    def rollback(self, savepoint: int = 0) -> None:
        """Drop the messages that were added since ``savepoint``; by default all."""
        del self._waiting[savepoint:]

    def flush(self) -> list[bytes]:
        """Send the held messages. Return the peers that a message of :meth:`post` did not
        reach.
        """
        waiting, self._waiting = self._waiting, []
        failed_peers = []
        for peer, message, is_posted in waiting:
            is_sent = self.send(peer, message)
            if is_posted:
                if not is_sent:
                    failed_peers.append(peer)
                reached(FaultPoint.DAEMON_SENDING)
        return failed_peers


@dataclass(kw_only=True)
class SiteState:
    """Owns the state of one daemon. It changes only within transactions. Each component takes from
    it what it uses.
    """

    config: Config
    """Current configuration, including reloaded settings (:mod:`malletrain.daemon.api.changes`)."""
    store: Store
    clock: Clock
    metrics: Metrics
    accounts: Accounts
    parties: Parties
    controller: Controller
    audit: AuditLog
    repository: JobRepository
    curves: Curves
    layouts: Layouts
    goals: JobGoals
    lease_rows: LeaseRows
    shares: ShareKeeper
    agents: Agents
    rounds: RoundShell
    outbox: TransactionOutbox
    member_news: MemberNews
    events: deque[Event]
    """Events of the open transaction, for the controller."""
    sick: SickNodes
    """Nodes that failed a health check, or on which several jobs failed."""
    failing: FailingNodes
    """Nodes on which jobs failed."""
    slow: SlowNodes
    """Nodes that hold up the others of their jobs."""
    liveness: LivenessMonitor
    """Whether the agents can be heard."""
    runs: dict[str, ActiveJob] = field(default_factory=dict)
    """Unfinished jobs, by id."""
    gaps: dict[str, Gap] = field(default_factory=dict)
    """Gaps of the last poll, by node."""
    prices: dict[str, float] = field(default_factory=dict)
    """Kind of slots → node-hours that one hour of a slot counts, of the last poll."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Owner of leases → why the newest request failed. Removed when a request succeeds."""
    pending_leases: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Lease that waits in the main scheduler → its owner, and the main scheduler's reason."""
    lease_ends: dict[str, float] = field(default_factory=dict)
    """Running lease → end of its time limit, epoch seconds, as far as the main scheduler reports
    it.
    """
    recalls: dict[str, Lease] = field(default_factory=dict)
    """The leases that the main scheduler takes back, at the last poll, by id."""
    failing_tasks: dict[str, dict[str, str]] = field(default_factory=dict)
    """Node → farm that gives it no tasks, because they fail there → why, as a sentence."""
    data_reads: DataReads = field(default_factory=DataReads)
    """Reads of jobs through data caches."""
    news: JobNews = field(default_factory=JobNews)
    poll_soon: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to poll soon, by an event whose cause only a poll of the main scheduler shows."""

    def mode_on(self, node: str) -> str:
        """Return the mode of the unfinished job that a node holds; empty if there is none."""
        agent = self.agents.on(node)
        run = None if agent is None or agent.holds is None else self.runs.get(agent.holds)
        return "" if run is None else run.spec.mode


_HALF_LIVES = 8
"""Number of half-lives after which a slow node no longer counts as slow."""


def sick_nodes(config: Config, store: Store, now: float) -> SickNodes:
    """Return the sick nodes at ``now``, seconds since the epoch.

    Args:
        config: the site's configuration.
        store: the database.
        now: time, seconds since the epoch.
    """
    nodes = config.nodes
    sick = SickNodes(nodes.sick_for, nodes.sick_for_most)
    since = now - 2 * nodes.sick_for_most
    resumed = store.events_of(EventKind.NODE_RESUMED, since)
    resumed_seq = {
        row.node: row.seq for row in resumed if "by" in row.data
    }  # else a drain has ended
    for row in store.events_of(EventKind.NODE_SICK, since):
        if row.seq < resumed_seq.get(row.node, -1):
            continue
        sentence, until = str(row.data["sentence"]), float(row.data["until"])
        sick.remember(row.node, SickNode(row.time, until, sentence))
    return sick


def slow_nodes(config: Config, store: Store, now: float) -> SlowNodes:
    """Return the slow nodes at ``now``, seconds since the epoch.

    Args:
        config: the site's configuration.
        store: the database.
        now: time, seconds since the epoch.
    """
    nodes = config.nodes
    slow = SlowNodes(nodes.slow_factor, nodes.slow_half_life, nodes.slow_after)
    if slow_node_policy(config) == "off":
        return slow
    since = now - _HALF_LIVES * nodes.slow_half_life
    cleared = {
        (row.node, "usual_mbit" in row.data): row.seq
        for row in store.events_of(EventKind.NODE_NOT_SLOW, since)
    }
    for row in store.events_of(EventKind.NODE_SLOW, since):
        if row.seq > cleared.get((row.node, "usual_mbit" in row.data), -1):
            sentence, slowdown = str(row.data["sentence"]), float(row.data["slowdown"])
            usual_mbit = float(row.data.get("usual_mbit", 0.0))
            slow.remember(row.node, SlowNode(row.time, slowdown, sentence, usual_mbit))
    return slow


def slow_node_policy(config: Config) -> str:
    """Return the action for slow nodes: ``off``, ``name`` or ``swap``."""
    if config.nodes.slow_nodes == "auto":
        return "off" if config.scheduler.kind == "local" else "swap"
    return config.nodes.slow_nodes
