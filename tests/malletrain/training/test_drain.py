"""Snapshots on demand: taken, answered, and the wait for the end that follows."""

import math
import os
import threading

import pytest

import malletrain
from malletrain import Snapshot
from malletrain.protocol.worker_channel import DrainDone, WorkerProgress
from malletrain.training import snapshot_file
from tests.malletrain.training.worker_side import as_worker
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch) as agent:
        yield agent


class Moody:
    mood = "no memory"

    def state_dict(self):
        raise RuntimeError(self.mood)

    load_state_dict = state_dict


def drained(agent, seen):
    seen.extend(agent.received(DrainDone))
    return seen


def test_a_drain_saves_reports_and_waits_until_it_is_taken_back(agent, tmp_path):
    facts = {"step": 0}
    snapshot = Snapshot(tmp_path / "x.pt", every_s=math.inf, facts=facts)
    snapshot.step()
    malletrain.report(10)
    malletrain.report(10)
    facts["step"] = 2
    agent.flags.request_drain(7)
    trainer = threading.Thread(target=snapshot.step)
    trainer.start()
    seen = []
    # repeated, because one may be lost
    until(lambda: len(drained(agent, seen)) >= 2, "it says so twice")
    assert {(message.number, message.saved) for message in seen} == {(7, True)}
    assert snapshot_file.read(str(tmp_path / "x.pt"))["objects"]["facts"] == {"step": 2}
    written = os.stat(tmp_path / "x.pt").st_mtime_ns
    agent.flags.request_drain(8)
    until(lambda: drained(agent, seen)[-1].number == 8, "the second drain is answered")
    assert trainer.is_alive()
    assert os.stat(tmp_path / "x.pt").st_mtime_ns == written  # nothing had happened since
    agent.flags.request_drain(0)
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()
    snapshot.step()
    agent.flags.request_drain(8)
    snapshot.step()  # served already
    assert os.stat(tmp_path / "x.pt").st_mtime_ns == written


def test_the_progress_is_flushed_on_every_rank_when_a_drain_begins(tmp_path, monkeypatch):
    with as_worker(monkeypatch, rank=1, world=2) as agent:
        snapshot = Snapshot(tmp_path / "x.pt", every_s=math.inf, facts={})
        for _ in range(20):
            malletrain.report(1)
        agent.received()
        agent.flags.request_drain(1)
        malletrain.report(1)
        snapshot.step()
        assert agent.received(WorkerProgress)[-1].samples == 21
        assert os.listdir(tmp_path) == []


def test_the_wait_ends_when_nobody_comes(agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("malletrain.training.drain.STOP_WAIT_S", 0.1)
    snapshot = Snapshot(tmp_path / "x.pt", facts={})
    agent.flags.request_drain(1)
    snapshot.step()
    assert "did not stop this process; training goes on" in capsys.readouterr().err
    snapshot.step()
    assert {message.number for message in agent.received(DrainDone)} == {1}


def test_a_drain_whose_snapshot_fails_says_so_and_trains_on(agent, tmp_path):
    snapshot = Snapshot(tmp_path / "x.pt", every_s=math.inf, moody=Moody())
    agent.flags.request_drain(4)
    snapshot.step()
    (message,) = agent.received(DrainDone)
    assert (message.number, message.saved) == (4, False)
    assert "no memory" in message.sentence
