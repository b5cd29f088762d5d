"""How busy a process was: what its script says, else the time its thread worked or wanted to."""

import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import malletrain
from malletrain.protocol.worker_channel import WorkerProgress
from malletrain.training import report
from malletrain.training.busy import Busy, BusyClock
from tests.malletrain.training.worker_side import as_worker


@pytest.fixture
def clock(monkeypatch):
    # Other tests of this process may have imported it.
    monkeypatch.setattr("malletrain.training.busy._ACCELERATOR_LIBRARIES", ("not_a_library",))
    made = BusyClock()
    if not made.read():
        made.close()
        pytest.skip("this kernel does not tell for how long a thread ran")
    yield made
    made.close()


def test_work_counts(clock):
    before, own = clock.read(), time.thread_time()
    while time.thread_time() - own < 0.2:
        pass
    worked = time.thread_time() - own
    assert clock.read() - before >= 0.5 * worked  # the kernel brings it up to date at each tick


def test_a_wait_does_not(clock):
    """As in a collective: the thread sleeps until its peers have come."""
    began, before = time.monotonic(), clock.read()
    threading.Event().wait(0.3)
    assert clock.read() - before < time.monotonic() - began


def test_it_is_that_of_the_thread_that_made_it(clock):
    readings = []
    thread = threading.Thread(target=lambda: readings.append(clock.read()))
    thread.start()
    thread.join()
    assert readings[0] is not None


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_with_an_accelerator_nothing_is_told(clock, monkeypatch, name):
    module = SimpleNamespace(**{name: SimpleNamespace(is_initialized=lambda: True)})
    monkeypatch.setitem(sys.modules, "torch", module)
    assert clock.read() is None


def test_what_the_script_says_goes_first():
    busy = Busy()
    assert busy.read() is None
    busy.step(None)
    busy.step(0.25)
    busy.step(0.5)
    assert busy.read() == 0.75
    busy.close()


def test_reports_carry_it(monkeypatch):
    with as_worker(monkeypatch) as agent:
        malletrain.report(8)
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        malletrain.report(8)
        report.flush()
        assert agent.received(WorkerProgress)[-1].busy > 0
        malletrain.report(8, busy_s=1.5)
        malletrain.report(8, busy_s=0.5)
        report.flush()
        assert agent.received(WorkerProgress)[-1].busy == 2.0
        malletrain.report(8, busy_s="long")
        report.flush()
        assert agent.received(WorkerProgress)[-1].steps == 5
        malletrain.report(np.int64(8), busy_s=np.float64(0.5))
        malletrain.report(np.float64(8.0), busy_s=np.float32(0.5))
        report.flush()
        last = agent.received(WorkerProgress)[-1]
        assert (last.steps, last.busy) == (7, 3.0)
