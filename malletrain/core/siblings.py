"""Scaling curves of one job as a prior for others: which curves are stored, and with which curve a
new job starts. Pure; storage is behind :class:`SiblingStorage`.

Decides whose curve a job inherits and when a curve is worth storing. :mod:`jpa.reuse` scales curves
from model to model and estimates their uncertainty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from jpa import MeasuredCurve, ModelSize, RescaleCosts, StoredCurve, inherit_curve, prior_from
from jpa.curve import DEFAULT_PHASE
from malletrain.core.scaling_model import ScalingModel

MAX_KINDS = 1000
"""Maximum number of kinds whose curve is remembered for jobs that are already submitted."""


@dataclass(frozen=True)
class Sibling:
    """The stored results of a job, for other jobs."""

    key: str
    """Profile key: jobs of one key scale alike (:func:`jpa.profile_key`)."""
    job: str
    scaling: ScalingModel
    size: ModelSize = field(default_factory=ModelSize)


class SiblingStorage(Protocol):
    """Storage of curves. The newest of a key replaces the previous one."""

    def put(self, sibling: Sibling) -> None:
        """Store it."""

    def of_key(self, key: str) -> Sibling | None:
        """Return the newest of this key; None if there is none."""

    def others(self, key: str) -> Iterable[Sibling]:
        """Return those of other keys that run on the same class of nodes."""


def keep(storage: SiblingStorage, sibling: Sibling) -> bool:
    """Store the results of a job that was profiled or measured at some size while it ran. Returns
    whether it stored them.
    """
    scaling = sibling.scaling
    measured = any(p.rate > 0 for p in scaling.curve.current.points)
    if not (sibling.key and measured and (scaling.profiled or scaling.result)):
        return False
    storage.put(sibling)
    return True


def starts_with(storage: SiblingStorage, key: str, *, named: bool = False) -> ScalingModel | None:
    """Return the scaling model with which a new job of this key starts; None if there is none.

    ``named``: the owner chose the key, so jobs with it may differ in their absolute throughput.
    """
    sibling = storage.of_key(key)
    if sibling is None:
        return None
    stored = _stored(sibling)
    if not named:
        return ScalingModel(inherit_curve(stored.curve), sibling.scaling.costs)
    prior = prior_from([stored], key)
    curve = MeasuredCurve.from_prior(prior) if prior else MeasuredCurve()
    return ScalingModel(curve, sibling.scaling.costs)


def suggested(
    storage: SiblingStorage, key: str, size: ModelSize, costs: RescaleCosts
) -> ScalingModel | None:
    """Return a scaling model from jobs with models of similar size; None if there is none.

    Args:
        storage: curves of other jobs.
        key: profile key of the job.
        size: size of the job's model.
        costs: rescale costs of the new scaling model.
    """
    prior = prior_from(map(_stored, storage.others(key)), key, size)
    return ScalingModel(MeasuredCurve.from_prior(prior), costs) if prior else None


def _stored(sibling: Sibling) -> StoredCurve:
    curve, _ = sibling.scaling.curve.with_phase(DEFAULT_PHASE)
    return StoredCurve(sibling.key, curve, sibling.size, sibling.job)


class SharedCurves:
    """Shares profiled curves among submitted jobs of one kind. Stores kind → curve, and the curve
    that each job has received last.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, MeasuredCurve] = {}
        self._last_curve: dict[str, MeasuredCurve] = {}

    def remember(self, kind: str, curve: MeasuredCurve) -> None:
        """Add the curve of a finished profile, so that other jobs of its kind need not measure
        it.
        """
        if kind and curve.has_data:
            before = self._kinds.pop(kind, MeasuredCurve())
            self._kinds[kind] = inherit_curve(curve).with_points_of(before)
            if len(self._kinds) > MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]

    def tell(self, job: str, kind: str, own: MeasuredCurve) -> MeasuredCurve:
        """Return the job's own curve with the points that other jobs of its kind have measured
        since the last call.
        """
        curve = self._kinds.get(kind)
        if curve is None or self._last_curve.get(job) is curve:
            return own
        self._last_curve[job] = curve
        return own.with_points_of(curve)

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        self._last_curve.pop(job, None)
