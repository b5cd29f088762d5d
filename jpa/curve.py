"""The scaling curve of one job as the product knows it: one curve per phase, kept up to date for as
long as the job runs.

Decides what is known about a job's throughput at every size, and tells when it has changed. It does
not choose what to measure (:mod:`jpa.plan`) and does not value sizes (the allocator does, from
:meth:`MeasuredCurve.conservative`).

A phase is a period in which the work of one step is the same; its name is usually the global batch
size. A new phase starts with the shape of the one before as a prior, and a phase returned to finds
its own curve again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from allocator.curves import CurveError, ScalingCurve
from jpa.drift import Cusum
from jpa.phase import PhaseCurve, Prior
from jpa.points import CI95, Point, PointConfig, new_point, observed, remeasured

DEFAULT_PHASE = "default"
_PHASES_KEPT = 8
_VERSION = 1


@dataclass(frozen=True)
class CurveChange:
    """The curve no longer holds as it was."""

    kind: str
    """``"drift"``: the throughput at ``nodes`` moved for good. ``"phase"``: the job entered
    ``phase``.
    """
    nodes: int
    """The size, 0 for a phase."""
    before: float
    """Throughput before, samples/s."""
    after: float
    """Throughput after, samples/s."""
    phase: str
    """The phase the job is in."""
    sentence: str
    """For the user."""


@dataclass(frozen=True)
class CurveConfig:
    """How observations are weighed, and how much of a curve is carried on."""

    points: PointConfig = field(default_factory=PointConfig)
    """Weighing of observations."""
    drift_level_std: float = 0.1
    """Relative standard deviation of the level after a drift."""
    drift_shape_std: float = 0.06
    """The same of the shape, per √octave."""
    phase_level_std: float = 0.3
    """Relative standard deviation of the level in a new phase."""
    phase_shape_std: float = 0.08
    """The same of the shape, per √octave."""


DEFAULT_CONFIG = CurveConfig()


@dataclass(frozen=True)
class MeasuredCurve:
    """A job's curve. Immutable: every change gives a new one."""

    phases: tuple[tuple[str, PhaseCurve], ...] = ((DEFAULT_PHASE, PhaseCurve()),)
    """(name, curve), the current one last."""
    unusable: frozenset[int] = frozenset()
    """Sizes at which the script crashed; they are worth nothing."""
    neutral_rate: float = 1.0
    """Samples/s of one node assumed before anything is known (the daemon gives the median of its
    other jobs).
    """

    @classmethod
    def from_prior(
        cls, prior: Prior | None, phase: str = DEFAULT_PHASE, neutral_rate: float = 1.0
    ) -> MeasuredCurve:
        """A curve of a job not measured yet, from a prior (None: neutral)."""
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
    def known(self) -> bool:
        """Whether anything at all is known: a measured throughput above 0, or a prior."""
        return self.current.prior is not None or any(p.rate > 0 for p in self.current.points)

    # -- reading
    # ----------------------------------------

    def estimate(self, nodes: int) -> tuple[float, float]:
        """(samples/s, standard deviation) at ``nodes`` in the current phase; (0, 0) at an unusable
        size.
        """
        if nodes in self.unusable:
            return 0.0, 0.0
        return self.current.estimate(nodes, self.neutral_rate)

    def smoothed(self, nodes: int) -> tuple[float, float]:
        """(samples/s, standard deviation) at ``nodes`` to make bids from: smoothed where a law
        explains all that was measured.
        """
        if nodes in self.unusable:
            return 0.0, 0.0
        return self.current.smoothed(nodes, self.neutral_rate)

    def relative_half_width(self, nodes: int) -> float:
        """Half-width of the 95 % interval at ``nodes`` as a share of the throughput; 0 where the
        throughput is known to be 0.
        """
        rate, std = self.estimate(nodes)
        return CI95 * std / rate if rate > 0 else 0.0

    def uncertain(self, sizes: Iterable[int], tolerance: float = 0.075) -> tuple[int, ...]:
        """Those of ``sizes`` not known to within ``tolerance`` (half-width of the 95 % interval),
        descending.

        A measured size counts as known whatever its scatter: measuring it again at once would tell
        nothing new. That something is uncertain is no reason for another profile by itself (a
        profile leaves what is not worth a visit); a :class:`CurveChange` is.
        """
        measured = set(self.measured_sizes)
        return tuple(
            k
            for k in sorted(sizes, reverse=True)
            if k not in measured and self.relative_half_width(k) > tolerance
        )

    def conservative(self, sizes: Iterable[int], kappa: float = 1.0) -> ScalingCurve:
        """The curve for the allocator at every one of ``sizes``: each throughput lowered by
        ``kappa`` of its standard deviations.

        The relative deviation r lowers it by the factor exp(−kappa·r): hardly different from 1 −
        kappa·r where a size is known, and never worth nothing where it is not. Name all sizes that
        will be bid for: between named ones the allocator's curve is linear.

        Raises:
            CurveError: without any size.
        """
        points = {}
        for k in sizes:
            rate, std = self.smoothed(k)
            points[k] = rate * math.exp(-kappa * std / rate) if rate > 0 else 0.0
        return ScalingCurve.of(points)

    # -- changing
    # ----------------------------------------

    def with_measurement(
        self,
        nodes: int,
        rate: float,
        half_width: float,
        now: float,
        config: CurveConfig = DEFAULT_CONFIG,
    ) -> MeasuredCurve:
        """With one size measured by a profile (samples/s; half-width of the 95 % interval). Raises
        ValueError on an impossible rate.
        """
        old = self.current.at(nodes)
        point = (
            new_point(nodes, rate, half_width, now, config.points)
            if old is None
            else remeasured(old, rate, half_width, now, config.points)
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
        """With one ordinary window of the monitor at a fixed size, and the drift it completes, if
        any.

        After a drift the old curve stays as a prior of its shape, moved to the new level; the other
        sizes are uncertain again. Raises ValueError on an impossible rate.
        """
        old = self.current.at(nodes)
        if old is None:
            wide = (
                max(half_width, CI95 * config.points.window_std * rate)
                if math.isfinite(half_width)
                else CI95 * 0.05 * rate
            )
            return self._with_current(
                self.current.with_point(new_point(nodes, rate, wide, now, config.points))
            ), None
        point, shift = observed(old, rate, half_width, now, config.points)
        if shift is None:
            return self._with_current(self.current.with_point(point)), None
        sentence = (
            f"The throughput at {nodes} nodes moved from {shift.before:.4g} to "
            f"{shift.after:.4g} samples/s for good; "
            "the other sizes will be measured again."
        )
        change = CurveChange("drift", nodes, shift.before, shift.after, self.phase, sentence)
        prior = None
        if shift.before > 0 and shift.after > 0:
            # The point itself has begun to follow the shift; the shape is the one before.
            shape = self.current.with_point(replace(old, rate=shift.before))
            factor = shift.after / shift.before
            prior = shape.as_prior(
                factor, config.drift_level_std, config.drift_shape_std, "the curve before the drift"
            )
        return self._with_current(PhaseCurve((point,), prior)), change

    def with_points_of(self, other: MeasuredCurve) -> MeasuredCurve:
        """With what ``other``, of a job that scales alike, has measured at sizes that this one has
        not. After a drift, and where there is a prior already, nothing is taken over.
        """
        missing = [p for p in other.current.points if self.current.at(p.nodes) is None]
        if (
            other.phase != self.phase
            or not missing
            or not other.known
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
        """With what another job suggests of the current phase, unless there is a prior already."""
        return (
            self
            if self.current.prior is not None
            else self._with_current(replace(self.current, prior=prior))
        )

    def with_phase(
        self, phase: str, config: CurveConfig = DEFAULT_CONFIG
    ) -> tuple[MeasuredCurve, CurveChange | None]:
        """In ``phase`` from now on. A phase seen before has its curve back; a new one starts from
        the shape of the current one.
        """
        if phase == self.phase:
            return self, None
        known = dict(self.phases)
        if phase in known:
            curve, what = known.pop(phase), "its curve is known from before."
        else:
            source = f"phase {self.phase}"
            curve = PhaseCurve(
                (),
                self.current.as_prior(1.0, config.phase_level_std, config.phase_shape_std, source),
            )
            what = f"its curve starts from the shape of {source}."
        if not self.known and phase not in dict(self.phases):
            known.pop(self.phase, None)  # an empty phase is not worth keeping
        kept = tuple(known.items())[-(_PHASES_KEPT - 1) :]
        change = CurveChange("phase", 0, 0.0, 0.0, phase, f"The job entered phase {phase}; {what}")
        return replace(self, phases=(*kept, (phase, curve))), change

    def with_unusable(self, nodes: int) -> MeasuredCurve:
        """With a size at which the script crashes. Its point, if any, is dropped."""
        points = tuple(p for p in self.current.points if p.nodes != nodes)
        changed = self._with_current(replace(self.current, points=points))
        return replace(changed, unusable=self.unusable | {nodes})

    def _with_current(self, curve: PhaseCurve) -> MeasuredCurve:
        return replace(self, phases=(*self.phases[:-1], (self.phase, curve)))

    # -- the store
    # ----------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the store (JSON or msgpack). The running sums of the drift detection are
        not kept: they start afresh.
        """
        return {
            "version": _VERSION,
            "neutral_rate": self.neutral_rate,
            "unusable": sorted(self.unusable),
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
        """The inverse of :meth:`to_dict`. Raises CurveError with a sentence when the stored value
        is damaged.
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
                phases, frozenset(int(k) for k in data["unusable"]), float(data["neutral_rate"])
            )
        except CurveError:
            raise
        except (KeyError, TypeError, ValueError, IndexError) as error:
            sentence = (
                f"The stored scaling curve cannot be read ({error!r}); delete it and the "
                "job will be profiled again."
            )
            raise CurveError(sentence) from error


def phase_name(global_batch: int | None, nodes: int = 1, fixed_per_node: bool = False) -> str:
    """Name of the phase for a reported global batch size (samples per step).

    A job that keeps its batch per node (``fixed_per_node``) has another global batch at every size
    and still one curve: its phase is the batch per node.
    """
    if global_batch is None:
        return DEFAULT_PHASE
    if fixed_per_node:
        return f"batch/node={global_batch / max(1, nodes):g}"
    return f"batch={global_batch}"


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
