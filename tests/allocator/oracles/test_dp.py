"""The dynamic program agrees with exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from allocator import Bid, BidError, SizeValues
from tests.allocator.oracles import dp
from tests.allocator.oracles.brute_force import best, check_feasible
from tests.allocator.strategies import bid_lists
from tests.draws import cases


@given(bid_lists())
@settings(max_examples=cases(300), deadline=None)
def test_equals_trying_everything(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    drops, objective = best(bids, capacity)
    allocation = dp.solve(bids, capacity)
    check_feasible(allocation.sizes, bids, capacity)
    assert len(allocation.dropped) == drops
    assert allocation.objective == pytest.approx(
        objective, rel=1e-12, abs=1e-12 * max(1.0, abs(objective))
    )


def test_several_classes_are_refused() -> None:
    with pytest.raises(BidError, match="one class of nodes, not 2"):
        dp.solve([Bid("a", {"x": SizeValues([1], [1.0])})], {"x": 1, "y": 1})


def test_a_size_that_is_worth_skipping_is_skipped() -> None:
    # Not concave: 4 nodes are worth more than four times one node, so one job of 4 beats greedy's
    # two of 2.
    job = SizeValues([1, 2, 4], [1.0, 2.2, 9.0])
    allocation = dp.solve([Bid("a", {"default": job}), Bid("b", {"default": job})], {"default": 5})
    assert sorted(size for _, size in allocation.sizes.values()) == [1, 4]
    assert allocation.objective == 10.0
