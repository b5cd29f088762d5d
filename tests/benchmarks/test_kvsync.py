"""The schemes of ``benchmarks/kvsync.py``: their known answer, and the bytes that they move."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from threading import Barrier

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks import kvsync
from benchmarks.kvsync import CountedStore, FolderStore, Row, Setting, Worker
from benchmarks.redis_servers import redis_servers
from tests import forked

START_METHOD = forked.CONTEXT.get_start_method()
SIZE = 400_004
"""Bytes of a gradient, which three workers cannot divide evenly."""
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or find_spec("redis") is None,
    reason="needs redis-server (Debian: redis-server) and redis-py: pip install -e '.[redis]'",
)


class DictStore(dict):
    """A store in memory."""

    put, get = dict.__setitem__, dict.__getitem__


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("scheme", kvsync.SCHEMES)
def test_each_worker_has_the_mean_and_all_move_what_the_formula_says(scheme, workers):
    values, barrier = DictStore(), Barrier(workers)
    gradients = [kvsync.gradient_of(rank, SIZE) for rank in range(workers)]

    def synchronise(rank):
        store = CountedStore(values)
        synchronised = kvsync.SCHEMES[scheme](store, gradients[rank], rank, workers, barrier.wait)
        return synchronised, store

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(synchronise, range(workers)))
    mean = np.mean(gradients, axis=0, dtype=np.float64).astype(np.float32)
    assert mean.any()
    for synchronised, _ in results:
        assert np.array_equal(synchronised, mean)
    times = {"hierarchical": 3 * workers + 1, "all-to-all": workers**2 + workers}[scheme]
    assert sum(store.bytes for _, store in results) == times * SIZE
    operations = {"hierarchical": 3 * workers + 1, "all-to-all": workers + 1}[scheme]
    assert all(store.operations == operations for _, store in results)


def test_a_wrong_mean_is_an_error(tmp_path, monkeypatch):
    worker = Worker(0, Setting(1, (SIZE,), 1, 0.0, ()), lambda: None, tmp_path)
    gradient = kvsync.gradient_of(0, SIZE)
    worker.measure("files, all-to-all", gradient, kvsync.mean_gradient(1, SIZE))

    def wrong(store, gradient, rank, workers, wait):
        gradient[-1] += 1
        return gradient

    monkeypatch.setitem(kvsync.SCHEMES, "all-to-all", wrong)
    with pytest.raises(RuntimeError, match="files, all-to-all: the result of worker 0 is not"):
        worker.measure("files, all-to-all", gradient, kvsync.mean_gradient(1, SIZE))


def test_a_folder_forgets_what_is_cleared(tmp_path):
    store = FolderStore(tmp_path, 0.0)
    store.put("key", b"value")
    assert store.get("key") == b"value"
    store.clear()
    with pytest.raises(FileNotFoundError):
        store.get("key")


@pytest.mark.slow
def test_processes_synchronise_by_a_ring_and_through_files():
    names = ("ring", "files, hierarchical", "files, all-to-all")
    rows = kvsync.run(Setting(3, (SIZE,), 2, 0.0, names), START_METHOD)
    assert [row.contender for row in rows] == list(names)
    ring, hierarchical, all_to_all = rows
    assert ring.formula == 4
    assert ring.bytes == pytest.approx(4 * SIZE, rel=0.01)
    assert (hierarchical.bytes, hierarchical.operations) == (10 * SIZE, 10)
    assert (all_to_all.bytes, all_to_all.operations) == (12 * SIZE, 4)
    assert all(len(row.seconds) == 2 and row.server_bytes is None for row in rows)


@pytest.mark.slow
@needs_redis
def test_redis_counts_the_same_bytes():
    names = ("Redis, hierarchical", "Redis, all-to-all")
    with redis_servers(1) as servers:
        setting = Setting(3, (SIZE,), 2, 0.0, names, int(servers.addresses[0]))
        rows = kvsync.run(setting, START_METHOD)
    for row, times in zip(rows, (10, 12), strict=True):
        assert row.bytes == times * SIZE
        assert row.server_bytes > row.bytes
        assert row.server_bytes == pytest.approx(row.bytes, rel=0.01)


def test_the_table_has_the_ratio_of_files_and_redis():
    rows = [
        Row(2, 10**6, "Redis, hierarchical", (0.2, 0.1, 0.3), 7 * 10**6, 7_001_000, 7, 7, 0.0),
        Row(2, 10**6, "files, hierarchical", (1.4, 1.5, 0.1), 7 * 10**6, None, 7, 7, 0.0),
    ]
    table = [line.split() for line in kvsync.show(rows).splitlines()]
    assert table[1][2:4] == ["Redis,", "hierarchical"]
    assert table[1][4:] == ["200.0", "100.0", "300.0", "7.000", "7", "7.001", "7"]
    assert table[-1] == ["2", "1", "hierarchical", "7.0"]
