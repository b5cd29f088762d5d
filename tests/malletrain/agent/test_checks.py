"""Health checks as real processes: their codes, their words, and that nothing of them is left."""

from __future__ import annotations

import sys

import pytest

from malletrain.agent.health import CheckProcess
from malletrain.agent.process import reap_orphans
from tests.malletrain.agent.node_side import processes_with
from tests.waiting import until


def ended(tmp_path, *command):
    check = CheckProcess(command, tmp_path / "log", "n7")
    until(check.over, "the check ends")
    return check


@pytest.mark.parametrize("code", [0, 1, 77])
def test_a_check_says_how_it_ended_although_its_code_was_taken_by_another(tmp_path, code):
    script = f"echo on $MALLETRAIN_NODE; exit {code}"
    check = CheckProcess(("sh", "-c", script), tmp_path / "log", "n7")
    until(lambda: reap_orphans() or check.over(), "the check ends")
    assert check.code == code
    assert check.printed.split() == ["on", "n7"]


def test_what_concerns_the_agent_alone_is_not_for_the_check(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLETRAIN_ENDPOINT", "tcp://head:7443")
    assert "tcp://head" not in ended(tmp_path, "env").printed


def test_a_command_that_is_not_there_is_told(tmp_path):
    check = ended(tmp_path, "/no/such/check")
    assert check.code == 127
    assert "/no/such/check" in check.printed


HANGS = """
import os, time
if os.fork() == 0:
    os.setsid()
    open("helper", "w").close()
else:
    print("waiting for a disk", flush=True)
time.sleep(600)
"""


def test_a_check_that_hangs_is_killed_with_all_it_started(tmp_path, monkeypatch):
    mark = f"CHECKED_IN={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    script = HANGS.replace("helper", str(tmp_path / "helper"))
    check = CheckProcess((sys.executable, "-c", script), tmp_path / "log", "n7")
    until(lambda: (tmp_path / "helper").exists() and check.printed, "both processes are there")
    assert len(processes_with(mark)) > 2
    check.kill()
    until(check.over, "the check is over")
    until(lambda: not processes_with(mark), "nobody is left")
    assert check.code is None
    assert check.printed.strip() == "waiting for a disk"
