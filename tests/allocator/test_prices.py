"""The bound is valid at any price, and duality gaps are sums of reduced costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import Bid, SizeValues, milp, prices, solve, table
from allocator.bids import plan_value
from tests.allocator.oracles import dp
from tests.allocator.oracles.brute_force import best
from tests.allocator.strategies import bid_lists
from tests.draws import cases

SOME = settings(max_examples=cases(80), deadline=None)


def built(bids: list[Bid], capacity: dict[str, int]) -> table.BidTable | None:
    bid_table = table.build(bids, capacity)
    return bid_table if len(bid_table.size) and len(bid_table.capacity) else None


def scale(bid_table: table.BidTable) -> float:
    return 1e-9 * max(1e-300, float(np.abs(bid_table.value).max()) * len(bid_table.members) * 10)


@given(
    bid_lists(classes=("x", "y"), forced=False), st.lists(st.floats(0, 100), min_size=2, max_size=2)
)
@SOME
def test_at_any_price_no_plan_is_worth_more_than_the_bound(
    problem: tuple[list[Bid], dict[str, int]], at: list[float]
) -> None:
    bids, capacity = problem
    bid_table = built(bids, capacity)
    if bid_table is None:
        return
    unit = float(np.abs(bid_table.value).max()) / 100
    dual = prices.dual_at(bid_table, unit * np.array(at[: len(bid_table.capacity)]))
    assert dual.bound >= best(bids, capacity)[1] - scale(bid_table)
    assert (dual.reduced_cost >= 0).all()
    assert (np.minimum.reduceat(dual.reduced_cost, bid_table.starts) == 0).all(), (
        "every job has an option that loses nothing"
    )


@given(bid_lists(forced=False))
@SOME
def test_bound_less_waste_is_what_a_plan_is_worth(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    bid_table = built(bids, capacity)
    if bid_table is None:
        return
    jobs = [bid.job for bid in bids]
    sizes = dp.solve(bids, capacity).sizes
    plan = table.to_plan(bid_table, jobs, sizes)
    assert plan is not None
    dual = prices.minimise_dual(bid_table)
    assert dual.bound - dual.duality_gap(bid_table, plan) == pytest.approx(
        plan_value(sizes, bids)[0], abs=scale(bid_table)
    )


@given(bid_lists(forced=False))
@SOME
def test_for_one_class_no_price_has_a_smaller_bound(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    bid_table = built(bids, capacity)
    if bid_table is None:
        return
    least = prices.minimise_dual(bid_table)
    for price in (0.0, *(least.prices[0] * np.array([0.5, 0.9, 0.999, 1.001, 1.1, 2.0]))):
        assert prices.dual_at(bid_table, np.array([price])).bound >= least.bound - scale(bid_table)


@given(bid_lists(classes=("x", "y", "z"), forced=False))
@SOME
def test_column_generation_only_improves_the_bound(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    bid_table = built(bids, capacity)
    if bid_table is None:
        return
    dual = prices.minimise_dual(bid_table)
    feasible = table.to_plan(bid_table, [bid.job for bid in bids], {})
    assert feasible is not None
    better, plan = milp.relax(bid_table, dual, feasible, remaining_s=lambda: np.inf)
    assert better.bound <= dual.bound
    assert better.bound >= best(bids, capacity)[1] - scale(bid_table)
    assert plan is not None
    assert (np.add.reduceat(plan, bid_table.starts) == bid_table.count).all(), (
        "every job takes one option"
    )


def test_many_groups_are_priced_from_a_sample_first() -> None:
    rng = np.random.default_rng(0)
    bids = []
    for j in range(150):
        sizes = np.arange(1, 80)
        bids.append(
            Bid(
                f"j{j}",
                {
                    "default": SizeValues(
                        sizes, 50 * rng.random() * sizes**0.7 + rng.random(len(sizes))
                    )
                },
            )
        )
    bid_table = table.build(bids, {"default": 700})
    least = prices.minimise_dual(bid_table)
    for factor in (0.9, 0.99, 1.01, 1.1):
        assert prices.dual_at(bid_table, factor * least.prices).bound >= least.bound


def test_a_sample_too_large_for_its_share_does_not_hold_up_the_search() -> None:
    # Every eighth job, and only those, needs much; all of them must run and just fit.
    bids = []
    for j in range(160):
        least = 40 if j % 8 == 0 else 1
        sizes = np.arange(least, least + 3)
        bids.append(Bid(f"j{j}", {"default": SizeValues(sizes, sizes + j / 1000)}, -np.inf))
    capacity = {"default": 20 * 40 + 140 + 7}
    bid_table = table.build(bids, capacity)
    allocation = solve(bids, capacity, time_limit_s=30.0)
    assert not allocation.dropped
    assert allocation.objective == pytest.approx(dp.solve(bids, capacity).objective, rel=1e-12)
    assert prices.minimise_dual(bid_table).bound >= allocation.objective
