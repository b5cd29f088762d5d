"""Between the daemon's start and its first plan: found by the simulation (tests/dst), where a node
whose worker failed in that time was let go, and then passed for one that has a launcher.
"""

from __future__ import annotations

import zmq

from malletrain.daemon.engine.agents import Adoption, Agents, LeasedAgent
from malletrain.protocol import messages, wire
from malletrain.protocol.messages import Assignment, Release
from malletrain.protocol.phases import AssignmentPhase
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

RUNNING, FAILED = AssignmentPhase.RUNNING, AssignmentPhase.FAILED


def agents(*nodes: str) -> Agents:
    registry = Agents(lambda peer, message: True)
    for node in nodes:
        registry.add(LeasedAgent(f"l-{node}", node, node.encode(), node, 0.0, holds="j1"))
    return registry


def test_the_newest_of_each_node_counts():
    adoption = Adoption(agents("a", "b"))
    adoption.record("a", Assignment("j1", RUNNING, 2))
    assert adoption.update("a", Assignment("j1", FAILED, 2))
    assert not adoption.update("b", Assignment("j1", FAILED, 2))
    assert adoption.of("j1") == {"a": Assignment("j1", FAILED, 2)}
    assert adoption.of("j2") == {}


def test_who_lets_go_of_it_or_is_lost_meanwhile_is_not_adopted():
    registry = agents("a", "b", "c", "d")
    adoption = Adoption(registry)
    for node in ("a", "b", "c", "d"):
        adoption.record(node, Assignment("j1", RUNNING, 2))
    registry.remove(registry.on("a"))
    registry.release("b", "j1", 1.0)
    registry.released(registry.on("c"), "j1")
    assert set(adoption.of("j1")) == {"d"}


def test_who_holds_a_job_that_has_ended_is_known():
    adoption = Adoption(agents("a", "b"))
    adoption.record("a", Assignment("j1", RUNNING, 2))
    assert adoption.ended_jobs({"j1", "j2"}) == []
    assert adoption.ended_jobs({"j2"}) == [("a", "j1")]


def heard_before(agent: Agent, kind: type) -> list[messages.Message]:
    """What the agent hears before the next message of this kind."""
    before: list[messages.Message] = []

    def comes() -> bool:
        while agent._socket.poll(0):  # noqa: SLF001
            before.append(wire.decode(agent._socket.recv_multipart(zmq.NOBLOCK)))  # noqa: SLF001
        return any(isinstance(message, kind) for message in before)

    until(comes, f"a {kind.__name__} comes")
    return before


def test_a_node_whose_worker_fails_before_the_first_plan_is_not_let_go(tmp_path):
    machine = Imagined("n0", "n1")
    first = RunningDaemon(tmp_path, machine)
    two: list[Agent] = []
    try:
        job = first.submit("ann", min_nodes=2, max_nodes=2)
        until(lambda: len(machine.of("ann")) == 2, "ann has two leases")
        two = [Agent(first, lease) for lease in machine.of("ann")]
        for agent in two:
            agent.hello()
        for agent in two:
            agent.hear(messages.Assign)
            agent.say(messages.Phase(Assignment(job, AssignmentPhase.READY)))
        until(lambda: "round-formed" in {e.kind for e in first.events()}, "a round is formed")
    finally:
        first.stop()
        for agent in two:
            agent.close()
    second = RunningDaemon(tmp_path, machine)  # and the agent of n1 does not report
    agent = Agent(second, two[0].lease)
    try:
        agent.hello(assignment=Assignment(job, RUNNING, 1))
        agent.hear(messages.Welcome)
        agent.say(messages.Phase(Assignment(job, FAILED, 1)))
        agent.hello(assignment=Assignment(job, FAILED, 1))  # its connection broke, say
        agent.say(messages.Heartbeat(""))
        heard = heard_before(agent, messages.Alive)
        assert [message for message in heard if isinstance(message, Release)] == []
    finally:
        agent.close()
        second.stop()


def test_a_job_whose_only_node_lets_go_of_it_meanwhile_is_planned_anew(tmp_path):
    """The daemon before released the node from the job, and was killed then."""
    machine = Imagined("n0", "n1")
    first = RunningDaemon(tmp_path, machine)
    jobs: dict[str, str] = {}
    two: list[Agent] = []
    try:
        job_ids = [first.submit("ann", max_nodes=1), first.submit("ann", max_nodes=1, name="other")]
        until(lambda: len(machine.of("ann")) == 2, "ann has two leases")
        two = [Agent(first, lease) for lease in machine.of("ann")]
        for agent in two:
            agent.hello()
        for agent in two:
            jobs[agent.lease] = agent.hear(messages.Assign).job
            agent.say(messages.Phase(Assignment(jobs[agent.lease], AssignmentPhase.READY)))
        until(lambda: all(first.job(job).state == "running" for job in job_ids) or None, "they run")
    finally:
        first.stop()
        for agent in two:
            agent.close()
    second = RunningDaemon(tmp_path, machine)
    freed, other = two = [Agent(second, agent.lease) for agent in two]
    try:
        job = jobs[freed.lease]
        freed.hello(assignment=Assignment(job, RUNNING, 1))
        freed.hear(messages.Welcome)
        freed.say(messages.Released(job))
        freed.say(messages.Heartbeat(""))
        freed.hear(messages.Alive)  # the daemon has taken that in
        other.hello(assignment=Assignment(jobs[other.lease], RUNNING, 1))
        assert freed.hear(messages.Assign).job == job
    finally:
        for agent in two:
            agent.close()
        second.stop()


def test_a_job_that_is_cancelled_meanwhile_is_let_go_of(tmp_path):
    machine = Imagined("n0", "n1")
    first = RunningDaemon(tmp_path, machine)
    two: list[Agent] = []
    try:
        job = first.submit("ann", min_nodes=2, max_nodes=2)
        until(lambda: len(machine.of("ann")) == 2, "ann has two leases")
        two = [Agent(first, lease) for lease in machine.of("ann")]
        for agent in two:
            agent.hello()
        for agent in two:
            agent.hear(messages.Assign)
            agent.say(messages.Phase(Assignment(job, AssignmentPhase.READY)))
        until(lambda: "round-formed" in {e.kind for e in first.events()}, "a round is formed")
    finally:
        first.stop()
        for agent in two:
            agent.close()
    second = RunningDaemon(tmp_path, machine)
    agent, late = (Agent(second, each.lease) for each in two)
    try:
        agent.hello(assignment=Assignment(job, RUNNING, 1))
        agent.hear(messages.Welcome)
        with second.client("ann") as client:
            client.cancel(job)
        assert second.components.agent_handlers.adopting is not None
        late.hello(assignment=Assignment(job, RUNNING, 1))
        for each in (agent, late):
            assert each.hear(Release).job == job
    finally:
        agent.close()
        late.close()
        second.stop()
