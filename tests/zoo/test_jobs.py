"""Scripts of the zoo as jobs of a real daemon, changed at boundaries that their traces name.

Two cases are in the ordinary suite; ``make test-all`` runs all.
"""

from __future__ import annotations

import pytest

from tests.integration.embedded import site
from tests.zoo.cases import CHANGES, Zoo, boundary_names
from tests.zoo.catalogue import SCRIPTS
from tests.zoo.compare import differences
from tests.zoo.jobs import JobDriver
from tests.zoo.worker import preload, warm_up

RESTART = (
    *("epoch_scheduler", "evaluation_together", "best_model", "accumulation"),
    *("persistent_workers", "trainer", "fit"),
)
LIVE = ("epoch_scheduler", "grad_scaler", "evaluation_together", "best_model")
PLACES = (0.3, 0.6, 0.95)
"""Boundaries, as parts of a trace."""
SAMPLE = {("restart/epoch_scheduler", "shrink", 0.6), ("live/epoch_scheduler", "grow", 0.3)}
"""Of the ordinary suite."""
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.thorough)
    for mode, names in (("restart", RESTART), ("live", LIVE))
    for name in names
    for change in ("grow", "shrink", "loss")
    for place in PLACES
    for case in [(f"{mode}/{name}", change, place)]
]


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    with site(tmp_path_factory.mktemp("standing"), nodes=3) as made:
        yield made


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    preload()
    warm_up()
    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def jobs(standing, request):
    standing.begin(f"work-{request.node.name.replace('/', '-')}")
    yield JobDriver(standing)
    standing.clear()


def check(zoo, jobs, script, change, place, as_function=False):
    own, made = SCRIPTS[script], CHANGES[SCRIPTS[script].mode][change]
    runs = zoo.undisturbed(own, {2, made.before})
    names = boundary_names(runs[made.before], made.actor)
    point = int(place * len(names))
    run = jobs.disturbed(own, made, point, as_function)
    assert not differences(runs[2], run, made.is_loss), names[point]
    assert place > 0.9 or max(record.round for record in run.trace) > 1, "no change was made"


@pytest.mark.parametrize(("script", "change", "place"), CASES)
def test_a_change_of_a_job_changes_nothing_else(zoo, jobs, script, change, place):
    check(zoo, jobs, script, change, place)


@pytest.mark.parametrize(
    "boundary", ["scheduler 1", pytest.param("tail of 2", marks=pytest.mark.thorough)]
)
def test_what_rank_0_does_after_an_epoch_is_done_when_its_node_is_lost(zoo, jobs, boundary):
    """The other rank has run that code, and writes no row as rank 1."""
    script, change = SCRIPTS["live/epoch_scheduler"], CHANGES["live"]["loss-first"]
    expected = zoo.undisturbed(script, {2})[2]
    point = boundary_names(expected, change.actor).index(boundary)
    run = jobs.disturbed(script, change, point)
    assert not differences(expected, run, repeats=True)
    assert max(record.round for record in run.trace) > 1, "no node was lost"


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["restart/epoch_scheduler", "live/epoch_scheduler"])
@pytest.mark.parametrize("change", ["grow", "shrink", "loss"])
@pytest.mark.parametrize("place", PLACES)
def test_a_change_of_a_function_changes_nothing_else(zoo, jobs, script, change, place):
    check(zoo, jobs, script, change, place, as_function=True)
