"""The controller's shell: feeds it events, has its commands carried out, and saves everything
before anybody is told.

One transaction is: something happened → the controller and the rounds decide → the store is written
→ messages are sent. The transactions of one batch are committed together
(:mod:`malletrain.daemon.transactions`). A daemon that is killed between two batches loses nothing;
one that is killed within a batch has told nobody. After a failed transaction memory and store may
differ: this core ends (:meth:`Core.fail`), and another one starts from the store, as after a
restart. The jobs go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allocator import Goal, RescaleCost, ScalingCurve
from jpa.costs import RESCALE_KINDS
from malletrain.config.model import Config
from malletrain.core.events import (
    CurveLearned,
    Event,
    JobState,
    JobSubmitted,
    JobWeighed,
    Progressed,
    RescaleCosted,
    Tick,
)
from malletrain.core.goals import GoalsSoFar, OwnerGoals
from malletrain.core.records import JobRecord
from malletrain.core.trainers import Trainer
from malletrain.daemon.agent_liveness import LivenessMonitor
from malletrain.daemon.alarm import Alarm
from malletrain.daemon.commands import CommandRunner, LeaseCommands
from malletrain.daemon.curves import InitialCurve
from malletrain.daemon.gathering import GatheredReports, Gathering
from malletrain.daemon.job_repository import ActiveJob, decode_spec, not_completed
from malletrain.daemon.monitor import JobMonitor
from malletrain.daemon.parts import Parts
from malletrain.daemon.settings import ROUNDS, round_settings
from malletrain.daemon.transactions import TransactionRunner
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import Rounds
from malletrain.store.records import JobRow

MEASURED_EVERY_S, OBSERVED_EVERY_S = 0.2, 1.0
"""Interval at which the controller receives the progress of the job being profiled, and that of the
other jobs.
"""
RECONNECT_HEARTBEATS = 3
"""Unanswered heartbeats after which agents connect anew (:mod:`malletrain.agent.link`)."""
PARTITION_HOLD_S = 60.0
"""How long planning is suspended, counted from the last check that found a partition."""
SERVICE_COST = RescaleCost(up_s=1.0, down_s=1.0, start_s=5.0)
"""Rescale costs of a service, seconds of its value: joiners stop nobody, and leavers hand over what
they hold. They are above 0 so that plans do not swap nodes for nothing.
"""


class Core:
    """Steps, and the jobs in the daemon's hands. Make it within the loop that it is to run in.

    Args:
        parts: the daemon's state; its fields are attributes here too.
        leases: takes and ends leases for the controller.
    """

    def __init__(self, parts: Parts, leases: LeaseCommands) -> None:
        self._parts, self.store = parts, parts.store
        self.clock, self.metrics = parts.clock, parts.metrics
        self.accounts, self.controller = parts.accounts, parts.controller
        self.parties, self._shares = parts.parties, parts.shares
        self.audit, self.repository = parts.audit, parts.repository
        self.curves, self.lease_rows = parts.curves, parts.lease_rows
        self.goals, self.slow, self.news = parts.goals, parts.slow, parts.news
        self.sick = parts.sick
        self.agents, self.rounds, self.runs = parts.agents, parts.rounds, parts.runs
        self.transmit = parts.outbox.answer
        """Answer a peer, now or after this batch."""
        self._runner = runner = TransactionRunner(parts, self._begin, self._decide, self._sent)
        self.transaction, self.batch = runner.transaction, runner.batch
        self.failed = runner.failed
        self.guard, self.fail, self.task_ended = runner.guard, runner.fail, runner.task_ended
        self.liveness = LivenessMonitor(
            parts.config.daemon.agent_timeout, parts.config.daemon.heartbeat
        )
        self._events = parts.events
        self._commands = CommandRunner(parts, leases)
        self._alarm = Alarm(self.guard, self.clock.now, self._next, self.tick)
        self._gathered = Gathering(self.guard(self._take_gathered))
        self._plans_seen = 0

    @property
    def config(self) -> Config:
        """As it holds now."""
        return self._parts.config

    @property
    def torn(self) -> bool:
        """Whether a transaction has failed, so that memory and store may differ."""
        return self._runner.torn

    # --- transactions ---

    def _begin(self, now: float) -> None:
        """Called at the beginning of a transaction."""
        if unheard_s := self.liveness.unheard_s(now):
            self._unheard(unheard_s, now)

    def _decide(self, now: float) -> None:
        """Have the controller decide what follows from the events of a transaction."""
        while self._events:
            news = tuple(self._events)
            self._events.clear()
            for command in self.controller.handle_all(news, now):
                self._commands.carry_out(command, now)
        self._shares.keep(now)

    def _sent(self, unreached: set[bytes]) -> None:
        """Called after a batch is saved and its messages are sent."""
        if unreached:
            self._not_reached(unreached)
        self._count()
        self._alarm.set()

    def feed(self, event: Event) -> None:
        """Pass an event to the controller, in this transaction or one of its own."""
        with self.transaction():
            self._events.append(event)

    def tick(self) -> None:
        """Carry on wherever a time limit has passed."""
        with self.transaction() as now:
            self.feed(Tick())
            if (due := self.curves.tell_at()) is not None and now >= due:
                self._events += self.curves.for_waiting(self._spec)
            for run in list(self.runs.values()):
                self.rounds.act(run, run.rounds.tick(now))
                if run.starting_until is not None and now >= run.starting_until:
                    self.rounds.rescale_over(run)

    # --- when agents cannot be heard ---

    def _unheard(self, unheard_s: float, now: float) -> None:
        """Extend all time limits by the seconds in which the daemon cannot have heard anybody."""
        for run in self.runs.values():
            run.rounds.postpone(unheard_s)
            if run.starting_until is not None:
                run.starting_until += unheard_s
        if self.liveness.partitioned_since is not None:
            return
        self.agents.heard(now)
        if unheard_s > RECONNECT_HEARTBEATS * self.config.daemon.heartbeat and list(self.agents):
            self.recovered(f"The daemon stood still for {unheard_s:.3g} s", now)

    def partitioned(self, now: float) -> None:
        """The daemon is cut off from its agents. Call it again while that lasts."""
        if self.liveness.settling_until is None:
            count = len(list(self.agents))
            self._record_partition(f"Most of the {count} agents fell silent at one moment", now)
        self.liveness.settle(now + PARTITION_HOLD_S)
        self.controller.hold(now + PARTITION_HOLD_S)

    def recovered(self, sentence: str, now: float) -> None:
        """The agents report again, or will in a moment. Wait for them as after a restart."""
        self._record_partition(sentence, now)
        back_by = now + self.config.daemon.adopt_wait  # they connect anew, one by one
        self.agents.heard(back_by)
        self.liveness.settle(back_by, now)
        self.controller.hold(back_by)

    def _record_partition(self, sentence: str, now: float) -> None:
        self.audit.record(
            EventKind.DAEMON_PARTITIONED,
            f"{sentence}. The daemon was cut off from its agents, which are not lost. The jobs go "
            "on; the daemon waits for the agents to report again.",
        )

    def close(self) -> None:
        """Nothing happens by itself any more."""
        self._gathered.close()
        self._alarm.close()

    def _next(self) -> float | None:
        """When :meth:`tick` is due although nothing happens."""
        times = [self.controller.next_wakeup(), self.curves.tell_at()]
        for run in self.runs.values():
            times += [run.rounds.next_wakeup(), run.starting_until]
        return min((t for t in times if t is not None), default=None)

    def _spec(self, job: str) -> messages.JobSpec | None:
        run = self.runs.get(job)
        return run.spec if run is not None else None

    def _not_reached(self, peers: set[bytes]) -> None:
        for agent in self.agents:
            if agent.peer in peers and agent.unreachable_since is None:
                agent.unreachable_since = self.clock.now()
                self.unreachable(agent.node)

    def _count(self) -> None:
        plan = self.controller.last_plan
        if plan is not None and self.controller.plans != self._plans_seen:
            self._plans_seen = self.controller.plans
            self.metrics.plan(plan.solve_s, plan.gap)

    # --- jobs ---

    def add(self, row: JobRow, spec: messages.JobSpec) -> ActiveJob:
        """Take a job in hand: a new one, or one that the store knows."""
        return self.add_all([(row, spec)])[0]

    def add_all(self, jobs: Sequence[tuple[JobRow, messages.JobSpec]]) -> list[ActiveJob]:
        """The same with many; what the store knows of them is read at once."""
        profiled = self.config.profiling.enabled
        curves = self.curves.begin([(row.id, spec) for row, spec in jobs], profiled=profiled)
        goals = self.goals.begin(jobs)
        return [
            self._add(row, spec, begins, *goal)
            for (row, spec), begins, goal in zip(jobs, curves, goals, strict=True)
        ]

    def _add(
        self,
        row: JobRow,
        spec: messages.JobSpec,
        begins: InitialCurve,
        goals: OwnerGoals,
        so_far: GoalsSoFar,
    ) -> ActiveJob:
        rounds: Rounds = ROUNDS[spec.mode](
            round_settings(self.config), spec.min_nodes, row.generation
        )
        run = ActiveJob(
            row,
            spec,
            rounds,
            JobMonitor(row.samples, row.samples_before, row.generation),
            checkpointed_at=self.clock.now(),
        )
        self.runs[row.id] = run
        curve = ScalingCurve.of((int(k), v) for k, v in spec.curve.items()) if spec.curve else None
        quotas = self.parties.quotas(spec.owner)
        most = max(spec.min_nodes, min([spec.max_nodes, *(quota.nodes for quota in quotas)]))
        sizes = spec.profile_sizes
        self.feed(
            JobSubmitted(
                row.id,
                spec.min_nodes,
                most,
                weight=spec.weight,
                goal=Goal(spec.goal),
                curve=curve,
                state=JobState(row.state),
                tries=row.tries,
                last_broke=row.last_broke,
                profile=spec.profile,
                profile_sizes=tuple(k for k in sizes if k <= most) or None if sizes else None,
                scaling=begins.scaling,
                kind=begins.kind,
                owner=self.accounts.of(spec.owner),
                goals=goals,
                so_far=so_far,
                party=self.parties.party(spec.owner),
                sweep=f"{spec.owner}:{spec.sweep}" if spec.sweep else "",
                whole=spec.deadline is not None,
                quotas=quotas,
                trainer=self.parties.trainer(spec.owner),
            )
        )
        if spec.mode == "service" and curve is not None:
            self.feed(CurveLearned(row.id, curve, SERVICE_COST))
        return run

    def trainer(self, user: str) -> Trainer | None:
        """In whose plan the user's jobs are; None where there is one plan."""
        return self.controller.trainers.of(self.parties.trainer(user))

    def trainer_of(self, job: JobRecord) -> Trainer | None:
        """The same for a job."""
        return self.controller.trainers.of(job.submitted.trainer)

    def reweigh(self, job: str, spec: messages.JobSpec) -> None:
        """An unfinished job counts as ``spec`` says from now on."""
        run = self.runs[job]
        run.spec = spec
        self.repository.save(run, spec=msgspec.json.encode(spec).decode())
        self.feed(JobWeighed(job, spec.weight))

    def revalue(self, job: str, spec: messages.JobSpec) -> None:
        """Nodes are worth to an unfinished service what ``spec`` says from now on."""
        run = self.runs[job]
        run.spec = spec
        self.repository.save(run, spec=msgspec.json.encode(spec).decode())
        points = ((int(size), value) for size, value in (spec.curve or {}).items())
        self.feed(CurveLearned(job, ScalingCurve.of(points), SERVICE_COST))

    def progressed(self, run: ActiveJob, record: messages.Progress) -> None:
        """Let the controller know of progress, now and then."""
        if not self.config.profiling.enabled:
            return
        run.counts.feed(record)
        now = self.clock.now()
        every = MEASURED_EVERY_S if run.row.state == JobState.PROFILING.value else OBSERVED_EVERY_S
        if (
            now - run.progress_at < every
            or run.counts.generation != run.rounds.generation
            or not run.counts.advance()
        ):
            return
        run.progress_at = now
        self._gathered.progressed(
            Progressed(
                run.row.id,
                len(run.rounds.members),
                run.counts.time,
                run.counts.samples,
                run.monitor.batch,
            )
        )

    def save_soon(self, run: ActiveJob) -> None:
        """Write how far the job has come, with what is written of others."""
        self._gathered.save(run)

    def _take_gathered(self, reports: GatheredReports) -> None:
        """Handle the reports of many jobs in one transaction, because each looks at all jobs."""
        with self.transaction() as now:
            self._events += reports.progress.values()
            for job, run in reports.to_save.items():
                if self.runs.get(job) is not run:
                    continue  # it has ended meanwhile
                self.repository.checkpoint(run, now)
                if (done := self.goals.progressed(run)) is not None:
                    self._events.append(done)

    def keep_rescales(self, run: ActiveJob) -> None:
        """Write the rescales that are over, and let the controller know what they cost."""
        for r in run.monitor.finished_rescales():
            with self.transaction():
                self.repository.rescale(run, r)
                if r.kind in RESCALE_KINDS:
                    self.feed(RescaleCosted(run.row.id, r.kind, r.cost_s))

    def unreachable(self, node: str) -> None:
        """The agent on ``node`` cannot be reached: failures of its peers are not the job's fault
        until it is back or lost.
        """
        for run in self.runs.values():
            if node in run.rounds.members:
                run.rounds.unreachable(node)

    def first_sample(self, run: ActiveJob) -> None:
        """Samples of the newest round have come in."""
        if run.starting_until is not None:
            self._parts.failing.works(run.spec.script, run.rounds.members)
            with self.transaction():
                self.rounds.rescale_over(run)

    # --- the end, and a restart ---

    def keep_shares(self, now: float) -> None:
        """Write down what shares were served."""
        self._shares.keep(now, at_once=True)

    def restore(self) -> None:
        """Take in hand what the store knows; agents will report what runs."""
        with self.transaction() as now:
            self._shares.restore(now)
            rows = self.store.list_jobs([s.value for s in JobState if not s.ended])
            jobs = [(row, decode_spec(row.spec)) for row in rows]
            begun = {row.id for row, _ in jobs if row.started is not None}
            awaited = {each for row, spec in jobs if row.id not in begun for each in spec.after}
            still = {row.id for row in not_completed(self.store, awaited)}
            self.add_all(
                [
                    (row, spec)
                    for row, spec in jobs
                    if row.id in begun or still.isdisjoint(spec.after)
                ]
            )
