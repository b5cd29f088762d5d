"""Calls the main scheduler and reconciles the stored leases with its answers.

Decides what a poll means for each lease: running, ended, not reporting, unwanted. Calls run in a
worker thread, one at a time; a call that fails changes nothing. What is requested is stored before
(:mod:`malletrain.daemon.leases.actions`). Which nodes operators have excluded from leasing is
stored as well; :mod:`malletrain.core.unleased_nodes` decides what may be leased.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
import structlog

from malletrain.config.model import Config
from malletrain.core.events import (
    ForecastsUpdated,
    GapsSeen,
    LeaseDeferred,
    LeaseNotTaken,
)
from malletrain.core.unleased_nodes import EVERY_NODE, Restrictions
from malletrain.daemon.engine.state import SiteState, slow_node_policy
from malletrain.daemon.engine.transactions import EngineEnded, Transactions
from malletrain.daemon.leases.actions import Call, LeaseActions, ReleaseCall, SpareCheck, TakeCall
from malletrain.daemon.leases.arrivals_and_departures import (
    PREEMPTED,
    RECLAIMED,
    RELEASED,
    SICK,
    UNHEARD,
    Departures,
)
from malletrain.daemon.leases.polls import (
    PollWatch,
    SchedulerHealth,
    SilentLeases,
    SlotPrices,
    Strays,
    last_output,
    likely_cause,
    node_problem,
)
from malletrain.daemon.site.backends import output_file
from malletrain.identity.keys import KeyRing
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.records import LeaseRow
from malletrain.waits import happens
from scavenger.batch.lease_script import HOME_OUTPUT_DIR
from scavenger.interface import (
    Lease,
    LeaseRequest,
    LeaseState,
    PollResult,
    Scavenger,
    SchedulerError,
)


class CurrentRestrictions:
    """The restrictions in force of one daemon, as stored. Change them only within transactions."""

    def __init__(self, state: SiteState) -> None:
        self._state = state
        text = state.store.restrictions()
        self.now = msgspec.json.decode(text, type=Restrictions) if text else Restrictions()

    def put(self, restrictions: Restrictions) -> None:
        """Store new restrictions and apply them."""
        self._state.store.put_restrictions(msgspec.json.encode(restrictions).decode())
        self.now = restrictions

    def expire(self, now: float) -> None:
        """Remove the drains whose time is over."""
        if expired := self.now.over(now):
            self.put(self.now.resuming(expired))
            for node in expired:
                self._state.audit.record(
                    EventKind.NODE_RESUMED,
                    "Its drain was until now.",
                    node="" if node == EVERY_NODE else node,
                )


T = TypeVar("T")
FAILED = "its command failed"
"""Beginning of the reason of a lease that ended with an error, for every batch scheduler."""

log = structlog.get_logger(__name__)


class LeaseReconciler:
    """Polls the scavenger, takes and ends leases through it, and updates the stored leases.

    Args:
        state: the daemon's state.
        transactions: saves decisions, and sends messages after that.
        lease_actions: its queue has the calls to make.
        departures: handles nodes that leave.
        keys: the keys of leases.
        scavenger: connection to the main scheduler.
        endpoint: address at which agents reach the daemon.
    """

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        lease_actions: LeaseActions,
        departures: Departures,
        keys: KeyRing,
        scavenger: Scavenger,
        endpoint: str,
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._lease_actions = lease_actions
        self._departures = departures
        self._keys = keys
        self._scavenger = scavenger
        self._endpoint = endpoint
        self._call_lock = asyncio.Lock()
        self._running_call: asyncio.Future[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.active: Mapping[str, LeaseRow] = state.lease_rows.active
        """Leases that have not ended, by id."""
        self.last_poll: PollResult | None = None
        """Answer of the last successful poll; None before the first."""
        self._unheard = SilentLeases(_report_limit_s(state.config))
        self._strays = Strays()
        self._overstaying = SilentLeases(_report_limit_s(state.config))
        self._scheduler_health = SchedulerHealth(state, transactions)
        self.restrictions = CurrentRestrictions(state)
        self.slot_prices = SlotPrices(state, transactions)
        self._absent: set[str] = set()
        """Leases that are missing from the newest poll."""
        self.polls = PollWatch(state.config.scheduler.poll_interval)
        for row in self.active.values():
            keys.accept_lease(row.id, row.public_key)
        rows = self.active.values()
        scavenger.know(
            {row.id: row.owner for row in rows},
            {row.id: row.node for row in rows},
            {row.id: row.scheduler_id for row in rows},
        )

    # --- commands of the controller ---

    async def work(self) -> None:
        """Make the queued calls, until cancelled."""
        while True:
            call = await self._lease_actions.calls.get()
            if self._transactions.failed.done():
                return  # its transaction was not saved
            task = asyncio.get_running_loop().create_task(self._make(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(self._transactions.task_ended)

    async def _make(self, call: Call) -> None:
        if isinstance(call, TakeCall):
            await self._take(call.requests)
        elif isinstance(call, ReleaseCall):
            await self._release(call.leases)
        else:
            with self._transactions.begin():
                if isinstance(call, SpareCheck):
                    self._lease_actions.check_spare(call)
                else:
                    self._lease_actions.reclaim_expired(call.lease, call.why)

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
        with self._transactions.begin():
            for lease in leases:
                if lease.state is LeaseState.NOT_YET:
                    refused.pop(lease.id, None)
                    self._end(lease.id, f"not asked for yet: {lease.reason}", requested=False)
                elif lease.state is LeaseState.ENDED:
                    refused[lease.id] = lease.reason or "it ended at once"
                else:
                    refused.pop(lease.id, None)
                    row = self.active.get(lease.id)
                    if row is not None:
                        self._state.refusals.pop(row.owner, None)
                    if (
                        row is not None
                        and row.state == LeaseStatus.REQUESTED
                        and self._state.agents.of_lease(lease.id) is None
                    ):
                        taken[lease.id] = {
                            "state": LeaseStatus.PENDING,
                            "scheduler_id": lease.scheduler_id,
                        }
            self._state.lease_rows.update_all(taken)
            for lease_id, reason in refused.items():
                if (row := self.active.get(lease_id)) is not None:
                    self._state.refusals[row.owner] = reason
                self._end(lease_id, reason)
        self._lease_actions.being_taken -= {request.id for request in requests}

    async def _release(self, leases: tuple[Lease, ...]) -> None:
        try:
            reached(FaultPoint.DAEMON_RELEASES)
            await self._call(lambda: self._scavenger.give_back(leases))
            reached(FaultPoint.DAEMON_RELEASED)
        except SchedulerError as e:
            log.warning("leases not released", reason=str(e), leases=[lease.id for lease in leases])
        self._state.poll_soon.set()

    def update_health(self) -> None:
        """Update the metrics of the main scheduler's health. Call it regularly."""
        self._state.metrics.polls_missed(self.polls.missed(self._state.clock.now()))
        self._scheduler_health.update(self._scavenger.contact(), self.polls.error)

    # --- polling ---

    async def run(self) -> None:
        """Poll until cancelled: every poll interval or when the scavenger expects news, and soon
        after an event whose cause the main scheduler knows.
        """
        interval = self._state.config.scheduler.poll_interval
        while True:
            await self.poll()
            wait_s = (self.last_poll.poll_again_s if self.last_poll else None) or interval
            contact = self._scavenger.contact()
            wait_s = max(wait_s, contact.busy_s)
            # Many such events in a row (a hundred nodes lost together) must not cause one poll
            # each.
            min_wait_s = min(
                wait_s, max(min(1.0, wait_s / 5), contact.busy_s, contact.poll_after_s)
            )
            await asyncio.sleep(min_wait_s)
            await happens(self._state.poll_soon, wait_s - min_wait_s)
            self._state.poll_soon.clear()

    async def poll(self) -> None:
        """Poll the main scheduler once. A failed poll changes nothing."""
        self.polls.began(self._state.clock.now())
        try:
            poll = await self._call(self._scavenger.poll)
            reached(FaultPoint.DAEMON_POLLED)
        except SchedulerError as e:
            if str(e) != self.polls.error:
                log.warning("poll failed", reason=str(e))
            self.polls.failed(str(e))
            self._state.metrics.poll_failed()
            return
        if self.polls.error:
            log.info("polls work again", failed=self.polls.error)
        self.polls.answered(self._state.clock.now())
        if poll.trouble and (self.last_poll is None or self.last_poll.trouble != poll.trouble):
            log.warning("trouble beside the poll", reason=poll.trouble)
        self.last_poll = poll
        self._state.rounds.nodes_in_all = poll.total_nodes
        self._state.metrics.polled(poll.time, poll.idle_nodes)
        self.slot_prices.update(poll.kind_parts)
        self._state.lease_ends.update(
            {lease.id: lease.ends_by for lease in poll.leases if lease.ends_by is not None}
        )
        self._reconcile(poll)

    def _reconcile(self, poll: PollResult) -> None:
        """Update the stored leases from the answer of a poll."""
        leases = {lease.id: lease for lease in poll.leases}
        absent_before, self._absent = self._absent, self.active.keys() - leases.keys()
        with self._transactions.begin() as now:
            self._state.pending_leases.clear()
            self._state.recalls.clear()
            for lease_id, row in list(self.active.items()):
                lease = leases.get(lease_id)
                if lease is not None and lease.state is LeaseState.PENDING:
                    self._state.pending_leases[lease_id] = row.owner, lease.reason
                if lease_id in self._lease_actions.being_taken and lease is None:
                    continue
                if lease is None and lease_id not in absent_before:
                    self._state.poll_soon.set()  # an answer may be truncated: poll again
                    continue
                if lease is None or lease.state is LeaseState.ENDED:
                    self._correct_start(row, lease)
                    reason = (lease.reason if lease else "") or row.end_reason
                    if row.started is None and reason and not row.end_reason:
                        self._state.refusals[row.owner] = reason
                    self._end(
                        lease_id,
                        reason or "the main scheduler ended it",
                        at=lease.ended if lease else None,
                    )
                elif (
                    lease.state is LeaseState.RUNNING
                    and row.state == LeaseStatus.PENDING
                    and row.started is None
                ):
                    self._state.lease_rows.update(
                        lease_id,
                        state=LeaseStatus.RUNNING,
                        started=now,
                        node=lease.node or row.node,
                    )
                elif lease.state is LeaseState.RUNNING:
                    self._correct_start(row, lease)
                if lease is not None and lease.state is LeaseState.RUNNING and not lease.ended:
                    self._departures.recall(lease)
            self._cancel_unheard(now)
            failing = self._state.failing.findings
            for node in list(failing):  # without an agent, the node's next agent gets it
                if (agent := self._state.agents.on(node)) is not None:
                    self._lease_actions.sick(agent, failing.pop(node), broken=False)
            if strays := self._strays.to_end(poll.leases, self.active, now):
                log.warning("leases that are not wanted", leases=[lease.id for lease in strays])
                self._lease_actions.calls.put_nowait(ReleaseCall(tuple(strays)))
            self._release_again(now)
            self.restrictions.expire(now)
            self._report_gaps(poll, now)

    def _report_gaps(self, poll: PollResult, now: float) -> None:
        sick = self._state.sick.now(now)
        self._state.metrics.sick(len(sick))
        slow = (
            self._state.slow.current(now) if slow_node_policy(self._state.config) == "swap" else {}
        )
        avoided = {*sick, *slow}
        restrictions = self.restrictions.now
        gaps = {
            gap.node: gap
            for gap in poll.gaps
            if gap.node not in avoided and not restrictions.refusal(gap.node)
        }
        self._state.gaps.clear()
        self._state.gaps.update(gaps)
        self._state.events.append(
            GapsSeen(
                {gap.node: (gap.horizon_s, gap.node_class) for gap in gaps.values()},
                poll.max_new_leases,
            )
        )
        if poll.forecasts:
            self._state.events.append(ForecastsUpdated(poll.forecasts))

    def _last_output(self, row: LeaseRow, reason: str) -> str:
        """Return what to append to ``reason``: the last line that a failed lease printed, or the
        file to look into.
        """
        if not reason.startswith(FAILED):
            return ""
        if line := last_output(output_file(self._state.config, row.id)):
            return f"; it printed last: {line}".rstrip(".")
        return f"; see ~{row.owner}/{HOME_OUTPUT_DIR}/{row.id}.out" if row.owner else ""

    def _correct_start(self, row: LeaseRow, lease: Lease | None) -> None:
        """Store the start of the lease that the main scheduler reports, because users are charged
        from it.
        """
        started = lease.started if lease else None
        if row.started is not None and started is not None and started < row.started:
            self._state.lease_rows.update(row.id, started=max(started, row.requested - 1.0))

    def restrict(self, restrictions: Restrictions, release: Collection[str], why: str) -> None:
        """Restrict the nodes that may be leased. Call it within a transaction.

        Args:
            restrictions: which nodes may not be leased.
            release: nodes whose leases end after their jobs have moved off.
            why: a sentence.
        """
        self.restrictions.put(restrictions)
        if self.last_poll is not None:
            self._report_gaps(self.last_poll, self._state.clock.now())
        within_s = self._state.controller.settings.reclaim_s
        self._lease_actions.reclaim(tuple(release), within_s, why)
        self._state.poll_soon.set()

    def _cancel_unheard(self, now: float) -> None:
        """End leases that have run for too long without a report of their agents."""
        if self._state.liveness.partitioned_since is not None:
            return
        waiting = [
            row.id
            for row in self.active.values()
            if row.state == LeaseStatus.RUNNING and self._state.agents.of_lease(row.id) is None
        ]
        for lease in self._unheard.overdue(waiting, now):
            row, limit_s = self.active[lease], self._unheard.limit_s
            line = last_output(output_file(self._state.config, lease))
            home_file = f"~{row.owner}/{HOME_OUTPUT_DIR}/{lease}.out" if row.owner else ""
            explanations = self.last_poll.explanations if self.last_poll else ()
            trouble = node_problem(explanations, row.node)
            cause = likely_cause(line, row.node, self._endpoint, home_file, trouble)
            sentence = f"Its agent has not reported for {limit_s:g} s. {cause}"
            log.warning("lease cancelled", lease=lease, node=row.node, reason=sentence)
            self._lease_actions.cancel_unheard(lease, sentence)

    def end_lost(self, sentence: str) -> set[str]:
        """End the leases of which no agent has reported. Call it within a transaction.

        Args:
            sentence: why no agent will report.

        Returns:
            Ids of these leases.
        """
        agents = self._state.agents
        lost = {row.id for row in self.active.values() if agents.of_lease(row.id) is None}
        if lost:
            self._lease_actions.end_lost(sorted(lost), sentence)
        return lost

    def _release_again(self, now: float) -> None:
        """Repeat the request to end leases that should have ended and have no agent. The first
        request was refused, or lost with an earlier daemon.
        """
        if self._state.liveness.partitioned_since is not None:
            return
        agents = self._state.agents
        waiting = [
            row.id
            for row in self.active.values()
            if row.state == LeaseStatus.LEAVING
            and agents.of_lease(row.id) is None
            and agents.dismissed(row.id) is None
        ]
        for lease in self._overstaying.overdue(waiting, now):
            log.warning("lease released again", lease=lease, node=self.active[lease].node)
            self._lease_actions.release_again(lease)
            self._overstaying.reset_timer(lease)

    def _end(
        self, lease_id: str, reason: str, *, requested: bool = True, at: float | None = None
    ) -> None:
        """Record the end of a lease.

        Args:
            lease_id: id of the lease.
            reason: words without a full stop.
            requested: whether it was requested from the main scheduler. If not, the daemon
                requests another.
            at: time of its end reported by the main scheduler, seconds; None if unknown.
        """
        now = self._state.clock.now()
        active = self.active.get(lease_id)
        started = (active.started or 0.0) if active is not None else 0.0
        ended = now if at is None else min(now, max(at, started))
        if active is not None:
            reason += self._last_output(active, reason)
        failed = reason.startswith(FAILED) and active is not None and not active.end_reason
        row = self._state.lease_rows.end(lease_id, reason, ended)
        if row is None:
            return
        reason = UNHEARD if row.end_reason == UNHEARD else reason
        self._keys.drop_lease(lease_id)
        self._state.lease_ends.pop(lease_id, None)
        end_words = {
            RELEASED: "released",
            RECLAIMED: "reclaimed",
            SICK: "sick",
            PREEMPTED: "preempted",
        }
        word = end_words.get(row.end_reason, "ended" if row.started else "not-started")
        word = word if requested else "not-yet"
        self._state.metrics.lease_ended(word)
        self._state.audit.record(
            EventKind.LEASE_ENDED, f"The lease ended: {reason}.", node=row.node, lease=lease_id
        )
        agent = self._state.agents.of_lease(lease_id)
        if agent is not None:
            self._departures.lost(agent, reason)
        else:
            self._departures.lease_ended(lease_id)
            self._state.events.append(
                LeaseNotTaken(row.node, row.owner, reason if failed else "")
                if requested
                else LeaseDeferred(row.node, row.owner)
            )

    async def _call(self, call: Callable[[], T]) -> T:
        async with self._call_lock:
            if self._transactions.failed.done():  # another engine has taken over
                raise EngineEnded("Another engine has these leases.")
            self._running_call = asyncio.ensure_future(asyncio.to_thread(call))
            return await asyncio.shield(self._running_call)

    async def quiet(self) -> None:
        """Wait for the running call, which may be awaited elsewhere too."""
        if self._running_call is not None:
            await asyncio.gather(self._running_call, return_exceptions=True)


def _report_limit_s(config: Config) -> float:
    """Return the seconds within which the agent of a running lease has to report. They include the
    health checks.
    """
    nodes = config.nodes
    checks = 1 + nodes.gpu_check if nodes.health_check else 0
    return config.allocation.lease_wait + checks * nodes.health_timeout
