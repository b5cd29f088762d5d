"""An upper bound on the samples that can be processed while given deadlines are met and shares are
kept, with perfect foresight and without costs of moving jobs.

A linear program over spans of time: nodes are divisible, any number of jobs run at once, curves are
their concave hulls. So no plan reaches the bound. The bound with deadlines and shares relative to
the bound without them separates their inherent cost from the losses of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from benchmarks.deadlines import segments
from malletrain.sim.workloads import SimJob

Floats = npt.NDArray[np.float64]
ALIKE = 0.02
"""Maximum relative difference of slopes at which segments of a hull are merged."""
SAMPLES = 1e9
"""Unit of the objective, because solvers prefer numbers near 1."""


@dataclass(frozen=True)
class _Uses:
    """All uses that a job can make of nodes in a span, one per entry."""

    span: npt.NDArray[np.int64]
    job: npt.NDArray[np.int64]
    most: Floats
    """Number of nodes, the mean over the span."""
    brings: Floats
    """Samples per node."""


def most_samples(
    jobs: Sequence[SimJob],
    idle: Floats,
    span_s: float,
    *,
    served_deadlines: Collection[str] = (),
    parts: Mapping[str, float] | None = None,
    off: float = 0.05,
) -> float:
    """Return the bound.

    Args:
        jobs: all jobs.
        idle: number of nodes, the mean of each span.
        span_s: length of a span, seconds.
        served_deadlines: jobs that must end by their deadlines.
        parts: user → its part of all used node-time, of which it gets at least ``1 - off``; None:
            no shares are kept.
        off: see ``parts``.

    Raises:
        ValueError: the deadlines cannot be met together with the shares.
    """
    uses = _uses(jobs, served_deadlines, len(idle), span_s)
    samples = np.array([job.samples for job in jobs])
    done = np.array([1.0 if job.name in served_deadlines else -np.inf for job in jobs])
    rows = [uses.span, len(idle) + uses.job]
    cells = [np.ones(len(uses.job)), uses.brings / samples[uses.job]]
    low, high = [np.full(len(idle), -np.inf), done], [idle, np.ones(len(jobs))]
    users = sorted(parts or {})
    for number, user in enumerate(users):
        mine = np.array([job.user == user for job in jobs])[uses.job]
        rows.append(np.full(len(uses.job), len(idle) + len(jobs) + number))
        cells.append(mine - (1.0 - off) * (parts or {})[user])
    low.append(np.zeros(len(users)))
    high.append(np.full(len(users), np.inf))
    return _solved(uses, np.stack(rows, 1), np.stack(cells, 1), *map(np.concatenate, (low, high)))


def _uses(
    jobs: Sequence[SimJob], served_deadlines: Collection[str], spans: int, span_s: float
) -> _Uses:
    uses: list[tuple[int, int, float, float]] = []
    for number, job in enumerate(jobs):
        end = spans * span_s
        if job.name in served_deadlines and job.deadline_s is not None:
            end = min(end, job.deadline_s)
        hull = _few(segments(job.curve, job.max_nodes))
        for k in range(int(job.submit_s / span_s), math.ceil(end / span_s)):
            seconds = min(end, (k + 1) * span_s) - max(job.submit_s, k * span_s)
            uses += [(k, number, w * seconds / span_s, r * span_s) for w, r in hull if seconds > 0]
    span, job_of, most, brings = zip(*uses, strict=True)
    return _Uses(np.array(span), np.array(job_of), np.array(most), np.array(brings))


def _few(hull: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (nodes, samples/s per node) of the hull with similar segments merged."""
    points: list[tuple[float, float]] = []
    for width, rate in hull:
        if points and abs(points[-1][1] - rate) < ALIKE * rate:
            before, was = points.pop()
            width, rate = before + width, (before * was + width * rate) / (before + width)
        points.append((width, rate))
    return points


def _solved(
    uses: _Uses, rows: npt.NDArray[np.int64], cells: Floats, low: Floats, high: Floats
) -> float:
    each = rows.shape[1]
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(uses.job), len(low)
    lp.col_cost_ = -uses.brings / SAMPLES
    lp.col_lower_, lp.col_upper_ = np.zeros(len(uses.job)), uses.most
    lp.row_lower_, lp.row_upper_ = low, high
    matrix: Any = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.arange(0, each * len(uses.job) + 1, each, dtype=np.int32)
    matrix.index_ = rows.astype(np.int32).ravel()
    matrix.value_ = cells.ravel()
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("solver", "ipm"), ("run_crossover", "choose")):
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    highs.run()
    status = highs.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        words = highs.modelStatusToString(status)
        raise ValueError(f"These deadlines and shares cannot be kept together ({words}).")
    return -float(highs.getInfo().objective_function_value) * SAMPLES
