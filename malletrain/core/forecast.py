"""Forecasts the number of nodes and when a job completes, from its scaling curve and the nodes of
the last days, and decides which deadlines are admitted. Pure.

:class:`NodeHistory` keeps the mean number of nodes of each class for each span of :data:`SPAN_S`
seconds. The model is that the past repeats. It takes the past moments whose number of nodes was
closest to the present one, and continues the job from each of them with the numbers of nodes that
followed. The median of the ends is the forecast, the 10th and the 90th percentile its 80 %
interval. The caller states how many of the nodes the job gets: a share of them, and at least a
floor.

:class:`PastForecasts` corrects these forecasts by the errors of past ones, so that an interval
contains the end as often as it claims. The errors include what the model leaves out (how the queue
moves, which nodes other jobs will take). The method is conformalised quantile regression (Romano et
al., NeurIPS 2019), separately for the median and for each end of the interval, on the logarithm of
the time to the end. The first forecast of each job counts. For a job that has not ended only a
lower bound of its time is known; without such jobs the shortest ones would dominate. They enter as
censored observations (Kaplan and Meier, 1958).

Deadlines are admitted in their order (earliest deadline first). A set of jobs is feasible if, at
each deadline, the node-time that the jobs up to it need is no more than the node-time available by
then. While it is not, the job that needs the most node-time is dropped, which drops the fewest jobs
(Moore, Management Science 15(1), 1968). A deadline that was admitted earlier is dropped less
readily, because a plan that changes its mind meets no deadline.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from malletrain.core.pools import DEFAULT_CLASS

SPAN_S = 300.0
MAX_SPANS = 2016
"""Number of spans that are kept: a week."""


class NodeSpan(NamedTuple):
    """Mean number of nodes of a class over one span."""

    began: float
    node_class: str
    nodes: float


class NodeHistory:
    """The nodes of each class over time: leased ones, and gaps that may be leased."""

    def __init__(self) -> None:
        self._spans: dict[str, deque[float]] = {}
        self._last: dict[str, float] = {}
        self._now: Counter[str] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._began: float | None = None
        self._at = 0.0
        self._closed: list[NodeSpan] = []
        self._arrays: dict[str, npt.NDArray[np.float64]] = {}

    def feed(self, nodes: Mapping[str, int], now: float) -> None:
        """Set the number of nodes of each class from ``now`` on."""
        if self._began is None:
            self._began = self._at = now
        while now >= self._began + SPAN_S:
            self._pass(self._began + SPAN_S)
            self._close()
        self._pass(now)
        self._now = Counter(nodes)

    def _pass(self, end: float) -> None:
        seconds = max(0.0, end - self._at)
        for name, count in self._now.items():
            self._sums[name] += count * seconds
        self._at = max(self._at, end)

    def _close(self) -> None:
        began = self._began or 0.0
        for name in {*self._sums, *self._spans}:
            span = NodeSpan(began, name, self._sums[name] / SPAN_S)
            self._keep(span)
            self._closed.append(span)
        self._sums.clear()
        self._began = began + SPAN_S

    def _keep(self, span: NodeSpan) -> None:
        self._spans.setdefault(span.node_class, deque(maxlen=MAX_SPANS)).append(span.nodes)
        self._arrays.pop(span.node_class, None)

    def restore(self, spans: Iterable[NodeSpan]) -> None:
        """Restore stored spans, the oldest first. The time since the last one is left out, because
        it is unknown.
        """
        for span in spans:
            self._keep(span)

    def fresh(self) -> list[NodeSpan]:
        """Return the spans that have ended since the last call."""
        closed, self._closed = self._closed, []
        return closed

    def now(self, node_class: str) -> float:
        """Return the current number of nodes of the class."""
        return float(self._now[node_class])

    def classes(self) -> list[str]:
        """Return all classes that have or had nodes."""
        return sorted({*self._spans, *(name for name, count in self._now.items() if count)})

    def usual_class(self, may_use: Callable[[str], bool] | None = None) -> str:
        """Return the class with the most nodes on average, among those for which ``may_use`` is
        true (None: all). If no such node was ever present, return the default class, or "" if it
        may not be used.
        """
        means = {name: sum(spans) / len(spans) for name, spans in self._spans.items() if spans}
        counts: Mapping[str, float] = means or self._now
        usable = counts if may_use is None else filter(may_use, counts)
        fallback = DEFAULT_CLASS if may_use is None or may_use(DEFAULT_CLASS) else ""
        return max(usable, key=lambda name: (counts[name], name), default=fallback)

    def nodes(self, node_class: str) -> npt.NDArray[np.float64]:
        """Return the means of a class, the oldest first; only the current number if there are
        none.
        """
        if node_class not in self._arrays:
            spans = self._spans.get(node_class)
            if not spans:
                return np.array([self.now(node_class)])
            self._arrays[node_class] = np.array(spans)
        return self._arrays[node_class]


Floats = npt.NDArray[np.float64]

QUANTILES = (0.1, 0.5, 0.9)


def nodes_ahead(past: Floats, now: float, spans: int) -> Floats:
    """Return the quantiles of the number of nodes in each of the next ``spans`` spans.

    Args:
        past: number of nodes in each past span, the oldest first. It is repeated periodically.
        now: current number of nodes.
        spans: number of spans to forecast.

    Returns:
        Array of shape (spans, 3): a column for each of :data:`QUANTILES`.
    """
    starts = like_now(past, now)
    later = (starts[None, :] + np.arange(1, spans + 1)[:, None]) % len(past)
    quantiles: Floats = np.quantile(past[later], QUANTILES, axis=1).T
    return quantiles


ADMITTED_DEADLINE_WEIGHT = 0.6
"""Factor on the demand of a job whose deadline was admitted earlier, so that it is dropped less
readily than a new one.
"""
SUPPLY_QUANTILE = 0.3
"""Quantile of the past node-time that is used as supply."""


@dataclass(frozen=True)
class DeadlineDemand:
    """The node-time that one job needs until its deadline."""

    job: str
    within_s: float
    """Seconds until the deadline."""
    node_s: float
    """Node-seconds until the job is done."""
    admitted: bool = False
    """Whether the deadline was admitted at the previous decision."""


def node_time(past: Floats, nodes: float, within_s: Sequence[float]) -> Floats:
    """Return a conservative estimate of the available node-time.

    Args:
        past: number of nodes in each past span of ``SPAN_S`` seconds; the past is taken to repeat.
        nodes: number of nodes now.
        within_s: durations from now, seconds.

    Returns:
        Node-seconds available within each of ``within_s``.
    """
    starts = like_now(past, nodes)
    lengths = np.asarray(within_s, dtype=np.float64) / SPAN_S
    sums = np.concatenate(([0.0], np.cumsum(past)))
    total, spans = float(sums[-1]), len(past)
    ends = starts[None, :] + lengths[:, None]
    repeats, remainder = np.divmod(ends, spans)
    last = np.minimum(remainder.astype(np.int64), spans - 1)
    available = (
        repeats * total + sums[last] + (remainder - last) * past[last] - sums[starts][None, :]
    )
    return SPAN_S * np.asarray(np.quantile(available, SUPPLY_QUANTILE, axis=1))


def admit(demands: Sequence[DeadlineDemand], past: Floats, nodes: float) -> dict[str, int]:
    """Return the jobs whose deadlines are admitted.

    Args:
        demands: one for each job with a deadline.
        past: number of nodes in each past span, see :func:`node_time`.
        nodes: number of nodes now.

    Returns:
        Job → number of admitted jobs with an earlier deadline.
    """
    if not demands:
        return {}
    ordered = sorted(demands, key=lambda d: (d.within_s, d.job))
    supply = node_time(past, nodes, [d.within_s for d in ordered]).tolist()
    largest_first: list[tuple[float, str, float]] = []
    total_s = 0.0
    for demand, available_s in zip(ordered, supply, strict=True):
        weight = demand.node_s * (ADMITTED_DEADLINE_WEIGHT if demand.admitted else 1.0)
        heapq.heappush(largest_first, (-weight, demand.job, demand.node_s))
        total_s += demand.node_s
        while largest_first and total_s > available_s:
            total_s -= heapq.heappop(largest_first)[2]
    admitted = {job for _, job, _ in largest_first}
    return {job: rank for rank, job in enumerate(d.job for d in ordered if d.job in admitted)}


SIMILAR_MOMENTS = 96
"""Number of past moments that are used: those most like the present."""
THROUGHPUT_FACTORS = (0.85, 1.0, 1.15)
"""Factors on the job's throughput, for its uncertainty. Each moment counts with each factor."""


@dataclass(frozen=True)
class Forecast:
    """Time at which the work is done, on the shell's clock; infinite if it never is on such
    nodes.
    """

    end: float
    """Median."""
    low: float
    """Low end of the 80 % interval."""
    high: float
    """High end of the 80 % interval."""
    hours: float = 0.0
    """Length of the past that it is based on, hours; 0 if it is based only on the present number of
    nodes.
    """


@dataclass(frozen=True)
class Claim:
    """The part of the available nodes that a job gets."""

    share: float = 1.0
    """Fraction of the nodes."""
    floor: float = 0.0
    """Minimum number of nodes."""
    least: int | None = None
    """Minimum number of nodes that it can use. If its part is smaller, it takes turns with other
    jobs: it has the minimum for a part of the time, while there are enough nodes. None if it has
    its part or nothing.
    """

    def of(self, nodes: Floats) -> Floats:
        """Return the job's part of ``nodes`` nodes."""
        job_nodes: Floats = np.minimum(nodes, np.maximum(self.share * nodes, self.floor))
        return job_nodes

    def speed(self, rates: Floats, nodes: Floats) -> Floats:
        """Return samples/s with ``nodes`` available nodes; ``rates``: samples/s at 0, 1, 2, … of
        its own nodes.
        """
        if self.least is None:
            return speeds(rates, self.of(nodes))
        turns, at = rates.copy(), np.arange(len(rates))
        turns[: self.least] = rates[self.least] * at[: self.least] / self.least
        throughput: Floats = np.interp(self.of(nodes), at, turns)
        # A mean of 3.2 nodes may include times with four; a mean of 3 is taken as three throughout.
        return np.where(np.ceil(nodes - 1e-9) >= self.least, throughput, 0.0)


def fair_share(max_sizes: Iterable[int], nodes: float) -> float:
    """Return the fraction of ``nodes`` that a job gets if jobs with these maximum sizes share them
    evenly, and each leaves what it cannot use to the others.
    """
    sizes = sorted(max_sizes)
    remaining = nodes
    for index, size in enumerate(sizes):
        level = remaining / (len(sizes) - index)
        if size >= level:
            return level / nodes if nodes > 0 else 1.0
        remaining -= size
    return 1.0


def like_now(past: Floats, now: float) -> npt.NDArray[np.int64]:
    """Return the indices of the past moments whose number of nodes is closest to ``now``."""
    if len(past) <= SIMILAR_MOMENTS:
        return np.arange(len(past))
    return np.argpartition(np.abs(past - now), SIMILAR_MOMENTS)[:SIMILAR_MOMENTS]


def speeds(rates: Floats, nodes: Floats) -> Floats:
    """Return samples/s on ``nodes`` nodes; ``rates``: at 0, 1, 2, … nodes. The last one applies to
    all larger numbers.
    """
    at = np.minimum(np.rint(nodes).astype(np.int64), len(rates) - 1)
    throughput: Floats = rates[at]
    return throughput


def seconds_for(work: Floats, speed: Floats, starts: npt.NDArray[np.int64]) -> Floats:
    """Return the time to process samples, seconds; infinite if nothing is ever processed.

    Args:
        work: numbers of samples.
        speed: samples/s in each past span. It is repeated periodically.
        starts: indices of the spans to start from.

    Returns:
        Array of shape (len(work), len(starts)).
    """
    sums = np.concatenate(([0.0], np.cumsum(speed * SPAN_S)))
    period_samples = float(sums[-1])
    if period_samples <= 0:
        return np.full((len(work), len(starts)), math.inf)
    target = sums[starts] + work[:, None]
    rounds, remaining = np.divmod(target, period_samples)
    at = np.minimum(np.searchsorted(sums, remaining, side="right"), len(speed)) - 1
    within = np.clip((remaining - sums[at]) / np.maximum(speed[at] * SPAN_S, 1e-300), 0.0, 1.0)
    seconds: Floats = (rounds * len(speed) + at + within - starts) * SPAN_S
    return seconds


def forecast(
    work: float, rates: Floats, past: Floats, nodes: float, claim: Claim, now: float
) -> Forecast:
    """Forecast when a job that continues now will be done.

    Args:
        work: remaining samples.
        rates: real throughput of the job at 0, 1, 2, … nodes, samples/s, including pauses.
        past: number of nodes in each past span, the oldest first.
        nodes: current number of nodes.
        claim: part of the nodes that the job gets.
        now: time on the shell's clock.
    """
    starts = like_now(past, nodes)
    speed = claim.speed(rates, past)
    ends = seconds_for(work / np.array(THROUGHPUT_FACTORS), speed, starts)
    low, end, high = np.quantile(ends, (0.1, 0.5, 0.9), method="higher")
    hours = len(past) * SPAN_S / 3600.0 if len(past) > 1 else 0.0
    return Forecast(now + float(end), now + float(low), now + float(high), hours)


def least_floor(
    work: float, within_s: float, rates: Floats, past: Floats, nodes: float, sizes: list[int]
) -> int:
    """Return the smallest of ``sizes`` (ascending) with which the job ends in time in 90 % of the
    cases, if it always gets that many of the available nodes; the largest, if none suffices.

    Args:
        work: remaining samples.
        within_s: time to the deadline, seconds.
        rates: see :func:`forecast`.
        past: see :func:`forecast`.
        nodes: current number of nodes.
        sizes: allowed sizes, ascending.
    """
    low, high = 0, len(sizes) - 1
    starts, samples = like_now(past, nodes), np.array([work])
    while low < high:
        middle = (low + high) // 2
        speed = speeds(rates, np.minimum(past, sizes[middle]))
        late = seconds_for(samples, speed, starts) > within_s
        if np.mean(late) > 0.1:
            low = middle + 1
        else:
            high = middle
    return sizes[low]


MAX_ENDED_JOBS = 200
"""Maximum number of ended jobs that are remembered."""
BOUND_FRACTIONS = (0.1, 0.5, 0.9)
"""Fractions of all ends that should lie below the low end of an interval, the forecast itself, and
the high end.
"""
INITIAL_FACTORS = (0.8, 1.0, 2.0)
"""Factors on a model's times to the low end, the forecast and the high end, until a job has ended.
"""
INITIAL_FACTORS_WEIGHT = 10
"""Number of ended jobs that weigh as much as :data:`INITIAL_FACTORS`."""


class Made(NamedTuple):
    """The first forecast of a job, uncorrected. Times on the shell's clock."""

    at: float
    low: float
    end: float
    high: float


class Ended(NamedTuple):
    """A first forecast and the end of its job."""

    made: Made
    at: float
    done: bool
    """Whether the job completed; else it ended early, for example because it was cancelled."""


class PastForecasts:
    """The first forecasts of one controller's jobs, and the ends of these jobs."""

    def __init__(self) -> None:
        self._open: dict[str, Made] = {}
        self._over: deque[Ended] = deque(maxlen=MAX_ENDED_JOBS)

    def note(self, job: str, forecast: Forecast, now: float) -> None:
        """Record a model's forecast, if it is the first one of its job."""
        if job not in self._open and math.isfinite(forecast.high) and forecast.low > now:
            self._open[job] = Made(now, forecast.low, forecast.end, forecast.high)

    def of(self, job: str) -> Made | None:
        """Return the recorded forecast of an unfinished job; None if there is none."""
        return self._open.get(job)

    def forget(self, job: str) -> None:
        """Drop the job's forecast, because its work has changed."""
        self._open.pop(job, None)

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """Record the end of a job; ``done``: whether it completed."""
        first_forecast = self._open.pop(job, None)
        if first_forecast is not None:
            self._over.append(Ended(first_forecast, now, done))

    def restore(self, over: Sequence[Ended], unfinished: dict[str, Made]) -> None:
        """Restore stored forecasts: ``over`` of ended jobs, the oldest first, and ``unfinished`` by
        job.
        """
        self._over.extend(over)
        self._open.update(unfinished)

    def corrected(self, forecast: Forecast, now: float) -> Forecast:
        """Return the forecast, corrected by the errors of past forecasts."""
        if not (math.isfinite(forecast.high) and forecast.low > now):
            return forecast
        bounds = (forecast.low, forecast.end, forecast.high)
        each = [now + f * (at - now) for f, at in zip(self._factors(now), bounds, strict=True)]
        low, end, high = sorted(each)
        return replace(forecast, low=low, end=end, high=high)

    def _factors(self, now: float) -> tuple[float, ...]:
        """Return the factors on the times to the low end of an interval, to the forecast, and to
        the high end.
        """
        observations = [*self._over, *(Ended(made, now, False) for made in self._open.values())]
        ended = sum(each.done for each in observations)
        if not ended:
            return INITIAL_FACTORS
        elapsed_log = np.log([max(1.0, each.at - each.made.at) for each in observations])
        done = np.array([each.done for each in observations])
        trust = ended / (ended + INITIAL_FACTORS_WEIGHT)
        factors = []
        for bound, (part, unseen) in enumerate(
            zip(BOUND_FRACTIONS, INITIAL_FACTORS, strict=True), start=1
        ):
            forecast_s = np.log(
                [max(1.0, each.made[bound] - each.made.at) for each in observations]
            )
            error = reached(elapsed_log - forecast_s, done, part)
            factors.append(math.exp(trust * error + (1.0 - trust) * math.log(unseen)))
        return tuple(factors)


def reached(values: Floats, done: npt.NDArray[np.bool_], part: float) -> float:
    """Return the value at or below which ``part`` of all end (product-limit estimate), at most the
    largest value.

    Args:
        values: value at which each ended, or its last observed value.
        done: whether each of them ended.
        part: fraction from 0 to 1.
    """
    order = np.lexsort((~done, values))
    values, done = values[order], done[order]
    at_risk = len(values) - np.arange(len(values))
    survival = np.cumprod(np.where(done, 1.0 - 1.0 / at_risk, 1.0))
    position = int(np.searchsorted(-survival, part - 1.0 - 1e-12))
    return float(values[min(position, len(values) - 1)])
