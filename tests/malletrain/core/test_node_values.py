"""What a value of the next nodes means for the values of a service."""

from __future__ import annotations

import pytest

from malletrain.core.node_values import farm_curve, nodes_filled, rate_of_node, with_next_nodes


@pytest.mark.parametrize(
    ("values", "present", "each", "count", "expected"),
    [
        (None, 0, 5.0, 1, {1: 5.0}),
        ({"1": 0.0}, 0, 5.0, 4, {4: 20.0}),  # it had none and asks for four
        ({"2": 20.0, "8": 50.0}, 0, 5.0, 1, {1: 5.0}),
        ({"2": 20.0, "8": 50.0}, 2, 7.0, 3, {2: 20.0, 5: 41.0}),
        ({"2": 20.0, "8": 50.0}, 5, 7.0, 1, {2: 20.0, 5: 35.0, 6: 42.0}),  # interpolated at 5
        ({"2": 20.0}, 4, 7.0, 1, {2: 20.0, 4: 20.0, 5: 27.0}),  # constant beyond the last
        ({"2": 20.0, "8": 50.0}, 5, 0.0, 1, {2: 20.0, 5: 35.0, 6: 35.0}),  # no more
    ],
)
def test_the_present_nodes_keep_their_value(values, present, each, count, expected):
    assert with_next_nodes(values, present, each, count) == expected


@pytest.mark.parametrize(
    ("busy", "waiting", "slots", "task_s", "filled"),
    [
        (0, 1000, 0, None, 1000),  # nothing is known: a task fills a node
        (0, 1000, 8, None, 125),
        (4, 0, 8, 600.0, 4),  # the last tasks keep their nodes
        (1, 0, 8, 600.0, 1),
        (0, 0, 8, 600.0, 1),
        (4, 9, 8, 600.0, 6),
        (4, 1000, 8, 0.1, 6),  # 100 s of work for 8 slots: 12.5 s, two nodes more
        (4, 10, 8, 0.001, 5),
    ],
)
def test_remaining_tasks_fill_nodes(busy, waiting, slots, task_s, filled):
    assert nodes_filled(busy, waiting, slots, task_s) == filled


@pytest.mark.parametrize(
    ("busy", "waiting", "slots", "max_running", "filled"),
    [
        (0, 1000, 8, 10, 2),  # 10 tasks fill two nodes of 8 slots
        (0, 1000, 8, 0, 125),
        (0, 9, 8, 100, 2),
        (2, 1000, 8, 10, 2),
        (3, 1000, 8, 10, 3),  # the third one keeps its tasks
        (0, 1000, 0, 3, 3),  # nothing is known: a task fills a node
    ],
)
def test_a_limit_of_running_tasks_fills_fewer_nodes(busy, waiting, slots, max_running, filled):
    assert nodes_filled(busy, waiting, slots, None, max_running) == filled


def test_the_rate_is_rounded_and_before_the_first_task_one():
    assert rate_of_node(8, None) == rate_of_node(0, 3.0) == 1.0
    assert rate_of_node(8, 2.0) == 4.0
    assert rate_of_node(8, 2.1) == 4.0
    assert rate_of_node(8, 4.0) == 2.0


def test_the_curve_is_linear_and_then_flat():
    assert farm_curve(2.0, 3, 10) == {"1": 2.0, "3": 6.0, "10": 6.0}
    assert farm_curve(2.0, 30, 10) == {"1": 2.0, "10": 20.0}
    assert farm_curve(2.0, 1, 1) == {"1": 2.0}
