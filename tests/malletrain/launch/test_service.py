"""The launcher of a service, with a real process; the agent is the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from malletrain.protocol import env, messages, wire
from malletrain.protocol.launcher_channel import LaunchOrder, write_order
from malletrain.protocol.messages import Peer
from tests.malletrain.launch.fake_agent import FakeAgent
from tests.waiting import PATIENCE_S

SERVICE = """
import os, time
from malletrain import membership
with open("threads", "w") as file:
    file.write(os.environ["OMP_NUM_THREADS"])
membership.join("here")
while not os.path.exists("enough"):
    time.sleep(0.01)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the launcher of a script; return its agent. The lease is a slot of one processor."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(env.SLOT_CPUS, "1")
    agents = []

    def of(script):
        agents.append(started(script, tmp_path))
        return agents[0]

    yield of
    for agent in agents:
        agent.launcher.kill()
        agent.launcher.wait()
        agent.socket.close()


@pytest.fixture
def launcher(start):
    """Its agent; the process has joined."""
    agent = start(SERVICE)
    assert agent.hear_phase() == ("ready", 0)
    return agent


def started(script, tmp_path):
    """The agent of a launcher that runs ``script``."""
    (tmp_path / "serve.py").write_text(script)
    (tmp_path / "logs").mkdir()
    agent = FakeAgent(tmp_path)
    spec = messages.JobSpec("service", "ann", str(tmp_path / "serve.py"), str(tmp_path), "python")
    order = LaunchOrder("j1", spec, agent.endpoint, "127.0.0.1", str(tmp_path / "logs"), 1.0, 60.0)
    write_order(tmp_path / "order.json", order)
    command = [sys.executable, "-m", "malletrain.launch.service"]
    agent.launcher = subprocess.Popen([*command, "--launch", str(tmp_path / "order.json")])
    return agent


def view(generation):
    """Of this node alone."""
    return messages.Round("j1", generation, 0, 1, members=(Peer("n0", "127.0.0.1", "here"),))


def test_its_process_has_as_many_threads_as_the_slot_has_cores(launcher, tmp_path):
    assert (tmp_path / "threads").read_text() == "1"


def test_a_view_that_comes_after_its_end_does_not_make_it_run_again(launcher, tmp_path):
    """The daemon sends one before it has heard of the end; it waited for ever for the next end."""
    launcher.say(view(1))
    assert launcher.hear_phase() == ("running", 1)
    (tmp_path / "enough").touch()
    assert launcher.hear_phase() == ("succeeded", 1)
    launcher.say(view(2))
    launcher.say(messages.Release("j1", 1.0))
    assert launcher.launcher.wait(PATIENCE_S) == 0
    last_messages = []
    while launcher.socket.poll(0):
        last_messages.append(wire.decode(launcher.socket.recv_multipart()[1:]))
    assert [m for m in last_messages if isinstance(m, messages.Phase)] == []


LOADING = """
import os, time
from malletrain import membership
group = membership.join("here", ready=False)
while not os.path.exists("loaded"):
    time.sleep(0.01)
group.report_ready()
group.set_values({1: 5.0}, expires_s=60.0)
group.report_ready()  # once more changes nothing
while not os.path.exists("enough"):
    time.sleep(0.01)
"""


def test_the_time_until_a_process_is_ready_is_measured(start, tmp_path):
    agent = start(LOADING)
    joined = agent.hear().assignment
    assert (joined.phase, joined.loading, joined.start_s) == ("ready", True, None)
    agent.say(view(1))
    assert agent.hear().assignment.loading
    (tmp_path / "loaded").touch()
    ready = agent.hear().assignment
    assert (ready.phase, ready.loading) == ("running", False)
    assert ready.start_s > 0.0
    assert agent.hear() == messages.Worth("j1", {1: 5.0}, 60.0)
    agent.say(view(2))
    after = agent.hear().assignment
    assert (after.generation, after.start_s) == (2, ready.start_s)
