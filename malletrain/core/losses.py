"""Forecasts when each job loses a node, so that it saves in time. Pure.

A forecast is sent when it has changed by a quarter. :mod:`scavenger.lifetimes` forecasts how long
nodes last. :mod:`malletrain.training.pace`, in the training process, knows the cost of a snapshot
and decides how often it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter

from allocator import Cohort, survival_matrix
from malletrain.core.commands import LossExpected
from malletrain.core.records import JobRecord
from malletrain.core.state import ControllerState

_COHORT = attrgetter("cohort")

MIN_CHANGE_RATIO = 1.25
"""Minimum ratio of a change that is reported."""
MAX_LOSS_S = 86400.0
"""A loss expected later than this counts as none, seconds."""


class Losses:
    """Forecasts of losses sent to the jobs of one controller. ``ahead_s``: time over which
    forecasts of node lifetimes are used, seconds; None if there are none.
    """

    def __init__(self, state: ControllerState, ahead_s: float | None) -> None:
        self._state = state
        self._ahead_s = ahead_s
        self._forecasts: dict[str, float] = {}

    def review(self) -> list[LossExpected]:
        """Return the changed forecasts of the jobs that process samples. Call it after a plan."""
        if self._ahead_s is None:
            return []
        jobs = [job for job in self._state.at_work.values() if job.nodes]
        names = {job.submitted.job for job in jobs}
        self._forecasts = {name: in_s for name, in_s in self._forecasts.items() if name in names}
        commands = []
        cohorts = {job.submitted.job: self._cohorts(job) for job in jobs}
        survival = self._survival(cohorts.values())
        for job in jobs:
            in_s = self._expected_s(cohorts[job.submitted.job], survival)
            before = self._forecasts.get(job.submitted.job, math.inf)
            changed = (
                in_s != before and not before / MIN_CHANGE_RATIO < in_s < before * MIN_CHANGE_RATIO
            )
            if changed and not job.rescaling:
                commands.append(self._record(job, in_s))
        return commands

    def resumed(self, job: JobRecord) -> list[LossExpected]:
        """Return the forecast of a job whose newest round processes samples. It is sent again,
        because the first node, which receives it, may have changed.
        """
        if self._ahead_s is None or not job.nodes:
            return []
        cohorts = self._cohorts(job)
        in_s = self._expected_s(cohorts, self._survival([cohorts]))
        must_send = in_s < math.inf or job.submitted.job in self._forecasts
        return [self._record(job, in_s)] if must_send else []

    def _record(self, job: JobRecord, in_s: float) -> LossExpected:
        self._forecasts[job.submitted.job] = in_s
        return LossExpected(job.submitted.job, in_s)

    def _cohorts(self, job: JobRecord) -> dict[Cohort | None, None]:
        """Return the cohorts of its nodes, in order."""
        usable = self._state.usable
        if not self._state.none_leaves(job.nodes):
            return dict.fromkeys(usable[n].cohort for n in job.nodes if n in usable)
        return dict.fromkeys(map(_COHORT, map(usable.__getitem__, job.nodes)))

    def _survival(
        self, cohorts_of_jobs: Iterable[Iterable[Cohort | None]]
    ) -> dict[Cohort | None, float]:
        """Return cohort → probability that its nodes last for the time that plans look ahead."""
        all_cohorts = list(dict.fromkeys(chain.from_iterable(cohorts_of_jobs)))
        rows = survival_matrix(all_cohorts, self._ahead_s or 0.0)
        return dict(zip(all_cohorts, rows[:, -1].tolist(), strict=True))

    def _expected_s(
        self, cohorts: Iterable[Cohort | None], survival: Mapping[Cohort | None, float]
    ) -> float:
        """Return the mean time to a loss, seconds, at the rate of the time that plans look ahead;
        infinite if it is longer than :data:`MAX_LOSS_S`.
        """
        ahead_s = self._ahead_s or 0.0
        loss_probability = 1.0 - math.prod(map(survival.__getitem__, cohorts))
        rate = -math.log(max(1e-9, 1.0 - loss_probability)) / ahead_s
        return 1.0 / rate if rate * MAX_LOSS_S > 1.0 else math.inf
