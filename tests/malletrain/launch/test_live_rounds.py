"""Live launchers, their workers, and the rounds of their job: losses between two plans. The test
plays the agents and the daemon, so that a plan is made when it wants.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from malletrain.protocol import messages
from malletrain.protocol.launcher_channel import LaunchOrder, write_order
from malletrain.rounds.interface import (
    Broke,
    RoundSettings,
    SaveRound,
    SendAbort,
    SendAssign,
    SendRelease,
    SendRound,
    WorkersDone,
)
from malletrain.rounds.live import LiveRounds
from tests.malletrain import forked_programs
from tests.malletrain.agent.node_side import alive, spec
from tests.malletrain.launch.fake_agent import FakeAgent
from tests.malletrain.launch.test_live import LAUNCHER
from tests.waiting import NEVER_S, PATIENCE_S, until

pytest.importorskip("torch")

# Momentum makes the weights depend on the order of the steps; they do not depend on the number of
# ranks. All wait in their third step, and d before it joins.
SCRIPT = """
import os, time
node = os.path.basename(os.getcwd())
def note(what):
    with open("../notes", "a") as file:
        file.write(f"{node} {what}\\n")
def wait_for(name):
    while not os.path.exists(f"../{name}"):
        time.sleep(0.02)
note("begins")
if node == "d":
    wait_for("start")
import torch
from malletrain import elastic
model = torch.nn.Linear(4, 1)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
run = elastic.Run(model=model, optimizer=optimizer)
net = run.ddp(model)
for number in run.steps(6):
    with run.step(samples=1) as step:
        optimizer.zero_grad()
        if step.generation == 1 and number == 2:
            note(f"waits as {os.getpid()}")
            wait_for("go")
        net(torch.full((1, 4), float(number))).sum().backward()
        optimizer.step()
    if not step.aborted:
        note(f"step {run.steps_done} of round {step.generation}")
note(f"weight {float(model.weight[0, 0])}")
"""
PATIENT = RoundSettings(
    warmup_s=NEVER_S, warmup_blocking_s=NEVER_S, join_s=NEVER_S, failure_grace_s=0.1
)


def weight_in_the_end():
    """The weight after an undisturbed run."""
    weight = velocity = 0.0
    for number in range(6):
        velocity = 0.5 * velocity + number
        weight -= 0.5 * velocity
    return weight


class Job:
    """A live job. ``actions``: those of its rounds, all carried out."""

    def __init__(self, folder):
        self.folder, self.rounds = folder, LiveRounds(PATIENT)
        self.agents, self.launchers, self.actions = {}, {}, []

    def start(self, node):
        folder = self.folder / node
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        self.agents[node] = agent = FakeAgent(folder)
        job = spec(folder, nproc_per_node=1, mode="live")
        order = LaunchOrder(
            "j1", job, agent.endpoint, "127.0.0.1", str(folder), 1.0, join_timeout_s=NEVER_S
        )
        write_order(folder / "order.json", order)
        self.launchers[node] = forked_programs.start(
            *(LAUNCHER, "--launch", str(folder / "order.json")),
            folder=folder,
            output=folder / "launcher.log",
            environment={"MALLETRAIN_PRELOAD": "0", "MALLETRAIN_JOB_KEY": "5e" * 32},
        )

    def act(self, actions):
        self.actions += actions
        for action in actions:
            node = getattr(action, "node", None)
            if isinstance(action, SendAssign):
                self.start(node)
            elif isinstance(action, SendRelease):
                self.agents[node].say(messages.Release("j1", 0.0))
            elif isinstance(action, SendAbort):
                self.agents[node].say(messages.Abort("j1", action.generation))
            elif isinstance(action, SendRound):
                place = (action.generation, action.rank, action.size, *(action.store or ()))
                self.agents[node].say(messages.Round("j1", *place))

    def move(self, *nodes):
        self.act(self.rounds.move(nodes, time.monotonic()))

    def kill(self, node):
        """Kill the worker on a node, which waits in its third step."""
        process = self.waits_as(node)
        os.kill(process, signal.SIGKILL)
        until(lambda: not alive(process), "the worker is gone")

    def lose(self, node):
        """The node is lost with all its processes."""
        self.kill(node)
        self.launchers.pop(node).kill()
        self.agents.pop(node).socket.close(0)
        self.act(self.rounds.gone(node, time.monotonic()))

    def hear(self):
        """Pass on what the launchers say, and the time."""
        for node, agent in list(self.agents.items()):
            while agent.socket.poll(0):
                message = agent.hear()
                now = time.monotonic()
                if isinstance(message, messages.Phase):
                    self.act(self.rounds.phase(node, message.assignment, now))
                elif isinstance(message, messages.StoreUp):
                    place = (message.generation, message.host, message.port)
                    self.act(self.rounds.store_up(node, *place))
        self.act(self.rounds.tick(time.monotonic()))

    def until(self, condition, what):
        """Wait for a condition. In none of these tests there is a failure, and none releases a."""

        def met():
            self.hear()
            return condition() or self.of(Broke) or SendRelease("a") in self.actions

        until(met, what, details=self.output)
        assert not self.of(Broke), self.output()
        assert condition(), f"{what}\n{self.output()}"

    def of(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]

    def notes(self):
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def waits_as(self, node):
        """Return the process of a node that waits in its third step; None if none does."""
        lines = [line for line in self.notes() if line.startswith(f"{node} waits as")]
        return int(lines[0].rpartition(" ")[2]) if lines else None

    def output(self):
        logs = sorted(self.folder.glob("*/*.log"))
        return "\n".join([*self.notes(), *map(repr, self.actions), *(f.read_text() for f in logs)])

    def close(self):
        for node, launcher in self.launchers.items():
            launcher.terminate()
            launcher.wait(PATIENCE_S)
            self.agents[node].socket.close(0)


@pytest.fixture
def job(tmp_path):
    """A job on a and b, whose workers wait in their third step."""
    made = Job(tmp_path)
    try:
        made.move("a", "b")
        made.until(
            lambda: made.waits_as("a") and made.waits_as("b"), "both are in their third step"
        )
        yield made
    finally:
        made.close()


def touch(job, *names):
    for name in names:
        (job.folder / name).touch()


def steps_after_the_second(job):
    """Let the training end; return the notes of its later steps."""
    job.until(lambda: job.of(WorkersDone), "the training ends")
    notes = job.notes()
    weights = {line.partition(" ")[2] for line in notes if " weight " in line}
    assert weights == {f"weight {weight_in_the_end()}"}
    return sorted(line for line in notes if " step " in line and line.split()[2] not in "12")


def test_a_leaver_that_is_planned_again_goes_on_alone_when_the_other_worker_is_killed(job):
    job.move("b")
    job.move("a", "d")
    job.until(lambda: "d begins" in job.notes(), "d is being started")
    job.kill("b")
    touch(job, "go")
    job.until(lambda: job.rounds.members == ("a",), "a goes on alone")
    assert steps_after_the_second(job) == [f"a step {n} of round 3" for n in range(3, 7)]


@pytest.mark.thorough
def test_a_leaver_that_is_not_enough_alone_gives_the_state_when_the_other_node_is_lost(job):
    job.move("b")
    job.rounds.min_nodes = 2
    job.move("a", "d")
    job.until(lambda: "d begins" in job.notes(), "d is being started")
    job.lose("b")
    touch(job, "go", "start")
    assert steps_after_the_second(job) == [
        f"{node} step {n} of round 3" for node in "ad" for n in range(3, 7)
    ]


@pytest.mark.thorough
def test_a_member_that_is_not_planned_any_more_gives_the_state_when_the_other_worker_is_killed(job):
    job.move("a", "d")
    job.until(lambda: "d begins" in job.notes(), "d is being started")
    job.kill("a")
    touch(job, "go")
    job.until(lambda: SendAbort("b", 1) in job.actions, "b gives up its step")
    touch(job, "start")
    steps = steps_after_the_second(job)
    assert job.of(SaveRound)[1].members == ("b", "a", "d")
    for node in "ad":  # b leaves after any step
        numbers = [line.split()[2] for line in steps if line.startswith(node)]
        assert numbers == ["3", "4", "5", "6"]
