"""Counts of several ranks read at one common moment."""

import random
from itertools import pairwise

import pytest

from malletrain.daemon.jobs.monitor import SampleCount
from malletrain.protocol import messages


def report(time, samples, rank=0, generation=1, pid=None):
    return messages.Progress("j1", generation, rank, pid or 100 + rank, samples, 1, 8.0, 1.0, time)


def moved(counts, record):
    counts.add_report(record)
    return counts.advance()


def test_ranks_that_report_at_different_moments_add_up_to_a_straight_line():
    counts = SampleCount()
    rng = random.Random(1)
    due = sorted(
        (10 + 0.2 * k + rng.uniform(0, 0.15), rank) for k in range(100) for rank in range(4)
    )
    seen = [
        (counts.time, counts.samples)
        for time, rank in due
        if moved(counts, report(time, 50.0 * (time - 10), rank))
    ]
    steady = [x for x in seen if x[0] > 10.5]
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(steady)]
    assert rates == pytest.approx([200.0] * len(rates))
    assert len(steady) > 80


def test_the_sum_never_falls_and_late_or_repeated_reports_do_no_harm():
    counts = SampleCount()
    assert moved(counts, report(1.0, 8.0))
    assert moved(counts, report(2.0, 16.0))
    assert not moved(counts, report(2.0, 16.0))
    assert not moved(counts, report(1.5, 12.0))
    assert not moved(counts, report(3.0, 4.0))
    assert counts.samples == 8.0


def test_a_new_round_counts_from_nothing_and_the_old_one_is_over():
    counts = SampleCount()
    moved(counts, report(1.0, 8.0))
    moved(counts, report(2.0, 80.0))
    assert moved(counts, report(5.0, 8.0, generation=2))
    assert counts.samples == 0.0
    assert not moved(counts, report(6.0, 800.0, generation=1))
    assert moved(counts, report(6.0, 24.0, generation=2))
    assert counts.samples == 16.0


def test_a_rank_that_falls_silent_does_not_hold_up_the_others_for_ever():
    counts = SampleCount()
    for k in range(5):
        for rank in (0, 1):
            moved(counts, report(1.0 + k * 0.2, 10.0 * k, rank))
    went_on = [moved(counts, report(2.0 + k * 0.2, 60.0 + 10.0 * k, 0)) for k in range(30)]
    assert went_on[-1]
    assert counts.time == pytest.approx(2.0 + 29 * 0.2)


def test_a_rank_with_steps_of_many_seconds_is_waited_for():
    counts = SampleCount()
    for k in range(6):
        for rank in (0, 1):
            moved(counts, report(10.0 * k + 1 + 0.01 * rank, 100.0 * k, rank))
    assert counts.samples == pytest.approx(1000.0, rel=0.01)


def test_only_one_rank_reporting_is_enough():
    counts = SampleCount()
    for k in range(3):
        moved(counts, report(1.0 + k, 64.0 * (k + 1)))
    assert (counts.time, counts.samples) == (3.0, 128.0)
