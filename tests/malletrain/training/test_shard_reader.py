"""Shards of any layout read into any other, all ranks in one process: bit for bit, by no more bytes
than the rows that are needed, and never from a block that is not what was written.
"""

import itertools
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from malletrain.training.shard_reader import HEAD, RowReader
from malletrain.training.snapshot_file import MIN_BLOCK_BYTES, DamagedSnapshotError, sums_of
from tests.draws import cases

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool)
TENSORS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3), st.integers(0, 2), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=3,
)


def boxes(shape, dim, world):
    """(offsets, sizes) of each rank; of a tensor that is not spread, of each rank all."""
    if not shape:
        return [((), ())] * world
    dim = min(dim, len(shape) - 1)
    step = -(-shape[dim] // world)
    result = []
    for rank in range(world):
        first = min(shape[dim], rank * step)
        count = min(shape[dim], first + step) - first
        result.append(
            (
                tuple(first if d == dim else 0 for d in range(len(shape))),
                tuple(count if d == dim else n for d, n in enumerate(shape)),
            )
        )
    return result


def cut(tensor, box):
    for dim, (first, count) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor


class Sender:
    """What a writer asks for its tensors."""

    def __init__(self, tensors):
        self._tensors = tensors

    def resolve_data(self, item):
        offsets, sizes = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
        part = cut(self._tensors[item.index.fqn], (offsets, sizes))
        return part if part.numel() == self._tensors[item.index.fqn].numel() else part.clone()


class Receiver:
    """What a reader asks for its room: a rank's."""

    def __init__(self, boxes_by_key, tensors):
        self.tensors = {
            key: torch.full(sizes, 1, dtype=tensors[key].dtype)
            for key, (_, sizes) in boxes_by_key.items()
        }

    def resolve_tensor(self, item):
        return cut(self.tensors[item.dest_index.fqn], (item.dest_offsets, item.lengths))

    def commit_tensor(self, item, tensor):
        pass


def write(folder, tensors, layout, world):
    """As ``world`` ranks would; return the metadata."""
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    entries, plans = {}, [[] for _ in range(world)]
    for key, tensor in tensors.items():
        properties = TensorProperties.create_from_tensor(tensor)
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in boxes(tuple(tensor.shape), layout[key], world)
        ]
        chunks = list({tuple(chunk.offsets): chunk for chunk in reversed(chunks)}.values())
        entries[key] = TensorStorageMetadata(properties, tensor.shape, chunks)
        for rank, chunk in zip(itertools.cycle(range(world)), chunks, strict=False):
            data = TensorWriteData(chunk, properties, tensor.shape)
            index = MetadataIndex(key, chunk.offsets)
            plans[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    plans = writer.prepare_global_plan([SavePlan(items) for items in plans])
    results = [writer.write_data(plan, Sender(tensors)).wait() for plan in plans]
    metadata = Metadata(entries)
    writer.finish(metadata, results)
    return metadata


def plan_of(metadata, targets):
    items = []
    for key, (offsets, sizes) in targets.items():
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        entry = metadata.state_dict_metadata[key]
        items += create_read_items_for_chunk_list(key, entry, [chunk])
    return LoadPlan(items)


def most(metadata, plan, block):
    """Bytes that reading ``plan`` takes at most: of each piece the head and the rows."""
    total = 0
    for item in plan.items:
        entry = metadata.state_dict_metadata[item.storage_index.fqn]
        piece = metadata.storage_data[item.storage_index]
        (sizes,) = {c.sizes for c in entry.chunks if c.offsets == item.storage_index.offset}
        row = sizes[1:].numel() * entry.properties.dtype.itemsize
        rows = item.lengths[0] if item.lengths else 1
        # Of blocks, one more at each end of the head and of the rows.
        total += min(HEAD, piece.length) + rows * row + 4 * (block - 1)
    return total


def sums(folder):
    names = (name for name in os.listdir(folder) if name.endswith(".distcp"))
    return {name: sums_of(os.path.join(folder, name))[2] for name in names}


def read(folder, metadata, tensors, targets, known_sums):
    """What a rank has in the end, and the bytes that it read."""
    reader = RowReader(folder, known_sums, "x.pt")
    reader.set_up_storage_reader(reader.read_metadata(), True)
    plan, receiver = plan_of(metadata, targets), Receiver(targets, tensors)
    reader.read_data(plan, receiver).wait()
    return receiver.tensors, reader.bytes_read, plan


def numbers(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"t{i}": torch.randint(0, 2 if dtype is torch.bool else 99, shape, generator=generator).to(
            dtype
        )
        for i, (shape, _, dtype) in enumerate(specs)
    }
    return tensors, {f"t{i}": dim for i, (_, dim, _) in enumerate(specs)}


def same(result, tensors, targets):
    return all(torch.equal(result[key], cut(tensors[key], box)) for key, box in targets.items())


@settings(max_examples=cases(25))
@given(specs=TENSORS, old=st.integers(1, 64), new=st.integers(1, 64), checked=st.booleans())
@example(specs=[([11, 3], 0, torch.float32), ([], 0, torch.int64)], old=8, new=64, checked=True)
@example(specs=[([64, 700], 0, torch.float32)], old=4, new=6, checked=True)
@example(specs=[([40, 30], 1, torch.bfloat16)], old=3, new=2, checked=False)
def test_any_layout_is_read_into_any_other(specs, old, new, checked):
    tensors, layout = numbers(specs)
    by_key = {key: boxes(tuple(t.shape), layout[key], new) for key, t in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        metadata = write(folder, tensors, layout, old)
        known_sums = sums(folder) if checked else {}
        for rank in range(new):
            targets = {key: by_rank[rank] for key, by_rank in by_key.items()}
            result, count, plan = read(folder, metadata, tensors, targets, known_sums)
            assert same(result, tensors, targets)
            assert count <= most(metadata, plan, MIN_BLOCK_BYTES if checked else 1)


def test_of_large_pieces_little_more_is_read_than_is_needed(tmp_path):
    """From 4 to 6 ranks, every second piece is needed in part only."""
    tensors, layout = numbers([([1200, 500], 0, torch.float32), ([601, 999], 0, torch.float32)])
    metadata = write(tmp_path, tensors, layout, 4)
    known_sums, total = sums(tmp_path), 0
    for rank in range(6):
        targets = {k: boxes(tuple(t.shape), layout[k], 6)[rank] for k, t in tensors.items()}
        result, count, _ = read(tmp_path, metadata, tensors, targets, known_sums)
        assert same(result, tensors, targets)
        total += count
    assert total <= 1.05 * sum(t.nbytes for t in tensors.values())


@settings(max_examples=cases(25))
@given(data=st.data(), old=st.integers(1, 5), new=st.integers(1, 5))
def test_no_number_comes_from_a_damaged_block(data, old, new):
    tensors, layout = numbers([([37, 90], 0, torch.float32), ([9], 0, torch.float64)])
    by_key = {key: boxes(tuple(t.shape), layout[key], new) for key, t in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        metadata = write(folder, tensors, layout, old)
        known_sums = sums(folder)
        name = data.draw(st.sampled_from(sorted(known_sums)))
        path = os.path.join(folder, name)
        content = bytearray(Path(path).read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        short = data.draw(st.booleans())
        content[at] ^= data.draw(st.integers(1, 255))
        with open(path, "wb") as file:
            file.write(content[:at] if short else content)
        refused = 0
        for rank in range(new):
            targets = {key: by_rank[rank] for key, by_rank in by_key.items()}
            try:
                result, _, _ = read(folder, metadata, tensors, targets, known_sums)
            except DamagedSnapshotError as error:
                refused += str(error).endswith(f"damaged: the check sum of {path} is wrong.")
            else:
                assert same(result, tensors, targets)
        holds = any(
            piece.relative_path == name and piece.offset <= at < piece.offset + HEAD
            for piece in metadata.storage_data.values()
        )
        assert refused or not (holds or short)


def test_a_file_that_is_gone_is_damage_only_where_its_sums_are_known(tmp_path):
    tensors, layout = numbers([([4], 0, torch.float32)])
    metadata = write(tmp_path, tensors, layout, 1)
    known_sums = sums(tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    targets = {"t0": ((0,), (4,))}
    with pytest.raises(DamagedSnapshotError, match=r"__0_0.distcp: No such file or directory\.$"):
        read(tmp_path, metadata, tensors, targets, known_sums)
    with pytest.raises(FileNotFoundError):
        read(tmp_path, metadata, tensors, targets, {})


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(6000.0).reshape(60, 100).t(), id="columns first"),
        pytest.param(torch.arange(24).to(torch.uint16).reshape(4, 6), id="a newer dtype"),
        pytest.param(torch.nn.Parameter(torch.arange(24.0).reshape(4, 6)), id="a parameter"),
    ],
)
def test_what_lies_in_another_way_is_read_whole(tmp_path, tensor, checked):
    tensors = {"t": tensor}
    metadata = write(tmp_path, tensors, {"t": 0}, 1)
    known_sums = sums(tmp_path) if checked else {}
    targets = {"t": ((1, 2), (2, 3))}
    result, _, _ = read(tmp_path, metadata, {"t": tensor.detach()}, targets, known_sums)
    assert torch.equal(result["t"], tensor[1:3, 2:5])
