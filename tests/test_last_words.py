"""What is left to be read of a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.last_words import tail, without_frames

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LOG = """\
[rank1]:[W1122 TCPStore.cpp:125] recvValue failed
Exception raised from recvBytes at Utils.hpp:675 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)
[rank1]: frame #12: <unknown function> + 0x5ffd531 (0x7f in libtorch_cpu.so)
the next line
"""
FAILS = """
import pytest
def test_waits():
    assert not 1, "Not within 400 s: it trains.\\n" + "a line of a long log\\n" * 3000
@pytest.fixture
def broken():
    raise RuntimeError("no site today")
def test_has_no_site(broken):
    pass
def test_is_well():
    pass
"""


def test_frames_of_native_stacks_are_left_out(tmp_path):
    expected = [LOG.splitlines()[i] for i in (0, 1, 4)]
    assert without_frames(LOG).splitlines() == expected
    assert without_frames("frame #3: main") == ""
    log = tmp_path / "log"
    assert tail(log) == "(no log)"
    log.write_text(LOG)
    assert tail(log, 2).splitlines() == expected[1:]


@pytest.mark.thorough
def test_the_last_lines_of_a_run_say_what_failed_and_why(tmp_path):
    (tmp_path / "test_it.py").write_text(FAILS)
    (tmp_path / "test_none.py").write_text("def test_none(:\n    pass\n")
    plugins = ("-p", "tests.last_words", "-p", "xdist", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-n", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-5:]
    assert "what failed, and why" in summary[0]
    assert sorted(summary[1:4]) == [
        "test_it.py::test_has_no_site (setup): RuntimeError: no site today",
        "test_it.py::test_waits: AssertionError: Not within 400 s: it trains.",
        "test_none.py (collect): SyntaxError: invalid syntax",
    ]
    assert "1 failed, 1 passed, 2 errors" in summary[4]
