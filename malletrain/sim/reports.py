"""The reports of model jobs to the controller, and the priors of jobs from the curves of earlier
ones.

Decides the noise of a measured throughput and when a job reports. MalleTrain's own code measures,
profiles and passes curves on.

A job that is being profiled reports every :data:`MEASURED_EVERY_S`. Another job reports only in its
first window at each size. A real job reports all the time, but the throughput of a model job never
changes, so later windows would contain nothing new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jpa import MeasuredCurve, ModelSize, Prior, RescaleCosts
from malletrain.core import siblings
from malletrain.core.commands import KeepScalingModel
from malletrain.core.controller import Controller
from malletrain.core.events import PriorSuggested, Progressed
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.siblings import Sibling, SizedJob, suggestions
from malletrain.sim.costs import SimRun
from malletrain.sim.workloads import SimJob

MEASURED_EVERY_S = 0.5
OBSERVED_FOR_S = 45.0
"""A window of 30 s and its warm-up."""
NOISE = 0.02
"""Relative standard deviation of the samples of one report."""
_EXACT = 1e-3
"""Relative standard deviation of revealed curves."""
MAX_CURVES = 200
"""Maximum number of stored curves of earlier jobs; the newest are kept."""


@dataclass
class _Round:
    """The reports of a job in its current round."""

    version: int
    began: float
    samples: float = 0.0
    at: float = 0.0


class Memory:
    """A :class:`malletrain.core.siblings.SiblingStorage` of the newest curves."""

    def __init__(self) -> None:
        self._newest: dict[str, Sibling] = {}

    def put(self, sibling: Sibling) -> None:
        """Store it."""
        self._newest.pop(sibling.key, None)
        self._newest[sibling.key] = sibling
        if len(self._newest) > MAX_CURVES:
            del self._newest[next(iter(self._newest))]

    def of_key(self, key: str) -> Sibling | None:
        """Return the newest of this key; None if there is none."""
        return self._newest.get(key)

    def others(self, key: str) -> list[Sibling]:
        """Return those of other keys, the newest first."""
        return [sibling for sibling in reversed(self._newest.values()) if sibling.key != key]


class Reports:
    """The reports of all jobs of one simulation.

    Args:
        seed: seed of the noise.
        revealed: whether a job's true curve becomes known when it first runs.
        sized: whether the size of a job's model is known before it runs (:class:`SimSettings`).
    """

    def __init__(self, seed: int, *, revealed: bool = False, sized: bool = False) -> None:
        self._revealed = revealed
        self._sized = sized
        self._rng = np.random.default_rng((seed, 2))
        self._rounds: dict[str, _Round] = {}
        self._seen: dict[str, set[int]] = {}
        self._curves = Memory()
        self._introduced: set[str] = set()
        self.news = False
        """Whether curves or waiting jobs have changed since the last call of
        :meth:`for_waiting`.
        """

    def due(self, run: SimRun, now: float, *, profiled: bool) -> float | None:
        """Return the time of the next report; None if the job has nothing new to report.

        Args:
            run: a job that processes samples from now on.
            now: time of the virtual clock, seconds.
            profiled: whether the job is being profiled.
        """
        if profiled:
            return now + MEASURED_EVERY_S
        return (
            now + OBSERVED_FOR_S if len(run.nodes) not in self._seen.get(run.job.name, ()) else None
        )

    def report(self, run: SimRun, now: float) -> list[Progressed]:
        """Return the job's reports at this time: samples since its round began, on all its
        nodes.
        """
        name, nodes = run.job.name, len(run.nodes)
        current = self._rounds.get(name)
        events = []
        if current is None or current.version != run.version:
            current = self._rounds[name] = _Round(
                run.version, run.training_since, at=run.training_since
            )
            events.append(Progressed(name, nodes, current.began, 0.0, run.job.batch))
        # Several equal steps in between, so that one late report is a window of several.
        steps = max(1, math.ceil((now - current.at) / 5.0))
        for k in range(1, steps + 1):
            at = current.at + (now - current.at) * k / steps
            step = (at - (current.at + (now - current.at) * (k - 1) / steps)) * run.rate
            current.samples += max(0.0, step * (1 + NOISE * float(self._rng.standard_normal())))
            events.append(Progressed(name, nodes, at, current.samples, run.job.batch))
        current.at = now
        if now - current.began >= OBSERVED_FOR_S * (1 - 1e-9):
            self._seen.setdefault(name, set()).add(nodes)
        return events

    def keep(self, job: SimJob, command: KeepScalingModel) -> None:
        """Store the scaling model of a job for later jobs of its kind."""
        sibling = Sibling(kind_of(job), job.name, command.scaling, _size(job))
        self.news = siblings.keep(self._curves, sibling) or self.news

    def starts_with(self, job: SimJob) -> ScalingModel | None:
        """Return the scaling model of a job at its submission: the newest curve of its own model;
        else, if its owner stated the model's size, a prior from models of other sizes; else None.
        """
        if not job.model:
            return None
        scaling = siblings.starts_with(self._curves, kind_of(job))
        if scaling is None and self._sized and job.parameters is not None:
            return siblings.suggested(self._curves, kind_of(job), _size(job), RescaleCosts())
        return scaling

    def for_waiting(
        self, controller: Controller, runs: Mapping[str, SimRun]
    ) -> list[PriorSuggested]:
        """Return priors for waiting jobs whose owners stated the size of their models, as in the
        daemon.
        """

        def sized(name: str) -> SizedJob | None:
            job = runs[name].job
            if job.parameters is None:
                return None
            return SizedJob(kind_of(job), _size(job), self._curves, RescaleCosts())

        due, self.news = self.news and self._sized, False
        unfinished, max_jobs = controller.state.unfinished.values(), controller.queue.max_running
        return suggestions(unfinished, max_jobs, sized) if due else []

    def described(self, job: SimJob) -> PriorSuggested | None:
        """Return a prior from jobs with similar models, once the job's workers have reported the
        model's size. Return it only in the first call for the job.
        """
        if job.name in self._introduced or (job.parameters is None and not self._revealed):
            return None
        self._introduced.add(job.name)
        if self._revealed:
            points = tuple((k, rate) for k, rate in job.curve.points if k and rate > 0)
            exact = Prior(points, level_std=_EXACT, shape_std=_EXACT, source="the simulator")
            return PriorSuggested(job.name, ScalingModel(MeasuredCurve.from_prior(exact)))
        scaling = siblings.suggested(self._curves, kind_of(job), _size(job), RescaleCosts())
        return PriorSuggested(job.name, scaling) if scaling else None


def kind_of(job: SimJob) -> str:
    """Return the kind of a job: that of its model, or of its model's size if it has one."""
    return (
        job.model
        if job.parameters is None
        else f"{job.model} {job.parameters:.0f} {job.flops or 0:.0f}"
    )


def _size(job: SimJob) -> ModelSize:
    return ModelSize(job.parameters, job.flops)
