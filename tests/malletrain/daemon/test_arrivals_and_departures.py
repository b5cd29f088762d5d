"""A new node warms up a Python before jobs get it; and a node is lost when its connection ends and
its peers lose it, whatever the time limits are.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from malletrain.daemon.leases import arrivals_and_departures
from malletrain.daemon.leases.arrivals_and_departures import of_a_peer
from malletrain.protocol import messages
from malletrain.protocol.interpreters import interpreter_of
from malletrain.protocol.phases import AssignmentPhase
from tests.malletrain.daemon.forged import Imagined, until
from tests.malletrain.daemon.test_other_users_agents import agent, lease_of, start  # noqa: F401

pytestmark = pytest.mark.slow

KEY_B = interpreter_of(messages.JobSpec("", "", "", "/", "/b/python")).key
NODES = ("a", "b", "c")
LOST = "RuntimeError: Connection closed by peer [10.0.0.1]:4242"


def spec(python, **fields):
    return messages.JobSpec("ann", "", "/x.py", "/", python, **fields)


def nodes_of(daemon, job):
    return set(daemon.job(job).nodes)


def test_a_node_is_chosen_for_a_job_when_its_python_is_warm_there(start, agent):  # noqa: F811
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    job = daemon.submit("ann", python="/env/bin/python", env={"A": "1"}, max_nodes=2)
    leases = until(lambda: len(machine.leases) == 2 and sorted(machine.leases), "both leases")
    cold, warm = (agent(daemon, lease) for lease in leases)
    for one in (cold, warm):
        one.hello(warm=())
    [interpreter] = warm.hear(messages.WarmUp).interpreters
    assert interpreter == interpreter_of(spec("/env/bin/python", env={"A": "1"}))
    warm.say(messages.Warm((interpreter.key,)))
    warm.work(job)
    assert nodes_of(daemon, job) == {warm.node}
    assert cold.node not in daemon.components.state.controller.nodes
    cold.say(messages.Warm((interpreter.key,)))
    until(lambda: cold.node in daemon.components.state.controller.nodes, "the plans know of it")


def test_a_node_that_cannot_be_warm_is_waited_for_no_longer_than_the_site_wants(
    start,  # noqa: F811
    agent,  # noqa: F811
):
    machine = Imagined("n0")
    daemon = start(machine)
    daemon.submit("ann", python="/env/bin/python")
    [lease] = until(lambda: list(machine.leases), "the lease")
    slow = agent(daemon, lease)
    slow.hello(warm=())
    slow.hear(messages.WarmUp)
    daemon.call(lambda: setattr(daemon.components.state.agents.on("n0"), "awaited_until", 0.0))
    slow.hear(messages.Assign)


@pytest.mark.parametrize("noticed", [True, False], ids=["by the agent", "by nobody"])
def test_a_node_to_which_the_word_did_not_come_is_told_again(start, agent, noticed):  # noqa: F811
    """The connection broke with the word on its way; the node must not be left waiting for that."""
    machine = Imagined("n0")
    daemon = start(machine)
    arrivals = daemon.components.agent_handlers.arrivals
    if noticed:  # nothing is looked at but what the agent says
        daemon.call(lambda: setattr(arrivals, "tick", lambda now: None))
    job = daemon.submit("ann", python="/env/bin/python")
    [lease] = until(lambda: list(machine.leases), "the lease")
    one = agent(daemon, lease)
    one.hello(warm=())
    [lost] = one.hear(messages.WarmUp).interpreters
    node = daemon.components.state.agents.on("n0")
    daemon.call(lambda: setattr(node, "awaited_until", math.inf))
    if noticed:
        one.hello(warm=())
    else:
        daemon.call(lambda: setattr(node, "warm_up_sent_at", 0.0))
    assert one.hear(messages.WarmUp).interpreters == (lost,)
    one.say(messages.Warm((lost.key,)))
    one.work(job)


def test_jobs_that_need_no_warm_python_wait_for_none(start, agent):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    daemon.submit("ann", env={"MALLETRAIN_PRELOAD": "0"})
    [lease] = until(lambda: list(machine.leases), "the lease")
    one = agent(daemon, lease)
    one.hello(warm=())
    one.hear(messages.Assign)
    daemon.submit("ann", python="/env/bin/python")  # another job, for which there is one
    assert one.hear(messages.WarmUp).interpreters[0].python == "/env/bin/python"


def test_nobody_is_told_the_environment_of_another_users_jobs(start, agent):  # noqa: F811
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    daemon.submit("ann", env={"TOKEN": "hers"})
    daemon.submit("bob", env={"TOKEN": "his"})
    for owner, token in (("ann", "hers"), ("bob", "his")):
        [lease] = lease_of(machine, owner)
        one = agent(daemon, lease)
        one.hello(warm=())
        assert [i.env for i in one.hear(messages.WarmUp).interpreters] == [{"TOKEN": token}]


@pytest.mark.parametrize("other", [{"env": {"MALLETRAIN_PRELOAD": "0"}}, {"python": "/b/python"}])
def test_a_node_does_not_wait_for_the_python_of_a_job_that_is_over(start, agent, other):  # noqa: F811
    machine = Imagined("n0")
    daemon = start(machine)
    first = daemon.submit("ann", python="/a/python")
    [lease] = until(lambda: list(machine.leases), "the lease")
    one = agent(daemon, lease)
    one.hello(warm=())
    one.hear(messages.WarmUp)
    daemon.call(lambda: setattr(daemon.components.state.agents.on("n0"), "awaited_until", math.inf))
    second = daemon.submit("ann", **other)
    with daemon.client("ann") as client:
        client.cancel([first])
    if "python" in other:
        until(lambda: len(daemon.components.state.runs) == 1, "the first is over")
        until(lambda: daemon.components.state.agents.on("n0").awaited == KEY_B, "the second's is")
        one.say(messages.Warm((KEY_B,)))
    assert one.hear(messages.Assign).job == second


@pytest.fixture
def pair(start, agent):  # noqa: F811
    """A job that runs on two nodes: (daemon, job, its agents in rank order)."""
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    job = daemon.submit("ann", min_nodes=1, max_nodes=2)
    leases = until(lambda: len(machine.leases) == 2 and sorted(machine.leases), "both leases")
    agents = [agent(daemon, lease) for lease in leases]
    state, transactions = daemon.components.state, daemon.components.transactions
    daemon.call(lambda: state.controller.hold(math.inf))  # else a plan may be made with one of them
    for one in agents:
        one.hello()
    until(lambda: len(state.controller.nodes) == 2, "both have joined")

    def plan():
        with transactions.begin() as now:
            state.controller.hold(now)

    daemon.call(plan)
    for one in agents:
        one.hear(messages.Assign)
    for one in agents:
        one.say(messages.Phase(messages.Assignment(job, "ready")))
    until(lambda: len(nodes_of(daemon, job)) == 2, "it has both")
    until(lambda: daemon.components.state.runs[job].rounds.members, "a round")
    first, second = sorted(
        agents, key=lambda a: daemon.components.state.runs[job].rounds.members.index(a.node)
    )
    first.hear(messages.Round)
    first.say(messages.StoreUp(job, 1, "127.0.0.1", 5000))
    second.hear(messages.Round)
    for one in (first, second):
        one.say(messages.Phase(messages.Assignment(job, "running", 1)))
    until(lambda: daemon.components.state.runs[job].rounds.stage == "running", "the round runs")
    return daemon, job, first, second


def failed(job, tail=LOST):
    return messages.Phase(
        messages.Assignment(job, AssignmentPhase.FAILED, 1, (messages.Failure(0, 1, 1.0, tail),))
    )


@pytest.mark.parametrize("first_heard", ["the connection", "the peer"])
def test_a_loss_shows_by_the_connection_and_the_peers(pair, first_heard):
    """The agents' time-out is ten minutes, and the main scheduler reports no loss."""
    daemon, job, peer, lost = pair
    if first_heard == "the connection":
        lost.close()
        until(
            lambda: daemon.components.state.agents.on(lost.node).unreachable_since is not None,
            "the connection is seen to be gone",
        )
        peer.say(failed(job))
    else:
        peer.say(failed(job))
        until(lambda: daemon.components.state.runs[job].bereft, "the peer's word is heard")
        lost.close()
    message = peer.hear(messages.Round)
    assert (message.generation, message.group_rank, message.group_size) == (2, 0, 1)
    assert nodes_of(daemon, job) == {peer.node}
    assert "its peers lost it too" in str([e.sentence for e in daemon.events()])


def test_a_connection_that_ends_is_no_loss_where_no_peer_says_so(pair):
    daemon, job, peer, lost = pair
    lost.close()
    until(
        lambda: daemon.components.state.agents.on(lost.node).unreachable_since is not None,
        "the connection is seen to be gone",
    )
    peer.say(failed(job, "ValueError: wrong shape"))
    until(
        lambda: (
            daemon.components.state.runs[job].rounds.holdings.phases[peer.node].phase == "failed"
        ),
        "",
    )
    assert daemon.components.state.agents.on(lost.node) is not None
    assert nodes_of(daemon, job) == {peer.node, lost.node}


def lost(run, *closed):
    """The nodes that are taken for lost when these connections have ended."""
    all_of_them = {
        n: SimpleNamespace(node=n, unreachable_since=1.0 if n in closed else None) for n in NODES
    }
    agents = SimpleNamespace(on=all_of_them.get)
    return [one.node for one in arrivals_and_departures.lost_to_peers(agents, [run])]


def test_whose_connection_ended_beside_a_crash_is_not_lost():
    """What the peers tell may be of the crash, and not of the connection."""
    run = SimpleNamespace(
        rounds=SimpleNamespace(generation=1, members=NODES), bereft={}, crashed=0, barred=0
    )
    assert lost(run, "b", "c") == []
    arrivals_and_departures.note_failures(run, "b", failed("j1").assignment)
    assert lost(run, "c") == ["c"]
    assert lost(run, "b") == [], "it is it that told"
    arrivals_and_departures.note_failures(
        run, "a", failed("j1", "ValueError: wrong shape").assignment
    )
    assert lost(run, "c") == []
    run.rounds.generation = 2
    assert lost(run, "c") == []
    arrivals_and_departures.note_failures(
        run, "a", messages.Assignment("j1", AssignmentPhase.LOST, 2)
    )
    assert lost(run, "c") == ["c"]


@pytest.mark.parametrize(("code", "itself"), [(1, True), (-11, True), (-9, False), (-15, False)])
def test_what_a_node_that_is_taken_does_to_its_workers_is_no_crash(code, itself):
    run = SimpleNamespace(bereft={}, crashed=0, barred=0)
    failure = messages.Failure(0, code, 1.0, "oops")
    arrivals_and_departures.note_failures(
        run, "a", messages.Assignment("j1", AssignmentPhase.FAILED, 3, (failure,))
    )
    assert (run.crashed, run.bereft, run.barred) == (3 if itself else 0, {}, 0)


def test_who_found_no_way_is_noted():
    run = SimpleNamespace(bereft={}, crashed=0, barred=0)
    arrivals_and_departures.note_failures(
        run, "a", failed("j1", "connect [10.0.0.2]:9: No route to host").assignment
    )
    assert (run.crashed, run.bereft, run.barred) == (0, {"a": 1}, 1)


def test_workers_that_end_of_the_signal_to_their_node_are_no_failure_of_the_job(pair):
    """A scancel signals the script as well, which may handle the signal itself."""
    daemon, job, peer, leaves = pair
    leaves.say(messages.Leaving(600.0))
    for one in (leaves, peer):
        one.say(failed(job, "SystemExit: 1"))
    assert peer.hear(messages.Round).generation == 2
    assert daemon.job(job).tries == 0


@pytest.mark.parametrize(
    ("phase", "failures", "expected"),
    [
        ("failed", [(0, 1, LOST)], True),
        ("failed", [(0, 1, LOST), (1, 1, "ValueError: wrong shape")], False),
        ("failed", [(0, -15, "")], False),  # somebody stopped it
        ("failed", [], False),
        ("lost", [], True),
        ("running", [], False),
    ],
)
def test_whose_words_speak_of_a_lost_peer(phase, failures, expected):
    all_failures = tuple(messages.Failure(rank, code, 1.0, tail) for rank, code, tail in failures)
    assert of_a_peer(messages.Assignment("j1", AssignmentPhase(phase), 1, all_failures)) is expected


@pytest.mark.parametrize(
    ("fields", "warm"),
    [
        ({}, True),
        ({"mode": "live"}, True),
        ({"python": "python3"}, True),
        ({"software": messages.SoftwareEnvironment(venv="/v", container=None)}, True),
        ({"env": {"PYTHONPATH": "/a:/b"}}, True),
        ({"python": "./venv/bin/python"}, False),
        ({"env": {"PYTHONPATH": "/a:src"}}, False),
        ({"env": {"MALLETRAIN_PRELOAD": "0"}}, False),
        ({"mode": "service"}, False),
        ({"launcher": "torchrun"}, False),
        ({"setup": "module load x"}, False),
        ({"software": messages.SoftwareEnvironment(container="/image.sif")}, False),
    ],
)
def test_which_jobs_a_warm_python_serves(fields, warm):
    assert (interpreter_of(spec(fields.pop("python", "/p"), **fields)) is not None) is warm


def test_what_is_read_only_when_it_is_needed_makes_no_other_python():
    one, other, third = (
        interpreter_of(spec("/p", env=env))
        for env in ({"A": "1"}, {"A": "1", "MALLETRAIN_RESUME_FROM": "j3"}, {"A": "2"})
    )
    assert one.key == other.key != third.key
