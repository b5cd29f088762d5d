"""A change of nodes in scripts of public bug reports; ``python -m tests.zoo`` runs all of them."""

from __future__ import annotations

import pytest

from tests.selection import every_change
from tests.zoo.cases import Zoo
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.worker import preload

SAMPLE = (
    ("restart/reports/accumulation_by_length", "shrink", "before an update"),
    ("restart/reports/ema_counter", "same", "after an update #2"),
    ("restart/reports/warm_up_around", "same", "before an update #3"),
    ("restart/scheduled_first", "shrink", "before an update #6"),
    ("restart/epoch_sums", "same", "after an update"),
    ("restart/drawn_first", "grow", "after an update #7"),
    ("restart/hugging_face_reports/begun_with_evaluation", "same", "after an update #2"),
    ("restart/hugging_face_reports/two_kept", "same", "after an update #9"),
    ("restart/hugging_face_reports/cooled", "same", "before an update #2"),
    ("restart/lightning_reports/epoch_means", "shrink", "after an update #2"),
    ("restart/lightning_reports/saved_by_step", "same", "before an update #4"),
    ("restart/lightning_reports/swa", "same", "before an update"),
    ("restart/accelerate_reports/accumulating", "same", "micro-batch #2"),
    ("restart/accelerate_cut_short", "same", "step 0 12"),
    ("restart/fit_mlflow", "shrink", "before an update #3"),
    ("restart/trainer_wandb", "same", "before an update #3"),
    ("live/weights_and_biases", "shrink-first", "row 4"),
    ("live/live_reports/ema_counter", "grow", "before an update #2"),
    ("live/live_reports/annealed", "loss", "before an update #3"),
    ("live/teacher_first_live", "grow", "step 0 0"),
    ("live/scheduled_first_live", "grow", "tail of 1"),
)
"""Script, change and boundary; most were wrong there."""
FURTHER = (
    "restart/fit_mlflow",
    "restart/trainer_wandb",
    "restart/lightning_reports/saved_by_step",
    "restart/hugging_face_reports/two_kept",
    "restart/hugging_face_reports/cooled",
    "restart/lightning_reports/epoch_means",
    "restart/lightning_reports/swa",
    "restart/reports/warm_up_around",
    "restart/epoch_sums",
    "restart/accelerate_cut_short",
    "live/weights_and_biases",
    "live/teacher_first_live",
    "live/scheduled_first_live",
)
"""Those marked ``thorough``: long, or beside another one of their mode and library."""
CASES = every_change(SAMPLE, *(case for case in SAMPLE if case[0] not in FURTHER))


@pytest.fixture(scope="module")
def zoo(request, tmp_path_factory):
    selected = [item for item in request.session.items if item.path == request.path]
    scripts = [SCRIPTS[item.callspec.params["script"]] for item in selected]
    preload(*{each.target.partition(":")[0] for each in scripts if not each.missing})
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.mark.parametrize(("script", "change", "boundary"), CASES)
def test_a_change_of_nodes_changes_nothing_else(zoo, script, change, boundary):
    if SCRIPTS[script].missing:
        pytest.skip(f"{SCRIPTS[script].needs} is not installed")
    outcome = zoo.one(SCRIPTS[script], change, boundary)
    assert not outcome.refusal, outcome.refusal
    assert not outcome.problems, outcome.problems
