"""Takes, releases and reclaims leases, as commanded by the controller.

Decides what is stored before the main scheduler is called. A lease is stored first, so that after a
crash the next daemon can find out what became of it. Everything here runs within a
transaction. :mod:`malletrain.daemon.leases.reconciler` makes the calls of the scheduler, which wait
for it in a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from malletrain.core.events import LeaseNotTaken, LeaseUnheard, NodeLost
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.leases.arrivals_and_departures import (
    RECLAIM_SENTENCE,
    RELEASED,
    SICK,
    SPARE_SENTENCE,
    UNHEARD,
    Departures,
)
from malletrain.identity.keys import KeyPair, KeyRing, user_name
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.messages import Goodbye
from malletrain.store.records import LeaseRow
from scavenger.interface import Lease, LeaseRequest, LeaseState

EXIT_WAIT_S = 2.0
"""Time that a dismissed agent has to exit before the main scheduler is asked to end its lease,
seconds. It usually exits sooner, and the lease with it. (OpenPBS 23.06 sometimes never answers a
``qdel`` for a job that ends at the same moment.)
"""

AgentCommand = Callable[[str, KeyPair], tuple[Sequence[str], Mapping[str, str]]]
"""(lease id, its key) → (argv, environment) of the agent."""


@dataclass(frozen=True)
class TakeCall:
    """Call of the main scheduler that requests leases."""

    requests: tuple[LeaseRequest, ...]


@dataclass(frozen=True)
class ReleaseCall:
    """Call of the main scheduler that ends leases."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class ReclaimExpired:
    """End of the time in which a job had to move off the node of a lease."""

    lease: str
    """Id of the lease."""
    why: str = RECLAIM_SENTENCE
    """Why it had to move off, as a sentence."""


@dataclass(frozen=True)
class SpareCheck:
    """Check of whether the job has left a spare node."""

    lease: str
    """Id of the lease."""
    releasing: bool = False
    """Whether the agent had been told to release the job at the previous check."""


Call = TakeCall | ReleaseCall | ReclaimExpired | SpareCheck


class LeaseActions:
    """Carries out the controller's commands about leases.

    Args:
        state: the daemon's state.
        departures: handles nodes that leave.
        keys: creates the keys of leases.
        command: returns the command of an agent.
    """

    def __init__(
        self, state: SiteState, departures: Departures, keys: KeyRing, command: AgentCommand
    ) -> None:
        self._state = state
        self._departures = departures
        self._keys = keys
        self._command = command
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.being_taken: set[str] = set()
        """Leases in the store that may not have been requested from the scheduler yet."""

    def take(self, nodes: tuple[str, ...], owner: str) -> None:
        """Request a lease on each of these nodes.

        Args:
            nodes: names of the nodes.
            owner: user whose leases they are; empty for the daemon's user.
        """
        state = self._state
        if owner and not state.accounts.submits_as_others:
            # The job was submitted when the daemon served several users.
            state.events.extend(LeaseNotTaken(node, owner) for node in nodes)
            return
        requests, rows, account = [], [], state.parties.account(owner or user_name())
        for node, lease in zip(nodes, state.store.new_lease_ids(len(nodes)), strict=True):
            pair = self._keys.make_lease_key(lease)
            reached(FaultPoint.DAEMON_KEYED)
            gap = state.gaps.get(node)
            row = LeaseRow(
                lease,
                node,
                LeaseStatus.REQUESTED,
                public_key=pair.public,
                node_class=gap.node_class if gap else "default",
                owner=owner,
                requested=state.clock.now(),
                account=account,
            )
            rows.append(row)
            argv, env = self._command(lease, pair)
            requests.append(LeaseRequest(lease, node, tuple(argv), env, owner=owner or None))
            self.being_taken.add(lease)
        state.lease_rows.add(rows)
        for row in rows:
            state.audit.record(
                EventKind.LEASE_REQUESTED,
                "The node is idle and a job can use it.",
                node=row.node,
                lease=row.id,
            )
        state.metrics.lease_requested(len(requests))
        self.calls.put_nowait(TakeCall(tuple(requests)))

    def release(self, nodes: tuple[str, ...]) -> None:
        """Release nodes that no job needs. A node that its job has not left yet, because its
        joiners are starting or it is saving, is released when the job has left.
        """
        agents = (self._state.agents.on(node) for node in nodes)
        busy = {a.node: a for a in agents if a is not None and self._job_is_leaving(a)}
        for agent in busy.values():
            agent.spare = True
            self._check_later(SpareCheck(agent.lease))
        self._end([n for n in nodes if n not in busy], SPARE_SENTENCE, RELEASED)

    def free(self, agent: LeasedAgent) -> None:
        """End the lease of an agent without a job if no other job needs the node, or if the agent's
        version is outdated. The node may be leased again at once.
        """
        if agent.holds is not None or agent.gone_at is not None:
            return
        if agent.outdated:
            self._take_back(agent.node, agent.outdated)
        elif agent.spare:
            self._end((agent.node,), SPARE_SENTENCE, RELEASED)

    def check_spare(self, check: SpareCheck) -> None:
        """Release a spare node that its job has not left, if its agent is lost or has not released
        the job since the previous check: then the agent or the job's processes hang.
        """
        agent = self._state.agents.of_lease(check.lease)
        row = self._state.lease_rows.active.get(check.lease)
        if agent is None:
            if row is not None and row.state is not LeaseStatus.LEAVING:
                self._end((row.node,), SPARE_SENTENCE, RELEASED)
        elif agent.spare and agent.holds is not None and agent.gone_at is None:
            if check.releasing and agent.releasing:
                self._end((agent.node,), f"{SPARE_SENTENCE} Its job does not leave it.", RELEASED)
            else:
                self._check_later(SpareCheck(check.lease, agent.releasing))

    def _check_later(self, check: SpareCheck) -> None:
        within_s = self._state.controller.settings.reclaim_s
        asyncio.get_running_loop().call_later(within_s, self.calls.put_nowait, check)

    def _job_is_leaving(self, agent: LeasedAgent) -> bool:
        run = self._state.runs.get(agent.holds or "")
        return run is not None and not agent.releasing and agent.node not in run.rounds.target

    def _end(self, nodes: Collection[str], why: str, reason: str) -> None:
        """End the leases on these nodes.

        Args:
            nodes: names of the nodes.
            why: a sentence for the audit log.
            reason: the reason that is stored with the lease.
        """
        state, ending = self._state, []
        exiting: list[str] = []
        active = state.lease_rows.active
        for node in nodes:
            agent = state.agents.on(node)
            lease = agent.lease if agent else state.lease_rows.on(node)
            if agent is not None:
                self.dismiss(agent, why)
            # No agent will report that the node is free of the job.
            for run in state.runs.values():
                state.rounds.act(run, run.rounds.gone(node, state.clock.now()))
            if lease is not None and lease in active:
                row = state.lease_rows.update(lease, state=LeaseStatus.LEAVING, end_reason=reason)
                if agent is None:
                    ending.append(_lease(row))
                elif state.agents.dismissed(lease) is None:
                    exiting.append(lease)
                state.audit.record(EventKind.LEASE_RELEASED, why, node=node, lease=lease)
        if ending:
            self.calls.put_nowait(ReleaseCall(tuple(ending)))
        if exiting:
            self._await_exit(tuple(exiting))

    def _await_exit(self, leases: tuple[str, ...]) -> None:
        """Give the agents EXIT_WAIT_S to exit, which ends their leases."""
        asyncio.get_running_loop().call_later(EXIT_WAIT_S, self._end_remaining, leases)

    def _end_remaining(self, leases: tuple[str, ...]) -> None:
        """Request the end of those of the leases that have not ended."""
        rows = map(self._state.lease_rows.active.get, leases)
        if remaining := tuple(_lease(row) for row in rows if row is not None):
            self.calls.put_nowait(ReleaseCall(remaining))

    def dismiss(self, agent: LeasedAgent, why: str) -> None:
        """Tell the agent to exit. While it has logs to send it may keep its lease for a while.

        Args:
            agent: whose node is released.
            why: a sentence for the agent's log.
        """
        jobs, agents = self._state.config.jobs, self._state.agents
        if not agent.shipping:
            agents.reach(agent, Goodbye(why))
            agents.remove(agent)
            return
        within_s = jobs.log_wait + (jobs.stop_grace if agent.holds else 0.0)
        agents.reach(agent, Goodbye(why, within_s))
        agents.dismiss(agent)
        asyncio.get_running_loop().call_later(within_s, self.let_go, agent.lease)

    def let_go(self, lease: str) -> None:
        """End the lease of a dismissed agent: its logs have arrived, or took too long."""
        agent, row = self._state.agents.forget(lease), self._state.lease_rows.active.get(lease)
        if agent is not None and row is not None:
            self._await_exit((lease,))

    def cancel_unheard(self, lease: str, sentence: str) -> None:
        """End a running lease whose agent does not report."""
        row = self._state.lease_rows.update(lease, state=LeaseStatus.LEAVING, end_reason=UNHEARD)
        self._state.audit.record(EventKind.LEASE_UNHEARD, sentence, node=row.node, lease=lease)
        self._state.events.append(LeaseUnheard(row.node, row.owner, sentence.rstrip(".")))
        self.calls.put_nowait(ReleaseCall((_lease(row),)))

    def end_lost(self, leases: Sequence[str], sentence: str) -> None:
        """End leases whose agents cannot reach this daemon; ``sentence`` says why."""
        rows = []
        for lease in leases:
            row = self._state.lease_rows.update(
                lease, state=LeaseStatus.LEAVING, end_reason=sentence
            )
            self._state.audit.record(EventKind.LEASE_UNHEARD, sentence, node=row.node, lease=lease)
            rows.append(_lease(row))
        self.calls.put_nowait(ReleaseCall(tuple(rows)))

    def release_again(self, lease: str) -> None:
        """Repeat the request to end a lease that should have ended."""
        row = self._state.lease_rows.active[lease]
        self.calls.put_nowait(ReleaseCall((_lease(row),)))

    def reclaim(self, nodes: tuple[str, ...], within_s: float, why: str = RECLAIM_SENTENCE) -> None:
        """End the leases on these nodes after their jobs have moved off.

        Args:
            nodes: names of the nodes.
            within_s: time that the jobs have to move off, seconds.
            why: reason as a sentence: jobs of another owner need the nodes more, or an operator
                wants them back.
        """
        for node in nodes:
            agent = self._state.agents.on(node)
            if agent is None:
                self._take_back(node, why)
                continue
            self._departures.reclaim(agent, within_s, why)
            self._take_back_later(agent, within_s, why)

    def sick(self, agent: LeasedAgent, sentence: str, broken: bool) -> None:
        """End the lease on a node that is unfit for jobs, after its job has moved off, and do not
        use the node for a while.

        Args:
            agent: agent of the node.
            sentence: what is wrong with the node.
            broken: whether the job's workers have failed, so that nothing has to be moved.
        """
        state, node, lease = self._state, agent.node, agent.lease
        row = state.lease_rows.active.get(lease)
        if row is None or row.end_reason != SICK:  # it may report it repeatedly
            until = state.sick.failed(node, sentence, state.clock.now()).until
            job = agent.holds or ""
            state.audit.record(
                EventKind.NODE_SICK, sentence, node=node, lease=lease, job=job, until=until
            )
        if agent.holds is None or broken:
            self._take_back(node, sentence, SICK)
        elif agent.gone_at is None:
            within_s = state.controller.settings.reclaim_s
            self._departures.sick(agent, within_s, sentence)
            self._take_back_later(agent, within_s, sentence)

    def _take_back_later(self, agent: LeasedAgent, within_s: float, why: str) -> None:
        call = ReclaimExpired(agent.lease, why)
        asyncio.get_running_loop().call_later(within_s, self.calls.put_nowait, call)

    def reclaim_expired(self, lease: str, why: str = RECLAIM_SENTENCE) -> None:
        """End the lease although its job may not have moved off."""
        agent, row = self._state.agents.of_lease(lease), self._state.lease_rows.active.get(lease)
        if agent is not None and row is not None and row.end_reason == SICK:
            self._take_back(agent.node, "Its node is not fit for jobs.", SICK)
        elif agent is not None:
            self._take_back(agent.node, why)

    def _take_back(self, node: str, why: str = RECLAIM_SENTENCE, reason: str = RELEASED) -> None:
        self._end((node,), why, reason)
        self._state.events.append(NodeLost(node))


def _lease(row: LeaseRow) -> Lease:
    return Lease(row.id, row.scheduler_id, LeaseState.RUNNING, row.node)
