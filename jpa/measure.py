"""Measurement of a job's throughput at a fixed size, from its ordinary progress reports.

Decides the estimate, its interval, and when one size has been measured. It does not decide which
size comes next (:mod:`jpa.profile`) and does not keep a curve (:mod:`jpa.curve`). :func:`t975` and
:func:`t995` are the quantiles of all measured means.

:func:`steady_throughput` is the one estimate of what a job processes at a size when nothing
disturbs it. A profile and the windows after it use it (:class:`ThroughputMeter`,
:class:`Monitor`), from which plans follow, and so does the daemon for what ``malletrain show`` has
seen at each size. Two other rates, which the daemon computes, include stalls: that of ``malletrain
status`` is a mean over the last seconds; the pace of the goals, from which deadlines are forecast,
is the part of its curve that a job achieves in the long run, pauses included.

The observed time is cut into 8-20 batches of about equal length whose ends lie on progress reports
(batch means; Schmeiser, "Batch size effects in the analysis of simulation output", Operations
Research 30(3), 1982: few long batches rather than many). The throughput is the ratio
Σsamples/Σtime with the variance of a ratio estimator (Cochran, "Sampling Techniques", section 6.3)
and a Student's t interval. Correlated batches widen the interval by √((1+ρ)/(1−ρ)), where ρ is
their lag-1 autocorrelation (the AR(1) correction of Lada and Wilson, "SBatch: a spaced batch means
procedure for steady-state simulation analysis", Journal of Simulation 2, 2008). The batches are
also merged in pairs and fours; the widest of the three intervals counts.

Excluded are the warm-up (a minimum time and number of reports, then leading outliers among the
batches) and stalls, such as a checkpoint or a pause of the file system (batches under half the
median, at most one in five), because they do not depend on the size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from statistics import median

_DEGREES = 30
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T995 = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


def t975(degrees: float) -> float:
    """Return the 97.5 % quantile, for a 95 % interval.

    Args:
        degrees: degrees of freedom, rounded down, at least 1; beyond 30 the quantile is that of the
            normal distribution.
    """
    return _T975[_index(degrees)] if degrees < _DEGREES + 1 else 1.960


def t995(degrees: float) -> float:
    """Return the 99.5 % quantile, for a 99 % interval. ``degrees``: see :func:`t975`."""
    return _T995[_index(degrees)] if degrees < _DEGREES + 1 else 2.576


def _index(degrees: float) -> int:
    return max(0, math.floor(degrees) - 1)


_MAX_BATCHES = 20
_MAX_REPORTS = 1024
"""Reports stored. Beyond this every second one is dropped: batches only have to end on reports."""


@dataclass(frozen=True)
class MeasureConfig:
    """When one size has been measured. Seconds count from the end of the rescale.

    Raises:
        ValueError: if a limit is out of range or two limits contradict each other.
    """

    tolerance: float = 0.05
    """Half-width of the 95 % interval, relative to the throughput."""
    warmup_s: float = 1.0
    """Time to ignore at the start, seconds."""
    warmup_reports: int = 2
    """Progress reports to ignore at the start."""
    min_seconds: float = 5.0
    """Minimum duration of a measurement, seconds."""
    max_seconds: float = 60.0
    """Maximum duration of a measurement, seconds."""
    min_samples: int = 1
    """Minimum number of samples of a measurement."""
    max_samples: int | None = None
    """Maximum number of samples of a measurement, None for no limit."""
    min_batches: int = 8
    """Minimum number of batches of a stable measurement, 3 to 20."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(
                f"The tolerance of a measurement is {self.tolerance}; give a fraction between 0 "
                "and 1, for example 0.05."
            )
        if (
            not 0 <= self.warmup_s < self.max_seconds
            or not 0 < self.min_seconds <= self.max_seconds
        ):
            raise ValueError(
                f"A measurement of {self.min_seconds} to {self.max_seconds} s after "
                f"{self.warmup_s} s of warm-up cannot work; "
                "give 0 <= warm-up < maximum and 0 < minimum <= maximum."
            )
        if self.max_samples is not None and not self.min_samples <= self.max_samples:
            raise ValueError(
                f"The largest number of samples ({self.max_samples}) is below the smallest "
                f"({self.min_samples})."
            )
        if not 3 <= self.min_batches <= _MAX_BATCHES:
            raise ValueError(
                f"A measurement needs between 3 and {_MAX_BATCHES} batches, not {self.min_batches}."
            )


DEFAULT_CONFIG = MeasureConfig()


@dataclass(frozen=True)
class Measurement:
    """The throughput measured at one size."""

    nodes: int
    """The size."""
    rate: float
    """Throughput, samples/s."""
    half_width: float
    """Half-width of the 95 % interval, samples/s; infinite if there are too few reports."""
    samples: float
    """Number of samples in the estimate."""
    seconds: float
    """Time in the estimate, seconds."""
    stable: bool
    """Whether the half-width is within the tolerance."""


class MeasurementState(str, Enum):
    """The state of a measurement."""

    MEASURING = "measuring"
    """It is not finished."""
    STABLE = "stable"
    """It is finished, and the estimate is within the tolerance."""
    UNSTABLE = "unstable"
    """It reached a limit; the interval of the estimate is wider than the tolerance."""
    UNKNOWN = "unknown"
    """It reached a limit, and the job reported no progress."""


@dataclass
class ThroughputMeter:
    """Measures one job at one size."""

    nodes: int
    """The size."""
    started: float
    """End of the rescale, seconds on the caller's clock."""
    config: MeasureConfig = field(default_factory=MeasureConfig)
    """When the size has been measured."""
    _reports: list[tuple[float, float]] = field(default_factory=list)
    """(time, samples) of the reports in the estimate."""
    _last_report_time: float = -math.inf
    _warmup_count: int = 0
    """Reports of the warm-up."""
    _first: tuple[float, float] | None = None
    """The first report of all."""

    def feed(self, time: float, samples: float) -> MeasurementState:
        """Process one progress report.

        Reports that arrive late or twice are ignored. A counter that decreases (the job resumed
        from its snapshot) restarts the measurement.

        Args:
            time: time at which the last sample was processed, seconds.
            samples: samples that the job has processed so far.

        Returns:
            The state of the measurement.

        Raises:
            ValueError: if a number is not finite, or ``samples`` is negative.
        """
        if not (math.isfinite(time) and math.isfinite(samples)) or samples < 0:
            raise ValueError(
                f"A progress report of {samples} samples at time {time} is not usable: both "
                "must be finite, samples >= 0."
            )
        if time <= self._last_report_time or time < self.started:
            return self.state(max(time, self._last_report_time, self.started))
        self._last_report_time = time
        if self._reports and samples < self._reports[-1][1]:
            self._reports.clear()
            self._warmup_count, self._first = 0, None
        if self._first is None:
            self._first = (time, samples)
            self._reports.append((time, samples))
            return self.state(time)
        if samples == self._reports[-1][1]:
            return self.state(time)
        if (
            self._warmup_count < self.config.warmup_reports
            or time - self.started < self.config.warmup_s
        ):
            # During the warm-up only the last report is stored: the measurement begins there.
            self._warmup_count += 1
            self._reports[:] = [(time, samples)]
            return self.state(time)
        self._reports.append((time, samples))
        if len(self._reports) > _MAX_REPORTS:
            self._reports[:] = [*self._reports[:-1:2], self._reports[-1]]
        return self.state(time)

    def state(self, now: float) -> MeasurementState:
        """Return the state of the measurement at ``now``, seconds. Call it regularly: a job without
        reports reaches the time limit only here.
        """
        timed_out = now - self.started >= self.config.max_seconds
        max_samples = self.config.max_samples
        if len(self._reports) >= 2:
            if now - self.started < self.config.min_seconds and max_samples is None:
                return MeasurementState.MEASURING
            measurement = self.measurement(now)
            sufficient = (
                now - self.started >= self.config.min_seconds
                and measurement.samples >= self.config.min_samples
                and measurement.stable
                and self._last_report_time >= self._reports[-1][0] >= now  # not within a stall
            )
            if sufficient:
                return MeasurementState.STABLE
            if timed_out or (max_samples is not None and measurement.samples >= max_samples):
                return MeasurementState.STABLE if measurement.stable else MeasurementState.UNSTABLE
            return MeasurementState.MEASURING
        if not timed_out:
            return MeasurementState.MEASURING
        return (
            MeasurementState.UNSTABLE
            if self.measurement(now).rate > 0
            else MeasurementState.UNKNOWN
        )

    def measurement(self, now: float) -> Measurement:
        """Return the estimate so far; ``now``: the time, seconds.

        With fewer than two reports after the warm-up the rate is that of the warm-up (0 without
        progress) and the half-width is infinite.
        """
        if len(self._reports) < 2:
            if self._first is None or self._warmup_count == 0:
                return Measurement(self.nodes, 0.0, math.inf, 0.0, 0.0, False)
            seconds, samples = (
                self._reports[-1][0] - self._first[0],
                self._reports[-1][1] - self._first[1],
            )
            return Measurement(self.nodes, samples / seconds, math.inf, samples, seconds, False)
        reports: Sequence[tuple[float, float]] = self._reports
        silence, window = now - reports[-1][0], reports[-1][0] - reports[0][0]
        if silence > window / 4 and silence > 5 * median(b[0] - a[0] for a, b in pairwise(reports)):
            reports = [*reports, (now, reports[-1][1])]  # a long silence counts
        return steady_throughput(self.nodes, _batches(reports), self.config)


@dataclass
class Monitor:
    """Turns the reports of a running job into one observation for each window of time. A window is
    discarded when the number of nodes or the phase changes.
    """

    window_s: float = 30.0
    """Length of a window, seconds."""
    _meter: ThroughputMeter | None = None
    _phase: str = ""

    def feed(self, time: float, samples: float, nodes: int, phase: str) -> Measurement | None:
        """Process one report.

        Args:
            time: time at which the last sample was processed, seconds.
            samples: samples that the job has processed so far.
            nodes: the job's size.
            phase: its phase.

        Returns:
            The measurement of a window that this report completes, else None. Its ``stable`` has no
            meaning here.
        """
        meter = self._meter
        if meter is None or meter.nodes != nodes or phase != self._phase:
            meter = self._start(nodes, time, phase)
        meter.feed(time, samples)
        if time - meter.started < self.window_s:
            return None
        measurement = meter.measurement(time)
        self._start(nodes, time, phase, warmup=False).feed(time, samples)
        return measurement if measurement.seconds > 0 else None

    def _start(self, nodes: int, time: float, phase: str, warmup: bool = True) -> ThroughputMeter:
        config = MeasureConfig(min_seconds=self.window_s, max_seconds=self.window_s)
        if not warmup:  # only the first window after a change has a warm-up
            config = replace(config, warmup_s=0.0, warmup_reports=0)
        self._phase = phase
        self._meter = ThroughputMeter(nodes, time, config)
        return self._meter


TimeBatch = tuple[float, float]
"""(samples, seconds)"""


def steady_throughput(
    nodes: int, batches: Sequence[TimeBatch], config: MeasureConfig = DEFAULT_CONFIG
) -> Measurement:
    """Return the throughput of a job at one size, without leading outliers and stalls.

    Args:
        nodes: the size.
        batches: successive batches of about equal duration. Of more than 20 without outliers,
            neighbours are merged for the interval.
        config: when the measurement is stable.
    """
    steady = _without_outliers(batches)
    samples, seconds = _sums(steady)
    rate = samples / seconds
    groups = _merged(steady, math.ceil(len(steady) / _MAX_BATCHES))
    half_width = _half_width(groups)
    for merged in (_merged(groups, 2), _merged(groups, 4)):
        if len(merged) >= 4:
            half_width = max(half_width, _half_width(merged))
    stable = len(groups) >= config.min_batches and half_width <= config.tolerance * rate
    return Measurement(nodes, rate, half_width, samples, seconds, stable)


def _batches(reports: Sequence[tuple[float, float]]) -> list[TimeBatch]:
    """Return at most 20 batches of about equal duration, each ending on a report."""
    times = [t for t, _ in reports]
    count = min(_MAX_BATCHES, len(reports) - 1)
    length = (times[-1] - times[0]) / count
    ends = {bisect_left(times, times[0] + length * i - 1e-9, 1) for i in range(1, count)} | {
        len(times) - 1
    }
    edges = [0, *sorted(ends)]
    return [(reports[b][1] - reports[a][1], times[b] - times[a]) for a, b in pairwise(edges)]


def _without_outliers(batches: Sequence[TimeBatch]) -> Sequence[TimeBatch]:
    """Return the batches without leading outliers (warm-up) and without stalls."""
    if len(batches) < 5:
        return batches
    rates = [s / t for s, t in batches]
    center = median(rates)
    # 1.4826·MAD estimates a normal standard deviation. The fractions of the median are lower bounds
    # for jobs with so few steps in a batch that the rates take only two values (MAD 0).
    deviation = 5 * 1.4826 * median([abs(r - center) for r in rates])
    first = 0
    while first < len(batches) // 3 and abs(rates[first] - center) > max(deviation, 0.35 * center):
        first += 1
    steady = batches[first:]
    stall_rate = center - max(deviation, 0.5 * center)
    stalls = sorted((r, i) for i, r in enumerate(rates[first:]) if r < stall_rate)
    excluded = {i for _, i in stalls[: len(steady) // 5]}
    return [b for i, b in enumerate(steady) if i not in excluded]


def _merged(batches: Sequence[TimeBatch], size: int) -> list[TimeBatch]:
    """Return groups of ``size`` neighbouring batches merged to one; a remainder at the start is
    dropped.
    """
    tail = batches[len(batches) % size :]
    return [_sums(tail[i : i + size]) for i in range(0, len(tail), size)]


def _sums(batches: Sequence[TimeBatch]) -> TimeBatch:
    return sum([s for s, _ in batches]), sum([t for _, t in batches])


def _half_width(batches: Sequence[TimeBatch]) -> float:
    """Return the half-width of the 95 % interval of Σsamples/Σtime, samples/s; infinite for fewer
    than three batches.
    """
    count = len(batches)
    if count < 3:
        return math.inf
    samples, seconds = _sums(batches)
    rate = samples / seconds
    errors = [s - rate * t for s, t in batches]
    squares = sum(e * e for e in errors)
    if squares == 0:
        return 0.0
    variance = count / (count - 1) * squares / seconds**2
    correlation = sum(a * b for a, b in pairwise(errors)) / squares
    correlation = min(max(correlation, 0.0), 0.9)
    variance *= (1 + correlation) / (1 - correlation)
    return t975(count - 1) * math.sqrt(variance)
