"""A Python that is warm on a node before a job is chosen: jobs are forks of it, and nothing of it
is in anybody's way. The Python here imports no torch; tests/malletrain/launch/test_warm_server.py
has a real one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from malletrain.launch.supervisor import process_table
from malletrain.protocol import messages
from malletrain.protocol.interpreters import interpreter_of
from tests.malletrain.agent.launchers import OBEDIENT, is_clean
from tests.malletrain.agent.node_side import FAKE_LAUNCHER, OFTEN_S, alive, eventually, spec
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

WARM_PYTHON = """#!{python}
import sys
sys.path[:0] = {path!r}
if sys.argv[2] != "warm":
    sys.exit("this Python was started for a job")
{hindrance}
import os, types
from malletrain.launch import fork_server, warm_server

class Restart(types.ModuleType):
    def main(self):
        with open("pids", "a") as file:
            print(os.getpid(), os.getppid(), file=file)
        try:
            exec(LAUNCHER, {{"__name__": "__main__"}})
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1

LAUNCHER = {launcher!r}
fork_server.PRELOADED = ()
sys.modules["malletrain.launch.restart"] = Restart("malletrain.launch.restart")
import malletrain.launch
malletrain.launch.restart = sys.modules["malletrain.launch.restart"]
sys.argv = [sys.argv[0], *sys.argv[5:]]
warm_server.main("a note of the environment")
"""


@pytest.fixture
def warm_python(tmp_path):
    """A program that can only be warmed up; ``hindrance`` is run before it is."""

    def make(hindrance="", launcher=OBEDIENT):
        path = tmp_path / "warm_python"
        text = WARM_PYTHON.format(
            python=sys.executable,
            path=sys.path,
            hindrance=hindrance,
            launcher=FAKE_LAUNCHER.format(path=sys.path) + launcher,
        )
        path.write_text(text)
        path.chmod(0o755)
        return spec(tmp_path, python=str(path), env={"MINE": "a b"})

    return make


def warm_up(daemon, *specs, idle_s=1e6, node="n0"):
    interpreters = tuple(interpreter_of(one) for one in specs)
    daemon.send(node, messages.WarmUp(interpreters, idle_s))
    return tuple(one.key for one in interpreters)


def warm_keys(daemon):
    """The keys in the agent's last Warm message; None before the first."""
    return next((m.keys for _, m in reversed(daemon.seen) if isinstance(m, messages.Warm)), None)


def servers(agent):
    """Pids of the supervisors of fork servers and of all processes below them."""
    return set(agent.job_pids())


def ancestors(pid):
    table, pids = process_table(), []
    while pid in table and pid > 1:
        pid = table[pid][0]
        pids.append(pid)
    return pids


def test_jobs_are_forks_of_a_python_that_was_warm_before(daemon, start, tmp_path, warm_python):
    agent = start()
    job = warm_python()
    keys = warm_up(daemon, job)
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    before = servers(agent)
    for number, name in ((1, "j1"), (2, "j2")):
        daemon.send("n0", messages.Assign(name, job, key="aa"))
        daemon.expect("n0", messages.Phase, phase="ready", job=name)
        daemon.send("n0", messages.Round(name, 1, 0, 1))
        daemon.expect("n0", messages.Phase, phase="running", job=name)
        launcher = int(Path(tmp_path / "pids").read_text().splitlines()[number - 1].split()[0])
        of_job, server, supervisor = ancestors(launcher)[:3]
        assert {server, supervisor} == before
        assert of_job not in before
        env = (tmp_path / "env-1").read_text()
        assert f"MALLETRAIN_JOB={name}\n" in env
        assert "MINE=a b\n" in env
        daemon.send("n0", messages.Release(name, PATIENCE_S))
        daemon.expect("n0", messages.Released, job=name)
        assert servers(agent) == before, "nothing of the job is left, and the fork server is"
        daemon.until(
            lambda name=name: b"a note of the env" in daemon.logs.get((name, 0, "launcher"), b""),
            "the launcher's log",
        )
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_what_a_job_leaves_behind_is_killed_and_the_fork_server_is_not(
    daemon, start, tmp_path, warm_python
):
    stubborn = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
say("ready")
while True:
    end.receive(1.0)
"""
    agent = start()
    job = warm_python(launcher=stubborn)
    keys = warm_up(daemon, job)
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    before = servers(agent)
    daemon.send("n0", messages.Assign("j1", job, key="aa"))
    daemon.expect("n0", messages.Phase, phase="ready")
    assert len(servers(agent)) > len(before) + 2
    daemon.send("n0", messages.Release("j1", 0.0))
    daemon.expect("n0", messages.Released)
    assert servers(agent) == before


def test_a_launcher_that_dies_is_told_with_its_signal(daemon, start, tmp_path, warm_python):
    start()
    job = warm_python()
    keys = warm_up(daemon, job)
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    daemon.send("n0", messages.Assign("j1", job, key="aa"))
    daemon.expect("n0", messages.Phase, phase="ready")
    launcher = int((tmp_path / "pids").read_text().split()[0])
    os.kill(launcher, signal.SIGKILL)
    phase = daemon.expect("n0", messages.Phase, phase="exited")
    assert phase.assignment.job == "j1"
    daemon.send("n0", messages.Assign("j1", job, key="aa"))  # it is wanted here again
    daemon.expect("n0", messages.Phase, phase="ready", since=daemon.seen.index(("n0", phase)))


def test_a_python_that_cannot_be_warmed_up_is_told_and_jobs_start_without(
    daemon, start, tmp_path, warm_python
):
    agent = start()
    job = warm_python(hindrance="sys.exit('no torch here')")
    keys = warm_up(daemon, job)
    daemon.until(lambda: warm_keys(daemon) == keys, "that it cannot be")
    assert not servers(agent)
    daemon.send("n0", messages.Assign("j1", job, key="aa"))
    phase = daemon.expect("n0", messages.Phase, phase="exited")
    assert "this Python was started for a job" in phase.tail


def test_a_job_waits_for_the_python_that_is_being_warmed_up(daemon, start, tmp_path, warm_python):
    start()
    job = warm_python(
        hindrance="import time, os\nwhile not os.path.exists({!r}): time.sleep(0.02)".format(
            str(tmp_path / "go")
        )
    )
    warm_up(daemon, job)
    daemon.send("n0", messages.Assign("j1", job, key="aa"))
    (tmp_path / "go").touch()
    daemon.expect("n0", messages.Phase, phase="ready")


def test_one_that_nobody_uses_ends_and_is_begun_again_when_it_is_wanted(daemon, start, warm_python):
    agent = start()
    job = warm_python()
    keys = warm_up(daemon, job, idle_s=0.0)
    daemon.expect("n0", messages.Warm, keys=keys)
    daemon.until(lambda: warm_keys(daemon) == (), "it has ended")
    eventually(lambda: not servers(agent), "nothing of it is left")
    since = len(daemon.seen)
    warm_up(daemon, job)
    daemon.expect("n0", messages.Warm, since=since, keys=keys)


def test_one_that_the_daemon_does_not_name_any_more_ends(daemon, start, tmp_path, warm_python):
    agent = start()
    first = warm_python()
    keys = warm_up(daemon, first)
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    old = servers(agent)
    other = messages.JobSpec(
        **{**{f: getattr(first, f) for f in first.__struct_fields__}, "env": {}}
    )
    others = warm_up(daemon, other)
    daemon.until(lambda: warm_keys(daemon) == others, "the other one is warm")
    assert not old & servers(agent)


def test_a_node_that_is_wanted_back_while_it_warms_up_goes_at_once(daemon, start, warm_python):
    agent = start(**{"grace-s": "600"})
    warm_up(daemon, warm_python(hindrance="import time\nwhile True: time.sleep(0.05)"))
    daemon.until(lambda: servers(agent), "it has begun")
    agent.signal(signal.SIGTERM)
    daemon.expect("n0", messages.Leaving)
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_an_agent_that_is_killed_takes_its_fork_servers_with_it(daemon, start, warm_python):
    agent = start()
    keys = warm_up(daemon, warm_python())
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    pids = servers(agent)
    agent.process.kill()
    eventually(lambda: not any(alive(pid) for pid in pids), "they are gone")


@pytest.mark.parametrize("daemon", [OFTEN_S], indirect=True, ids=[""])
def test_its_memory_is_told(daemon, start, warm_python):
    start()
    keys = warm_up(daemon, warm_python())
    daemon.until(lambda: warm_keys(daemon) == keys, "the Python is warm")
    daemon.until(lambda: daemon.warm_bytes.get("n0", 0) > 1 << 20, "a heartbeat with its memory")
