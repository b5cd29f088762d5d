"""How soon each job is expected to lose a node, so that it may save in time. Pure.

Decides when that is worth saying: where it has changed by a quarter. How long nodes last is
foretold elsewhere (:mod:`scavenger.lifetimes`); how often a job saves is decided where it runs
(:mod:`malletrain.training.pace`), which knows what a snapshot costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from allocator import Outlook
from malletrain.core.events import LossExpected
from malletrain.core.lasting import counted
from malletrain.core.state import ControllerState, JobRecord

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
        self._said: dict[str, float] = {}

    def review(self) -> list[LossExpected]:
        """What there is to say of the jobs that have nodes, after a plan."""
        if self._ahead_s is None:
            return []
        at_work = [job for job in self._state.at_work.values() if job.nodes]
        self._said = {
            job.submitted.job: self._said[job.submitted.job]
            for job in at_work
            if job.submitted.job in self._said
        }
        return [*self._news(at_work)]

    def _news(self, jobs: Iterable[JobRecord]) -> Iterable[LossExpected]:
        for job in jobs:
            name, in_s = job.submitted.job, self._expected_s(job)
            before = self._said.get(name, math.inf)
            if in_s == before or before / CHANGE < in_s < before * CHANGE:
                continue
            self._said[name] = in_s
            yield LossExpected(name, in_s)

    def _expected_s(self, job: JobRecord) -> float:
        """The mean time to a loss at the rate of the time that plans look ahead."""
        usable, ahead_s = self._state.usable, self._ahead_s or 0.0
        cohorts = counted(usable[n] for n in job.nodes if n in usable)
        _, hit, _ = Outlook(cohorts, ahead_s, 0.0).of(np.array([len(job.nodes)]))
        rate = -math.log(max(1e-9, 1.0 - float(hit[0]))) / ahead_s
        return 1.0 / rate if rate * CALM_S > 1.0 else math.inf
