"""Synthetic traces with the statistics of a real machine.

The model, in the order of generation:

* The main scheduler leaves holes in *batches*: at random times a job ends and a run of neighbouring
  nodes is left over. Batch sizes are log-normal, at least 1, at most the machine. Batches are a
  Poisson process whose rate varies log-normally (an Ornstein-Uhlenbeck process in its logarithm): a
  queue that fills every hole for an hour, and then none.
* A batch is refilled in *blocks* of neighbouring nodes (by the jobs that start next). The nodes of
  a block become busy together.
* Gap lengths have a given distribution (:class:`Lengths`: log-normal, or any histogram). Blocks of
  one batch have similar lengths.
* Only the busy nodes of a batch become idle. The others stay idle as long as before. Per node this
  is an alternating renewal process: it is hit at rate h while busy and idle for E[L] on average, so
  it is idle for a fraction p = h·E[L] / (1 + h·E[L]) of the time, averaged over the variation of h.
  That determines the mean rate of batches.

The idle count then varies between none and nearly all nodes and is correlated over an hour, as on
the real machine. :data:`SUMMIT` has the parameters of Summit; :func:`like` estimates them from any
trace. The model omits days and weeks, and the fact that a drain before a full-machine job makes
gaps with known ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from scavenger.trace.trace import FloatArray, Trace, TraceError

GRID = np.linspace(-7.0, 7.0, 2801)
"""Values of a standard normal variable."""
DENSITY = np.exp(-0.5 * GRID**2) / math.sqrt(2 * math.pi) * (GRID[1] - GRID[0])
"""Probability of each value of :data:`GRID`."""
_NORMAL = NormalDist()
_PHI = np.array([_NORMAL.cdf(float(z)) for z in GRID])


@dataclass(frozen=True, eq=False)
class Lengths:
    """A distribution of gap lengths, as a function of a standard normal variable. ``log_s`` (K,):
    natural logarithms of seconds on a fixed grid.

    Sampling through a normal variable allows correlated lengths within a batch for any distribution
    (a Gaussian copula).
    """

    log_s: FloatArray

    def at(self, z: npt.ArrayLike) -> FloatArray:
        """Return lengths in seconds for standard normal ``z``."""
        return np.exp(np.interp(np.asarray(z, dtype=np.float64), GRID, self.log_s))

    @property
    def mean_s(self) -> float:
        """Expected length, seconds."""
        return float((np.exp(self.log_s) * DENSITY).sum())

    @property
    def median_s(self) -> float:
        """Median length, seconds."""
        return float(self.at(0.0))


def lognormal(median_s: float, mean_s: float, minimum_s: float = 0.0) -> Lengths:
    """Return log-normal lengths with this median and mean; with ``minimum_s``, only the part of the
    distribution above it.

    mu = ln(median), sigma² = 2·ln(mean/median). Summit's 475 s and 1,192 s give sigma = 1.36 and,
    as a check, 57 % below 600 s (measured: 56 %).

    Args:
        median_s: median length, seconds.
        mean_s: mean length, seconds.
        minimum_s: minimum length, seconds.
    """
    if not 0 < median_s < mean_s:
        raise TraceError(
            "synth",
            [
                f"A log-normal length needs 0 < median < mean; got median {median_s:g} s, mean "
                f"{mean_s:g} s."
            ],
        )
    mu, sigma = math.log(median_s), math.sqrt(2.0 * math.log(mean_s / median_s))
    if minimum_s <= 0:
        return Lengths(mu + sigma * GRID)
    below = _NORMAL.cdf((math.log(minimum_s) - mu) / sigma)
    u = np.clip(below + (1.0 - below) * _PHI, 1e-15, 1.0 - 1e-15)
    return Lengths(mu + sigma * np.array([_NORMAL.inv_cdf(float(x)) for x in u]))


def histogram(edges_s: Sequence[float], weights: Sequence[float]) -> Lengths:
    """Return lengths by a histogram: ``weights`` (B,) of the bins between ``edges_s`` (B+1,)
    seconds, log-uniform within a bin.

    An edge of 0 counts as 1 s, and an infinite last edge as four times the previous one.
    """
    edges = [float(e) for e in edges_s]
    w = np.asarray(weights, dtype=np.float64)
    if edges and edges[0] == 0:
        edges[0] = min(1.0, edges[1] / 2) if len(edges) > 1 else 1.0
    if len(edges) > 1 and math.isinf(edges[-1]):
        edges[-1] = 4.0 * edges[-2]
    if len(edges) != len(w) + 1 or len(w) == 0 or min(np.diff(edges)) <= 0 or edges[0] < 0:
        raise TraceError(
            "synth", ["A histogram of lengths needs rising edges, one more than weights."]
        )
    if not np.isfinite(w).all() or w.min() < 0 or w.sum() <= 0:
        raise TraceError(
            "synth", ["The weights of a histogram of lengths must be 0 or more, and not all 0."]
        )
    cumulative = np.concatenate([[0.0], np.cumsum(w) / w.sum()])
    return Lengths(np.interp(_PHI, cumulative, np.log(edges)))


DEMO_ATTEMPTS = 400


@dataclass(frozen=True, eq=False)
class MachineModel:
    """Parameters of a synthetic machine. Times are in seconds."""

    idle_fraction: float
    """Idle fraction of node-time."""
    lengths: Lengths
    """Distribution of gap lengths."""
    batch_median: float = 1.0
    """Median number of nodes that become idle together."""
    batch_mean: float = 1.0
    """Mean number of nodes that become idle together."""
    block_mean: float = 1.0
    """Mean number of nodes that become busy together."""
    similarity: float = 0.0
    """Fraction (0..1) of the variance of the normal variable behind a length that is common to
    the batch.
    """
    swing: float = 0.0
    """Standard deviation of the logarithm of the batch rate."""
    swing_s: float = 3600.0
    """Its correlation time."""
    quantum_s: float = 0.0
    """Events happen at multiples of this (the scheduler's cycle)."""

    def __post_init__(self) -> None:
        if not 0 < self.idle_fraction < 1:
            raise TraceError(
                "synth", [f"The idle fraction must be between 0 and 1; got {self.idle_fraction:g}."]
            )
        if not 1 <= self.batch_median <= self.batch_mean:
            raise TraceError(
                "synth",
                [
                    f"Batches need 1 <= median <= mean; got {self.batch_median:g}, "
                    f"{self.batch_mean:g}."
                ],
            )
        if not (
            0 <= self.similarity <= 1
            and self.block_mean >= 1
            and self.quantum_s >= 0
            and self.swing >= 0
            and self.swing_s > 0
        ):
            raise TraceError(
                "synth",
                [
                    "The similarity must be in 0..1, blocks of 1 node or more, the swing and "
                    "the quantum 0 or more."
                ],
            )


SUMMIT = MachineModel(
    # Lengths and idle nodes: a fortnight of Summit, February 2021 (391 of 4,734 nodes idle; median
    # 475 s, mean 1,192 s).
    idle_fraction=391 / 4734,
    lengths=lognormal(475.0, 1192.0),
    # Batches: 209,184 gaps opened at 7,165 different times in the public week of that fortnight
    # (BFTrainer, arXiv 2106.12091): median 4, mean 29.2; log-normal quantiles at 75/90/95/99 % are
    # 15/52/107/419, measured 16/50/100/512. 88 % of the variance of log length lies between
    # batches; 18 gaps share an end on average. The swing is the result of :func:`like` for that
    # week.
    batch_median=4.0,
    batch_mean=29.2,
    block_mean=18.0,
    similarity=0.88,
    swing=1.8,
    swing_s=3600.0,
    quantum_s=10.0,
)


def like(trace: Trace, bins: int = 60) -> MachineModel:
    """Return the model's parameters, estimated from a trace. Raises TraceError if it has too few
    complete gaps (20).

    All are measured directly except ``swing``. It is searched (bisection, a few short syntheses) so
    that the idle count varies as much as in the trace: the standard deviation of ln(1 + idle
    nodes), sampled every minute.
    """
    gaps = trace.gaps()
    lengths = gaps.length[gaps.complete]
    if len(lengths) < 20:
        raise TraceError(
            "synth",
            [
                f"The trace has {len(lengths)} complete gaps; at least 20 are needed to learn "
                "from it."
            ],
        )
    edges = np.geomspace(lengths.min() * 0.999, lengths.max() * 1.001, bins + 1)
    weights, _ = np.histogram(lengths, bins=edges)
    start = gaps.start[gaps.complete]
    _, batch, sizes = np.unique(start, return_inverse=True, return_counts=True)
    logs = np.log(lengths)
    means = np.bincount(batch, weights=logs) / sizes
    within = float(((logs - means[batch]) ** 2).mean() / max(logs.var(), 1e-12))
    ends = len(np.unique(np.stack([batch.astype(np.float64), lengths]), axis=1)[0])
    differences = np.diff(trace.time)
    positive = differences[differences > 0]
    model = MachineModel(
        idle_fraction=min(max(trace.statistics().idle_fraction, 1e-6), 1 - 1e-6),
        lengths=histogram(edges.tolist(), weights.tolist()),
        batch_median=max(1.0, min(float(np.median(sizes)), float(sizes.mean()))),
        batch_mean=float(sizes.mean()),
        block_mean=max(1.0, len(lengths) / ends),
        similarity=min(max(1.0 - within, 0.0), 1.0),
        swing_s=SUMMIT.swing_s,
        quantum_s=float(positive.min()) if len(positive) else 0.0,
    )
    target, low, high = _variability(trace), 0.0, 3.0
    duration = min(trace.duration_s, 7 * 86400.0)
    for _ in range(6):
        middle = 0.5 * (low + high)
        tried = replace(model, swing=middle)
        variability = float(
            np.mean(
                [
                    _variability(synthesise(tried, len(trace.names), duration, seed=k))
                    for k in range(3)
                ]
            )
        )
        low, high = (middle, high) if variability < target else (low, middle)
    return replace(model, swing=0.5 * (low + high))


def _variability(trace: Trace) -> float:
    """Return the standard deviation over time of ln(1 + idle nodes), sampled every minute."""
    times, counts = trace.idle_count()
    at = np.arange(0.0, max(trace.duration_s, 1.0), 60.0)
    return float(np.log1p(counts[np.searchsorted(times, at, side="right") - 1]).std())


def synthesise(
    model: MachineModel,
    nodes: int | Sequence[str],
    duration_s: float,
    seed: int = 0,
    *,
    mean_idle: float | None = None,
) -> Trace:
    """Return a trace of ``nodes`` (a number, or names) over ``duration_s`` seconds. The same
    arguments give the same trace.

    The mean of a single trace deviates from it, because batches are large.

    Args:
        model: parameters of the machine.
        nodes: number of nodes, or their names.
        duration_s: length of the trace, seconds.
        seed: seed of the random numbers.
        mean_idle: mean number of idle nodes, instead of the model's fraction.
    """
    names = (
        [f"n{k + 1:0{len(str(nodes))}d}" for k in range(nodes)]
        if isinstance(nodes, int)
        else list(nodes)
    )
    if not names or not (duration_s > 0 and math.isfinite(duration_s)):
        raise TraceError(
            "synth",
            [
                f"A trace needs at least one node and a duration above 0 s; got {len(names)}, "
                f"{duration_s!r}."
            ],
        )
    if mean_idle is not None:
        model = replace(model, idle_fraction=mean_idle / len(names))
    count = len(names)
    rng = np.random.default_rng(seed)
    sigma = math.sqrt(2.0 * math.log(model.batch_mean / model.batch_median))
    mean_batch = float((_batch_sizes(GRID, model, sigma, count) * DENSITY).sum())
    mean_length = model.lengths.mean_s
    hit_rate = _load(model) / mean_length  # of one node, per second of being busy
    warm_up = 12.0 * mean_length  # long enough to forget that all nodes start busy
    starts = _batch_times(rng, model, hit_rate * count / mean_batch, -warm_up, duration_s)
    batches = len(starts)
    sizes = _batch_sizes(rng.standard_normal(batches), model, sigma, count)
    common = rng.standard_normal(batches)
    free_from = np.full(count, -math.inf)  # the node is idle until then
    gaps: list[tuple[npt.NDArray[np.int64], FloatArray, FloatArray]] = []
    for start, size, shared in zip(starts, sizes.tolist(), common.tolist(), strict=True):
        if model.quantum_s:
            start = round(start / model.quantum_s) * model.quantum_s
        members = (int(rng.integers(count)) + np.arange(int(size))) % count
        members = members[free_from[members] < start]
        if not len(members):
            continue
        block = np.cumsum(rng.random(len(members)) < 1.0 / model.block_mean)
        own = rng.standard_normal(int(block[-1]) + 1)
        z = math.sqrt(model.similarity) * shared + math.sqrt(1.0 - model.similarity) * own
        end_times = start + model.lengths.at(z)
        if model.quantum_s:
            end_times = np.maximum(
                np.round(end_times / model.quantum_s) * model.quantum_s, start + model.quantum_s
            )
        free_from[members] = end_times[block]
        if end_times.max() > 0:
            gaps.append((members, np.full(len(members), start), end_times[block]))
    if not gaps:
        return Trace.from_gaps([], [], [], names, duration_s)
    node, begin, end = (np.concatenate(column) for column in zip(*gaps, strict=True))
    return Trace.from_gaps(node, begin, end, names, duration_s)


def demo_trace(
    nodes: int = 6,
    duration_s: float = 150.0,
    speedup: float = 30.0,
    seed: int = 0,
    *,
    mean_idle: float | None = None,
    shortest_gap_s: float = 8.0,
    spacing_s: float = 3.0,
) -> Trace:
    """Return a trace for a few virtual nodes that shows MalleTrain's behaviour within minutes.

    Gap lengths are Summit's, compressed ``speedup`` times. Nodes change state one at a time. Among
    the traces that the model generates for ``seed``, the first lively one is returned: within 10 %
    of the mean, at least half of it at the start, at least a third of it for 95 % of the time; in
    each third of the time at least one node that becomes idle and one that becomes busy per 18 real
    seconds; 70 % of the events ``spacing_s`` apart.

    Args:
        nodes: number of nodes.
        duration_s: real seconds; the trace itself is ``duration_s·speedup`` seconds long.
        speedup: divisor of the trace's times when it is played.
        seed: seed of the random draws.
        mean_idle: mean number of idle nodes; None: 58 % of the nodes (3.5 of 6).
        shortest_gap_s: minimum length of a gap, real seconds.
        spacing_s: desired minimum time between two events, real seconds.

    Raises:
        TraceError: no such trace is found.
    """
    target_idle = nodes * 3.5 / 6 if mean_idle is None else mean_idle
    model = MachineModel(
        idle_fraction=min(max(target_idle / nodes, 0.01), 0.99),
        lengths=lognormal(475.0, 1192.0, shortest_gap_s * speedup),
    )
    for attempt in range(DEMO_ATTEMPTS):
        trace = synthesise(
            model,
            [f"n{k + 1}" for k in range(nodes)],
            duration_s * speedup,
            seed=seed * DEMO_ATTEMPTS + attempt,
        )
        if _lively(trace, target_idle, speedup, spacing_s):
            return trace
    raise TraceError(
        "synth",
        [
            f"No lively trace of {nodes} nodes, {duration_s:g} s, {target_idle:g} idle at speed-up "
            f"{speedup:g} was found; "
            "take more nodes, a longer time or another speed-up."
        ],
    )


def _lively(trace: Trace, target_idle: float, speedup: float, spacing_s: float) -> bool:
    times, counts = trace.idle_count()
    widths = np.diff(np.append(times, trace.duration_s))
    mean = float((counts * widths).sum() / trace.duration_s)
    if abs(mean - target_idle) > 0.1 * target_idle or counts[0] < target_idle / 2:
        return False
    if float(widths[counts < max(1.0, target_idle / 3)].sum()) > 0.05 * trace.duration_s:
        return False
    inside = trace.time > 0
    time, idle = trace.time[inside], trace.idle[inside]
    third = trace.duration_s / 3
    each = max(1, int(third / speedup / 18))
    for k in range(3):
        part = (time >= k * third) & (time < (k + 1) * third)
        if (idle & part).sum() < each or (~idle & part).sum() < each:
            return False
    apart = np.diff(time)
    return bool(len(apart) and (apart >= spacing_s * speedup).mean() >= 0.7)


def _batch_sizes(z: FloatArray, model: MachineModel, sigma: float, nodes: int) -> FloatArray:
    return np.clip(np.round(model.batch_median * np.exp(sigma * z)), 1, nodes)


def _load(model: MachineModel) -> float:
    """Return the h·E[L] that gives the idle fraction: solves E[x·g/(1 + x·g)] = p for x by
    bisection, with g the variation of the rate (mean 1).
    """
    g = np.exp(model.swing * GRID - 0.5 * model.swing**2)
    low, high = 0.0, 1.0
    while float((high * g / (1.0 + high * g) * DENSITY).sum()) < model.idle_fraction and high < 1e9:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if float((middle * g / (1.0 + middle * g) * DENSITY).sum()) < model.idle_fraction:
            low = middle
        else:
            high = middle
    return high


def _batch_times(
    rng: np.random.Generator, model: MachineModel, rate: float, begin: float, end: float
) -> FloatArray:
    """Return sorted times of batches in [begin, end): Poisson with this mean rate (1/s), constant
    over a tenth of the correlation time.
    """
    if model.swing == 0:
        return np.sort(rng.uniform(begin, end, int(rng.poisson(rate * (end - begin)))))
    cell = model.swing_s / 10.0
    cells = math.ceil((end - begin) / cell)
    keep = math.exp(-0.1)
    steps = rng.standard_normal(cells)
    level, value = np.empty(cells), float(rng.standard_normal())
    for k in range(cells):
        level[k] = value = keep * value + math.sqrt(1.0 - keep * keep) * float(steps[k])
    numbers = rng.poisson(rate * cell * np.exp(model.swing * level - 0.5 * model.swing**2))
    times = begin + (np.repeat(np.arange(cells), numbers) + rng.random(int(numbers.sum()))) * cell
    times.sort()
    return times[times < end]
