"""Workloads: the model jobs that a simulation runs.

Decides what a job of a simulation is and how a list of jobs comes about: drawn at random from
scaling curves (``hpo``), read from a file (:mod:`malletrain.sim.workload_files`), or random cells
(:mod:`malletrain.sim.nas`). Arrivals and sizes of a real log come from
:mod:`malletrain.sim.joblogs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from allocator import Goal, ScalingCurve

HPO_SAMPLES = 1.3e8
"""Work of one job of a hyperparameter search: a hundred epochs of ImageNet, as in the published
replay.
"""


CurveStatement = Literal["exact", "other", "linear", "none"]
"""How well owners know the curves of their jobs."""


class WorkloadError(ValueError):
    """A workload, log or option of the simulator that makes no sense; the message says where and
    why.
    """


@dataclass(frozen=True)
class SimJob:
    """One model job.

    ``samples``: its work. ``curve``: how fast it really is, samples/s by nodes; between points
    linear, and a job never runs on more nodes than ``max_nodes``. ``stated_curve``: what its owner
    says it is, None when the owner says nothing. ``submit_s``: seconds from the start. ``model``:
    jobs of one model have one curve, unless ``parameters`` and ``flops`` (of training one sample)
    tell their models apart. ``batch``: samples a step and node. ``deadline_s``: when it is to be
    done, seconds from the start; ``budget_nh``: charged node-hours that it may cost. ``user``:
    whose share it is served from. ``trainer``: in whose plan it is.

    Raises:
        WorkloadError: on limits, work or times that make no sense, and when ``max_nodes`` lies
            beyond the curve: what nobody measured is not simulated.
    """

    name: str
    min_nodes: int
    max_nodes: int
    samples: float
    curve: ScalingCurve
    stated_curve: ScalingCurve | None = None
    submit_s: float = 0.0
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    sizes: tuple[int, ...] | None = None
    model: str = ""
    parameters: float | None = None
    flops: float | None = None
    batch: float = 0.0
    deadline_s: float | None = None
    budget_nh: float | None = None
    user: str = ""
    trainer: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise WorkloadError(
                f"Job {self.name} asks for {self.min_nodes}:{self.max_nodes} nodes; give 1 <= "
                "min <= max."
            )
        if not (math.isfinite(self.samples) and self.samples > 0):
            raise WorkloadError(
                f"Job {self.name} has {self.samples} samples to process; give a number above 0."
            )
        if not (math.isfinite(self.submit_s) and self.submit_s >= 0):
            raise WorkloadError(
                f"Job {self.name} is submitted at {self.submit_s} s; give seconds from the "
                "start, 0 or more."
            )
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise WorkloadError(
                f"Job {self.name} has weight {self.weight}; give a finite number, 0 or more."
            )
        if self.deadline_s is not None and not self.submit_s < self.deadline_s < math.inf:
            raise WorkloadError(
                f"Job {self.name} is submitted at {self.submit_s:g} s and its deadline is "
                f"{self.deadline_s:g} s; give seconds from the start, later than that."
            )
        if self.budget_nh is not None and not 0 < self.budget_nh < math.inf:
            raise WorkloadError(
                f"Job {self.name} has a budget of {self.budget_nh:g} node-hours; give a number "
                "above 0."
            )
        if not self.curve.covers(self.max_nodes):
            raise WorkloadError(
                f"Job {self.name} may use {self.max_nodes} nodes but its curve ends at "
                f"{self.curve.largest}; "
                "the simulator does not extrapolate: lower the maximum or extend the curve."
            )
        if self.sizes is not None and not any(
            self.min_nodes <= k <= self.max_nodes for k in self.sizes
        ):
            raise WorkloadError(
                f"Job {self.name} accepts no size within {self.min_nodes}:{self.max_nodes} nodes."
            )

    def rates(self) -> list[float]:
        """Throughput at 0, 1, … ``max_nodes`` nodes, samples/s."""
        return [0.0, *self.curve.rates(np.arange(1, self.max_nodes + 1)).tolist()]


def hpo(
    curves: Mapping[str, ScalingCurve],
    count: int,
    seed: int = 0,
    *,
    samples: float = HPO_SAMPLES,
    max_nodes: int | None = None,
) -> list[SimJob]:
    """A hyperparameter search: ``count`` jobs, each of one of ``curves`` (model → curve) drawn at
    random, all submitted at the start.

    ``max_nodes``: largest size of a job, where its curve reaches so far; default the end of its
    curve. Raises WorkloadError without curves or jobs, and when no curve reaches ``max_nodes``: the
    simulator does not extrapolate.
    """
    if not curves:
        raise WorkloadError("There is no scaling curve to draw jobs from.")
    longest = max(curve.largest for curve in curves.values())
    if max_nodes is not None and max_nodes > longest:
        raise WorkloadError(
            f"Jobs of {max_nodes} nodes are asked for but no scaling curve goes beyond "
            f"{longest}; the simulator does not extrapolate."
        )
    if count < 1:
        raise WorkloadError(f"A workload of {count} jobs cannot be simulated; give 1 or more.")
    names = sorted(curves)
    drawn = np.random.default_rng(seed).integers(len(names), size=count).tolist()
    width = len(str(count))
    jobs = []
    for number, k in enumerate(drawn, start=1):
        curve = curves[names[k]]
        most = curve.largest if max_nodes is None else min(max_nodes, curve.largest)
        jobs.append(
            SimJob(
                f"{names[k]}-{number:0{width}d}",
                1,
                most,
                samples,
                curve,
                stated_curve=curve,
                model=names[k],
            )
        )
    return jobs


def arriving(jobs: Sequence[SimJob], log: Iterable[tuple[float, int, float]]) -> list[SimJob]:
    """The same models, with arrivals, sizes and lengths of a real log: (submission, nodes, run
    time) of each of its jobs, in seconds.

    A job may grow to as many nodes as its model of a batch job had, and has the work that it would
    have done on them in that time. Where its curve ends before, it may grow to that end and has
    work for as many node-seconds. One job of the log is used for each of ``jobs``.
    """
    result = []
    for job, (submit_s, nodes, run_s) in zip(jobs, log, strict=False):
        most = min(nodes, job.max_nodes)
        work = job.curve.at(most) * run_s * nodes / most
        result.append(
            replace(
                job,
                submit_s=submit_s,
                max_nodes=most,
                min_nodes=min(job.min_nodes, most),
                samples=work,
            )
        )
    return result


def with_stated_curves(jobs: Sequence[SimJob], how: CurveStatement, seed: int = 0) -> list[SimJob]:
    """The same jobs, with owners that state their curves ``exact``, as that of an ``other`` model
    of the workload (drawn at random), as ``linear`` in the throughput of one node, or not at all
    (``none``). Raises WorkloadError when there is no other model.
    """
    rng = np.random.default_rng((seed, 1))  # not the numbers that drew the jobs
    different = sorted({job.curve.points for job in jobs})
    if how == "other" and len(different) < 2:
        raise WorkloadError(
            "There is only one model in the workload, so that no owner can state the curve of "
            "another."
        )
    result = []
    for job in jobs:
        stated_curve: ScalingCurve | None = job.curve
        if how == "none":
            stated_curve = None
        elif how == "linear":
            one = job.curve.at(1)
            stated_curve = ScalingCurve.of({1: one, job.curve.largest: one * job.curve.largest})
        elif how == "other":
            k = int(rng.integers(len(different) - 1))
            stated_curve = ScalingCurve(
                different[k] if different[k] != job.curve.points else different[-1]
            )
        result.append(replace(job, stated_curve=stated_curve))
    return result
