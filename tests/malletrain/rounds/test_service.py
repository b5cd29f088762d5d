"""The membership of a service: tables of events and what follows, and random histories."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import AssignmentPhase
from malletrain.rounds.interface import (
    AllUp,
    Broke,
    NodesRejected,
    RoundSettings,
    RoundStage,
    SaveRound,
    SendAssign,
    SendRelease,
    SendView,
    StartMeasured,
    WorkersDone,
)
from malletrain.rounds.service import ServiceRounds
from tests.draws import cases

SETTINGS = RoundSettings(warmup_s=60.0, drain_s=10.0, failure_grace_s=2.0)


def up(rounds, node, now=0.0, phase="ready"):
    return rounds.phase(node, Assignment("job", AssignmentPhase(phase), 0, (), f"{node}:1"), now)


def ended(rounds, node, now=0.0):
    return rounds.phase(
        node,
        Assignment("job", AssignmentPhase.EXITED, 0, (Failure(0, -9, now, "last words"),)),
        now,
    )


def lacking(rounds, node, now=0.0):
    failure = Failure(0, 78, now, cause="There is no image x.")
    return rounds.phase(node, Assignment("job", AssignmentPhase.EXITED, 0, (failure,)), now)


def serving(*nodes):
    rounds = ServiceRounds(SETTINGS)
    rounds.move(nodes, 0.0)
    for node in nodes:
        up(rounds, node)
    return rounds


def views(actions):
    """The view that each node is sent: node → (node, leaving) of each member."""
    return {
        a.node: tuple((m.node, m.leaves_at is not None) for m in a.members)
        for a in actions
        if isinstance(a, SendView)
    }


def kinds(actions):
    return [type(a) for a in actions]


def test_members_are_told_as_they_come_up():
    rounds = ServiceRounds(SETTINGS)
    assert kinds(rounds.move(("a", "b"), 0.0)) == [SendAssign, SendAssign]
    first = up(rounds, "a")
    assert views(first) == {"a": (("a", False),)}
    assert kinds(first)[0] is SaveRound, "saved before anybody hears of it"
    second = up(rounds, "b")
    assert views(second) == dict.fromkeys("ab", (("a", False), ("b", False)))
    assert AllUp(2, ("a", "b")) in second
    assert rounds.stage is RoundStage.RUNNING


def loads(rounds, node, *, loading, start_s=None, now=0.0):
    assignment = Assignment(
        "job", AssignmentPhase.READY, 0, (), f"{node}:1", loading=loading, start_s=start_s
    )
    return rounds.phase(node, assignment, now)


def test_a_member_that_loads_is_announced_and_again_when_it_is_ready():
    rounds = ServiceRounds(SETTINGS)
    rounds.move(("a",), 0.0)
    first = loads(rounds, "a", loading=True)
    assert rounds.view == (("a", "a:1", None, True),)
    assert AllUp(1, ("a",)) in first, "its start is over for plans: the process is there"
    ready = loads(rounds, "a", loading=False, start_s=170.0)
    assert ready[0] == StartMeasured("a", 170.0)
    assert rounds.view == (("a", "a:1", None, False),)
    assert rounds.generation == 2


def test_a_start_is_measured_once():
    rounds = ServiceRounds(SETTINGS)
    rounds.move(("a",), 0.0)
    assert StartMeasured("a", 3.0) in loads(rounds, "a", loading=False, start_s=3.0)
    again = loads(rounds, "a", loading=False, start_s=3.0)
    assert not any(isinstance(action, StartMeasured) for action in again)
    adopted = ServiceRounds(SETTINGS)  # a daemon that was restarted
    report = Assignment("job", AssignmentPhase.RUNNING, 1, (), "a:1", start_s=3.0)
    adopted.adopt(1, ("a",), {"a": report}, 1.0)
    again = adopted.phase("a", report, 2.0)
    assert not any(isinstance(action, StartMeasured) for action in again)


def test_the_start_of_a_process_that_is_started_again_is_another_one():
    rounds = serving("a", "b")
    loads(rounds, "b", loading=False, start_s=3.0)
    ended(rounds, "b", 1.0)
    rounds.tick(3.0)
    rounds.move(("a", "b"), 4.0)
    assert StartMeasured("b", 2.0) in loads(rounds, "b", loading=False, start_s=2.0, now=5.0)


def test_nobody_is_stopped_because_another_joins():
    rounds = serving("a")
    assert kinds(rounds.move(("a", "b"), 1.0)) == [SendAssign]
    assert set(views(up(rounds, "b", 2.0))) == {"a", "b"}


def test_a_leaver_is_announced_and_released_when_it_is_drained():
    rounds = serving("a", "b")
    leaving = rounds.move(("a",), 5.0, within_s=30.0)
    assert views(leaving) == dict.fromkeys("ab", (("a", False), ("b", True)))
    assert rounds.next_wakeup() == 5.0 + 0.95 * 24.0, "less than the agent leaves it"
    done = rounds.drained("b", rounds.generation, 6.0)
    assert SendRelease("b") in done
    assert views(done) == {"a": (("a", False),)}
    assert rounds.drained("a", rounds.generation, 6.0) == [], "nobody asked it to"


def test_a_leaver_that_says_nothing_is_released_in_time():
    rounds = serving("a", "b")
    rounds.move(("a",), 5.0)
    assert rounds.tick(14.9) == []
    assert SendRelease("b") in rounds.tick(15.0)


def test_the_notice_can_be_taken_back():
    rounds = serving("a", "b")
    rounds.move(("a",), 5.0)
    back = rounds.move(("a", "b"), 6.0)
    assert views(back) == dict.fromkeys("ab", (("a", False), ("b", False)))
    assert SendAssign("b") not in back
    assert rounds.tick(100.0) == []


def test_a_loss_is_told_at_once():
    rounds = serving("a", "b", "c")
    assert views(rounds.gone("b", 1.0)) == dict.fromkeys("ac", (("a", False), ("c", False)))


def test_a_process_that_ends_is_the_jobs_fault_when_its_node_is_not_lost():
    rounds = serving("a", "b")
    assert views(ended(rounds, "b", 1.0)) == {"a": (("a", False),)}
    assert rounds.tick(2.9) == []
    broke = rounds.tick(3.0)
    assert kinds(broke) == [Broke]
    assert (
        "killed by signal 9; often the node ran out of memory. Its last line: last words"
        in broke[0].sentence
    )
    assert rounds.move(("a", "b"), 4.0)[0] == SendAssign("b")
    lost = serving("a", "b")
    ended(lost, "b", 1.0)
    lost.gone("b", 2.0)
    assert lost.tick(3.0) == []


def test_the_failure_waits_while_the_agent_cannot_be_reached():
    rounds = serving("a", "b")
    ended(rounds, "b", 1.0)
    rounds.unreachable("b")
    assert rounds.tick(3.0) == []
    rounds.reachable("b")
    assert kinds(rounds.tick(5.0)) == [Broke]


def test_a_node_on_which_it_does_not_come_up_is_rejected():
    rounds = ServiceRounds(SETTINGS)
    rounds.move(("a", "b", "c"), 0.0)
    up(rounds, "a")
    ended(rounds, "b", 1.0)
    assert [a.nodes for a in rounds.tick(3.0) if isinstance(a, NodesRejected)] == [("b",)]
    late = rounds.tick(60.0)
    assert [a.nodes for a in late if isinstance(a, NodesRejected)] == [("c",)]
    assert any(isinstance(a, AllUp) for a in late)
    nowhere = ServiceRounds(SETTINGS)
    nowhere.move(("a",), 0.0)
    assert kinds(nowhere.tick(60.0)) == [Broke]


def test_done_when_all_are_done():
    rounds = serving("a", "b")
    assert WorkersDone() not in up(rounds, "a", phase="succeeded")
    assert up(rounds, "b", phase="succeeded") == [WorkersDone()]


def test_done_when_who_was_not_done_has_gone():
    rounds = serving("a", "b")
    up(rounds, "a", phase="succeeded")
    assert WorkersDone() in rounds.gone("b", 1.0)
    rounds = serving("a", "b")
    up(rounds, "a", phase="succeeded")
    ended(rounds, "b", 1.0)
    assert WorkersDone() in rounds.move(("a",), 2.0), "the plan lets the one go that failed"
    assert rounds.move((), 3.0) == []
    rounds = ServiceRounds(SETTINGS)
    rounds.move(("a", "b"), 0.0)
    up(rounds, "a", phase="succeeded")
    assert WorkersDone() in rounds.tick(60.0), "b did not come up in time"


def test_not_done_while_one_is_started_again():
    rounds = serving("a", "b")
    up(rounds, "a", phase="succeeded")
    ended(rounds, "b", 1.0)
    assert WorkersDone() not in rounds.move(("a", "b"), 2.0)
    assert up(rounds, "b", phase="succeeded") == [WorkersDone()]


def test_what_was_missed_is_told_again():
    rounds = serving("a", "b")
    again = rounds.phase("a", Assignment("job", AssignmentPhase.RUNNING, 1, (), "a:1"), 9.0)
    assert views(again) == {"a": (("a", False), ("b", False))}
    assert (
        rounds.phase(
            "a", Assignment("job", AssignmentPhase.RUNNING, rounds.generation, (), "a:1"), 9.0
        )
        == []
    )


def test_adoption_takes_over_who_is_there():
    rounds = ServiceRounds(SETTINGS)
    assignments = {
        node: Assignment("job", AssignmentPhase.RUNNING, 7, (), f"{node}:1") for node in "bac"
    }
    actions = rounds.adopt(7, ("b", "a", "lost"), assignments, 0.0)
    assert rounds.members == ("b", "a", "c")
    assert set(views(actions)) == {"a", "b", "c"}
    assert rounds.generation == 8
    assert rounds.stage is RoundStage.RUNNING


def test_nodes_without_the_services_software_are_rejected_one_by_one_once_none_has_come_up():
    r = ServiceRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    assert lacking(r, "a") == []
    assert r.tick(2.0) == [], "b may come up still"
    lacking(r, "b", 3.0)
    actions = [*r.tick(4.0), *r.tick(5.0)]
    assert [a for a in actions if isinstance(a, NodesRejected)] == [
        NodesRejected((node,), "There is no image x", unfit=True) for node in ("a", "b")
    ]
    r = ServiceRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    lacking(r, "a")
    up(r, "b", 1.0)
    [rejected] = [a for a in r.tick(2.0) if isinstance(a, NodesRejected)]
    assert (rejected.nodes, rejected.unfit) == (("a",), False)


class Histories(RuleBasedStateMachine):
    """Nodes come, go, die and say things in any order."""

    def __init__(self):
        super().__init__()
        self.rounds = ServiceRounds(SETTINGS)
        self.now = 0.0
        self.assigned_nodes = set()
        self.releasing = set()
        self.newest = {}
        self.saved = 0

    def follow(self, actions):
        for a in actions:
            if isinstance(a, SendAssign):
                assert a.node not in self.releasing
                self.assigned_nodes.add(a.node)
            elif isinstance(a, SendRelease):
                self.releasing.add(a.node)
            elif isinstance(a, SaveRound):
                assert a.generation > self.saved
                self.saved = a.generation
            elif isinstance(a, SendView):
                assert a.generation == self.saved, "told before it was saved"
                assert a.generation >= self.newest.get(a.node, 0)
                assert a.node in [m.node for m in a.members]
                self.newest[a.node] = a.generation
            elif isinstance(a, Broke):
                self.follow(self.rounds.move(self.rounds.target, self.now))

    @rule(
        nodes=st.permutations("abcd"), count=st.integers(0, 4), within=st.sampled_from([None, 5.0])
    )
    def plan(self, nodes, count, within):
        self.follow(self.rounds.move(nodes[:count], self.now, within))

    @precondition(lambda self: self.assigned_nodes)
    @rule(
        data=st.data(),
        what=st.sampled_from(["ready", "running", "exited", "drained", "released", "gone"]),
    )
    def news(self, data, what):
        node = data.draw(st.sampled_from(sorted(self.assigned_nodes)))
        if what == "drained":
            self.follow(self.rounds.drained(node, self.saved, self.now))
        elif what == "gone" or (what == "released" and node in self.releasing):
            self.assigned_nodes.discard(node)
            self.releasing.discard(node)
            self.newest.pop(node, None)
            self.follow(getattr(self.rounds, what)(node, self.now))
        elif what != "released":
            generation = self.newest.get(node, 0) if what == "running" else 0
            self.follow(
                self.rounds.phase(
                    node,
                    Assignment("job", AssignmentPhase(what), generation, (), f"{node}:1"),
                    self.now,
                )
            )

    @rule(seconds=st.floats(0.1, 70.0))
    def time_passes(self, seconds):
        self.now += seconds
        self.follow(self.rounds.tick(self.now))

    @invariant()
    def nobody_leaves_for_ever(self):
        due = self.rounds.next_wakeup()
        leavers = [m.node for m in self.rounds.view if m.leaves_at is not None]
        assert not leavers or due is not None
        assert set(leavers).isdisjoint(self.rounds.target)
        assert set(self.rounds.members) <= self.assigned_nodes - self.releasing


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=cases(60), stateful_step_count=30, deadline=None)
