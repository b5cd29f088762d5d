"""Whole shards in memory, for an ElasticStream: each is read from its file once."""

import pytest
import torch

from malletrain import ElasticStream
from malletrain.datacache import reader as reader_module
from tests.malletrain.datacache.nodes import job
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
SHARDS, RECORDS = 12, 10


class Shards:
    """A data set whose samples are shards."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return SHARDS

    def __getitem__(self, shard):
        self.reads.append(shard)
        return [(torch.full((20,), shard), shard * RECORDS + n) for n in range(RECORDS)]

    def read(self):
        reads, self.reads = self.reads, []
        return reads


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "ANSWER_S", PATIENCE_S)
    with job(tmp_path, monkeypatch) as made:
        yield made


def epochs(stream, count):
    numbers = []
    for _ in stream.epochs(count):
        for images, batch in stream:
            assert torch.equal(images[:, 0], batch // RECORDS)
            numbers += batch.tolist()
            stream.advance()
    return numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_reads_each_shard_once(site, workers):
    data = Shards()
    shards = site.cache("n1", data, name=f"shards {workers}")
    stream = ElasticStream(
        range(SHARDS), shards.__getitem__, global_batch_size=8, num_workers=workers
    )
    numbers = epochs(stream, 3)
    assert sorted(numbers) == sorted([*range(SHARDS * RECORDS)] * 3)
    counts = shards.counts()
    assert counts.source_reads == SHARDS
    assert counts.node_hits >= 2 * SHARDS


def test_nodes_share_their_shards(site):
    site.add("n1", "n2")
    data = Shards()
    one, other = site.cache("n1", data), site.cache("n2", data)
    for shard in range(SHARDS):
        one[shard]
    assert sorted(data.read()) == list(range(SHARDS))
    stream = ElasticStream(range(SHARDS), other.__getitem__, global_batch_size=8)
    assert sorted(epochs(stream, 1)) == list(range(SHARDS * RECORDS))
    assert data.read() == []
