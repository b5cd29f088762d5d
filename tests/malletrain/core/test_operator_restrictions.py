"""What operators have told MalleTrain to leave alone."""

from __future__ import annotations

import msgspec

from malletrain.core.operator_restrictions import EVERY_NODE, Restriction, Restrictions

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
