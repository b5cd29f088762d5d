"""Throughput of a job at a fixed scale, from its ordinary progress reports: how much, how sure, and
when to stop looking.

Decides when one size has been measured. It does not decide which size comes next (:mod:`jpa.plan`),
and it keeps no curve.

The observed time is cut into 8-20 batches of about equal length whose ends lie on progress reports
(batch means; Schmeiser, "Batch size effects in the analysis of simulation output", Operations
Research 30(3), 1982: few long batches rather than many). The throughput is the ratio
Σsamples/Σtime, its variance the one of a ratio estimator (Cochran, "Sampling Techniques", section
6.3) and the interval Student's t. Batches that are still correlated widen it by √((1+ρ)/(1−ρ)), ρ
being their lag-1 autocorrelation (the AR(1) correction of Lada and Wilson, "SBatch: a spaced batch
means procedure for steady-state simulation analysis", Journal of Simulation 2, 2008); the batches
are also joined in pairs and fours, and the widest of the three intervals counts.

Left out: everything before the job has warmed up (a minimum time and number of reports, then
leading batches that do not belong to the rest), and stalls (a checkpoint, a hiccup of the file
system): batches under half the median, at most one in five. A stall belongs to no size; what it
costs in the long run is learnt by the ordinary observations of :class:`Monitor`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from statistics import median

# Student's t, 97.5 % point, by degrees of freedom 1..30.
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_MOST_BATCHES = 20
_MOST_REPORTS = 1024
"""Reports kept; beyond, every second one is dropped (batches only need ends to lie on reports)."""


@dataclass(frozen=True)
class MeasureConfig:
    """When one size has been measured. Seconds count from the end of the rescale.

    Raises:
        ValueError: on limits that contradict each other.
    """

    tolerance: float = 0.05
    """Half-width of the 95 % interval as a share of the throughput."""
    warmup_s: float = 1.0
    """Ignored at the start, seconds."""
    warmup_reports: int = 2
    """Progress reports ignored at the start."""
    min_seconds: float = 5.0
    """Never stop before."""
    max_seconds: float = 60.0
    """Stop then at the latest."""
    min_samples: int = 1
    """Never stop before."""
    max_samples: int | None = None
    """Stop then at the latest, None for no limit."""
    min_batches: int = 8
    """At least so many, 20 at most."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(
                f"The tolerance of a measurement is {self.tolerance}; give a share between 0 "
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
                f"The largest number of samples ({self.max_samples}) is under the smallest "
                f"({self.min_samples})."
            )
        if not 3 <= self.min_batches <= _MOST_BATCHES:
            raise ValueError(
                f"A measurement needs between 3 and {_MOST_BATCHES} batches, not "
                f"{self.min_batches}."
            )


@dataclass(frozen=True)
class Measurement:
    """What was seen at one size."""

    nodes: int
    """The size."""
    rate: float
    """Samples/s."""
    half_width: float
    """Half-width of the 95 % interval, samples/s; infinite when there were too few reports to
    say.
    """
    samples: float
    """What the estimate rests on."""
    seconds: float
    """What the estimate rests on."""
    stable: bool
    """Whether the half-width was within the tolerance."""


class MeasurementState(str, Enum):
    """Where a measurement stands."""

    MEASURING = "measuring"
    STABLE = "stable"
    UNSTABLE = "unstable"
    """The limits were reached; the estimate is there, with its honest width."""
    UNKNOWN = "unknown"
    """The limits were reached without any progress seen."""


@dataclass
class ThroughputMeter:
    """Watches one job at ``nodes`` nodes since ``started`` (end of the rescale, seconds on the
    caller's clock).
    """

    nodes: int
    started: float
    config: MeasureConfig = field(default_factory=MeasureConfig)
    _reports: list[tuple[float, float]] = field(default_factory=list)
    _last_seen: float = -math.inf
    _warm: int = 0
    _first: tuple[float, float] | None = None

    def feed(self, time: float, samples: float) -> MeasurementState:
        """One progress report: ``samples`` processed by the job so far. Returns where the
        measurement stands.

        Reports that come late or twice are ignored; a counter that goes back (the job resumed from
        its snapshot) starts it all anew.

        Raises:
            ValueError: on numbers that are not finite or negative.
        """
        if not (math.isfinite(time) and math.isfinite(samples)) or samples < 0:
            raise ValueError(
                f"A progress report of {samples} samples at time {time} is not usable: both "
                "must be finite, samples >= 0."
            )
        if time <= self._last_seen or time < self.started:
            return self.outcome(max(time, self._last_seen, self.started))
        self._last_seen = time
        if self._reports and samples < self._reports[-1][1]:
            self._reports.clear()
            self._warm, self._first = 0, None
        if self._first is None:
            self._first = (time, samples)
            self._reports.append((time, samples))
            return self.outcome(time)
        if samples == self._reports[-1][1]:
            return self.outcome(time)
        if self._warm < self.config.warmup_reports or time - self.started < self.config.warmup_s:
            # Still warming up: only the last report counts, as the start of what follows.
            self._warm += 1
            self._reports[:] = [(time, samples)]
            return self.outcome(time)
        self._reports.append((time, samples))
        if len(self._reports) > _MOST_REPORTS:
            self._reports[:] = [*self._reports[:-1:2], self._reports[-1]]
        return self.outcome(time)

    def outcome(self, now: float) -> MeasurementState:
        """Where the measurement stands at ``now``; call it from time to time, for a job that says
        nothing.
        """
        over = now - self.started >= self.config.max_seconds
        most = self.config.max_samples
        if len(self._reports) >= 2:
            if now - self.started < self.config.min_seconds and most is None:
                return MeasurementState.MEASURING
            measurement = self.measurement(now)
            enough = (
                now - self.started >= self.config.min_seconds
                and measurement.samples >= self.config.min_samples
                and measurement.stable
                and self._last_seen >= self._reports[-1][0] >= now  # never stop inside a stall
            )
            if enough:
                return MeasurementState.STABLE
            if over or (most is not None and measurement.samples >= most):
                return MeasurementState.STABLE if measurement.stable else MeasurementState.UNSTABLE
            return MeasurementState.MEASURING
        if not over:
            return MeasurementState.MEASURING
        return (
            MeasurementState.UNSTABLE
            if self.measurement(now).rate > 0
            else MeasurementState.UNKNOWN
        )

    def measurement(self, now: float) -> Measurement:
        """The estimate so far. Without two reports after the warm-up: from the warm-up (0 without
        progress), infinitely wide.
        """
        if len(self._reports) < 2:
            if self._first is None or self._warm == 0:
                return Measurement(self.nodes, 0.0, math.inf, 0.0, 0.0, False)
            seconds, samples = (
                self._reports[-1][0] - self._first[0],
                self._reports[-1][1] - self._first[1],
            )
            return Measurement(self.nodes, samples / seconds, math.inf, samples, seconds, False)
        reports: Sequence[tuple[float, float]] = self._reports
        silence, window = now - reports[-1][0], reports[-1][0] - reports[0][0]
        if silence > window / 4 and silence > 5 * median(b[0] - a[0] for a, b in pairwise(reports)):
            reports = [*reports, (now, reports[-1][1])]  # silent for long: that time counts
        batches = _without_strangers(_batches(reports))
        rate, half_width = _ratio_interval(batches)
        for joined in (_joined(batches, 2), _joined(batches, 4)):
            if len(joined) >= 4:
                half_width = max(half_width, _ratio_interval(joined)[1])
        stable = (
            len(batches) >= self.config.min_batches and half_width <= self.config.tolerance * rate
        )
        return Measurement(
            self.nodes,
            rate,
            half_width,
            sum(s for s, _ in batches),
            sum(t for _, t in batches),
            stable,
        )


@dataclass
class Monitor:
    """Turns a running job's reports into one observation per window for its curve, for as long as
    it runs. A window ends early, unused, when the number of nodes or the phase changes.
    """

    window_s: float = 30.0
    """Length of a window, seconds."""
    _meter: ThroughputMeter | None = None
    _phase: str = ""

    def feed(self, time: float, samples: float, nodes: int, phase: str) -> Measurement | None:
        """One report; the finished window's measurement every ``window_s`` (its ``stable`` says
        nothing here), else None.
        """
        meter = self._meter
        if meter is None or meter.nodes != nodes or phase != self._phase:
            meter = self._start(nodes, time, phase)
        meter.feed(time, samples)
        if time - meter.started < self.window_s:
            return None
        done = meter.measurement(time)
        self._start(nodes, time, phase, warm=True).feed(time, samples)
        return done if done.seconds > 0 else None

    def _start(self, nodes: int, time: float, phase: str, warm: bool = False) -> ThroughputMeter:
        config = MeasureConfig(min_seconds=self.window_s, max_seconds=self.window_s)
        if warm:  # only the first window after a change has a warm-up
            config = replace(config, warmup_s=0.0, warmup_reports=0)
        self._phase = phase
        self._meter = ThroughputMeter(nodes, time, config)
        return self._meter


Batch = tuple[float, float]
"""(samples, seconds)"""


def _batches(reports: Sequence[tuple[float, float]]) -> list[Batch]:
    """Up to 20 batches of about equal duration, each ending on a report."""
    times = [t for t, _ in reports]
    count = min(_MOST_BATCHES, len(reports) - 1)
    length = (times[-1] - times[0]) / count
    ends = {bisect_left(times, times[0] + length * i - 1e-9, 1) for i in range(1, count)} | {
        len(times) - 1
    }
    edges = [0, *sorted(ends)]
    return [(reports[b][1] - reports[a][1], times[b] - times[a]) for a, b in pairwise(edges)]


def _without_strangers(batches: list[Batch]) -> list[Batch]:
    """Without leading batches that do not belong to the rest (warm-up), then without stalls."""
    if len(batches) < 5:
        return batches
    rates = [s / t for s, t in batches]
    middle = median(rates)
    # 1.4826·MAD estimates a normal standard deviation. The shares of the median keep the rule quiet
    # where few steps fall into a batch and the rates take two values only (MAD 0).
    far = 5 * 1.4826 * median(abs(r - middle) for r in rates)
    first = 0
    while first < len(batches) // 3 and abs(rates[first] - middle) > max(far, 0.35 * middle):
        first += 1
    kept = batches[first:]
    stall = middle - max(far, 0.5 * middle)
    stalls = sorted((s / t, i) for i, (s, t) in enumerate(kept) if s / t < stall)[: len(kept) // 5]
    dropped = {i for _, i in stalls}
    return [b for i, b in enumerate(kept) if i not in dropped]


def _joined(batches: Sequence[Batch], by: int) -> list[Batch]:
    """Neighbouring batches joined ``by`` at a time; a rest that is too short for one is left out at
    the start.
    """
    tail = batches[len(batches) % by :]
    return [
        (sum(s for s, _ in tail[i : i + by]), sum(t for _, t in tail[i : i + by]))
        for i in range(0, len(tail), by)
    ]


def _ratio_interval(batches: Sequence[Batch]) -> tuple[float, float]:
    """(rate, half-width of its 95 % interval), samples/s. The half-width is infinite with fewer
    than three batches.
    """
    samples, seconds = sum(s for s, _ in batches), sum(t for _, t in batches)
    rate = samples / seconds
    count = len(batches)
    if count < 3:
        return rate, math.inf
    errors = [s - rate * t for s, t in batches]
    squares = sum(e * e for e in errors)
    if squares == 0:
        return rate, 0.0
    variance = count / (count - 1) * squares / seconds**2
    correlation = sum(a * b for a, b in pairwise(errors)) / squares
    correlation = min(max(correlation, 0.0), 0.9)
    variance *= (1 + correlation) / (1 - correlation)
    degrees = count - 1
    quantile = _T975[degrees - 1] if degrees <= len(_T975) else 1.96
    return rate, quantile * math.sqrt(variance)
