"""The account of benchmarks.batching, and that its trainings and predictions are what they seem."""

import math

import pytest

from benchmarks.batching import (
    BASE,
    EPOCHS,
    Moment,
    best_nodes,
    node_seconds,
    nodes_by_batch,
    predictions,
    rate,
    reactions,
)
from benchmarks.batching_accuracy import BASE as ACCURACY_BASE
from benchmarks.batching_accuracy import SHARE, SPEED_UP, Clock, Pair, Training
from benchmarks.batching_simulated import COSTS
from benchmarks.batching_simulated import rate as resnet_rate
from benchmarks.train_batching import step_s
from scavenger.trace.trace import Trace

MOMENTS = [
    Moment(0.0, 2, 0.0, 0.0),
    Moment(10.0, 2, 100.0, 50.0),
    Moment(12.0, 3, 120.0, 60.0),
    Moment(30.0, 3, 400.0, 100.0),
    Moment(40.0, 0, 500.0, 120.0),
]
CHANGES = [(9.0, 128), (30.0, 256)]


def test_node_seconds_are_those_between_two_looks():
    assert node_seconds(MOMENTS) == 2 * 10 + 2 * 2 + 3 * 18 + 3 * 10


def test_a_new_plan_is_the_first_change_of_nodes_after_the_batch():
    larger = [*MOMENTS[:4], Moment(35.0, 5, 450.0, 110.0), *MOMENTS[4:]]
    assert reactions(larger, CHANGES) == {128: 3.0, 256: 5.0}
    assert reactions(MOMENTS[:4], CHANGES) == {128: 3.0, 256: None}
    assert reactions(MOMENTS, []) == {}


def test_the_end_of_the_training_is_no_new_plan():
    assert reactions(MOMENTS, CHANGES) == {128: 3.0, 256: None}


def test_the_nodes_of_a_batch_are_those_at_its_end():
    assert nodes_by_batch(MOMENTS, CHANGES) == {BASE: 2, 128: 3, 256: 3}
    assert nodes_by_batch(MOMENTS, []) == {BASE: 3}


def test_a_step_takes_what_the_law_says():
    assert step_s(1, 64) == pytest.approx(0.005 + 0.128)
    assert step_s(4, 64) == pytest.approx(0.005 + 0.032 + 0.045)
    assert rate(4, 64) == pytest.approx(64 / 0.082)


def test_a_larger_batch_deserves_more_nodes():
    nodes = [best_nodes(batch) for batch in EPOCHS]
    assert nodes == sorted(nodes)
    assert nodes[0] < nodes[-1]


def test_the_law_predicts_batches_that_were_not_measured():
    first, *others = predictions()
    assert first["unmeasured"] < 0.1
    assert all(row["unmeasured"] < 0.02 for row in others)
    assert all(row["one size"] < 0.03 for row in (first, *others))


def trace_of(*intervals):
    """Return a trace with SHARE nodes for each (start, end), seconds of the training."""
    rows = [(s, e) for s, e in intervals for _ in range(SHARE)]
    starts, ends = zip(*rows, strict=True)
    names = [f"n{k}" for k in range(len(rows))]
    scaled = [[x * SPEED_UP for x in column] for column in (starts, ends)]
    return Trace.from_gaps(range(len(rows)), *scaled, names, 1000.0 * SPEED_UP)


def test_the_clock_waits_for_a_node_and_counts_each_change_and_each_step():
    clock = Clock(trace_of((5.0, 900.0), (300.0, 400.0)))
    assert (clock.nodes(), clock.seconds) == (1, 5.0)
    step = ACCURACY_BASE / resnet_rate(1, ACCURACY_BASE)
    clock.step(ACCURACY_BASE)
    assert clock.seconds == pytest.approx(5.0 + COSTS.start_s + step)
    clock.seconds = 300.0
    clock.step(ACCURACY_BASE)
    step = ACCURACY_BASE / resnet_rate(2, ACCURACY_BASE)
    assert clock.seconds == pytest.approx(300.0 + COSTS.up_s + step)
    clock.seconds = 400.0
    clock.step(ACCURACY_BASE)
    assert clock.seconds - 400.0 == pytest.approx(
        COSTS.down_s + ACCURACY_BASE / resnet_rate(1, ACCURACY_BASE)
    )
    clock.seconds = 900.0
    with pytest.raises(SystemExit, match="The trace ends"):
        clock.nodes()


def test_ratios_of_two_trainings():
    fixed = Training(100.0, 1000, 0.900, ((50.0, 0.89), (90.0, 0.898), (100.0, 0.900)), (128,))
    adaptive = Training(60.0, 1500, 0.899, ((30.0, 0.897), (60.0, 0.899)), (128, 256))
    pair = Pair(0, fixed, adaptive)
    assert pair.end_ratio == 0.6
    assert pair.accuracy_ratio == pytest.approx(30.0 / 90.0)
    worse = Training(60.0, 1500, 0.89, ((60.0, 0.89),), (128,))
    assert Pair(0, fixed, worse).accuracy_ratio == math.inf
