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
from malletrain.daemon.engine.agents import Adoption, LeasedAgent
from malletrain.daemon.engine.decisions import Reachability
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import ServiceValues, UnfinishedJobs
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.leases.actions import LeaseActions
from malletrain.daemon.leases.arrivals_and_departures import (
    RECLAIMED,
    RELEASED,
    SICK,
    Arrivals,
    Departures,
    note_failures,
)
from malletrain.daemon.nodes.commands import RelayedCommands
from malletrain.daemon.nodes.farms import Farms
from malletrain.daemon.nodes.probes import Bandwidth, Probes
from malletrain.daemon.nodes.reports import AgentReports
from malletrain.daemon.nodes.slow_nodes import SlowLinkWatch, SlowNodeWatch
from malletrain.daemon.nodes.stuck import HungSteps, StuckRounds, warn_of_silence
from malletrain.protocol import messages
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.protocol.phases import BROKEN
from malletrain.rounds.interface import RoundStage
from malletrain.store.records import LeaseRow

log = structlog.get_logger(__name__)


class AgentHandlers:
    """Handles every message of every agent.

    Args:
        state: the daemon's state.
        transactions: saves what follows from a message.
        jobs: receives the reports of jobs.
        reachability: handles agents that cannot be reached.
        departures: handles nodes that leave or are lost.
        lease_actions: releases and reclaims leases.
        logs: receives the logs of jobs.
        farms: hands out the tasks of farms.
        values: the values of nodes for services.
        commands: relays the commands of owners.
        boot: id of this start of the daemon.
    """

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        jobs: UnfinishedJobs,
        reachability: Reachability,
        departures: Departures,
        lease_actions: LeaseActions,
        logs: LogSink,
        farms: Farms,
        values: ServiceValues,
        commands: RelayedCommands,
        boot: str,
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._reachability = reachability
        self.farms = farms
        self.values = values
        self.departures = departures
        self.lease_actions = lease_actions
        slow = SlowNodeWatch(state, transactions, lease_actions)
        self.reports = AgentReports(state, transactions, jobs, values, logs, slow)
        self._commands = commands
        self.boot = boot
        self.probes = Probes(state.agents)
        self._hung = HungSteps(state, transactions)
        links = SlowLinkWatch(state, transactions, lease_actions, self.probes)
        stuck = StuckRounds(state, transactions, self.probes)
        bandwidth = Bandwidth(state, transactions, self.probes)
        self._watches = (stuck, self._hung, bandwidth, slow, links)
        self.arrivals = Arrivals(state)
        self.poll_soon = state.poll_soon
        self.adopting: Adoption | None = Adoption(state.agents)
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
        state = self._state
        if isinstance(message, messages.Hello):
            self._hello(peer, lease, message)
            return
        agent = state.agents.of_lease(lease)
        if agent is None:
            self._message_of_unregistered(peer, lease, message)
            return
        self._seen(agent, peer)
        if isinstance(message, messages.Heartbeat):
            agent.beat(message)
            answer = messages.Alive if agent.welcomed else messages.WhoAreYou
            state.outbox.answer(peer, answer(self.boot))
        elif isinstance(message, messages.Warm):
            with self._transactions.begin() as now:
                self.arrivals.warm(agent, message.keys, now)
        elif isinstance(message, messages.Leaving):
            with self._transactions.begin():
                self.departures.notice(agent, message.in_s)
        elif isinstance(message, messages.Sick):
            with self._transactions.begin():
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
        elif isinstance(
            message, messages.CommandOutput | messages.CommandInputRead | messages.CommandEnded
        ):
            self._commands.handle(agent, message)
        elif type(message) in self._table:
            job = message.assignment.job if isinstance(message, messages.Phase) else message.job
            run = state.runs.get(job)
            # Progress that was made before the release counts.
            progress = (messages.Progress, messages.TaskResults)
            valid = not agent.releasing or isinstance(message, progress)
            if run is not None and agent.holds == job and valid:
                self._table[type(message)](agent, run, message)
        else:
            state.outbox.answer(
                peer, messages.Error(f"An agent may not send {type(message).__name__}.")
            )

    def _message_of_unregistered(self, peer: bytes, lease: str, message: Any) -> None:
        """Handle a message of an agent without a node for jobs. A dismissed agent may still send
        logs.
        """
        state = self._state
        agent = state.agents.dismissed(lease)
        if agent is None:
            state.outbox.answer(peer, messages.WhoAreYou(self.boot))
        elif isinstance(message, messages.Heartbeat):
            state.outbox.answer(peer, messages.Alive(self.boot))
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
        state, limit = self._state, self._state.config.daemon.agent_timeout
        now = state.clock.now()
        self._commands.tick(now)
        if self.adopting is None and self._partitioned():
            return
        for agent in self._state.agents:
            if now - agent.last_seen > limit:
                self._lost(agent, f"nothing was heard of its agent for {limit:g} s")
            elif agent.unreachable_since is not None and now - agent.unreachable_since > limit / 2:
                self._lost(agent, "the connection of its agent ended and did not come back")
        for run in list(state.runs.values()):
            warn_of_silence(state, self._transactions, run, now)
            if state.layouts.is_silent(run):
                with self._transactions.begin():
                    state.layouts.give_up(run)
        with self._transactions.begin():
            self.arrivals.tick(now)
        self.probes.tick(now)
        if self.adopting is None:
            self.farms.tick(now)
            self.values.expire(now)
            for watch in self._watches:
                watch.check(now)

    def _partitioned(self) -> bool:
        """Whether the daemon is cut off from its agents now."""
        with self._transactions.begin() as now:
            return self._reachability.check(now)

    def probe(self, peers: Collection[bytes]) -> None:
        """Mark the agents that cannot be reached. ``peers``: connections that ended."""
        for agent in self._state.agents:
            if agent.peer not in peers:
                continue
            if agent.unreachable_since is None and not self._state.agents.reach(
                agent, messages.Alive(self.boot)
            ):
                agent.unreachable_since = self._state.clock.now()
                self._reachability.unreachable(agent.node)
                self.poll_soon.set()
        with self._transactions.begin():
            self.departures.lost_to_peers(self._state.runs.values())

    def _lost(self, agent: LeasedAgent, why: str) -> None:
        with self._transactions.begin():
            self.departures.lost(agent, why)

    # --- joining ---

    def _seen(self, agent: LeasedAgent, peer: bytes) -> None:
        agent.last_seen = self._state.clock.now()
        if agent.unreachable_since is not None or agent.peer != peer:
            agent.unreachable_since, agent.peer, agent.welcomed = None, peer, False
            for run in self._state.runs.values():
                run.rounds.reachable(agent.node)

    def _hello(self, peer: bytes, lease: str, hello: messages.Hello) -> None:
        state = self._state
        row = state.lease_rows.active.get(lease) or state.store.get_lease(lease)
        if row is None or row.state == LeaseStatus.ENDED or hello.lease != lease:
            state.outbox.answer(peer, messages.Goodbye("This lease has ended."))
            return
        # A process of another user may claim only its own node.
        if row.owner and hello.node != row.node:
            log.warning(
                "agent refused", lease=lease, owner=row.owner, node=row.node, claimed=hello.node
            )
            state.outbox.answer(peer, messages.Goodbye(f"This lease is for {row.node}."))
            return
        forgotten = state.agents.of_lease(lease) is None and self.adopting is None
        if row.end_reason == RELEASED or (row.end_reason == SICK and forgotten):
            self._dismissed(peer, row, hello)
            return
        registered = state.agents.of_lease(lease)
        if registered is not None and registered.welcomed_at(peer) and hello.again:
            self._seen(registered, peer)  # the answer is on its way
            return
        with self._transactions.begin() as now:
            agent = state.agents.of_lease(lease)
            new = agent is None
            reclaimed = row.end_reason in (RECLAIMED, SICK)  # the agent does not know it
            if row.state == LeaseStatus.LEAVING and hello.gone_in_s is None and not reclaimed:
                # The lease was requeued and has started again, with another agent.
                if agent is not None:
                    self.departures.lost(agent, "its lease has begun again")
                state.outbox.answer(peer, messages.Goodbye("This lease has left."))
                return
            if agent is None:
                if (other := state.agents.on(hello.node)) is not None:
                    self.departures.lost(other, f"lease {lease} has begun on the node")
                node_class = row.node_class if row.owner else hello.node_class
                agent = LeasedAgent(lease, hello.node, peer, hello.host, now, node_class, row.owner)
                state.agents.add(agent)
                if row.state != LeaseStatus.LEAVING:
                    state.lease_rows.update(
                        lease,
                        state=LeaseStatus.RUNNING,
                        node=hello.node,
                        started=row.started or now,
                    )
            self._seen(agent, peer)
            agent.host, agent.networks = hello.host, with_addresses(hello.networks)
            agent.gpus, agent.cores = hello.gpus, hello.cores
            agent.outdated = _outdated_reason(hello.version)
            self._commands.interrupted(lease)
            if new:
                agent.warm = hello.warm
            else:
                self.arrivals.back(agent, hello.warm, now)
            agent.shipping = {*hello.shipping, *([agent.holds] if agent.holds else [])}
            state.agents.reach(agent, self._welcome())
            agent.welcomed = True
            self._settle(agent, hello.assignment, new, now)
            if agent.gone_at is not None:
                self.departures.may_go(agent)  # the agent may not have received it
            elif hello.gone_in_s is not None:
                self.departures.notice(agent, hello.gone_in_s)
            elif lease in state.recalls:  # it was starting when the signal came
                self.departures.recall(state.recalls[lease])
            elif hello.sick:
                self.lease_actions.sick(agent, hello.sick, _workers_failed(hello.assignment))
            elif reclaimed:  # before the daemon's last start
                self.lease_actions.reclaim((agent.node,), state.controller.settings.reclaim_s)
            elif agent.outdated:
                self.lease_actions.free(agent)

    def _welcome(self) -> messages.Welcome:
        config = self._state.config
        return messages.Welcome(self.boot, config.daemon.heartbeat, config.jobs.log_limit)

    def _dismissed(self, peer: bytes, row: LeaseRow, hello: messages.Hello) -> None:
        """Answer an agent that does not know yet that its lease is released, or that was
        disconnected while it sent its logs.
        """
        state, sentence = self._state, "This lease has ended."
        if not hello.shipping:
            state.outbox.answer(peer, messages.Goodbye(sentence))
            self.lease_actions.let_go(row.id)
            return
        state.outbox.answer(peer, self._welcome())
        agent = state.agents.forget(row.id) or LeasedAgent(
            row.id, hello.node, peer, hello.host, state.clock.now(), row.node_class, row.owner
        )
        agent.peer, agent.shipping = peer, set(hello.shipping)
        agent.holds = hello.assignment.job if hello.assignment else None
        self.lease_actions.dismiss(agent, sentence)

    def _settle(
        self, agent: LeasedAgent, assignment: messages.Assignment | None, new: bool, now: float
    ) -> None:
        """Reconcile the job that the agent holds with the one that it should hold."""
        state = self._state
        run = state.runs.get(assignment.job) if assignment else None
        if run is not None and state.accounts.of(run.spec.owner) != agent.owner:
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
                    state.agents.release(agent.node, assignment.job, state.config.jobs.stop_grace)
            job = assignment.job if assignment and adopted else None
            self.arrivals.reported(agent, job, job or "", now)
        elif assignment is None:
            if agent.holds is not None:
                self._released(agent, agent.holds)
        elif run is None or assignment.job != agent.holds:
            agent.holds = assignment.job
            state.agents.release(agent.node, assignment.job, state.config.jobs.stop_grace)
        elif agent.releasing:  # the agent has not received it
            state.agents.release(agent.node, assignment.job, state.config.jobs.stop_grace)
        elif self.adopting is None or not self.adopting.update(agent.node, assignment):
            state.rounds.act(run, run.rounds.phase(agent.node, assignment, now))

    def adopt(self) -> None:
        """End the wait after a restart: adopt the rounds that are complete, and form the others
        again.
        """
        adoption, self.adopting = self.adopting or Adoption(self._state.agents), None
        with self._transactions.begin() as now:
            self._state.controller.hold(now)
            for node, job in adoption.ended_jobs(self._state.runs):
                self._state.agents.release(node, job, self._state.config.jobs.stop_grace)
            for job, run in self._state.runs.items():
                phases = adoption.of(job)
                members = run.row.members or tuple(phases)
                adopted = run.rounds.adopt(run.row.generation, members, phases, now)
                self._state.rounds.act(run, adopted)
                complete = run.rounds.stage is RoundStage.RUNNING and set(
                    run.row.planned_nodes
                ) == set(members)
                if complete:
                    run.monitor.adopted(len(members), now)
                    self._state.audit.record(
                        EventKind.JOB_ADOPTED,
                        f"The job continued meanwhile on {counted(len(members), 'node')}.",
                        job=job,
                    )
                else:  # jobs without nodes are not affected
                    self._transactions.feed(RoundInterrupted(job))

    # --- state of jobs ---

    def _released(self, agent: LeasedAgent, job: str) -> None:
        state = self._state
        with self._transactions.begin() as now:
            state.agents.released(agent, job)
            if (run := state.runs.get(job)) is not None:
                state.rounds.act(run, run.rounds.released(agent.node, now))
            self.lease_actions.free(agent)
            self.departures.may_go(agent)

    def _phase(self, agent: LeasedAgent, run: ActiveJob, message: messages.Phase) -> None:
        if message.tail:
            run.launcher_ended(agent.node, message.tail)
        note_failures(run, agent.node, message.assignment)
        if self.adopting is not None and self.adopting.update(agent.node, message.assignment):
            return
        with self._transactions.begin() as now:
            self._state.rounds.act(run, run.rounds.phase(agent.node, message.assignment, now))
            self.departures.lost_to_peers([run])

    def _doubt(self, agent: LeasedAgent, run: ActiveJob, message: messages.Doubt) -> None:
        with self._transactions.begin():
            self._state.rounds.act(run, run.rounds.doubt(agent.node, message.over))

    def _store_up(self, agent: LeasedAgent, run: ActiveJob, message: messages.StoreUp) -> None:
        with self._transactions.begin():
            self._state.rounds.act(
                run, run.rounds.store_up(agent.node, message.generation, message.host, message.port)
            )

    def _drained(self, agent: LeasedAgent, run: ActiveJob, message: messages.Drained) -> None:
        with self._transactions.begin() as now:
            if message.sentence:
                # It explains lost samples; the workers may just be starting.
                self._state.audit.record(
                    EventKind.DRAIN_WITHOUT_SNAPSHOT,
                    message.sentence,
                    job=run.row.id,
                    node=agent.node,
                )
            drained = run.rounds.drained(agent.node, message.generation, now, message.number)
            self._state.rounds.act(run, drained)


def _outdated_reason(version: str | None) -> str:
    """Return why an agent of another version is replaced, as a sentence; empty if it has the
    daemon's version.

    Messages of this daemon may have fields that the agent does not know and ignores. Its jobs
    continue until it is replaced. ``version``: as the agent states it; None if it states none.
    """
    if version == __version__:
        return ""
    which = "an earlier malletrain" if version is None else f"malletrain {version}"
    return f"Its agent is of {which}, the daemon of {__version__}."


def _workers_failed(assignment: messages.Assignment | None) -> bool:
    """Whether the workers of an agent have failed."""
    return assignment is not None and assignment.phase in BROKEN
