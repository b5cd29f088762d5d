"""Whether a profile of a job pays, from what the controller knows of it and of the other jobs.
Pure.

Decides the value of a node elsewhere, for how long the result would be useful, and when the
question can be asked: after the job has run for a while, so that its own level and its siblings'
curves are known. :mod:`jpa.information_value` has the arithmetic.

A job's nodes come and go, and its ordinary progress at each size shows what a profile would have
measured. So a profile is useful until the job ends, or until the job has had as many other sizes as
the profile would visit, whichever is earlier.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from jpa import MeasuredCurve
from jpa.information_value import ProfileContext, profile_pays, shape_std
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import named
from malletrain.core.settings import ProfilingSettings
from scavenger.horizon import SurvivalEstimator

USUAL_S = 4 * 3600.0
"""How long a job is taken to train until the site's own have ended."""
_AT_ONCE = 10
"""Each takes half a millisecond, and a plan waits for it."""
_LOOKED_AT = 12
"""Sizes whose worth is looked at."""
_KEPT = 100
"""Of how long jobs stayed at a size, and of how wrong the law was, so many count."""
_DOUBTFUL = 0.1
"""Relative standard deviation from which on a size is worth asking about."""


@dataclass(frozen=True)
class _Estimate:
    """Whether a profile of a job pays, and until when that counts while no more is known of it."""

    situation: tuple[MeasuredCurve, int]
    until: float
    pays: bool


class _Beside:
    """What is the same for all jobs that are looked at at one moment."""

    def __init__(self, jobs: Sequence[JobRecord], now: float) -> None:
        self.now = now
        self.kinds: dict[str, list[str]] = {}
        """Kind → the jobs of it."""
        self.brings: dict[str, tuple[float, float]] = {}
        """Job that runs → what a node of it brings, and what it does with all of them, samples/s
        by its weight.
        """
        self.of_use: dict[tuple[str, int], float] = {}
        """Kind and visits → for how long a profile would be of use, seconds, once it was asked."""
        for job in jobs:
            spec, current_nodes = job.submitted, len(job.nodes)
            if spec.kind:
                self.kinds.setdefault(spec.kind, []).append(spec.job)
            if current_nodes and job.curve is not None:
                whole = spec.weight * job.curve.at(current_nodes)
                self.brings[spec.job] = whole / current_nodes, whole

    def elsewhere(self, job: JobRecord) -> tuple[float, float]:
        """What a node brings elsewhere, and what another job does with all of its nodes: of the
        other jobs that run the median and the mean, by this job's weight; nothing where none does.
        """
        others = [brings for name, brings in self.brings.items() if name != job.submitted.job]
        if not others:
            return 0.0, 0.0
        weight = max(job.submitted.weight, 1e-9)
        return median(each for each, _ in others) / weight, fmean(
            whole for _, whole in others
        ) / weight


class ProfileWorth:
    """What is remembered of the jobs of one controller: how long they last, and how long they stay
    at one size.
    """

    def __init__(self, settings: ProfilingSettings) -> None:
        self._settings = settings
        self._lengths = SurvivalEstimator(prior_mean_s=USUAL_S, prior_weight=1.0, half_life=200.0)
        self._began: dict[str, float] = {}
        self._at: dict[str, tuple[int, float]] = {}
        self._rounds: Counter[str] = Counter()
        self._stays: deque[tuple[float, bool]] = deque(maxlen=_KEPT)
        """How long, and whether a plan ended it by a move to another size."""
        self._off: deque[float] = deque(maxlen=_KEPT)
        self._estimates: dict[str, _Estimate] = {}
        self._beside: _Beside | None = None
        self._looks = 0
        """How many were looked at at this moment."""

    def trains(self, job: str, nodes: int, now: float, *, visit: bool = False) -> None:
        """The job processes samples on so many nodes from now on. ``visit``: its profile brought it
        there, which says nothing of how long jobs stay at a size.
        """
        self._began.setdefault(job, now)
        self._rounds[job] += 1
        if visit:
            self._leaves(job, now, moved=False)
        elif self._at.get(job, (0, now))[0] != nodes:
            self._leaves(job, now, moved=True)
            self._at[job] = (nodes, now)

    def profiled(self, job: str, nodes: int, now: float) -> None:
        """The job's profile is over: from now on it stays where it is until a plan moves it."""
        if nodes:
            self._at[job] = (nodes, now)

    def _leaves(self, job: str, now: float, *, moved: bool) -> None:
        """The job's stay at its size is over, by a move or by something else before one came."""
        if job in self._at:
            self._stays.append((now - self._at.pop(job)[1], moved))

    def rounds(self, job: str) -> int:
        """How often it has begun to process samples."""
        return self._rounds[job]

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """The job has ended; ``done``: its work is."""
        self._estimates.pop(job, None)
        self._leaves(job, now, moved=False)
        self._rounds.pop(job, None)
        since = self._began.pop(job, None)
        if since is not None:
            self._lengths.observe(now - since, ended=done)

    @property
    def stay_s(self) -> float:
        """How long a job stays at a size, seconds: time over moves, so that stays of which the end
        was not seen count as at least so long.
        """
        stayed = sum(seconds for seconds, _ in self._stays)
        return (USUAL_S + stayed) / (1 + sum(moved for _, moved in self._stays))

    def seen(self, curve: MeasuredCurve, nodes: int, rate: float) -> None:
        """A job was seen at this throughput at a size; ``curve``: what was known of it before."""
        points = [p.nodes for p in curve.current.points if p.rate > 0]
        if not points or nodes in points or rate <= 0:
            return
        near = min(points, key=lambda k: abs(math.log(k / nodes)))
        std = shape_std(curve, nodes, near)
        if std >= _DOUBTFUL:
            off = math.log(rate / curve.estimate(nodes)[0])
            self._off.append(min((off / std) ** 2, 1.0))

    @property
    def doubt(self) -> float:
        """What was expected of sizes that nobody had measured turned out wrong by so many times as
        much as it claimed, root mean square; at most 1.
        """
        return math.sqrt((1.0 + sum(self._off)) / (1 + len(self._off)))

    def remaining_s(self, job: str, now: float) -> float:
        """How long the job goes on yet, seconds, by how long others lasted."""
        return self._lengths.expected_remaining(now - self._began.get(job, now))

    def ready(self, job: JobRecord) -> bool:
        """Whether its worth can be told: it runs, and something is known of it."""
        points = job.scaling.curve.current.points
        return bool(job.nodes) and any(p.rate > 0 for p in points)

    def pays(self, job: JobRecord, others: Sequence[JobRecord], now: float) -> bool:
        """Whether a profile of the running job is expected to pay. Looked at anew every minute, and
        when something was learned; of :data:`_AT_ONCE` jobs at one moment, others get the estimate
        before.
        """
        name, situation = job.submitted.job, (job.scaling.curve, len(job.nodes))
        estimate = self._estimates.get(name)
        if estimate is None or estimate.situation != situation or now >= estimate.until:
            if self._beside is None or self._beside.now != now:
                self._beside, self._looks = _Beside(others, now), 0
            if self._looks >= _AT_ONCE:
                return estimate is not None and estimate.pays
            self._looks += 1
            estimate = _Estimate(situation, now + 60.0, self._pays(job, self._beside))
            self._estimates[name] = estimate
        return estimate.pays

    def has_estimate(self, job: str) -> bool:
        """Whether it was looked at whether a profile of the job pays."""
        return job in self._estimates

    def _pays(self, job: JobRecord, beside: _Beside) -> bool:
        spec, curve, costs = job.submitted, job.scaling.curve, job.scaling.costs
        sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        looked = named(sizes, ())
        looked = looked[:: max(1, len(looked) // _LOOKED_AT)] + looked[-1:]
        advisor = self._settings.advisor
        price, neighbour = beside.elsewhere(job)
        visits = min(len(looked), advisor.plan.max_steps)
        around = ProfileContext(
            nodes=len(job.nodes),
            node_price=price,
            donor_rate=neighbour,
            use_s=self._of_use_s(spec.job, spec.kind, visits, beside),
            std_factor=self.doubt,
            up_s=costs.up_s,
            down_s=costs.down_s,
            visit_s=2.0 * advisor.measure.min_seconds,
            visits=visits,
        )
        return profile_pays(curve, sorted(set(looked)), around)

    def _of_use_s(self, job: str, kind: str, visits: int, beside: _Beside) -> float:
        """For how long a profile of so many visits would be of use, seconds, of all jobs of its
        kind together.
        """
        visits_s = visits * self.stay_s
        alike = beside.kinds.get(kind, ())
        if job not in alike:
            return min(self.remaining_s(job, beside.now), visits_s)
        if (kind, visits) not in beside.of_use:
            beside.of_use[kind, visits] = sum(
                min(self.remaining_s(name, beside.now), visits_s) for name in alike
            )
        return beside.of_use[kind, visits]
