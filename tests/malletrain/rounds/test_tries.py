"""What uses up a try: the table of docs/concepts.md, "When a worker fails", row by row."""

from __future__ import annotations

import pytest

from malletrain.protocol.failures import SCRIPT_ENDED
from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import Broke, SaveRound
from malletrain.rounds.live import LiveRounds
from malletrain.rounds.restart import RestartRounds
from malletrain.rounds.service import ServiceRounds
from tests.malletrain.rounds.rounds_tables import SETTINGS

RAISED = Failure(0, 1, 100.0, "ValueError: oops")
KILLED = Failure(0, -9, 100.0)
GAVE_UP = Failure(0, 75, 100.0, "The step could not be given up within 10 s")
OWN_75 = Failure(0, 75, 100.0, "try later", cause=SCRIPT_ENDED)
MODES = {"restart": RestartRounds, "live": LiveRounds, "service": ServiceRounds}

TABLE = [
    # mode, nodes, failure, uses up a try, the others go on in a round without the node
    ("restart", 2, RAISED, True, False),
    ("restart", 2, KILLED, True, False),
    ("restart", 1, RAISED, True, False),
    ("live", 2, RAISED, True, True),
    ("live", 2, KILLED, False, True),
    ("live", 2, GAVE_UP, False, True),
    ("live", 1, RAISED, True, False),
    ("live", 1, KILLED, True, False),
    ("live", 1, GAVE_UP, True, False),
    ("live", 2, OWN_75, True, True),
    ("live", 1, OWN_75, True, False),
    ("service", 2, RAISED, True, False),
    ("service", 2, KILLED, True, False),
]


@pytest.mark.parametrize(("mode", "count", "failure", "counts", "others"), TABLE)
def test_a_row_of_the_table(mode, count, failure, counts, others):
    nodes = ("a", "b")[:count]
    job = MODES[mode](SETTINGS)

    def say(node, phase, now, *failures):
        number = 0 if phase == "ready" else job.generation
        return job.phase(node, Assignment("j", AssignmentPhase(phase), number, failures), now)

    job.move(nodes, 100.0)
    for phase in ("ready", "running"):
        for node in nodes:
            say(node, phase, 101.0)
        job.store_up(nodes[0], 1, "host", 1)
    for node in nodes:
        say(node, "running", 102.0)
    generation, failing = job.generation, nodes[-1]
    actions = say(failing, "failed", 110.0, failure)
    all_actions = [*actions, *job.tick(110.0 + SETTINGS.failure_grace_s)]
    assert sum(isinstance(a, Broke) for a in all_actions) == counts
    formed = [a for a in all_actions if isinstance(a, SaveRound) and a.generation > generation]
    if mode != "service":
        assert bool(formed) == others
