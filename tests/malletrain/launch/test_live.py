"""The live launcher against workers that speak badly: what one of them says or does not say keeps
nothing from the others.
"""

import subprocess

import pytest

from malletrain.launch.live import abort_limit_s
from malletrain.protocol import messages
from malletrain.protocol.failures import describe, starts_again, unfit
from malletrain.protocol.launcher_channel import LaunchOrder, write_order
from malletrain.rounds.failure_grace import own_fault
from tests.malletrain import forked_programs
from tests.malletrain.agent.node_side import spec
from tests.malletrain.launch.fake_agent import FakeAgent
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

# A worker that speaks by hand; ``line`` makes one line of the protocol.
PRELUDE = """
import json, os, socket, sys, time
rank = int(os.environ["LOCAL_RANK"])
def line(**fields):
    return json.dumps(fields).encode() + b"\\n"
def connect():
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["MALLETRAIN_LIVE"])
    return connection
hello = line(say="hello", local_rank=rank, pid=os.getpid())
ready = line(say="ready", generation=0)
def serve(connection):
    "Join every round that the launcher tells of."
    with connection.makefile("rb") as lines:
        for one in lines:
            message = json.loads(one)
            if "round" in message:
                connection.sendall(line(say="running", generation=message["round"]))
"""

ALL_AT_ONCE = """
worker = connect()
worker.sendall(hello + ready)
serve(worker)
"""
# Rank 0 opens connections that are no worker's; rank 1 works as usual.
SILENT = """
others = [connect() for _ in range(3)]
worker = connect()
worker.sendall(hello)
worker.sendall(ready)
serve(worker)
"""
GARBAGE = """
for noise in (b"GET / HTTP/1.1\\r\\n", b"[1, 2]\\n", b"[" * 5000 + b"\\n", b"\\xff\\x00\\n", b'{"say": 7}\\n',
              line(say="hello", local_rank="x"), line(say="hello", local_rank=99), line(say="?")):
    connect().sendall(noise)
worker = connect()
worker.sendall(b"what?\\n" + hello + b"[]\\n" + line(say="running", generation="x") + ready)
serve(worker)
"""  # noqa: E501
ENDLESS = """
endless = connect()
try:
    while True:
        endless.sendall(b"x" * 65536)
except OSError:
    print("hung up on", flush=True)
worker = connect()
worker.sendall(hello + ready)
serve(worker)
"""


LAUNCHER = "import sys; from malletrain.launch.restart import main; sys.exit(main())"


class Launched:
    """A live launcher with two workers that run ``script``."""

    def __init__(self, directory, script, launcher=LAUNCHER):
        self.agent = FakeAgent(directory)
        (directory / "train.py").write_text(PRELUDE + script)
        job = spec(directory, nproc_per_node=2, mode="live")
        order = LaunchOrder("j1", job, self.agent.endpoint, "127.0.0.1", str(directory), 1.0, 60.0)
        write_order(directory / "order.json", order)
        self.log = directory / "launcher.log"
        self.process = forked_programs.start(
            *(launcher, "--launch", str(directory / "order.json")),
            folder=directory,
            output=self.log,
            environment={"MALLETRAIN_PRELOAD": "0", "MALLETRAIN_JOB_KEY": "5e" * 32},
        )

    def output(self):
        return self.log.read_text()

    def wait(self):
        """Return the exit code of the launcher once it has ended."""
        return self.process.wait(PATIENCE_S)

    def close(self):
        self.process.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            pytest.fail(f"The launcher goes on after SIGTERM:\n{self.output()}")
        finally:
            self.process.kill()
            self.agent.socket.close(0)


@pytest.fixture
def launch(tmp_path):
    launched = []

    def start(script, *launcher):
        launched.append(Launched(tmp_path, script, *launcher))
        return launched[-1]

    yield start
    for one in launched:
        one.close()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(GARBAGE, id="garbage"),
        pytest.param(ALL_AT_ONCE, id="all-at-once", marks=pytest.mark.thorough),
        pytest.param(SILENT, id="silent", marks=pytest.mark.thorough),
        pytest.param(ENDLESS, id="endless", marks=pytest.mark.thorough),
    ],
)
def test_a_round_comes_about_whatever_a_worker_says_besides(launch, script):
    launcher = launch(script)
    assert launcher.agent.hear_phase() == ("ready", 0), launcher.output()
    launcher.agent.say(messages.Round("j1", 1, 0, 1))
    store = launcher.agent.hear()
    assert (type(store), store.generation) == (messages.StoreUp, 1)
    assert launcher.agent.hear_phase() == ("running", 1), launcher.output()
    launcher.agent.say(messages.Release("j1", 1.0))
    assert launcher.wait() == 0
    assert "released from this node" in launcher.output()
    assert "Traceback" not in launcher.output()


# Rank 0 stands still as soon as it is told to give up its step; rank 1 answers and waits.
STANDS_STILL = """
import signal
worker = connect()
worker.sendall(hello + ready)
with worker.makefile("rb") as lines:
    for one in lines:
        message = json.loads(one)
        if "round" in message:
            worker.sendall(line(say="running", generation=message["round"]))
        elif rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            worker.sendall(line(say="heard", generation=message["abort"]))
"""


@pytest.mark.thorough
def test_a_worker_that_does_not_answer_that_it_is_to_give_up_its_step_is_killed(launch):
    launcher = launch(STANDS_STILL)
    assert launcher.agent.hear_phase() == ("ready", 0), launcher.output()
    launcher.agent.say(messages.Round("j1", 1, 0, 1))
    launcher.agent.hear()
    assert launcher.agent.hear_phase() == ("running", 1), launcher.output()
    launcher.agent.say(messages.Abort("j1", 1))
    assignment = launcher.agent.hear().assignment
    assert assignment.phase == "failed", launcher.output()
    assert [(f.rank, f.exitcode) for f in assignment.failures] == [(0, -9)]
    assert "the worker 0 has not answered" in launcher.output()
    launcher.agent.say(messages.Release("j1", 1.0))
    assert launcher.wait() == 0


@pytest.mark.parametrize(
    ("generation", "running", "join_timeout_s", "limit_s"),
    [(1, 1, 60.0, 15.0), (1, 2, 60.0, 15.0), (2, 1, 60.0, 60.0), (1, 0, 5.0, 15.0)],
)
def test_the_time_to_answer_an_abort(generation, running, join_timeout_s, limit_s):
    assert abort_limit_s(generation, running, join_timeout_s) == limit_s


# Rank 0 makes a step of its first round in which it answers nothing.
LONG_STEP = """
worker = connect()
worker.sendall(hello + ready)
with worker.makefile("rb") as lines:
    for one in lines:
        message = json.loads(one)
        if message.get("round") in (1, 3):
            worker.sendall(line(say="running", generation=message["round"]))
        elif "abort" in message:
            if rank == 0:
                time.sleep(20.0)
            worker.sendall(line(say="heard", generation=message["abort"]))
"""


@pytest.mark.thorough
def test_a_worker_in_a_long_step_is_not_killed_because_of_a_round_that_it_has_not_entered(launch):
    launcher = launch(LONG_STEP)
    assert launcher.agent.hear_phase() == ("ready", 0), launcher.output()
    launcher.agent.say(messages.Round("j1", 1, 0, 1))
    launcher.agent.hear()
    assert launcher.agent.hear_phase() == ("running", 1), launcher.output()
    launcher.agent.say(messages.Round("j1", 2, 0, 1))
    launcher.agent.hear()
    launcher.agent.say(messages.Abort("j1", 2))
    launcher.agent.say(messages.Round("j1", 3, 0, 1))
    launcher.agent.hear()
    assert launcher.agent.hear_phase() == ("running", 3), launcher.output()
    launcher.agent.say(messages.Release("j1", 1.0))
    assert launcher.wait() == 0


# Rank 1 ends in its first round.
ENDS_WITH_75 = """
worker = connect()
worker.sendall(hello + ready)
with worker.makefile("rb") as lines:
    for one in lines:
        message = json.loads(one)
        if "round" in message:
            worker.sendall(line(say="running", generation=message["round"]))
            if rank == 1:
                if os.path.exists("asks"):
                    worker.sendall(line(say="restart", generation=0))
                os._exit(75)
"""


@pytest.mark.parametrize("asks", [True, False])
def test_only_a_worker_that_asks_is_started_again(launch, tmp_path, asks):
    """Any script may end with the exit code of a request to be started again."""
    if asks:
        (tmp_path / "asks").touch()
    launcher = launch(ENDS_WITH_75)
    assert launcher.agent.hear_phase() == ("ready", 0), launcher.output()
    launcher.agent.say(messages.Round("j1", 1, 0, 1))
    launcher.agent.hear()
    while (assignment := launcher.agent.hear().assignment).phase == "running":
        pass
    assert assignment.phase == "failed", launcher.output()
    [failure] = assignment.failures
    assert (failure.rank, failure.exitcode) == (1, 75)
    assert starts_again(failure) == asks
    assert describe([failure]) == "Rank 1 exited with code 75."
    assert bool(own_fault("n0", assignment)) != asks


# A launcher that looks for the ends of its workers before it has read any of their lines.
LOOKS_LATE = """
import os, sys
from malletrain.launch.live import LiveLauncher
from malletrain.protocol.launcher_channel import read_order
order = read_order(sys.argv[2])
launcher = LiveLauncher(order, [sys.executable, order.spec.script])
for worker in launcher._workers:
    os.waitid(os.P_PID, worker.child.process.pid, os.WEXITED | os.WNOWAIT)
launcher.check_processes()
launcher.run()
"""
SPEAKS_AND_ENDS = """
connect().sendall(hello + ready + line(say="restart", generation=0))
os._exit(75)
"""


def test_the_last_lines_of_a_worker_are_read_before_its_end_is_judged(launch):
    launcher = launch(SPEAKS_AND_ENDS, LOOKS_LATE)
    while (assignment := launcher.agent.hear().assignment).phase == "ready":
        pass
    assert assignment.phase == "failed", launcher.output()
    assert all(starts_again(failure) for failure in assignment.failures)
    launcher.agent.say(messages.Release("j1", 1.0))
    assert launcher.wait() == 0, launcher.output()


FOREIGN = "This script does not use malletrain.elastic, which live mode needs"
EARLY_ENDS = {
    "wrong arguments": (
        "import argparse\nargparse.ArgumentParser().parse_args(['-x'])\nimport malletrain.elastic",
        2,
        "train.py: error: unrecognized arguments: -x",
        "",
    ),
    "a script for torchrun": (
        "import torch.distributed as dist\nprint('begin')\ndist.init_process_group('gloo')",
        1,
        "environment variable MASTER_ADDR expected, but not set",
        FOREIGN,
    ),
    "a script that trains alone": ("print('trained')", 0, "", FOREIGN),
    "noise behind the error": (
        "import sys\n"
        "print('no data', file=sys.stderr)\n"
        "class Late:\n"
        "    def __del__(self): raise RuntimeError('the interpreter ends')\n"
        "late = Late()\n"
        "raise FileNotFoundError('data.npz is not there')\n"
        "import malletrain.elastic",
        1,
        "FileNotFoundError: data.npz is not there",
        "",
    ),
}


@pytest.mark.parametrize(
    ("script", "code", "error", "hint"),
    [
        pytest.param(*case, id=name, marks=() if case[-1] else pytest.mark.thorough)
        for name, case in EARLY_ENDS.items()
    ],
)
def test_the_first_error_of_a_worker_that_never_joined_is_told(launch, script, code, error, hint):
    launcher = launch(script)
    assignment = launcher.agent.hear().assignment
    assert (assignment.phase, assignment.generation) == ("exited", 0)
    failure = assignment.failures[0]
    assert failure.exitcode == code
    assert error in failure.cause
    if hint and error:
        assert f". {hint}" in failure.cause  # a sentence of its own
    assert hint in failure.cause
    assert (FOREIGN in failure.cause) == bool(hint)
    assert "the interpreter ends" not in failure.tail
    # It stays until the agent has read that: an end is seen sooner than a message on its way.
    assert launcher.process.poll() is None
    launcher.agent.say(messages.Round("j1", 1, 0, 1))
    launcher.agent.say(messages.Release("j1", 0.0))
    assert launcher.wait() == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import malletrain.elastic", ""),
        ("print('no config.yml')  # before malletrain.elastic", " Its last line: no config.yml"),
        ("", f" Its last line: {FOREIGN}"),
    ],
    ids=["silent", "with words", "a script of another mode"],
)
def test_a_script_that_ends_with_the_code_of_missing_software_has_failed(launch, script, words):
    """EX_CONFIG of sysexits.h, before it joined: its node is not to blame."""
    launcher = launch(f"{script}\nimport os, sys\nsys.stdout.flush()\nos._exit(78)")
    assignment = launcher.agent.hear().assignment
    assert (assignment.phase, assignment.generation) == ("exited", 0)
    assert {failure.exitcode for failure in assignment.failures} == {78}
    assert not unfit(assignment)
    rank = assignment.failures[0].rank
    assert describe(assignment.failures).startswith(f"Rank {rank} exited with code 78.{words}")
    launcher.agent.say(messages.Release("j1", 0.0))
    assert launcher.wait() == 1


RAISES = """
worker = connect()
worker.sendall(hello + ready)
with worker.makefile("rb") as lines:
    for one in lines:
        message = json.loads(one)
        if message.get("round") == 2:
            raise ValueError("no data")
        worker.sendall(line(say="running", generation=message["round"]))
"""


def test_a_worker_that_fails_on_its_way_to_a_round_is_told_with_its_exception(launch):
    launcher = launch(RAISES)
    assert launcher.agent.hear_phase() == ("ready", 0), launcher.output()
    launcher.agent.say(messages.Round("j1", 1, 1, 2, "127.0.0.1", 9))
    assert launcher.agent.hear_phase() == ("running", 1), launcher.output()
    launcher.agent.say(messages.Round("j1", 2, 0, 1, "127.0.0.1", 9))
    assignment = launcher.agent.hear().assignment
    assert (assignment.phase, assignment.generation) == ("failed", 1)
    assert assignment.failures[0].rank in (2, 3)  # those that it had in round 1
    assert "ValueError: no data" in assignment.failures[0].tail
