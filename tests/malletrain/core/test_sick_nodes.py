"""How long sick nodes are left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.sick_nodes import SickNode, SickNodes

FIRST, MOST = 100.0, 1000.0


def spans(*times):
    nodes = SickNodes(FIRST, MOST)
    return [nodes.failed("n", "broken", at).until - at for at in times]


def test_a_node_that_fails_again_is_left_alone_for_longer_up_to_a_limit():
    assert spans(0, 101, 400, 900, 1800, 2900) == [100, 200, 400, 800, 1000, 1000]


def test_a_failure_long_after_the_last_one_is_the_first_again():
    assert spans(0, 150, 350 + MOST) == [100, 200, 100]


def test_a_report_on_a_node_that_is_left_alone_is_no_further_failure():
    assert spans(0, 50, 149) == [100, 100, 100]


def test_only_nodes_whose_time_is_not_over_are_left_alone():
    nodes = SickNodes(FIRST, MOST)
    nodes.failed("a", "no disk", 0.0)
    nodes.failed("b", "no GPU", 50.0)
    assert sorted(nodes.now(99.0)) == ["a", "b"]
    assert nodes.now(100.0) == {"b": SickNode(50.0, 150.0, "no GPU")}
    assert nodes.now(150.0) == {}


def test_what_was_known_before_counts():
    nodes = SickNodes(FIRST, MOST)
    nodes.remember("a", SickNode(0.0, 400.0, "no disk"))
    assert list(nodes.now(399.0)) == ["a"]
    assert nodes.failed("a", "no disk", 500.0).until == 500.0 + 800.0


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30))
def test_no_node_is_left_alone_for_ever_and_none_for_less_than_at_first(pauses):
    nodes, now = SickNodes(FIRST, MOST), 0.0
    for pause in pauses:
        now += pause
        sick_node = nodes.failed("n", "broken", now)
        assert now + FIRST <= sick_node.until <= now + MOST
