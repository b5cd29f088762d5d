"""Handles the messages of agents: turns them into events for the controller and the rounds.

Decides when an agent is lost, and that an agent reports only on the job that it holds. The
controller and the rounds decide what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import structlog

from malletrain import __version__
from malletrain.core.events import RoundInterrupted
from malletrain.core.fabric import with_addresses
from malletrain.daemon.engine.agent_liveness import AgentLiveness
from malletrain.daemon.engine.agents import Adoption, LeasedAgent
from malletrain.daemon.engine.core import Core
from malletrain.daemon.engine.state import DaemonState
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.leases.actions import LeaseActions
from malletrain.daemon.leases.departures import RECLAIMED, RELEASED, SICK, Departures, note_failures
from malletrain.daemon.nodes.arrivals import Arrivals
from malletrain.daemon.nodes.farms import Farms
from malletrain.daemon.nodes.probes import Bandwidth, Probes
from malletrain.daemon.nodes.reports import AgentReports
from malletrain.daemon.nodes.slow_nodes import SlowLinkWatch, SlowNodeWatch
from malletrain.daemon.nodes.stuck import HungSteps, StuckRounds, warn_of_silence
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.phases import BROKEN
from malletrain.rounds.interface import RoundStage
from malletrain.store.records import LeaseRow

log = structlog.get_logger(__name__)


class AgentHandlers:
    """Handles every message of every agent.

    Args:
        core: applies what follows from a message, in a transaction.
        state: the daemon's state.
        departures: handles nodes that leave or are lost.
        lease_actions: releases and reclaims leases.
        logs: receives the logs of jobs.
        farms: hands out the tasks of farms.
        boot: id of this start of the daemon.
    """

    def __init__(
        self,
        core: Core,
        state: DaemonState,
        departures: Departures,
        lease_actions: LeaseActions,
        logs: LogSink,
        farms: Farms,
        boot: str,
    ) -> None:
        self.core = core
        self.farms = farms
        self.departures = departures
        self.lease_actions = lease_actions
        slow = SlowNodeWatch(core, state, lease_actions)
        self.reports = AgentReports(core, logs, slow)
        self.boot = boot
        self.probes = Probes(core.agents)
        self._hung, links = HungSteps(core), SlowLinkWatch(core, lease_actions, self.probes)
        stuck, bandwidth = StuckRounds(core, self.probes), Bandwidth(core, self.probes)
        self._watches = (stuck, self._hung, bandwidth, slow, links)
        self.arrivals = Arrivals(state)
        self.poll_soon = state.poll_soon
        self.adopting: Adoption | None = Adoption(core.agents)
        self._table: dict[type, Callable[[LeasedAgent, ActiveJob, Any], None]] = {
            messages.Phase: self._phase,
            messages.StoreUp: self._store_up,
            messages.Drained: self._drained,
            messages.Worth: self.reports.worth,
            messages.TaskPull: farms.pull,
            messages.TaskResults: farms.results,
            messages.Progress: self.reports.progress,
            messages.Mark: lambda agent, run, m: run.monitor.mark(m),
            messages.Metric: self.reports.metric,
            messages.Notice: self.reports.notice,
            messages.Doubt: self._doubt,
            messages.Stacks: self._hung.receive_stacks,
        }

    def handle(self, peer: bytes, lease: str, message: Any) -> None:
        """Handle a message.

        Args:
            peer: address of the connection.
            lease: id of the lease whose key signed the message.
            message: the decoded message.
        """
        core = self.core
        if isinstance(message, messages.Hello):
            self._hello(peer, lease, message)
            return
        agent = core.agents.of_lease(lease)
        if agent is None:
            self._message_of_unregistered(peer, lease, message)
            return
        self._seen(agent, peer)
        if isinstance(message, messages.Heartbeat):
            agent.beat(message)
            answer = messages.Alive if agent.welcomed else messages.WhoAreYou
            core.transmit(peer, answer(self.boot))
        elif isinstance(message, messages.Warm):
            with core.transaction() as now:
                self.arrivals.warm(agent, message.keys, now)
        elif isinstance(message, messages.Leaving):
            with core.transaction():
                self.departures.notice(agent, message.in_s, message.reason)
        elif isinstance(message, messages.Sick):
            with core.transaction():
                self.lease_actions.sick(agent, message.sentence, message.broken)
        elif isinstance(message, messages.Released):
            self._released(agent, message.job)
        elif isinstance(message, messages.LogChunk):
            self.reports.log_chunk(agent, message)
        elif isinstance(message, messages.LogEnd):
            self.reports.log_end(agent, message)
        elif isinstance(message, messages.ProbeUp):
            self.probes.up(agent.node, message)
        elif isinstance(message, messages.Probed):
            self.probes.tried(agent.node, message)
        elif isinstance(message, messages.LogsShipped):
            if agent.holds != message.job:  # else it is from before the agent got the job again
                agent.shipping.discard(message.job)
        elif type(message) in self._table:
            job = message.assignment.job if isinstance(message, messages.Phase) else message.job
            run = core.runs.get(job)
            # Progress that was made before the release counts.
            progress = (messages.Progress, messages.TaskResults)
            valid = not agent.releasing or isinstance(message, progress)
            if run is not None and agent.holds == job and valid:
                self._table[type(message)](agent, run, message)
        else:
            core.transmit(peer, messages.Error(f"An agent may not send {type(message).__name__}."))

    def _message_of_unregistered(self, peer: bytes, lease: str, message: Any) -> None:
        """Handle a message of an agent without a node for jobs. A dismissed agent may still send
        logs.
        """
        core = self.core
        agent = core.agents.dismissed(lease)
        if agent is None:
            core.transmit(peer, messages.WhoAreYou(self.boot))
        elif isinstance(message, messages.Heartbeat):
            core.transmit(peer, messages.Alive(self.boot))
        elif isinstance(message, messages.LogChunk):
            self.reports.log_chunk(agent, message)
        elif isinstance(message, messages.LogEnd):
            self.reports.log_end(agent, message)
        elif isinstance(message, messages.LogsShipped):
            agent.shipping.discard(message.job)
            if not agent.shipping:
                self.lease_actions.let_go(lease)

    def watch(self) -> None:
        """Declare silent agents lost, and run the periodic checks. Call it about every half
        second.
        """
        core, limit = self.core, self.core.config.daemon.agent_timeout
        if self.adopting is None and self._partitioned():
            return
        now = core.clock.now()
        for agent in self.core.agents:
            if now - agent.last_seen > limit:
                self._lost(agent, f"nothing was heard of its agent for {limit:g} s")
            elif agent.unreachable_since is not None and now - agent.unreachable_since > limit / 2:
                self._lost(agent, "the connection of its agent ended and did not come back")
        for run in list(core.runs.values()):
            warn_of_silence(core, run, now)
        with core.transaction():
            self.arrivals.look(now)
        self.probes.tick(now)
        if self.adopting is None:
            self.farms.look(now)
            for watch in self._watches:
                watch.look(now)

    def _partitioned(self) -> bool:
        """Whether the daemon is cut off from its agents now."""
        core = self.core
        with core.transaction() as now:
            last_heard = [agent.last_seen for agent in core.agents]
            liveness = core.liveness.check(last_heard, now)
            if liveness is AgentLiveness.PARTITIONED:
                core.partitioned(now)
            elif liveness is AgentLiveness.RECOVERED:
                core.recovered("The daemon hears its agents again", now)
            elif core.liveness.settled(last_heard, now):
                core.controller.hold(now)
        return liveness is AgentLiveness.PARTITIONED

    def probe(self, peers: Collection[bytes]) -> None:
        """Mark the agents that cannot be reached. ``peers``: connections that ended."""
        for agent in self.core.agents:
            if agent.peer not in peers:
                continue
            if agent.unreachable_since is None and not self.core.agents.reach(
                agent, messages.Alive(self.boot)
            ):
                agent.unreachable_since = self.core.clock.now()
                self.core.unreachable(agent.node)
                self.poll_soon.set()
        with self.core.transaction():
            self.departures.lost_to_peers(self.core.runs.values())

    def _lost(self, agent: LeasedAgent, why: str) -> None:
        with self.core.transaction():
            self.departures.lost(agent, why)

    # --- joining ---

    def _seen(self, agent: LeasedAgent, peer: bytes) -> None:
        agent.last_seen = self.core.clock.now()
        if agent.unreachable_since is not None or agent.peer != peer:
            agent.unreachable_since, agent.peer, agent.welcomed = None, peer, False
            for run in self.core.runs.values():
                run.rounds.reachable(agent.node)

    def _hello(self, peer: bytes, lease: str, hello: messages.Hello) -> None:
        core = self.core
        row = core.lease_rows.active.get(lease) or core.store.get_lease(lease)
        if row is None or row.state == LeaseStatus.ENDED or hello.lease != lease:
            core.transmit(peer, messages.Goodbye("This lease has ended."))
            return
        # A process of another user may claim only its own node.
        if row.owner and hello.node != row.node:
            log.warning(
                "agent refused", lease=lease, owner=row.owner, node=row.node, claimed=hello.node
            )
            core.transmit(peer, messages.Goodbye(f"This lease is for {row.node}."))
            return
        forgotten = core.agents.of_lease(lease) is None and self.adopting is None
        if row.end_reason == RELEASED or (row.end_reason == SICK and forgotten):
            self._dismissed(peer, row, hello)
            return
        registered = core.agents.of_lease(lease)
        if registered is not None and registered.welcomed_at(peer) and hello.again:
            self._seen(registered, peer)  # the answer is on its way
            return
        with core.transaction() as now:
            agent = core.agents.of_lease(lease)
            new = agent is None
            reclaimed = row.end_reason in (RECLAIMED, SICK)  # the agent does not know it
            if row.state == LeaseStatus.LEAVING and hello.gone_in_s is None and not reclaimed:
                # The lease was requeued and has started again, with another agent.
                if agent is not None:
                    self.departures.lost(agent, "its lease has begun again")
                core.transmit(peer, messages.Goodbye("This lease has left."))
                return
            if agent is None:
                if (other := core.agents.on(hello.node)) is not None:
                    self.departures.lost(other, f"lease {lease} has begun on the node")
                node_class = row.node_class if row.owner else hello.node_class
                agent = LeasedAgent(lease, hello.node, peer, hello.host, now, node_class, row.owner)
                core.agents.add(agent)
                if row.state != LeaseStatus.LEAVING:
                    core.lease_rows.update(
                        lease,
                        state=LeaseStatus.RUNNING,
                        node=hello.node,
                        started=row.started or now,
                    )
            self._seen(agent, peer)
            agent.host, agent.networks = hello.host, with_addresses(hello.networks)
            agent.outdated = _outdated_reason(hello.version)
            if new:
                agent.warm = hello.warm
            else:
                self.arrivals.back(agent, hello.warm, now)
            agent.shipping = {*hello.shipping, *([agent.holds] if agent.holds else [])}
            core.agents.reach(agent, self._welcome())
            agent.welcomed = True
            self._settle(agent, hello.assignment, new, now)
            if agent.gone_at is not None:
                self.departures.may_go(agent)  # the agent may not have received it
            elif hello.gone_in_s is not None:
                self.departures.notice(agent, hello.gone_in_s, "")
            elif hello.sick:
                self.lease_actions.sick(agent, hello.sick, _workers_failed(hello.assignment))
            elif reclaimed:  # before the daemon's last start
                self.lease_actions.reclaim((agent.node,), core.controller.settings.reclaim_s)
            elif agent.outdated:
                self.lease_actions.free(agent)

    def _welcome(self) -> messages.Welcome:
        config = self.core.config
        return messages.Welcome(self.boot, config.daemon.heartbeat, config.jobs.log_limit)

    def _dismissed(self, peer: bytes, row: LeaseRow, hello: messages.Hello) -> None:
        """Answer an agent that does not know yet that its lease is released, or that was
        disconnected while it sent its logs.
        """
        core, sentence = self.core, "This lease has ended."
        if not hello.shipping:
            core.transmit(peer, messages.Goodbye(sentence))
            self.lease_actions.let_go(row.id)
            return
        core.transmit(peer, self._welcome())
        agent = core.agents.forget(row.id) or LeasedAgent(
            row.id, hello.node, peer, hello.host, core.clock.now(), row.node_class, row.owner
        )
        agent.peer, agent.shipping = peer, set(hello.shipping)
        agent.holds = hello.assignment.job if hello.assignment else None
        self.lease_actions.dismiss(agent, sentence)

    def _settle(
        self, agent: LeasedAgent, assignment: messages.Assignment | None, new: bool, now: float
    ) -> None:
        """Reconcile the job that the agent holds with the one that it should hold."""
        core = self.core
        run = core.runs.get(assignment.job) if assignment else None
        if run is not None and core.accounts.of(run.spec.owner) != agent.owner:
            log.warning(
                "agent speaks for a job of another user",
                lease=agent.lease,
                owner=agent.owner,
                job=run.row.id,
            )
            run = None
        if new:
            adopted = run is not None and self.adopting is not None
            if assignment is not None:
                agent.holds = assignment.job
                if adopted and self.adopting is not None:
                    self.adopting.record(agent.node, assignment)
                else:
                    core.agents.release(agent.node, assignment.job, core.config.jobs.stop_grace)
            job = assignment.job if assignment and adopted else None
            self.arrivals.reported(agent, job, job or "", now)
        elif assignment is None:
            if agent.holds is not None:
                self._released(agent, agent.holds)
        elif run is None or assignment.job != agent.holds:
            agent.holds = assignment.job
            core.agents.release(agent.node, assignment.job, core.config.jobs.stop_grace)
        elif agent.releasing:  # the agent has not received it
            core.agents.release(agent.node, assignment.job, core.config.jobs.stop_grace)
        elif self.adopting is None or not self.adopting.update(agent.node, assignment):
            core.rounds.act(run, run.rounds.phase(agent.node, assignment, now))

    def adopt(self) -> None:
        """End the wait after a restart: adopt the rounds that are complete, and form the others
        again.
        """
        adoption, self.adopting = self.adopting or Adoption(self.core.agents), None
        with self.core.transaction() as now:
            self.core.controller.hold(now)
            for node, job in adoption.ended_jobs(self.core.runs):
                self.core.agents.release(node, job, self.core.config.jobs.stop_grace)
            for job, run in self.core.runs.items():
                phases = adoption.of(job)
                members = run.row.members or tuple(phases)
                adopted = run.rounds.adopt(run.row.generation, members, phases, now)
                self.core.rounds.act(run, adopted)
                complete = run.rounds.stage is RoundStage.RUNNING and set(
                    run.row.planned_nodes
                ) == set(members)
                if complete:
                    run.monitor.adopted(len(members), now)
                    self.core.audit.record(
                        EventKind.JOB_ADOPTED,
                        f"The job continued meanwhile on {len(members)} nodes.",
                        job=job,
                    )
                else:  # jobs without nodes are not affected
                    self.core.feed(RoundInterrupted(job))

    # --- state of jobs ---

    def _released(self, agent: LeasedAgent, job: str) -> None:
        core = self.core
        with core.transaction() as now:
            core.agents.released(agent, job)
            if (run := core.runs.get(job)) is not None:
                core.rounds.act(run, run.rounds.released(agent.node, now))
            self.lease_actions.free(agent)
            self.departures.may_go(agent)

    def _phase(self, agent: LeasedAgent, run: ActiveJob, message: messages.Phase) -> None:
        if message.tail:
            run.launcher_tail = message.tail
        note_failures(run, agent.node, message.assignment)
        if self.adopting is not None and self.adopting.update(agent.node, message.assignment):
            return
        with self.core.transaction() as now:
            self.core.rounds.act(run, run.rounds.phase(agent.node, message.assignment, now))
            self.departures.lost_to_peers([run])

    def _doubt(self, agent: LeasedAgent, run: ActiveJob, message: messages.Doubt) -> None:
        with self.core.transaction():
            self.core.rounds.act(run, run.rounds.doubt(agent.node, message.over))

    def _store_up(self, agent: LeasedAgent, run: ActiveJob, message: messages.StoreUp) -> None:
        with self.core.transaction():
            self.core.rounds.act(
                run, run.rounds.store_up(agent.node, message.generation, message.host, message.port)
            )

    def _drained(self, agent: LeasedAgent, run: ActiveJob, message: messages.Drained) -> None:
        with self.core.transaction() as now:
            if message.sentence:
                # It explains lost samples; the workers may just be starting.
                self.core.audit.record(
                    EventKind.DRAIN_WITHOUT_SNAPSHOT,
                    message.sentence,
                    job=run.row.id,
                    node=agent.node,
                )
            drained = run.rounds.drained(agent.node, message.generation, now, message.number)
            self.core.rounds.act(run, drained)


def _outdated_reason(version: str | None) -> str:
    """Return why an agent of another version is replaced, as a sentence; empty if it has the
    daemon's version.

    Messages of this daemon may have fields that the agent does not know. Its jobs continue until it
    is replaced. ``version``: as the agent states it; None if it states none.
    """
    if version == __version__:
        return ""
    which = "an earlier malletrain" if version is None else f"malletrain {version}"
    return f"Its agent is of {which}, the daemon of {__version__}."


def _workers_failed(assignment: messages.Assignment | None) -> bool:
    """Whether the workers of an agent have failed."""
    return assignment is not None and assignment.phase in BROKEN
