"""The layouts of a node that are tried, and the search for the fastest: tables, and simulated
searches with known answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpa.layout import (
    FAILED,
    MAX_CANDIDATES,
    Arm,
    BatchMeans,
    LayoutRequest,
    LayoutSearch,
    NodeLayout,
    SearchConfig,
    Spread,
    candidates,
    default_layout,
    difference,
)

ALL = LayoutRequest(tunes_processes=True, tunes_threads=True, tunes_loaders=True)
PROCESSES = LayoutRequest(tunes_processes=True)
LOADERS = LayoutRequest(tunes_loaders=True)


def numbers(layouts):
    return [(x.processes, x.threads, x.loader_workers) for x in layouts]


@pytest.mark.parametrize(
    ("cores", "gpus", "request_", "expected"),
    [
        (1, 0, PROCESSES, [(1, 1, 0)]),
        (2, 0, PROCESSES, [(1, 2, 0), (2, 1, 0)]),
        (6, 0, PROCESSES, [(1, 6, 0), (2, 3, 0), (4, 1, 0), (6, 1, 0)]),
        (64, 0, PROCESSES, [(n, 64 // n, 0) for n in (1, 2, 4, 8, 16)]),
        # One process for each GPU, whatever is asked for.
        (16, 4, PROCESSES, [(4, 4, 0)]),
        (2, 0, LOADERS, [(1, 2, 0), (1, 2, 2), (1, 2, 1)]),
        (16, 4, LOADERS, [(4, 4, 0), (4, 4, 2), (4, 4, 1), (4, 4, 4)]),
        (4, 0, LayoutRequest(tunes_threads=True), [(1, 4, 0), (1, 1, 0), (1, 2, 0)]),
        # What the user has fixed stays.
        (8, 0, LayoutRequest(processes=2, threads=3, tunes_loaders=True),
         [(2, 3, 0), (2, 3, 2), (2, 3, 1), (2, 3, 4)]),
        (8, 0, LayoutRequest(threads=2, loader_workers=1, tunes_processes=True),
         [(1, 2, 1), (2, 2, 1), (4, 2, 1), (8, 2, 1)]),
        (2, 0, ALL, [(1, 2, 0), (2, 1, 0), (1, 2, 2), (1, 2, 1), (1, 1, 0), (2, 1, 1),
                     (1, 1, 2), (1, 1, 1)]),
    ],
)  # fmt: skip
def test_candidates(cores, gpus, request_, expected):
    assert numbers(candidates(cores, gpus, request_)) == expected


def test_the_layout_of_a_job_that_asks_for_nothing():
    assert numbers([default_layout(16, 0, LayoutRequest())]) == [(1, 16, 0)]
    assert numbers([default_layout(16, 4, LayoutRequest())]) == [(4, 4, 0)]
    assert numbers([default_layout(3, 0, LayoutRequest(processes=8))]) == [(8, 1, 0)]
    assert str(NodeLayout(1, 2)) == "1 process × 2 threads"
    assert str(NodeLayout(4, 1, 2)) == "4 processes × 1 thread × 2 loader workers"


@given(
    st.integers(1, 256),
    st.integers(0, 16),
    st.builds(
        LayoutRequest,
        st.integers(0, 64),
        st.integers(0, 64),
        st.integers(0, 8),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
)
def test_candidates_are_few_different_and_begin_with_the_default(cores, gpus, request_):
    layouts = candidates(cores, gpus, request_)
    default = default_layout(cores, gpus, request_)
    assert layouts[0] == default
    assert len(layouts) == len(set(layouts)) <= MAX_CANDIDATES
    for layout in layouts:
        assert layout.threads >= 1
        assert gpus == 0 or layout.processes == default.processes
        if not request_.tunes_processes:
            assert layout.processes == default.processes
        if request_.threads and not request_.tunes_threads:
            assert layout.threads == request_.threads
        if not request_.threads and layout != default:
            assert layout.processes * layout.threads <= max(cores, default.processes)


def test_batch_means_drop_the_warm_up_and_end_with_reports():
    means = BatchMeans(batch_s=1.0, warmup_s=1.0)
    reports = [(0.0, 0), (0.5, 10), (1.0, 20), (1.5, 70), (2.0, 120), (2.9, 120), (3.0, 170)]
    assert [means.feed(t, n, 0.0) for t, n in reports] == [
        *(None, None, None, None),
        100.0,  # from 1.0 to 2.0: (120 - 20) samples in 1 s
        None,
        50.0,
    ]
    # Batches have at least three steps.
    slow = BatchMeans(batch_s=1.0, warmup_s=1.0)
    rates = [slow.feed(float(t), 8.0 * t, 1.0) for t in range(9)]
    assert rates == [None, None, None, None, None, 8.0, None, None, 8.0]


def test_the_interval_of_a_difference_is_welchs():
    # Known answer, by scipy.stats.ttest_ind_from_stats(equal_var=False) and t.ppf(0.995, df):
    # means 10 and 12, sample deviations 1 and 2, 5 and 10 batches: df = 12.96, t = 3.055 for 12.
    a, b = Arm(NodeLayout(1, 1), 5, 10.0, 4.0), Arm(NodeLayout(2, 1), 10, 12.0, 36.0)
    low, high = difference(a, b, 0.0)
    half = 3.055 * (1 / 5 + 4 / 10) ** 0.5
    assert (low, high) == pytest.approx((-2 - half, -2 + half))
    assert difference(Arm(NodeLayout(1, 1), 1, 5.0), b, 0.0) == (-float("inf"), float("inf"))


def test_the_deviation_of_a_batch_is_pooled_over_layouts():
    """The squared relative deviations are 4 / 10² and 36 / 12², with 4 + 9 degrees of freedom; a
    layout with one batch, or without throughput, adds nothing. Student's t at 13 is 3.012.
    """
    a, b = Arm(NodeLayout(1, 1), 5, 10.0, 4.0), Arm(NodeLayout(2, 1), 10, 12.0, 36.0)
    others = [Arm(NodeLayout(3, 1), 1, 7.0), Arm(NodeLayout(4, 1), 8, 0.0)]
    spread = Spread.of([a, b, *others])
    assert spread is not None
    assert spread.degrees == 13
    assert spread.deviation == pytest.approx(((0.04 + 0.25) / 13) ** 0.5)
    half = 3.012 * spread.deviation * (10**2 / 5 + 12**2 / 10) ** 0.5
    assert difference(a, b, 0.0, spread) == pytest.approx((-2 - half, -2 + half))
    half = 3.012 * spread.deviation * 7.0
    assert others[0].half_width(0.0, spread) == pytest.approx(half), "one batch has an interval"
    assert others[0].half_width(0.0) == float("inf")
    assert Spread.of(others[:1]) is None
    assert difference(a, b, 0.5, spread) == difference(a, b, 0.0, Spread(0.5, 13))


def test_a_layout_with_two_batches_is_judged_by_the_noise_of_all():
    """On its own, two batches have Student's t of one degree of freedom, 63.7."""
    search = LayoutSearch.of(
        [NodeLayout(1, 1), NodeLayout(2, 1)], SearchConfig(min_batches=2, visit_s=0.0)
    )
    for rate in (100.0, 102.0, 60.0, 61.0):
        search = search.measured(rate, 1)
    assert [arm.out for arm in search.arms] == ["", "slower"]
    alone = LayoutSearch.of(
        [NodeLayout(1, 1), NodeLayout(2, 1)],
        SearchConfig(min_batches=2, visit_s=0.0, pooled=False),
    )
    for rate in (100.0, 102.0, 60.0, 61.0):
        alone = alone.measured(rate, 1)
    assert [arm.out for arm in alone.arms] == ["", ""]


@pytest.mark.parametrize(("batch_s", "batches"), [(0.5, 6), (1.2, 3), (5.0, 3)])
def test_a_visit_lasts_some_seconds_and_some_batches(batch_s, batches):
    """2.2 s from the first to the last batch, and at least three."""
    search = LayoutSearch.of([NodeLayout(1, 1), NodeLayout(2, 1)])
    search = search.spent(3.0)
    count = 0
    while search.current == 0:
        search = search.spent(batch_s).measured(100.0 + count % 2, 1)
        count += 1
    assert count == batches


SWITCH_S, BATCH_S = 2.5, 0.5


def simulate(
    rates: dict[NodeLayout, float],
    seed: int,
    noise: float = 0.05,
    max_seconds: float = 60.0,
    fails: Callable[[NodeLayout], bool] = lambda layout: False,
) -> LayoutSearch:
    """Search among layouts of known throughput. Each change of the layout costs SWITCH_S."""
    random_ = random.Random(seed)
    search = LayoutSearch.of(rates, SearchConfig(max_seconds=max_seconds))
    layout = search.layout
    while search.outcome is None:
        if fails(search.layout):
            search = search.failed().spent(SWITCH_S)
            continue
        search = search.measured(rates[layout] * random_.gauss(1.0, noise), 1).spent(BATCH_S)
        if search.layout != layout:
            layout = search.layout
            search = search.spent(SWITCH_S)
    return search


def some_rates(seed: int, arms: int) -> dict[NodeLayout, float]:
    random_ = random.Random(1000 + seed)
    return {NodeLayout(n + 1, 1): random_.uniform(50.0, 100.0) for n in range(arms)}


@pytest.mark.parametrize(("arms", "noise"), [(8, 0.02), (8, 0.05), (5, 0.08), (12, 0.03)])
def test_the_search_finds_a_layout_within_5_percent_of_the_best(arms, noise):
    searches = 300
    good = in_time = 0
    for seed in range(searches):
        rates = some_rates(seed, arms)
        search = simulate(rates, seed, noise)
        assert search.outcome is not None
        good += rates[search.outcome.layout] >= 0.95 * max(rates.values())
        in_time += search.seconds <= 60.0 + SWITCH_S
    assert good >= 0.95 * searches
    assert in_time == searches


def test_a_result_holds_for_other_jobs_if_all_is_measured_or_the_default_is_beaten():
    slow = {NodeLayout(n, 1): 40.0 for n in range(1, 9)}
    assert simulate(slow, 1).is_conclusive
    assert not simulate(slow, 1, max_seconds=15.0).is_conclusive
    assert simulate({**slow, NodeLayout(2, 1): 80.0}, 1, max_seconds=15.0).is_conclusive
    assert not LayoutSearch.of(slow).is_conclusive
    assert not LayoutSearch.of(slow).ended("It saves nothing.").is_conclusive


def test_with_equal_layouts_the_default_stays():
    """Each of the seven others can seem faster with a probability of 2.5 %."""
    rates = {NodeLayout(n, 1): 100.0 for n in range(1, 9)}
    chosen = [simulate(rates, seed).layout for seed in range(200)]
    assert chosen.count(NodeLayout(1, 1)) >= (1 - 7 * 0.025) * 200


def test_a_fast_default_is_never_given_up_for_a_slower_layout():
    rates = {NodeLayout(n, 1): 100.0 if n == 1 else 90.0 for n in range(1, 9)}
    assert {simulate(rates, seed).layout for seed in range(200)} == {NodeLayout(1, 1)}


def test_the_search_ends_when_its_time_is_over_with_what_it_knows():
    rates = {
        NodeLayout(1, 1): 50.0,
        NodeLayout(2, 1): 100.0,
        **{NodeLayout(n, 1): 40.0 for n in range(3, 13)},
    }
    search = simulate(rates, 1, max_seconds=15.0)
    assert search.outcome is not None
    assert search.outcome.layout == NodeLayout(2, 1)
    assert "the time of the search was over" in search.outcome.reason
    assert search.seconds <= 15.0 + SWITCH_S
    # Not even the default is measured: it stays.
    assert simulate(rates, 1, max_seconds=0.5).layout == NodeLayout(1, 1)


def test_a_layout_whose_processes_fail_is_dropped():
    rates = {NodeLayout(1, 1): 50.0, NodeLayout(2, 1): 200.0, NodeLayout(4, 1): 100.0}
    search = simulate(rates, 1, fails=lambda layout: layout.processes == 2)
    assert search.layout == NodeLayout(4, 1)
    assert [arm.out for arm in search.arms][1] == FAILED
    only = LayoutSearch.of([NodeLayout(1, 1)])
    assert only.failed() is only


def test_at_another_scale_the_search_goes_on_with_those_that_were_in():
    search = LayoutSearch.of([NodeLayout(1, 2), NodeLayout(2, 1), NodeLayout(1, 1)])
    rates = {NodeLayout(1, 2): 100.0, NodeLayout(2, 1): 60.0, NodeLayout(1, 1): 100.0}
    for step in range(10):
        search = search.measured(rates[search.layout] * (1 + 0.001 * (step % 2)), 2)
        search = search.spent(0.5)
    assert [arm.out for arm in search.arms] == ["", "slower", ""]
    before = search.current
    search = search.measured(55.0, 1)
    assert search.nodes == 1
    assert search.current == before
    assert [arm.out for arm in search.arms] == ["", "slower", ""]
    assert [arm.count for arm in search.arms] == [0, 0, 1]
    assert search.arms[before].mean == 55.0


def test_one_layout_needs_no_restart_and_ends_as_the_default():
    search = LayoutSearch.of([NodeLayout(1, 1)])
    while search.outcome is None:
        search = search.measured(10.0, 1).spent(0.5)
    assert search.default.count == 6
    assert search.outcome is not None
    assert search.layout == NodeLayout(1, 1)
    assert search.measured(10.0, 1) is search
    assert search.spent(5.0) is search


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 60))
def test_a_search_is_stored_and_read_at_any_moment(seed, arms, batches):
    random_ = random.Random(seed)
    search = LayoutSearch.of(some_rates(seed, arms), SearchConfig(max_seconds=30.0))
    for _ in range(batches):
        search = search.measured(random_.uniform(1.0, 100.0), random_.choice((1, 1, 1, 2)))
        search = search.spent(0.5)
    again = LayoutSearch.from_dict(json.loads(json.dumps(search.to_dict())))
    assert again == search
    assert again.layout in {arm.layout for arm in search.arms}


@pytest.mark.parametrize(
    "change",
    [{"current": 3}, {"arms": []}, {"arms": [[0, 1, 0, 0, 0.0, 0.0, ""]]}, {"outcome": [1, 1]}],
)
def test_data_that_are_not_a_search_are_refused(change):
    data = {**LayoutSearch.of([NodeLayout(1, 1)]).to_dict(), **change}
    with pytest.raises((KeyError, TypeError, ValueError, IndexError)):
        LayoutSearch.from_dict(data)
