"""Shards in another node's memory, read through its keeper into a folder of this node."""

import shutil
import tempfile
from glob import glob
from pathlib import Path

import pytest

pytest.importorskip("torch")

from malletrain.memory.folder import SHARED_MEMORY, MemoryFolder
from malletrain.memory.keeper import Keeper
from malletrain.training.memory_shards import RemoteShards, fetching_reader
from malletrain.training.memory_tier import CompleteSnapshot, MemoryTier, SnapshotTime
from malletrain.training.shard_files import METADATA
from malletrain.training.shard_reader import HEAD
from tests.malletrain.training.test_shard_reader import (
    Receiver,
    boxes,
    numbers,
    plan_of,
    same,
    write,
)

SECRET = bytes.fromhex("5e" * 32)
LABEL = "0123456789abcdef"
MOMENT = SnapshotTime(3, 40, 1, 0)
ROWS, COLUMNS = 256, 1024


@pytest.fixture
def memory():
    """A folder in this node's shared memory, where links take no space."""
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def other_node(tmp_path, monkeypatch):
    """A node that has all shards of two ranks: (its snapshot, tensors, layout, metadata)."""
    import torch

    monkeypatch.setenv("MALLETRAIN_JOB_KEY", SECRET.hex())
    monkeypatch.setenv("MALLETRAIN_JOB", "job-1")
    memory = tmp_path / "other"
    shards = memory / LABEL / str(MOMENT)
    shards.mkdir(parents=True)
    tensors, layout = numbers([([ROWS, COLUMNS], 0, torch.float32)])
    metadata = write(shards, tensors, layout, 2)
    keeper = Keeper(MemoryFolder(memory, 1 << 30), SECRET, "job-1", "127.0.0.1")
    sizes = {path.name: path.stat().st_size for path in shards.iterdir()}
    files = dict.fromkeys(sizes, keeper.address)
    yield CompleteSnapshot(MOMENT, (keeper.address,), files, 0, sizes), tensors, layout, metadata
    keeper.close()


@pytest.mark.parametrize(
    ("limit", "file_is_in_memory"),
    [(64 << 20, True), (16 * HEAD, False), (0, False)],
    ids=["all in memory", "heads in memory", "nothing in memory"],
)
def test_fetched_shards_take_no_more_memory_than_the_limit(
    tmp_path, monkeypatch, memory, other_node, limit, file_is_in_memory
):
    """What does not fit goes to the node's disk, also if only the heads of a file fit."""
    snapshot, tensors, layout, metadata = other_node
    view, disk = memory / ".view-1-x", tmp_path / "disk"
    view.mkdir()
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    (view / METADATA).symlink_to(tmp_path / "other" / LABEL / str(MOMENT) / METADATA)
    folder = MemoryFolder(memory, limit)

    remote = RemoteShards(str(view), snapshot, LABEL, MemoryTier(folder, LABEL, ""))
    reader = fetching_reader(str(view), {METADATA}, remote)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    expected = {key: boxes(tuple(t.shape), layout[key], 1)[0] for key, t in tensors.items()}
    receiver = Receiver(expected, tensors)
    reader.read_data(plan_of(metadata, expected), receiver).wait()

    assert same(receiver.tensors, tensors, expected)
    assert folder.used() <= folder.limit
    fetched = [path for path in view.iterdir() if path.name != METADATA]
    assert len(fetched) == 2
    assert all(path.is_symlink() != file_is_in_memory for path in fetched)
    assert len(list(disk.iterdir())) == (0 if file_is_in_memory else 2)
    descriptors = map(Path, glob("/proc/self/fd/*"))
    assert not [path for path in descriptors if path.resolve().parent == disk.resolve()]
