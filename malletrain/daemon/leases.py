"""Leases: asks the scavenger what there is, takes and gives back, and keeps the books.

Scheduler calls run in a worker thread, one at a time; a call that fails changes nothing. A lease is
in the store before it is asked for, so a daemon that is killed finds on its next start whatever
came of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import structlog

from malletrain.core.events import GapsSeen, LeaseNotTaken, NodeLost
from malletrain.daemon.core import Core
from malletrain.daemon.inbox import GIVEN_BACK, RECALL_SENTENCE, RECALLED, Inbox
from malletrain.identity.keys import KeyPair, KeyRing
from malletrain.protocol.messages import Goodbye
from malletrain.store.schema import LeaseRow
from scavenger.interface import (
    Gap,
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    Scavenger,
    SchedulerError,
)

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Leases:
    """The daemon's side of the scavenger.

    Args:
        command: lease id and its key → argv and environment of the agent.
    """

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        keys: KeyRing,
        scavenger: Scavenger,
        command: Callable[[str, KeyPair], tuple[tuple[str, ...], dict[str, str]]],
    ) -> None:
        self.core = core
        self.inbox = inbox
        self.keys = keys
        self.scavenger = scavenger
        self.command = command
        self.active: Mapping[str, LeaseRow] = core.lease_rows.active
        self.gaps: dict[str, Gap] = {}
        self.snapshot: PollResult | None = None
        self.poll_error = ""
        self._being_taken: set[str] = set()
        self._calls = asyncio.Lock()
        self._poke = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        for row in self.active.values():
            keys.accept_lease(row.id, row.public_key)
        scavenger.know({row.id: row.owner for row in self.active.values()})

    def horizon(self, node: str) -> tuple[float | None, str | None]:
        """What the last poll knew of the node: horizon in seconds, topology group."""
        gap = self.gaps.get(node)
        return (gap.horizon_s, gap.group) if gap else (None, None)

    def poke(self) -> None:
        """Something happened: poll now."""
        self._poke.set()

    # --- taking and giving back ---

    def take(self, nodes: tuple[str, ...], owner: str = "") -> None:
        """Ask for a lease on each of these nodes, as ``owner`` (within a step of the core)."""
        if (
            owner and not self.core.accounts.submits_as_others
        ):  # a job from a time when others were served
            for node in nodes:
                self.core.feed(LeaseNotTaken(node, owner))
            return
        requests = []
        now = self.core.clock.now()
        for node in nodes:
            lease = self.core.store.new_lease_id()
            pair = self.keys.make_lease_key(lease)
            gap = self.gaps.get(node)
            node_class = gap.node_class if gap else "default"
            row = LeaseRow(
                lease,
                node,
                "requested",
                public_key=pair.public,
                node_class=node_class,
                owner=owner,
                requested=now,
            )
            self.core.lease_rows.add(row)
            argv, env = self.command(lease, pair)
            requests.append(LeaseRequest(lease, node, argv, env, owner=owner or None))
            self._being_taken.add(lease)
            self.core.trail.record(
                "lease-requested", "The node is idle and of use.", node=node, lease=lease
            )
        self.core.metrics.lease_requested(len(requests))
        self._spawn(self._take(requests))

    async def _take(self, requests: list[LeaseRequest]) -> None:
        refused: dict[str, str] = {
            request.id: "the main scheduler did not take the request" for request in requests
        }
        leases: list[Lease] = []
        try:
            leases = await self._call(partial(self.scavenger.take, requests))
        except SchedulerError as e:
            refused = dict.fromkeys(refused, str(e))
        with self.core.step():
            for lease in leases:
                if lease.state is LeaseState.ENDED:
                    refused[lease.id] = lease.reason or "it ended at once"
                else:
                    refused.pop(lease.id, None)
                    row = self.active.get(lease.id)
                    if (
                        row is not None
                        and row.state == "requested"
                        and self.core.agents.of_lease(lease.id) is None
                    ):
                        self.core.lease_rows.update(
                            lease.id, state="pending", scheduler_id=lease.scheduler_id
                        )
            for lease_id, reason in refused.items():
                self._end(lease_id, reason)
        self._being_taken -= {request.id for request in requests}

    def give_back(self, nodes: tuple[str, ...], why: str = "No job needs the node.") -> None:
        """Nothing is to run on these nodes any more (within a step of the core)."""
        ending = []
        for node in nodes:
            agent = self.core.agents.on(node)
            lease = (
                agent.lease
                if agent
                else next((row.id for row in self.active.values() if row.node == node), None)
            )
            if agent is not None:
                self.core.agents.reach(agent, Goodbye(why))
                self.core.agents.remove(agent)
            for run in (
                self.core.runs.values()
            ):  # nobody will say that the node is free of a job it was just released from
                self.core.rounds.act(run, run.rounds.gone(node, self.core.clock.now()))
            if lease is not None and lease in self.active:
                row = self.core.lease_rows.update(lease, state="leaving", end_reason=GIVEN_BACK)
                ending.append(Lease(row.id, row.scheduler_id, LeaseState.RUNNING, row.node))
                self.core.trail.record("lease-given-back", why, node=node, lease=lease)
        if ending:
            self._spawn(self._give_back(ending))

    def recall(self, nodes: tuple[str, ...], within_s: float) -> None:
        """Jobs of another owner need these nodes more: end their leases once their jobs have moved
        off (within a step of the core).
        """
        for node in nodes:
            agent = self.core.agents.on(node)
            if agent is None:
                self._take_back(node)
                continue
            self.inbox.recall(agent, within_s)
            over = self.core.guard(partial(self._recall_over, agent.lease))
            asyncio.get_running_loop().call_later(within_s, over)

    def _recall_over(self, lease: str) -> None:
        agent = self.core.agents.of_lease(lease)
        if agent is not None:
            with self.core.step():
                self._take_back(agent.node)

    def _take_back(self, node: str) -> None:
        self.give_back((node,), RECALL_SENTENCE)
        self.core.feed(NodeLost(node))

    async def _give_back(self, leases: list[Lease]) -> None:
        try:
            await self._call(partial(self.scavenger.give_back, leases))
        except SchedulerError as e:
            log.warning(
                "leases not given back", reason=str(e), leases=[lease.id for lease in leases]
            )
        self.poke()

    # --- polling ---

    async def run(self) -> None:
        """Poll for ever: every poll interval, or when the scavenger says that there will be news,
        and soon after being poked.
        """
        interval = self.core.config.scheduler.poll_interval
        while True:
            await self.poll()
            again = (self.snapshot.poll_again_s if self.snapshot else None) or interval
            # Many pokes in a row (a hundred nodes lost at once) must not become a poll each.
            pause = min(1.0, again / 5)
            await asyncio.sleep(pause)
            try:
                await asyncio.wait_for(self._poke.wait(), again - pause)
            except (TimeoutError, asyncio.TimeoutError):
                pass
            self._poke.clear()

    async def poll(self) -> None:
        """Ask the main scheduler once; a failed poll changes nothing."""
        try:
            snapshot = await self._call(self.scavenger.poll)
        except SchedulerError as e:
            if str(e) != self.poll_error:
                log.warning("poll failed", reason=str(e))
            self.poll_error = str(e)
            self.core.metrics.poll_failed()
            return
        if self.poll_error:
            log.info("polls work again", failed=self.poll_error)
        self.poll_error, self.snapshot = "", snapshot
        self.core.metrics.polled(snapshot.time, snapshot.idle_nodes)
        self._reconcile(snapshot)

    def _reconcile(self, snapshot: PollResult) -> None:
        seen = {lease.id: lease for lease in snapshot.leases}
        with self.core.step() as now:
            for lease_id, row in list(self.active.items()):
                lease = seen.get(lease_id)
                if lease_id in self._being_taken and lease is None:
                    continue
                if lease is None or lease.state is LeaseState.ENDED:
                    self._end(
                        lease_id,
                        (lease.reason if lease else "")
                        or row.end_reason
                        or "the main scheduler ended it",
                    )
                elif (
                    lease.state is LeaseState.RUNNING
                    and row.state == "pending"
                    and row.started is None
                ):
                    self.core.lease_rows.update(
                        lease_id, state="running", started=now, node=lease.node or row.node
                    )
            self.gaps = {gap.node: gap for gap in snapshot.gaps}
            self.core.feed(
                GapsSeen({gap.node: (gap.horizon_s, gap.node_class) for gap in snapshot.gaps})
            )

    def _end(self, lease_id: str, reason: str) -> None:
        row = self.core.lease_rows.end(lease_id, reason, self.core.clock.now())
        if row is None:
            return
        self.keys.drop_lease(lease_id)
        words = {GIVEN_BACK: "given-back", RECALLED: "recalled", "preempted": "preempted"}
        word = words.get(row.end_reason, "ended" if row.started else "not-started")
        self.core.metrics.lease_ended(word)
        self.core.trail.record(
            "lease-ended", f"The lease ended: {reason}.", node=row.node, lease=lease_id
        )
        agent = self.core.agents.of_lease(lease_id)
        if agent is not None:
            self.inbox.lost(agent, reason)
        else:
            self.core.feed(LeaseNotTaken(row.node, row.owner))

    async def _call(self, call: Callable[[], T]) -> T:
        async with self._calls:
            return await asyncio.to_thread(call)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (
            not task.cancelled()
            and task.exception() is not None
            and self.core.failed is not None
            and not self.core.failed.done()
        ):
            self.core.failed.set_exception(task.exception() or RuntimeError())
