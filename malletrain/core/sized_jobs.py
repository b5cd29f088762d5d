"""Suggests scaling curves to waiting jobs whose owners stated the size of their models, once jobs
of other sizes have run. Pure; the daemon and the simulator both use it.

Decides which jobs get a suggestion: the next ones of each owner. Later jobs get theirs later, when
a curve of a nearer size may exist. A suggestion is not replaced. :mod:`malletrain.core.siblings`
decides whose curve is near enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jpa import ModelSize, RescaleCosts
from malletrain.core import siblings
from malletrain.core.events import PriorSuggested
from malletrain.core.records import JobRecord
from malletrain.core.siblings import SiblingStorage


@dataclass(frozen=True)
class SizedJob:
    """Key, model size and assumed costs of a job before it runs."""

    key: str
    """Profile key: jobs of one key scale alike."""
    size: ModelSize
    """Size of its model, as stated by its owner."""
    storage: SiblingStorage
    """Curves of jobs on the class of nodes on which it would run."""
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
            model = siblings.suggested(job.storage, job.key, job.size, job.costs)
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
