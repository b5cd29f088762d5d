"""What the agent of one user can make of the jobs of another: nothing."""

from __future__ import annotations

import time

import pytest

from malletrain.daemon.leases.arrivals_and_departures import RECLAIM_SENTENCE
from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until
from tests.waiting import NEVER_S

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Start a daemon; one that runs already is killed first, and its machine goes on."""
    running: list[RunningDaemon] = []

    def begin(machine, several=True):
        if running:
            running.pop().stop()
        running.append(RunningDaemon(tmp_path, machine, several))
        return running[-1]

    yield begin
    for daemon in running:
        daemon.stop()


@pytest.fixture
def agent():
    """A function that makes an agent."""
    agents: list[Agent] = []

    def make(daemon, lease):
        agents.append(Agent(daemon, lease))
        return agents[-1]

    yield make
    for each in agents:
        each.close()


def lease_of(machine, owner, count=1):
    return until(
        lambda: len(machine.of(owner)) >= count and machine.of(owner), f"{owner} has {count} leases"
    )


def reclaim_at_work(daemon, machine, agent):
    """Ann's job runs on n0, which is then reclaimed, in an hour at the latest; return the job and
    its agent.
    """
    job = daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    anns_agent = agent(daemon, lease)
    anns_agent.hello()
    anns_agent.work(job)
    until(lambda: daemon.job(job).nodes, "the job runs")

    def reclaim():
        with daemon.components.transactions.begin():
            daemon.components.lease_actions.reclaim(("n0",), NEVER_S)

    daemon.call(reclaim)
    return job, anns_agent


def test_jobs_go_to_their_owners_agents(start, agent):
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    jobs = {user: daemon.submit(user) for user in ("ann", "bob")}
    agents = {user: agent(daemon, lease_of(machine, user)[0]) for user in jobs}
    for user, job in jobs.items():
        agents[user].hello()
        assert agents[user].hear(messages.Assign).job == job


@pytest.mark.parametrize("phase", ["succeeded", "failed", "exited", "running"])
def test_an_agent_does_not_speak_for_another_users_job_after_a_restart(start, agent, phase):
    machine = Imagined("n0")
    daemon = start(machine)
    daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    first = agent(daemon, lease)
    first.hello()
    first.hear(messages.Assign)
    bobs = daemon.submit("bob", min_nodes=9, max_nodes=9)
    daemon = start(machine)
    again = agent(daemon, lease)
    again.hello(assignment=messages.Assignment(bobs, phase, 1 if phase == "running" else 0))
    assert again.hear(messages.Release).job == bobs, "it is to have nothing to do with it"
    until(
        lambda: [e for e in daemon.events() if e.kind == "daemon-started"][1:],
        "the daemon has begun again",
    )
    assert daemon.job(bobs).state == "queued"
    assert not daemon.job(bobs).nodes


def test_an_agent_is_on_the_node_of_its_lease_and_of_its_class(start, agent):
    machine = Imagined("n0", "n1")
    daemon = start(machine)
    daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    elsewhere = agent(daemon, lease)
    elsewhere.hello(node="n1" if elsewhere.node == "n0" else "n0")
    assert "is for" in elsewhere.hear(messages.Goodbye).reason
    honest = agent(daemon, lease)
    honest.hello(node_class="gpu")
    honest.hear(messages.Assign)
    with daemon.client() as client:
        [row] = [row for row in client.nodes() if row.owner == "ann"]
    assert row.node_class == "default"


def test_a_reclaimed_agent_that_says_hello_again_keeps_its_job_until_it_has_moved_off(start, agent):
    machine = Imagined("n0")
    daemon = start(machine)
    job, reclaimed = reclaim_at_work(daemon, machine, agent)
    drain = reclaimed.hear(messages.Drain)
    reclaimed.hello(assignment=messages.Assignment(job, "running", drain.generation))
    reclaimed.hear(messages.Welcome)
    reclaimed.say(messages.Drained(job, drain.generation, True))
    reclaimed.hear(messages.Release)
    reclaimed.say(messages.Released(job))
    assert reclaimed.hear(messages.Goodbye).reason
    assert RECLAIM_SENTENCE in {e.sentence for e in daemon.events()}
    assert daemon.components.leases.active[reclaimed.lease].end_reason == "reclaimed"


def test_a_preemption_is_the_main_schedulers_and_a_reclaimed_node_is_none(start, agent):
    machine = Imagined("n0")
    daemon = start(machine)
    _, reclaimed = reclaim_at_work(daemon, machine, agent)
    reclaimed.hear(messages.Drain)
    with daemon.client() as client:
        assert client.status().preemptions == 0
    assert [e.node for e in daemon.events() if e.kind == "node-reclaimed"] == ["n0"]
    reclaimed.say(messages.Leaving(NEVER_S))
    until(
        lambda: [e for e in daemon.events() if e.kind == "node-leaving"],
        "the main scheduler takes it first",
    )
    with daemon.client() as client:
        assert client.status().preemptions == 1


def test_an_agent_that_never_heard_its_goodbye_is_told_it_again(start, agent):
    """It was on its way over a connection that broke."""
    machine = Imagined("n0")
    daemon = start(machine)
    job, reclaimed = reclaim_at_work(daemon, machine, agent)
    drain = reclaimed.hear(messages.Drain)
    reclaimed.say(messages.Drained(job, drain.generation, True))
    reclaimed.hear(messages.Release)
    reclaimed.say(messages.Released(job))
    reclaimed.hear(messages.Goodbye)
    reclaimed.hello()
    assert reclaimed.hear(messages.Goodbye).reason


def test_a_reclaim_outlives_the_daemon(start, agent):
    machine = Imagined("n0")
    daemon = start(machine)
    job, before = reclaim_at_work(daemon, machine, agent)
    generation = before.hear(messages.Drain).generation
    daemon = start(machine)
    after = agent(daemon, before.lease)
    after.hello(assignment=messages.Assignment(job, "running", generation))
    after.hear(messages.Welcome)
    after.hear(messages.Drain)


def test_jobs_of_others_wait_while_the_daemon_serves_its_own_user_only(start, agent):
    machine = Imagined("n0")
    daemon = start(machine)
    anns = daemon.submit("ann")
    lease_of(machine, "ann")
    for lease in machine.of("ann"):
        machine.leases.pop(lease)
    daemon = start(machine, several=False)
    with daemon.client() as client:
        mine = client.submit(
            messages.JobSpec("mine", "", __file__, "/", "python", profile=False)
        ).id
    [lease] = lease_of(machine, None)
    assert not machine.of("ann"), "nothing is leased as Ann any more"
    own = agent(daemon, lease)
    own.hello()
    assert own.hear(messages.Assign).job == mine
    assert daemon.job(anns).state == "queued"


def test_a_user_whose_leases_are_refused_is_told_and_the_others_go_on(start):
    machine = Imagined("n0", "n1")
    machine.refuses = "bob"
    daemon = start(machine)
    bobs = daemon.submit("bob")
    until(
        lambda: "leases as bob fail" in daemon.job(bobs).reason,
        "Bob's job says why it waits",
    )
    assert "invalid account" in daemon.job(bobs).reason
    assert "invalid account" in {
        e.sentence.rpartition(": ")[2].rstrip(".")
        for e in daemon.events()
        if e.kind == "lease-ended"
    }
    daemon.submit("ann", max_nodes=2)
    lease_of(machine, "ann", 2)


def test_a_suspended_job_has_no_throughput_and_no_nodes(start, agent):
    """Its workers do not report the end of their work."""
    machine = Imagined("n0")
    daemon = start(machine)
    job = daemon.submit("ann")
    [lease] = lease_of(machine, "ann")
    anns_agent = agent(daemon, lease)
    anns_agent.hello()
    anns_agent.work(job)
    now = time.time()
    anns_agent.say(messages.Progress(job, 1, 0, 7, 8.0, 1, 8.0, now, now))
    anns_agent.say(messages.Progress(job, 1, 0, 7, 800.0, 100, 8.0, now, now + 1))

    def shown(name):
        return daemon.metric(name, job=job)

    until(lambda: shown("job_nodes") == 1 and shown("job_samples_per_second"), "it is at work")
    anns_agent.say(messages.Leaving(NEVER_S))
    drain = anns_agent.hear(messages.Drain)
    anns_agent.say(messages.Drained(job, drain.generation, True, "", drain.number))
    anns_agent.hear(messages.Release)
    anns_agent.say(messages.Released(job))
    anns_agent.hear(messages.Goodbye)
    until(lambda: daemon.job(job).state == "suspended", "the job is suspended")
    view = daemon.job(job)
    assert (view.nodes, view.rate) == ((), 0.0)
    until(lambda: shown("job_nodes") == shown("job_samples_per_second") == 0, "the metrics say so")
    assert shown("job_samples") == 800.0
