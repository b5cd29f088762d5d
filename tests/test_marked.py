"""Processes of a session of a test end with it, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import marked
from tests.waiting import until

CALLER = """
import os, subprocess, sys
from tests import marked
token = sys.argv[1]
with marked.session(token):
    started = subprocess.Popen(["sleep", "600"], env={**os.environ, marked.MARK: token})
    print(started.pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_session_has_started_ends_with_its_caller(tmp_path, killed):
    token = str(tmp_path)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert caller.stdout is not None
    started = int(caller.stdout.readline())
    assert [process.pid for process in marked.running(token)] == [started]
    if killed:
        caller.kill()
    caller.communicate()
    until(lambda: not marked.running(token), "it has ended")
