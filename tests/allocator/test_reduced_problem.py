"""The two solvers of a reduced problem agree, and both respect the cutoff."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings

from allocator import Bid, SizeValues, prices, reduced_problem, table
from allocator.search import fill, repair
from tests.allocator.oracles.brute_force import best
from tests.allocator.strategies import bid_lists
from tests.draws import cases

SOME = settings(max_examples=cases(150), deadline=None)


@given(bid_lists(forced=False))
@SOME
def test_counting_and_highs_find_the_least_waste(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    bid_table = table.build(bids, capacity)
    if not len(bid_table.size) or not len(bid_table.capacity):
        return
    dual = prices.minimise_dual(bid_table)
    idle = table.to_plan(bid_table, [bid.job for bid in bids], {})
    assert idle is not None
    gap = dual.duality_gap(bid_table, idle)
    if gap <= dual.noise:
        return
    everything = reduced_problem.reduce(bid_table, dual, np.ones(len(bid_table.size), np.bool_))
    least = dual.bound - best(bids, capacity)[1]
    slack = 1e-8 * gap + 10 * dual.noise
    counted = reduced_problem.by_dynamic_program(bid_table, dual, everything, gap * (1 + 1e-9), 1e9)
    solved = reduced_problem.by_milp(
        bid_table, dual, everything, gap, time_limit_s=30.0, tolerance=0.0, incumbent=idle
    )
    for outcome in (counted, solved):
        assert outcome is not None
        assert outcome.plan is not None
        assert outcome.proven
        assert bid_table.fits(outcome.plan)
        assert dual.duality_gap(bid_table, outcome.plan) == pytest.approx(least, abs=slack)
    if least > slack:
        nothing = reduced_problem.by_dynamic_program(
            bid_table, dual, everything, least - slack, 1e9
        )
        assert nothing == reduced_problem.ReducedSolution(None, True), (
            "no plan has a smaller gap than the smallest"
        )


def test_counting_gives_up_when_there_is_too_much_to_count() -> None:
    bids = [Bid(f"j{j}", {"default": _options(j)}) for j in range(20)]
    bid_table = table.build(bids, {"default": 200})
    dual = prices.minimise_dual(bid_table)
    everything = reduced_problem.reduce(bid_table, dual, np.ones(len(bid_table.size), np.bool_))
    assert reduced_problem.by_dynamic_program(bid_table, dual, everything, 1e9, 100.0) is None


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
    bid_table = table.build(bids, capacity)
    if not len(bid_table.size) or not len(bid_table.capacity):
        return
    dual = prices.minimise_dual(bid_table)
    idle = table.to_plan(bid_table, [bid.job for bid in bids], {})
    assert idle is not None
    rows = np.arange(len(bid_table.size))
    filled = fill(bid_table, dual, idle, rows)
    assert bid_table.fits(filled)
    assert dual.duality_gap(bid_table, filled) <= dual.duality_gap(bid_table, idle) + dual.noise
    greedy = prices.relaxed_plan(
        bid_table, prices.dual_at(bid_table, np.zeros(len(bid_table.capacity)))
    )
    repaired = repair(bid_table, dual, greedy, rows)
    assert repaired is not None, "letting jobs go always makes room"
    assert bid_table.fits(repaired)


@given(bid_lists(classes=("x", "y"), forced=False))
@SOME
def test_without_dominated_rows_the_best_plan_is_worth_as_much(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    bid_table = table.build(bids, capacity)
    if not len(bid_table.size):
        return
    keep = table.undominated(bid_table, np.ones(len(bid_table.size), np.bool_))
    for row in np.flatnonzero(~keep):
        alike = (
            keep
            & (bid_table.group == bid_table.group[row])
            & (bid_table.resource == bid_table.resource[row])
        )
        assert (
            alike
            & (bid_table.size <= bid_table.size[row])
            & (bid_table.value >= bid_table.value[row])
        ).any()
