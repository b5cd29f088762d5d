"""Nodes that are not leased: sick ones, and those that operators have drained or excluded."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.unleased_nodes import (
    EVERY_NODE,
    Restriction,
    Restrictions,
    SickNode,
    SickNodes,
)

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


ANN = Restriction("ann", 0.0)
UNTIL = Restriction("ann", 0.0, 3600.0, "new memory")


def test_nothing_is_refused_until_somebody_says_so():
    assert Restrictions().refusal("n1") == ""
    assert Restrictions().sentence() == ""


def test_each_word_refuses_what_it_names():
    paused = Restrictions().pausing(ANN)
    assert paused.refusal("n1") == "Paused by ann."
    drained = Restrictions().draining(["n1"], UNTIL)
    assert drained.refusal("n1") == "Drained by ann until 1970-01-01 01:00 UTC (new memory)."
    assert drained.refusal("n2") == ""
    assert Restrictions().draining([EVERY_NODE], ANN).refusal("n9") == "Drained by ann."
    excluded = Restrictions().excluding(["n1"], ANN)
    assert (excluded.refusal("n1"), excluded.refusal("n2")) == ("Excluded by ann.", "")


def test_one_word_does_not_end_another():
    all_of_it = Restrictions().pausing(ANN).draining(["n1", "n2"], ANN).excluding(["n1"], ANN)
    assert all_of_it.pausing(None).refusal("n1") == "Drained by ann."
    assert all_of_it.resuming(["n1"]).refusal("n1") == "Paused by ann."
    resumed = all_of_it.pausing(None).resuming(["n1"])
    assert (resumed.refusal("n1"), resumed.refusal("n2")) == ("", "Drained by ann.")


def test_a_drain_is_over_at_its_time_and_others_are_not():
    restrictions = Restrictions().draining(["n1"], UNTIL).draining(["n2"], ANN)
    assert restrictions.over(3599.9) == []
    assert restrictions.over(3600.0) == ["n1"]


def test_it_is_told_in_a_sentence_however_many_nodes():
    restrictions = Restrictions().draining([f"n{k}" for k in range(9)], ANN).excluding(["x"], ANN)
    assert restrictions.sentence() == "Drained: n[0-8]. Excluded: x."


def test_it_can_be_kept():
    restrictions = (
        Restrictions().pausing(UNTIL).draining([EVERY_NODE], UNTIL).excluding(["n1"], ANN)
    )
    assert msgspec.json.decode(msgspec.json.encode(restrictions), type=Restrictions) == restrictions
