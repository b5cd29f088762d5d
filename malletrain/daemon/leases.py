"""The main scheduler, asked: what there is, for leases, for their end.

Scheduler calls run in a worker thread, one at a time; a call that fails changes nothing. What is
asked for was stored before (:mod:`malletrain.daemon.lease_actions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import structlog

from malletrain.config.model import Config
from malletrain.core.events import Foretold, GapsSeen, LeaseNotTaken, LeaseNotYet
from malletrain.core.expected_node_life import cohorts
from malletrain.core.restraint import Restraint
from malletrain.daemon.batch import output_dir
from malletrain.daemon.core import Core
from malletrain.daemon.departures import RECLAIMED, RELEASED, SICK, UNHEARD, Departures
from malletrain.daemon.lease_actions import Call, LeaseDesk, ReleaseCall, SpareLook, TakeCall
from malletrain.daemon.manners import Manners
from malletrain.daemon.parts import Parts
from malletrain.daemon.poll_watch import PollWatch
from malletrain.daemon.restraints import Restraints
from malletrain.daemon.sickbay import manner
from malletrain.daemon.steps import CoreOver
from malletrain.daemon.strays import Strays
from malletrain.daemon.unheard import Unheard, last_words, likely_cause, trouble_of
from malletrain.daemon.waiting import happens
from malletrain.identity.keys import KeyRing
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.records import LeaseRow
from scavenger.batch.lease_script import KEPT_AT_HOME
from scavenger.interface import (
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    Scavenger,
    SchedulerError,
)

T = TypeVar("T")
FAILED = "its command failed"
"""How the reason begins of a lease that ended with an error, with every batch scheduler."""

log = structlog.get_logger(__name__)


class Leases:
    """The daemon's side of the scavenger."""

    def __init__(
        self,
        core: Core,
        parts: Parts,
        desk: LeaseDesk,
        departures: Departures,
        keys: KeyRing,
        scavenger: Scavenger,
        endpoint: str,
    ) -> None:
        self._core = core
        self._parts = parts
        self._desk = desk
        self._departures = departures
        self._keys = keys
        self._scavenger = scavenger
        self._endpoint = endpoint
        self._calls = asyncio.Lock()
        self._under_way: asyncio.Future[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.active: Mapping[str, LeaseRow] = parts.lease_rows.active
        """The leases that have not ended, by id."""
        self.last_poll: PollResult | None = None
        self._unheard = Unheard(_patience_s(parts.config))
        self._strays = Strays()
        self._overstaying = Unheard(_patience_s(parts.config))
        self._manners = Manners(core, parts)
        self.restraints = Restraints(parts)
        self._absent: set[str] = set()
        """Leases that the newest poll did not name."""
        self.polls = PollWatch(parts.config.scheduler.poll_interval)
        for row in self.active.values():
            keys.accept_lease(row.id, row.public_key)
        rows = self.active.values()
        scavenger.know({row.id: row.owner for row in rows}, {row.id: row.node for row in rows})

    # --- what the controller commanded ---

    async def work(self) -> None:
        """Make the calls that the desk asks for, for ever."""
        while True:
            call = await self._desk.calls.get()
            if self._core.failed.done():
                return  # it was asked for in a step that was not saved
            task = asyncio.get_running_loop().create_task(self._make(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(self._core.task_ended)

    async def _make(self, call: Call) -> None:
        if isinstance(call, TakeCall):
            await self._take(call.requests)
        elif isinstance(call, ReleaseCall):
            await self._release(call.leases)
        else:
            with self._core.step():
                if isinstance(call, SpareLook):
                    self._desk.spare_look(call)
                else:
                    self._desk.reclaim_over(call.lease, call.why)

    async def _take(self, requests: tuple[LeaseRequest, ...]) -> None:
        refused: dict[str, str] = {
            request.id: "the main scheduler did not take the request" for request in requests
        }
        leases: list[Lease] = []
        try:
            reached(FaultPoint.DAEMON_TAKES)
            leases = await self._call(lambda: self._scavenger.take(requests))
            reached(FaultPoint.DAEMON_TOOK)
        except SchedulerError as e:
            refused = dict.fromkeys(refused, str(e))
        taken: dict[str, dict[str, str]] = {}
        with self._core.step():
            for lease in leases:
                if lease.state is LeaseState.NOT_YET:
                    refused.pop(lease.id, None)
                    self._end(lease.id, f"not asked for yet: {lease.reason}", asked=False)
                elif lease.state is LeaseState.ENDED:
                    refused[lease.id] = lease.reason or "it ended at once"
                else:
                    refused.pop(lease.id, None)
                    row = self.active.get(lease.id)
                    if row is not None:
                        self._parts.refusals.pop(row.owner, None)
                    if (
                        row is not None
                        and row.state == LeaseStatus.REQUESTED
                        and self._parts.agents.of_lease(lease.id) is None
                    ):
                        taken[lease.id] = {
                            "state": LeaseStatus.PENDING,
                            "scheduler_id": lease.scheduler_id,
                        }
            self._parts.lease_rows.update_all(taken)
            for lease_id, reason in refused.items():
                if (row := self.active.get(lease_id)) is not None:
                    self._parts.refusals[row.owner] = reason
                self._end(lease_id, reason)
        self._desk.being_taken -= {request.id for request in requests}

    async def _release(self, leases: tuple[Lease, ...]) -> None:
        try:
            reached(FaultPoint.DAEMON_RELEASES)
            await self._call(lambda: self._scavenger.give_back(leases))
            reached(FaultPoint.DAEMON_RELEASED)
        except SchedulerError as e:
            log.warning("leases not released", reason=str(e), leases=[lease.id for lease in leases])
        self._parts.poll_soon.set()

    def notice(self) -> None:
        """Count and tell how the main scheduler and the daemon get on."""
        self._parts.metrics.polls_missed(self.polls.missed(self._parts.clock.now()))
        self._manners.notice(self._scavenger.contact(), self.polls.error)

    # --- polling ---

    async def run(self) -> None:
        """Poll for ever: every poll interval, or when the scavenger says that there will be news,
        and soon after something happened of which the main scheduler knows more.
        """
        interval = self._parts.config.scheduler.poll_interval
        while True:
            await self.poll()
            again = (self.last_poll.poll_again_s if self.last_poll else None) or interval
            contact = self._scavenger.contact()
            again = max(again, contact.busy_s)
            # Many such things in a row (a hundred nodes lost at once) must not become a poll each.
            pause = min(again, max(min(1.0, again / 5), contact.busy_s, contact.poll_after_s))
            await asyncio.sleep(pause)
            await happens(self._parts.poll_soon, again - pause)
            self._parts.poll_soon.clear()

    async def poll(self) -> None:
        """Ask the main scheduler once; a failed poll changes nothing."""
        self.polls.began(self._parts.clock.now())
        try:
            found = await self._call(self._scavenger.poll)
            reached(FaultPoint.DAEMON_POLLED)
        except SchedulerError as e:
            if str(e) != self.polls.error:
                log.warning("poll failed", reason=str(e))
            self.polls.failed(str(e))
            self._parts.metrics.poll_failed()
            return
        if self.polls.error:
            log.info("polls work again", failed=self.polls.error)
        self.polls.answered(self._parts.clock.now())
        self.last_poll = found
        self._parts.rounds.nodes_in_all = found.total_nodes
        self._parts.metrics.polled(found.time, found.idle_nodes)
        self._reconcile(found)

    def _reconcile(self, found: PollResult) -> None:
        seen = {lease.id: lease for lease in found.leases}
        before, self._absent = self._absent, self.active.keys() - seen.keys()
        with self._core.step() as now:
            self._parts.pending.clear()
            for lease_id, row in list(self.active.items()):
                lease = seen.get(lease_id)
                if lease is not None and lease.state is LeaseState.PENDING:
                    self._parts.pending[lease_id] = row.owner, lease.reason
                if lease_id in self._desk.being_taken and lease is None:
                    continue
                if lease is None and lease_id not in before:
                    self._parts.poll_soon.set()  # an answer may be cut short: ask once more
                    continue
                if lease is None or lease.state is LeaseState.ENDED:
                    self._took(row, lease)
                    reason = (lease.reason if lease else "") or row.end_reason
                    if row.started is None and reason and not row.end_reason:
                        self._parts.refusals[row.owner] = reason
                    self._end(
                        lease_id,
                        f"{reason}{self._printed(row, reason)}" or "the main scheduler ended it",
                        at=lease.ended if lease else None,
                    )
                elif (
                    lease.state is LeaseState.RUNNING
                    and row.state == LeaseStatus.PENDING
                    and row.started is None
                ):
                    self._parts.lease_rows.update(
                        lease_id,
                        state=LeaseStatus.RUNNING,
                        started=now,
                        node=lease.node or row.node,
                    )
                elif lease.state is LeaseState.RUNNING:
                    self._took(row, lease)
            self._cancel_unheard(now)
            found_out = self._parts.failing.found
            for node in list(found_out):  # one whose agent has gone waits for the next there
                if (agent := self._parts.agents.on(node)) is not None:
                    self._desk.sick(agent, found_out.pop(node), broken=False)
            if strays := self._strays.to_end(found.leases, self.active, now):
                log.warning("leases that are not wanted", leases=[lease.id for lease in strays])
                self._desk.calls.put_nowait(ReleaseCall(tuple(strays)))
            self._release_again(now)
            self.restraints.expire(now)
            self._gaps_seen(found, now)

    def _gaps_seen(self, found: PollResult, now: float) -> None:
        sick = self._parts.sick.now(now)
        self._parts.metrics.sick(len(sick))
        slow = self._parts.slow.known(now) if manner(self._parts.config) == "swap" else {}
        avoided = {*sick, *slow}
        may = self.restraints.now
        gaps = {
            gap.node: gap
            for gap in found.gaps
            if gap.node not in avoided and not may.refusal(gap.node)
        }
        self._parts.gaps.clear()
        self._parts.gaps.update(gaps)
        self._parts.events.append(
            GapsSeen(
                {gap.node: (gap.horizon_s, gap.node_class) for gap in gaps.values()}, found.room
            )
        )
        if found.foretold:
            self._parts.events.append(Foretold(cohorts(found.foretold)))

    def _printed(self, row: LeaseRow, reason: str) -> str:
        """What a lease whose command failed printed last, to go behind ``reason``."""
        if not reason.startswith(FAILED):
            return ""
        if words := last_words(output_dir(self._parts.config), row.id):
            return f"; it printed last: {words}".rstrip(".")
        return f"; see ~{row.owner}/{KEPT_AT_HOME}/{row.id}.out" if row.owner else ""

    def _took(self, row: LeaseRow, lease: Lease | None) -> None:
        """The main scheduler's own account of when the lease began is what its users are charged
        by.
        """
        began = lease.started if lease else None
        if row.started is not None and began is not None and began < row.started:
            self._parts.lease_rows.update(row.id, started=max(began, row.requested - 1.0))

    def restrain(self, restraint: Restraint, give_back: Collection[str], why: str) -> None:
        """Leave alone what ``restraint`` says from this step on, and give the leases of these nodes
        back once their jobs have moved off; ``why``, as a sentence.
        """
        self.restraints.put(restraint)
        if self.last_poll is not None:
            self._gaps_seen(self.last_poll, self._parts.clock.now())
        within_s = self._parts.controller.settings.reclaim_s
        self._desk.reclaim(tuple(give_back), within_s, why)
        self._parts.poll_soon.set()

    def _cancel_unheard(self, now: float) -> None:
        """End the leases that have run for too long without a word of their agents."""
        if self._core.hearing.deaf_since is not None:
            return
        waiting = [
            row.id
            for row in self.active.values()
            if row.state == LeaseStatus.RUNNING and self._parts.agents.of_lease(row.id) is None
        ]
        for lease in self._unheard.overdue(waiting, now):
            row, limit_s = self.active[lease], self._unheard.limit_s
            words = last_words(output_dir(self._parts.config), lease)
            kept = f"~{row.owner}/{KEPT_AT_HOME}/{lease}.out" if row.owner else ""
            seen = self.last_poll.explanations if self.last_poll else ()
            trouble = trouble_of(seen, row.node)
            cause = likely_cause(words, row.node, self._endpoint, kept, trouble)
            sentence = f"Its agent has not reported for {limit_s:g} s. {cause}"
            log.warning("lease cancelled", lease=lease, node=row.node, reason=sentence)
            self._desk.cancel_unheard(lease, sentence)

    def end_lost(self, sentence: str) -> set[str]:
        """End the leases of which no agent has reported; ``sentence``: why none will. Returns their
        ids. Within a step.
        """
        agents = self._parts.agents
        lost = {row.id for row in self.active.values() if agents.of_lease(row.id) is None}
        if lost:
            self._desk.end_lost(sorted(lost), sentence)
        return lost

    def _release_again(self, now: float) -> None:
        """End the leases that were to leave and are still there without an agent: what asked for
        their end was lost with the daemon that asked, or refused.
        """
        if self._core.hearing.deaf_since is not None:
            return
        agents = self._parts.agents
        waiting = [
            row.id
            for row in self.active.values()
            if row.state == LeaseStatus.LEAVING
            and agents.of_lease(row.id) is None
            and agents.dismissed(row.id) is None
        ]
        for lease in self._overstaying.overdue(waiting, now):
            log.warning("lease released again", lease=lease, node=self.active[lease].node)
            self._desk.release_again(lease)
            self._overstaying.anew(lease)

    def _end(
        self, lease_id: str, reason: str, *, asked: bool = True, at: float | None = None
    ) -> None:
        """The lease is over. ``asked``: whether the main scheduler has been asked for it; else the
        core asks for another one. ``at``: when, by the main scheduler's own account.
        """
        now = self._parts.clock.now()
        began = before.started or 0.0 if (before := self.active.get(lease_id)) else 0.0
        ended = now if at is None else min(now, max(at, began))
        row = self._parts.lease_rows.end(lease_id, reason, ended)
        if row is None:
            return
        reason = UNHEARD if row.end_reason == UNHEARD else reason
        self._keys.drop_lease(lease_id)
        words = {
            RELEASED: "given-back",
            RECLAIMED: "recalled",
            SICK: "sick",
            "preempted": "preempted",
        }
        word = words.get(row.end_reason, "ended" if row.started else "not-started")
        word = word if asked else "not-yet"
        self._parts.metrics.lease_ended(word)
        self._parts.audit.record(
            EventKind.LEASE_ENDED, f"The lease ended: {reason}.", node=row.node, lease=lease_id
        )
        agent = self._parts.agents.of_lease(lease_id)
        if agent is not None:
            self._departures.lost(agent, reason)
        else:
            self._departures.left(lease_id)
            event = LeaseNotTaken if asked else LeaseNotYet
            self._parts.events.append(event(row.node, row.owner))

    async def _call(self, call: Callable[[], T]) -> T:
        async with self._calls:
            if self._core.failed.done():  # other parts take the place of these
                raise CoreOver("These leases are in other hands.")
            self._under_way = asyncio.ensure_future(asyncio.to_thread(call))
            return await asyncio.shield(self._under_way)

    async def quiet(self) -> None:
        """Wait for the call under way, whoever waited for it before."""
        if self._under_way is not None:
            await asyncio.gather(self._under_way, return_exceptions=True)


def _patience_s(config: Config) -> float:
    """How long a lease may run before its agent reports: it looks after its node's health first."""
    nodes = config.nodes
    looks = 1 + nodes.gpu_check if nodes.health_check else 0
    return config.allocation.lease_wait + looks * nodes.health_timeout
