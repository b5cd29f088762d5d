"""How many must-run jobs fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from allocator import Bid, SizeValues, milp
from tests.allocator.oracles.brute_force import best, check_feasible
from tests.allocator.strategies import bid_lists
from tests.draws import cases


def must(name: str, **smallest: int) -> Bid:
    return Bid(
        name, {c: SizeValues([k, k + 1], [1.0, 2.0]) for c, k in smallest.items()}, -math.inf
    )


@given(bid_lists(classes=("x", "y")))
@settings(max_examples=cases(200), deadline=None)
def test_as_few_are_dropped_as_possible(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    drops, placed = milp.fewest_drops(bids, capacity, time_limit_s=30.0)
    check_feasible(placed, bids, capacity)
    fits = {
        b.job
        for b in bids
        if b.must_run
        and any(len(o.sizes) and o.sizes[0] <= capacity.get(c, 0) for c, o in b.options.items())
    }
    assert drops == len(fits) - len(placed)
    never = sum(b.must_run for b in bids) - len(fits)
    assert drops + never == best(bids, capacity)[0]


@pytest.mark.parametrize(
    ("bids", "capacity", "drops"),
    [
        ([must("a", x=3), must("b", x=3)], {"x": 6}, 0),
        ([must("a", x=3), must("b", x=3)], {"x": 5}, 1),
        # Only an exchange seats both: a can go nowhere else, b can.
        ([must("b", x=2, y=4), must("a", x=2)], {"x": 2, "y": 4}, 0),
        # Smallest first is wrong over two classes: 3+3 on x, 5 on y, or 5 on x and only 3 on y.
        ([must("a", x=5, y=5), must("b", x=3), must("c", x=3)], {"x": 6, "y": 5}, 0),
        ([], {"x": 1}, 0),
        ([must("a", x=3)], {}, 0),
    ],
)
def test_room_by_hand(bids: list[Bid], capacity: dict[str, int], drops: int) -> None:
    assert milp.fewest_drops(bids, capacity, time_limit_s=30.0)[0] == drops
