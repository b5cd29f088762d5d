"""Commands are stopped, bounded, retried and never pass through a shell."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from scavenger.batch import commands
from scavenger.batch.commands import CommandError, CommandPolicy, Commands, shorten, show
from scavenger.interface import SchedulerError
from tests.scavenger.batch.fake_tools import FakeTools
from tests.waiting import PATIENCE_S, until

NASTY = ["a b", "$(touch hacked)", 'it\'s "q"', "new\nline", "", "ü\\", "\udcff"]


@pytest.fixture
def tools(tmp_path):
    return FakeTools(tmp_path / "bin", ("tool",))


@pytest.fixture
def run(tools):
    return Commands(CommandPolicy(timeout_s=PATIENCE_S, tries=3, pause_s=0.01), tools.environment)


def python(code, *args):
    return [sys.executable, "-c", code, *args]


def test_arguments_and_input_arrive_unchanged():
    out = Commands().run(
        python("import sys; print(ascii([sys.argv[1:], sys.stdin.buffer.read()]))", *NASTY),
        stdin=b"x\0\n" * 100_000,
    )
    assert out.status == 0
    assert out.stdout.strip() == ascii([NASTY, b"x\0\n" * 100_000])


def test_output_that_is_not_utf8_can_be_sent_and_shown():
    """Such as the reason of a drained node that was typed in a terminal with another encoding:
    `malletrain nodes --explain` had no answer.
    """
    code = r"import sys; [file.buffer.write(b'd\xe9faut\n') for file in (sys.stdout, sys.stderr)]"
    out = Commands().run(python(code))
    assert out.stdout == out.stderr == "d\N{REPLACEMENT CHARACTER}faut\n"
    assert msgspec.msgpack.encode(out.complaint)


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid}; wait"
    for limit_s in (0.5, 5.0, 50.0, PATIENCE_S):  # until the shell has come so far
        with pytest.raises(CommandError, match=f"gave no answer within {limit_s:g} s") as error:
            Commands().run(["sh", "-c", script], timeout_s=limit_s)
        if pid.exists() and pid.read_text():
            break
    assert isinstance(error.value, SchedulerError)
    child = int(pid.read_text())

    def state():
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    until(lambda: state() in "XZ", "what it started has ended")


def test_a_command_that_closes_its_input_is_no_error():
    assert Commands().run(["true"], stdin=b"x" * 1_000_000).status == 0


def test_endless_output_is_bounded(monkeypatch):
    monkeypatch.setattr(commands, "MAX_OUTPUT_BYTES", 1_000_000)
    with pytest.raises(CommandError, match="printed more than 1,000,000 bytes"):
        Commands().run(["yes"])


def test_a_missing_command_is_a_sentence_and_is_not_tried_again():
    slept = []
    with pytest.raises(CommandError, match="no-such-command is not installed or not in PATH"):
        Commands(CommandPolicy(tries=5), sleep=slept.append).ask(["no-such-command"])
    assert slept == []


def test_asking_is_repeated_with_growing_pauses(tools):
    slept = []
    asking = Commands(CommandPolicy(PATIENCE_S, 3, 0.5), tools.environment, sleep=slept.append)
    tools.fails("tool", "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(
        CommandError,
        match=r"tool -x failed with status 1: slurm_load_jobs error: Unable to contact",
    ):
        asking.ask(["tool", "-x"])
    assert slept == [0.5, 1.0]
    assert len(tools.calls()) == 3
    tools.runs("tool", 'test "$(wc -l < $here/calls)" = 5 && rm $here/tool.mode; echo fine')
    assert asking.ask(["tool"]).splitlines()[0] == "fine"


def test_running_is_never_repeated(tools, run):
    tools.fails("tool", "no")
    assert run.run(["tool"]).complaint == "no"
    assert len(tools.calls()) == 1


def test_a_nul_in_an_argument_is_refused_in_words():
    with pytest.raises(CommandError, match="cannot be run"):
        Commands().run(["true", "a\0b"])


def test_signals_are_named():
    result = Commands().run(["sh", "-c", "kill -9 $$"])
    assert "was ended by signal 9" in str(commands.failure(result))


def test_many_threads_may_run_commands():
    results = []
    one = Commands()
    threads = [
        threading.Thread(
            target=lambda i=i: results.append(one.run(["echo", str(i)]).stdout.strip())
        )
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [str(i) for i in range(8)]


DESCRIPTORS = """
import os
from scavenger.batch.commands import CommandError, CommandPolicy, Commands
before = os.listdir("/proc/self/fd")
one = Commands(CommandPolicy(tries=1))
for argv in (["true"], ["false"], ["no-such-command"], ["sleep", "9"]):
    try:
        one.run(argv, stdin=b"x", timeout_s=0.2)
    except CommandError:
        pass
print(len(os.listdir("/proc/self/fd")) - len(before))
"""
"""In a process of its own: nobody else opens or closes any there."""


def test_no_descriptor_is_left_open():
    done = subprocess.run([sys.executable, "-c", DESCRIPTORS], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_texts_are_shown_on_one_short_line():
    assert shorten("a\n\x1b[31mb\tc") == "a [31mb c"
    assert len(shorten("x" * 1000)) == 300
    assert show(["a", "b c"]) == "a 'b c'"
