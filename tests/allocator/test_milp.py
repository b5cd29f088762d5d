"""The exact solver agrees with dynamic programming and exhaustive search, within its time limit."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allocator import (
    Bid,
    BidError,
    ScalingCurve,
    SizeValues,
    make_bid,
    milp,
    powers_of_two,
    reduced_problem,
    solve,
)
from allocator.highs import SolverError
from tests.allocator.oracles import dp
from tests.allocator.oracles.brute_force import best, check_feasible
from tests.allocator.strategies import bid_lists
from tests.draws import cases

pytestmark = pytest.mark.slow

QUICK = settings(
    max_examples=cases(1500),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SOME = settings(
    max_examples=cases(200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def unit_of(bids: list[Bid]) -> float:
    """What a difference in the last digits is measured against."""
    return max(
        [
            1e-300,
            *(
                float(np.abs(o.values).max())
                for b in bids
                for o in b.options.values()
                if len(o.values)
            ),
        ]
    )


def assert_best(
    bids: list[Bid], capacity: dict[str, int], drops: int, objective: float, **how: object
) -> None:
    allocation = solve(bids, capacity, time_limit_s=30.0, **how)  # type: ignore[arg-type]
    check_feasible(allocation.sizes, bids, capacity)
    assert allocation.status == "optimal"
    assert allocation.gap == 0.0
    assert len(allocation.dropped) == drops
    assert allocation.objective == pytest.approx(objective, rel=1e-10, abs=1e-10 * unit_of(bids))
    assert allocation.bound == allocation.objective


@given(bid_lists())
@QUICK
def test_one_class_equals_the_dynamic_program(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    oracle = dp.solve(bids, capacity)
    assert_best(bids, capacity, len(oracle.dropped), oracle.objective)


@given(bid_lists())
@SOME
def test_one_class_in_highs_alone_equals_the_dynamic_program(
    problem: tuple[list[Bid], dict[str, int]],
) -> None:
    bids, capacity = problem
    oracle = dp.solve(bids, capacity)
    assert_best(bids, capacity, len(oracle.dropped), oracle.objective, dynamic_program=False)


@given(bid_lists(classes=("cpu", "gpu")))
@SOME
def test_two_classes_equal_trying_everything(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    drops, objective = best(bids, capacity)
    assert_best(bids, capacity, drops, objective)


@given(bid_lists(classes=("a", "b", "c")))
@settings(parent=SOME, max_examples=cases(60))
def test_three_classes_equal_trying_everything(problem: tuple[list[Bid], dict[str, int]]) -> None:
    bids, capacity = problem
    drops, objective = best(bids, capacity)
    assert_best(bids, capacity, drops, objective, dynamic_program=False)


@given(bid_lists(classes=("cpu", "gpu")), st.randoms(use_true_random=False))
@SOME
def test_a_plan_as_good_as_any_stays_while_it_fits(
    problem: tuple[list[Bid], dict[str, int]], chance: random.Random
) -> None:
    bids, capacity = problem
    first = solve(bids, capacity, time_limit_s=30.0)
    running = [replace(bid, current=first.sizes.get(bid.job)) for bid in bids]
    chance.shuffle(running)
    assert solve(running, capacity, time_limit_s=30.0).sizes == first.sizes
    less = {name: max(0, nodes - chance.randint(0, 4)) for name, nodes in capacity.items()}
    drops, objective = best(bids, less)
    assert_best(running, less, drops, objective)


def sweep(
    seed: int, jobs: int, largest: int, nodes: int, *, same: bool, running: bool = True
) -> list[Bid]:
    """Jobs with random curves (or all one curve), most of them running."""
    rng = np.random.default_rng(seed)
    knots = [1 << p for p in range(largest.bit_length())]

    def curve() -> ScalingCurve:
        noise = np.exp(rng.normal(0.0, 0.08, len(knots)))
        return ScalingCurve(
            tuple((k, float(1000.0 * k**0.9 * x)) for k, x in zip(knots, noise, strict=True))
        )

    one, free, bids = curve(), nodes, []
    for j in range(jobs):
        now = min(free, int(rng.integers(0, max(2, 2 * nodes // jobs)))) if running else 0
        free -= now
        bids.append(make_bid(f"j{j}", one if same else curve(), current=now, max_nodes=largest))
    return bids


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("dynamic_program", [True, False])
@pytest.mark.parametrize("nodes", [47, 300, 611])
def test_larger_machines_equal_the_dynamic_program(
    same: bool, dynamic_program: bool, nodes: int
) -> None:
    bids = sweep(nodes, 120, 32, nodes, same=same)
    oracle = dp.solve(bids, {"default": nodes})
    assert_best(bids, {"default": nodes}, 0, oracle.objective, dynamic_program=dynamic_program)


@pytest.mark.parametrize("nodes", [500, 1003, 4999])
def test_hundreds_of_alike_jobs_are_one_group(nodes: int) -> None:
    curve = ScalingCurve.of({1: 10.0, 2: 19.0, 4: 30.0, 8: 71.0, 16: 100.0})
    bids = [
        make_bid(f"j{i:03}", curve, max_nodes=16, allowed=powers_of_two(16)) for i in range(400)
    ]
    allocation = solve(bids, {"default": nodes}, time_limit_s=30.0)
    assert allocation.status == "optimal"
    assert allocation.objective == pytest.approx(
        dp.solve(bids, {"default": nodes}).objective, rel=1e-12
    )


def test_with_no_time_a_good_feasible_plan_and_a_true_gap() -> None:
    bids = sweep(3, 80, 64, 700, same=False)
    best_value = dp.solve(bids, {"default": 700}).objective
    allocation = solve(bids, {"default": 700}, time_limit_s=0.0)
    check_feasible(allocation.sizes, bids, {"default": 700})
    assert allocation.status == "time_limit"
    assert allocation.objective <= best_value <= allocation.bound * (1 + 1e-12)
    assert allocation.gap == pytest.approx(
        (allocation.bound - allocation.objective) / allocation.objective
    )
    assert allocation.objective > 0.9 * best_value


def test_with_no_time_and_two_classes_every_must_run_job_still_has_its_nodes() -> None:
    rng = np.random.default_rng(5)
    bids = []
    for j in range(40):
        sizes = np.arange(2, 20)
        options = {c: SizeValues(sizes, rng.random(len(sizes)) * sizes) for c in ("a", "b")}
        bids.append(Bid(f"j{j}", options, -math.inf if j % 2 else 0.0))
    allocation = solve(bids, {"a": 25, "b": 20}, time_limit_s=0.0)
    check_feasible(allocation.sizes, bids, {"a": 25, "b": 20})
    assert not allocation.dropped
    assert allocation.bound >= solve(bids, {"a": 25, "b": 20}, time_limit_s=30.0).objective


@pytest.mark.parametrize("classes", [1, 2])
def test_a_solver_that_fails_costs_the_proof_and_not_the_plan(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise SolverError("HiGHS ended with status Unknown.")

    rng = np.random.default_rng(2)
    capacity = {f"c{i}": 31 for i in range(classes)}
    bids = []
    for j in range(12):
        sizes = np.arange(1, 12)
        bids.append(
            Bid(f"j{j}", {name: SizeValues(sizes, rng.random(11) * sizes) for name in capacity})
        )
    right = solve(bids, capacity, time_limit_s=30.0)
    assert right.status == "optimal"
    for module in (reduced_problem, milp):
        monkeypatch.setattr(module, "maximise", fails)
    allocation = solve(bids, capacity, time_limit_s=30.0, dynamic_program=False)
    check_feasible(allocation.sizes, bids, capacity)
    assert allocation.sizes
    assert allocation.objective <= right.objective <= allocation.bound
    assert allocation.status == "time_limit"
    assert allocation.gap > 0


def test_a_gap_that_is_good_enough_is_kept() -> None:
    bids = sweep(4, 60, 64, 500, same=False)
    allocation = solve(bids, {"default": 500}, gap=0.05, time_limit_s=30.0)
    assert allocation.status == "optimal"
    assert allocation.gap <= 0.05
    assert allocation.bound >= dp.solve(bids, {"default": 500}).objective * (1 - 1e-12)


def test_values_may_have_any_unit() -> None:
    bids = sweep(6, 30, 32, 200, same=False)
    objective = dp.solve(bids, {"default": 200}).objective
    for unit in (1e-12, 1e12):
        scaled = [
            Bid(
                b.job,
                {c: SizeValues(o.sizes, o.values * unit) for c, o in b.options.items()},
                b.idle_value * unit,
            )
            for b in bids
        ]
        for dynamic_program in (True, False):
            assert_best(
                scaled, {"default": 200}, 0, objective * unit, dynamic_program=dynamic_program
            )


def test_as_few_must_run_jobs_as_possible_are_dropped_and_the_least_valuable_of_those() -> None:
    def job(name: str, size: int, value: float) -> Bid:
        return Bid(name, {"default": SizeValues([size], [value])}, -math.inf)

    # 10 nodes: two of the 5s fit, or one 6 and nothing else; two is more, and the better two win.
    allocation = solve(
        [job("a", 5, 1.0), job("b", 5, 3.0), job("c", 5, 2.0), job("d", 6, 100.0)],
        {"default": 10},
        time_limit_s=30.0,
    )
    assert set(allocation.sizes) == {"b", "c"}
    assert allocation.dropped == ("a", "d")
    assert allocation.objective == 5.0
    assert allocation.status == "optimal"


def test_must_run_jobs_win_over_any_value() -> None:
    rich = Bid("rich", {"default": SizeValues([4], [1e9])})
    poor = Bid("poor", {"default": SizeValues([1, 4], [-5.0, -1.0])}, -math.inf)
    allocation = solve([rich, poor], {"default": 4}, time_limit_s=30.0)
    assert allocation.sizes == {"poor": ("default", 4)}
    assert allocation.objective == -1.0


def test_a_must_run_job_that_fits_nowhere_takes_no_room_from_others() -> None:
    huge = Bid("huge", {"default": SizeValues([50], [9.0])}, -math.inf)
    allocation = solve(
        [huge, Bid("small", {"default": SizeValues([1, 2], [1.0, 2.0])})],
        {"default": 8},
        time_limit_s=30.0,
    )
    assert allocation.sizes == {"small": ("default", 2)}
    assert allocation.dropped == ("huge",)


def test_where_two_sizes_are_worth_the_same_the_smaller_wins() -> None:
    allocation = solve(
        [Bid("a", {"default": SizeValues([2, 3, 7], [5.0, 5.0, 5.0])})],
        {"default": 8},
        time_limit_s=30.0,
    )
    assert allocation.sizes == {"a": ("default", 2)}


def test_alike_jobs_keep_what_they_have() -> None:
    equal_bids = [Bid(name, {"default": SizeValues([1, 4], [1.0, 4.0])}) for name in "abc"]
    first = solve(equal_bids, {"default": 5}, time_limit_s=30.0).sizes
    assert first == {"a": ("default", 4), "b": ("default", 1)}
    running = [replace(bid, current=first.get(bid.job)) for bid in equal_bids]

    def sizes(nodes: int) -> dict[str, tuple[str, int]]:
        return solve(running[::-1], {"default": nodes}, time_limit_s=30.0).sizes

    assert sizes(5) == first
    assert sizes(1) == {"b": ("default", 1)}, "it has it already"
    assert sizes(2).keys() == {"a", "b"}, "who runs goes on"


class MonotonicClock:
    """Time that passes at every look."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s, self.looks = 100.0, step_s, 0

    def __call__(self) -> float:
        self.now += self.step_s
        self.looks += 1
        return self.now


@pytest.mark.parametrize("classes", [1, 2])
def test_the_time_limit_is_kept_on_the_callers_clock(classes: int) -> None:
    bids = sweep(3, 80, 64, 700, same=False)
    capacity = {"default": 700}
    if classes == 2:
        bids = [Bid(b.job, {"x": b.options["default"], "y": b.options["default"]}) for b in bids]
        capacity = {"x": 350, "y": 350}
    slow = MonotonicClock(2.5)
    allocation = solve(bids, capacity, clock=slow, time_limit_s=2.0)
    assert allocation.status == "time_limit"
    assert allocation.gap > 0
    assert allocation.solve_s == pytest.approx(2.5 * (slow.looks - 1))
    assert slow.looks <= 4, "when time is up nobody goes on"
    quick = MonotonicClock(1e-6)
    allocation = solve(bids, capacity, clock=quick, time_limit_s=30.0)
    assert (allocation.status, allocation.gap) == ("optimal", 0.0)
    assert 0 < allocation.solve_s < 1.0


def test_without_a_clock_the_best_plan_is_proven() -> None:
    allocation = solve(sweep(3, 80, 64, 700, same=False), {"default": 700}, time_limit_s=30.0)
    assert (allocation.status, allocation.gap, allocation.solve_s) == ("optimal", 0.0, 0.0)


@pytest.mark.parametrize(
    ("bids", "capacity"),
    [
        ([], {"default": 5}),
        ([], {}),
        ([Bid("a", {"default": SizeValues([1], [1.0])})], {}),
        ([Bid("a", {"default": SizeValues([1], [1.0])})], {"default": 0}),
        ([Bid("a", {"default": SizeValues([6], [1.0])})], {"default": 5}),
        ([Bid("a", {"gpu": SizeValues([1], [1.0])})], {"default": 5}),
        ([Bid("a", {})], {"default": 5}),
        ([Bid("a", {"default": SizeValues([], [])})], {"default": 5}),
        ([Bid("a", {"default": SizeValues([1, 2], [-1.0, 0.0])})], {"default": 5}),
    ],
)
def test_where_there_is_nothing_to_win_the_plan_is_empty(
    bids: list[Bid], capacity: dict[str, int]
) -> None:
    allocation = solve(bids, capacity, time_limit_s=30.0)
    assert allocation.sizes == {}
    assert (allocation.objective, allocation.gap, allocation.status) == (0.0, 0.0, "optimal")


def test_a_job_that_bids_twice_is_refused() -> None:
    bid = Bid("a", {"default": SizeValues([1], [1.0])})
    with pytest.raises(BidError, match="Job a bids twice"):
        solve([bid, bid], {"default": 3})


@pytest.mark.parametrize("nodes", [-1, 2.5, True, "3"])
def test_a_capacity_that_is_no_count_is_refused(nodes: object) -> None:
    with pytest.raises(BidError, match="whole number"):
        solve([Bid("a", {"default": SizeValues([1], [1.0])})], {"default": nodes})  # type: ignore[dict-item]
