"""Waiting jobs whose owners stated the size of their models, and which curve to suggest to them
once jobs of other sizes have run. Pure; the daemon and the simulator use it alike.

Decides that jobs are asked about when they are next. A job that waits longer is asked about later,
when a curve of a nearer size may be known; a suggestion is not replaced.
:mod:`malletrain.core.siblings` decides whose curve is near enough.
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
    """What is known of a job before it runs."""

    key: str
    """Jobs of one key scale alike."""
    size: ModelSize
    """As its owner says."""
    storage: SiblingStorage
    """The curves of jobs that run where it would."""
    costs: RescaleCosts
    """What moving it is taken to cost."""


def suggestions(
    unfinished: Iterable[JobRecord],
    most: int,
    sized: Callable[[str], SizedJob | None],
) -> list[PriorSuggested]:
    """What is suggested to the waiting jobs of which nothing is known yet; ask whenever a curve was
    kept or a job has ended.

    Args:
        unfinished: the jobs in the order in which they were submitted.
        most: so many waiting jobs of each owner are looked at, the first.
        sized: what is known of a job beforehand; None where its owner said nothing.
    """
    suggestions_ = []
    for name in _next_ones(unfinished, most):
        job = sized(name)
        if job is not None:
            model = siblings.suggested(job.storage, job.key, job.size, job.costs)
            if model is not None:
                suggestions_.append(PriorSuggested(name, model))
    return suggestions_


def _next_ones(unfinished: Iterable[JobRecord], most: int) -> Iterator[str]:
    """The first waiting jobs of each owner, those of which nothing is known."""
    looked_at: Counter[str] = Counter()
    for record in unfinished:
        owner = record.submitted.owner
        if not record.nodes and looked_at[owner] < most:
            looked_at[owner] += 1
            if not record.scaling.has_data and record.submitted.curve is None:
                yield record.submitted.job
