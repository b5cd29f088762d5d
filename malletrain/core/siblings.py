"""Scaling curves of one job as a prior for others: what is stored of each, and with which curve the
next one starts. Pure; storage is behind :class:`SiblingStorage`.

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

KINDS_KEPT = 1000
"""Kinds of jobs whose curve is remembered for jobs that are submitted already."""


@dataclass(frozen=True)
class Sibling:
    """What is kept of a job for others."""

    key: str
    """Jobs of one key scale alike (:func:`jpa.profile_key`)."""
    job: str
    scaling: ScalingModel
    size: ModelSize = field(default_factory=ModelSize)


class SiblingStorage(Protocol):
    """Where curves are kept; the newest of a key takes the place of the one before."""

    def put(self, sibling: Sibling) -> None:
        """Keep it."""

    def of_key(self, key: str) -> Sibling | None:
        """The newest of this key, None where there is none."""

    def others(self, key: str) -> Iterable[Sibling]:
        """Those of other keys that run on the same class of nodes."""


def keep(storage: SiblingStorage, sibling: Sibling) -> bool:
    """Keep what was learnt of a job, once it was profiled, or seen at some size while it ran.
    Returns whether it was.
    """
    scaling = sibling.scaling
    measured = any(p.rate > 0 for p in scaling.curve.current.points)
    if not (sibling.key and measured and (scaling.profiled or scaling.result)):
        return False
    storage.put(sibling)
    return True


def starts_with(storage: SiblingStorage, key: str, *, named: bool = False) -> ScalingModel | None:
    """What a new job of this key starts with; None for nothing.

    ``named``: only its owner says which jobs are alike; those may differ in level.
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
    """What jobs of similar models suggest, once it is known how large the job's model is; None
    where none is near.
    """
    prior = prior_from(map(_stored, storage.others(key)), key, size)
    return ScalingModel(MeasuredCurve.from_prior(prior), costs) if prior else None


def _stored(sibling: Sibling) -> StoredCurve:
    curve, _ = sibling.scaling.curve.with_phase(DEFAULT_PHASE)
    return StoredCurve(sibling.key, curve, sibling.size, sibling.job)


class SharedCurves:
    """What the profiles of jobs tell other jobs of their kind that are submitted already: kind →
    curve, and which curve each job has been told of.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, MeasuredCurve] = {}
        self._last_curve: dict[str, MeasuredCurve] = {}

    def remember(self, kind: str, curve: MeasuredCurve) -> None:
        """A profile is over: what others of its kind need not measure."""
        if kind and curve.has_data:
            before = self._kinds.pop(kind, MeasuredCurve())
            self._kinds[kind] = inherit_curve(curve).with_points_of(before)
            if len(self._kinds) > KINDS_KEPT:
                del self._kinds[next(iter(self._kinds))]

    def tell(self, job: str, kind: str, own: MeasuredCurve) -> MeasuredCurve:
        """The job's own curve with what others of its kind have measured since it was last told."""
        curve = self._kinds.get(kind)
        if curve is None or self._last_curve.get(job) is curve:
            return own
        self._last_curve[job] = curve
        return own.with_points_of(curve)

    def forget(self, job: str) -> None:
        """The job has ended."""
        self._last_curve.pop(job, None)
