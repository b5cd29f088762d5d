"""A cluster of model jobs around an advisor, on a virtual clock: carries out the advisor's answers
and checks its invariants.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from jpa import (
    Advisor,
    AdvisorConfig,
    AdvisorTick,
    Donor,
    JobEnded,
    MeasuredCurve,
    NodesChanged,
    PointMeasured,
    ProfileFinished,
    ProfileRequested,
    ProfileWaiting,
    ProgressReported,
    ScaleReached,
    ScriptCrashed,
    SetSize,
)
from tests.jpa.models import Job


@dataclass
class Member:
    """One job of the cluster. ``crashes``: sizes at which its script ends with an error."""

    model: Job
    low: int
    high: int
    nodes: int = 0
    crashes: frozenset[int] = frozenset()
    reports: bool = True
    interrupted: float | None = None
    epoch: int = 0


@dataclass
class World:
    """``free`` nodes and ``members``; up and down are the seconds of a rescale."""

    free: int
    members: dict[str, Member]
    config: AdvisorConfig = field(default_factory=AdvisorConfig)
    up: float = 18.0
    down: float = 12.0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.advisor = Advisor(self.config)
        self.answers: list = []
        self.staircase: list[int] = []
        self.times: list[tuple[float, object]] = []
        self._events: list = []
        self._count = 0
        self.next_tick = 1.0
        self.tell(self.view())

    # --- driving it ---

    def want(self, job: str, **more) -> None:
        m = self.members[job]
        more.setdefault("curve", MeasuredCurve())
        self.tell(ProfileRequested(job, m.low, m.high, m.nodes, **more))

    def run(self, seconds: float = 3000.0, until=None) -> None:
        """Let time pass, until ``until()`` holds or everything wanted is finished."""
        end = self.now + seconds
        while self.now < end:
            if until is not None and until():
                return
            if until is None and self.advisor.profiling is None and not self.advisor.waiting:
                return
            if self._events and self._events[0][0] <= self.next_tick:
                self.now, _, what = heapq.heappop(self._events)
                what()
            else:
                self.now, self.next_tick = self.next_tick, self.next_tick + 1.0
                self.tell(AdvisorTick())

    def preempt(self, job: str, count: int) -> None:
        """The main scheduler takes ``count`` nodes of the job; it restarts on the rest, or is
        suspended under its minimum.
        """
        member = self.members[job]
        member.nodes -= count
        if member.nodes < member.low:
            self.free += member.nodes
            member.nodes = 0
        member.epoch += 1
        self.tell(self.view())

    def end(self, job: str) -> None:
        member = self.members.pop(job)
        self.free += member.nodes
        member.epoch += 1
        self.tell(JobEnded(job))
        self.tell(self.view())

    def view(self) -> NodesChanged:
        busy = self.advisor.profiling
        donors = tuple(
            Donor(name, m.nodes, m.low, m.interrupted)
            for name, m in self.members.items()
            if m.nodes > 0 and name != busy
        )
        return NodesChanged(
            {"default": self.free}, donors, {name: m.nodes for name, m in self.members.items()}
        )

    # --- what happened ---

    def finished(self, job: str) -> ProfileFinished:
        (result,) = [a for a in self.answers if isinstance(a, ProfileFinished) and a.job == job]
        return result

    def of(self, kind: type) -> list:
        return [a for a in self.answers if isinstance(a, kind)]

    def reasons(self, job: str) -> str:
        return " ".join(a.reason for a in self.of(ProfileWaiting) if a.job == job)

    # --- inside ---

    def tell(self, event) -> None:
        answers = self.advisor.handle(event, self.now)
        for answer in answers:
            self.answers.append(answer)
            self.times.append((self.now, answer))
        moved = False
        for answer in answers:
            if isinstance(answer, SetSize):
                self._move(answer)
                moved = True
            elif isinstance(answer, PointMeasured):
                assert answer.measurement.nodes == self.members[answer.job].nodes or self.now == 0
        if moved:
            self.tell(self.view())

    def _move(self, answer: SetSize) -> None:
        assert answer.job == self.advisor.profiling, "a job moves that is not the profiled one"
        member = self.members[answer.job]
        if answer.donor is not None:
            donor = self.members[answer.donor]
            assert answer.donor != answer.job
            assert answer.take >= 1
            donor.nodes -= answer.take
            donor.interrupted = self.now
            assert donor.nodes >= max(1, donor.low), "a donor fell under its minimum"
            self.free += answer.take
        up = answer.nodes > member.nodes
        self.free -= answer.nodes - member.nodes
        assert self.free >= 0, "nodes were taken that are not there"
        assert member.low <= answer.nodes <= member.high
        member.nodes = answer.nodes
        member.epoch += 1
        self.staircase.append(answer.nodes)
        epoch = member.epoch
        self._at(self.now + (self.up if up else self.down), lambda: self._ready(answer.job, epoch))

    def _ready(self, job: str, epoch: int) -> None:
        member = self.members.get(job)
        if member is None or member.epoch != epoch:
            return
        if member.nodes in member.crashes:
            self.tell(ScriptCrashed(job, member.nodes))
            return
        self.tell(ScaleReached(job, member.nodes))
        self._step(job, epoch)

    def _step(self, job: str, epoch: int) -> None:
        member = self.members.get(job)
        if member is None or member.epoch != epoch or not member.reports:
            return
        seconds = member.model.step(member.nodes)
        if math.isfinite(seconds):
            self._at(self.now + seconds, lambda: self._report(job, epoch))

    def _report(self, job: str, epoch: int) -> None:
        member = self.members.get(job)
        if member is None or member.epoch != epoch:
            return
        self.tell(ProgressReported(job, self.now, member.model.samples))
        self._step(job, epoch)

    def _at(self, time: float, what) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, what))
