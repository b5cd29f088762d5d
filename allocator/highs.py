"""The interface to HiGHS: passes a model as arrays, runs it under a time limit, reads the solution.

Decides how a MILP is passed to the solver and what its answer means. The callers decide what the
model says.

:func:`without_banner` creates the first HiGHS solver of a process without its licence lines on
standard output. Since 1.16 that solver prints its version and licence before any option can be set,
and the lines would precede the JSON output of a command. Everything else that is printed meanwhile
is passed on.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

BANNER = (b"Running HiGHS", b"Includes third-party software components")
"""How the lines of the banner begin."""
ResultT = TypeVar("ResultT")
_lock = threading.Lock()


def without_banner(create: Callable[[], ResultT]) -> ResultT:
    """Call ``create`` while standard output is captured, and return its result.

    Lines of the banner are dropped. Other threads' lines appear once ``create`` has returned.
    """
    flush = ctypes.CDLL(None).fflush
    with _lock:
        flush(None)
        try:
            stdout, capture = os.dup(1), os.memfd_create("highs-banner")
        except OSError:  # without a standard output there is nothing to capture
            return create()
        try:
            os.dup2(capture, 1)
            try:
                return create()
            finally:
                flush(None)
                os.dup2(stdout, 1)
                os.lseek(capture, 0, os.SEEK_SET)
                with os.fdopen(os.dup(capture), "rb") as output:
                    lines = [line for line in output if not line.startswith(BANNER)]
                if other := b"".join(lines):
                    os.write(1, other)
        finally:
            os.close(stdout)
            os.close(capture)


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@cache
def _suppress_banner() -> None:
    """Create the first solver of this process, the only one that prints its licence."""
    import highspy

    without_banner(highspy.Highs)


class SolverError(RuntimeError):
    """HiGHS rejected a model or failed on it."""


class InfeasibleError(SolverError):
    """The model has no solution."""


@dataclass(frozen=True)
class LinearProgram:
    """``maximise cost·x, row_lower <= A x <= row_upper, lower <= x <= upper``, with A in
    compressed sparse columns.
    """

    cost: Floats
    """Objective coefficient of each column."""
    lower: Floats
    """Lower bound of each column."""
    upper: Floats
    """Upper bound of each column."""
    integral: npt.NDArray[np.bool_]
    """Whether each column is an integer."""
    starts: Ints
    """Index of the first entry of each column in ``rows``, then the number of entries."""
    rows: Ints
    """Row of each entry of A."""
    coefficients: Floats
    """Value of each entry of A."""
    row_lower: Floats
    """Lower limit of each row."""
    row_upper: Floats
    """Upper limit of each row."""


@dataclass(frozen=True)
class Solution:
    """The result of one run of HiGHS."""

    x: Floats | None
    """The best feasible point; None if there was none within the time limit."""
    objective: float
    """The objective at ``x``; -inf without one."""
    bound: float
    """A proven upper bound on the objective."""
    optimal: bool
    """Whether the run ended before the time limit."""
    duals: Floats | None = None
    """Dual value of each row (the objective gained by one more unit of the row's limit); None for a
    model with integers or a run that was stopped.
    """


def maximise(
    model: LinearProgram,
    *,
    time_limit_s: float,
    gap: float = 0.0,
    absolute_gap: float = 0.0,
    start: Floats | None = None,
) -> Solution:
    """Solve ``model`` with one thread.

    Args:
        model: the linear or mixed-integer program.
        time_limit_s: time limit, seconds.
        gap: relative gap at which to stop.
        absolute_gap: absolute gap at which to stop, in units of the objective.
        start: a feasible point to begin from, for a model with integers.

    Returns:
        The best solution and the bound at the end.

    Raises:
        InfeasibleError: if the model has no solution.
        SolverError: if HiGHS rejects the model or fails on it.
    """
    import highspy

    new_solver: Callable[[], Any] = highspy.Highs
    _suppress_banner()
    highs = new_solver()
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
    pass_status = highs.passModel(  # HiGHS accepts these by position only
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
    if pass_status == highspy.HighsStatus.kError:
        raise SolverError("HiGHS rejected the model; this is a fault of the allocator.")
    if start is not None and integers:
        incumbent = highspy.HighsSolution()
        incumbent.col_value = start.tolist()
        incumbent.value_valid = True
        highs.setSolution(incumbent)
    highs.run()
    status = highs.getModelStatus()
    stopped = status in (highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kInterrupt)
    if status in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        raise InfeasibleError(
            "HiGHS reports that the model has no solution; this is a fault of its caller."
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
