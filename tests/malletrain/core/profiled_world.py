"""Model jobs that train, report, crash and fall silent around a controller that profiles them, on a
virtual clock.
"""

from __future__ import annotations

import heapq

from allocator import RescaleCost
from jpa import Advisor
from malletrain.core.commands import (
    Announce,
    BatchAdvised,
    KeepScalingModel,
    ReleaseLeases,
    Rescale,
    Start,
    Stop,
    Suspend,
    TakeLeases,
)
from malletrain.core.events import (
    JobState,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Progressed,
    RescaleCostMeasured,
    RescaleFinished,
    Tick,
    WorkersFailed,
    WorkersStarted,
)
from malletrain.core.settings import (
    ControllerSettings,
    PlanningSettings,
    ProfilingSettings,
    advisor_config,
)
from tests.malletrain.core.controller_world import World

UP, DOWN, REPORT = 2.0, 1.5, 0.25
POLL, LEASE = 5.0, 1.0


def amdahl(nodes: int) -> float:
    """Samples/s of a job with a serial part of 5 %."""
    return 100 * nodes / (1 + 0.05 * (nodes - 1))


def settings(**profiling) -> ControllerSettings:
    profiling = {"when_worth": False, **profiling}
    advisor = profiling.pop("advisor", None) or advisor_config(
        max_wait_for_nodes_s=20.0, donor_quiet_s=30.0
    )
    return ControllerSettings(
        PlanningSettings(t_fwd_s=120.0, cost=RescaleCost(up_s=10.0, down_s=8.0, start_s=10.0)),
        debounce_s=0.5,
        notice_debounce_s=1.0,
        min_interval_s=0.0,
        max_tries=3,
        starvation_s=600.0,
        profiling=ProfilingSettings(advisor, **profiling),
    )


class ProfiledWorld(World):
    """As :class:`World`, and the jobs train: ``rates``, ``batches``, ``crashes`` (sizes) and
    ``silent`` (sizes) by job. The main scheduler is polled while there is a gap, and grants every
    lease.
    """

    def __init__(self, nodes: int, config: ControllerSettings | None = None):
        super().__init__(config or settings(), {f"n{i}": "default" for i in range(nodes)})
        self.rates = {}
        self.batches = {}
        self.crashes = {}
        self.silent = {}
        self.samples = {}
        self.epoch = {}
        self.sizes = {}
        self.announcements = []
        self.scaling_models = {}
        self.advised = []
        self._due = []
        self._count = 0
        self._polling = False

    # --- what happens ---

    def join(self, *nodes: str) -> None:
        for node in nodes or sorted(self.classes):
            self.gaps.pop(node, None)
            self.leased[node] = self.now
            self.do(NodeJoined(node, self.classes[node]))

    def take(self, *nodes: str) -> None:
        """The main scheduler takes these nodes, without notice; the jobs on them stand still."""
        for node in nodes:
            for job, job_nodes in self.running.items():
                if node in job_nodes:
                    self.epoch[job] += 1
            self.gaps.pop(node, None)
            self.forget(node)
            self.do(NodeLost(node))

    def run(self, seconds: float, until=None) -> None:
        """Let time pass; what is due happens in order."""
        end = self.now + seconds
        ticks = 0
        while not (until is not None and until()):
            wake = self.controller.next_wakeup()
            due = self._due[0][0] if self._due else end
            at = min(due, end if wake is None else max(wake, self.now), end)
            ticks = ticks + 1 if at <= self.now else 0
            assert ticks < 50, f"nothing moves at {self.now}: {self.log[-3:]}"
            self.now = max(self.now, at)
            if self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            elif wake is not None and wake <= self.now:
                self.do(Tick())
            elif self.now >= end:
                return

    def until_profiled(self, job: str, seconds: float = 1500.0) -> None:
        self.run(seconds, until=lambda: self.of("profile-finished", job))
        assert self.of("profile-finished", job), f"no end of the profile: {self.announcements[-5:]}"

    # --- what was said ---

    def of(self, kind: str, job: str | None = None) -> list[Announce]:
        return [a for a in self.announcements if a.kind == kind and job in (None, a.job)]

    def result(self, job: str) -> str:
        return self.of("profile-finished", job)[-1].data["result"]

    @property
    def advisor(self) -> Advisor:
        return self.controller.profiles.profiler.advisor

    # --- the jobs ---

    def carry_out(self, command):
        if isinstance(command, Announce):
            self.announcements.append(command)
            return
        if isinstance(command, BatchAdvised):
            self.advised.append(command)
            return
        if isinstance(command, KeepScalingModel):
            self.scaling_models[command.job] = command.scaling
            return
        before = len(self.running.get(getattr(command, "job", None), ()))
        super().carry_out(command)
        if isinstance(command, TakeLeases):
            for node in command.nodes:
                self._later(LEASE, lambda node=node: self._leased(node))
        if isinstance(command, ReleaseLeases) and not self._polling:
            self._polling = True
            self._later(POLL, self._poll)
        if isinstance(command, Start | Rescale | Suspend | Stop):
            self.epoch[command.job] = self.epoch.get(command.job, 0) + 1
        if isinstance(command, Start | Rescale):
            size = len(command.nodes)
            self.sizes.setdefault(command.job, []).append(size)
            epoch, kind = (
                self.epoch[command.job],
                "start" if not before else "up" if size > before else "down",
            )
            self._at(
                self.now + 0.1, command.job, epoch, lambda: self.do(WorkersStarted(command.job))
            )
            self._at(
                self.now + (DOWN if kind == "down" else UP),
                command.job,
                epoch,
                lambda: self.up(command.job, epoch, size, kind),
            )

    def _later(self, seconds, what):
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, what))

    def _poll(self):
        self._polling = bool(self.gaps)
        if self._polling:
            self.poll()
            self._later(POLL, self._poll)

    def _leased(self, node):
        if node in self.pending and node in self.gaps:
            self.come_up(node)
            del self.gaps[node]

    def _at(self, time, job, epoch, what):
        def still():
            if self.epoch.get(job) == epoch:
                what()

        self._later(time - self.now, still)

    def up(self, job, epoch, size, kind):
        if size in self.crashes.get(job, ()):
            self.breaks[job] += 1
            self.do(WorkersFailed(job, f"it cannot use {size} nodes"))
            return
        if size in self.silent.get(job, ()):
            self._at(
                self.now + 30.0, job, epoch, lambda: self.do(RescaleFinished(job))
            )  # the daemon's patience with it
            return
        self.rescaling.pop(job, None)
        self.do(RescaleFinished(job))
        self.do(RescaleCostMeasured(job, kind, DOWN if kind == "down" else UP))
        began = self.now

        def report():
            rate = self.rates.get(job, amdahl)(size)
            if rate > 0:
                count = round(rate * (self.now - began), 6)
                self.samples[job] = self.samples.get(job, 0.0) + rate * REPORT
                self.do(Progressed(job, size, self.now, count, self.batches.get(job, 64.0)))
            self._at(self.now + REPORT, job, epoch, report)

        if self.epoch.get(job) == epoch:
            self._at(self.now + REPORT, job, epoch, report)

    def check(self, commands):
        active = self.advisor.profiling
        states = {name: record.state for name, record in self.controller.jobs.items()}
        for name, state in states.items():
            assert (state is JobState.PROFILING) == (name == active), (
                f"{name} is {state}, but {active} is profiled"
            )
        if active is not None:
            self.controller.jobs[active].state = JobState.RUNNING  # to the world around it it runs
        super().check(commands)
        if active is not None:
            self.controller.jobs[active].state = JobState.PROFILING


def profiled_job(job="a", low=1, high=6, **more):
    """The submission of a job that is to be profiled."""
    return JobSubmitted(job, low, high, profile=True, **more)


def world(nodes=6, *jobs, **more):
    """Return a world with these jobs and this number of nodes, under :func:`settings`."""
    world = ProfiledWorld(nodes, settings(**more) if more else None)
    for job in jobs:
        world.do(job)
    world.join()
    return world
