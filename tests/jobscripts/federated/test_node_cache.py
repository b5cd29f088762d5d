"""The hot samples of clients in the memory of a node."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from fedcase.clients import ClientFailure
from fedcase.local_training import LocalOptions, train_clients
from fedcase.node_cache import NodeCache

from malletrain.protocol import env
from tests.jobscripts.federated.tasks import Counting


@dataclass
class Source:
    """Ten images, and which were read."""

    reads: list[int] = field(default_factory=list)

    def __len__(self):
        return 10

    def __getitem__(self, sample):
        self.reads.append(sample)
        return np.full(32, sample, np.uint8), sample


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir(mode=0o700)
    monkeypatch.setenv(env.DATA, str(tmp_path / "data"))
    return tmp_path / "data"


def stores(folder):
    return sorted(path.name for path in folder.glob("*.samples"))


def learn(cache, client, source, losses, samples=range(10)):
    """One epoch; return the samples that were read from the source in it."""
    source.reads.clear()
    own = cache.client(client, source)
    values = own.read(list(samples))
    assert [value[1] for value in values] == list(samples)
    assert all((image == label).all() for image, label in values)
    own.keep_hottest(list(samples), values, [losses[sample] for sample in samples])
    own.close()
    return source.reads.copy(), own


def test_the_hottest_samples_stay_and_are_read_from_memory(folder):
    cache, source = NodeCache("t", 1 << 20, share=0.3), Source()
    losses = [0, 9, 0, 8, 0, 7, 0, 0, 0, 0]
    reads, own = learn(cache, 4, source, losses)
    assert reads == list(range(10))
    assert own.hot == [1, 3, 5]
    assert cache.cached() == {4}
    assert cache.used() > 3 * 32

    reads, own = learn(cache, 4, source, losses)
    assert own.account.hits == 3
    # The first hot sample is read once to see that the data are the same.
    assert reads == [1, 0, 2, 4, 6, 7, 8, 9]
    assert own.account.source_reads == 8
    assert len(stores(folder)) == 1


def test_other_samples_become_hot_without_a_read(folder):
    cache, source = NodeCache("t", 1 << 20, share=0.3), Source()
    learn(cache, 4, source, [0, 9, 0, 8, 0, 7, 0, 0, 0, 0])
    reads, own = learn(cache, 4, source, [9] * 10, samples=[8, 9])
    assert own.hot == [1, 8, 9]  # 1 from memory, the others were just read
    assert reads == [1, 8, 9]
    reads, own = learn(cache, 4, source, [9] * 10, samples=[1, 8, 9])
    assert reads == [1]
    assert len(stores(folder)) == 1, "the store before is removed"


def test_the_client_that_trained_longest_ago_loses_its_samples(folder):
    losses = list(range(10))
    cache, source = NodeCache("t", 1 << 20, share=0.3), Source()
    learn(cache, 0, source, losses)
    small = NodeCache("t", 2 * cache.used(), share=0.3)
    for client in (1, 2):
        learn(small, client, source, losses)
    assert small.cached() == {1, 2}
    assert small.used() <= small.memory
    assert len(stores(folder)) == 2
    assert [path.name for path in folder.glob("*.hot.json")]


def test_without_memory_all_is_read(folder):
    cache, source = NodeCache("t", 0), Source()
    for _ in range(2):
        reads, _ = learn(cache, 1, source, list(range(10)))
        assert reads == list(range(10))
    assert cache.cached() == frozenset()
    assert stores(folder) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"hot": [99]}', '{"hot": 3}'])
def test_a_damaged_file_of_uses_is_a_cold_cache(folder, content):
    cache, source = NodeCache("t", 1 << 20, share=0.3), Source()
    cache.path(4).write_text(content)
    cache.uses_path(4).write_text(content)
    reads, own = learn(cache, 4, source, list(range(10)))
    assert reads == list(range(10))
    assert own.hot == [7, 8, 9]


def test_memory_that_vanished_is_filled_again(folder):
    cache, source = NodeCache("t", 1 << 20, share=0.3), Source()
    learn(cache, 4, source, list(range(10)))
    for name in stores(folder):
        (folder / name).unlink()
    reads, own = learn(cache, 4, source, list(range(10)))
    assert set(reads) == set(range(10))
    assert own.hot == [7, 8, 9]
    reads, own = learn(cache, 4, source, list(range(10)))
    assert own.account.hits == 3


def test_a_training_reads_the_hot_samples_and_a_part_of_the_others(folder):
    cache, task = NodeCache("t", 1 << 20, share=0.25), Counting()
    options = LocalOptions(epochs=2, cold_share=0.5)
    first = train_clients(
        task, task.initial_arrays(), [0, 3], 1, cache, options, clock=iter(range(9)).__next__
    )
    assert [(r.client, r.samples, r.seconds) for r in first.results] == [(0, 5, 1), (3, 8, 1)]
    # The mean of 0 … n − 1: in the first epoch a cold client reads all its samples.
    assert [r.loss for r in first.results] == [2.0, 3.5]
    np.testing.assert_array_equal(first.arrays["rounds"], [2.0, 2.0])  # two epochs
    # Epoch 1 reads 5 + 8. Epoch 2 reads 1 + 2 hot ones from memory and half of the rest.
    assert first.reads.hits == 3
    assert first.reads.source_reads == 13 + 2 + 3
    assert json.loads(cache.path(3).read_text())["hot"] == [6, 7]
    again = train_clients(
        task, first.arrays, [3], 2, cache, LocalOptions(), clock=iter(range(9)).__next__
    )
    assert again.reads.hits == 2
    assert again.arrays["rounds"].dtype == np.float64


class Unreadable(Counting):
    """The data of the clients ``bad`` cannot be read."""

    def __init__(self, *bad):
        self.bad = bad

    def dataset(self, client):
        if client in self.bad:
            raise OSError(f"no file\nof client {client}.")
        return super().dataset(client)


def test_a_client_that_raises_costs_no_other_its_training(folder, capfd):
    cache, task = NodeCache("t", 1 << 20, share=0.25), Unreadable(3)
    result = train_clients(task, task.initial_arrays(), [0, 3, 5], 1, cache, LocalOptions())
    assert [(r.client, r.samples) for r in result.results] == [(0, 5), (5, 10)]
    assert result.failures == (ClientFailure(3, "OSError: no file of client 3"),)
    np.testing.assert_array_equal(result.arrays["rounds"], [1.0, 1.0])
    assert "Traceback" in capfd.readouterr().err, "the log of the node has more"


def test_if_each_client_raises_there_is_no_model(folder):
    cache, task = NodeCache("t", 1 << 20, share=0.25), Unreadable(0, 3)
    result = train_clients(task, task.initial_arrays(), [0, 3], 1, cache, LocalOptions())
    assert (dict(result.arrays), result.results) == ({}, ())
    assert [failure.client for failure in result.failures] == [0, 3]
