"""The membership of a farm: what differs from a service."""

from __future__ import annotations

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.holdings import MAX_RESTARTS
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    RoundSettings,
    RoundStage,
    SendAssign,
    SendRelease,
    SendView,
)
from malletrain.rounds.service import FarmRounds

SETTINGS = RoundSettings(warmup_s=60.0, drain_s=10.0, failure_grace_s=2.0)


def up(rounds, node, now=0.0):
    return rounds.phase(node, Assignment("job", AssignmentPhase.READY), now)


def ended(rounds, node, now, failures=()):
    """The launcher's end is reported, and the failure grace is over."""
    assignment = Assignment("job", AssignmentPhase.EXITED, 0, failures)
    return rounds.phase(node, assignment, now) + rounds.tick(now + 2.0)


def running(*nodes):
    rounds = FarmRounds(SETTINGS)
    rounds.move(nodes, 0.0)
    for node in nodes:
        up(rounds, node)
    return rounds


def views(actions):
    return {a.node: a.members for a in actions if isinstance(a, SendView)}


def test_a_member_learns_of_itself_only():
    rounds = running("a")
    rounds.move(("a", "b"), 1.0)
    assert views(up(rounds, "b", 2.0)) == {
        "a": (("a", "", None, False),),
        "b": (("b", "", None, False),),
    }
    assert rounds.members == ("a", "b")
    assert views(rounds.move(("a",), 3.0)) == {
        "a": (("a", "", None, False),),
        "b": (("b", "", 13.0, False),),
    }
    assert SendRelease("b") in rounds.drained("b", 3, 4.0)


def test_a_launcher_that_ends_is_started_again_without_a_failure_of_the_job():
    rounds = running("a", "b")
    actions = ended(rounds, "a", 1.0, (Failure(0, -9, 1.0),))
    assert SendAssign("a") in actions
    assert not any(isinstance(action, Broke) for action in actions)
    assert rounds.members == ("b",)
    up(rounds, "a", 5.0)
    assert set(rounds.members) == {"a", "b"}
    assert rounds.stage is RoundStage.RUNNING


def test_the_only_launcher_is_started_again_too():
    rounds = running("a")
    assert SendAssign("a") in ended(rounds, "a", 1.0)


def test_a_launcher_that_never_comes_up_is_a_failure_of_the_job():
    rounds = FarmRounds(SETTINGS)
    rounds.move(("a",), 0.0)
    assert any(isinstance(action, Broke) for action in ended(rounds, "a", 1.0))


def test_a_node_on_which_it_ends_again_and_again_is_rejected():
    rounds, now = running("a", "b"), 0.0
    for _ in range(MAX_RESTARTS):
        now += 10.0
        assert SendAssign("a") in ended(rounds, "a", now)
        up(rounds, "a", now + 5.0)
    [rejected] = [a for a in ended(rounds, "a", now + 10.0) if isinstance(a, NodesRejected)]
    assert rejected.nodes == ("a",)
    assert rounds.target == ("b",)


def test_a_node_without_the_software_is_rejected_at_once():
    rounds = running("a", "b")
    failure = Failure(0, 78, 1.0, cause="The module 'x' cannot be loaded on this node.")
    [rejected] = [a for a in ended(rounds, "a", 1.0, (failure,)) if isinstance(a, NodesRejected)]
    assert rejected.unfit
