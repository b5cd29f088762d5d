"""Equal bids: running jobs keep their nodes, then the order of arrival decides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from allocator import Allocation, Bid, SizeValues, milp, solve
from allocator.bids import Assignment, plan_value
from tests.allocator.oracles.brute_force import check_feasible
from tests.allocator.strategies import bid_lists
from tests.draws import cases

ONE = {"x": SizeValues([1], [5.0])}
ONE_OR_TWO = {"x": SizeValues([1, 2], [5.0, 6.0])}


def bids(*offers: dict[str, SizeValues], current: dict[int, Assignment] | None = None) -> list[Bid]:
    return [Bid(f"j{i}", offer, current=(current or {}).get(i)) for i, offer in enumerate(offers)]


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("offers", [[ONE] * 9, [ONE, ONE_OR_TWO] * 5, [ONE_OR_TWO, ONE] * 5])
@pytest.mark.parametrize("dynamic_program", [True, False])
def test_equal_bids_are_served_in_order(
    classes: int, offers: list[dict[str, SizeValues]], dynamic_program: bool
) -> None:
    names = ("x", "y")[:classes]
    both = [dict.fromkeys(names, offer["x"]) for offer in offers]
    allocation = solve(
        bids(*both), dict.fromkeys(names, 4 // classes), dynamic_program=dynamic_program
    )
    assert list(allocation.sizes) == ["j0", "j1", "j2", "j3"]


def test_equal_must_run_jobs_are_dropped_from_the_end() -> None:
    offers = [Bid(f"j{i}", (ONE, ONE_OR_TWO)[i % 2], -math.inf) for i in range(6)]
    allocation = solve(offers, {"x": 4})
    assert list(allocation.sizes) == ["j0", "j1", "j2", "j3"]
    assert allocation.dropped == ("j4", "j5")


def test_with_no_time_equal_bids_are_served_in_order_too() -> None:
    allocation = solve(bids(*[ONE, ONE_OR_TWO] * 5), {"x": 4}, time_limit_s=0.0)
    assert list(allocation.sizes) == ["j0", "j1", "j2", "j3"]


def test_a_better_bid_goes_first_wherever_it_stands() -> None:
    better = {"x": SizeValues([1], [5.1])}
    assert list(solve(bids(ONE, ONE, better), {"x": 2}).sizes) == ["j0", "j2"]


@pytest.mark.parametrize("offers", [[ONE] * 6, [ONE, ONE_OR_TWO] * 3])
def test_a_running_job_keeps_its_nodes_against_an_earlier_equal_bid(
    offers: list[dict[str, SizeValues]],
) -> None:
    running = bids(*offers, current={3: ("x", 1), 4: ("x", 1)})
    assert list(solve(running, {"x": 2}).sizes) == ["j3", "j4"]
    assert list(solve(running, {"x": 3}).sizes) == ["j0", "j3", "j4"]
    assert list(solve(running, {"x": 1}).sizes) in (["j3"], ["j4"])


def test_a_place_goes_from_a_later_job_to_an_earlier_one() -> None:
    offers = bids(ONE, ONE_OR_TWO, ONE, ONE_OR_TWO)
    sizes = {"j1": ("x", 1), "j3": ("x", 1)}
    assert milp.prefer_earlier(offers, sizes) == {"j0": ("x", 1), "j1": ("x", 1)}
    # j0 cannot use the place of j1, and j2 comes after it.
    wide = bids(ONE, {"x": SizeValues([2], [5.0])}, {"x": SizeValues([2], [5.0])})
    assert milp.prefer_earlier(wide, {"j1": ("x", 2)}) == {"j1": ("x", 2)}
    assert milp.prefer_earlier(wide, {"j2": ("x", 2)}) == {"j1": ("x", 2)}


def test_a_place_that_a_running_job_keeps_goes_to_no_other() -> None:
    """Found in the week of Summit's trace: two jobs that had to stop requested one place."""
    offers = bids(ONE, ONE, ONE_OR_TWO, ONE, current={0: ("x", 1), 1: ("x", 1)})
    assert milp.prefer_earlier(offers, {"j2": ("x", 1)}) == {"j0": ("x", 1)}


@given(bid_lists(classes=("x", "y")))
@settings(max_examples=cases(300), deadline=None)
def test_the_order_costs_no_value_and_no_earlier_job_could_have_had_a_place(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    offers, capacity = problem
    allocation: Allocation = solve(offers, capacity, time_limit_s=30.0)
    check_feasible(allocation.sizes, offers, capacity)
    for i, first in enumerate(offers):
        for later in offers[i + 1 :]:
            if first.job not in allocation.sizes and later.job in allocation.sizes:
                swapped = {**allocation.sizes, first.job: allocation.sizes[later.job]}
                del swapped[later.job]
                if first.value(swapped[first.job]) is None:
                    continue
                value, dropped = plan_value(swapped, offers)
                assert len(dropped) > len(allocation.dropped) or value < allocation.objective


@given(bid_lists(classes=("x", "y"), forced=False))
@settings(max_examples=cases(150), deadline=None)
def test_what_runs_stays_where_nothing_is_better(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    offers, capacity = problem
    sizes = solve(offers, capacity, time_limit_s=30.0).sizes
    running = [replace(bid, current=sizes.get(bid.job)) for bid in offers]
    assert milp.prefer_current(running, capacity, {}) == sizes
    assert solve(running[::-1], capacity, time_limit_s=30.0).sizes == sizes
