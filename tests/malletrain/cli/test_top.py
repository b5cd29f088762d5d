"""``malletrain top`` on a real terminal (a pty): keys, the end, and the terminal after it."""

import os
import sys

import pexpect
import pytest

from malletrain.cli.top import DOWN, PAGE_UP, split
from tests.malletrain.cli.fake_daemon import SILENCE, job_view
from tests.waiting import PATIENCE_S

SCRIPT = "from malletrain.cli import main; main({words}, prog_name='malletrain')"
ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def terminal(daemon):
    """``terminal("top")``: the command on a terminal of 80 × 24."""
    started = []

    def start(*words, lines=24, term="xterm-256color"):
        environment = {
            **os.environ,
            "MALLETRAIN_STATE_DIR": str(daemon.state_dir),
            "TERM": term,
        }
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        child = pexpect.spawn(
            sys.executable,
            ["-c", SCRIPT.format(words=list(words))],
            env=environment,
            dimensions=(lines, 80),
            timeout=PATIENCE_S,
            encoding="utf-8",
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def ended(child):
    child.expect(pexpect.EOF)
    output = child.before
    child.close()
    return child.exitstatus, output


def test_q_ends_it(terminal):
    child = terminal("top")
    child.expect_exact(ALTERNATE)
    child.expect("q quit")
    child.send("q")
    code, output = ended(child)
    assert code == 0
    assert BACK in output


def test_a_dumb_terminal_is_not_left_empty(terminal, daemon):
    """As that of Emacs: nothing was printed at all."""
    code, output = ended(terminal("top", term="dumb"))
    assert code == 1
    assert "use 'malletrain top --once'" in " ".join(output.split())
    child = terminal("status", "--watch", term="dumb")
    child.expect("JOB")
    child.sendintr()
    assert ended(child)[0] == 130


def test_control_c_ends_it_and_the_terminal_is_as_before(terminal):
    child = terminal("top")
    child.expect("q quit")
    child.sendintr()
    code, output = ended(child)
    assert code == 130
    assert "Stopped watching." in output.split(BACK)[1]
    assert "Traceback" not in output


def test_the_terminal_echoes_again_afterwards(daemon):
    """What is typed after ``top`` is seen, which a terminal left in cbreak mode hides."""
    command = f'{sys.executable} -c "{SCRIPT.format(words=["top"])}"; stty -a; exec cat'
    child = pexpect.spawn(
        "/bin/sh",
        ["-c", command],
        env={**os.environ, "MALLETRAIN_STATE_DIR": str(daemon.state_dir), "TERM": "xterm"},
        dimensions=(24, 80),
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    child.expect("q quit")
    child.send("q")
    child.expect_exact(BACK)
    child.expect(r"\sicanon")
    child.expect(r"\secho\s")
    child.close(force=True)


def test_q_is_heard_while_the_daemon_is_silent(terminal, daemon):
    child = terminal("top", "--interval", "0.1")
    child.expect("q quit")
    count = len(daemon.seen)
    daemon.answers["status"] = lambda p: SILENCE
    while len(daemon.seen) < count + 1 or daemon.seen[-1][0] != "status":
        child.expect(["running", pexpect.TIMEOUT], timeout=0.1)
    child.send("q")
    assert ended(child)[0] == 0


def test_arrows_scroll_to_the_jobs_below(terminal, daemon):
    jobs = [job_view(id=f"j{k}", name=f"job-{k}", submitted=float(k)) for k in range(1, 41)]
    daemon.answers["jobs"] = lambda p: jobs
    child = terminal("top")
    child.expect(r"… and \d+ more")
    assert "job-40" not in child.before
    child.send("\x1b[6~" * 5)  # page down
    child.expect("job-40")
    child.send("q")
    assert ended(child)[0] == 0


def test_a_shows_all_nodes(terminal, daemon):
    child = terminal("top")
    child.expect("q quit")
    daemon.seen.clear()
    child.send("a")
    while ("nodes", {"explain": True}) not in daemon.seen:
        child.expect(["running", pexpect.TIMEOUT], timeout=0.1)
    child.send("q")
    assert ended(child)[0] == 0


def test_keys_are_told_apart():
    assert split("qa\x1b[B\x1b[5~x") == ["q", "a", DOWN, PAGE_UP, "x"]
    assert split("\x1b") == ["\x1b"]
