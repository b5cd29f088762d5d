"""The tables of a rescale are complete, and what they do not name is an error."""

import itertools

import pytest

from malletrain.rounds.interface import RoundStage
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.restart import RestartRounds
from malletrain.rounds.table import (
    EVENTS,
    LIVE_TABLE,
    RESTART_TABLE,
    NoTransition,
    Occurrence,
    RoundEvent,
    RoundMachine,
    Row,
    make_table,
)

IDLE, RUNNING = RoundStage.IDLE, RoundStage.RUNNING
MODES = [(RestartRounds, RESTART_TABLE), (LiveRounds, LIVE_TABLE)]
PAIRS = list(itertools.product(RoundStage, RoundEvent))


@pytest.mark.parametrize(("mode", "table"), MODES)
def test_guards_and_steps_are_methods_with_a_sentence(mode, table):
    for rows in table.values():
        for row in rows:
            for name in (*row.steps, *filter(None, [row.guard])):
                assert getattr(mode, name).__doc__, name


@pytest.mark.parametrize(("mode", "table"), MODES)
def test_a_pair_that_is_not_in_the_table_is_an_error(mode, table):
    missing = [pair for pair in PAIRS if pair not in table]
    assert missing
    for stage, event in missing:
        rounds = mode(stage=stage)
        with pytest.raises(NoTransition, match=f"{event} cannot happen while {stage}"):
            rounds.handle(Occurrence(event, 1.0))
        assert rounds.stage is stage


def test_the_only_pairs_without_a_row():
    """The stages in which an event cannot happen."""
    without = {}
    for stage, event in PAIRS:
        if (stage, event) not in LIVE_TABLE:
            without.setdefault(str(event), set()).add(str(stage))
    others = {str(stage) for stage in RoundStage}
    assert without == {
        "adopted": others - {"idle"},
        "restarted": {"idle", "completed"},
        "time-over": {"idle", "running", "completed"},
        "failure-due": {"idle", "completed"},
        "joiners-ready": others - {"warming"},
        "round-suffices": others - {"warming"},
        "workers-running": others - {"running"},
        "group-broke": {"completed"},
        "worker-failed": {"completed"},
        "joiner-failed": {"completed"},
        "regroup-due": {"completed"},
    }


def test_live_mode_has_all_of_restart_mode():
    assert RESTART_TABLE.keys() <= LIVE_TABLE.keys()
    for pair, rows in RESTART_TABLE.items():
        assert LIVE_TABLE[pair][-len(rows) :] == rows, "own rows come first"


def test_every_event_is_described():
    assert list(EVENTS) == list(RoundEvent)


GUARDED = Row((IDLE,), RoundEvent.LOST, "is_late", ())
ALWAYS = Row((IDLE,), RoundEvent.LOST, "", ())


@pytest.mark.parametrize(
    ("rows", "base", "why"),
    [
        ((ALWAYS, GUARDED), None, "follows one without a guard"),
        ((GUARDED,), None, "The last row of idle and lost has a guard"),
        ((ALWAYS,), make_table([ALWAYS]), None),
        ((GUARDED,), make_table([ALWAYS]), None),
    ],
)
def test_tables_that_are_refused(rows, base, why):
    if why is None:
        assert make_table(rows, base)[IDLE, RoundEvent.LOST][0] is rows[0]
    else:
        with pytest.raises(ValueError, match=why):
            make_table(rows, base)


class Machine(RoundMachine):
    table = make_table(
        [
            Row((IDLE,), RoundEvent.LOST, "is_late", ("note", "start", "note"), (RUNNING,)),
            Row((IDLE,), RoundEvent.LOST, "", ("note", "note")),
        ]
    )

    def __init__(self):
        self.stage = IDLE
        self.notes = []

    def is_late(self, occurrence):
        return occurrence.now > 10.0

    def note(self, occurrence):
        self.notes.append(occurrence.node)
        return [occurrence.now]

    def start(self, occurrence):
        self.stage = RUNNING
        return ["started"]


def test_the_first_row_whose_guard_holds_is_carried_out_until_the_stage_changes():
    machine = Machine()
    assert machine.handle(Occurrence(RoundEvent.LOST, 5.0, "n1")) == [5.0, 5.0]
    assert machine.stage is IDLE
    assert machine.handle(Occurrence(RoundEvent.LOST, 11.0, "n2")) == [11.0, "started"]
    assert (machine.stage, machine.notes) == (RUNNING, ["n1", "n1", "n2"])
