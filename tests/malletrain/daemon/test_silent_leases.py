"""A lease that runs without a word of its agent is cancelled, and its node left alone."""

from malletrain.daemon.leases.polls import (
    SilentLeases,
    last_output,
    likely_cause,
    node_problem,
)
from malletrain.protocol import messages
from scavenger.batch.rules import Choice, Explanations, GapRules, NodeFacts
from scavenger.interface import LeaseState
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until


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
