"""What polls show: a main scheduler that does not answer or has too much to do; a lease that runs
without a word of its agent, which is cancelled, and its node left alone; leases that the main
scheduler has and the daemon does not want, which are ended, also after a restart (found by the
simulation, tests/dst, seeds 2 and 37).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from malletrain.daemon.leases.polls import (
    RETRY_INTERVAL_S,
    PollWatch,
    SilentLeases,
    Strays,
    last_output,
    likely_cause,
    node_problem,
)
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from scavenger.batch.rules import Choice, Explanations, GapRules, NodeFacts
from scavenger.interface import Contact, Lease, LeaseState, SchedulerError
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until


def test_a_poll_that_is_late_is_missed_while_it_is_under_way():
    watch = PollWatch(5.0)
    watch.began(100.0)
    assert (watch.missed(104.0), watch.trouble(104.0)) == (0, "")
    assert watch.missed(112.0) == 1
    assert watch.trouble(112.0) == (
        "it has not answered for 12 s. It has not answered since the daemon's start."
    )
    watch.answered(133.0)
    assert (watch.missed(150.0), watch.trouble(150.0)) == (0, "")


def test_polls_that_fail_are_counted_until_one_is_answered():
    watch = PollWatch(5.0)
    watch.began(0.0)
    watch.answered(1.0)
    watch.began(10.0)
    watch.failed("slurmctld does not answer.")
    assert watch.missed(12.0) == 1
    assert watch.trouble(61.0) == "slurmctld does not answer. Its last answer came 1 min ago."
    watch.began(20.0)
    assert watch.missed(21.0) == 1
    assert watch.missed(40.0) == 2, "the one under way is late"
    watch.failed("slurmctld does not answer.")
    assert watch.missed(41.0) == 2
    watch.began(50.0)
    watch.answered(51.0)
    assert (watch.missed(60.0), watch.error) == (0, "")


def test_where_each_poll_takes_long_one_that_takes_as_long_is_not_missed():
    watch = PollWatch(5.0)
    watch.began(0.0)
    watch.answered(9.0)
    watch.began(20.0)
    assert watch.missed(37.0) == 0
    assert watch.missed(39.0) == 1


class Moody(Imagined):
    """A scheduler whose mood a test sets."""

    mood = Contact(calls={("squeue", "ok"): 7})

    def contact(self):
        return self.mood


def test_that_the_scheduler_is_busy_is_told_once_and_so_is_its_end(tmp_path):
    machine = Moody("n0")
    daemon = RunningDaemon(tmp_path, machine, several=False)

    def event_kinds():
        kinds = (EventKind.SCHEDULER_BUSY, EventKind.SCHEDULER_ANSWERS)
        return [e.kind for e in daemon.events() if e.kind in kinds]

    try:
        until(
            lambda: daemon.metric("scheduler_calls_total", command="squeue", outcome="ok") == 7,
            "the calls are counted",
        )
        calm = machine.mood
        machine.mood = replace(calm, busy="RPC rate limit", busy_s=5.0, refused_s=60.0)
        until(
            lambda: daemon.metric("scheduler_backoff_seconds", cause="busy") == 5, "it is noticed"
        )
        until(
            lambda: daemon.metric("scheduler_backoff_seconds", cause="refused") == 60, "so is this"
        )
        machine.mood = replace(machine.mood, busy="RPC rate limit", busy_s=10.0)
        until(lambda: daemon.metric("scheduler_backoff_seconds", cause="busy") == 10, "it goes on")
        machine.mood = calm
        until(lambda: daemon.metric("scheduler_backoff_seconds", cause="busy") == 0, "it is over")
        assert event_kinds() == ["scheduler-busy", "scheduler-answers"]
        [sentence] = [e.sentence for e in daemon.events() if e.kind == "scheduler-busy"]
        assert "RPC rate limit" in sentence
        with daemon.client() as client:
            assert client.usage() == []
    finally:
        daemon.stop()


def test_a_lease_whose_agent_never_reports_is_cancelled_and_another_node_taken(tmp_path):
    machine = Imagined("n0", "n1")
    machine.begins = LeaseState.PENDING
    daemon = RunningDaemon(tmp_path, machine, allocation='lease_wait = "5 s"')
    heard = None
    try:
        daemon.submit("ann")
        [silent] = until(lambda: machine.of("ann"), "ann has a lease")
        machine.run(silent)
        until(lambda: silent not in machine.leases, "it is cancelled")
        [other] = until(lambda: machine.of("ann"), "ann has a lease on the other node")
        heard = Agent(daemon, other)
        heard.hello()
        heard.hear(messages.Welcome)
        machine.run(other)
        assert machine.requests[silent].node != machine.requests[other].node
        [event] = [e for e in daemon.events() if e.kind == "lease-unheard"]
        assert (event.node, event.lease) == (machine.requests[silent].node, silent)
        assert "has not reported for 5 s" in event.sentence
        assert f"~ann/.local/state/malletrain/leases/{silent}.out" in event.sentence
        assert daemon.daemon.endpoint.rpartition(":")[2] in event.sentence
        with daemon.client("olga") as client:
            [failed] = client.status().failed_starts
        assert f"start on {event.node}, and no agent reports from them." in failed
        assert event.sentence in failed
        until(
            lambda: [
                e
                for e in daemon.events()
                if e.kind == "lease-ended"
                and e.lease == silent
                and "nothing was heard of its agent" in e.sentence
            ],
            "the end says why",
        )
    finally:
        if heard is not None:
            heard.close()
        daemon.stop()


def test_the_time_counts_from_when_the_lease_was_seen_without_an_agent():
    unheard = SilentLeases(60.0)
    assert unheard.overdue(["a", "b"], 0.0) == []
    assert unheard.overdue(["a"], 59.0) == []  # b's agent is there
    assert unheard.overdue(["a", "b"], 61.0) == ["a"]  # and was lost again just now
    assert unheard.overdue(["b"], 1000.0) == []  # the daemon stood still meanwhile
    assert unheard.overdue(["b"], 1001.0) == ["b"]


def test_its_last_words_are_kept(tmp_path):
    assert last_output(tmp_path / "L1.out") == ""
    (tmp_path / "L1.out").write_bytes(b"x" * 5000 + b"\n\nline 1\nline  2\n\nNo module\xff\n")
    assert (
        last_output(tmp_path / "L1.out") == "line 1 / line 2 / No module\N{REPLACEMENT CHARACTER}"
    )
    for words in ("oops", "oops."):
        assert likely_cause(words, "n1", "tcp://10.0.0.1:7443") == "It said last: oops."


def test_where_nothing_is_known_the_cause_is_guessed():
    cause = likely_cause("", "n1", "tcp://[fd00::1]:7443")
    assert "n1 cannot connect to [fd00::1]" in cause
    assert "port 7443" in cause


def test_a_node_of_which_the_main_scheduler_knows_that_it_is_down_is_called_so():
    """The node has no power: the sentence must not blame a firewall."""
    nodes = [NodeFacts("n1", "down", False, trouble="it is down"), NodeFacts("n2", "free", True)]
    explanations = Explanations(nodes, GapRules(), Choice((), {}), 0.0)
    assert node_problem(explanations, "n2") == node_problem((), "n1") == ""
    trouble = node_problem(explanations, "n1")
    cause = likely_cause("", "n1", "tcp://10.0.0.1:7443", problem=trouble)
    assert cause == "The main scheduler says of n1: it is down."


def lease(name, state=LeaseState.RUNNING):
    return Lease(name, f"s{name}", state, "n0")


@pytest.mark.parametrize(
    ("leases", "active", "ended"),
    [
        ([lease("l1")], {"l1"}, []),
        ([lease("l1")], set(), ["l1"]),
        ([lease("l1", LeaseState.PENDING)], set(), ["l1"]),
        ([lease("l1", LeaseState.ENDED)], set(), []),
        ([lease("l1"), lease("l2")], {"l1"}, ["l2"]),
    ],
)
def test_what_is_there_and_not_wanted_is_ended(leases, active, ended):
    assert [one.id for one in Strays().to_end(leases, active, 0.0)] == ended


def test_it_is_asked_for_again_only_after_a_while():
    strays, leases = Strays(), [lease("l1")]
    counts = [
        len(strays.to_end(leases, set(), now))
        for now in (0.0, 5.0, RETRY_INTERVAL_S, RETRY_INTERVAL_S + 5.0)
    ]
    assert counts == [1, 0, 1, 0]
    assert strays.to_end([], set(), RETRY_INTERVAL_S + 6.0) == []
    # It is no longer listed, so that another of that name is ended at once.
    assert strays.to_end(leases, set(), RETRY_INTERVAL_S + 7.0) == leases


class Mute(Imagined):
    """Takes every lease and cannot say so."""

    def take(self, requests):
        super().take(requests)
        raise SchedulerError("It did not answer within 30 s.")


def test_a_lease_that_was_taken_without_a_word_is_ended_by_the_next_daemon(tmp_path):
    machine = Mute("n0")
    first = RunningDaemon(tmp_path, machine)
    try:
        job = first.submit("ann")
        until(lambda: [e for e in first.events() if e.kind == "lease-ended"], "it is given up")
        with first.client("ann") as client:
            client.cancel([job])
    finally:
        first.stop()
    [stray] = list(machine.leases) or ["l1"]
    machine.leases[stray] = lease(stray)  # its job turns up
    second = RunningDaemon(tmp_path, machine)
    try:
        until(lambda: not machine.leases, "it is ended")
    finally:
        second.stop()
