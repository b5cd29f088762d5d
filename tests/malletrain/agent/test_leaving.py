"""The end of an agent and of its job, in all its ways: no process remains on the node."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from malletrain.protocol import messages
from malletrain.protocol.payloads import ProbeTarget
from tests.malletrain.agent.launchers import STUBBORN, assign, is_clean, running
from tests.malletrain.agent.node_side import AgentProcess, eventually
from tests.waiting import NEVER_S, PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_release_leaves_nobody_behind(daemon, start, tmp_path):
    agent = start()
    assign(daemon, tmp_path, STUBBORN)
    daemon.expect("n0", messages.Phase, phase="ready")
    assert len(agent.job_pids()) == 3  # supervisor, launcher, the helper that forked twice
    daemon.send("n0", messages.Release("j1", 0.3))
    daemon.expect("n0", messages.Released)
    assert not agent.job_pids()


@pytest.mark.parametrize("victim", ["agent", "supervisor", "launcher"])
def test_sigkill_leaves_nobody_behind(daemon, start, tmp_path, victim):
    agent = start()
    assign(daemon, tmp_path, STUBBORN)
    daemon.expect("n0", messages.Phase, phase="ready")
    supervisor = next(
        pid for pid in agent.job_pids() if b"--keep" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    launcher = next(
        pid
        for pid in agent.job_pids()
        if b"fake_python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"--keep")[0]
    )
    os.kill(
        {"agent": agent.process.pid, "supervisor": supervisor, "launcher": launcher}[victim],
        signal.SIGKILL,
    )
    if victim != "agent":
        daemon.expect("n0", messages.Phase, phase="exited")
    eventually(lambda: not agent.job_pids(), "nobody is left")


# A worker that reports until it is killed, and notes what the agent's socket took of it.
TALKATIVE = """
import signal
from malletrain.protocol import worker_channel as local
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("ready")
join()
out = local.Outbox(os.environ["MALLETRAIN_SOCKET"])
who = local.Sender(order.job, generation, 0, os.getpid())
note = os.open(os.path.join(order.spec.workdir, "taken"), os.O_CREAT | os.O_WRONLY)
os.pwrite(note, b"%12d" % 0, 0)
step = 1
while True:
    if out.send(local.encode(local.WorkerProgress(who, step * 32.0, step, 32.0, 1.0, 1.0 + step))):
        os.pwrite(note, b"%12d" % step, 0)
        step += 1
"""


def test_what_workers_said_arrives_before_the_node_is_free(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path, TALKATIVE)
    daemon.expect("n0", messages.Progress)
    daemon.send("n0", messages.Release("j1", 0.3))
    daemon.expect("n0", messages.Released)
    job_messages = [
        m for _, m in daemon.seen if isinstance(m, messages.Progress | messages.Released)
    ]
    assert isinstance(job_messages[-1], messages.Released)
    assert isinstance(job_messages[-2], messages.Progress)
    assert job_messages[-2].steps >= int((tmp_path / "taken").read_text())


def test_what_a_killed_agent_left_on_disk_is_removed_by_the_next(daemon, start, tmp_path):
    first = start()
    running(daemon, tmp_path)
    assert list(first.run_dir.iterdir())
    first.kill()
    daemon.nodes.clear()
    second = start()
    daemon.send("n0", messages.Goodbye())
    assert second.process.wait(PATIENCE_S) == 0
    assert is_clean(second)


def test_an_idle_agent_leaves_at_once_on_sigterm(daemon, start):
    agent = start(**{"grace-s": "600"})
    daemon.send("n0", messages.Release("j9", 1.0))
    daemon.expect("n0", messages.Released, job="j9")  # it knows that it is welcome
    agent.signal(signal.SIGTERM)
    assert daemon.expect("n0", messages.Leaving).in_s == 600
    assert agent.process.wait(PATIENCE_S) == 0


PATIENT = """
import sys
from malletrain.agent import networks
from malletrain.agent.__main__ import main
networks.CONNECT_S = 3600.0
sys.exit(main())
"""


def test_an_agent_does_not_wait_for_a_trial_of_a_way_that_stalls(daemon, start):
    agent = start(program=("-c", PATIENT))
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        target = ProbeTarget("n1", *elsewhere.getsockname())
        daemon.send("n0", messages.ProbeTo(1, "ab" * 16, (target,)))
        waits, _ = elsewhere.accept()
        assert waits.recv(1), "it has sent its token, and waits for an answer"
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(PATIENCE_S) == 0
        waits.close()
    assert is_clean(agent)


def test_an_agent_that_is_not_yet_known_says_hello_and_goodbye_in_one(daemon, tmp_path):
    agent = AgentProcess(daemon, "n0", tmp_path, **{"grace-s": "600"})
    eventually(lambda: daemon.socket.poll(0), "the agent speaks, and nobody answers")
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert daemon.expect("n0", messages.Hello, gone_in_s=None)
    daemon.until(
        lambda: any(isinstance(m, messages.Hello) and m.gone_in_s for _, m in daemon.seen),
        "the news",
    )


def test_a_preempted_agent_goes_on_until_the_daemon_has_moved_the_job(daemon, start, tmp_path):
    agent = start(**{"grace-s": str(NEVER_S)})
    running(daemon, tmp_path)
    daemon.expect("n0", messages.Metric)
    agent.signal(signal.SIGTERM)
    daemon.expect("n0", messages.Leaving)
    agent.signal(signal.SIGTERM)  # again, as some schedulers do
    daemon.send("n0", messages.Drain("j1", 1, 1, NEVER_S))
    assert daemon.expect("n0", messages.Drained).saved
    assert agent.job_pids()
    daemon.send("n0", messages.Release("j1", 5.0))
    daemon.expect("n0", messages.Released)
    # It hands its log over before it goes.
    daemon.until(lambda: agent.process.poll() is not None, "the agent leaves")
    assert agent.process.wait() == 0
    assert is_clean(agent)


# A launcher of another rank than 0: nobody here takes snapshots on request.
ELSEWHERE = """
say("ready")
join()
while True:
    end.receive(0.02)
    if os.path.exists(os.path.join(order.spec.workdir, "peer-gone")):
        say("failed", messages.Failure(1, 1, time.time()))
        while True:
            end.receive(1.0)
"""


# A launcher whose workers are not ready yet.
SLOW = """
open(os.path.join(order.spec.workdir, "begun"), "w").close()
while True:
    end.receive(1.0)
"""


def second(daemon, tmp_path):
    """Bring the node into a round whose rank 0 is elsewhere."""
    assign(daemon, tmp_path, ELSEWHERE)
    daemon.expect("n0", messages.Phase, phase="ready")
    daemon.send("n0", messages.Round("j1", 1, 1, 2, "127.0.0.1", 5000))
    daemon.expect("n0", messages.Phase, phase="running")


@pytest.mark.parametrize("news", ["peer-gone", "nothing"])
def test_without_a_daemon_nobody_waits_for_a_rank_0_that_has_left(daemon, start, tmp_path, news):
    agent = start(**{"grace-s": str(100 * PATIENCE_S)})
    second(daemon, tmp_path)
    daemon.close()
    agent.signal(signal.SIGTERM)
    (tmp_path / news).touch()
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_without_a_daemon_a_job_that_is_just_starting_is_not_waited_for(daemon, start, tmp_path):
    agent = start(**{"grace-s": str(100 * PATIENCE_S)})
    assign(daemon, tmp_path, SLOW)
    eventually((tmp_path / "begun").exists, "the launcher begins")
    daemon.close()
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_without_a_daemon_nobody_waits_for_workers_that_cannot_save(daemon, start, tmp_path):
    """They have just begun, or their script keeps no snapshot."""
    agent = start(**{"grace-s": str(100 * PATIENCE_S)})
    assign(daemon, tmp_path, ELSEWHERE)
    daemon.expect("n0", messages.Phase, phase="ready")
    daemon.send("n0", messages.Round("j1", 1, 0, 2))
    daemon.expect("n0", messages.Phase, phase="running")
    daemon.close()
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


@pytest.mark.parametrize("answers", [True, False])
def test_a_preempted_agent_stops_in_time_by_itself(daemon, start, tmp_path, answers):
    agent = start(**{"grace-s": "2"})
    running(daemon, tmp_path)
    daemon.expect("n0", messages.Metric)
    if not answers:
        daemon.close()
    agent.signal(signal.SIGTERM)
    assert agent.process.wait(PATIENCE_S) == 0
    assert is_clean(agent)


def test_goodbyes_said_again_do_not_keep_the_agent_of_a_lease_that_is_over(daemon, start, tmp_path):
    """A daemon that has forgotten the lease takes no log any more, and answers so each time."""
    agent = start()
    daemon.acknowledges = False
    running(daemon, tmp_path)

    def gone():
        daemon.send("n0", messages.Goodbye("The lease has ended."))
        return agent.process.poll() is not None

    daemon.until(gone, "the agent leaves")
    assert is_clean(agent)
