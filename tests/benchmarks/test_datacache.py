"""The benchmark of the data cache, on few samples without delay: its contenders hit what the
formulas say, and its accounts add up.
"""

from __future__ import annotations

import gzip
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.datacache import Row, churn, measure, sweep, table
from benchmarks.datacache_node import BenchmarkSetting
from benchmarks.datacache_source import (
    SHARD,
    SourceClient,
    SourceServer,
    fashion_mnist,
    tar_shards,
)

pytestmark = pytest.mark.slow
SAMPLES = 512


@pytest.fixture
def files(tmp_path: Path) -> list[bytes]:
    rng = np.random.default_rng(1)
    images, labels = rng.bytes(SAMPLES * 784), rng.integers(0, 10, SAMPLES).astype(np.uint8)
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(bytes(16) + images)
    with gzip.open(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes(8) + labels.tobytes())
    return fashion_mnist(tmp_path, 10_000)


@pytest.fixture
def server(files: list[bytes]) -> Iterator[SourceServer]:
    made = SourceServer(files, 0.0, 1e12)
    yield made
    made.close()


@pytest.fixture
def setting(server: SourceServer, tmp_path: Path) -> BenchmarkSetting:
    return BenchmarkSetting(SAMPLES, 128, 0.0, 0.25, server.port, tmp_path)


def test_the_server_hands_out_files_and_shards_and_counts_them(files, server):
    assert len(files) == SAMPLES
    client = SourceClient(server.port)
    assert client.get(b"G", 7) == files[7]
    assert client.get(b"T", 1) == tar_shards(files)[1]
    assert server.counts().requests == 2
    assert server.counts().bytes == 785 + len(tar_shards(files)[1])
    assert len(tar_shards(files)) == -(-SAMPLES // SHARD)
    client.close()


@pytest.mark.parametrize(
    ("contender", "nodes", "hits", "coverage", "exactly_once"),
    [
        ("plain", 2, 0.0, 1.0, True),
        ("LRU", 1, 0.034, 1.0, True),
        ("never evict", 1, 0.25, 1.0, True),
        ("tar shards", 2, 0.0, 1.0, True),
        ("SHADE's policy", 1, 0.75, 0.5, False),
        ("DataCache", 1, 0.25, 1.0, True),
        ("DataCache", 2, 0.5, 1.0, True),
        ("all in memory", 2, 1.0, 1.0, True),
    ],
)
def test_a_contender_hits_what_it_should(
    contender, nodes, hits, coverage, exactly_once, setting, server
):
    row = measure(contender, nodes, setting, server, 4)
    assert row.hits == pytest.approx(hits, abs=0.03)
    assert row.coverage == pytest.approx(coverage, abs=0.01)
    assert row.exactly_once == exactly_once
    if contender != "tar shards":  # whose headers count
        assert row.from_source == pytest.approx(1 - row.hits, abs=0.03)
    if row.expected is not None:
        assert row.hits == pytest.approx(row.expected, abs=0.03)
    assert contender in table([row])
    assert list(setting.folder.glob("n*")) == []
    assert multiprocessing.active_children() != []  # the server


def test_a_row_without_an_expectation():
    assert "plain" in table([Row("plain", 1, 0.1, 10.0, 0.0, None, 1.0, 1.0, True)])


def test_nodes_are_replaced_and_killed_and_every_epoch_is_whole(setting, server):
    result = churn(setting, server, seconds=3.0, every_s=1.0)
    assert result["replaced"] >= 2
    assert result["epochs"] >= 1
    assert result["epochs_not_exactly_once"] == 0
    assert result["killed_owner_exactly_once"]
    assert 0 < result["killed_owner_misses"] < 1
    assert 0 < result["hits"] <= 1


def test_trials_of_a_sweep_read_the_data_once(setting, server):
    result = sweep(setting, server)
    assert result["from_source"] == pytest.approx(1 / result["trials"], abs=0.04)
