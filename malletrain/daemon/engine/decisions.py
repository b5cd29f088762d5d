"""Passes the events of a transaction to the controller, and carries out the commands with which it
answers.

Decides what each command means for the store, the audit log, the agents and the leases. The
controller decides which jobs run on which nodes; :mod:`malletrain.daemon.engine.transactions`
decides when a transaction begins and what of it is saved and sent.

Decides also what a partition means for plans and time limits (:class:`Reachability`): while the
daemon is cut off from its agents, no time limit runs and nothing is planned; after it the daemon
waits for them as after a restart. :mod:`malletrain.daemon.engine.agents` decides whether the daemon
is cut off.
"""

from __future__ import annotations

from typing import Protocol

from jpa import ProfileResult
from malletrain.core.commands import (
    Announce,
    BatchAdvised,
    Command,
    KeepScalingModel,
    LossExpected,
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    Start,
    Stop,
    Suspend,
    TakeLeases,
)
from malletrain.core.events import JobState, Tick
from malletrain.daemon.engine.agents import AgentLiveness
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.jobs.layout_tuner import layout_record
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.protocol import messages
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from scavenger.hostlist import named

RECONNECT_HEARTBEATS = 3
"""Number of unanswered heartbeats after which agents reconnect (:mod:`malletrain.agent.link`)."""
PARTITION_HOLD_S = 60.0
"""Time for which planning is suspended after the last check that found a partition, seconds."""


class Reachability:
    """The connections of one daemon to its agents."""

    def __init__(self, state: SiteState) -> None:
        self._state = state

    def check(self, now: float) -> bool:
        """Check whether the agents can be heard. Call it regularly, within a transaction.

        Returns:
            Whether the daemon is cut off from its agents.
        """
        state = self._state
        last_heard = [agent.last_seen for agent in state.agents]
        liveness = state.liveness.check(last_heard, now)
        if liveness is AgentLiveness.PARTITIONED:
            if state.liveness.settling_until is None:
                sentence = f"Most of the {len(last_heard)} agents fell silent at one moment"
                self._record_partition(sentence)
            state.liveness.settle(now + PARTITION_HOLD_S)
            state.controller.hold(now + PARTITION_HOLD_S)
        elif liveness is AgentLiveness.RECOVERED:
            self._recovered("The daemon hears its agents again", now)
        elif state.liveness.settled(last_heard, now):
            state.controller.hold(now)
        return liveness is AgentLiveness.PARTITIONED

    def postpone_limits(self, now: float) -> None:
        """Extend all time limits by the seconds in which the daemon cannot have received messages;
        usually 0. Call it at the beginning of each transaction.
        """
        state = self._state
        unheard_s = state.liveness.unheard_s(now)
        if not unheard_s:
            return
        for run in state.runs.values():
            run.rounds.postpone(unheard_s)
            if run.starting_until is not None:
                run.starting_until += unheard_s
        if state.liveness.partitioned_since is not None:
            return
        state.agents.heard(now)
        if unheard_s > RECONNECT_HEARTBEATS * state.config.daemon.heartbeat and list(state.agents):
            self._recovered(f"The daemon stood still for {unheard_s:.3g} s", now)

    def messages_lost(self, peers: set[bytes]) -> None:
        """Mark the agents to which a message could not be sent. ``peers``: their connections."""
        for agent in self._state.agents:
            if agent.peer in peers and agent.unreachable_since is None:
                agent.unreachable_since = self._state.clock.now()
                self.unreachable(agent.node)

    def unreachable(self, node: str) -> None:
        """Handle an agent that cannot be reached: until it is back or lost, failures of its peers
        do not count as the job's own.
        """
        for run in self._state.runs.values():
            if node in run.rounds.members:
                run.rounds.unreachable(node)

    def _recovered(self, sentence: str, now: float) -> None:
        """Wait for the agents as after a restart: the partition has ended, and they report again
        soon.
        """
        self._record_partition(sentence)
        back_by = now + self._state.config.daemon.adopt_wait  # they do not reconnect all at once
        self._state.agents.heard(back_by)
        self._state.liveness.settle(back_by, now)
        self._state.controller.hold(back_by)

    def _record_partition(self, sentence: str) -> None:
        self._state.audit.record(
            EventKind.DAEMON_PARTITIONED,
            f"{sentence}. The daemon was cut off from its agents, which are not lost. The jobs "
            "continue; the daemon waits for the agents to report again.",
        )


NO_CURVE = (
    "How the job scales could not be measured: {why} It is assumed to speed up as "
    "nodes^{exponent:g}. Call malletrain.report() at the "
    "end of every step, or give a curve with --curve."
)
ENDINGS = {
    JobState.COMPLETED: (EventKind.JOB_COMPLETED, "The job is done."),
    JobState.CANCELLED: (EventKind.JOB_CANCELLED, "The job was cancelled: {why}."),
    JobState.FAILED: (EventKind.JOB_FAILED, "The job failed: {why}"),
}
"""Final state of a job → kind and sentence of its event."""


class LeaseCommands(Protocol):
    """Takes and ends leases. All methods are called within a transaction."""

    def take(self, nodes: tuple[str, ...], owner: str) -> None:
        """Request a lease on each of these nodes for ``owner`` (empty for the daemon's user)."""

    def release(self, nodes: tuple[str, ...]) -> None:
        """End the leases of these nodes: no job needs them."""

    def reclaim(self, nodes: tuple[str, ...], within_s: float) -> None:
        """End the leases of these nodes when their jobs have moved off: another owner's jobs need
        them more. ``within_s``: maximum time until then, seconds.
        """


class Decisions:
    """The decisions of one daemon. All methods but :meth:`next_due_at` and :meth:`saved` are called
    within a transaction.

    Args:
        state: the daemon's state.
        reachability: handles agents that cannot be reached.
        leases: takes and ends leases for the controller.
    """

    def __init__(self, state: SiteState, reachability: Reachability, leases: LeaseCommands) -> None:
        self._state = state
        self._reachability = reachability
        self._leases = leases
        self._plans_counted = 0

    def begin(self, now: float) -> None:
        """Called at the beginning of a transaction."""
        self._reachability.postpone_limits(now)

    def decide(self, now: float) -> None:
        """Pass the events of a transaction to the controller, and carry out its commands. Called at
        the end of the transaction, before it is saved.
        """
        events = self._state.events
        while events:
            news = tuple(events)
            events.clear()
            for command in self._state.controller.handle_all(news, now):
                self.carry_out(command, now)
        self._state.shares.keep(now)

    def saved(self, unreached: set[bytes]) -> None:
        """Called after a batch is saved and its messages are sent. ``unreached``: peers that could
        not be reached.
        """
        if unreached:
            self._reachability.messages_lost(unreached)
        controller = self._state.controller
        plan = controller.last_plan
        if plan is not None and controller.plans != self._plans_counted:
            self._plans_counted = controller.plans
            self._state.metrics.plan(plan.solve_s, plan.gap)

    def next_due_at(self) -> float | None:
        """Return when :meth:`tick` is due without an event, seconds; None if it is not."""
        state = self._state
        times = [state.controller.next_wakeup(), state.curves.tell_at()]
        for run in state.runs.values():
            times += [run.rounds.next_wakeup(), run.starting_until]
        return min((t for t in times if t is not None), default=None)

    def tick(self, now: float) -> None:
        """Act on all time limits that have passed."""
        state = self._state
        state.events.append(Tick())
        if (due := state.curves.tell_at()) is not None and now >= due:
            state.events += state.curves.for_waiting(self._spec)
        for run in list(state.runs.values()):
            state.rounds.act(run, run.rounds.tick(now))
            if run.starting_until is not None and now >= run.starting_until:
                state.rounds.rescale_over(run)

    def _spec(self, job: str) -> messages.JobSpec | None:
        run = self._state.runs.get(job)
        return run.spec if run is not None else None

    # --- commands ---

    def carry_out(self, command: Command, now: float) -> None:
        """Carry out one command."""
        runs = self._state.runs
        if isinstance(command, TakeLeases):
            self._leases.take(command.nodes, command.owner)
        elif isinstance(command, ReleaseLeases):
            self._leases.release(command.nodes)
        elif isinstance(command, ReclaimNodes):
            self._leases.reclaim(command.nodes, command.within_s)
        elif isinstance(command, Stop):
            self._stop(runs[command.job], command, now)
        elif isinstance(command, Announce):
            self._announce(runs[command.job], command)
        elif isinstance(command, KeepScalingModel):
            self._state.curves.keep(command.job, runs[command.job].spec, command.scaling)
        elif isinstance(command, LossExpected):
            for node in runs[command.job].rounds.members[:1]:
                self._state.agents.tell(node, messages.ExpectLoss(command.job, command.in_s))
        elif isinstance(command, BatchAdvised):
            for node in runs[command.job].rounds.members[:1]:
                self._state.agents.tell(node, messages.AdviseBatch(command.job, command.size))
        elif isinstance(command, Suspend):
            self._suspend(runs[command.job], command, now)
        else:
            self._change(runs[command.job], command, now)

    def _announce(self, run: ActiveJob, announcement: Announce) -> None:
        job, state = run.row.id, self._state
        state.audit.record(announcement.kind, announcement.sentence, job=job, **announcement.data)
        if announcement.kind is EventKind.PROFILE_WAITING:
            state.curves.waits(job, announcement.sentence)
        elif announcement.kind is EventKind.GOAL_STANDING:
            state.goals.stands(job, announcement.data)
        elif announcement.kind is EventKind.NODES_DONATED:
            state.curves.interrupted(job, dict(announcement.data))
        elif (
            announcement.kind is EventKind.PROFILE_FINISHED
            and announcement.data["result"] == ProfileResult.UNKNOWN.value
        ):
            exponent = state.config.allocation.prior_exponent
            state.repository.notice(
                run, NO_CURVE.format(why=announcement.sentence, exponent=exponent)
            )
        job_state = state.controller.jobs[job].state
        if not job_state.ended and run.row.state != job_state.value:
            state.repository.save(run, state=job_state.value)

    def _suspend(self, run: ActiveJob, command: Suspend, now: float) -> None:
        record = self._state.controller.jobs[command.job]
        why = "its budget is spent" if record.halted else "waits for nodes"
        self._state.repository.save(
            run,
            state=JobState.SUSPENDED.value,
            planned_nodes=(),
            reason=why,
            tries=record.tries,
            last_broke=record.last_failure_at,
        )
        sentence = "The job has too few nodes; it keeps its place."
        if record.halted:
            sentence = "The job's budget is spent; it keeps its place."
        self._state.audit.record(EventKind.JOB_SUSPENDED, sentence, job=run.row.id)
        self._state.goals.charge(run.row.id)
        self._move(run, (), now, command.within_s)

    def _change(self, run: ActiveJob, command: Start | Rescale, now: float) -> None:
        old_nodes = run.row.planned_nodes
        record = self._state.controller.jobs[run.row.id]
        self._state.repository.save(
            run,
            state=record.state.value,
            planned_nodes=command.nodes,
            reason="",
            tries=record.tries,
            last_broke=record.last_failure_at,
            started=now if run.row.started is None else run.row.started,
        )
        self._state.goals.charge(run.row.id)
        if isinstance(command, Rescale) and command.new_layout and run.tuner is not None:
            run.rounds.outdate()
            layout = run.tuner.search.layout
            sentence = f"Its processes are started again on the same nodes, each as {layout}."
            self._state.audit.record(
                EventKind.LAYOUT_CHANGED, sentence, job=run.row.id, layout=layout_record(layout)
            )
            self._move(run, command.nodes, now, command.within_s)
            return
        within = command.within_s if isinstance(command, Rescale) else None
        self._state.audit.record(
            EventKind.JOB_STARTED if isinstance(command, Start) else EventKind.JOB_RESCALED,
            f"{_describe_change(len(old_nodes), len(command.nodes))}: {named(command.nodes)}.",
            job=run.row.id,
            nodes=list(command.nodes),
            before=list(old_nodes),
            within_s=within,
        )
        self._move(run, command.nodes, now, within)

    def _move(
        self, run: ActiveJob, nodes: tuple[str, ...], now: float, within_s: float | None
    ) -> None:
        run.starting_until = None
        if run.rounds.interrupts:
            run.monitor.rescale_began(run.rounds.members, nodes, now, lost=run.rounds.lost_member)
        self._state.rounds.act(run, run.rounds.move(nodes, now, within_s))

    def _stop(self, run: ActiveJob, command: Stop, now: float) -> None:
        state, job = self._state, run.row.id
        state.rounds.act(run, run.rounds.stop())
        state.repository.save(
            run,
            state=command.state.value,
            reason=command.reason,
            planned_nodes=(),
            ended=now,
            tries=state.controller.jobs[job].tries,
        )
        kind, template = ENDINGS[command.state]
        state.audit.record(
            kind, template.format(why=command.reason), job=job, samples=run.monitor.total
        )
        state.metrics.job_ended(job, command.state.value)
        state.news.came(job)
        state.member_news.came(job)
        del state.runs[job]
        state.curves.news = True  # another job is next


def _describe_change(before: int, after: int) -> str:
    nodes = counted(after, "node")
    return f"From {before} to {nodes}" if before else f"Started on {nodes}"
