"""Taking, releasing and reclaiming leases, as the controller commands.

Decides what is stored and told before the main scheduler is asked: a lease is in the store first,
so a daemon that is killed finds on its next start whatever came of it. All of it happens within a
step of the core. The calls of the scheduler wait in a queue for :mod:`malletrain.daemon.leases`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from malletrain.core.events import LeaseNotTaken, LeaseUnheard, NodeLost
from malletrain.daemon.agents import LeasedAgent
from malletrain.daemon.departures import (
    RECLAIM_SENTENCE,
    RELEASED,
    SICK,
    SPARE_SENTENCE,
    UNHEARD,
    Departures,
)
from malletrain.daemon.parts import Parts
from malletrain.identity.keys import KeyPair, KeyRing, user_name
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.messages import Goodbye
from malletrain.store.records import LeaseRow
from scavenger.interface import Lease, LeaseRequest, LeaseState

GOES_S = 2.0
"""An agent that was told to go has so long until the main scheduler is asked to end its lease: it
is gone in less, and then there is nothing to ask, or nothing left to end. (OpenPBS 23.06 now and
then never answers a ``qdel`` for a job that ends in the same moment.)
"""

AgentCommand = Callable[[str, KeyPair], tuple[Sequence[str], Mapping[str, str]]]
"""Lease id and its key → argv and environment of the agent."""


@dataclass(frozen=True)
class TakeCall:
    """The scheduler is to be asked for these leases."""

    requests: tuple[LeaseRequest, ...]


@dataclass(frozen=True)
class ReleaseCall:
    """The scheduler is to end these leases."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True)
class ReclaimOver:
    """The time is up in which the job was to move off the node of this lease. ``why``: it was
    to, as a sentence.
    """

    lease: str
    why: str = RECLAIM_SENTENCE


@dataclass(frozen=True)
class SpareLook:
    """It is time to see whether a spare node has been left. ``told``: at the last look its agent
    had been told to let go of the job.
    """

    lease: str
    told: bool = False


Call = TakeCall | ReleaseCall | ReclaimOver | SpareLook


class LeaseDesk:
    """What the controller's commands do to leases."""

    def __init__(
        self, parts: Parts, departures: Departures, keys: KeyRing, command: AgentCommand
    ) -> None:
        self._parts = parts
        self._departures = departures
        self._keys = keys
        self._command = command
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.being_taken: set[str] = set()
        """Leases stored of which the scheduler may not have heard yet."""

    def take(self, nodes: tuple[str, ...], owner: str) -> None:
        """Ask for a lease on each of these nodes, as ``owner``."""
        parts = self._parts
        if owner and not parts.accounts.submits_as_others:
            # A job from a time when others were served.
            parts.events.extend(LeaseNotTaken(node, owner) for node in nodes)
            return
        requests, rows, account = [], [], parts.parties.account(owner or user_name())
        for node, lease in zip(nodes, parts.store.new_lease_ids(len(nodes)), strict=True):
            pair = self._keys.make_lease_key(lease)
            reached(FaultPoint.DAEMON_KEYED)
            gap = parts.gaps.get(node)
            row = LeaseRow(
                lease,
                node,
                LeaseStatus.REQUESTED,
                public_key=pair.public,
                node_class=gap.node_class if gap else "default",
                owner=owner,
                requested=parts.clock.now(),
                account=account,
            )
            rows.append(row)
            argv, env = self._command(lease, pair)
            requests.append(LeaseRequest(lease, node, tuple(argv), env, owner=owner or None))
            self.being_taken.add(lease)
        parts.lease_rows.add(rows)
        for row in rows:
            parts.audit.record(
                EventKind.LEASE_REQUESTED,
                "The node is idle and of use.",
                node=row.node,
                lease=row.id,
            )
        parts.metrics.lease_requested(len(requests))
        self.calls.put_nowait(TakeCall(tuple(requests)))

    def release(self, nodes: tuple[str, ...]) -> None:
        """No job needs these nodes any more. One that a job has yet to leave, because its joiners
        come up or it saves what is done, goes when it is free.
        """
        agents = (self._parts.agents.on(node) for node in nodes)
        busy = {a.node: a for a in agents if a is not None and self._is_being_left(a)}
        for agent in busy.values():
            agent.spare = True
            self._look_in(SpareLook(agent.lease))
        self._end([n for n in nodes if n not in busy], SPARE_SENTENCE, RELEASED)

    def free(self, agent: LeasedAgent) -> None:
        """The agent is free of its job: its lease ends if no other needs the node, or if the agent
        is outdated. The node may be leased again at once.
        """
        if agent.holds is not None or agent.gone_at is not None:
            return
        if agent.outdated:
            self._take_back(agent.node, agent.outdated)
        elif agent.spare:
            self._end((agent.node,), SPARE_SENTENCE, RELEASED)

    def spare_look(self, look: SpareLook) -> None:
        """A spare node whose agent was told to let go, and has not for so long that it hangs, or
        its job's processes do, goes all the same; so does one whose agent is lost.
        """
        agent = self._parts.agents.of_lease(look.lease)
        row = self._parts.lease_rows.active.get(look.lease)
        if agent is None:
            if row is not None and row.state is not LeaseStatus.LEAVING:
                self._end((row.node,), SPARE_SENTENCE, RELEASED)
        elif agent.spare and agent.holds is not None and agent.gone_at is None:
            if look.told and agent.releasing:
                self._end((agent.node,), f"{SPARE_SENTENCE} Its job does not leave it.", RELEASED)
            else:
                self._look_in(SpareLook(look.lease, agent.releasing))

    def _look_in(self, look: SpareLook) -> None:
        within_s = self._parts.controller.settings.reclaim_s
        asyncio.get_running_loop().call_later(within_s, self.calls.put_nowait, look)

    def _is_being_left(self, agent: LeasedAgent) -> bool:
        run = self._parts.runs.get(agent.holds or "")
        return run is not None and not agent.releasing and agent.node not in run.rounds.target

    def _end(self, nodes: Collection[str], why: str, reason: str) -> None:
        """Nothing is to run on these nodes any more. ``reason``: what is stored of it."""
        parts, ending = self._parts, []
        going: list[str] = []
        active = parts.lease_rows.active
        for node in nodes:
            agent = parts.agents.on(node)
            lease = agent.lease if agent else parts.lease_rows.on(node)
            if agent is not None:
                self.dismiss(agent, why)
            # Nobody will say that the node is free of a job it was just released from.
            for run in parts.runs.values():
                parts.rounds.act(run, run.rounds.gone(node, parts.clock.now()))
            if lease is not None and lease in active:
                row = parts.lease_rows.update(lease, state=LeaseStatus.LEAVING, end_reason=reason)
                if agent is None:
                    ending.append(_lease(row))
                elif parts.agents.dismissed(lease) is None:
                    going.append(lease)
                parts.audit.record(EventKind.LEASE_RELEASED, why, node=node, lease=lease)
        if ending:
            self.calls.put_nowait(ReleaseCall(tuple(ending)))
        if going:
            self._is_going(tuple(going))

    def _is_going(self, leases: tuple[str, ...]) -> None:
        """Their agents end these leases, or the main scheduler is asked to."""
        asyncio.get_running_loop().call_later(GOES_S, self._gone_by_now, leases)

    def _gone_by_now(self, leases: tuple[str, ...]) -> None:
        """End those of these leases whose agents have not ended them by going."""
        rows = map(self._parts.lease_rows.active.get, leases)
        if left := tuple(_lease(row) for row in rows if row is not None):
            self.calls.put_nowait(ReleaseCall(left))

    def dismiss(self, agent: LeasedAgent, why: str) -> None:
        """Have the agent go; one that has logs to send keeps its lease for that, for a while."""
        jobs, agents = self._parts.config.jobs, self._parts.agents
        if not agent.shipping:
            agents.reach(agent, Goodbye(why))
            agents.remove(agent)
            return
        within_s = jobs.log_wait + (jobs.stop_grace if agent.holds else 0.0)
        agents.reach(agent, Goodbye(why, within_s))
        agents.dismiss(agent)
        asyncio.get_running_loop().call_later(within_s, self.let_go, agent.lease)

    def let_go(self, lease: str) -> None:
        """The logs of a dismissed agent are here, or the time for them is up: end its lease."""
        agent, row = self._parts.agents.forget(lease), self._parts.lease_rows.active.get(lease)
        if agent is not None and row is not None:
            self._is_going((lease,))

    def cancel_unheard(self, lease: str, sentence: str) -> None:
        """The lease runs, and its agent does not report: end it."""
        row = self._parts.lease_rows.update(lease, state=LeaseStatus.LEAVING, end_reason=UNHEARD)
        self._parts.audit.record(EventKind.LEASE_UNHEARD, sentence, node=row.node, lease=lease)
        self._parts.events.append(LeaseUnheard(row.node, row.owner))
        self.calls.put_nowait(ReleaseCall((_lease(row),)))

    def end_lost(self, leases: Sequence[str], sentence: str) -> None:
        """The agents of these leases do not find this daemon: end the leases."""
        rows = []
        for lease in leases:
            row = self._parts.lease_rows.update(
                lease, state=LeaseStatus.LEAVING, end_reason=sentence
            )
            self._parts.audit.record(EventKind.LEASE_UNHEARD, sentence, node=row.node, lease=lease)
            rows.append(_lease(row))
        self.calls.put_nowait(ReleaseCall(tuple(rows)))

    def release_again(self, lease: str) -> None:
        """The lease was to leave, and is still there: ask for its end once more."""
        row = self._parts.lease_rows.active[lease]
        self.calls.put_nowait(ReleaseCall((_lease(row),)))

    def reclaim(self, nodes: tuple[str, ...], within_s: float, why: str = RECLAIM_SENTENCE) -> None:
        """Jobs of another owner need these nodes more, or an operator wants them back: end their
        leases once their jobs have moved off.
        """
        for node in nodes:
            agent = self._parts.agents.on(node)
            if agent is None:
                self._take_back(node, why)
                continue
            self._departures.reclaim(agent, within_s, why)
            self._take_back_in(agent, within_s, why)

    def sick(self, agent: LeasedAgent, sentence: str, broken: bool) -> None:
        """The node of this agent is not fit for jobs: it goes once its job has moved off, and is
        left alone for a while. ``broken``: there is nothing to move any more.
        """
        parts, node, lease = self._parts, agent.node, agent.lease
        row = parts.lease_rows.active.get(lease)
        if row is None or row.end_reason != SICK:  # else it says so again
            until = parts.sick.failed(node, sentence, parts.clock.now()).until
            job = agent.holds or ""
            parts.audit.record(
                EventKind.NODE_SICK, sentence, node=node, lease=lease, job=job, until=until
            )
        if agent.holds is None or broken:
            self._take_back(node, sentence, SICK)
        elif agent.gone_at is None:
            within_s = parts.controller.settings.reclaim_s
            self._departures.sick(agent, within_s, sentence)
            self._take_back_in(agent, within_s, sentence)

    def _take_back_in(self, agent: LeasedAgent, within_s: float, why: str) -> None:
        over = ReclaimOver(agent.lease, why)
        asyncio.get_running_loop().call_later(within_s, self.calls.put_nowait, over)

    def reclaim_over(self, lease: str, why: str = RECLAIM_SENTENCE) -> None:
        """The time to move off is up."""
        agent, row = self._parts.agents.of_lease(lease), self._parts.lease_rows.active.get(lease)
        if agent is not None and row is not None and row.end_reason == SICK:
            self._take_back(agent.node, "Its node is not fit for jobs.", SICK)
        elif agent is not None:
            self._take_back(agent.node, why)

    def _take_back(self, node: str, why: str = RECLAIM_SENTENCE, reason: str = RELEASED) -> None:
        self._end((node,), why, reason)
        self._parts.events.append(NodeLost(node))


def _lease(row: LeaseRow) -> Lease:
    return Lease(row.id, row.scheduler_id, LeaseState.RUNNING, row.node)
