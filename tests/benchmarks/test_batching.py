"""The account of benchmarks.batching, and that its trainings and predictions are what they seem."""

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
from benchmarks.train_batching import step_s

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
    assert reactions(MOMENTS, CHANGES) == {128: 3.0, 256: 10.0}
    assert reactions(MOMENTS[:4], CHANGES) == {128: 3.0, 256: None}
    assert reactions(MOMENTS, []) == {}


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
