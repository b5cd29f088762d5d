"""Ctrl-C while ``malletrain`` still starts, as on a login node whose file system is slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

SLOW = """
import os
os.write(1, b"reading modules")
os.read(0, 1)
"""


@pytest.mark.parametrize("ignored", [False, True], ids=["at a terminal", "under nohup"])
def test_a_person_who_changes_their_mind_sees_no_traceback(tmp_path, ignored):
    (tmp_path / "click.py").write_text(SLOW)
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    started = subprocess.Popen(
        [sys.executable, "-m", "malletrain", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    try:
        assert started.stdout.read(15) == b"reading modules"
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(b"." if ignored else None, timeout=PATIENCE_S)
    finally:
        started.kill()
    if ignored:
        assert b"'click'" in errors.splitlines()[-1]  # it went on, with a click that is none
    else:
        assert (started.returncode, errors) == (-signal.SIGINT, b"")
