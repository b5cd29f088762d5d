"""Who is to have the state after a drain: those of the next round, the first rank's node first."""

from malletrain.protocol.messages import Assignment
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import RoundStage, SaveRound, SendDrain
from malletrain.rounds.restart import RestartRounds
from tests.malletrain.rounds.rounds_tables import SETTINGS, STORE


def says(r, now, phase, *nodes):
    generation = r.generation if phase == "running" else 0
    actions = []
    for node in nodes:
        assignment = Assignment("j", AssignmentPhase(phase), generation, address=f"{node}:1")
        actions += r.phase(node, assignment, now)
    return actions


def running(*nodes):
    """Each has a keeper at port 1."""
    r = RestartRounds(SETTINGS)
    r.move(nodes, 100.0)
    says(r, 101.0, "ready", *nodes)
    r.store_up(nodes[0], 1, *STORE)
    says(r, 102.0, "running", *nodes)
    assert r.stage is RoundStage.RUNNING
    return r


def next_round(actions):
    return next(action.members for action in actions if isinstance(action, SaveRound))


def test_the_first_heir_is_the_node_of_the_next_rank_0():
    r = running("a", "b", "c")
    assert r.move(("c", "b"), 110.0) == [SendDrain("a", 1, 1, ("b:1", "c:1"))]
    assert next_round(r.drained("a", 1, 111.0, 1)) == ("b", "c")


def test_a_newcomer_is_an_heir_once_its_launcher_is_up():
    r = running("a")
    r.move(("d", "a"), 110.0)
    assert says(r, 112.0, "ready", "d") == [SendDrain("a", 1, 1, ("a:1", "d:1"))]


def test_nobody_is_when_the_job_lets_go_of_all_its_nodes():
    assert running("a", "b").move((), 110.0) == [SendDrain("a", 1, 1)]


def test_the_heirs_change_during_the_drain_and_the_answer_of_before_does_not_count():
    r = running("a", "b", "c")
    assert r.move(("a", "b"), 110.0) == [SendDrain("a", 1, 1, ("a:1", "b:1"))]
    assert r.move(("a", "b"), 110.2) == []
    assert r.move(("b",), 110.5) == [SendDrain("a", 1, 2, ("b:1",))]
    assert r.drained("a", 1, 110.6, 1) == []
    assert r.stage is RoundStage.DRAINING
    assert next_round(r.drained("a", 1, 111.0, 2)) == ("b",)
