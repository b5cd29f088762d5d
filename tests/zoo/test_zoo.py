"""Scripts as people write them, with a change of nodes at every boundary.

A small sample; ``python -m tests.zoo``, a part of ``make test-all``, runs all cases.
"""

from __future__ import annotations

import pytest

from tests.selection import every_change
from tests.zoo.cases import Script, Zoo
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.worker import preload, warm_up

SAMPLE = (
    ("restart/epoch_scheduler", "grow", "before an update #4"),
    ("restart/evaluation_together", "loss", "tail of 1"),
    ("restart/accumulation", "grow", "after an update #2"),
    ("restart/counted_range", "same", "scheduler 1"),
    ("restart/largest_step", "loss-of-all", "saved"),
    ("restart/rows_of_all_ranks", "shrink", "after an update #2"),
    ("restart/slow_ranks", "shrink", "after an update #4"),
    ("live/epoch_scheduler", "grow", "before an update #3"),
    ("live/plateau", "shrink-first", "tail of 0"),
    ("live/sam", "loss", "climbed #2"),
    ("live/largest_step", "loss-of-all", "saved"),
    ("live/kept_open", "loss-first", "row 1"),
)
"""Script, change and boundary of the cases in the ordinary suite: each mode and change."""
FURTHER = (
    ("restart/epoch_scheduler", "shrink", "tail of 0"),
    ("restart/writer_thread", "same", "writing"),
    ("restart/cut_short", "same", "step 0 12"),
    ("restart/scheduled_after_snapshot", "same", "step 0 6"),
    ("restart/batch_ramp", "grow", "step 1 8"),
    ("live/batch_in_epoch", "grow", "before an update #3"),
    ("live/while_loop", "grow", "evaluation 1"),
    ("live/early_stopping", "loss", "patience 2"),
    ("live/overflow", "loss-first", "step 2 0"),
    ("live/heads_by_micro_batch", "shrink-first", "after an update #3"),
)
"""Of those marked ``thorough``."""

PLANTED = {
    "optimizer_lost": ("weights", "after an update #2"),
    "samples_repeated": ("trained on again", "after an update #2"),
    "rate_by_counter": ("has lr", "after an update #2"),
    "tail_skipped": ("scheduler 0 is missing", "after an update #2"),
    "tail_twice": ("evaluation 0 is recorded again", "after an update #6"),
    "evaluation_missing_on_one_rank": ("recorded by ranks [0]", "after an update #2"),
}
"""What the driver says of each planted defect, and the boundary at which it shows."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    preload()
    warm_up()
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize(("script", "change", "boundary"), every_change(SAMPLE + FURTHER, *SAMPLE))
def test_a_change_of_nodes_changes_nothing_else(zoo, script, change, boundary):
    outcome = zoo.one(SCRIPTS[script], change, boundary)
    assert not outcome.refusal, outcome.refusal
    assert not outcome.problems, outcome.problems


@pytest.mark.parametrize("defect", PLANTED)
def test_a_planted_defect_is_reported(zoo, defect):
    words, boundary = PLANTED[defect]
    outcome = zoo.one(Script(defect, "restart", f"planted:{defect}"), "grow", boundary)
    assert words in " ".join(outcome.problems)


REFUSED = "elastic.Run: no state"


@pytest.mark.parametrize("expected", [REFUSED, "", "another sentence"])
def test_a_refusal_before_training_is_compared_with_the_expected_one(zoo, expected):
    script = Script("refused", "live", "planted:refused_live", refusal=expected)
    (outcome,) = zoo.outcomes(script, "grow")
    assert REFUSED in outcome.refusal
    assert bool(outcome.problems) == (expected != REFUSED)


def test_a_script_that_trains_although_it_is_to_be_refused_is_a_problem(zoo):
    script = Script("trains", "restart", "planted:optimizer_lost", refusal=REFUSED)
    (outcome,) = zoo.outcomes(script, "grow")
    assert "trains, and is to be refused" in " ".join(outcome.problems)
