"""The layout of a node: how many processes of a job run on it, with how many threads and loader
workers each. The candidates, and the search for the fastest one by measuring. Pure.

Decides which layouts are tried, in which order and for how long, and which one is chosen. It does
not decide when a job may be measured, nor how its processes are started again (the daemon and the
rounds do).

The search is successive elimination (Even-Dar, Mannor, Mansour, "Action elimination and stopping
conditions for the multi-armed bandit and reinforcement learning problems", Journal of Machine
Learning Research 7, 2006) with Student's t intervals on batch means. The relative deviation of a
batch is estimated from the batches of all layouts together: the noise comes from the node, and with
slow steps a layout has too few batches for an estimate of its own. A change of layout restarts the
processes of the job, so a layout is measured for several batches in a row before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jpa.measure import t975, t995

MAX_CANDIDATES = 12
"""Maximum number of layouts that are tried."""
MAX_TRIED_PROCESSES = 16
"""Maximum number of processes that is tried. Each has a copy of the model and of all libraries, and
a node without memory would lose the job.
"""
LOADER_WORKERS = (2, 1, 4, 8)
"""Numbers of loader workers of one process that are tried, unless the process has fewer cores."""


@dataclass(frozen=True)
class NodeLayout:
    """How a job uses one node."""

    processes: int
    """Worker processes on the node."""
    threads: int
    """Threads of each process."""
    loader_workers: int = 0
    """Loader workers of each process; 0: as the script has it."""

    def __str__(self) -> str:
        words = [f"{self.processes} process{'es' if self.processes != 1 else ''}"]
        words.append(f"{self.threads} thread{'s' if self.threads != 1 else ''}")
        if self.loader_workers:
            plural = "s" if self.loader_workers != 1 else ""
            words.append(f"{self.loader_workers} loader worker{plural}")
        return " × ".join(words)


@dataclass(frozen=True)
class LayoutRequest:
    """What the user has fixed of the layout, and what is to be found by measuring."""

    processes: int = 0
    """Processes on each node; 0: one for each GPU, one without GPUs."""
    threads: int = 0
    """Threads of each process; 0: the node's cores divided by the processes."""
    loader_workers: int = 0
    """Loader workers of each process; 0: as the script has it."""
    tunes_processes: bool = False
    """Whether the number of processes is found by measuring."""
    tunes_threads: bool = False
    """Whether the number of threads is found by measuring."""
    tunes_loaders: bool = False
    """Whether the number of loader workers is found by measuring."""


def default_layout(cores: int, gpus: int, request: LayoutRequest) -> NodeLayout:
    """Return the layout with which a job starts.

    Args:
        cores: number of cores that a job may use on the node, at least 1.
        gpus: number of GPUs of the node.
        request: what the user has fixed.
    """
    processes = request.processes or max(1, gpus)
    threads = request.threads or max(1, cores // processes)
    return NodeLayout(processes, threads, request.loader_workers)


def candidates(cores: int, gpus: int, request: LayoutRequest) -> tuple[NodeLayout, ...]:
    """Return the layouts that are tried, at most :data:`MAX_CANDIDATES`, the default first.

    On a node with GPUs there is one process for each GPU. No layout has more threads than cores.
    First come the numbers of processes that share all cores, then other numbers of loader workers
    and of threads in the default layout, then both together.

    Args:
        cores: number of cores that a job may use on the node, at least 1.
        gpus: number of GPUs of the node.
        request: what the user has fixed, and what is to be found.
    """
    default = default_layout(cores, gpus, request)
    counts = [default.processes]
    if request.tunes_processes and gpus == 0:
        most = min(cores, MAX_TRIED_PROCESSES)
        counts += [n for n in _powers_of_two(most) if n != default.processes]

    def threads(processes: int) -> list[int]:
        share = max(1, cores // processes)
        fewer = [1, max(1, share // 2)] if request.tunes_threads else []
        return [request.threads or share, *fewer]

    def loaders(processes: int) -> list[int]:
        share = max(1, cores // processes)
        more = [n for n in LOADER_WORKERS if n <= share] if request.tunes_loaders else []
        return [request.loader_workers, *more]

    current = default.processes
    ordered = [
        default,
        *(NodeLayout(n, threads(n)[0], request.loader_workers) for n in counts),
        *(NodeLayout(current, default.threads, n) for n in loaders(current)),
        *(NodeLayout(current, n, request.loader_workers) for n in threads(current)),
        *(NodeLayout(n, threads(n)[0], workers) for n in counts for workers in loaders(n)),
        *(
            NodeLayout(n, few, workers)
            for n in counts
            for few in threads(n)
            for workers in loaders(n)
        ),
    ]
    return tuple(dict.fromkeys(ordered))[:MAX_CANDIDATES]


def _powers_of_two(limit: int) -> list[int]:
    powers = [1 << exponent for exponent in range(limit.bit_length())]
    return powers if powers[-1] == limit else [*powers, limit]


# --- batch means ---


@dataclass
class BatchMeans:
    """Cuts the progress of a job in one layout into batches and computes the throughput of each.

    A batch ends with a report, at least ``batch_s`` and ``steps_per_batch`` mean steps after the
    previous one. The first ``warmup_s``, or two steps if these take longer, are dropped, because
    caches and allocators fill.
    """

    batch_s: float = 0.5
    """Minimum duration of a batch, seconds."""
    warmup_s: float = 1.0
    """Time that is dropped at the beginning, seconds."""
    steps_per_batch: float = 3.0
    """Minimum duration of a batch, in steps."""
    _first: float | None = None
    _begin: tuple[float, float] | None = None

    def feed(self, time: float, samples: float, step_s: float) -> float | None:
        """Process one report. Return the throughput of the batch that it ends, samples/s; None if
        it ends none.

        Args:
            time: time of the last sample, seconds.
            samples: samples of the round up to then.
            step_s: mean duration of a step, seconds; 0 if unknown.
        """
        if self._first is None:
            self._first = time
        length_s = max(self.batch_s, self.steps_per_batch * step_s)
        if self._begin is None:
            if time - self._first >= max(self.warmup_s, 2 * step_s):
                self._begin = (time, samples)
            return None
        began, before = self._begin
        if time - began < length_s:
            return None
        self._begin = (time, samples)
        return max(0.0, samples - before) / (time - began)


# --- the search ---


@dataclass(frozen=True)
class SearchConfig:
    """When the search ends and what it distinguishes."""

    max_seconds: float = 60.0
    """Maximum duration of the search, seconds, without the time in which it is paused."""
    tolerance: float = 0.02
    """Difference of two throughputs that does not matter, relative to the larger one."""
    min_batches: int = 3
    """Batches of a layout before it is judged."""
    visit_s: float = 2.2
    """Minimum time from the first to the last batch of a layout that are measured in a row,
    seconds. They are at least ``min_batches``, because a change of layout costs seconds too.
    """
    max_batches: int = 30
    """Maximum number of batches of one layout."""
    min_deviation: float = 0.01
    """Lower bound on the standard deviation of a batch, relative to its mean."""
    pooled: bool = True
    """Whether the relative deviation of a batch is estimated from the batches of all layouts
    together. Otherwise each layout has its own.
    """


@dataclass(frozen=True)
class Arm:
    """One layout and its measurements."""

    layout: NodeLayout
    count: int = 0
    """Number of batches at the current scale."""
    mean: float = 0.0
    """Mean throughput of the batches, samples/s."""
    squares: float = 0.0
    """Sum of the squared deviations from the mean."""
    out: str = ""
    """Why it is no longer tried; empty if it is."""

    def with_batch(self, rate: float) -> Arm:
        """Return the arm with one batch more (Welford's update)."""
        count = self.count + 1
        mean = self.mean + (rate - self.mean) / count
        squares = self.squares + (rate - self.mean) * (rate - mean)
        return replace(self, count=count, mean=mean, squares=squares)

    def variance_of_mean(self, min_deviation: float, pooled: Spread | None = None) -> float:
        """Return the variance of the mean; infinite if it is unknown.

        Args:
            min_deviation: lower bound on the relative standard deviation of a batch.
            pooled: deviation of a batch in all layouts; None for that of its own batches.
        """
        if pooled is not None:
            deviation = max(pooled.deviation, min_deviation) * self.mean
            return deviation**2 / self.count if self.count else math.inf
        if self.count < 2:
            return math.inf
        variance = self.squares / (self.count - 1)
        return max(variance, (min_deviation * self.mean) ** 2) / self.count

    def half_width(self, min_deviation: float, pooled: Spread | None = None) -> float:
        """Return the half width of the 99 % interval of the mean; infinite if it is unknown. For
        the arguments see :meth:`variance_of_mean`.
        """
        degrees = self.count - 1 if pooled is None else pooled.degrees
        if degrees < 1:
            return math.inf
        return t995(degrees) * math.sqrt(self.variance_of_mean(min_deviation, pooled))


@dataclass(frozen=True)
class Spread:
    """The relative standard deviation of a batch, estimated from all layouts together."""

    deviation: float
    """Standard deviation divided by the mean."""
    degrees: int
    """Degrees of freedom of the estimate."""

    @classmethod
    def of(cls, arms: Iterable[Arm]) -> Spread | None:
        """Return the pooled estimate: the squared relative deviations from the mean of each layout,
        added up, divided by the number of batches less one for each layout. None without data.
        """
        measured = [arm for arm in arms if arm.count > 1 and arm.mean > 0]
        degrees = sum(arm.count - 1 for arm in measured)
        if not degrees:
            return None
        squares = sum(arm.squares / arm.mean**2 for arm in measured)
        return cls(math.sqrt(squares / degrees), degrees)


def difference(
    a: Arm,
    b: Arm,
    min_deviation: float,
    pooled: Spread | None = None,
    quantile: Callable[[float], float] = t995,
) -> tuple[float, float]:
    """Return the interval of the mean of ``a`` minus that of ``b``: with the pooled deviation
    Student's, else Welch's ("The generalization of 'Student's' problem when several different
    population variances are involved", Biometrika 34, 1947).

    Args:
        a, b: two layouts.
        min_deviation: lower bound on the relative standard deviation of a batch.
        pooled: deviation of a batch in all layouts; None for that of each.
        quantile: returns the quantile of Student's t by degrees of freedom; the default is that of
            the 99 % interval.
    """
    var_a = a.variance_of_mean(min_deviation, pooled)
    var_b = b.variance_of_mean(min_deviation, pooled)
    total = var_a + var_b
    if not math.isfinite(total):
        return -math.inf, math.inf
    if total == 0:
        return a.mean - b.mean, a.mean - b.mean
    if pooled is None:
        degrees = total**2 / (var_a**2 / (a.count - 1) + var_b**2 / (b.count - 1))
    else:
        degrees = pooled.degrees
    width = quantile(degrees) * math.sqrt(total)
    return a.mean - b.mean - width, a.mean - b.mean + width


@dataclass(frozen=True)
class SearchOutcome:
    """The end of a search."""

    layout: NodeLayout
    """The layout that the job has from now on."""
    reason: str
    """Why, as a sentence."""


SLOWER = "slower"
NOT_BETTER = "no better"
FAILED = "its processes failed"
TIME_OVER = "the time of the search was over"


@dataclass(frozen=True)
class LayoutSearch:
    """The search of one job. Immutable: every method returns the next state.

    The first arm is the default. The measurements belong to one scale. At another scale they are
    dropped, and the search goes on with the layouts that were still in, and the default.
    """

    arms: tuple[Arm, ...]
    config: SearchConfig = field(default_factory=SearchConfig)
    current: int = 0
    """Index of the arm that is measured now."""
    visit: int = 0
    """Number of batches since the current arm was last chosen."""
    visit_began: float = 0.0
    """``seconds`` at the first of these."""
    seconds: float = 0.0
    """Duration of the search so far."""
    nodes: int = 0
    """Number of nodes of the measurements; 0 before the first."""
    outcome: SearchOutcome | None = None
    """How it ended; None while it goes on."""
    limit: str = ""
    """Which layouts are left out from the beginning and why, as a sentence; empty if none is."""

    @classmethod
    def of(cls, layouts: Iterable[NodeLayout], config: SearchConfig | None = None) -> LayoutSearch:
        """Return a search over ``layouts``, the default first."""
        return cls(tuple(Arm(layout) for layout in layouts), config or SearchConfig())

    @property
    def layout(self) -> NodeLayout:
        """The layout that the job should have now."""
        return self.outcome.layout if self.outcome else self.arms[self.current].layout

    @property
    def is_conclusive(self) -> bool:
        """Whether its end holds for other jobs: it has found a layout that is faster than the
        default, or has measured all.
        """
        if self.outcome is None or self.default.count < self.config.min_batches:
            return False
        is_complete = all(arm.out or arm.count >= self.config.min_batches for arm in self.arms)
        return is_complete or self.outcome.layout != self.default.layout

    @property
    def spread(self) -> Spread | None:
        """The deviation of a batch that all layouts have in common; None if each has its own."""
        return Spread.of(self.arms) if self.config.pooled else None

    @property
    def default(self) -> Arm:
        """The arm of the default layout."""
        return self.arms[0]

    def measured(self, rate: float, nodes: int) -> LayoutSearch:
        """Add the throughput of one batch of the current layout.

        Args:
            rate: throughput, samples/s.
            nodes: number of nodes of the job.
        """
        if self.outcome is not None:
            return self
        search = _at(self, nodes)
        search = _with_arm(search, search.current, search.arms[search.current].with_batch(rate))
        began = search.visit_began if search.visit else search.seconds
        search = replace(search, visit=search.visit + 1, visit_began=began)
        search = _without_beaten(search)
        return _next(search) if _is_visited(search) else search

    def spent(self, seconds: float) -> LayoutSearch:
        """Count time of the search. It ends when its time is over."""
        if self.outcome is not None:
            return self
        search = replace(self, seconds=self.seconds + max(0.0, seconds))
        return _finished(search, TIME_OVER) if search.seconds >= self.config.max_seconds else search

    def failed(self) -> LayoutSearch:
        """Drop the current layout, because the job's processes fail in it; the default stays."""
        if self.outcome is not None or self.current == 0:
            return self
        return _next(_with_arm(self, self.current, replace(self.arms[self.current], out=FAILED)))

    def excluding(
        self, excluded: Callable[[NodeLayout], bool], reason: str, limit: str
    ) -> LayoutSearch:
        """Leave out layouts that are not measured yet. The default stays.

        Args:
            excluded: whether a layout is left out.
            reason: why, as words of a table.
            limit: which are left out and why, as a sentence.
        """
        if self.outcome is not None:
            return self
        arms = tuple(
            replace(arm, out=reason) if index and not arm.out and excluded(arm.layout) else arm
            for index, arm in enumerate(self.arms)
        )
        search = replace(self, arms=arms, limit=limit)
        return _next(search) if arms[self.current].out else search

    def ended(self, reason: str) -> LayoutSearch:
        """End the search with the default layout. ``reason``: why, as a sentence."""
        return replace(self, outcome=SearchOutcome(self.default.layout, reason))

    # --- storage ---

    def to_dict(self) -> dict[str, Any]:
        """Return the search as plain numbers and texts."""
        return {
            "arms": [
                [*_numbers(arm.layout), arm.count, arm.mean, arm.squares, arm.out]
                for arm in self.arms
            ],
            "max_seconds": self.config.max_seconds,
            "current": self.current,
            "visit": self.visit,
            "visit_began": self.visit_began,
            "seconds": self.seconds,
            "nodes": self.nodes,
            "outcome": [*_numbers(self.outcome.layout), self.outcome.reason]
            if self.outcome
            else None,
            "limit": self.limit,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayoutSearch:
        """Return the search of :meth:`to_dict`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: the data are not those of a search.
        """
        arms = tuple(
            Arm(_layout(numbers[:3]), int(numbers[3]), float(numbers[4]), float(numbers[5]), out)
            for *numbers, out in data["arms"]
        )
        if not 0 <= int(data["current"]) < len(arms):
            raise ValueError(f"A search over {len(arms)} layouts has no arm {data['current']}.")
        outcome = data["outcome"]
        return cls(
            arms,
            SearchConfig(max_seconds=float(data["max_seconds"])),
            int(data["current"]),
            int(data["visit"]),
            float(data.get("visit_began", data["seconds"])),  # absent in searches stored before
            float(data["seconds"]),
            int(data["nodes"]),
            SearchOutcome(_layout(outcome[:3]), str(outcome[3])) if outcome else None,
            str(data.get("limit", "")),  # absent in searches stored before
        )


# --- steps of the search ---


def _at(search: LayoutSearch, nodes: int) -> LayoutSearch:
    if search.nodes == nodes:
        return search
    arms = tuple(
        Arm(arm.layout, out=arm.out if index else "") for index, arm in enumerate(search.arms)
    )
    return replace(search, arms=arms, nodes=nodes, visit=0)


def _with_arm(search: LayoutSearch, index: int, arm: Arm) -> LayoutSearch:
    return replace(search, arms=(*search.arms[:index], arm, *search.arms[index + 1 :]))


def _judged(search: LayoutSearch) -> list[int]:
    arms = enumerate(search.arms)
    return [i for i, a in arms if a.count >= search.config.min_batches and a.out != FAILED]


def _leader(search: LayoutSearch) -> int | None:
    """Return the fastest of the arms that are in and were measured long enough."""
    judged = [i for i in _judged(search) if not search.arms[i].out]
    return max(judged, key=lambda i: search.arms[i].mean, default=None)


def _without_beaten(search: LayoutSearch) -> LayoutSearch:
    leader = _leader(search)
    if leader is None:
        return search
    best, pooled = search.arms[leader], search.spread
    margin = search.config.tolerance * best.mean
    for index in _judged(search):
        arm = search.arms[index]
        if index == leader or arm.out:
            continue
        low, high = difference(arm, best, search.config.min_deviation, pooled)
        if high < 0:
            search = _with_arm(search, index, replace(arm, out=SLOWER))
        elif high < margin and (index > 0 or low > -margin):
            # The default stays in until it is known by how much it is slower.
            search = _with_arm(search, index, replace(arm, out=NOT_BETTER))
    return search


def _is_visited(search: LayoutSearch) -> bool:
    """Return whether the current arm is out, or was measured long enough for now."""
    config = search.config
    lasted_s = search.seconds - search.visit_began
    is_long = search.visit >= config.min_batches and lasted_s >= config.visit_s
    arm = search.arms[search.current]
    return bool(arm.out) or is_long or arm.count >= config.max_batches


def _next(search: LayoutSearch) -> LayoutSearch:
    """Return the search with the next arm: those that were not measured in their order, then
    the one with the fewest batches.
    """
    config = search.config
    open_ = [i for i, a in enumerate(search.arms) if not a.out and a.count < config.max_batches]
    unmeasured = [i for i in open_ if search.arms[i].count < config.min_batches]
    if (not unmeasured and len([a for a in search.arms if not a.out]) <= 1) or not open_:
        return _finished(search, "")
    index = (unmeasured or sorted(open_, key=lambda i: search.arms[i].count))[0]
    return replace(search, current=index, visit=0)


def _finished(search: LayoutSearch, why: str) -> LayoutSearch:
    judged = _judged(search)
    best = max(judged, key=lambda i: search.arms[i].mean, default=0)
    default, winner = search.arms[0], search.arms[best]
    end = f" ({why})" if why else ""
    if best == 0 or not default.count:
        reason = f"No other layout was faster than the default{end}."
        return replace(search, outcome=SearchOutcome(default.layout, reason))
    # The default is left for what is faster with 97.5 % probability: an elimination may be wrong
    # about several layouts, this decision only about one.
    low, _ = difference(winner, default, search.config.min_deviation, search.spread, t975)
    gain = winner.mean / default.mean - 1 if default.mean > 0 else math.inf
    if low <= 0:
        reason = (
            f"The fastest layout measured, {winner.layout}, was {gain:.0%} faster than the "
            f"default, which is within the uncertainty of the measurement{end}."
        )
        return replace(search, outcome=SearchOutcome(default.layout, reason))
    reason = f"It is {gain:.0%} faster than the default, {default.layout}{end}."
    return replace(search, outcome=SearchOutcome(winner.layout, reason))


def _numbers(layout: NodeLayout) -> tuple[int, int, int]:
    return layout.processes, layout.threads, layout.loader_workers


def _layout(numbers: Iterable[Any]) -> NodeLayout:
    processes, threads, loader_workers = (int(number) for number in numbers)
    if processes < 1 or threads < 1 or loader_workers < 0:
        raise ValueError(f"{processes} × {threads} × {loader_workers} is no layout of a node.")
    return NodeLayout(processes, threads, loader_workers)
