"""Fault points do nothing where nobody has armed one, and what they are told where somebody has."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from malletrain.protocol import env
from malletrain.protocol.fault_points import STRUCK, FaultPoint

PACKAGE = Path(__file__).parents[3] / "malletrain"
COMES_THERE = """
import sys
from malletrain.protocol.fault_points import FaultPoint, reached
for number in range(3):
    print(number, flush=True)
    try:
        reached(FaultPoint.WORKER_KEPT)
    except OSError as error:
        print(error.strerror)
"""


def comes_there(folder):
    """What a process says that comes to a point three times, and how it ended."""
    environment = {**os.environ, **({env.FAULTS: str(folder)} if folder else {})}
    argv = [sys.executable, "-c", COMES_THERE]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1], done.returncode


def test_every_point_is_in_the_code_once():
    places = [
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"reached\(FaultPoint\.(\w+)\)", path.read_text())
    ]
    assert sorted(places) == sorted(point.name for point in FaultPoint)


@pytest.mark.parametrize(
    ("order", "output", "code"),
    [
        ("kill", ["0"], -signal.SIGKILL),
        ("kill 3", ["0", "1", "2"], -signal.SIGKILL),
        ("raise 2", ["0", "1", "No space left on device", "2"], 0),
        ("kill 4", ["0", "1", "2"], 0),
        ("kill often", ["0", "1", "2"], 0),
        (None, ["0", "1", "2"], 0),
    ],
)
def test_an_armed_point_strikes_one_process_once(tmp_path, order, output, code):
    tmp_path.chmod(0o700)
    if order is not None:
        (tmp_path / "WORKER_KEPT").write_text(order)
    assert comes_there(tmp_path) == (output, code)
    struck = (tmp_path / f"WORKER_KEPT{STRUCK}").exists()
    assert struck == (order in ("kill", "kill 3", "raise 2"))
    if struck:
        assert comes_there(tmp_path) == (["0", "1", "2"], 0)


def test_a_folder_that_others_can_write_to_arms_nothing(tmp_path):
    tmp_path.chmod(0o770)
    (tmp_path / "WORKER_KEPT").write_text("kill")
    assert comes_there(tmp_path) == (["0", "1", "2"], 0)


def test_without_the_variable_no_file_is_looked_for(tmp_path):
    (tmp_path / "WORKER_KEPT").write_text("kill")
    assert env.FAULTS not in os.environ
    assert comes_there(None) == (["0", "1", "2"], 0)
