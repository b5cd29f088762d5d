"""Scaling curves of one job as a prior for others: which curves are stored, and with which curve a
new job starts. Pure; storage is behind :class:`SiblingStorage`.

Decides whose curve a job inherits and when a curve is worth storing. :mod:`jpa.reuse` scales curves
from model to model and estimates their uncertainty.

Jobs that wait and whose owners stated the size of their models get a suggestion once jobs of other
sizes have run. Decides which jobs get one: the next ones of each owner. Later jobs get theirs
later, when a curve of a nearer size may exist. A suggestion is not replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from jpa import MeasuredCurve, ModelSize, RescaleCosts, StoredCurve, inherit_curve, prior_from
from jpa.curve import DEFAULT_PHASE
from malletrain.core.events import PriorSuggested
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel


@dataclass(frozen=True)
class SizedJob:
    """Key, model size and assumed costs of a job before it runs."""

    key: str
    """Profile key: jobs of one key scale alike."""
    size: ModelSize
    """Size of its model, as stated by its owner."""
    storage: SiblingStorage
    """Curves of other jobs on the class of nodes on which this job would run."""
    costs: RescaleCosts
    """Assumed costs of its rescales."""


def suggestions(
    unfinished: Iterable[JobRecord],
    max_jobs: int,
    sized: Callable[[str], SizedJob | None],
) -> list[PriorSuggested]:
    """Return suggestions for waiting jobs without data. Call it when a curve was stored or a job
    has ended.

    Args:
        unfinished: the jobs in order of submission.
        max_jobs: maximum number of waiting jobs considered per owner.
        sized: returns what is known about a job before it runs; None if its owner stated no size.
    """
    suggestions_ = []
    for name in _next_ones(unfinished, max_jobs):
        job = sized(name)
        if job is not None:
            model = suggested(job.storage, job.key, job.size, job.costs)
            if model is not None:
                suggestions_.append(PriorSuggested(name, model))
    return suggestions_


def _next_ones(unfinished: Iterable[JobRecord], max_jobs: int) -> Iterator[str]:
    """Yield those of the first ``max_jobs`` waiting jobs of each owner that have no data."""
    considered: Counter[str] = Counter()
    for record in unfinished:
        owner = record.submitted.owner
        if not record.nodes and considered[owner] < max_jobs:
            considered[owner] += 1
            if not record.scaling.has_data and record.submitted.curve is None:
                yield record.submitted.job


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
