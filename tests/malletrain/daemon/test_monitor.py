"""The monitor: totals that never lie, throughput that a stall lowers and a hiccup does not."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jpa.measure import MeasureConfig, ThroughputMeter
from malletrain.daemon.jobs.monitor import KEPT_ROUNDS, WINDOW_S
from tests.draws import cases
from tests.malletrain.daemon.worker_counts import job_monitor, progress, trained

# --- totals ---


def test_the_mean_pause_is_that_of_the_slowest_worker_of_the_round():
    m = job_monitor()
    m.forming(1, ("a", "b"), 90.0)
    m.progress(progress(30, 110.0, rank=0, first=100.0, steps=3))
    assert m.mean_pause(4) is None
    m.progress(progress(50, 110.0, rank=0, first=100.0, steps=5))
    m.progress(progress(50, 120.0, rank=1, pid=2, first=100.0, steps=5))
    assert m.mean_pause(4) == 5.0
    m.forming(2, ("a",), 130.0)
    m.progress(progress(10, 140.0, generation=2, pid=3, first=140.0, steps=1))
    assert m.mean_pause(4) is None


def test_total_is_the_sum_over_ranks_and_rounds():
    m = job_monitor()
    m.forming(1, ("a", "b"), 90.0)
    m.progress(progress(50, 101.0, rank=0))
    m.progress(progress(70, 101.0, rank=1, pid=2))
    m.forming(2, ("a",), 110.0)
    m.progress(progress(30, 115.0, generation=2, pid=3, first=114.0))
    assert m.total == 150
    assert m.before == 120


@pytest.mark.parametrize(
    ("records", "total"),
    [
        ([progress(50, 101.0), progress(50, 101.0)], 50),
        ([progress(80, 102.0), progress(50, 101.0)], 80),
        ([progress(50, 101.0), progress(20, 103.0, pid=2, first=102.5)], 70),
        ([progress(math.nan, 101.0)], 0),
        ([progress(math.inf, 101.0, steps=3)], 0),
        ([progress(50, math.inf)], 0),
        ([progress(50, math.nan)], 0),
        ([progress(-5, 101.0)], 0),
        ([progress(0, 101.0)], 0),
    ],
    ids=[
        "twice",
        "overtaken",
        "worker-restarted",
        "nan",
        "inf",
        "endless-time",
        "no-time",
        "negative",
        "nothing",
    ],
)
def test_total_of(records, total):
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    for record in records:
        m.progress(record)
    assert m.total == total
    assert math.isfinite(m.rate(104.0))


def test_counts_that_come_after_the_next_round_was_formed_are_not_lost():
    m = job_monitor()
    m.forming(1, ("a", "b"), 90.0)
    m.progress(progress(50, 101.0, rank=0))
    m.forming(2, ("a",), 110.0)
    m.progress(progress(60, 101.5, rank=0))
    m.progress(progress(40, 101.4, rank=1, pid=2))
    m.progress(progress(60, 101.5, rank=0))
    assert m.total == 100
    m.progress(progress(5, 120.0, generation=2, pid=3, first=119.5))
    assert m.total == 105


def test_counts_of_long_ago_are_ignored_rather_than_counted_twice():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    m.progress(progress(50, 101.0))
    for generation in range(2, 3 + KEPT_ROUNDS):
        m.forming(generation, ("a",), 100.0 + 10 * generation)
    m.progress(progress(60, 101.5))
    assert m.total == 50


def test_counts_of_a_round_that_nobody_formed_are_ignored():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    m.progress(progress(50, 101.0, generation=2**62))
    assert m.total == 0


def test_a_restarted_daemon_counts_on_where_the_store_left_off():
    m = job_monitor(total=1000.0, before=800.0, generation=4)
    assert m.total == 1000
    m.adopted(1, 200.0)
    m.progress(
        progress(150, 201.0, generation=4)
    )  # behind what the store knew: the other rank has not reported again yet
    assert m.total == 1000
    m.progress(progress(120, 201.0, generation=4, rank=1, pid=2))
    assert m.total == 1070


def test_a_restarted_daemon_does_not_count_again_what_the_store_may_have():
    m = job_monitor(total=1000.0, before=800.0, generation=4)
    m.forming(5, ("a",), 210.0)
    m.progress(progress(250, 209.0, generation=4))
    assert m.total == 1000
    m.progress(progress(10, 215.0, generation=5, first=214.0))
    assert m.total == 1010


# --- throughput ---


def test_rate_is_the_sum_of_the_ranks():
    m = job_monitor()
    end = trained(m, 1, 2, 100.0, 20.0, rate=400.0, ranks=4)
    assert m.rate(end) == pytest.approx(400.0, rel=0.02)
    assert m.batch == pytest.approx(200.0)


def test_rate_before_anything_was_reported_is_zero():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    assert m.rate(95.0) == 0.0


def test_a_hiccup_barely_shows_and_a_stall_shows_as_a_falling_rate():
    m = job_monitor()
    end = trained(m, 1, 1, 100.0, 20.0)
    assert m.rate(end + 0.9) == pytest.approx(100.0, rel=0.02)
    falling = [m.rate(end + t) for t in (1.5, 3.0, 5.0, 7.0, WINDOW_S + 0.5)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 75.0
    assert falling[-1] == 0.0


def test_steps_longer_than_the_window_do_not_make_the_rate_flap():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    rates = []
    for i in range(30):
        m.progress(progress(1200.0 * (i + 1), 100.0 + 12.0 * i, batch=1200.0, steps=i + 1))
        rates += [m.rate(100.0 + 12.0 * i + t) for t in (0.1, 6.0, 11.9)] if i > 5 else []
    assert min(rates) > 95.0
    assert max(rates) < 105.0


def test_a_worker_whose_clock_is_ahead_is_still_measured():
    m = job_monitor()
    end = trained(m, 1, 1, 130.0, 20.0)
    assert m.rate(end - 30.0) == pytest.approx(100.0, rel=0.02)


def test_after_an_adoption_the_rate_is_not_the_whole_past_at_once():
    m = job_monitor(total=0.0, before=0.0, generation=1)
    m.adopted(1, 8000.0)
    for i in range(20):
        t = 8000.0 + i * 0.5
        m.progress(progress((t - 100.0) * 100.0, t, batch=50.0))
    assert m.rate(8010.0) == pytest.approx(100.0, rel=0.02)
    seen = m.observation()
    assert seen is not None
    assert seen.rate == pytest.approx(100.0, rel=0.02)


def test_a_jump_of_a_clock_costs_no_time_and_no_memory():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    m.progress(progress(10, 100.0))
    m.progress(progress(20, 1e12))
    m.progress(progress(30, 1e12 + 0.5))
    assert m.total == 30
    assert len(m.slices) <= 601


def test_observation_leaves_out_the_warm_up_and_is_robust_to_a_stall():
    m = job_monitor()
    m.forming(1, ("a", "b"), 90.0)
    samples, t = 0.0, 100.0
    for i in range(80):
        t += 2.0 if i < 1 else 6.0 if i == 40 else 0.5  # slow at first, and one stall
        samples += 50.0
        m.progress(progress(samples, t, batch=50.0, first=100.5, steps=i + 1))
    seen = m.observation()
    assert seen is not None
    assert seen.nodes == 2
    assert m.batch == 50.0
    assert seen.rate == pytest.approx(100.0, rel=0.01)
    assert seen.seconds >= 30.0


def test_observation_needs_a_few_slices_and_begins_anew_with_every_round():
    m = job_monitor()
    trained(m, 1, 1, 100.0, 4.0)
    assert m.observation() is None
    trained(m, 2, 2, 200.0, 12.0, rate=180.0)
    seen = m.observation()
    assert seen is not None
    assert seen.nodes == 2
    assert seen.rate == pytest.approx(180.0, rel=0.02)


def test_the_interval_tells_an_even_round_from_an_uneven_one():
    even, uneven = job_monitor(), job_monitor()
    trained(even, 1, 1, 100.0, 30.0)
    uneven.forming(1, ("a",), 90.0)
    samples = 0.0
    for i in range(60):
        samples += 80.0 if (i // 8) % 2 else 20.0
        uneven.progress(progress(samples, 100.0 + 0.5 * i, steps=i + 1))
    seen = even.observation(), uneven.observation()
    assert seen[0].half_width < 1.0
    assert seen[1].half_width > 10.0


def stepped(durations):
    """The monitor and the profile's meter after steps of 50 samples and so many seconds each."""
    m, meter, t = job_monitor(), ThroughputMeter(1, 100.0, MeasureConfig(max_seconds=1e9)), 100.0
    m.forming(1, ("a",), 90.0)
    for i, seconds in enumerate([0.0, *durations], 1):
        t += seconds
        m.progress(progress(50.0 * i, t, first=100.0, batch=50.0, steps=i))
        meter.feed(t, 50.0 * i)
    return m, meter.measurement(t), t


@pytest.mark.parametrize(
    "durations",
    [
        [0.5 if i % 7 < 6 else 1.0 for i in range(400)],
        [0.5 if i // 8 % 2 else 1.25 for i in range(300)],
        [0.5 * random.Random(i).lognormvariate(0.0, 0.3) for i in range(1500)],
    ],
    ids=["one second in four is slow", "slow and fast by turns", "scattered, for ten minutes"],
)
def test_what_was_seen_at_a_scale_is_what_a_profile_measures_there(durations):
    m, measured, t = stepped(durations)
    seen = m.observation()
    assert seen.rate == pytest.approx(measured.rate, rel=0.02)
    assert seen.rate == pytest.approx(50.0 * len(durations) / (t - 100.0), rel=0.02)
    assert seen.rate == pytest.approx(seen.samples / seen.seconds)


def test_the_interval_of_long_steps_covers_the_truth():
    """Seconds of one step are no measurements of their own."""
    covered, runs = 0, 40
    for seed in range(runs):
        rng = random.Random(seed)
        m, _, _ = stepped([12.0 * rng.lognormvariate(-0.02, 0.2) for _ in range(50)])
        seen = m.observation()
        covered += abs(seen.rate - 50.0 / 12.0) <= seen.half_width
    assert covered >= 0.85 * runs


def test_a_stall_is_in_the_rate_of_the_moment_and_not_in_what_was_seen_at_the_scale():
    m, _, t = stepped([*[0.5] * 120, 8.0, 0.5, 0.5])
    assert m.rate(t) < 40.0
    assert m.observation().rate == pytest.approx(100.0, rel=0.03)


# --- silence ---


def test_a_job_that_never_reports_is_silent_since_its_workers_ran():
    m = job_monitor()
    m.rescale_began((), ("a",), 90.0)
    m.forming(1, ("a",), 92.0)
    m.workers_running(1, 95.0)
    assert m.silent_for(400.0) == 305.0
    m.progress(progress(10, 399.0))
    assert m.silent_for(400.0) == 1.0


def test_after_an_adoption_silence_is_counted_from_there():
    m = job_monitor(total=5.0, before=0.0, generation=1)
    m.adopted(1, 100.0)
    assert m.silent_for(130.0) == 30.0


# --- whatever order and however often ---


@st.composite
def histories(draw):
    """Rounds of workers with growing counts, and the records shuffled, repeated and partly lost."""
    records, whole = [], 0
    for generation in range(1, draw(st.integers(1, 4)) + 1):
        for rank in range(draw(st.integers(1, 3))):
            counts = sorted(
                draw(st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True))
            )
            whole += counts[-1]
            begin = 1000.0 * generation
            records += [
                (
                    generation,
                    progress(
                        float(c),
                        begin + c / 10,
                        generation=generation,
                        rank=rank,
                        pid=10 * generation + rank,
                        first=begin,
                    ),
                )
                for c in counts
            ]
    sent = [record for record in records for _ in range(draw(st.integers(1, 2)))]
    return records, draw(st.permutations(sent)), whole


@settings(max_examples=cases(60), deadline=None)
@given(histories())
def test_no_order_of_the_records_makes_the_total_fall_or_count_twice(history):
    records, sent, whole = history
    m = job_monitor()
    formed, last = 0, 0.0
    # Rounds come in order, the records of a round in any order.
    for generation, record in sorted(sent, key=lambda item: item[0]):
        if generation > formed:
            formed = generation
            m.forming(generation, ("a",), 1000.0 * generation)
        m.progress(record)
        assert m.total >= last
        last = m.total
    for _, record in sent:  # everything once more, late and in any order
        m.progress(record)
        assert m.total >= last
        last = m.total
    final_counts = {
        (g, r.rank): max(x.samples for h, x in records if h == g and x.rank == r.rank)
        for g, r in records
    }
    assert m.total == whole == sum(final_counts.values())
    assert math.isfinite(m.rate(5000.0))


def test_a_clock_that_jumps_costs_neither_time_nor_memory():
    m = job_monitor()
    m.forming(1, ("a",), 90.0)
    for last in (100.5, 101.0, 1e11, 1e11 + 1, 102.0):
        for pid in (1, 2):
            m.progress(progress(last, last, first=100.0, pid=pid))
    assert len(m.slices) <= 600
    assert m.observation() is None or math.isfinite(m.observation().rate)
    assert math.isfinite(m.rate(103.0))
