"""Whom a job had better do without when ways are blocked."""

from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.slow_nodes import describe_blocked, left_out

NODES = ("a", "b", "c", "d")


def test_the_node_behind_the_firewall_goes():
    assert left_out(NODES, [("a", "c"), ("c", "b"), ("d", "c")]) == ("c",)


def test_of_two_that_do_not_reach_each_other_the_later_goes():
    assert left_out(NODES, [("b", "a")]) == ("b",)


def test_strangers_do_not_count():
    assert left_out(("a", "b"), [("a", "c")]) == ()


@given(st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES))))
def test_no_way_between_those_left_is_blocked_and_somebody_is_left(pairs):
    pairs = {(a, b) for a, b in pairs if a != b}
    gone = left_out(NODES, pairs)
    assert not [p for p in pairs if not set(p) & set(gone)]
    assert len(set(gone)) == len(gone) < len(NODES)


def test_the_first_ways_are_named():
    ways = [("a", "b", "timed out"), ("b", "a", "refused"), ("a", "c", "x"), ("a", "d", "y")]
    message = describe_blocked(ways)
    assert "a cannot connect to b (timed out); b cannot connect to a (refused)" in message
    assert "1 more such" in message
