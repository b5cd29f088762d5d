"""The controller's shell: feeds it events, carries its commands out, and saves everything before
anybody hears of it.

One step is: something happened → controller and rounds decide → the store is written in one
transaction → messages go out. A daemon that is killed between two steps has lost nothing; one
killed within a step has told nobody. When the store refuses, the step fails and the daemon ends:
the jobs go on, and the next start adopts them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from allocator import Goal, RescaleCost, ScalingCurve
from jpa import ProfileResult
from jpa.costs import KINDS, RescaleCosts
from malletrain.config.model import Config
from malletrain.core.controller import Controller
from malletrain.core.events import (
    Announce,
    Command,
    CurveLearned,
    Event,
    JobState,
    JobSubmitted,
    KeepScalingModel,
    Progressed,
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    RescaleCosted,
    RescaleFinished,
    Start,
    Stop,
    Suspend,
    TakeLeases,
    Tick,
)
from malletrain.core.planning import exact, make_plan
from malletrain.daemon.accounts import Accounts
from malletrain.daemon.agents import Agents
from malletrain.daemon.audit_log import AuditLog
from malletrain.daemon.clock import Clock
from malletrain.daemon.curves import Curves
from malletrain.daemon.job_repository import JobRepository, JobRun, decode_spec
from malletrain.daemon.lease_rows import LeaseRows
from malletrain.daemon.metrics import Metrics
from malletrain.daemon.monitor import JobMonitor
from malletrain.daemon.round_shell import RoundShell
from malletrain.daemon.settings import controller_settings, round_settings
from malletrain.protocol import messages
from malletrain.rounds.interface import Rounds
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.restart import JobRounds
from malletrain.rounds.service import ServiceRounds
from malletrain.store.schema import JobRow
from malletrain.store.store import Store

MEASURED_EVERY_S, OBSERVED_EVERY_S = 0.2, 1.0
"""How often the controller hears of a job's progress: of the one being profiled, and of the others.
"""
SERVICE_COST = RescaleCost(up_s=1.0, down_s=1.0, start_s=5.0)
"""What a change of a service's size is taken to cost in seconds of its value: nobody stops for a
joiner, and leavers hand over what they hold; a little, so that no plan swaps nodes to and fro for
nothing.
"""
NO_CURVE = (
    "How the job scales could not be found out: {why} It is taken to speed up as "
    "nodes^{exponent:g}. Call malletrain.report() at the "
    "end of every step, or give a curve with --curve."
)

ROUNDS: dict[str, type[JobRounds] | type[LiveRounds] | type[ServiceRounds]] = {
    "restart": JobRounds,
    "live": LiveRounds,
    "service": ServiceRounds,
}


@dataclass
class LeaseActions:
    """What the core asks of the rest of the daemon."""

    take_leases: Callable[[tuple[str, ...], str], None]
    give_back: Callable[[tuple[str, ...]], None]
    recall: Callable[[tuple[str, ...], float], None]
    job_ended: Callable[[JobRun], None] = field(default=lambda run: None)


class Core:
    """Controller, rounds and store of one daemon."""

    def __init__(self, config: Config, store: Store, clock: Clock, metrics: Metrics) -> None:
        self.config = config
        self.store = store
        self.clock = clock
        self.metrics = metrics
        self.trail = AuditLog(store, clock)
        self.books = JobRepository(store, clock, metrics, self.trail)
        self.controller = Controller(
            controller_settings(config),
            partial(make_plan, solver=partial(exact, clock=perf_counter)),
        )
        a = config.allocation
        self.curves = Curves(
            store, clock, self.controller, RescaleCosts(a.rescale_up, a.rescale_down, a.start)
        )
        self.runs: dict[str, JobRun] = {}
        self.accounts = Accounts(config)
        self.lease_rows = LeaseRows(store)
        self.agents = Agents(self._post, self.accounts.of)
        self.rounds = RoundShell(
            config, clock, self.agents, self.books, self.trail, self.feed, self._rescale_over
        )
        self.outside: LeaseActions = LeaseActions(
            lambda nodes, owner: None, lambda nodes: None, lambda nodes, within_s: None
        )
        self.transmit: Callable[[bytes, messages.Message], bool] = lambda peer, message: False
        self._events: deque[Event] = deque()
        self._outbox: list[tuple[bytes, messages.Message]] = []
        self._depth = 0
        self._timer: asyncio.TimerHandle | None = None
        self._plans_seen = 0
        self.failed: asyncio.Future[None] | None = None

    # --- steps ---

    @contextmanager
    def step(self) -> Iterator[float]:
        """Everything inside is decided, saved together, then told. Yields the time. Steps nest."""
        now = self.clock.now()
        if self._depth:
            yield now
            return
        self._depth += 1
        try:
            with self.store.transaction():
                yield now
                while self._events:
                    for command in self.controller.handle(self._events.popleft(), now):
                        self._carry_out(command, now)
        finally:
            self._depth -= 1
        outbox, self._outbox = self._outbox, []
        for peer, message in outbox:
            self._deliver(peer, message)
        self._count()
        self._arm()

    def feed(self, event: Event) -> None:
        """Let the controller know, in this step or one of its own."""
        self._events.append(event)
        if not self._depth:
            with self.step():
                pass

    def tick(self) -> None:
        """Carry on wherever a time limit has passed."""
        with self.step() as now:
            self.feed(Tick())
            for run in list(self.runs.values()):
                self.rounds.act(run, run.rounds.tick(now))
                if run.starting_until is not None and now >= run.starting_until:
                    self._rescale_over(run)

    def _arm(self) -> None:
        times = [self.controller.next_wakeup()]
        for run in self.runs.values():
            times += [run.rounds.next_wakeup(), run.starting_until]
        due = [t for t in times if t is not None]
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if due:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                max(0.005, min(due) - self.clock.now()), self.guard(self.tick)
            )

    def guard(self, call: Callable[..., None]) -> Callable[..., None]:
        """``call`` as a callback of the loop whose exception ends the daemon instead of vanishing
        in a log.
        """

        def guarded(*args: Any) -> None:
            try:
                call(*args)
            except Exception as error:
                if self.failed is None or self.failed.done():
                    raise
                self.failed.set_exception(error)

        return guarded

    def _post(self, peer: bytes, message: messages.Message) -> bool:
        """Send after the step is saved; at once outside of one."""
        if self._depth:
            self._outbox.append((peer, message))
            return True
        return self.transmit(peer, message)

    def _deliver(self, peer: bytes, message: messages.Message) -> None:
        if not self.transmit(peer, message):
            for agent in self.agents:
                if agent.peer == peer and agent.unreachable_since is None:
                    agent.unreachable_since = self.clock.now()
                    self.suspect(agent.node)

    def _count(self) -> None:
        plan = self.controller.last_plan
        if plan is not None and self.controller.plans != self._plans_seen:
            self._plans_seen = self.controller.plans
            self.metrics.plan(plan.solve_s, plan.gap)

    # --- jobs ---

    def add(self, row: JobRow, spec: messages.JobSpec) -> JobRun:
        """Take a job in hand: a new one, or one that the store knows."""
        rounds: Rounds = ROUNDS[spec.mode](
            round_settings(self.config), spec.min_nodes, row.generation
        )
        run = JobRun(
            row,
            spec,
            rounds,
            JobMonitor(row.samples, row.samples_before, row.generation),
            saved_at=self.clock.now(),
        )
        self.runs[row.id] = run
        curve = ScalingCurve.of((int(k), v) for k, v in spec.curve.items()) if spec.curve else None
        learned = self.curves.begin(row.id, spec) if self.config.profiling.enabled else None
        self.feed(
            JobSubmitted(
                row.id,
                spec.min_nodes,
                spec.max_nodes,
                weight=spec.weight,
                goal=Goal(spec.goal),
                curve=curve,
                state=JobState(row.state),
                tries=row.tries,
                last_broke=row.last_broke,
                profile=spec.profile,
                profile_sizes=spec.profile_sizes,
                scaling=learned,
                kind=self.curves.kind(row.id, spec),
                owner=self.accounts.of(spec.owner),
            )
        )
        if spec.mode == "service" and curve is not None:
            self.feed(CurveLearned(row.id, curve, SERVICE_COST))
        return run

    def progressed(self, run: JobRun, record: messages.Progress) -> None:
        """Let the controller know of progress, now and then."""
        if not self.config.profiling.enabled:
            return
        run.counts.feed(record)
        now = self.clock.now()
        every = MEASURED_EVERY_S if run.row.state == JobState.PROFILING.value else OBSERVED_EVERY_S
        if (
            now - run.told_at < every
            or run.counts.generation != run.rounds.generation
            or not run.counts.advance()
        ):
            return
        run.told_at = now
        self.feed(
            Progressed(
                run.row.id,
                len(run.rounds.members),
                run.counts.time,
                run.counts.samples,
                run.monitor.batch,
            )
        )

    def keep_rescales(self, run: JobRun) -> None:
        """Write the rescales that are over, and let the controller know what they cost."""
        for r in run.monitor.finished_rescales():
            with self.step():
                self.books.rescale(run, r)
                if r.kind in KINDS:
                    self.feed(RescaleCosted(run.row.id, r.kind, r.cost_s))

    def suspect(self, node: str) -> None:
        """The agent on ``node`` cannot be reached: failures of its peers are not the job's fault
        until it is back or lost.
        """
        for run in self.runs.values():
            if node in run.rounds.members:
                run.rounds.unreachable(node)

    def first_sample(self, run: JobRun) -> None:
        """Samples of the newest round have come in."""
        if run.starting_until is not None:
            with self.step():
                self._rescale_over(run)

    def _rescale_over(self, run: JobRun) -> None:
        run.starting_until = None
        self.feed(RescaleFinished(run.row.id))

    # --- the controller's commands ---

    def _carry_out(self, command: Command, now: float) -> None:
        if isinstance(command, TakeLeases):
            self.outside.take_leases(command.nodes, command.owner)
        elif isinstance(command, ReleaseLeases):
            self.outside.give_back(command.nodes)
        elif isinstance(command, ReclaimNodes):
            self.outside.recall(command.nodes, command.within_s)
        elif isinstance(command, Stop):
            self._stop(self.runs[command.job], command, now)
        elif isinstance(command, Announce):
            self._announce(self.runs[command.job], command)
        elif isinstance(command, KeepScalingModel):
            run = self.runs[command.job]
            self.curves.keep(command.job, run.spec, command.scaling)
        elif isinstance(command, Suspend):
            run, record = self.runs[command.job], self.controller.jobs[command.job]
            tries = {"tries": record.tries, "last_broke": record.last_broke}
            self.books.save(
                run,
                state=JobState.SUSPENDED.value,
                planned_nodes=(),
                reason="waits for nodes",
                **tries,
            )
            self.trail.record(
                "job-suspended", "The job has too few nodes; it keeps its place.", job=run.row.id
            )
            self._move(run, (), now, command.within_s)
        else:
            self._change(self.runs[command.job], command, now)

    def _announce(self, run: JobRun, said: Announce) -> None:
        job = run.row.id
        self.trail.record(said.kind, said.sentence, job=job, **said.data)
        if said.kind == "profile-waiting":
            self.curves.waits(job, said.sentence)
        elif said.kind == "job-interrupted":
            self.curves.interrupted(job, dict(said.data))
        elif said.kind == "profile-finished" and said.data["result"] == ProfileResult.UNKNOWN.value:
            self.books.notice(
                run,
                NO_CURVE.format(why=said.sentence, exponent=self.config.allocation.prior_exponent),
            )
        state = self.controller.jobs[job].state
        if not state.ended and run.row.state != state.value:
            self.books.save(run, state=state.value)

    def _change(self, run: JobRun, command: Start | Rescale, now: float) -> None:
        old = run.row.planned_nodes
        first = {} if run.row.started is not None else {"started": now}
        record = self.controller.jobs[run.row.id]
        tries = {"tries": record.tries, "last_broke": record.last_broke}
        self.books.save(
            run, state=record.state.value, planned_nodes=command.nodes, reason="", **tries, **first
        )
        within = command.within_s if isinstance(command, Rescale) else None
        kind = "job-started" if isinstance(command, Start) else "job-rescaled"
        sentence = f"{len(old)} → {len(command.nodes)} nodes: {', '.join(command.nodes)}."
        self.trail.record(
            kind,
            sentence,
            job=run.row.id,
            nodes=list(command.nodes),
            before=list(old),
            within_s=within,
        )
        self._move(run, command.nodes, now, within)

    def _move(
        self, run: JobRun, nodes: tuple[str, ...], now: float, within_s: float | None
    ) -> None:
        run.starting_until = None
        if run.rounds.interrupts:
            run.monitor.rescale_began(run.rounds.members, nodes, now, lost=run.rounds.lost_member)
        self.rounds.act(run, run.rounds.move(nodes, now, within_s))

    def _stop(self, run: JobRun, command: Stop, now: float) -> None:
        self.rounds.act(run, run.rounds.stop())
        tries = self.controller.jobs[run.row.id].tries
        self.books.save(
            run,
            state=command.state.value,
            reason=command.reason,
            planned_nodes=(),
            ended=now,
            tries=tries,
        )
        said = {
            JobState.COMPLETED: "The job is done.",
            JobState.CANCELLED: "The job was cancelled.",
        }
        sentence = said.get(command.state) or f"The job failed: {command.reason}"
        self.trail.record(
            f"job-{command.state.value}", sentence, job=run.row.id, samples=run.monitor.total
        )
        self.metrics.job_ended(run.row.id)
        del self.runs[run.row.id]
        self.outside.job_ended(run)

    # --- a restart ---

    def restore(self) -> None:
        """Take in hand what the store knows; agents will report what runs."""
        ended = {state.value for state in JobState if state.ended}
        with self.step():
            for row in self.store.list_jobs():
                if row.state not in ended:
                    self.add(row, decode_spec(row.spec))
