"""The two ways to decide a core agree, and both keep to their ceiling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings

from allocator import Bid, SizeValues, prices, reduced_problem, table
from allocator.moves import fill, repair
from tests.allocator.oracles.everything import best
from tests.allocator.strategies import bid_lists

SOME = settings(max_examples=150, deadline=None)


@given(bid_lists(forced=False))
@SOME
def test_counting_and_highs_find_the_least_waste(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    made = table.build(bids, capacity)
    if not len(made.size) or not len(made.capacity):
        return
    dual = prices.minimise_dual(made)
    idle = table.to_plan(made, [bid.job for bid in bids], {})
    assert idle is not None
    gap = dual.duality_gap(made, idle)
    if gap <= dual.noise:
        return
    everything = reduced_problem.reduce(made, dual, np.ones(len(made.size), np.bool_))
    least = dual.bound - best(bids, capacity)[1]
    slack = 1e-8 * gap + 10 * dual.noise
    counted = reduced_problem.by_dynamic_program(made, dual, everything, gap * (1 + 1e-9), 1e9)
    solved = reduced_problem.by_milp(
        made, dual, everything, gap, time_limit_s=30.0, tolerance=0.0, incumbent=idle
    )
    for outcome in (counted, solved):
        assert outcome is not None
        assert outcome.plan is not None
        assert outcome.proven
        assert made.fits(outcome.plan)
        assert dual.duality_gap(made, outcome.plan) == pytest.approx(least, abs=slack)
    if least > slack:
        nothing = reduced_problem.by_dynamic_program(made, dual, everything, least - slack, 1e9)
        assert nothing == reduced_problem.ReducedSolution(None, True), (
            "nothing wastes less than the least"
        )


def test_counting_gives_up_when_there_is_too_much_to_count() -> None:
    bids = [Bid(f"j{j}", {"default": _options(j)}) for j in range(20)]
    made = table.build(bids, {"default": 200})
    dual = prices.minimise_dual(made)
    everything = reduced_problem.reduce(made, dual, np.ones(len(made.size), np.bool_))
    assert reduced_problem.by_dynamic_program(made, dual, everything, 1e9, 100.0) is None


def _options(seed: int) -> SizeValues:
    rng = np.random.default_rng(seed)
    return SizeValues(np.arange(1, 40), rng.random(39) * np.arange(1, 40))


@given(bid_lists(classes=("x", "y"), forced=False))
@SOME
@example(
    (
        [
            Bid(f"j{i}", {"x": SizeValues([2], [1.0]), "y": SizeValues([1, 2], [0.0, 2.0])})
            for i in range(3)
        ],
        {"x": 2, "y": 2},
    )
)
def test_fill_only_gains_and_repair_makes_feasible(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    made = table.build(bids, capacity)
    if not len(made.size) or not len(made.capacity):
        return
    dual = prices.minimise_dual(made)
    idle = table.to_plan(made, [bid.job for bid in bids], {})
    assert idle is not None
    rows = np.arange(len(made.size))
    filled = fill(made, dual, idle, rows)
    assert made.fits(filled)
    assert dual.duality_gap(made, filled) <= dual.duality_gap(made, idle) + dual.noise
    greedy = prices.relaxed_plan(made, prices.dual_at(made, np.zeros(len(made.capacity))))
    repaired = repair(made, dual, greedy, rows)
    assert repaired is not None, "letting jobs go always makes room"
    assert made.fits(repaired)


@given(bid_lists(classes=("x", "y"), forced=False))
@SOME
def test_without_dominated_rows_the_best_plan_is_worth_as_much(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    made = table.build(bids, capacity)
    if not len(made.size):
        return
    keep = table.undominated(made, np.ones(len(made.size), np.bool_))
    for row in np.flatnonzero(~keep):
        alike = keep & (made.group == made.group[row]) & (made.resource == made.resource[row])
        assert (alike & (made.size <= made.size[row]) & (made.value >= made.value[row])).any()
