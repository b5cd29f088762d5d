"""How soon each job is expected to lose a node, so that it saves in time. Pure.

Decides that a forecast is sent when it has changed by a quarter. :mod:`scavenger.lifetimes`
forecasts how long nodes last. :mod:`malletrain.training.pace`, in the training process, knows the
cost of a snapshot and decides how often it saves.
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

CHANGE = 1.25
"""A smaller change than by this factor is not said."""
CALM_S = 86400.0
"""A loss that is expected no sooner is none."""


class Losses:
    """What was said of the jobs of one controller. ``ahead_s``: how far plans look ahead; None:
    nothing is foretold and nothing said.
    """

    def __init__(self, state: ControllerState, ahead_s: float | None) -> None:
        self._state = state
        self._ahead_s = ahead_s
        self._forecasts: dict[str, float] = {}

    def review(self) -> list[LossExpected]:
        """What there is to say of the jobs that process samples, after a plan."""
        if self._ahead_s is None:
            return []
        jobs = [job for job in self._state.at_work.values() if job.nodes]
        names = {job.submitted.job for job in jobs}
        self._forecasts = {name: in_s for name, in_s in self._forecasts.items() if name in names}
        news = []
        cohorts = {job.submitted.job: self._cohorts(job) for job in jobs}
        stays = self._stays(cohorts.values())
        for job in jobs:
            in_s = self._expected_s(cohorts[job.submitted.job], stays)
            before = self._forecasts.get(job.submitted.job, math.inf)
            changed = in_s != before and not before / CHANGE < in_s < before * CHANGE
            if changed and not job.rescaling:
                news.append(self._say(job, in_s))
        return news

    def resumed(self, job: JobRecord) -> list[LossExpected]:
        """What there is to say of a job whose newest round processes samples; its first node, which
        hears it, may be another than before.
        """
        if self._ahead_s is None or not job.nodes:
            return []
        cohorts = self._cohorts(job)
        in_s = self._expected_s(cohorts, self._stays([cohorts]))
        news = in_s < math.inf or job.submitted.job in self._forecasts
        return [self._say(job, in_s)] if news else []

    def _say(self, job: JobRecord, in_s: float) -> LossExpected:
        self._forecasts[job.submitted.job] = in_s
        return LossExpected(job.submitted.job, in_s)

    def _cohorts(self, job: JobRecord) -> dict[Cohort | None, None]:
        """Those of its nodes, in the order of these."""
        usable = self._state.usable
        if not self._state.none_leaves(job.nodes):
            return dict.fromkeys(usable[n].cohort for n in job.nodes if n in usable)
        return dict.fromkeys(map(_COHORT, map(usable.__getitem__, job.nodes)))

    def _stays(
        self, cohorts_of_jobs: Iterable[Iterable[Cohort | None]]
    ) -> dict[Cohort | None, float]:
        """Cohort → the probability that its nodes are there still at the end of the time that
        plans look ahead.
        """
        every = list(dict.fromkeys(chain.from_iterable(cohorts_of_jobs)))
        rows = survival_matrix(every, self._ahead_s or 0.0)
        return dict(zip(every, rows[:, -1].tolist(), strict=True))

    def _expected_s(
        self, cohorts: Iterable[Cohort | None], stays: Mapping[Cohort | None, float]
    ) -> float:
        """The mean time to a loss at the rate of the time that plans look ahead."""
        ahead_s = self._ahead_s or 0.0
        hit = 1.0 - math.prod(map(stays.__getitem__, cohorts))
        rate = -math.log(max(1e-9, 1.0 - hit)) / ahead_s
        return 1.0 / rate if rate * CALM_S > 1.0 else math.inf
