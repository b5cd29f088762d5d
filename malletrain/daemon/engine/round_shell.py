"""Runs the rounds of every job: carries out their actions through the agents, stores them, and
informs the controller.

The rounds decide (:mod:`malletrain.rounds`). Everything here runs within a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from malletrain.config.model import Config
from malletrain.core.events import (
    Event,
    JobCompleted,
    NodeRejected,
    RescaleFinished,
    RoundInterrupted,
    SoftwareLacking,
    StartCostChanged,
    WorkersFailed,
    WorkersStarted,
)
from malletrain.core.fabric import Fabric, choose
from malletrain.core.state_memory import HandOverTime
from malletrain.core.unleased_nodes import FailingNodes
from malletrain.daemon.engine.agents import Agents
from malletrain.daemon.jobs.layouts import Layouts
from malletrain.daemon.jobs.repository import ActiveJob, JobRepository
from malletrain.daemon.site.backends import notice_of
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.protocol import messages
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import NetworkView
from malletrain.rounds.interface import (
    Action,
    AllUp,
    Broke,
    NodesRejected,
    SaveRound,
    SendAbort,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    SendView,
    StartMeasured,
    View,
    WorkersDone,
    WorkersRunning,
)
from scavenger.hostlist import named

MAX_NODES_TRIED = 3
"""Number of nodes without a job's software after which the job fails; fewer if the machine has
fewer.
"""
MAX_REASON_LENGTH = 1000
"""Maximum length of the reason of a failure, in characters. It quotes the job's last line, which
may be of any length.
"""


class RoundShell:
    """Runs the rounds of all jobs of one daemon.

    Args:
        config: the site's configuration.
        clock: the daemon's clock.
        agents: the connected agents.
        repository: stores jobs.
        audit: the audit log.
        feed: passes an event to the controller.
        job_key_of: returns the secret that a job's processes share, as hexadecimal text.
        lasts_of: returns for how long a node is expected to last, seconds; None if unknown.
        failing: counts failures by node.
        layouts: decides the layout of the nodes of each round.
        members_changed: called with the id of a job whose members change.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        agents: Agents,
        repository: JobRepository,
        audit: AuditLog,
        feed: Callable[[Event], None],
        job_key_of: Callable[[str], str],
        lasts_of: Callable[[str], float | None],
        failing: FailingNodes,
        layouts: Layouts,
        members_changed: Callable[[str], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._agents = agents
        self._repository = repository
        self._audit = audit
        self._feed = feed
        self.job_key_of = job_key_of
        self._lasts_of = lasts_of
        self._failing = failing
        self._layouts = layouts
        self._members_changed = members_changed
        self.measured: dict[str, NetworkView] = {}
        """Class of nodes → measurement of its network."""
        self.nodes_in_all: int | None = None
        """Number of the machine's nodes at the last poll; None before the first."""

    def configure(self, config: Config) -> None:
        """Replace the configuration."""
        self._config = config

    def act(self, run: ActiveJob, actions: list[Action]) -> None:
        """Carry out the actions of a job's rounds."""
        job = run.row.id
        for action in actions:
            if isinstance(action, SendAssign):
                if self._agents.assign(action.node, self._assign(run, action.node)):
                    run.rounds.occupied(action.node)
            elif isinstance(action, SendRelease):
                if not self._agents.release(action.node, job, self._config.jobs.stop_grace):
                    self.act(run, run.rounds.released(action.node, self._clock.now()))
            elif isinstance(action, SendDrain):
                if action.number:
                    run.monitor.draining(self._clock.now())
                timeout = run.rounds.drain_s
                self._agents.tell(
                    action.node,
                    messages.Drain(
                        job, action.generation, action.number, timeout, heirs=action.heirs
                    ),
                )
            elif isinstance(action, SendAbort):
                self._agents.tell(action.node, messages.Abort(job, action.generation))
            elif isinstance(action, SaveRound):
                if action.because_lost:
                    run.monitor.rescale_began(
                        run.row.members, action.members, self._clock.now(), lost=True
                    )
                run.monitor.forming(action.generation, action.members, self._clock.now())
                self._layouts.prepare_round(run)
                self._repository.save(run, generation=action.generation, members=action.members)
                self._audit.record(
                    EventKind.ROUND_FORMED,
                    f"Round {action.generation} has {counted(len(action.members), 'member')}.",
                    job=job,
                    generation=action.generation,
                    members=list(action.members),
                )
                self._choose_network(run, action.members)
                self._members_changed(job)
            elif isinstance(action, SendRound):
                self._agents.tell(action.node, self._round(run, action))
            elif isinstance(action, SendView):
                self._agents.tell(action.node, self._view(run, action))
            elif isinstance(action, StartMeasured):
                self._start_measured(run, action)
            elif isinstance(action, AllUp):
                self.rescale_over(run)
            elif isinstance(action, WorkersRunning):
                run.monitor.workers_running(action.generation, self._clock.now())
                run.starting_until = self._clock.now() + self._config.jobs.warmup_timeout
                self._feed(WorkersStarted(job))
            elif isinstance(action, WorkersDone):
                self._failing.done(run.rounds.members)
                self._feed(JobCompleted(job))
            elif isinstance(action, NodesRejected):
                self._reject_nodes(run, action)
            else:
                self._handle_failure(run, action)

    def _start_measured(self, run: ActiveJob, action: StartMeasured) -> None:
        """Store how long a process of a service took until it was ready."""
        agent = self._agents.on(action.node)
        if agent is None:
            return
        job, spec = run.row.id, run.spec
        self._repository.start_measured(run, action.node, agent.node_class, action.seconds)
        start = self._repository.start_cost(job, spec)
        if spec.start_cost_measured and start is not None:
            self._feed(StartCostChanged(job, start))

    def rescale_over(self, run: ActiveJob) -> None:
        """End a rescale: the newest round works, or the time to wait for its first sample is
        over.
        """
        run.starting_until = None
        run.unfit.clear()
        self._feed(RescaleFinished(run.row.id))

    def _reject_nodes(self, run: ActiveJob, action: NodesRejected) -> None:
        """Reject nodes, unless the job's software is missing on all of them: then the nodes are
        fit, and the job fails.
        """
        if action.unfit:
            run.unfit += action.nodes
            tried = sorted(set(run.unfit))
            is_whole_machine = self.nodes_in_all is not None and len(tried) >= self.nodes_in_all
            if len(run.unfit) >= MAX_NODES_TRIED or is_whole_machine:
                where = named(tried[:MAX_NODES_TRIED])
                sentence = f"{action.sentence[:MAX_REASON_LENGTH]}. It was tried on {where}."
                self._repository.save(run, failure=sentence)
                self._audit.record(EventKind.WORKERS_FAILED, sentence, job=run.row.id)
                self._feed(SoftwareLacking(run.row.id, sentence))
                return
        for node in action.nodes:
            self._audit.record(
                EventKind.NODE_REJECTED,
                f"The node is rejected: {action.sentence}.",
                job=run.row.id,
                node=node,
            )
            self._feed(NodeRejected(node))

    def _handle_failure(self, run: ActiveJob, action: Broke) -> None:
        if action.expected:
            self._feed(RoundInterrupted(run.row.id))
            return
        if self._layouts.failed(run, action.sentence[:MAX_REASON_LENGTH]):
            self._feed(RoundInterrupted(run.row.id))
            return
        first = action.failures[0] if action.failures else None
        if len(action.nodes) == 1:
            name, [node] = run.spec.sweep or run.row.id, action.nodes
            self._failing.failed(name, run.spec.script, node, self._clock.now())
        sentence, output = action.sentence, ""
        if first and first.tail:
            output = f"[rank {first.rank}]\n{first.tail}"
        elif run.launcher_tail:
            output = f"[launcher on {named(run.launcher_nodes)}]\n{run.launcher_tail}"
        if first is None:
            sentence += f" See `malletrain logs {run.row.id} --launcher`."
        if len(sentence) > MAX_REASON_LENGTH:
            sentence = sentence[: MAX_REASON_LENGTH - 1] + "…"
        failure = f"{sentence}\n{output}" if output else sentence
        self._repository.save(run, failure=failure)
        self._audit.record(
            EventKind.WORKERS_FAILED,
            sentence,
            job=run.row.id,
            generation=run.rounds.generation,
            ranks=[f.rank for f in action.failures],
            exit_code=None if first is None else first.exitcode,
        )
        self._feed(WorkersFailed(run.row.id, sentence))

    def _assign(self, run: ActiveJob, node: str) -> messages.Assign:
        jobs, chosen = self._config.jobs, self.networks([node])
        max_processes = self._layouts.max_processes(run, node)
        return messages.Assign(
            run.row.id,
            self._layouts.with_layout(run),
            stop_grace_s=jobs.stop_grace,
            join_timeout_s=jobs.join_timeout,
            key=self.job_key_of(run.row.id),
            host=chosen.places[node].address if chosen and node in chosen.places else "",
            memory_share=jobs.snapshot_memory,
            hand_over_bytes=self.hand_over([node]).bytes,
            max_processes=max_processes,
        )

    def hand_over(self, nodes: Sequence[str]) -> HandOverTime:
        """Return the time in which ``nodes`` can hand over their parts of a snapshot."""
        classes = {agent.node_class for node in nodes if (agent := self._agents.on(node))}
        measured = (self.measured.get(one) for one in classes)
        slowest = min((result.mbit for result in measured if result and result.mbit), default=0.0)
        return notice_of(self._config, slowest)

    def _round(self, run: ActiveJob, action: SendRound) -> messages.Round:
        """Return the message that describes a round to one member."""
        host, port = action.store or ("", 0)
        interface, address = self.place(run, action.node) if run.fabric else ("", "")
        return messages.Round(
            run.row.id,
            action.generation,
            action.rank,
            action.size,
            host,
            port,
            interface=interface,
            address=address,
            members=tuple(messages.Peer(node, "", address) for node, address in action.samples),
            layout=self._layouts.of_round(run),
        )

    def place(self, run: ActiveJob, node: str) -> tuple[str, str]:
        """Return the interface (empty if unknown) and the address of a member in the network of its
        round.
        """
        if run.fabric and (chosen := run.fabric.places.get(node)):
            return chosen.interface, chosen.address
        agent = self._agents.on(node)
        if agent is None:
            return "", ""
        named = (n.interface for n in agent.networks if n.address == agent.host)
        return next(named, ""), agent.host

    def networks(self, nodes: Sequence[str]) -> Fabric | None:
        """Return the network for ``nodes``, which are of one class; None if none is chosen."""
        agents = [(node, self._agents.on(node)) for node in nodes]
        network = next((self._config.nodes.interface_for(a.node_class) for _, a in agents if a), "")
        return choose(network, {node: a.networks if a else () for node, a in agents})

    def _choose_network(self, run: ActiveJob, members: tuple[str, ...]) -> None:
        before, run.fabric = run.fabric, self.networks(members)
        if run.fabric and run.fabric.sentence != (before.sentence if before else ""):
            self._audit.record(EventKind.NETWORK_CHOSEN, run.fabric.sentence, job=run.row.id)

    def address_of(self, node: str) -> str:
        """Return the address of a node in the site's network for jobs; else the one that its agent
        reports.
        """
        chosen = self.networks([node])
        agent = self._agents.on(node)
        if chosen is not None and node in chosen.places:
            return chosen.places[node].address
        return agent.host if agent else ""

    def _view(self, run: ActiveJob, action: SendView) -> messages.Round:
        """Return the message that describes the members of a service to one of them."""
        rank = next((i for i, (node, *_) in enumerate(action.members) if node == action.node), 0)
        return messages.Round(
            run.row.id,
            action.generation,
            rank,
            len(action.members),
            members=self.peers(action.members),
        )

    def peers(self, view: View) -> tuple[messages.Peer, ...]:
        """Return the members of a service with their addresses, and the remaining time of the
        leavers.
        """
        now, peers = self._clock.now(), []
        for node, address, leaves_at, loading in view:
            peers.append(
                messages.Peer(
                    node,
                    self.address_of(node),
                    address,
                    None if leaves_at is None else max(0.0, leaves_at - now),
                    self._lasts_of(node),
                    loading,
                )
            )
        return tuple(peers)
