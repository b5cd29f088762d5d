"""Handles leased nodes that arrive, from the first message of their agents until jobs get them, and
nodes that leave: preempted with notice, reclaimed for another owner's jobs, or lost without notice.
Everything here runs within a transaction; the controller and the rounds decide what follows for the
jobs.

:class:`Arrivals` decides which Python interpreters each agent keeps warm: those that unfinished
jobs of the lease's owner use, the most used first. Decides also how long a new node is kept out of
plans meanwhile; a job that got the node earlier would wait for the same imports.
:mod:`malletrain.agent.fork_servers` keeps a Python warm on the node.

:class:`Departures` decides the events and messages of a departure, and whether a closed connection
means the loss of a node. An agent's connection may end while the agent lives; the agent reconnects
soon. But if workers on another node of its job fail at the same time because of a lost peer,
connections to two hosts have been closed, and the node counts as lost at once. This does not apply
if workers of the job failed by themselves, because then others report a lost peer, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import structlog

from malletrain.core.events import NodeJoined, NodeLeaving, NodeLost
from malletrain.daemon.engine.agents import Agents, LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.failures import no_way, secondary, starts_again
from malletrain.protocol.interpreters import Interpreter, WarmUp, interpreter_of
from malletrain.protocol.messages import Assignment, Failure, Goodbye
from malletrain.protocol.phases import AssignmentPhase
from scavenger.interface import Lease

log = structlog.get_logger(__name__)

MAX_INTERPRETERS = 2
"""Maximum number of warm interpreters on one node. Each takes some hundred megabytes."""
REPEAT_S = 5.0
"""Time after which the warm-up request to an awaited node is repeated, seconds. The first one may
be lost.
"""


class Arrivals:
    """The new nodes of one daemon. Methods that append events are called within a
    transaction.
    """

    def __init__(self, state: SiteState) -> None:
        self._state = state
        self._idle_s = state.config.nodes.keep_warm
        self._wait_s = state.config.nodes.warm_wait
        self._jobs: frozenset[str] = frozenset()
        """Jobs that were unfinished when warm-up requests were last sent."""

    def interpreters_for(self, owner: str) -> tuple[Interpreter, ...]:
        """Return the interpreters that nodes of an owner are to keep warm, the most used first."""
        if not self._idle_s:
            return ()
        uses: Counter[str] = Counter()
        interpreters: dict[str, Interpreter] = {}
        for run in self._state.runs.values():
            interpreter = interpreter_of(run.spec)
            if interpreter is not None and self._state.accounts.of(run.spec.owner) == owner:
                uses[interpreter.key] += 1
                interpreters.setdefault(interpreter.key, interpreter)
        return tuple(interpreters[key] for key, _ in uses.most_common(MAX_INTERPRETERS))

    def reported(self, agent: LeasedAgent, job: str | None, works: str, now: float) -> None:
        """Make a newly leased node available to jobs, now or when it is warm.

        Args:
            agent: the new agent of the node.
            job: job that is adopted with the node; None if there is none.
            works: job that the node runs, for the audit log; empty if there is none.
            now: time, seconds.
        """
        interpreters = () if agent.warm is None else self.interpreters_for(agent.owner)
        if interpreters:
            self._send_warm_up(agent, interpreters, now)
        if (
            interpreters
            and not works
            and self._wait_s
            and interpreters[0].key not in (agent.warm or ())
        ):
            agent.awaited, agent.awaited_until = interpreters[0].key, now + self._wait_s
        status = f"; it works for {works}" if works else "; it warms up" if agent.awaited else ""
        self._state.audit.record(
            EventKind.NODE_JOINED, f"The node is ours{status}.", node=agent.node, lease=agent.lease
        )
        if not agent.awaited:
            self._join(agent, job, now)

    def warm(self, agent: LeasedAgent, keys: tuple[str, ...], now: float) -> None:
        """Record the interpreters that are warm on a node or failed to start.

        Args:
            agent: agent of the node.
            keys: keys of the interpreters.
            now: time, seconds.
        """
        agent.warm = keys
        if agent.awaited and agent.awaited in keys:
            self._join(agent, None, now)

    def back(self, agent: LeasedAgent, keys: tuple[str, ...] | None, now: float) -> None:
        """Handle another Hello of a known agent. Its connection broke, and the last warm-up request
        may be lost.

        Args:
            agent: agent of the node.
            keys: keys of its warm interpreters; None if it warms up none.
            now: time, seconds.
        """
        self.warm(agent, keys or (), now)
        agent.warm = keys
        if keys is not None and agent.gone_at is None:
            self._send_warm_up_if_needed(agent, self.interpreters_for(agent.owner), now)

    def tick(self, now: float) -> None:
        """Make nodes available whose wait is over. If the set of jobs has changed, send warm-up
        requests to agents that lack an interpreter.
        """
        for agent in self._state.agents:
            if agent.awaited and now >= agent.awaited_until:
                self._join(agent, None, now)
            elif agent.awaited and now >= agent.warm_up_sent_at + REPEAT_S:
                self._send_warm_up(agent, self.interpreters_for(agent.owner), now)
        jobs = frozenset(self._state.runs)
        if jobs == self._jobs:
            return
        self._jobs = jobs
        interpreters: dict[str, tuple[Interpreter, ...]] = {}
        for agent in self._state.agents:
            if agent.warm is None or agent.gone_at is not None:
                continue
            if agent.owner not in interpreters:
                interpreters[agent.owner] = self.interpreters_for(agent.owner)
            wanted_interpreters = interpreters[agent.owner]
            if agent.awaited and agent.awaited not in {each.key for each in wanted_interpreters}:
                agent.awaited = wanted_interpreters[0].key if wanted_interpreters else ""
                if agent.awaited in ("", *agent.warm):
                    self._join(agent, None, now)
            self._send_warm_up_if_needed(agent, wanted_interpreters, now)

    def _send_warm_up_if_needed(
        self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float
    ) -> None:
        if any(interpreter.key not in (agent.warm or ()) for interpreter in interpreters):
            self._send_warm_up(agent, interpreters, now)

    def _send_warm_up(
        self, agent: LeasedAgent, interpreters: tuple[Interpreter, ...], now: float
    ) -> None:
        agent.warm_up_sent_at = now
        self._state.agents.reach(agent, WarmUp(interpreters, self._idle_s))

    def _join(self, agent: LeasedAgent, job: str | None, now: float) -> None:
        agent.awaited = ""
        if agent.gone_at is not None:
            return
        gap = self._state.gaps.get(agent.node)
        horizon, group = (gap.horizon_s, gap.group) if gap else (None, None)
        row = self._state.lease_rows.active.get(agent.lease)
        leased_s = now - row.started if row is not None and row.started is not None else 0.0
        self._state.events.append(
            NodeJoined(
                agent.node,
                agent.node_class,
                horizon,
                group,
                job,
                agent.owner,
                max(0.0, leased_s),
            )
        )


def of_a_peer(assignment: Assignment) -> bool:
    """Whether the workers on a node died or gave up because of a lost peer."""
    if assignment.phase is AssignmentPhase.LOST:
        return True
    failed = assignment.phase is AssignmentPhase.FAILED and assignment.failures
    return bool(failed) and all(secondary(f) and f.exitcode > 0 for f in assignment.failures)


def note_failures(run: ActiveJob, node: str, assignment: Assignment) -> None:
    """Record the cause of the failure of the workers on ``node``.

    Args:
        run: the job.
        node: name of the node.
        assignment: state of the job on the node.
    """
    if of_a_peer(assignment):
        run.bereft[node] = assignment.generation
    elif assignment.phase is AssignmentPhase.FAILED and any(map(_by_itself, assignment.failures)):
        run.crashed = max(run.crashed, assignment.generation)
    if any(no_way(f.tail) for f in assignment.failures):
        run.barred = max(run.barred, assignment.generation)


def _by_itself(failure: Failure) -> bool:
    """Whether the loss of a node, its own or a peer's, does not explain the death of a worker."""
    return failure.exitcode != -9 and not starts_again(failure) and not secondary(failure)


def lost_to_peers(agents: Agents, runs: Iterable[ActiveJob]) -> list[LeasedAgent]:
    """Return the agents whose connection ended and whose peers report a loss in the newest round.
    An agent that reports a lost peer itself is not the lost one.
    """
    lost_agents = []
    for run in runs:
        if not run.bereft:
            continue
        newest = run.rounds.generation
        bereft = {node for node, generation in run.bereft.items() if generation == newest}
        if newest and bereft and run.crashed != newest:
            members = (agents.on(n) for n in run.rounds.members if n not in bereft)
            lost_agents += [a for a in members if a is not None and a.unreachable_since is not None]
    return lost_agents


RELEASED, RECLAIMED, UNHEARD = "released", "reclaimed", "nothing was heard of its agent"
SICK = "its node is not fit for jobs"
"""Stored end reasons of a lease that MalleTrain itself ended: no job needs the node; another
owner's job needs it more; its agent does not report; the node failed a health check.
"""
PREEMPTED, TIME_LIMIT = "preempted", "its time limit was reached"
"""Stored end reasons of a lease that the main scheduler ended."""
TIME_LIMIT_SLACK_S = 5.0
"""Maximum difference between the end by the time limit and the announced end of a lease for which
the time limit counts as the reason of the notice, seconds. Clocks differ, and a scheduler checks
limits at its own intervals.
"""
MIN_HASTE_S = 1.0
"""A departure is hastened if the node should be free so much earlier than known, seconds."""
SPARE_SENTENCE = "No job needs the node."
RECLAIM_SENTENCE = "Jobs of another user have more use for the node."


class Departures:
    """The departures of all agents of one daemon."""

    def __init__(self, state: SiteState, logs: LogSink) -> None:
        self._state = state
        self._logs = logs

    def notice(self, agent: LeasedAgent, in_s: float) -> None:
        """Handle the notice that the main scheduler takes the node back within ``in_s`` seconds.
        Repeated notices have no effect. The notice at the end of the lease's time limit is no
        preemption.

        Args:
            agent: agent of the node.
            in_s: seconds until the node is gone.
        """
        if agent.gone_at is not None and not agent.reclaimed:
            return
        recalled = self._state.recalls.get(agent.lease)
        if recalled is not None and recalled.leave_by is not None:
            in_s = max(0.0, min(in_s, recalled.leave_by - self._state.clock.now()))
        ends_by = self._state.lease_ends.get(agent.lease, math.inf)
        if self._state.clock.now() + in_s + TIME_LIMIT_SLACK_S >= ends_by:
            kind, reason = EventKind.NODE_EXPIRING, TIME_LIMIT
            sentence = f"The lease ends within {in_s:.3g} s: its time limit is reached."
        else:
            self._state.metrics.preemption(notice=True)
            kind, reason = EventKind.NODE_LEAVING, PREEMPTED
            sentence = f"The main scheduler wants the node back within {in_s:.3g} s."
        agent.reclaimed = False
        self._start_departure(kind, agent, in_s, reason, sentence)
        self._state.poll_soon.set()

    def recall(self, lease: Lease) -> None:
        """Handle a poll by which the main scheduler takes a lease back.

        The agent usually knows it by a signal, and may not know how long the main job has waited
        already. A signal that the main scheduler sends while it is still starting the lease is
        lost.

        Args:
            lease: a running lease with a time by which it is gone.
        """
        state = self._state
        now, ends_by = state.clock.now(), state.lease_ends.get(lease.id, math.inf)
        if lease.gone_at is None or lease.gone_at + TIME_LIMIT_SLACK_S >= ends_by:
            return
        state.recalls[lease.id] = lease
        if (agent := state.agents.of_lease(lease.id)) is None:
            return
        if agent.gone_at is None or agent.reclaimed:
            self.notice(agent, max(0.0, lease.gone_at - now))
        elif lease.leave_by is not None and lease.leave_by < agent.gone_at - MIN_HASTE_S:
            self._hasten(agent, max(0.0, lease.leave_by - now), now)

    def _hasten(self, agent: LeasedAgent, in_s: float, now: float) -> None:
        """Leave the time ``in_s`` to a job on a node that leaves already."""
        agent.gone_at = now + in_s
        log.info("a main job has waited for the node already", node=agent.node, in_s=round(in_s, 1))
        self._state.events.append(NodeLeaving(agent.node, in_s))
        run = self._state.runs.get(agent.holds or "")
        if run is not None and agent.node not in run.rounds.target:
            self._state.rounds.act(run, run.rounds.hasten(agent.node, now, in_s))

    def reclaim(
        self, agent: LeasedAgent, within_s: float, sentence: str = RECLAIM_SENTENCE
    ) -> None:
        """Reclaim the agent's node: end its lease as soon as its job has moved off.

        Args:
            agent: agent of the node.
            within_s: maximum time for the job to move off, seconds.
            sentence: why the node is reclaimed.
        """
        self._give_back(agent, within_s, RECLAIMED, sentence)

    def sick(self, agent: LeasedAgent, within_s: float, sentence: str) -> None:
        """Return a node that is unfit for jobs: end its lease as soon as its job has moved off.

        Args:
            agent: agent of the node.
            within_s: maximum time for the job to move off, seconds.
            sentence: what is wrong with the node.
        """
        self._give_back(agent, within_s, SICK, sentence)

    def _give_back(self, agent: LeasedAgent, within_s: float, reason: str, sentence: str) -> None:
        if agent.gone_at is None:
            agent.reclaimed = True
            self._start_departure(EventKind.NODE_RECLAIMED, agent, within_s, reason, sentence)

    def _start_departure(
        self, kind: EventKind, agent: LeasedAgent, in_s: float, reason: str, sentence: str
    ) -> None:
        state = self._state
        agent.gone_at = state.clock.now() + in_s
        state.lease_rows.update(agent.lease, state=LeaseStatus.LEAVING, end_reason=reason)
        state.audit.record(
            kind,
            sentence,
            node=agent.node,
            lease=agent.lease,
            job=agent.holds or "",
            in_s=in_s,
        )
        state.events.append(NodeLeaving(agent.node, in_s))
        if (run := state.runs.get(agent.holds or "")) is not None:
            # The agent's signal may end its workers, too. That is no failure of the job.
            state.rounds.act(run, run.rounds.doubt(agent.node, over=False))
        self.may_go(agent, sentence)

    def may_go(
        self, agent: LeasedAgent, sentence: str = "The main scheduler wants the node back."
    ) -> None:
        """Send Goodbye to an agent whose node is leaving, if it is free of its job."""
        if agent.gone_at is not None and agent.holds is None:
            self._state.agents.reach(agent, Goodbye(sentence))

    def lease_ended(self, lease: str) -> None:
        """Forget the agent of a released lease that has ended."""
        agent = self._state.agents.forget(lease)
        if agent is not None:
            self._logs.gone(agent.node)

    def lost_to_peers(self, runs: Iterable[ActiveJob]) -> None:
        """Declare nodes of ``runs`` lost whose loss is confirmed by their peers' reports."""
        for agent in lost_to_peers(self._state.agents, runs):
            self.lost(agent, "its connection was closed, and its peers lost it too")

    def lost(self, agent: LeasedAgent, why: str) -> None:
        """Handle the loss of a node, with an earlier notice or without."""
        state, node, lease = self._state, agent.node, agent.lease
        state.agents.remove(agent)
        self._logs.gone(node)
        if agent.gone_at is None:
            state.metrics.preemption(notice=False)
            sentence = "The node was taken without notice."
            state.audit.record(EventKind.NODE_VANISHED, sentence, node=node, lease=lease)
        state.audit.record(
            EventKind.NODE_LOST,
            f"The node is gone: {why}.",
            node=node,
            lease=lease,
            job=agent.holds or "",
            notice=agent.gone_at is not None,
        )
        for run in state.runs.values():
            state.rounds.act(run, run.rounds.gone(node, state.clock.now()))
        state.events.append(NodeLost(node))
        state.poll_soon.set()
