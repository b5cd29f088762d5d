"""Tab: the completion protocol word by word, and bash itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from tests.firstday.terminal import close_terminal
from tests.malletrain.cli.fake_daemon import Refuse, job_view
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

CODE = "from malletrain.cli import main; main(prog_name='malletrain')"


@pytest.fixture
def tab(daemon):
    """``tab("malletrain logs tr")``: the lines that the shell is given for the last word."""
    ended = job_view(id="j7", name="trial", state="completed", ended=1009.0)
    daemon.answers["jobs"] = lambda p: [job_view(), ended]

    def press(line):
        environment = {
            **os.environ,
            "_MALLETRAIN_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "MALLETRAIN_STATE_DIR": str(daemon.state_dir),
        }
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True
        )
        assert done.stderr == ""
        return done.stdout.split()

    return press


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("malletrain logs tr", ["plain,trial", "plain,train"]),
        ("malletrain show ", ["plain,trial", "plain,train"]),
        ("malletrain status tra", ["plain,train"]),
        ("malletrain show j7", ["plain,j7"]),
        ("malletrain cancel t", ["plain,train"]),  # the other has ended
        ("malletrain wait t", ["plain,train"]),
        ("malletrain wait train t", []),  # named already
        ("malletrain events --job tri", ["plain,trial"]),
        ("malletrain submit tra", ["file,tra"]),
        ("malletrain submit --nodes 1:4 tra", ["file,tra"]),
        ("malletrain submit train.py --data /da", ["file,/da"]),
        ("malletrain submit --curve cu", ["file,cu"]),
    ],
)
def test_what_the_shell_is_given(tab, line, expected):
    assert tab(line) == expected


def test_of_another_daemon(tab, daemon, tmp_path):
    directory = f"--state-dir {daemon.state_dir}"
    assert tab(f"malletrain logs {directory} tra") == ["plain,train"]
    assert tab(f"malletrain logs --state-dir {tmp_path}/none tra") == []


def test_a_daemon_that_refuses_offers_nothing(tab, daemon):
    def refuse(params):
        raise Refuse("No.")

    daemon.answers["jobs"] = refuse
    assert tab("malletrain logs tr") == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_in_bash(daemon, tmp_path):
    """As a person does it: the line of the help is evaluated, then Tab is pressed."""
    (tmp_path / "trainer.py").write_text("")
    program = Path(sys.executable).parent
    child = pexpect.spawn(
        "bash",
        ["--norc", "--noprofile", "-i"],
        cwd=str(tmp_path),
        env={
            **os.environ,
            "PATH": f"{program}:{os.environ['PATH']}",
            "MALLETRAIN_STATE_DIR": str(daemon.state_dir),
            "PS1": "ready> ",
            "TERM": "dumb",
        },
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    child.expect_exact("ready> ")
    child.sendline('eval "$(_MALLETRAIN_COMPLETE=bash_source malletrain)"; echo done')
    child.expect("\ndone")
    child.send("malletrain submit trai\t")
    child.expect_exact("trainer.py ")
    child.sendline("\x15")
    child.expect_exact("ready> ")
    child.send("malletrain logs tr\t")
    child.expect_exact("malletrain logs train ")
    close_terminal(child)
