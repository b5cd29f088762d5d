"""Estimates whether a profile of a job pays, from the records of this job and the others. Pure.

Decides the value of a node for other jobs, for how long the result would be useful, and when the
estimate is possible: after the job has run for a while, so that its own throughput and its
siblings' curves are known.

A job is rescaled anyway, and its progress at each size shows what a profile would have measured. So
a profile is useful until the job ends, or until the job has run at as many other sizes as the
profile would visit, whichever is earlier.

The value is the expected value of perfect information (Raiffa and Schlaifer, *Applied Statistical
Decision Theory*, 1961, chapter 4): how much better the best size, net of the nodes' price, would be
if the curve were known. The running job itself reveals the throughput at its current size, so this
counts as known; unknown is the shape of the curve relative to it.

The uncertainty of the shape is limited to what is possible: *m* times the nodes bring m^x times the
throughput, with x uniform on 0 to 1 if nothing else is known, so the standard deviation of its
logarithm is at most ln(m)/√12, and no case counts in which the nodes bring more than *m* times as
much. A law fitted to a single size is far more uncertain than that, and without the limit a profile
would pay for every job.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from jpa.curve import MeasuredCurve
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import named
from malletrain.core.settings import ProfilingSettings
from scavenger.horizon import SurvivalEstimator

_GAUSS_HERMITE = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
"""Gauss-Hermite quadrature for a normal distribution: (standard deviations, weight)."""
ASSUMED_DURATION_S = 4 * 3600.0
"""Assumed training time of a job until jobs of the site have ended, seconds."""
_MAX_ESTIMATES = 10
"""Maximum number of estimates at one moment: each takes half a millisecond, and a plan waits for
it.
"""
_PROBED_SIZES = 12
"""Approximate number of sizes in an estimate."""
_HISTORY_LENGTH = 100
"""Number of remembered stays at a size, and of remembered errors of the scaling law."""
_MIN_STD = 0.1
"""Minimum relative standard deviation of an estimate whose error is recorded."""


@dataclass(frozen=True)
class ProfileContext:
    """The situation in which a job would be profiled."""

    nodes: int
    """The job's current size; its throughput there will be known without a profile."""
    node_price: float
    """Throughput that one more node would bring another job, samples/s of this job."""
    use_s: float
    """Expected time for which the knowledge is of use, summed over all jobs that share it,
    seconds.
    """
    up_s: float
    """Pause of growing, seconds."""
    down_s: float
    """Pause of shrinking, seconds."""
    visit_s: float
    """Time to measure one size, seconds."""
    visits: int
    """Sizes that a profile would visit."""
    std_factor: float = 1.0
    """Observed errors of the estimates at other sizes, as a multiple of their standard
    deviations.
    """
    donor_rate: float = 0.0
    """Throughput of the job that lends nodes for the profile and gets nodes back afterwards,
    samples/s of this job.
    """


def shape_std(curve: MeasuredCurve, size: int, known_size: int) -> float:
    """Return the uncertainty of the shape of a curve, without that of its level.

    Args:
        curve: the current knowledge.
        size: the size of interest.
        known_size: the size whose throughput counts as known.

    Returns:
        Relative standard deviation of the throughput at ``size``.
    """
    known_rate, known_std = curve.estimate(known_size)
    rate, std = curve.estimate(size)
    if rate <= 0 or known_rate <= 0:
        return 0.0
    return math.sqrt(max((std / rate) ** 2 - (known_std / known_rate) ** 2, 0.0))


def information_value(
    curve: MeasuredCurve,
    sizes: Sequence[int],
    known_size: int,
    node_price: float,
    std_factor: float = 1.0,
) -> float:
    """Return the expected gain of the best size if the shape of the curve were known.

    Args:
        curve: the current knowledge, with standard deviations.
        sizes: sizes that the job may have.
        known_size: the size whose throughput counts as known.
        node_price: samples/s that each node would bring another job.
        std_factor: factor on the standard deviations at other sizes.

    Returns:
        Samples/s.
    """
    known_rate = curve.estimate(known_size)[0]
    if not sizes or known_rate <= 0:
        return 0.0
    rates = [curve.estimate(k)[0] for k in sizes]
    log_stds = []
    for k in sizes:
        shape = std_factor * shape_std(curve, k, known_size)
        possible = math.log(k / known_size) / math.sqrt(12.0)
        log_stds.append(math.copysign(min(shape, abs(possible)), possible))
    expected = [0.0] * len(sizes)
    informed = 0.0
    for deviation, weight in _GAUSS_HERMITE:
        net_rates = [
            min(
                rate * math.exp(deviation * s - 0.5 * s * s),
                known_rate * max(1.0, k / known_size),
            )
            - node_price * k
            for k, rate, s in zip(sizes, rates, log_stds, strict=True)
        ]
        informed += weight * max(0.0, *net_rates)
        expected = [e + weight * net for e, net in zip(expected, net_rates, strict=True)]
    return max(0.0, informed - max(0.0, *expected))


def profile_cost(curve: MeasuredCurve, sizes: Sequence[int], context: ProfileContext) -> float:
    """Return the samples that a profile costs: one rescale up, the rescales down, a donor's
    rescales down and up, and the visits to sizes slower than the current one. The price of the
    nodes that the job releases meanwhile is subtracted.

    Args:
        curve: the current knowledge.
        sizes: sizes that the job may have.
        context: the situation of the job.

    Returns:
        Samples.
    """
    current_rate = curve.estimate(context.nodes)[0]
    lost = 0.0
    for k in sizes:
        rate = curve.estimate(k)[0]
        lost += max(0.0, (current_rate - rate) - context.node_price * (context.nodes - k))
    lost *= context.visit_s * context.visits / max(1, len(sizes))
    lost += context.donor_rate * (context.up_s + context.down_s)
    return lost + current_rate * (context.up_s + context.down_s * max(0, context.visits - 1))


def profile_pays(curve: MeasuredCurve, sizes: Sequence[int], context: ProfileContext) -> bool:
    """Return whether the expected value of a profile exceeds its cost.

    Args:
        curve: the current knowledge.
        sizes: sizes that the job may have.
        context: the situation of the job.
    """
    value = information_value(curve, sizes, context.nodes, context.node_price, context.std_factor)
    return value * context.use_s > profile_cost(curve, sizes, context)


@dataclass(frozen=True)
class _Estimate:
    """The result for one job, valid until a time or until its situation changes."""

    situation: tuple[MeasuredCurve, int]
    until: float
    pays: bool


class _Moment:
    """Values shared by the estimates of one moment."""

    def __init__(self, jobs: Sequence[JobRecord], now: float) -> None:
        self.now = now
        self.kinds: dict[str, list[str]] = {}
        """Kind → its jobs."""
        self.brings: dict[str, tuple[float, float]] = {}
        """Running job → its weighted throughput per node and in total, samples/s."""
        self.of_use: dict[tuple[str, int], float] = {}
        """Cache: kind and number of visits → time for which a profile would be useful, seconds."""
        for job in jobs:
            spec, current_nodes = job.submitted, len(job.nodes)
            if spec.kind:
                self.kinds.setdefault(spec.kind, []).append(spec.job)
            if current_nodes and job.curve is not None:
                whole = spec.weight * job.curve.at(current_nodes)
                self.brings[spec.job] = whole / current_nodes, whole

    def elsewhere(self, job: JobRecord) -> tuple[float, float]:
        """Return the median throughput per node and the mean throughput of the other running jobs,
        in units of this job's samples/s; zeros if no other job runs.
        """
        others = [
            throughputs for name, throughputs in self.brings.items() if name != job.submitted.job
        ]
        if not others:
            return 0.0, 0.0
        weight = max(job.submitted.weight, 1e-9)
        return median(each for each, _ in others) / weight, fmean(
            whole for _, whole in others
        ) / weight


class ProfileWorth:
    """Tracks how long the jobs of one controller last and how long they stay at one size, and
    estimates whether profiles pay.
    """

    def __init__(self, settings: ProfilingSettings) -> None:
        self._settings = settings
        self._lengths = SurvivalEstimator(
            prior_mean_s=ASSUMED_DURATION_S, prior_weight=1.0, half_life=200.0
        )
        self._began: dict[str, float] = {}
        self._at: dict[str, tuple[int, float]] = {}
        self._rounds: Counter[str] = Counter()
        self._stays: deque[tuple[float, bool]] = deque(maxlen=_HISTORY_LENGTH)
        """Duration of each stay, seconds, and whether a move to another size ended it."""
        self._squared_errors: deque[float] = deque(maxlen=_HISTORY_LENGTH)
        self._estimates: dict[str, _Estimate] = {}
        self._moment: _Moment | None = None
        self._estimate_count = 0
        """Number of estimates made at the current moment."""

    def trains(self, job: str, nodes: int, now: float, *, visit: bool = False) -> None:
        """Note that the job processes samples on ``nodes`` nodes from now on. ``visit``: its
        profile chose the size, so the stay does not count.
        """
        self._began.setdefault(job, now)
        self._rounds[job] += 1
        if visit:
            self._end_stay(job, now, moved=False)
        elif self._at.get(job, (0, now))[0] != nodes:
            self._end_stay(job, now, moved=True)
            self._at[job] = (nodes, now)

    def profiled(self, job: str, nodes: int, now: float) -> None:
        """Start a stay at the current size after the job's profile."""
        if nodes:
            self._at[job] = (nodes, now)

    def _end_stay(self, job: str, now: float, *, moved: bool) -> None:
        """End the job's stay at its size; ``moved``: by a move to another size."""
        if job in self._at:
            self._stays.append((now - self._at.pop(job)[1], moved))

    def rounds(self, job: str) -> int:
        """Return how often the job has started to process samples."""
        return self._rounds[job]

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """Record the end of a job; ``done``: whether it completed."""
        self._estimates.pop(job, None)
        self._end_stay(job, now, moved=False)
        self._rounds.pop(job, None)
        since = self._began.pop(job, None)
        if since is not None:
            self._lengths.observe(now - since, ended=done)

    @property
    def stay_s(self) -> float:
        """Mean stay of a job at a size, seconds: total time divided by the number of moves, so that
        stays without an observed end count with their lower bound.
        """
        stayed = sum(seconds for seconds, _ in self._stays)
        return (ASSUMED_DURATION_S + stayed) / (1 + sum(moved for _, moved in self._stays))

    def seen(self, curve: MeasuredCurve, nodes: int, rate: float) -> None:
        """Compare a throughput at a new size with the job's ``curve`` before it, and record the
        error.
        """
        points = [p.nodes for p in curve.current.points if p.rate > 0]
        if not points or nodes in points or rate <= 0:
            return
        near = min(points, key=lambda k: abs(math.log(k / nodes)))
        std = shape_std(curve, nodes, near)
        if std >= _MIN_STD:
            off = math.log(rate / curve.estimate(nodes)[0])
            self._squared_errors.append(min((off / std) ** 2, 1.0))

    @property
    def doubt(self) -> float:
        """Ratio of the errors at unmeasured sizes to their standard deviations, root mean square;
        at most 1.
        """
        return math.sqrt((1.0 + sum(self._squared_errors)) / (1 + len(self._squared_errors)))

    def remaining_s(self, job: str, now: float) -> float:
        """Return the expected remaining time of the job, seconds, from the durations of others."""
        return self._lengths.expected_remaining(now - self._began.get(job, now))

    def ready(self, job: JobRecord) -> bool:
        """Return whether an estimate is possible: the job runs and has a measured size."""
        points = job.scaling.curve.current.points
        return bool(job.nodes) and any(p.rate > 0 for p in points)

    def pays(self, job: JobRecord, others: Sequence[JobRecord], now: float) -> bool:
        """Return whether a profile of the running job is expected to pay.

        The estimate is renewed every minute and when the curve or the number of nodes has changed,
        for at most :data:`_MAX_ESTIMATES` jobs at one moment. Other jobs keep their previous
        estimate.
        """
        name, situation = job.submitted.job, (job.scaling.curve, len(job.nodes))
        estimate = self._estimates.get(name)
        if estimate is None or estimate.situation != situation or now >= estimate.until:
            if self._moment is None or self._moment.now != now:
                self._moment, self._estimate_count = _Moment(others, now), 0
            if self._estimate_count >= _MAX_ESTIMATES:
                return estimate is not None and estimate.pays
            self._estimate_count += 1
            estimate = _Estimate(situation, now + 60.0, self._pays(job, self._moment))
            self._estimates[name] = estimate
        return estimate.pays

    def has_estimate(self, job: str) -> bool:
        """Return whether there is an estimate for the job."""
        return job in self._estimates

    def _pays(self, job: JobRecord, beside: _Moment) -> bool:
        spec, curve, costs = job.submitted, job.scaling.curve, job.scaling.costs
        sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        probed_sizes = named(sizes, ())
        probed_sizes = (
            probed_sizes[:: max(1, len(probed_sizes) // _PROBED_SIZES)] + probed_sizes[-1:]
        )
        advisor = self._settings.advisor
        price, neighbour = beside.elsewhere(job)
        visits = min(len(probed_sizes), advisor.plan.max_steps)
        context = ProfileContext(
            nodes=len(job.nodes),
            node_price=price,
            donor_rate=neighbour,
            use_s=self._useful_s(spec.job, spec.kind, visits, beside),
            std_factor=self.doubt,
            up_s=costs.up_s,
            down_s=costs.down_s,
            visit_s=2.0 * advisor.measure.min_seconds,
            visits=visits,
        )
        return profile_pays(curve, sorted(set(probed_sizes)), context)

    def _useful_s(self, job: str, kind: str, visits: int, beside: _Moment) -> float:
        """Return the time for which a profile with ``visits`` visits would be useful, seconds,
        summed over all jobs of its kind.
        """
        visits_s = visits * self.stay_s
        same_kind = beside.kinds.get(kind, ())
        if job not in same_kind:
            return min(self.remaining_s(job, beside.now), visits_s)
        if (kind, visits) not in beside.of_use:
            beside.of_use[kind, visits] = sum(
                min(self.remaining_s(name, beside.now), visits_s) for name in same_kind
            )
        return beside.of_use[kind, visits]
