"""One process runs a sweep."""

import fcntl
import os

import pytest

from malletrain.sweep import process
from malletrain.sweep.spec import SweepError


def test_a_look_whether_a_sweep_is_run_keeps_nobody_from_running_it(tmp_path, monkeypatch):
    """The page in the browser looks all the time, and takes the lock for a moment."""
    with process.alone(tmp_path, "lr"):
        assert process.attended(tmp_path, "lr")
        refused = pytest.raises(SweepError, match=f"is being run by process {os.getpid()} on")
        with refused, process.alone(tmp_path, "lr"):
            pass
    look = os.open(process.lock_path(tmp_path, "lr"), os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_EX)
    monkeypatch.setattr(process.time, "sleep", lambda s: fcntl.flock(look, fcntl.LOCK_UN))
    with process.alone(tmp_path, "lr"):
        assert process.attended(tmp_path, "lr")
    os.close(look)
    assert not process.attended(tmp_path, "lr")
