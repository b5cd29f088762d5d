"""How long rank 0 waits for slower ranks at the end of an epoch."""

import threading

import pytest
from torch.distributed import HashStore

from malletrain.training import epoch_ends
from malletrain.training.epoch_ends import EpochEnds


@pytest.fixture
def store(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(epoch_ends, "group_store", lambda: store)
    monkeypatch.setattr(epoch_ends, "rank_and_world", lambda: (0, 2))
    return store


def test_a_slower_rank_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(epoch_ends, "WAIT_S", 60.0)
    first, second = EpochEnds(0), EpochEnds(0)
    first.closed()
    waiting = threading.Thread(target=first.wait_for_all)
    waiting.start()
    assert waiting.is_alive()
    second.closed()
    waiting.join()


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(store, monkeypatch):
    monkeypatch.setattr(epoch_ends, "WAIT_S", 0.02)
    first = EpochEnds(0)
    first.closed()
    first.wait_for_all()


def test_within_an_epoch_nobody_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(epoch_ends, "WAIT_S", 1e9)
    first = EpochEnds(0)
    first.wait_for_all()
    first.closed()
    first.over()
    first.wait_for_all()


def test_a_lost_store_and_a_single_rank_stop_nothing(monkeypatch):
    questions = []

    class Lost:
        def add(self, key, count):
            questions.append(key)
            raise RuntimeError("connection reset")

    monkeypatch.setattr(epoch_ends, "WAIT_S", 1e9)
    monkeypatch.setattr(epoch_ends, "group_store", Lost)
    for world in (1, 2):
        monkeypatch.setattr(epoch_ends, "rank_and_world", lambda world=world: (0, world))
        ends = EpochEnds(0)
        ends.closed()
        ends.wait_for_all()
        ends.closed()
    assert len(questions) == 1  # each further one would be a warning of torch's
