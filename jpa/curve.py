"""The scaling curve of one job: one curve for each phase, updated as long as the job runs.

Decides the estimate of a job's throughput at every size, and when it has changed. It does not
choose what to measure (:mod:`jpa.profile`) and does not value sizes (the allocator does, from
:meth:`MeasuredCurve.conservative`).

A phase is a period in which the work of one step is constant; its name begins with the batch size
relative to that of the first phase (``batch x2``). A new phase starts with the shape of the one
before as a prior. When a job returns to a phase, the curve of that phase applies again.

If the global batch is the same at every number of nodes, the phases that differ in the batch alone
share one law of step times (:mod:`jpa.fit`). It predicts the rates of a batch that the
job has not used yet, so that such a batch needs no measurement of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allocator.curves import CurveError, ScalingCurve
from jpa.fit import StepPoint, StepTimeLaw, fit_steps
from jpa.phase import PhaseCurve, Prior
from jpa.points import CI95, Cusum, Point, PointConfig, new_point, observe, remeasure

DEFAULT_PHASE = "default"
BATCH = "batch x"
"""Beginning of the name of a phase in another batch than the first phase."""
_MAX_PHASES = 8
"""Phases in one curve; the oldest are dropped."""
_VERSION = 1
_BY_LAW = "its curve follows from the step times at other batches"


@dataclass(frozen=True)
class CurveChange:
    """A lasting change of a job's curve."""

    kind: str
    """``"drift"``: the throughput at ``nodes`` has changed. ``"phase"``: the job has entered
    ``phase``. ``"batch"``: it has too, and its curve there follows from those at other batches.
    """
    nodes: int
    """The size of a drift, else 0."""
    before: float
    """Throughput before a drift, samples/s."""
    after: float
    """Throughput after a drift, samples/s."""
    phase: str
    """The job's current phase."""
    sentence: str
    """A description for the user."""


@dataclass(frozen=True)
class CurveConfig:
    """How observations are weighted, and how far an old curve counts after a change."""

    points: PointConfig = field(default_factory=PointConfig)
    """Weights of observations."""
    drift_level_std: float = 0.1
    """Relative standard deviation of the old level after a drift."""
    drift_shape_std: float = 0.06
    """Relative standard deviation of the old shape after a drift, per √octave."""
    phase_level_std: float = 0.3
    """Relative standard deviation of the old level in a new phase."""
    phase_shape_std: float = 0.08
    """Relative standard deviation of the old shape in a new phase, per √octave."""


DEFAULT_CONFIG = CurveConfig()


@dataclass(frozen=True)
class MeasuredCurve:
    """A job's curve. Immutable: a change returns a new curve."""

    phases: tuple[tuple[str, PhaseCurve], ...] = ((DEFAULT_PHASE, PhaseCurve()),)
    """(name, curve) of each phase, the current one last."""
    unusable: frozenset[int] = frozenset()
    """Sizes at which the script crashed; their throughput is 0."""
    neutral_rate: float = 1.0
    """Throughput of one node that is assumed without any information, samples/s (the daemon uses
    the median of its other jobs).
    """
    one_law: bool = False
    """Whether the global batch is the same at every number of nodes, so that the phases of all
    batches share one law of step times.
    """

    @classmethod
    def from_prior(
        cls, prior: Prior | None, phase: str = DEFAULT_PHASE, neutral_rate: float = 1.0
    ) -> MeasuredCurve:
        """Return the curve of a job without measurements.

        Args:
            prior: the assumed curve; None: neutral.
            phase: the job's current phase.
            neutral_rate: throughput of one node without any information, samples/s.
        """
        return cls(((phase, PhaseCurve((), prior)),), frozenset(), neutral_rate)

    @property
    def phase(self) -> str:
        """Name of the current phase."""
        return self.phases[-1][0]

    @property
    def current(self) -> PhaseCurve:
        """The current phase's curve."""
        return self.phases[-1][1]

    @property
    def measured_sizes(self) -> tuple[int, ...]:
        """Sizes measured in the current phase, ascending."""
        return tuple(p.nodes for p in self.current.points)

    @property
    def largest_measured(self) -> int:
        """The largest size that is measured in the current phase, or in one that shares its law of
        step times; 0 for none.
        """
        points = (p for _, curve in self._of_one_law() for p in curve.points)
        return max((p.nodes for p in points), default=0)

    @property
    def has_data(self) -> bool:
        """Whether the current phase has a measured throughput above 0 or a prior."""
        return self.current.prior is not None or any(p.rate > 0 for p in self.current.points)

    # --- estimates ---

    def estimate(self, nodes: int) -> tuple[float, float]:
        """Return (samples/s, standard deviation) at ``nodes`` in the current phase; (0, 0) at an
        unusable size.
        """
        if nodes in self.unusable:
            return 0.0, 0.0
        return self.current.estimate(nodes, self.neutral_rate)

    def smoothed(self, nodes: int) -> tuple[float, float]:
        """Return (samples/s, standard deviation) at ``nodes`` for bids: from the α-β law if it
        explains all measurements, else as :meth:`estimate`.
        """
        if nodes in self.unusable:
            return 0.0, 0.0
        return self.current.smoothed(nodes, self.neutral_rate)

    @property
    def batch_gain(self) -> Callable[[int, float], float] | None:
        """The throughput at other global batches: (nodes, batch relative to the current one) →
        throughput relative to that with the current batch. None if it is unknown.
        """
        law, current = self._law_of_steps(), batch_ratio(self.phase)
        if law is None:
            return None
        return lambda nodes, ratio: (
            law.rate(nodes, current * ratio) / law.rate(nodes, current) if ratio != 1 else 1.0
        )

    def _of_one_law(self) -> list[tuple[float, PhaseCurve]]:
        """Return (batch relative to the first phase, curve) of each phase that shares the current
        phase's law of step times, the current one last.
        """
        if not self.one_law:
            return [(1.0, self.current)]
        own = _split(self.phase)[1]
        split = ((_split(name), curve) for name, curve in self.phases)
        return [(ratio, curve) for (ratio, rest), curve in split if rest == own]

    def _law_of_steps(self) -> StepTimeLaw | None:
        """Return the law of step times over nodes and batch; None if the batch depends on the
        number of nodes, or nothing is measured.
        """
        points = [
            StepPoint(p.nodes, ratio, p.rate, p.relative_std)
            for ratio, curve in self._of_one_law()
            for p in curve.points
            if p.rate > 0
        ]
        return fit_steps(points) if self.one_law and points else None

    def relative_half_width(self, nodes: int) -> float:
        """Return the half-width of the 95 % interval at ``nodes`` divided by the throughput; 0 if
        the throughput is 0.
        """
        rate, std = self.estimate(nodes)
        return CI95 * std / rate if rate > 0 else 0.0

    def uncertain(self, sizes: Iterable[int], tolerance: float = 0.075) -> tuple[int, ...]:
        """Return the sizes whose throughput is not known well enough.

        A measured size counts as known, however large its scatter: another measurement right away
        would give the same. Uncertain sizes alone are no reason for another profile, because a
        profile skips sizes that do not pay; a :class:`CurveChange` is one.

        Args:
            sizes: the sizes to check.
            tolerance: relative half-width of the 95 % interval within which a size is known.

        Returns:
            The uncertain ones, descending.
        """
        measured = set(self.measured_sizes)
        return tuple(
            k
            for k in sorted(sizes, reverse=True)
            if k not in measured and self.relative_half_width(k) > tolerance
        )

    def conservative(self, sizes: Iterable[int], kappa: float = 1.0) -> ScalingCurve:
        """Return the curve for the allocator: each throughput is lowered according to its
        uncertainty.

        A relative standard deviation r lowers it by the factor exp(−kappa·r). For a known size this
        is close to 1 − kappa·r; for an unknown one it is still above 0.

        Args:
            sizes: all sizes that the bid will offer. Between them the allocator interpolates
                linearly.
            kappa: number of standard deviations to subtract.

        Raises:
            CurveError: if ``sizes`` is empty.
        """
        points = {}
        for k in sizes:
            rate, std = self.smoothed(k)
            points[k] = rate * math.exp(-kappa * std / rate) if rate > 0 else 0.0
        return ScalingCurve.of(points)

    # --- changes ---

    def with_measurement(
        self,
        nodes: int,
        rate: float,
        half_width: float,
        now: float,
        config: CurveConfig = DEFAULT_CONFIG,
    ) -> MeasuredCurve:
        """Return the curve with a measurement of a profile.

        Args:
            nodes: the size.
            rate: samples/s.
            half_width: half-width of the 95 % interval, samples/s.
            now: the time, seconds.
            config: weights.

        Raises:
            ValueError: if the rate is negative or not finite.
        """
        old = self.current.at(nodes)
        point = (
            new_point(nodes, rate, half_width, now, config.points)
            if old is None
            else remeasure(old, rate, half_width, now, config.points)
        )
        return self._with_current(self.current.with_point(point))

    def observe(
        self,
        nodes: int,
        rate: float,
        half_width: float,
        now: float,
        config: CurveConfig = DEFAULT_CONFIG,
    ) -> tuple[MeasuredCurve, CurveChange | None]:
        """Return the curve with one window of the monitor at a fixed size.

        After a drift the old curve, scaled to the new level, becomes the prior, and the other sizes
        become uncertain.

        Args:
            nodes: the size.
            rate: samples/s.
            half_width: half-width of the 95 % interval, samples/s; infinite if unknown.
            now: the time, seconds.
            config: weights.

        Returns:
            (the new curve, the drift that this window completes, or None).

        Raises:
            ValueError: if the rate is negative or not finite.
        """
        old = self.current.at(nodes)
        if old is None:
            half_width = (
                max(half_width, CI95 * config.points.window_std * rate)
                if math.isfinite(half_width)
                else CI95 * 0.05 * rate
            )
            return self._with_current(
                self.current.with_point(new_point(nodes, rate, half_width, now, config.points))
            ), None
        point, shift = observe(old, rate, half_width, now, config.points)
        if shift is None:
            return self._with_current(self.current.with_point(point)), None
        sentence = (
            f"The throughput at {nodes} node{'' if nodes == 1 else 's'} has changed from "
            f"{shift.before:.4g} to "
            f"{shift.after:.4g} samples/s; the other sizes will be measured again."
        )
        change = CurveChange("drift", nodes, shift.before, shift.after, self.phase, sentence)
        prior = None
        if shift.before > 0 and shift.after > 0:
            # The point has begun to follow the shift; the prior needs its level before.
            shape = self.current.with_point(replace(old, rate=shift.before))
            factor = shift.after / shift.before
            prior = shape.as_prior(
                factor, config.drift_level_std, config.drift_shape_std, "the curve before the drift"
            )
        return self._with_current(PhaseCurve((point,), prior)), change

    def with_points_of(self, other: MeasuredCurve) -> MeasuredCurve:
        """Return the curve with the points of ``other``, a job with the same curve, at sizes
        without an own point. It is unchanged if the phases differ or this curve has a prior (also
        after a drift).
        """
        missing = [p for p in other.current.points if self.current.at(p.nodes) is None]
        if (
            other.phase != self.phase
            or not missing
            or not other.has_data
            or self.current.prior is not None
        ):
            return self
        return self._with_current(
            replace(
                self.current,
                points=tuple(sorted([*self.current.points, *missing], key=lambda p: p.nodes)),
            )
        )

    def with_prior(self, prior: Prior) -> MeasuredCurve:
        """Return the curve with ``prior`` for the current phase, unless there is a prior
        already.
        """
        if self.current.prior is not None:
            return self
        return self._with_current(replace(self.current, prior=prior))

    def with_phase(
        self, phase: str, config: CurveConfig = DEFAULT_CONFIG
    ) -> tuple[MeasuredCurve, CurveChange | None]:
        """Enter a phase.

        Args:
            phase: its name.
            config: how far the current curve counts in a new phase.

        Returns:
            (the curve in ``phase``, the change, or None if the phase is the same). An earlier phase
            has its old curve; a new one starts with the law of step times, if it shares that of the
            current phase, else with the shape of the current one as a prior.
        """
        if phase == self.phase:
            return self, None
        phases = dict(self.phases)
        ratio, rest = _split(phase)
        law = self._law_of_steps() if rest == _split(self.phase)[1] else None
        if phase in phases:
            curve, origin = phases.pop(phase), "its curve is known from before."
        elif law is not None:
            curve, origin = self._by_law(law, ratio, config), f"{_BY_LAW}."
        else:
            source = f"phase {self.phase}"
            curve = PhaseCurve(
                (),
                self.current.as_prior(1.0, config.phase_level_std, config.phase_shape_std, source),
            )
            origin = f"its curve starts from the shape of {source}."
        if not self.has_data and phase not in dict(self.phases):
            phases.pop(self.phase, None)  # an empty phase is of no use later
        earlier = tuple(phases.items())[-(_MAX_PHASES - 1) :]
        sentence = f"The job entered phase {phase}; {origin}"
        kind = "phase" if law is None else "batch"
        change = CurveChange(kind, 0, 0.0, 0.0, phase, sentence)
        return replace(self, phases=(*earlier, (phase, curve))), change

    def _by_law(self, law: StepTimeLaw, ratio: float, config: CurveConfig) -> PhaseCurve:
        """Return the curve at ``ratio`` times the batch of the first phase, before any measurement
        there: what the law predicts at the sizes that are measured at other batches.
        """
        sizes = sorted({p.nodes for _, c in self._of_one_law() for p in c.points if p.rate > 0})
        level_std = max(law.relative_std(k, ratio) for k in sizes)
        points = tuple((k, law.rate(k, ratio)) for k in sizes)
        return PhaseCurve((), Prior(points, level_std, config.phase_shape_std, _BY_LAW))

    def of_one_law(self) -> MeasuredCurve:
        """Return the curve of a job whose global batch is the same at every number of nodes."""
        return replace(self, one_law=True)

    def with_unusable(self, nodes: int) -> MeasuredCurve:
        """Return the curve with a size at which the script crashes; its point is dropped."""
        points = tuple(p for p in self.current.points if p.nodes != nodes)
        curve = self._with_current(replace(self.current, points=points))
        return replace(curve, unusable=self.unusable | {nodes})

    def _with_current(self, curve: PhaseCurve) -> MeasuredCurve:
        return replace(self, phases=(*self.phases[:-1], (self.phase, curve)))

    # --- serialisation ---

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as plain values for the store (JSON or msgpack). The state of the drift
        detection is not stored.
        """
        return {
            "version": _VERSION,
            "neutral_rate": self.neutral_rate,
            "unusable": sorted(self.unusable),
            "one_law": self.one_law,
            "phases": [
                {
                    "name": name,
                    "points": [
                        [p.nodes, p.rate, p.variance, p.observations, p.updated]
                        for p in curve.points
                    ],
                    "prior": None if curve.prior is None else _prior_to_dict(curve.prior),
                }
                for name, curve in self.phases
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MeasuredCurve:
        """Restore the result of :meth:`to_dict`.

        Raises:
            CurveError: if the stored value is damaged or of another version.
        """
        try:
            if data["version"] != _VERSION:
                raise CurveError(
                    f"The stored scaling curve has version {data['version']}; this program "
                    f"reads version {_VERSION}."
                )
            phases = tuple(
                (str(entry["name"]), _phase_from_dict(entry)) for entry in data["phases"]
            )
            if not phases:
                raise CurveError(
                    "The stored scaling curve has no phase; delete it and the job will be "
                    "profiled again."
                )
            return cls(
                phases,
                frozenset(int(k) for k in data["unusable"]),
                float(data["neutral_rate"]),
                bool(data.get("one_law")),
            )
        except CurveError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            sentence = (
                f"The stored scaling curve cannot be read ({error!r}); delete it and the "
                "job will be profiled again."
            )
            raise CurveError(sentence) from error


def batch_ratio(phase: str) -> float:
    """Return the batch of a phase, relative to that of the first phase."""
    return _split(phase)[0]


def _split(phase: str) -> tuple[float, str]:
    """Return the batch of a phase, relative to that of the first phase, and the rest of its name:
    its model and layout.
    """
    batch, _, rest = phase.partition(", ")
    try:
        ratio = float(batch.removeprefix(BATCH)) if batch.startswith(BATCH) else 1.0
    except ValueError:
        return 1.0, phase
    names_batch = batch == DEFAULT_PHASE or batch.startswith(BATCH)
    return (ratio, rest) if names_batch and 0 < ratio < math.inf else (1.0, phase)


def _prior_to_dict(prior: Prior) -> dict[str, Any]:
    return {
        "points": [list(p) for p in prior.points],
        "level_std": prior.level_std,
        "shape_std": prior.shape_std,
        "source": prior.source,
    }


def _phase_from_dict(entry: Mapping[str, Any]) -> PhaseCurve:
    points = []
    for nodes, rate, variance, observations, updated in entry["points"]:
        if nodes < 1 or not all(math.isfinite(x) and x >= 0 for x in (rate, variance)):
            raise CurveError(
                f"The stored scaling curve has throughput {rate} ± √{variance} at {nodes} "
                "nodes; delete it."
            )
        points.append(
            Point(
                int(nodes), float(rate), float(variance), int(observations), float(updated), Cusum()
            )
        )
    stored: Sequence[Any] | Mapping[str, Any] | None = entry["prior"]
    prior = None
    if isinstance(stored, Mapping):
        pairs = tuple((int(n), float(r)) for n, r in stored["points"])
        prior = Prior(
            pairs, float(stored["level_std"]), float(stored["shape_std"]), str(stored["source"])
        )
    return PhaseCurve(tuple(sorted(points, key=lambda p: p.nodes)), prior)
