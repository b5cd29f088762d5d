"""Nodes on which a job's software cannot be had, told by agents of a real daemon."""

import pytest

from malletrain.protocol import messages
from malletrain.protocol.phases import AssignmentPhase
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

pytestmark = pytest.mark.slow

SENTENCE = "There is no conda environment x on this node."


class Site:
    """A daemon, and the agents of its leases by node."""

    def __init__(self, folder, *nodes):
        self.machine = Imagined(*nodes)
        self.daemon = RunningDaemon(folder, self.machine)
        self.agents = {}

    def agent(self, among=None):
        """The agent of a lease that has none yet."""

        def new():
            return [
                lease
                for lease in self.machine.of("ann")
                if lease not in self.agents and (among is None or self.node(lease) in among)
            ]

        lease = until(new, "another lease")[0]
        self.agents[lease] = Agent(self.daemon, lease)
        self.agents[lease].hello()
        return self.agents[lease]

    def node(self, lease):
        return self.machine.requests[lease].node

    def lacks(self, agent, job):
        agent.hear(messages.Assign)
        failure = messages.Failure(0, 78, 1.0, cause=SENTENCE)
        assignment = messages.Assignment(job, AssignmentPhase.EXITED, 0, (failure,))
        agent.say(messages.Phase(assignment))

    def close(self):
        for agent in self.agents.values():
            agent.close()
        self.daemon.stop()


@pytest.fixture
def site(tmp_path):
    sites = []

    def make(*nodes):
        sites.append(Site(tmp_path, *nodes))
        return sites[-1]

    yield make
    for one in sites:
        one.close()


def test_two_nodes_that_lack_it_cost_two_nodes_and_no_try(site):
    one = site("n0", "n1", "n2", "n3")
    job = one.daemon.submit("ann", max_nodes=1)
    for _ in range(2):
        one.lacks(one.agent(), job)
    third = one.agent()
    third.work(job)
    until(lambda: one.daemon.job(job).state == "running", "it runs on the third")
    assert len({one.node(lease) for lease in one.agents}) == 3
    assert one.daemon.job(job).tries == 0
    sentences = [e.sentence for e in one.daemon.events() if e.kind == "node-rejected"]
    assert sentences == [f"The node is rejected: {SENTENCE}"] * 2


@pytest.mark.parametrize("nodes", [5, 2, 1])
def test_a_job_whose_software_is_nowhere_fails_with_the_sentence(site, nodes):
    one = site(*(f"n{i}" for i in range(nodes)))
    job = one.daemon.submit("ann", max_nodes=1)
    for _ in range(min(nodes, 3)):
        one.lacks(one.agent(), job)
    until(lambda: one.daemon.job(job).state == "failed", "it has failed")
    with one.daemon.client("ann") as client:
        reason = client.job(job).job.reason
    assert reason.startswith(f"{SENTENCE} It was tried on n")


def test_equal_words_of_launchers_are_shown_once_with_their_number_and_nodes(site):
    one = site("n0", "n1")
    job = one.daemon.submit("ann", min_nodes=2, max_nodes=2)
    agents = [one.agent(), one.agent()]
    sentence = "The process cannot be started: [Errno 2] No such file or directory: '/x'."
    missing = messages.Failure(0, 126, 1.0, cause="There is no folder /x on this node.")
    assignment = messages.Assignment(job, AssignmentPhase.EXITED, 0, (missing,))
    for agent in agents:
        agent.hear(messages.Assign)
    for agent in agents:
        agent.say(messages.Phase(assignment, "\n".join([sentence] * 7)))

    def failure():
        with one.daemon.client() as client:
            return client.job(job).failure

    until(failure, "the failure is stored")
    cause, output = failure().split("\n", 1)
    assert cause == "There is no folder /x on this node."
    assert output == f"[launcher on n[0-1]]\n{sentence} (7 times)"
