"""Conversion of bids and plans to arrays and back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings

from allocator import Bid, SizeValues, solve, table
from tests.allocator.strategies import bid_lists
from tests.draws import cases


@given(bid_lists(classes=("x", "y")))
@settings(max_examples=cases(200), deadline=None)
def test_sizes_survive_the_way_there_and_back(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    allocation = solve(bids, capacity, time_limit_s=30.0)
    bid_table = table.build(bids, capacity, drops=len(allocation.dropped))
    jobs = [bid.job for bid in bids]
    plan = table.to_plan(bid_table, jobs, allocation.sizes)
    assert plan is not None
    running = [replace(bid, current=allocation.sizes.get(bid.job)) for bid in bids]
    assert table.to_sizes(bid_table, plan, running) == allocation.sizes
    if len(bid_table.capacity):
        use = dict(zip(bid_table.pools, bid_table.usage(plan), strict=False))
        for name, nodes in use.items():
            assert nodes == sum(size for c, size in allocation.sizes.values() if c == name)


def test_alike_bids_are_one_group_whatever_object_they_are() -> None:
    bids = [Bid(f"j{i}", {"default": SizeValues([1, 2], [1.0, 2.0])}) for i in range(5)]
    bids.append(Bid("other", {"default": SizeValues([1, 2], [1.0, 2.5])}))
    bids.append(Bid("idle", {"default": SizeValues([1, 2], [1.0, 2.0])}, idle_value=-1.0))
    bid_table = table.build(bids, {"default": 4})
    assert bid_table.members == ((0, 1, 2, 3, 4), (5,), (6,))
    assert bid_table.count.tolist() == [5.0, 1.0, 1.0]
    assert bid_table.size.tolist() == [0, 1, 2] * 3


def test_what_cannot_be_used_is_left_out() -> None:
    options = {
        "x": SizeValues([1, 5, 9], [1.0, 2.0, 3.0]),
        "y": SizeValues([2], [9.0]),
        "gone": SizeValues([1], [5.0]),
    }
    bid_table = table.build([Bid("a", options)], {"x": 5, "y": 0})
    assert bid_table.pools == ("x",)
    assert bid_table.size.tolist() == [0, 1, 5]
    assert bid_table.resource.tolist() == [table.IDLE, 0, 0]


def test_a_must_run_job_has_no_idle_row_but_may_use_a_drop() -> None:
    bid = Bid("a", {"default": SizeValues([3], [7.0])}, -math.inf)
    assert table.build([bid], {"default": 5}).size.tolist() == [3]
    dropping = table.build([bid], {"default": 5}, drops=1)
    assert dropping.size.tolist() == [1, 3]
    assert dropping.resource.tolist() == [1, 0]
    assert dropping.capacity.tolist() == [5.0, 1.0]
    assert table.build([bid], {"default": 2}).size.tolist() == [0], (
        "one that fits nowhere is idle for nothing"
    )
    assert table.to_plan(table.build([bid], {"default": 5}), ["a"], {}) is None


def test_fits_counts_members_and_nodes() -> None:
    bid_table = table.build(
        [Bid(n, {"default": SizeValues([2], [1.0])}) for n in "ab"], {"default": 3}
    )
    assert bid_table.fits(np.array([1, 1]))
    assert not bid_table.fits(np.array([0, 2])), "4 of 3 nodes"
    assert not bid_table.fits(np.array([1, 0])), "one job is nowhere"


def test_the_seats_of_alike_jobs_go_out_in_order_the_best_one_first() -> None:
    bids = [Bid(f"j{i}", {"x": SizeValues([1, 2], [1.0, 2.0])}) for i in range(6)]
    bid_table = table.build(bids, {"x": 5})
    assert bid_table.size.tolist() == [0, 1, 2]
    assert table.to_sizes(bid_table, np.array([3, 1, 2]), bids) == {
        "j0": ("x", 2),
        "j1": ("x", 2),
        "j2": ("x", 1),
    }


def test_alike_jobs_keep_their_nodes_against_those_that_came_before() -> None:
    current = [None, ("x", 1), None, ("x", 2), ("x", 2)]
    bids = [
        Bid(f"j{i}", {"x": SizeValues([1, 2], [1.0, 2.0])}, current=size)
        for i, size in enumerate(current)
    ]
    bid_table = table.build(bids, {"x": 9})
    assert table.to_sizes(bid_table, np.array([2, 1, 2]), bids) == {
        "j1": ("x", 1),
        "j3": ("x", 2),
        "j4": ("x", 2),
    }
    # With one node less, the job that has to shrink still goes before those that wait.
    assert table.to_sizes(bid_table, np.array([2, 2, 1]), bids) == {
        "j1": ("x", 1),
        "j3": ("x", 2),
        "j4": ("x", 1),
    }
