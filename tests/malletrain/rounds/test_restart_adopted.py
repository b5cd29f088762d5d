"""The rounds of one job after a restart of the daemon: what the store and the agents say makes a
round, or not.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
    RoundStage,
    SaveRound,
    SendAssign,
    SendDrain,
    SendRelease,
    SendRound,
    WorkersDone,
)
from malletrain.rounds.restart import RestartRounds
from tests.malletrain.rounds.rounds_tables import SETTINGS, says

# --- after a restart of the daemon ---


def holds(**phases):
    return {
        node: Assignment("j", AssignmentPhase(phase), generation)
        for node, (phase, generation) in phases.items()
    }


def adopt(members, phases, generation=7, low=1):
    r = RestartRounds(SETTINGS, min_nodes=low)
    return r, r.adopt(generation, members, phases, 1000.0)


def test_a_whole_round_is_adopted_and_goes_on():
    r, actions = adopt(("a", "b"), holds(a=("running", 7), b=("running", 7)))
    assert actions == [SendDrain("a", 7, 0)], (
        "a drain of before must not leave the workers standing"
    )
    assert (r.stage, r.members, r.generation) == (RoundStage.RUNNING, ("a", "b"), 7)
    assert r.move(("a",), 1010.0) == [SendDrain("a", 7, 1001)], (
        "a number that no drain of before had"
    )
    assert r.drained("a", 7, 11.0)[:2] == [SendRelease("b"), SaveRound(8, ("a",))]


def test_a_job_that_ended_while_nobody_watched_is_done():
    r, actions = adopt(("a", "b"), holds(a=("succeeded", 7), b=("succeeded", 7)))
    assert (actions, r.stage) == ([WorkersDone()], RoundStage.COMPLETED)


def test_a_job_that_crashed_while_nobody_watched_broke():
    r, actions = adopt(("a", "b"), holds(a=("running", 7), b=("failed", 7)))
    assert (actions, r.stage) == ([SendDrain("a", 7, 0)], RoundStage.RUNNING)
    (broke,) = r.tick(1002.0)
    assert "workers failed on b" in broke.sentence


@pytest.mark.parametrize(
    "phases",
    [
        holds(a=("running", 7)),
        holds(a=("running", 7), b=("running", 6)),
        holds(a=("ready", 0), b=("ready", 0)),
        holds(a=("running", 7), b=("starting", 0)),
        holds(a=("failed", 7)),
    ],
    ids=["one-lost", "mixed", "none-in-the-round", "one-begins", "failed-because-of-the-lost-one"],
)
def test_what_is_not_whole_waits_for_a_plan_and_then_forms_a_new_round(phases):
    r, actions = adopt(("a", "b"), phases)
    assert (actions, r.stage) == ([], RoundStage.IDLE)
    assert r.tick(1100.0) == []
    r.move(tuple(phases), 1101.0)
    says(r, 1102.0, "ready", *phases)
    assert r.stage is RoundStage.FORMING
    assert r.generation == 8
    assert r.members == tuple(phases)


def test_a_launcher_beyond_the_round_joins_it():
    r, actions = adopt(("a",), holds(a=("running", 7), b=("ready", 0)))
    assert actions == [SendDrain("a", 7, 0), SendDrain("a", 7, 1001)]
    assert r.target == ("a", "b")


def test_workers_of_a_newer_round_than_the_store_knows_are_stopped_and_started_anew():
    r, actions = adopt(("a",), holds(a=("running", 9)))
    assert (actions, r.stage) == ([SendRelease("a")], RoundStage.IDLE)
    assert r.move(("a",), 1.0) == []
    assert r.released("a", 2.0) == [SendAssign("a")]
    assert says(r, 3.0, "ready", "a") == [SaveRound(8, ("a",)), SendRound("a", 8, 0, 1, None)]


def test_a_round_that_nobody_formed_does_not_count():
    r = RestartRounds(SETTINGS)
    r.move(("a",), 0.0)
    assert says(r, 1.0, "running", "a", generation=2**63) == []
    assert says(r, 2.0, "ready", "a") == [SaveRound(1, ("a",)), SendRound("a", 1, 0, 1, None)]


def test_a_job_without_a_round_is_not_running():
    r, actions = adopt((), {}, generation=0)
    assert (actions, r.stage) == ([], RoundStage.IDLE)


@pytest.mark.parametrize("phase", ["exited", "ready", "starting"])
def test_a_job_whose_first_round_was_not_formed_waits_for_a_plan(phase):
    """Found by the simulation (tests/dst, seed 55): the launcher had ended before the first round,
    and its node passed for a round that goes on, for ever.
    """
    r, _ = adopt(("a",), holds(a=(phase, 0)), generation=0)
    assert r.stage is RoundStage.IDLE
