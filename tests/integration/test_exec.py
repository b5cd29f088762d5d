"""``malletrain exec`` on a real site: streams, exit codes, a terminal, and what ends a command."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import psutil
import pytest

from tests.integration.embedded import gone, site
from tests.integration.forked_commands import run_command
from tests.waiting import PATIENCE_S, readable, until

pytestmark = pytest.mark.slow

WAITS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""
SIZE = 50_000_000
WRITER = f"""
import os, sys
block = bytes(range(256)) * 256
written = 0
while written < {SIZE}:
    written += os.write(1, block[: min(len(block), {SIZE} - written)])
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(written))
    os.replace(sys.argv[1] + ".new", sys.argv[1])
"""
MAX_BUFFERED = 4 * 1024 * 1024
"""Bytes that may be between the command and the reader: the window, pipes, and the client's
copies."""
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A site of two nodes."""
    with site(tmp_path_factory.mktemp("exec"), nodes=2) as made:
        yield made


@pytest.fixture
def at_work(made):
    """That site with a job on both nodes: one for the tests of the module, until a test ends it."""
    with made.client() as client:
        jobs = [job.id for job in client.jobs() if job.ended is None]
    return made, jobs[0] if jobs else run_job(made)


def run_job(made, count=2, **spec):
    script = made.script("waits.py", WAITS)
    env = {"COLOUR": "green", "MALLETRAIN_PRELOAD": "0"}
    job = made.submit(
        script, str(made.work / "stop"), nodes=(count, count), profile=False, env=env, **spec
    )
    made.until(lambda: len(made.workers(script)) == count, "its workers run")
    return job


def of_site(made, *words):
    return ["exec", "--state-dir", str(made.state), *words]


def argv(made, *words):
    return [sys.executable, "-m", "malletrain", *of_site(made, *words)]


def run(made, *words):
    """Run a command without input, in a folder that is not the job's."""
    return run_command(of_site(made, *words), made.state, {})


def run_with_input(made, data, *words):
    command = argv(made, *words)
    return subprocess.run(command, input=data, capture_output=True, timeout=PATIENCE_S)


def begin(made, *words, **options):
    return subprocess.Popen(
        argv(made, *words),
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        },
    )


def sleeper(made, job, *where):
    """A client whose command sleeps, and its process."""
    client = begin(made, job, *where, "--", sys.executable, "-c", SLEEPER)
    return client, psutil.Process(int(client.stdout.readline()))


def test_a_command_has_the_environment_of_the_job(at_work):
    made, job = at_work
    words = "pwd; echo $COLOUR $MALLETRAIN_JOB; echo wrong >&2; exit 3"
    done = run(made, job, "--", "sh", "-c", words)
    assert done.stdout.splitlines() == [str(made.work), f"green {job}"]
    assert (done.stderr, done.returncode) == ("wrong\n", 3)
    [event] = [e for e in made.events("command-run", job) if e.data["command"] == "sh"]
    assert "COLOUR" not in repr(event)


@pytest.mark.parametrize(
    ("command", "code"),
    [(["true"], 0), (["sh", "-c", "kill -KILL $$"], 137), (["no-such-program"], 127)],
)
def test_the_exit_code_is_that_of_the_command(at_work, command, code):
    made, job = at_work
    assert run(made, job, "--", *command).returncode == code


def test_it_runs_on_the_node_of_a_rank(at_work):
    made, job = at_work
    words = ("--", "sh", "-c", "echo $MALLETRAIN_NODE")
    on = [run(made, job, "--rank", str(rank), *words).stdout.split()[0] for rank in (0, 1)]
    assert sorted(on) == ["n1", "n2"]
    assert run(made, job, "--node", "n2", *words).stdout == "n2\n"
    refused = run(made, job, "--rank", "2", *words)
    assert refused.returncode == 255
    assert refused.stderr == f"Job {job} has no rank 2 now; its ranks are 0 to 1.\n"


def test_input_reaches_it_whole_and_then_ends(at_work):
    made, job = at_work
    data = os.urandom(1_000_000)
    assert run_with_input(made, data, job, "--", "cat").stdout == data
    # A command that does not read its input does not hold up anybody.
    assert run_with_input(made, data, job, "--", "echo", "done").stdout == b"done\n"


def test_a_slow_reader_slows_the_command_and_loses_nothing(at_work, tmp_path):
    made, job = at_work
    progress = tmp_path / "written"
    client = begin(made, job, "--", sys.executable, "-c", WRITER, str(progress))
    until(progress.exists, "it writes")
    received, digest = 0, hashlib.sha256()
    while data := os.read(client.stdout.fileno(), 1 << 16):
        received += len(data)
        digest.update(data)
        assert int(progress.read_text()) <= received + MAX_BUFFERED
    block = bytes(range(256)) * 256
    whole = (block * (SIZE // len(block) + 1))[:SIZE]
    assert (received, digest.digest()) == (SIZE, hashlib.sha256(whole).digest())
    assert client.wait() == 0


def test_ctrl_c_interrupts_the_command(at_work):
    made, job = at_work
    client, process = sleeper(made, job)
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=PATIENCE_S)
    assert b"KeyboardInterrupt" in errors
    assert client.returncode in (1, 130)
    until(lambda: gone(process), "it has ended")


def test_a_client_that_is_ended_ends_the_command_and_its_children(at_work):
    made, job = at_work
    words = f"{sys.executable} -c '{SLEEPER}' & wait"
    client = begin(made, job, "--", "sh", "-c", words)
    child = psutil.Process(int(client.stdout.readline()))
    client.send_signal(signal.SIGTERM)
    assert client.wait(PATIENCE_S) == 143
    until(lambda: gone(child), "its child has ended")


def resize(descriptor, rows, columns):
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def test_a_terminal_for_a_shell(at_work):
    made, job = at_work
    master, slave = pty.openpty()
    resize(slave, 31, 77)
    mode = termios.tcgetattr(slave)
    environment = {k: v for k, v in os.environ.items() if k not in ("LINES", "COLUMNS")}
    client = subprocess.Popen(
        argv(made, job, "--tty", "--", "sh"),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**environment, "TERM": "vt100"},
    )
    seen = b""

    def expect(pattern):
        nonlocal seen
        while not (match := re.search(pattern, seen)):
            assert readable(master), (pattern, seen)
            seen += os.read(master, 65536)
        seen = seen[match.end() :]

    def type_(keys):
        os.write(master, keys)

    try:
        type_(b"PS1='ready> '\r")  # whatever the prompt of who runs the tests is
        expect(rb"[^']ready> ")
        type_(b"stty size; echo $TERM\r")
        expect(rb"31 77\r\nvt100\r\n")
        resize(master, 40, 100)
        type_(b"until stty size | grep '40 100'; do :; done\r")
        expect(rb"40 100\r\n")
        type_(b"sh -c 'echo begun; exec sleep 3600'\r")
        expect(rb"begun\r\n")
        type_(b"\x03")
        expect(rb"[^']ready> ")
        type_(b"exit 7\r")
        assert client.wait(PATIENCE_S) == 7
        assert termios.tcgetattr(slave) == mode
    finally:
        client.kill()
        client.wait()
        os.close(master)
        os.close(slave)


def test_only_a_few_commands_run_on_a_node_at_once(at_work):
    made, job = at_work
    clients = [sleeper(made, job)[0] for _ in range(4)]
    try:
        refused = run(made, job, "--", "true")
        assert (refused.returncode, "4 commands run on this node already" in refused.stderr) == (
            255,
            True,
        )
        assert run(made, job, "--rank", "1", "--", "true").returncode == 0
    finally:
        for client in clients:
            client.terminate()
            client.communicate()


def ended(client):
    """(exit code, sentence) of a client."""
    _, errors = client.communicate(timeout=PATIENCE_S)
    return client.returncode, errors.decode()


def test_kill_9_of_the_daemon_is_a_sentence_and_no_hang(at_work):
    made, job = at_work
    client, process = sleeper(made, job)
    made.kill_daemon()
    code, sentence = ended(client)
    assert code == 255
    assert "went away" in sentence
    made.start_daemon()
    until(lambda: gone(process), "the agent has killed it")
    made.until(lambda: made.events("job-adopted", job), "the job goes on")
    assert len(made.workers(made.work / "waits.py")) == 2


def test_a_command_ends_with_its_node_and_with_its_job(at_work):
    made, job = at_work
    client, process = sleeper(made, job, "--node", "n1")
    made.agents()["n1"].kill()
    code, sentence = ended(client)
    assert code == 255
    assert re.search(r"n1|interrupted", sentence), sentence
    until(lambda: gone(process), "it has ended")

    made.until(lambda: len(made.job(job).nodes) == 2, "the job has two nodes again")
    made.until(lambda: len(made.workers(made.work / "waits.py")) == 2, "its workers run")
    client, process = sleeper(made, job)
    with made.client() as connection:
        connection.cancel([job])
    code, sentence = ended(client)
    assert (code, "has left" in sentence) == (255, True), sentence
    until(lambda: gone(process), "it has ended")
