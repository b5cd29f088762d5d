"""HiGHS, fed with arrays: one place that builds a model, runs it under a time limit and reads the
answer.

Decides how a MILP is handed to the solver and what its answer means. What the model says is decided
by its callers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator.banner import without_banner

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@cache
def _greeted() -> None:
    """The first solver of this process was made."""
    import highspy

    without_banner(highspy.Highs)


class SolverError(RuntimeError):
    """HiGHS failed in a way that a feasible model does not explain."""


class InfeasibleError(SolverError):
    """The model has no solution."""


@dataclass(frozen=True)
class LinearProgram:
    """``maximise cost·x, row_lower <= A x <= row_upper, lower <= x <= upper``, A by columns
    (starts, rows, coefficients).
    """

    cost: Floats
    lower: Floats
    upper: Floats
    integral: npt.NDArray[np.bool_]
    starts: Ints
    rows: Ints
    coefficients: Floats
    row_lower: Floats
    row_upper: Floats


@dataclass(frozen=True)
class Solution:
    """What HiGHS found."""

    x: Floats | None
    """None when nothing feasible was found in time."""
    objective: float
    """Its value."""
    bound: float
    """Proven: no feasible x is worth more."""
    optimal: bool
    """Whether the run ended before its time was up."""
    duals: Floats | None = None
    """Of the rows, for a model without integers: the value gained by one more unit of the row's
    limit.
    """


def maximise(
    model: LinearProgram,
    *,
    time_limit_s: float,
    gap: float = 0.0,
    absolute_gap: float = 0.0,
    start: Floats | None = None,
) -> Solution:
    """Solve ``model``, beginning from ``start`` when it is given, single-threaded.

    Raises:
        InfeasibleError: when nothing satisfies the model.
        SolverError: when HiGHS refuses the model or fails on it.
    """
    import highspy

    new: Callable[[], Any] = highspy.Highs
    _greeted()
    highs = new()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("parallel", "off")
    highs.setOptionValue("time_limit", max(0.0, time_limit_s))
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("mip_abs_gap", absolute_gap)
    highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
    highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
    highs.setOptionValue("dual_feasibility_tolerance", 1e-9)
    integers = bool(model.integral.any())
    passed = highs.passModel(
        len(model.cost),
        len(model.row_lower),
        len(model.rows),
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMaximize),
        0.0,
        model.cost,
        model.lower,
        model.upper,
        model.row_lower,
        model.row_upper,
        model.starts.astype(np.int32),
        model.rows.astype(np.int32),
        model.coefficients,
        model.integral.astype(np.int32),
    )
    if passed == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the model; this is a fault of the allocator.")
    if start is not None and integers:
        guess = highspy.HighsSolution()
        guess.col_value = start.tolist()
        guess.value_valid = True
        highs.setSolution(guess)
    highs.run()
    status = highs.getModelStatus()
    stopped = status in (highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kInterrupt)
    if status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        raise InfeasibleError(
            "HiGHS finds that the model has no solution; this is a fault of its caller."
        )
    if status != highspy.HighsModelStatus.kOptimal and not stopped:
        raise SolverError(
            f"HiGHS ended with status {highs.modelStatusToString(status)}; this is a fault of "
            "the allocator."
        )
    info = highs.getInfo()
    feasible = info.primal_solution_status == 2  # kSolutionStatusFeasible
    solution = highs.getSolution()
    x = np.array(solution.col_value, dtype=np.float64) if feasible else None
    if integers:
        bound = float(info.mip_dual_bound)
        bound = bound if math.isfinite(bound) else math.inf
    else:
        bound = float(info.objective_function_value) if not stopped else math.inf
    duals = np.array(solution.row_dual, dtype=np.float64) if not integers and not stopped else None
    return Solution(
        x,
        float(info.objective_function_value) if feasible else -math.inf,
        bound,
        not stopped,
        duals,
    )
