"""Commands of owners on a node: what they run in, and their processes, without a daemon."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from malletrain.agent import start
from malletrain.agent.commands import OwnerCommand
from malletrain.agent.launch import JobPlace
from malletrain.agent.software import owner_command
from malletrain.agent.start import RUNTIMES, command_of_owner, container_command
from malletrain.protocol import env, messages
from malletrain.protocol.commands import OUTPUT_WINDOW, Terminal
from tests.malletrain.agent.test_software import CONTAINED
from tests.waiting import PATIENCE_S

SCREEN = Terminal(24, 80, "vt100")
CONTAINER = messages.SoftwareEnvironment(container="/images/torch.sif", runtime="podman")


def assign(tmp_path, **fields):
    spec = messages.JobSpec("x", "me", "train.py", str(tmp_path), sys.executable, **fields)
    return messages.Assign("j1", spec, key="secret")


def place(tmp_path, **outside):
    return JobPlace(
        tmp_path, "ipc:///l", "/w", "h", "", "n1", "l1", {"PATH": "/usr/bin:/bin", **outside}
    )


def test_it_has_the_jobs_variables_and_reports_nothing(tmp_path):
    at = place(tmp_path, SLURM_PROCID="0", RANK="3", HOME="/users/me")
    argv, inside = command_of_owner(
        assign(tmp_path, env={"COLOUR": "green"}), at, "/flags", ["ls", "-l"], SCREEN
    )
    assert argv == ["ls", "-l"]
    expected = {"COLOUR": "green", "HOME": "/users/me", "TERM": "vt100", env.JOB: "j1"}
    assert expected.items() <= inside.items()
    workers = {env.SOCKET, env.FLAGS, env.AGENT, "RANK", "SLURM_PROCID"}
    assert workers.isdisjoint(inside)


def test_the_setup_runs_before_it_and_does_not_mix_with_its_output(tmp_path):
    spec = assign(tmp_path, setup="echo loading; export COLOUR=green").spec
    command = owner_command(spec, ["sh", "-c", 'echo "$COLOUR" "$1"', "sh", "a b"])
    done = subprocess.run(command, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"green a b\n", b"loading\n")
    failing = owner_command(assign(tmp_path, setup="false").spec, ["echo", "run"])
    assert subprocess.run(failing, capture_output=True, check=False).stdout == b""


@pytest.mark.parametrize("terminal", [None, SCREEN])
def test_in_a_container_it_runs_in_one_of_the_same_image(tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(start.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    job = assign(tmp_path, software=CONTAINER)
    argv, _ = command_of_owner(job, place(tmp_path), "/flags", ["nvidia-smi"], terminal)
    assert argv[:2] == ["podman", "run"]
    assert "--interactive" in argv
    assert ("--tty" in argv) == (terminal is not None)
    assert argv[argv.index("/images/torch.sif") + 1] == "/bin/sh"
    assert argv[-1] == "nvidia-smi"
    assert "secret" not in " ".join(argv)


def test_a_launcher_has_no_standard_input_in_its_container():
    made = container_command(RUNTIMES["podman"], CONTAINED, ["true"])
    interactive = container_command(
        RUNTIMES["podman"], replace(CONTAINED, stdin=True, terminal=True), ["true"]
    )
    assert [word for word in interactive if word not in made] == ["--interactive", "--tty"]


async def holds(condition):
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline
        await asyncio.sleep(0.01)


def run(argv, scenario, terminal=None):
    """Run a command, and ``scenario(command, sent messages)`` beside it."""

    async def serve():
        sent = []
        command = OwnerCommand("c1", argv, {"PATH": "/usr/bin:/bin"}, "/", terminal, sent.append)
        try:
            await scenario(command, sent)
        finally:
            command.hang_up()
            await holds(command.reap)

    asyncio.run(serve())


def output_of(sent, error=False):
    parts = [m for m in sent if isinstance(m, messages.CommandOutput) and m.error is error]
    return b"".join(part.data for part in parts)


def test_output_is_sent_as_far_as_it_may():
    async def scenario(command, sent):
        await holds(lambda: len(output_of(sent)) == OUTPUT_WINDOW)
        assert command.exit_code() is None
        command.allow(OUTPUT_WINDOW + 1000)
        await holds(lambda: len(output_of(sent)) == OUTPUT_WINDOW + 1000)
        command.allow(OUTPUT_WINDOW)  # an earlier message takes nothing back
        command.allow(10**6 + 1)  # the end is seen as well
        await holds(lambda: command.exit_code() is not None)
        assert (command.exit_code(), len(output_of(sent))) == (0, 10**6)

    run(["head", "-c", str(10**6), "/dev/zero"], scenario)


def test_input_is_counted_as_it_is_read():
    async def scenario(command, sent):
        command.feed(b"one\n", end=False)
        await holds(lambda: output_of(sent) == b"one\n")
        command.feed(b"two\n", end=True)
        await holds(lambda: command.exit_code() is not None)
        assert (output_of(sent), command.exit_code()) == (b"one\ntwo\n", 0)
        assert max(m.count for m in sent if isinstance(m, messages.CommandInputRead)) == 8

    run(["cat"], scenario)


def test_input_that_nobody_reads_is_counted_too():
    async def scenario(command, sent):
        await holds(lambda: output_of(sent) == b"closed\n")
        command.feed(b"x" * 50_000, end=True)
        await holds(lambda: messages.CommandInputRead("c1", 50_000) in sent)

    run(["sh", "-c", "exec <&-; echo closed; sleep 3600"], scenario)


def test_the_end_of_the_input_ends_a_command_in_a_terminal():
    async def scenario(command, sent):
        await holds(lambda: b"24 80" in output_of(sent))
        command.resize(Terminal(40, 100))
        command.feed(b"x\n", end=False)
        await holds(lambda: b"40 100" in output_of(sent))
        command.feed(b"", end=True)
        await holds(lambda: command.exit_code() is not None)
        assert command.exit_code() == 5

    run(["sh", "-c", "stty size; read x; stty size; cat; exit 5"], scenario, SCREEN)


def test_a_signal_reaches_all_processes_of_the_command():
    async def scenario(command, sent):
        await holds(lambda: output_of(sent) == b"begun\n")
        command.signal(15)
        await holds(lambda: command.exit_code() is not None)
        assert command.exit_code() == 143

    run(["sh", "-c", "sleep 3600 & echo begun; wait"], scenario)


def test_a_command_that_is_hung_up_leaves_no_process():
    processes = []

    async def scenario(command, sent):
        await holds(lambda: output_of(sent) == b"begun\n")
        processes.extend(psutil.Process(command.pid).children(recursive=True))
        assert len(processes) >= 2

    run(["sh", "-c", "trap '' TERM HUP; (sleep 3600 &) ; sleep 3600 & echo begun; wait"], scenario)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []
