"""The agent when the daemon comes and goes, what it says anew, and what it is: small, and clear
about its options.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from malletrain.protocol import messages, wire
from tests.malletrain.agent.launchers import running
from tests.malletrain.agent.node_side import OFTEN_S, FakeDaemon, alive, eventually
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("daemon", [OFTEN_S], indirect=True, ids=[""])
def test_training_goes_on_without_the_daemon_and_the_next_one_learns_everything(
    daemon, start, tmp_path
):
    agent = start()
    running(daemon, tmp_path)
    daemon.expect("n0", messages.Metric)
    before = agent.job_pids()
    daemon.close()
    eventually(
        lambda: "is silent; training continues" in agent.log.read_text(), "the agent notices"
    )
    assert agent.job_pids() == before
    (tmp_path / "succeed").touch()
    eventually(lambda: not (tmp_path / "succeed").exists(), "the workers end meanwhile")
    second = FakeDaemon(daemon.port, "boot-2", (daemon.public, daemon.secret))
    try:
        hello = second.expect("n0", messages.Hello)
        # The end comes last: a daemon drops messages about a job that is over.
        assert hello.assignment == messages.Assignment("j1", "running", 1)
        second.expect("n0", messages.Phase, phase="succeeded")
        kinds = [type(message) for _, message in second.seen]
        end = kinds.index(messages.Phase)
        assert {messages.Metric, messages.Progress} <= set(kinds[:end])
        assert not {messages.Metric, messages.Progress} & set(kinds[end:])
        second.send("n0", messages.Release("j1", 5.0))
        second.expect("n0", messages.Released)
        second.send("n0", messages.Goodbye())
        assert agent.process.wait(PATIENCE_S) == 0
    finally:
        second.close()


def test_after_a_break_of_the_connection_the_agent_says_unasked_how_things_stand(
    daemon, start, tmp_path
):
    start()
    running(daemon, tmp_path)
    daemon.close()
    (tmp_path / "succeed").touch()
    same = FakeDaemon(daemon.port, daemon.boot, (daemon.public, daemon.secret))
    same.asks = False
    try:
        same.until(
            lambda: [
                m
                for _, m in same.seen
                if assigned(m) == messages.Assignment("j1", "succeeded", 1, size=1)
            ],
            "the news of the meantime",
        )
    finally:
        same.close()


def test_an_agent_of_before_keeps_its_job_if_a_newer_daemon_says_more_than_it_knows(
    daemon, start, tmp_path, monkeypatch
):
    """Only the daemon encodes its messages in this process."""
    encode = wire.encode

    def encode_newer(message):
        tag, payload = encode(message)
        body = msgspec.msgpack.decode(payload)
        for part in (body, body.get("spec", {})):
            part["surprise"] = [1]
        return [tag, msgspec.msgpack.encode(body)]

    monkeypatch.setattr(wire, "encode", encode_newer)
    agent = start()
    running(daemon, tmp_path)
    daemon.expect("n0", messages.Metric)
    (tmp_path / "succeed").touch()
    daemon.expect("n0", messages.Phase, phase="succeeded")
    daemon.send("n0", messages.Release("j1", 5.0))
    daemon.expect("n0", messages.Released)
    daemon.send("n0", messages.Goodbye())
    assert agent.process.wait(PATIENCE_S) == 0


def assigned(message):
    return message.assignment if isinstance(message, messages.Hello | messages.Phase) else None


def test_a_daemon_that_forgot_the_agent_is_told_again(daemon, start, tmp_path):
    start()
    running(daemon, tmp_path)
    daemon.names.clear()
    daemon.boot = "boot-2"
    since = len(daemon.seen)
    hello = daemon.expect("n0", messages.Hello, since=since)
    assert hello.assignment == messages.Assignment("j1", "running", 1)


@pytest.mark.parametrize("daemon", [OFTEN_S], indirect=True, ids=[""])
def test_a_suspended_agent_leaves_the_node_and_registers_again_when_it_goes_on(
    daemon, start, tmp_path
):
    agent = start()
    running(daemon, tmp_path)
    daemon.asks = False  # the agent must notice by itself
    since = len(daemon.seen)
    agent.signal(
        signal.SIGSTOP
    )  # the main scheduler suspends the lease: only this process, which leads its session
    eventually(lambda: not agent.job_pids(), "its job is gone while it stands still")
    agent.signal(signal.SIGCONT)
    hello = daemon.expect("n0", messages.Hello, since=since)
    assert hello.gone_in_s is None
    daemon.until(
        lambda: any(
            isinstance(m, messages.Hello | messages.Phase)
            and assigned(m)
            and assigned(m).phase == "exited"
            for _, m in daemon.seen[since:]
        ),
        "the daemon hears that the job is not there any more",
    )
    daemon.send("n0", messages.Release("j1", 0.0))
    daemon.expect("n0", messages.Released, job="j1")


def test_logs_are_sent_again_until_they_are_acknowledged(daemon, start, tmp_path):
    start()
    daemon.acknowledges = False
    running(daemon, tmp_path)
    daemon.until(
        lambda: any(isinstance(m, messages.Progress) for _, m in daemon.seen), "the job runs"
    )
    daemon.acknowledges = True
    daemon.names.clear()  # a connection that is new again
    daemon.until(
        lambda: daemon.logs.get(("j1", 1, "rank0")) == b"line of round 1\n",
        "the log arrives after all",
    )


def test_messages_that_do_not_fit_are_ignored(daemon, start):
    agent = start()
    identity = daemon.nodes["n0"]
    for frames in (
        [b"junk"],
        [b"MT9", b"\x80"],
        [b"MT1", b"\xc1"],
        [b"MT1", b"\x81\xa4type\xa4nope"],
        [],
    ):
        daemon.socket.send_multipart([identity, *frames])
    daemon.send("n0", messages.Round("nobody", 1, 0, 1))
    daemon.send("n0", messages.Request("1", "status"))
    daemon.send("n0", messages.Release("j9", 1.0))
    daemon.expect("n0", messages.Released, job="j9")
    assert agent.process.poll() is None


def test_the_agent_is_small(daemon, start):
    agent = start()
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    resident_kb = next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
    )
    assert resident_kb < 60 * 1024
    mapped = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert not [name for name in ("libtorch", "numpy", "pydantic") if name in mapped]


def test_everything_wrong_with_the_options_is_said_at_once():
    options = ["--node", "n0", "--server-key", "short", "--grace-s", "x"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLETRAIN")}
    command = [sys.executable, "-m", "malletrain.agent", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 2
    missing = ("--endpoint is missing", "--lease is missing")
    for words in (
        *missing,
        "MALLETRAIN_LEASE_KEY in the environment is missing",
        "--server-key is not",
        "--grace-s",
    ):
        assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_options_may_come_from_the_environment(daemon, start, tmp_path, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_NODE_CLASS", "gpu")
    monkeypatch.setenv("MALLETRAIN_GPUS", "4")
    start()
    hello = daemon.expect("n0", messages.Hello)
    assert (hello.node_class, hello.gpus) == ("gpu", 4)
    assert alive(hello.pid)


@pytest.mark.parametrize("daemon", [OFTEN_S], indirect=True, ids=[""])
def test_training_goes_on_while_the_agent_has_no_file_descriptors(daemon, start, tmp_path):
    agent = start()
    running(daemon, tmp_path)
    before, pid = agent.job_pids(), agent.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    daemon.until(
        lambda: "the connection to the daemon ended here" in agent.log.read_text(),
        "the agent cannot report",
    )
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    since = len(daemon.seen)
    hello = daemon.expect("n0", messages.Hello, since=since)
    assert hello.assignment == messages.Assignment("j1", "running", 1)
    assert agent.job_pids() == before
