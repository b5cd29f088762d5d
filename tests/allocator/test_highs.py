"""HiGHS behind one function: signs, bounds, and what a time limit leaves."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.highs import InfeasibleError, LinearProgram, maximise


def knapsack(
    values: list[float],
    weights: list[float],
    room: float,
    *,
    whole: bool = True,
    least: float = -np.inf,
) -> LinearProgram:
    n = len(values)
    return LinearProgram(
        cost=np.array(values),
        lower=np.zeros(n),
        upper=np.ones(n),
        integral=np.full(n, whole),
        starts=np.arange(n + 1),
        rows=np.zeros(n, np.int64),
        coefficients=np.array(weights),
        row_lower=np.array([least]),
        row_upper=np.array([room]),
    )


def test_a_whole_answer_and_its_bound() -> None:
    solution = maximise(knapsack([6.0, 10.0, 12.0], [1.0, 2.0, 3.0], 5.0), time_limit_s=30.0)
    assert solution.x is not None
    assert solution.x.round().tolist() == [0, 1, 1]
    assert (solution.objective, solution.optimal) == (pytest.approx(22.0), True)
    assert solution.bound >= 22.0 - 1e-9


def test_the_dual_of_a_limit_is_what_one_more_unit_is_worth() -> None:
    solution = maximise(
        knapsack([6.0, 10.0, 12.0], [1.0, 2.0, 3.0], 5.0, whole=False), time_limit_s=30.0
    )
    assert solution.objective == pytest.approx(24.0)
    assert solution.duals is not None
    assert solution.duals.tolist() == pytest.approx([4.0])


def test_without_time_there_is_still_a_bound() -> None:
    rng = np.random.default_rng(1)
    values, weights = rng.random(400) + 0.5, rng.integers(20, 40, 400).astype(float)
    solution = maximise(knapsack(values.tolist(), weights.tolist(), 1000.5), time_limit_s=0.0)
    assert not solution.optimal
    assert solution.bound >= solution.objective


def test_no_solution_is_said_so() -> None:
    with pytest.raises(InfeasibleError, match="no solution"):
        maximise(knapsack([1.0], [1.0], 5.0, least=2.0), time_limit_s=30.0)
