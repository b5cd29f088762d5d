"""What a service's own process says that nodes are worth to it."""

from __future__ import annotations

from malletrain.protocol import messages
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon
from tests.waiting import until


def test_its_word_counts_in_plans_and_outlives_the_daemon(tmp_path):
    machine = Imagined("n0")
    daemon = RunningDaemon(tmp_path, machine)
    service = daemon.submit(
        "ann", mode="service", nproc_per_node=1, curve={"1": 1.0}, max_nodes=4, goal="throughput"
    )
    training = daemon.submit("ann", min_nodes=9, max_nodes=9)
    lease = until(lambda: machine.of("ann"), "ann has a lease")[0]
    agent = Agent(daemon, lease)
    agent.hello()
    agent.hear(messages.Assign)
    jobs = daemon.components.state.controller.jobs
    assert jobs[service].curve.at(4) == 1.0
    agent.say(messages.Worth(training, {1: 1e6}))
    agent.say(messages.Worth(service, {1: 0.0, 4: 80.0}))
    until(lambda: jobs[service].curve.at(4) == 80.0, "it counts")
    assert jobs[service].curve.at(1) == 0.0
    assert jobs[training].curve is None, "a training job's curve is measured"
    agent.say(messages.Worth(service, {200_000: 1.0}))
    with daemon.client("ann") as client:
        until(
            lambda: any("200000 nodes" in notice for notice in client.job(service).notices),
            "its owner is told what is wrong",
        )
    agent.close()
    daemon.stop()
    again = RunningDaemon(tmp_path, machine)
    assert again.components.state.controller.jobs[service].curve.at(4) == 80.0
    again.stop()
