"""Commands of owners in the daemon: who may run one, on which node, and what the daemon holds."""

from __future__ import annotations

import asyncio

import pytest

from malletrain.client.errors import ClientError
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.nodes.commands import RelayedCommand, argv_problem
from malletrain.protocol import messages
from malletrain.protocol.commands import INPUT_WINDOW, MAX_CHUNK_BYTES, OUTPUT_WINDOW
from malletrain.protocol.event_kinds import EventKind
from tests.malletrain.daemon.forged import Imagined
from tests.malletrain.daemon.test_other_users_agents import agent, lease_of, start  # noqa: F401
from tests.waiting import PATIENCE_S, until

CHUNK = b"x" * MAX_CHUNK_BYTES


def command():
    node = LeasedAgent("l1", "n1", b"peer", "host", 0.0)
    return RelayedCommand("c1", "ann", "j1", node, 0.0)


def output(data, error=False):
    return messages.CommandOutput("c1", data, error)


# --- one command ---


def test_no_more_than_a_window_of_output_is_held():
    async def relay():
        one = command()
        for _ in range(OUTPUT_WINDOW // MAX_CHUNK_BYTES):
            assert one.output(output(CHUNK))
        assert not one.output(output(b"y"))
        assert one.view().cursor == OUTPUT_WINDOW
        assert one.confirm(0) is None
        assert one.confirm(2 * MAX_CHUNK_BYTES) == OUTPUT_WINDOW + 2 * MAX_CHUNK_BYTES
        assert one.output(output(CHUNK, error=True))
        assert one.view().parts[-1].error
        for wrong in (MAX_CHUNK_BYTES, OUTPUT_WINDOW + MAX_CHUNK_BYTES + 1):
            with pytest.raises(ValueError, match="cursor"):
                one.confirm(wrong)

    asyncio.run(relay())


def test_a_request_that_is_repeated_gets_the_same_output():
    async def relay():
        one = command()
        one.output(output(b"a"))
        one.output(output(b"b", error=True))
        assert one.view() == one.view()
        one.confirm(1)
        assert [part.data for part in one.view().parts] == [b"b"]

    asyncio.run(relay())


def test_the_first_end_counts_and_later_output_is_dropped():
    async def relay():
        one = command()
        one.output(output(b"last"))
        one.end(3)
        one.end(None, "The node was lost.")
        assert one.output(output(b"late"))
        view = one.view()
        assert (view.ended, view.code, view.sentence) == (True, 3, "")
        assert [part.data for part in view.parts] == [b"last"]

    asyncio.run(relay())


def test_an_agent_cannot_make_room_for_input_that_was_never_sent():
    async def relay():
        one = command()
        one.accepted = INPUT_WINDOW
        assert one.input_space == 0
        one.input_read(100)
        assert one.input_space == 100
        one.input_read(10**9)
        assert one.input_space == INPUT_WINDOW

    asyncio.run(relay())


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("nvidia-smi", ""), ""),
        ((), "no command"),
        (("",), "no command"),
        (("echo", "a\0b"), "NUL"),
        (("echo", "x" * 131072), "longer"),
    ],
)
def test_which_command_lines_are_refused(argv, problem):
    assert (problem in argv_problem(argv)) if problem else argv_problem(argv) == ""


# --- a daemon of several users ---


def call(daemon, user, op, **params):
    with daemon.client(user) as client:
        return client.call(op, params, wait_s=params.get("wait_s", 0.0))


def begin(daemon, job, user="ann", **params):
    return call(daemon, user, "command-start", job=job, argv=["/usr/bin/top", "-b"], **params)


@pytest.fixture
def running(start, agent, monkeypatch):  # noqa: F811
    """A daemon, a job of ann with two processes on a node, and the agent of that. A request may
    wait for as long as the tests do.
    """
    monkeypatch.setattr("malletrain.daemon.nodes.commands.MAX_WAIT_S", PATIENCE_S)
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann", nproc_per_node=2)
    [lease] = lease_of(machine, "ann")
    anns = agent(daemon, lease)
    anns.hello()
    anns.work(job)
    until(lambda: daemon.job(job).nodes, "the job runs")
    return daemon, job, anns


@pytest.mark.parametrize("user", ["bob", "olga"])
def test_nobody_but_the_owner_runs_a_command_not_even_an_operator(running, user):
    daemon, job, anns = running
    with pytest.raises(ClientError, match="belongs to ann; only its owner can run a command"):
        begin(daemon, job, user)
    name = begin(daemon, job)["command"]
    anns.hear(messages.StartCommand)
    for op, params in {
        "command-output": {"cursor": 0},
        "command-input": {"offset": 0, "data": b"rm -r ."},
        "command-signal": {"signum": 9},
        "command-end": {},
    }.items():
        with pytest.raises(ClientError, match="does not know this command"):
            call(daemon, user, op, command=name, **params)
    events = [e for e in daemon.events() if e.kind == EventKind.COMMAND_RUN]
    assert [(e.job, e.node, e.data["command"]) for e in events] == [(job, "n0", "top")]


def test_others_do_not_see_which_command_it_is(running):
    daemon, job, _ = running
    begin(daemon, job)
    with daemon.client("bob") as client:
        [event] = [e for e in client.events(limit=1000) if e.kind == EventKind.COMMAND_RUN]
    assert "top" not in repr(event)


def test_on_which_node_it_runs(running):
    daemon, job, anns = running
    for where in ({}, {"rank": 1}, {"node": "n0"}):
        assert begin(daemon, job, **where)["node"] == "n0"
        assert anns.hear(messages.StartCommand).argv == ("/usr/bin/top", "-b")
    with pytest.raises(ClientError, match="has no rank 2 now; its ranks are 0 to 1"):
        begin(daemon, job, rank=2)
    with pytest.raises(ClientError, match="not on node n7; it is on n0"):
        begin(daemon, job, node="n7")
    waiting = daemon.submit("ann", min_nodes=9, max_nodes=9)
    with pytest.raises(ClientError, match="No processes of job"):
        begin(daemon, waiting)


def test_nodes_are_named_as_a_list(start, agent):  # noqa: F811
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    job = daemon.submit("ann", min_nodes=2, max_nodes=2)
    agents = [agent(daemon, lease) for lease in lease_of(machine, "ann", 2)]
    for one in agents:
        one.hello()
    for one in agents:
        one.hear(messages.Assign)
        one.say(messages.Phase(messages.Assignment(job, "ready")))
    until(lambda: len(daemon.job(job).nodes) == 2, "the round has both nodes")
    with pytest.raises(ClientError, match=r"not on node n7; it is on n\[0-1\]\."):
        begin(daemon, job, node="n7")


def test_an_agent_reports_only_on_its_own_commands(running, agent):  # noqa: F811
    daemon, job, _ = running
    name = begin(daemon, job)["command"]
    daemon.machine.nodes = ("n0", "n1")
    daemon.submit("bob")
    bobs = agent(daemon, lease_of(daemon.machine, "bob")[0])
    bobs.hello()
    bobs.hear(messages.Assign)
    bobs.say(messages.CommandOutput(name, b"forged"))
    bobs.say(messages.CommandEnded(name, 0))
    bobs.say(messages.Heartbeat(""))
    bobs.hear((messages.Alive, messages.WhoAreYou))  # the others were handled before it
    view = call(daemon, "ann", "command-output", command=name, cursor=0)
    assert (view["parts"], view["ended"]) == ([], False)


def test_an_agent_that_sends_more_than_it_may_loses_the_command(running):
    daemon, job, anns = running
    name = begin(daemon, job)["command"]
    for _ in range(OUTPUT_WINDOW // MAX_CHUNK_BYTES + 1):
        anns.say(messages.CommandOutput(name, CHUNK))
    assert anns.hear(messages.EndCommand).command == name
    view = call(daemon, "ann", "command-output", command=name, cursor=0)
    assert "more output than it may" in view["sentence"]


def test_a_command_whose_client_has_gone_is_killed(running):
    daemon, job, anns = running
    name = begin(daemon, job)["command"]

    def be_silent():
        daemon.components.commands.get(name).requested_at = 0.0

    daemon.call(be_silent)
    assert anns.hear(messages.EndCommand).command == name
    with pytest.raises(ClientError, match="does not know this command"):
        call(daemon, "ann", "command-output", command=name, cursor=0)


def test_a_command_ends_when_the_agent_connects_again(running):
    daemon, job, anns = running
    name = begin(daemon, job)["command"]
    anns.hello()
    view = call(daemon, "ann", "command-output", command=name, cursor=0, wait_s=PATIENCE_S)
    assert "was interrupted" in view["sentence"]


def test_input_that_is_repeated_is_forwarded_once(running):
    daemon, job, anns = running
    name = begin(daemon, job)["command"]
    for _ in range(2):
        accepted = call(daemon, "ann", "command-input", command=name, offset=0, data=b"abc")
        assert accepted == 3
    ended = call(daemon, "ann", "command-input", command=name, offset=2, data=b"cd", end=True)
    assert ended == 4
    assert [anns.hear(messages.CommandInput).data for _ in range(2)] == [b"abc", b"d"]
    with pytest.raises(ClientError, match="in order"):
        call(daemon, "ann", "command-input", command=name, offset=9, data=b"x")


def test_input_of_a_command_that_has_ended_is_accepted_to_the_end(running):
    daemon, job, anns = running
    name = begin(daemon, job)["command"]
    call(daemon, "ann", "command-input", command=name, offset=0, data=CHUNK)
    anns.say(messages.CommandEnded(name, 0))
    assert call(daemon, "ann", "command-output", command=name, cursor=0, wait_s=PATIENCE_S)["ended"]
    # Else a client would offer the rest again and again.
    for piece in range(1, 2 + INPUT_WINDOW // MAX_CHUNK_BYTES):
        offset = piece * MAX_CHUNK_BYTES
        accepted = call(daemon, "ann", "command-input", command=name, offset=offset, data=CHUNK)
        assert accepted == offset + MAX_CHUNK_BYTES


def test_a_user_has_a_limited_number_of_commands(running):
    daemon, job, _ = running
    for _ in range(16):
        begin(daemon, job)
    with pytest.raises(ClientError, match="16 of your commands run already"):
        begin(daemon, job)
