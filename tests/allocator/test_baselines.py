"""Equal share, and first come, first served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from allocator import Bid, SizeValues, equal_share, fcfs, solve
from tests.allocator.oracles.brute_force import check_feasible
from tests.allocator.strategies import bid_lists
from tests.draws import cases


def job(name: str, sizes: list[int], **classes: list[int]) -> Bid:
    return Bid(name, {"default": SizeValues(sizes, [float(k) for k in sizes])})


@pytest.mark.parametrize(
    ("limits", "nodes", "expected"),
    [
        ([(1, 8), (1, 8), (1, 8)], 9, [3, 3, 3]),
        ([(1, 8), (1, 8), (1, 8)], 10, [4, 3, 3]),
        ([(1, 2), (1, 8), (1, 8)], 10, [2, 4, 4]),
        ([(4, 8), (1, 8), (1, 8)], 6, [4, 1, 1]),
        ([(4, 8), (4, 8), (1, 8)], 6, [4, 0, 2]),
        ([(1, 2), (1, 2)], 100, [2, 2]),
        ([(1, 2)], 0, [0]),
    ],
)
def test_equal_share(limits: list[tuple[int, int]], nodes: int, expected: list[int]) -> None:
    bids = [job(f"j{i}", list(range(low, high + 1))) for i, (low, high) in enumerate(limits)]
    allocation = equal_share(bids, {"default": nodes})
    assert [allocation.size(bid.job) for bid in bids] == expected


def test_equal_share_keeps_to_allowed_sizes() -> None:
    bids = [job("a", [1, 2, 4, 8]), job("b", [1, 2, 4, 8])]
    assert [equal_share(bids, {"default": 11}).size(name) for name in "ab"] == [4, 4]
    assert [equal_share(bids, {"default": 12}).size(name) for name in "ab"] == [8, 4]


def test_equal_share_spreads_jobs_over_classes() -> None:
    options = SizeValues([1, 2, 3], [1.0, 2.0, 3.0])
    bids = [Bid(f"j{i}", {"x": options, "y": options}) for i in range(3)]
    allocation = equal_share(bids, {"x": 4, "y": 2})
    assert allocation.sizes == {"j0": ("x", 2), "j1": ("x", 2), "j2": ("y", 2)}


@pytest.mark.parametrize(
    ("nodes", "expected"), [(20, [8, 8, 4]), (9, [8, 1, 0]), (3, [3, 0, 0]), (0, [0, 0, 0])]
)
def test_first_come_first_served(nodes: int, expected: list[int]) -> None:
    bids = [job(f"j{i}", list(range(1, 9))) for i in range(3)]
    allocation = fcfs(bids, {"default": nodes})
    assert [allocation.size(bid.job) for bid in bids] == expected


def test_first_come_first_served_lets_a_smaller_job_pass_one_that_does_not_fit() -> None:
    allocation = fcfs([job("large", [8]), job("small", [2])], {"default": 4})
    assert allocation.sizes == {"small": ("default", 2)}


@given(bid_lists(classes=("x", "y"), forced=False))
@settings(max_examples=cases(200), deadline=None)
def test_they_are_feasible_and_never_better_than_the_optimum(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    best = solve(bids, capacity, time_limit_s=30.0)
    for policy in (equal_share, fcfs):
        allocation = policy(bids, capacity)
        check_feasible(allocation.sizes, bids, capacity)
        assert allocation.objective <= best.objective + 1e-9 * max(1.0, abs(best.objective))
        assert allocation.objective <= allocation.bound
        assert allocation.status == "heuristic"
