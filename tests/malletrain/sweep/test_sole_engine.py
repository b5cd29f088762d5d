"""One engine for each sweep, also if engines have state directories of their own."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest

from malletrain.sweep import process, sole_engine
from malletrain.sweep.ledger import Ledger
from malletrain.sweep.sole_engine import OtherEngineError, SoleEngine, pid_namespace
from tests.malletrain.sweep.sweep_world import World, described
from tests.waiting import until

ELSEWHERE = {"id": "x", "host": "login2", "pid": 7, "count": 1}


def here(pid):
    """The record of an engine on this host."""
    host, namespace = os.uname().nodename, pid_namespace()
    return {**ELSEWHERE, "host": host, "pid": pid, "namespace": namespace}


class Time:
    """A clock that goes on when somebody sleeps; ``then``: what happens meanwhile."""

    def __init__(self, then=lambda now: None):
        self.now, self.then = 100.0, then

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.then(self.now)


@pytest.fixture
def ledger():
    return Ledger.create(optuna.storages.InMemoryStorage(), described())


def test_an_engine_whose_record_changes_keeps_others_away(ledger):
    ledger.note_engine(ELSEWHERE)
    time = Time(lambda now: ledger.note_engine({**ELSEWHERE, "count": int(now)}))
    lines = []
    with pytest.raises(OtherEngineError, match="s is being run by process 7 on login2") as caught:
        SoleEngine(ledger, time.clock, time.sleep).claim(lines.append)
    assert caught.value.engine == "process 7 on login2"
    assert lines == [
        "Process 7 on login2 ran this sweep last. Looking for 30 s whether it still does."
    ]
    assert ledger.engine["id"] == "x"


def test_an_engine_that_is_silent_is_replaced_and_stops_when_it_comes_back(ledger):
    time = Time()
    first = SoleEngine(ledger, time.clock, time.sleep)
    first.claim(pytest.fail)
    ledger.note_engine({**ledger.engine, "host": "login2"})
    second = SoleEngine(ledger, time.clock, time.sleep)
    second.claim(lambda line: None)
    assert time.now == 100.0 + sole_engine.MAX_SILENCE_S
    with pytest.raises(OtherEngineError, match=f"process {os.getpid()} on"):
        first.renew()
    first.release()
    second.renew()
    count = ledger.engine["count"]
    time.now += sole_engine.RENEW_S
    second.renew()
    assert ledger.engine["count"] == count + 1
    second.release()
    assert ledger.engine == {}


def test_an_engine_that_has_died_on_this_host_is_not_waited_for(ledger):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ledger.note_engine(here(child.pid))
    SoleEngine(ledger, sleep=pytest.fail).claim(pytest.fail)
    assert ledger.engine["pid"] == os.getpid()


def test_a_process_that_is_not_reaped_yet_has_died(ledger):
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ledger.note_engine(here(child.pid))
    SoleEngine(ledger, sleep=pytest.fail).claim(pytest.fail)
    child.wait()


@pytest.mark.parametrize("namespace", ["another", ""])
def test_an_engine_among_other_processes_of_a_host_of_this_name_is_waited_for(ledger, namespace):
    """Such as in a container, where process ids are others: the same one, or one that none has."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for pid in (os.getpid(), child.pid):
        record = {**here(pid), "namespace": namespace}
        ledger.note_engine(record)
        time = Time(lambda now, record=record: ledger.note_engine({**record, "count": int(now)}))
        with pytest.raises(OtherEngineError):
            SoleEngine(ledger, time.clock, time.sleep).claim(lambda line: None)


def test_a_live_process_of_another_user_has_not_died(ledger, monkeypatch):
    """With hidepid its directory in /proc is not visible, and a signal to it is refused."""

    def refused(pid, signal):
        raise PermissionError

    monkeypatch.setattr("os.kill", refused)
    missing = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    ledger.note_engine(here(missing))
    time = Time(lambda now: ledger.note_engine({**here(missing), "count": int(now)}))
    with pytest.raises(OtherEngineError):
        SoleEngine(ledger, time.clock, time.sleep).claim(lambda line: None)


def test_the_record_changes_during_a_long_turn_and_is_deleted_afterwards(ledger, monkeypatch):
    monkeypatch.setattr(sole_engine, "RENEW_S", 0.01)
    with sole_engine.sole_engine(ledger, pytest.fail):
        until(lambda: ledger.engine["count"] > 2, "the record has changed twice")
    assert "engine-record" not in [thread.name for thread in threading.enumerate()]
    assert ledger.engine == {}


def test_two_engines_with_directories_of_their_own_run_no_trial_twice(monkeypatch):
    """The second one begins while the first one runs: it would end the first one's trials."""
    world = World()
    ledger = world.engine.ledger
    ledger.note_engine(ELSEWHERE)
    time = Time(lambda now: ledger.note_engine({**ELSEWHERE, "count": int(now)}))
    monkeypatch.setattr(SoleEngine.__init__, "__defaults__", (time.clock, time.sleep))
    with pytest.raises(OtherEngineError):
        process.run(ledger, world.jobs, lambda line: None)
    assert world.jobs.jobs == {}
    assert ledger.trials() == []
    assert ledger.end == ""
