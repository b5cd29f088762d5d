"""Workloads: the model jobs of a simulation, and the throughput by scale of unmeasured ones.

Defines the job of a simulation, workloads of random jobs from scaling curves (``hpo``), and random
deadlines; the controller decides how deadlines affect plans. Other workloads are read from a file
(:mod:`malletrain.sim.workload_files`) or consist of random cells (:mod:`malletrain.sim.nas`).
Arrivals and sizes of a real log come from :mod:`malletrain.sim.joblogs`.

For a job without a measured curve, compute, communication and a serial part determine one
(:class:`Model`). The slower of two laws applies:

* **compute + ring allreduce**: a step of ``b`` samples per node takes ``(b·f/F) · (1 + j·√(2 ln n))
  + (1 - overlap) · C(n)``, with f the operations of training one sample and F the sustained
  operations/s of a node. ``C(n) = 2(n-1)·α + 2·(n-1)/n · M/β`` is the ring's time for M bytes of
  gradients (Hockney's α-β model; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, section 4).
  The factor with the root is the expected maximum of n normal step times with relative standard
  deviation j, because all ranks wait for the slowest. Throughput is ``n·b`` divided by that time.
* **Amdahl**: a fraction s of one node's work does not shrink with more nodes (input from one file
  server): ``O(1)·n / (1 + s·(n-1))``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from allocator import Goal, ScalingCurve

HPO_SAMPLES = 1.3e8
"""Samples of one job of a hyperparameter search: a hundred epochs of ImageNet, as in the published
replay.
"""


SHORTEST_S = 600.0
"""Jobs that need less get no random deadline, because starts and the interval between plans are a
large part of their time.
"""


CurveStatement = Literal["exact", "other", "linear", "none"]
"""Curves that owners state, see :func:`with_stated_curves`."""


class WorkloadError(ValueError):
    """A workload, log or option of the simulator is not valid. The message says where and why."""


@dataclass(frozen=True)
class SimJob:
    """One model job.

    Attributes:
        samples: its work, number of samples.
        curve: its real throughput, samples/s by number of nodes; linear between points.
        stated_curve: the curve that its owner states; None for none.
        submit_s: submission, seconds from the start.
        sizes: allowed numbers of nodes; None for every number from min to max.
        model: jobs of one model have one curve, unless ``parameters`` or ``flops`` differ.
        parameters: number of parameters of the model; None if unknown.
        flops: operations of training one sample; None if unknown.
        batch: samples per step and node.
        deadline_s: deadline, seconds from the start; None for none.
        budget_nh: maximum charge, node-hours; None for no limit.
        user: user whose share it uses.
        trainer: trainer whose plan it is in.
        node_class: kind of slots that it runs on; empty for any.

    Raises:
        WorkloadError: limits, work or times are not valid, or ``max_nodes`` is beyond the curve,
            which is not extrapolated.
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
    node_class: str = ""

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

    @cached_property
    def accepted_sizes(self) -> tuple[int, ...]:
        """The numbers of nodes on which it can run, in ascending order."""
        sizes = range(self.min_nodes, self.max_nodes + 1)
        return tuple(k for k in sizes if self.sizes is None or k in self.sizes)

    def rates(self) -> list[float]:
        """Return the throughput at 0, 1, … ``max_nodes`` nodes, samples/s."""
        return [0.0, *self.curve.rates(np.arange(1, self.max_nodes + 1)).tolist()]


def hpo(
    curves: Mapping[str, ScalingCurve],
    count: int,
    seed: int = 0,
    *,
    samples: float = HPO_SAMPLES,
    max_nodes: int | None = None,
) -> list[SimJob]:
    """Return a hyperparameter search: jobs with random curves, all submitted at the start.

    Args:
        curves: model → curve.
        count: number of jobs.
        seed: seed of the random numbers.
        samples: work of each job.
        max_nodes: maximum size of a job, if its curve covers it. Default: the end of its curve.

    Raises:
        WorkloadError: there are no curves or no jobs, or no curve covers ``max_nodes``.
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
        max_size = curve.largest if max_nodes is None else min(max_nodes, curve.largest)
        jobs.append(
            SimJob(
                f"{names[k]}-{number:0{width}d}",
                1,
                max_size,
                samples,
                curve,
                stated_curve=curve,
                model=names[k],
            )
        )
    return jobs


def arriving(jobs: Sequence[SimJob], log: Iterable[tuple[float, int, float]]) -> list[SimJob]:
    """Return the jobs with arrivals, sizes and run times of a real log.

    The maximum size of a job is the number of nodes of the logged job, and its work is what it
    processes on them in the logged time. If its curve ends earlier, the maximum size is that end,
    and the work is that of the same node-seconds.

    Args:
        jobs: jobs of the workload.
        log: (submission, nodes, run time) of logged jobs, seconds. One is used for each of
            ``jobs``.
    """
    result = []
    for job, (submit_s, nodes, run_s) in zip(jobs, log, strict=False):
        max_size = min(nodes, job.max_nodes)
        work = job.curve.at(max_size) * run_s * nodes / max_size
        result.append(
            replace(
                job,
                submit_s=submit_s,
                max_nodes=max_size,
                min_nodes=min(job.min_nodes, max_size),
                samples=work,
            )
        )
    return result


def with_stated_curves(jobs: Sequence[SimJob], how: CurveStatement, seed: int = 0) -> list[SimJob]:
    """Return the jobs with stated curves.

    Args:
        jobs: jobs of the workload.
        how: ``exact`` curves, those of an ``other`` random model of the workload, ``linear`` ones
            from the throughput on one node, or ``none``.
        seed: seed of the random numbers.

    Raises:
        WorkloadError: there is no other model.
    """
    rng = np.random.default_rng((seed, 1))  # other random numbers than those of the jobs
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
            rate_one = job.curve.at(1)
            stated_curve = ScalingCurve.of(
                {1: rate_one, job.curve.largest: rate_one * job.curve.largest}
            )
        elif how == "other":
            k = int(rng.integers(len(different) - 1))
            stated_curve = ScalingCurve(
                different[k] if different[k] != job.curve.points else different[-1]
            )
        result.append(replace(job, stated_curve=stated_curve))
    return result


def with_deadlines(
    jobs: Sequence[SimJob], fraction: float, slack: tuple[float, float] = (1.5, 5.0), seed: int = 0
) -> list[SimJob]:
    """Return the jobs, a fraction of them with deadlines.

    The time from submission to deadline is the time that the job needs at its largest size without
    interruption, times a random factor. Jobs that need less than :data:`SHORTEST_S` get no
    deadline.

    Args:
        jobs: jobs of the workload.
        fraction: fraction of the jobs with deadlines, 0 to 1.
        slack: minimum and maximum of the factor, both at least 1. The factor is log-uniformly
            distributed.
        seed: seed of the random numbers.

    Raises:
        WorkloadError: the fraction or the slack is not valid.
    """
    low, high = slack
    if not (0 <= fraction <= 1 and 1 <= low <= high):
        raise WorkloadError(
            "Random deadlines need a fraction from 0 to 1 and factors of 1 or more, the smaller "
            f"first; got fraction {fraction:g}, factors {low:g} to {high:g}."
        )
    # other random numbers than those of the workload (1) and of the reports (2)
    rng = np.random.default_rng((seed, 3))
    chosen = rng.random(len(jobs)) < fraction
    factors = np.exp(rng.uniform(np.log(low), np.log(high), len(jobs)))
    result = []
    for job, gets_deadline, factor in zip(jobs, chosen.tolist(), factors.tolist(), strict=True):
        needs_s = job.samples / job.curve.at(job.max_nodes)
        if gets_deadline and needs_s >= SHORTEST_S:
            job = replace(job, deadline_s=job.submit_s + factor * needs_s)
        result.append(job)
    return result


TRAINING_COST = 3.0
"""Ratio of the operations of a training step to those of its forward pass: the backward pass costs
twice the forward pass.
"""


@dataclass(frozen=True)
class Cluster:
    """The performance of the nodes.

    The defaults are a node of six V100 (15.7 Tflop/s peak each in single precision, 30 % of it
    sustained) with two EDR links (12.5 GB/s each, 60 % of it usable by an allreduce). Batch,
    overlap and jitter are assumptions.

    Attributes:
        flops: operations/s that a node sustains in training.
        alpha_s: latency of a message, seconds.
        beta: bandwidth between two nodes, bytes/s.
        overlap: fraction of the communication hidden behind the backward pass.
        batch: samples per step and node.
        jitter: relative standard deviation of a node's step time.
    """

    flops: float = 6 * 15.7e12 * 0.30
    alpha_s: float = 30e-6
    beta: float = 2 * 12.5e9 * 0.60
    overlap: float = 0.5
    batch: int = 6 * 32
    jitter: float = 0.03

    def rate(self, flops: float, parameters: float, nodes: int) -> float:
        """Return samples/s on ``nodes`` nodes.

        Args:
            flops: operations of training one sample.
            parameters: number of parameters, with gradients of 4 bytes each.
            nodes: number of nodes.
        """
        compute = (
            self.batch * flops / self.flops * (1 + self.jitter * math.sqrt(2 * math.log(nodes)))
        )
        ring = (
            2 * (nodes - 1) * self.alpha_s + 2 * (nodes - 1) / nodes * 4.0 * parameters / self.beta
        )
        return nodes * self.batch / (compute + (1 - self.overlap) * ring)

    def curve(
        self, flops: float, parameters: float, sizes: Iterable[int], serial: float = 0.0
    ) -> ScalingCurve:
        """Return samples/s at each of ``sizes``: the slower of the two laws.

        Args:
            flops: operations of training one sample.
            parameters: number of parameters.
            sizes: numbers of nodes.
            serial: Amdahl's serial fraction, 0 to 1.
        """
        rate_one = self.rate(flops, parameters, 1)
        return ScalingCurve.of(
            {n: min(self.rate(flops, parameters, n), amdahl(rate_one, serial, n)) for n in sizes}
        )


NODE = Cluster()
"""The node of the defaults."""


def amdahl(rate_one: float, serial: float, nodes: int) -> float:
    """Return samples/s on ``nodes`` nodes if a fraction ``serial`` of one node's work stays serial.

    Args:
        rate_one: samples/s on one node.
        serial: fraction from 0 to 1.
        nodes: number of nodes.
    """
    return rate_one * nodes / (1 + serial * (nodes - 1))


@dataclass(frozen=True)
class Model:
    """A model of the built-in family.

    Attributes:
        flops: operations of one forward pass at 224×224×3; a multiply-add counts as two.
        parameters: number of parameters.
        serial: Amdahl's serial fraction.
    """

    flops: float
    parameters: float
    serial: float = 0.0


FAMILY = {
    "alexnet": Model(1.43e9, 61.1e6, 0.012),
    "vgg16": Model(31.0e9, 138.4e6),
    "resnet18": Model(3.64e9, 11.7e6, 0.002),
    "resnet50": Model(8.2e9, 25.6e6),
    "densenet121": Model(5.7e9, 8.0e6, 0.001),
    "mnasnet": Model(0.66e9, 4.4e6, 0.006),
    "mobilenet_v2": Model(0.61e9, 3.5e6, 0.008),
}
"""Operations and parameters as published with the models; the serial fractions are assumptions
(light models are hard to feed).
"""


def built_in(largest: int = 64, cluster: Cluster = NODE) -> dict[str, ScalingCurve]:
    """Return the curves of the built-in family at 1, 2, 4, … ``largest`` nodes."""
    sizes = sorted({1 << p for p in range(largest.bit_length())} | {largest})
    return {
        name: cluster.curve(TRAINING_COST * m.flops, m.parameters, sizes, m.serial)
        for name, m in FAMILY.items()
    }
