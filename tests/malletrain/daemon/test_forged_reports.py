"""Messages that no agent of ours sends: none ends the daemon, fills its disk, or writes what is
another's.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import msgspec
import pytest

from malletrain.client import ClientError
from malletrain.core.goodput import BatchState
from malletrain.daemon.nodes.reports import MAX_METRICS, MAX_NAME_LENGTH, TOO_MANY_METRICS
from malletrain.protocol import messages, wire
from malletrain.protocol.payloads import NodeNetwork
from malletrain.protocol.redaction import FAILED_REASON
from malletrain.store.records import JobRow
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow


class World:
    """Ann's and Bob's jobs, each with an agent. Ann's agent runs her job, or was only assigned
    it.
    """

    def __init__(self, folder, works=True):
        self.machine = Imagined("n0", "n1")
        self.daemon = RunningDaemon(folder, self.machine)
        self.job = {user: self.daemon.submit(user) for user in ("ann", "bob")}
        leases = {
            user: until(lambda user=user: self.machine.of(user), f"{user} has a lease")[0]
            for user in self.job
        }
        self.agent = {user: Agent(self.daemon, lease) for user, lease in leases.items()}
        for user, agent in self.agent.items():
            agent.hello()
            if works:
                agent.work(self.job[user])
            else:
                agent.hear(messages.Assign)

    def say(self, *reports):
        for report in reports:
            self.agent["ann"].say(report)
        self.agent["ann"].say(messages.Heartbeat("b"))
        self.agent["ann"].hear(messages.Alive)  # the daemon has handled what came before

    def raw(self, kind, /, **fields):
        """A message that our own types could not make; return the daemon's answer."""
        self.agent["ann"].send_raw(
            [wire.PROTOCOL, msgspec.msgpack.encode({"type": kind, **fields})]
        )
        return self.agent["ann"].hear(messages.Error).sentence

    def close(self):
        for agent in self.agent.values():
            agent.close()
        self.daemon.stop()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("reports"))
    yield world
    world.close()


@pytest.fixture
def fresh(tmp_path):
    """Nothing runs yet."""
    world = World(tmp_path, works=False)
    yield world
    world.close()


def counts(job, **changes):
    now = time.time()
    fields = {
        "generation": 1,
        "rank": 0,
        "pid": 1,
        "samples": 1.0,
        "steps": 1,
        "batch": 1.0,
        "first": now,
        "last": now,
    }
    return messages.Progress(job, **{**fields, **changes})


def test_counts_before_the_first_round_end_nothing(fresh):
    fresh.say(*(counts(fresh.job["ann"], generation=0, samples=s) for s in (1.0, 5.0, 9.0)))
    assert fresh.daemon.alive()
    assert fresh.daemon.job(fresh.job["ann"]).state == "running"


@pytest.fixture
def started(tmp_path):
    """Both jobs run, and no sample is reported yet."""
    world = World(tmp_path)
    yield world
    world.close()


def test_a_start_takes_no_longer_because_the_clock_of_a_node_is_ahead(started):
    """Such a start would cost more than it can yield, and the job would get no nodes again."""
    job, ahead_s = started.job["ann"], 18_000.0
    there = time.time() + ahead_s
    started.say(
        messages.Mark(job, 1, 0, "import", there),
        counts(job, samples=8.0, first=there + 1.0, last=there + 1.0),
    )
    (start,) = started.daemon.components.state.store.rescales(job)
    assert start.kind == "start"
    assert 0 <= start.cost_s < ahead_s / 2
    assert all(x < ahead_s / 2 for x in start.phases.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 1e15, "steps": 2**53, "batch": 1e15},
        {"first": 0.0, "last": 1e11},
        {"first": 1e11, "last": 0.0},
        {"rank": 10_000_000, "pid": 2**53},
        {"generation": 2**53},
        {"samples": 5e-324, "batch": 5e-324},
    ],
    ids=repr,
)
def test_counts_at_the_edge_of_what_is_allowed_end_nothing(world, changes):
    pid = changes.get("pid", hash(repr(changes)) % 10_000)
    first = {**changes, "pid": pid}
    second = {
        **first,
        "samples": min(1e15, 2 * first.get("samples", 1.0)),
        "last": first.get("last", time.time()) + 0.001,
    }
    world.say(counts(world.job["ann"], **first), counts(world.job["ann"], **second))
    assert world.daemon.alive()


def test_addresses_that_are_none_end_nothing(tmp_path):
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine, allocation='[nodes]\ninterface = "auto"')
    job = daemon.submit("ann")
    agent = Agent(daemon, until(lambda: machine.of("ann"), "ann has a lease")[0])
    bad = tuple(NodeNetwork("ib0", a, 99) for a in ("x", "", "10.1.0.1"))
    agent.hello(networks=(*bad, NodeNetwork("ib0", "10.1.0.1", 24)))
    assert agent.hear(messages.Assign).host == "10.1.0.1"
    assert daemon.job(job).state
    agent.close()
    daemon.stop()


@pytest.mark.parametrize(
    ("second", "interface", "network"),
    [("ib0", "ib0", "10.1.0"), ("eth1", "eth0", "10.77.0")],
    ids=["has-it", "lacks-it"],
)
def test_a_round_whose_member_lacks_the_network_says_which_it_goes_by(
    tmp_path, second, interface, network
):
    machine = Imagined("n0", "n1")
    daemon = RunningDaemon(tmp_path, machine, allocation='[nodes]\ninterface = "ib0"')
    job = daemon.submit("ann", min_nodes=2, max_nodes=2)
    leases = until(lambda: len(machine.of("ann")) == 2 and machine.of("ann"), "ann has two leases")
    agents = [Agent(daemon, lease) for lease in leases]
    for agent, other in zip(agents, ("ib0", second), strict=True):
        n = int(agent.node[1]) + 1
        usual = NodeNetwork("eth0", f"10.77.0.{n}", 16)
        agent.hello(host=usual.address, networks=(usual, NodeNetwork(other, f"10.1.0.{n}", 24)))
    for agent in agents:
        agent.hear(messages.Assign)
        agent.say(messages.Phase(messages.Assignment(job, "ready")))
    [formed] = until(
        lambda: [e for e in daemon.events() if e.kind == "round-formed"], "the round is formed"
    )
    first = formed.data["members"][0]
    message = next(a for a in agents if a.node == first).hear(messages.Round)
    assert (message.interface, message.address) == (interface, f"{network}.{int(first[1]) + 1}")
    for agent in agents:
        agent.close()
    daemon.stop()


NO_FACTS = [
    {"a": b"bytes"},
    {"a": {"b": 1}},
    {"a": 2**64 - 1},
    {1: 2},
    {"a": msgspec.msgpack.Ext(5, b"x")},
]


@pytest.mark.parametrize("data", NO_FACTS, ids=["bytes", "map", "large", "key", "extension"])
def test_a_notice_whose_facts_are_none_is_refused(world, data):
    assert "does not fit" in world.raw(
        "notice", job=world.job["ann"], rank=0, kind="snapshot", sentence="", data=data
    )
    assert world.daemon.alive()


@pytest.mark.parametrize(
    "change",
    [{"offset": 2**64 - 1}, {"stream": ".."}, {"stream": "rank0/x"}, {"generation": -1}],
    ids=repr,
)
def test_a_log_of_no_form_is_refused(world, change):
    fields = {
        "job": world.job["ann"],
        "generation": 1,
        "stream": "rank0",
        "node": world.agent["ann"].node,
        "offset": 0,
        "data": b"x",
        **change,
    }
    assert "does not fit" in world.raw("logchunk", **fields)
    assert world.daemon.alive()


def test_an_agent_writes_the_logs_of_its_own_job_only(world):
    mine, his = world.agent["ann"], world.agent["bob"]
    his.say(messages.LogChunk(world.job["bob"], 1, "rank0", his.node, 0, b"truth\n"))
    his.hear(messages.LogAck)
    files = sorted((world.daemon.config.state_dir / "logs").rglob("*"))
    beside = sorted(world.daemon.config.state_dir.iterdir())
    for job, generation, stream, node in [
        (world.job["bob"], 1, "rank0", his.node),
        (world.job["bob"], 1, "rank0", mine.node),
        (world.job["ann"], 1, "rank0", his.node),
        (world.job["ann"], 2, "rank0", mine.node),
        (world.job["ann"], 1, "rank64", mine.node),
        ("..", 1, "rank0", mine.node),
        (".", 1, "rank0", mine.node),
        ("j999", 0, "launcher", mine.node),
        ("", 0, "launcher", mine.node),
    ]:
        mine.say(messages.LogChunk(job, generation, stream, node, 0, b"LIES"))
        assert "not this agent's to write" in mine.hear(messages.Error).sentence
    assert sorted((world.daemon.config.state_dir / "logs").rglob("*")) == files
    assert sorted(world.daemon.config.state_dir.iterdir()) == beside
    with world.daemon.client("bob") as client:
        assert client.logs(world.job["bob"]).text == "truth\n"


def test_an_agent_writes_the_last_lines_of_a_job_that_has_ended(fresh):
    agent, job = fresh.agent["ann"], fresh.job["ann"]
    with fresh.daemon.client("ann") as client:
        client.cancel([job])
        agent.say(messages.LogChunk(job, 0, "launcher", agent.node, 0, b"bye\n"))
        assert agent.hear(messages.LogAck).offset == 4
        assert client.logs(job, stream="launcher").text == "bye\n"


def test_names_that_are_the_same_in_the_store_are_one_metric(fresh):
    # Found by mutated messages: the second value of such a name ended the step.
    agent, job = fresh.agent["ann"], fresh.job["ann"]
    agent.say(messages.Phase(messages.Assignment(job, "ready")))
    agent.hear(messages.Round)
    names = ("a\0", "a\N{REPLACEMENT CHARACTER}", "a\0")
    fresh.say(*(messages.Metric(job, 0, name, float(n)) for n, name in enumerate(names)))
    assert not fresh.daemon.daemon.handler_failures.count
    with fresh.daemon.client("ann") as client:
        metrics = client.job(job).job.metrics
    assert metrics == {"a\N{REPLACEMENT CHARACTER}": 2.0}


def test_a_batch_that_a_script_states_changes_its_bids_and_an_invalid_one_nothing(world):
    job = world.job["ann"]
    facts = {"base": 64, "current": 128, "most": 512, "noise_scale": 99.5}
    world.say(
        messages.Notice(job, 0, "batch", "", facts),
        messages.Notice(job, 0, "batch", "", {**facts, "base": -1}),
        messages.Notice(job, 0, "batch", "", {"base": "64"}),
    )
    batch = world.daemon.components.state.controller.jobs[job].batch
    assert batch == BatchState(64, 128, 512, 99.5)


def test_metrics_are_kept_up_to_a_number_and_a_length_and_the_owner_is_told_once(world):
    job = world.job["ann"]
    world.say(*(messages.Metric(job, 0, f"m{i}", float(i)) for i in range(MAX_METRICS + 5)))
    world.say(
        messages.Metric(job, 0, "x" * (MAX_NAME_LENGTH + 1), 1.0),
        messages.Metric(job, 0, "m0", 7.0),
    )
    most = {**{f"m{i}": float(i) for i in range(MAX_METRICS)}, "m0": 7.0}
    with world.daemon.client("ann") as client:
        until(lambda: client.job(job).job.metrics == most, "the last metric is there")
        detail = client.job(job)
    assert detail.notices.count(TOO_MANY_METRICS) == 1


def test_what_a_script_says_is_for_its_owner_and_operators(fresh):
    job, agent = fresh.job["ann"], fresh.agent["ann"]
    rounds = fresh.daemon.components.state.runs[job].rounds
    rounds.settings = replace(
        rounds.settings, failure_grace_s=0.05
    )  # else it waits for the news of a loss
    failure = messages.Failure(0, 1, time.time(), "Traceback\nValueError: secret" + "!" * 3000)
    agent.say(messages.Phase(messages.Assignment(job, "ready")))
    while fresh.daemon.job(job).state != "failed":
        message = agent.hear(messages.Round)
        agent.say(messages.StoreUp(job, message.generation, "127.0.0.1", 5000))
        agent.say(messages.Phase(messages.Assignment(job, "running", message.generation)))
        agent.say(messages.Notice(job, 0, "x", "secret notice"))
        agent.say(messages.Metric(job, 0, "secret", 1.0))
        broken = len([e for e in fresh.daemon.events() if e.kind == "workers-failed"])
        assignment = messages.Assignment(job, "failed", message.generation, (failure,))
        agent.say(messages.Phase(assignment))
        until(
            lambda: len([e for e in fresh.daemon.events() if e.kind == "workers-failed"]) > broken,  # noqa: B023
            "the round broke",
        )
    until(lambda: fresh.daemon.job(job).state == "failed", "the job has failed")

    def seen_by(user):
        with fresh.daemon.client(user) as client:
            detail = client.job(job)
            listed = next(j for j in client.jobs() if j.id == job)
            assert listed.state == detail.job.state == "failed"
            assert listed.reason == detail.job.reason
            assert listed.metrics == detail.job.metrics
            events = [e for e in client.events(limit=1000) if e.job == job] + client.events(
                limit=1000, job=job
            )
            return detail, events

    for user in ("ann", "olga"):
        detail, events = seen_by(user)
        assert "secret" in detail.job.reason
        assert detail.job.metrics == {"secret": 1.0}
        assert {e.kind for e in events if "secret" in e.sentence} == {
            "job-notice",
            "workers-failed",
            "job-failed",
        }
        assert max(len(e.sentence) for e in events) < 1200
    detail, events = seen_by("bob")
    assert detail.job.reason == FAILED_REASON
    assert detail.job.metrics == {}
    assert {"job-notice", "workers-failed", "job-failed"} <= {e.kind for e in events}
    assert not [e for e in events if "secret" in repr(e)]
    fresh.daemon.call(lambda: fresh.daemon.components.state.store.forget(math.inf))
    until(lambda: job not in {j.id for j in fresh.daemon.jobs()}, "the job is forgotten")
    for user, secrets in (("bob", 0), ("olga", 3)):
        with fresh.daemon.client(user) as client:
            events = [e for e in client.events(limit=1000) if e.job == job]
        kinds = {e.kind for e in events if "secret" in repr(e)}
        assert len(kinds) == secrets, f"the log of a job that is no longer stored, for {user}"


def test_the_list_of_jobs_fits_into_one_answer_however_many_there_are(fresh):
    store, spec = (
        fresh.daemon.components.state.store,
        fresh.daemon.components.state.runs[fresh.job["bob"]].row.spec,
    )
    filled = []
    metrics = {f"{i:100}": 0.0 for i in range(100)}

    def fill():
        with fresh.daemon.components.transactions.begin():
            for _ in range(2000):
                store.add_job(
                    JobRow(
                        store.new_job_id(),
                        "sweep",
                        "ann",
                        spec,
                        "completed",
                        reason="r" * 1000,
                        metrics=metrics,
                    )
                )
        filled.append(True)

    fresh.daemon.call(fill)
    until(lambda: filled, "the store holds many jobs")
    for user in ("ann", "bob"):
        with fresh.daemon.client(user) as client:
            jobs = client.jobs()
            assert [j.id for j in jobs[:2]] == list(fresh.job.values()), (
                "unfinished jobs are never left out"
            )
            assert [j.id for j in jobs[2:]] == [f"j{i}" for i in range(1003, 2003)]
            everything = client.call("jobs", {"ended": 100_000})
            assert 1002 < len(everything) <= 2002
            assert everything[-1]["id"] == "j2002"
            assert [j["id"] for j in client.call("jobs", {"ended": 0})] == list(fresh.job.values())


def test_an_answer_that_is_too_large_is_an_error_and_no_silence(fresh, monkeypatch):
    async def large(user, params):
        return "x" * (wire.MAX_MESSAGE_BYTES + 1)

    monkeypatch.setitem(fresh.daemon.components.api.operations, "nodes", large)
    with fresh.daemon.client("bob") as client:
        with pytest.raises(ClientError, match="cannot be sent"):
            client.nodes()
        assert client.status().pid
