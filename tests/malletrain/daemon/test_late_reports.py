"""What an agent has to say of a job whose end the daemon, just begun again, heard of first."""

import pytest

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until


@pytest.mark.parametrize("user", ["ann", "bob"])
def test_a_metric_that_comes_after_the_end_is_kept_for_its_owner(tmp_path, user):
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine)
    job = daemon.submit("ann")
    [lease] = until(lambda: machine.of("ann"), "Ann has a lease")
    agent = Agent(daemon, lease)
    agent.hello()
    agent.work(job)
    until(lambda: daemon.job(job).nodes, "the job runs")
    other = daemon.submit("bob", min_nodes=9, max_nodes=9)
    agent.close()
    daemon.stop()
    daemon = RunningDaemon(tmp_path, machine)
    agent = Agent(daemon, lease)
    agent.hello(assignment=messages.Assignment(job, "succeeded", 1))
    assert agent.hear(messages.Release).job == job
    of = job if user == "ann" else other
    agent.say(messages.Metric(of, 0, "accuracy", 0.5))
    agent.say(messages.Metric(job, 0, "loss", 0.25))
    with daemon.client("ann") as client, daemon.client(user) as owner:
        until(lambda: "loss" in client.job(job).job.metrics, "the last metric is kept")
        assert client.job(job).job.state == "completed"
        both = {"accuracy": 0.5, "loss": 0.25}
        assert owner.job(of).job.metrics == (both if user == "ann" else {})
    agent.close()
    daemon.stop()
