"""Trainers in a running daemon: as whom leases are taken on which nodes, what users are told and
refused.
"""

from __future__ import annotations

import dataclasses

import pytest

from malletrain.client import ClientError
from malletrain.render.columns import console
from malletrain.render.job_detail import job
from malletrain.render.tables import headline, nodes
from tests.malletrain.daemon.forged import Agent, Imagined, RunningDaemon, until

SECTIONS = """
[[trainer]]
name = "gpus"
objective = "efficiency"
users = ["ann"]
node_classes = ["a100"]
[[trainer]]
name = "urgent"
objective = "deadlines"
users = ["bob"]
node_classes = ["xeon"]
"""


class TwoClasses(Imagined):
    """Nodes whose names begin with g are of class a100."""

    def poll(self):
        result = super().poll()
        gaps = (
            dataclasses.replace(gap, node_class="a100" if gap.node[0] == "g" else "xeon")
            for gap in result.gaps
        )
        return dataclasses.replace(result, gaps=tuple(gaps))


@pytest.fixture
def daemon(tmp_path):
    daemon = RunningDaemon(tmp_path, TwoClasses("g1", "g2", "x1"), allocation=SECTIONS)
    yield daemon
    daemon.stop()


def started_on(daemon, job):
    """The nodes that the job was last given."""
    starts = [e for e in daemon.events() if e.kind == "job-started" and e.job == job]
    return starts[-1].data["nodes"] if starts else None


def test_each_user_gets_leases_on_the_nodes_of_the_own_trainer(daemon):
    anns = daemon.submit("ann", max_nodes=3)
    bobs = daemon.submit("bob", max_nodes=3)
    until(lambda: len(daemon.machine.of("ann")) == 2, "ann has all nodes of the trainer's class")
    [lease] = until(lambda: daemon.machine.of("bob"), "bob has the other one")
    assert {daemon.machine.requests[of].node for of in daemon.machine.of("ann")} == {"g1", "g2"}
    assert daemon.machine.requests[lease].node == "x1"
    agent = Agent(daemon, lease)
    agent.hello(node_class="xeon")
    until(lambda: started_on(daemon, bobs) == ["x1"], "bob's job has it")
    agent.close()
    with daemon.client("olga") as client:
        status, views = client.status(), {view.node: view for view in client.nodes()}
        detail = client.job(anns)
    gpus, urgent, rest = status.trainers
    assert (gpus.name, gpus.objective, gpus.node_classes) == ("gpus", "efficiency", ("a100",))
    assert (gpus.jobs, gpus.waiting, gpus.nodes) == (0, 1, 0)
    assert (urgent.name, urgent.jobs, urgent.nodes) == ("urgent", 1, 1)
    assert (rest.name, rest.objective) == ("default", "throughput")
    assert views["x1"].trainer == "urgent"
    assert views["g1"].trainer == "gpus"
    assert detail.trainer == "gpus: efficiency, on nodes of a100"
    assert "for trainer gpus" in detail.job.reason
    terminal = console()
    with terminal.capture() as captured:
        terminal.print(headline(status), job(detail), nodes(list(views.values()), status.now))
    text = " ".join(captured.get().split())
    assert "Trainer urgent (deadlines): 1 job on 1 node, 0 wait" in text
    assert "Trainer gpus: efficiency, on nodes of a100" in text


def test_a_goal_of_another_unit_is_refused(daemon):
    with pytest.raises(ClientError) as refused:
        daemon.submit("ann", goal="throughput")
    assert str(refused.value) == (
        "The job's goal is 'throughput', and jobs of ann are of trainer gpus, which plans for "
        "efficiency; leave the goal out."
    )
    job = daemon.submit("ann", goal="efficiency")
    with daemon.client("ann") as client:
        assert client.job(job).spec["goal"] == "efficiency"
    olgas = daemon.submit("olga")
    with daemon.client("olga") as client:
        assert client.job(olgas).trainer.startswith("default: ")
