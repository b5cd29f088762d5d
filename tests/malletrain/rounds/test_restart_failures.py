"""The rounds of one job when its workers fail: what is a failure of the job, and which cause is
named.
"""

from __future__ import annotations

import pytest

from malletrain.protocol.failures import by_cause, describe
from malletrain.protocol.messages import Failure
from malletrain.rounds.interface import (
    Broke,
    NodesRejected,
    SaveRound,
    SendAssign,
    SendRelease,
    SendRound,
)
from malletrain.rounds.restart import RestartRounds
from tests.malletrain.rounds.rounds_tables import (
    CLOSED,
    SETTINGS,
    STORE,
    fails,
    running,
    says,
    settle,
)

# --- workers that fail ---


def test_a_crash_is_reported_after_the_failure_grace_with_the_first_cause():
    r = running("a", "b", "c")
    assert fails(r, 110.0, "c", rank=2, tail=f"first\n{CLOSED}", time=109.8) == []
    assert (
        fails(r, 110.1, "b", rank=1, tail="Traceback\nValueError: bad batch\n\n", time=109.9) == []
    )
    assert fails(r, 110.2, "a", rank=0, code=-15, tail="", time=109.7) == []
    assert r.tick(111.9) == []
    (broke,) = r.tick(112.0)
    assert [f.rank for f in broke.failures] == [1, 0, 2]
    assert broke.sentence == "Rank 1 exited with code 1. Its last line: ValueError: bad batch"
    assert r.next_wakeup() is None


def test_a_crash_that_every_member_tells_by_itself_is_told_at_once():
    r = running("a", "b")
    assert fails(r, 110.0, "b", rank=1, tail=CLOSED) == []
    (broke,) = fails(r, 110.1, "a", tail="ValueError: bad batch")
    assert broke.sentence == "Rank 0 exited with code 1. Its last line: ValueError: bad batch"
    assert r.next_wakeup() is None


@pytest.mark.parametrize(
    ("code", "tail", "why"),
    [
        (-9, "", "a node that is taken without notice kills its processes"),
        (-15, "", "as one does that is given notice"),
        (1, CLOSED, "all speak of a peer, and none is it: a third may be lost"),
    ],
)
def test_a_crash_that_may_be_a_loss_waits_although_every_member_tells_it(code, tail, why):
    r = running("a", "b")
    assert fails(r, 110.0, "a", tail=CLOSED) == []
    assert fails(r, 110.1, "b", rank=1, code=code, tail=tail) == [], why
    assert r.tick(111.9) == []
    actions = [action for now in (112.0, 116.1) for action in r.tick(now)]
    assert [type(action) for action in actions] == [Broke]


KILLED = Failure(1, -9, 110.3, cause="The launcher was killed.")


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_killed_launcher_is_the_first_cause_and_may_be_the_beginning_of_a_loss(first):
    r = running("a", "b")
    for node in (first, "ab".replace(first, "")):
        if node == "a":
            assert fails(r, 110.0, "a", tail=CLOSED) == []
        else:
            assert says(r, 110.0, "exited", "b", generation=1, failures=(KILLED,)) == []
    assert r.tick(112.0) == [], "the agent of a node that is taken can be killed last"
    assert r.tick(115.9) == []
    (broke,) = r.tick(116.0)
    assert broke.failures[0] == KILLED
    assert broke.sentence == "Rank 1 was killed by signal 9: The launcher was killed."
    assert SendAssign("b") in r.move(("a", "b"), 117.0)


def test_a_launcher_that_its_agent_killed_is_not_taken_for_the_beginning_of_a_loss():
    r = running("a", "b")
    cause = "The job uses 900 MiB of memory on this node, and its slot has 800 MiB."
    own = Failure(1, -9, 110.3, cause=cause, by_agent=True)
    fails(r, 110.0, "a", tail=CLOSED)
    says(r, 110.0, "exited", "b", generation=1, failures=(own,))
    (broke,) = r.tick(112.0)
    assert broke.sentence == f"Rank 1 was killed by signal 9: {cause}"


@pytest.mark.parametrize("cause", ["", "The process was killed by the kernel."])
def test_the_words_of_a_cause_do_not_say_who_killed_the_launcher(cause):
    """An earlier agent says less: its own kills are reported later, and none too early."""
    r = running("a", "b")
    fails(r, 110.0, "a", tail=CLOSED)
    says(r, 110.0, "exited", "b", generation=1, failures=(Failure(1, -9, 110.3, cause=cause),))
    assert r.tick(112.0) == []
    assert [type(action) for action in r.tick(116.0)] == [Broke]


def test_a_node_that_is_lost_after_its_launcher_was_killed_is_no_failure():
    r = running("a", "b")
    says(r, 110.0, "exited", "b", generation=1, failures=(KILLED,))
    fails(r, 110.2, "a", tail=CLOSED)
    assert r.tick(112.0) == []
    r.gone("b", 113.0)
    assert r.tick(120.0) == []
    assert r.move(("a",), 121.0)[0] == SaveRound(2, ("a",))


@pytest.mark.parametrize(
    ("phase", "tail", "why"),
    [
        ("exited", "ValueError: bad batch", "the script of another member failed by itself"),
        ("failed", CLOSED, "a worker was killed, and its launcher lives"),
    ],
)
def test_a_crash_that_is_no_loss_does_not_wait_for_one(phase, tail, why):
    r = running("a", "b", "c")
    says(r, 110.0, phase, "b", generation=1, failures=(KILLED,))
    fails(r, 110.2, "a", tail=tail)
    assert [type(action) for action in r.tick(112.0)] == [Broke], why


@pytest.mark.parametrize(
    ("reports", "nodes", "why"),
    [
        ({"a": (1, CLOSED), "b": (1, "ValueError: oops")}, ("b",), "a lost its peer"),
        ({"a": (-15, ""), "b": (-11, "")}, ("b",), "a was stopped"),
        ({"a": (1, "ValueError: oops"), "b": (1, "ValueError: oops")}, ("a", "b"), "both raised"),
        ({"b": (1, "ValueError: oops")}, ("b",), "a has not noticed"),
    ],
)
def test_a_failure_names_the_nodes_on_which_workers_failed_by_themselves(reports, nodes, why):
    r = running("a", "b")
    actions = []
    for rank, (node, (code, tail)) in enumerate(reports.items()):
        actions += fails(r, 110.0, node, rank=rank, code=code, tail=tail)
    (broke,) = actions or r.tick(112.0)
    assert broke.nodes == nodes, why


def test_a_launcher_that_entered_no_round_is_the_fault_of_no_node_of_the_last_one():
    """Its workers have no rank, and a, which had rank 0, ran well."""
    r = running("a", "b")
    r.gone("a", 110.0)
    r.gone("b", 110.0)
    r.move(("c",), 111.0)
    missing = Failure(0, 126, 112.0, cause="There is no folder /x on this node.")
    (broke,) = says(r, 112.0, "exited", "c", failures=(missing,))
    assert (broke.failures, broke.nodes) == ((missing,), ())


def test_a_crash_on_a_node_that_is_doubted_waits_for_the_verdict():
    r = running("a", "b")
    r.doubt("b", False)
    assert fails(r, 110.0, "b", rank=1) == []
    assert r.tick(112.0) == []
    assert r.tick(140.0) == []
    r.doubt("b", True)
    assert len(r.tick(r.next_wakeup())) == 1, "the node is well"


def test_a_crash_on_a_node_that_was_sick_is_not_the_jobs():
    r = running("a", "b")
    r.doubt("b", False)
    fails(r, 110.0, "b", rank=1)
    fails(r, 110.1, "a", rank=0, tail=CLOSED)
    r.gone("b", 130.0)
    assert r.tick(150.0) == []
    assert r.move(("a",), 151.0)[0] == SaveRound(2, ("a",))


def test_a_crash_is_reported_once_however_late_the_other_ranks_notice():
    r = running("a", "b")
    fails(r, 110.0, "b", rank=1)
    assert len(r.tick(112.0)) == 1
    assert fails(r, 114.0, "a", tail=CLOSED) == []
    assert r.tick(130.0) == []
    assert r.move(("a", "b"), 131.0) == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]
    settle(r, 132.0, "a", "b")
    fails(r, 140.0, "a")
    assert len(r.tick(142.0)) == 1, "the next round's crash counts again"


def test_a_crash_that_was_reported_is_not_reported_again_while_joiners_come_up():
    r = running("a", "b")
    fails(r, 110.0, "b", rank=1)
    assert len(r.tick(112.0)) == 1
    r.move(("a", "b", "c"), 112.0)
    assert fails(r, 113.0, "a") == []
    assert r.tick(126.9) == []
    assert says(r, 126.9, "ready", "c")[0] == SaveRound(2, ("a", "b", "c"))


def test_a_loss_while_joiners_come_up_shortens_the_wait_for_them():
    r = running("a", "b", "c")
    r.move(("a", "c", "d"), 110.0)
    assert r.next_wakeup() == 170.0
    r.gone("b", 111.0)
    assert r.next_wakeup() == 126.0


def test_a_crash_while_joiners_come_up_counts_too():
    r = running("a")
    r.move(("a", "b"), 110.0)
    (broke,) = fails(r, 112.0, "a")
    assert isinstance(broke, Broke)
    assert r.move(("a", "b"), 114.0) == []
    assert says(r, 115.0, "ready", "b")[0] == SaveRound(2, ("a", "b"))


def test_a_launcher_that_ends_while_the_job_runs():
    r = running("a", "b")
    says(r, 110.0, "exited", "b")
    (broke,) = r.tick(112.0)
    assert "launcher ended on b" in broke.sentence
    assert r.move(("a", "b"), 112.0) == [SendAssign("b")]
    assert r.next_wakeup() == 127.0
    assert says(r, 114.0, "ready", "b") == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


@pytest.mark.parametrize("first", ["failures", "loss"])
def test_failures_because_of_a_lost_node_are_no_failure_of_the_job(first):
    r = running("a", "b", "c")
    if first == "failures":
        fails(r, 110.0, "a", tail=CLOSED)
        r.gone("b", 111.0)
    else:
        r.gone("b", 110.0)
        fails(r, 111.0, "a", tail=CLOSED)
    fails(r, 111.5, "c", tail=CLOSED)
    assert r.tick(150.0) == []
    assert r.next_wakeup() is None
    assert r.move(("a", "c"), 151.0)[0] == SaveRound(2, ("a", "c"))


def test_when_every_last_word_speaks_of_a_peer_the_news_of_a_loss_gets_more_time():
    r = running("a", "b", "c")
    fails(r, 110.0, "a", tail=CLOSED)
    fails(r, 110.0, "c", tail=CLOSED)
    assert r.tick(112.0) == []
    assert r.next_wakeup() == 116.0
    r.gone("b", 115.0)
    assert r.tick(116.0) == []

    r = running("a", "b")
    fails(r, 110.0, "a", tail=CLOSED)
    r.tick(112.0)
    (broke,) = r.tick(116.0)
    assert broke.sentence.startswith("Rank 0 exited with code 1")


def test_while_an_agent_cannot_be_reached_no_failure_is_told():
    r = running("a", "b")
    r.unreachable("b")
    fails(r, 110.0, "a")
    assert r.tick(112.0) == []
    assert r.next_wakeup() == 114.0
    r.reachable("b")
    assert len(r.tick(114.0)) == 1

    r = running("a", "b")
    r.unreachable("b")
    fails(r, 110.0, "a")
    r.tick(112.0)
    r.gone("b", 113.0)
    assert r.next_wakeup() is None


def test_a_plan_that_comes_before_the_failure_is_told_restarts_the_workers_anyway():
    r = running("a", "b")
    fails(r, 110.0, "a")
    assert r.move(("a",), 111.0)[:2] == [SendRelease("b"), SaveRound(2, ("a",))]
    assert r.tick(113.0) == []


def test_who_does_not_join_the_round_in_time_is_named():
    r = RestartRounds(SETTINGS, min_nodes=2)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.store_up("a", 1, *STORE)
    says(r, 2.0, "running", "a")
    assert r.tick(61.0) == [Broke((), "b did not join the round within 60 s.")]
    assert r.move(("a", "b"), 61.0) == [SaveRound(2, ("a", "b")), SendRound("a", 2, 0, 2, None)]


def test_who_does_not_join_in_time_is_left_out_where_the_others_are_enough():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b", "c"), 0.0)
    says(r, 1.0, "ready", "a", "b", "c")
    r.store_up("a", 1, *STORE)
    says(r, 2.0, "running", "a", "c")
    release, rejected, *formed = r.tick(61.0)
    assert release == SendRelease("b")
    assert rejected.nodes == ("b",)
    assert "between there and a" in rejected.sentence
    assert formed == [SaveRound(2, ("a", "c")), SendRound("a", 2, 0, 2, None)]


def test_a_member_that_cannot_be_reached_gets_more_time_to_join():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.unreachable("b")
    assert r.tick(61.0) == []
    assert r.next_wakeup() == 63.0


def test_a_crash_at_once_breaks_the_round_that_was_never_formed():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "ready", "a", "b")
    r.store_up("a", 1, *STORE)
    says(r, 2.0, "running", "a")
    assert fails(r, 2.5, "a") == []
    assert says(r, 3.0, "running", "b") == []
    (broke,) = r.tick(4.5)
    assert isinstance(broke, Broke)


# --- software that is not there ---

LACKING = Failure(0, 78, 1.0, cause="There is no conda environment x on this node.")
SENTENCE = "There is no conda environment x on this node"


def test_a_node_without_the_jobs_software_costs_the_node_and_no_try():
    r = RestartRounds(SETTINGS)
    r.move(("a",), 0.0)
    rejected = says(r, 1.0, "exited", "a", failures=(LACKING,))
    assert rejected == [SendRelease("a"), NodesRejected(("a",), SENTENCE, unfit=True)]
    assert r.move(("b",), 2.0) == [SendAssign("b")]
    [formed, _] = says(r, 3.0, "ready", "b")
    assert formed == SaveRound(1, ("b",))


def test_whether_it_is_there_on_another_node_is_waited_for():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b", "c"), 0.0)
    assert says(r, 1.0, "exited", "a", "b", failures=(LACKING,)) == []
    there = says(r, 2.0, "ready", "c")
    assert NodesRejected(("a", "b"), "the launcher ended there at once") in there
    assert SaveRound(1, ("c",)) in there
    r = RestartRounds(SETTINGS)
    r.move(("a", "b", "c"), 0.0)
    nowhere = says(r, 1.0, "exited", "a", "b", "c", failures=(LACKING,))
    assert NodesRejected(("a", "b", "c"), SENTENCE, unfit=True) in nowhere


def test_who_does_not_come_up_where_others_lack_the_software_is_told_in_time():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "exited", "a", failures=(LACKING,))
    assert NodesRejected(("a",), SENTENCE, unfit=True) in r.tick(60.0)
    (broke,) = r.tick(120.0)
    assert broke.sentence == "No launcher came up in time on b."


def test_a_launcher_that_ends_for_another_reason_is_the_jobs_failure_still():
    r = RestartRounds(SETTINGS)
    r.move(("a", "b"), 0.0)
    says(r, 1.0, "exited", "a", failures=(LACKING,))
    other = Failure(0, 1, 1.0, "ValueError: oops")
    (broke,) = says(r, 1.0, "exited", "b", failures=(other,))
    assert isinstance(broke, Broke)


# --- first causes ---


@pytest.mark.parametrize(
    ("failures", "sentence"),
    [
        (
            [Failure(3, 1, 5.0, "a\nKeyError: 'x'\n")],
            "Rank 3 exited with code 1. Its last line: KeyError: 'x'",
        ),
        ([Failure(0, -9, 5.0)], "Rank 0 was killed by signal 9; often the node ran out of memory."),
        (
            [Failure(0, 1, 1.0, CLOSED), Failure(1, -9, 2.0)],
            "Rank 1 was killed by signal 9; often the node ran out of memory.",
        ),
        (
            [Failure(0, -15, 1.0, "x"), Failure(1, 1, 2.0, CLOSED)],
            "Rank 0 was killed by signal 15. Its last line: x",
        ),
        (
            [Failure(1, 7, 2.0, "later"), Failure(0, 7, 1.0, "sooner")],
            "Rank 0 exited with code 7. Its last line: sooner",
        ),
    ],
)
def test_the_first_cause_in_one_sentence(failures, sentence):
    assert describe(by_cause(failures)) == sentence
