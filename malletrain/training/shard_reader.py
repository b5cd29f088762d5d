"""Reads only those rows of a saved shard that this rank needs.

:class:`RowReader`: torch's own reader reads a whole shard if a rank needs a part of it. This one
reads the head of each shard, which locates the elements, and the needed rows; if a shard is not as
expected, it reads all of it. If block check sums are known, it reads whole blocks, each once, and
returns nothing whose check sum is wrong. It uses only torch's public interfaces: ``StorageReader``,
and the metadata of ``FileSystemReader``.

:func:`locate` finds the elements of a tensor in the output of ``torch.save``, without reading them.
That output is a zip archive without compression: first a pickle with the layout of the tensor in
its storage, then some records of a few bytes, then the storage. For anything unexpected the result
is None, and the caller reads the whole archive.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from malletrain.training.snapshot_file import BlockFile, BlockSums, DamagedSnapshotError

HEAD = 1024
"""Number of bytes from the start that contain the layout."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"


class SavedTensor(NamedTuple):
    """A tensor that is contiguous in the archive, in row-major order."""

    start: int
    """Offset of the first element, bytes."""
    shape: tuple[int, ...]
    """Shape of the tensor."""


class _Layout(NamedTuple):
    """Layout of the tensor in its storage, as in the pickle."""

    storage: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _layout(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Layout:
    return _Layout(storage, offset, tuple(shape), tuple(stride))


class _LayoutUnpickler(pickle.Unpickler):
    """Unpickles a tensor and nothing else, without running code of the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def locate(head: bytes, length: int, item_bytes: int) -> SavedTensor | None:
    """Locate the elements.

    Args:
        head: the first bytes of the archive, at most :data:`HEAD`.
        length: size of the archive, bytes.
        item_bytes: size of an element, bytes.

    Returns:
        The location; None if the archive is not as expected.
    """
    records = _records(head)
    first, last = (records[0], records[-1]) if records else (("", 0), ("", 0))
    if not first[0].endswith("/data.pkl") or not last[0].endswith("/data/0"):
        return None
    byteorder_at = next((at for name, at in records if name.endswith("/byteorder")), None)
    if byteorder_at is None or not head.startswith(sys.byteorder.encode(), byteorder_at):
        return None
    try:
        layout = _LayoutUnpickler(io.BytesIO(head[first[1] :])).load()
    except Exception:  # truncated, or not a tensor
        return None
    start = last[1]
    if not isinstance(layout, _Layout) or not _is_plain(layout):
        return None
    if start + math.prod(layout.shape) * item_bytes > length:
        return None
    return SavedTensor(start, layout.shape)


def _records(head: bytes) -> list[tuple[str, int]]:
    """Return (name, offset of the content) of each record, up to the first storage."""
    members: list[tuple[str, int]] = []
    at = head.find(_SIGNATURE)
    while at >= 0 and at + _LOCAL.size <= len(head):
        *_, name_bytes, extra = _LOCAL.unpack_from(head, at)
        compressed = _LOCAL.unpack_from(head, at)[3] != 0
        begins = at + _LOCAL.size + name_bytes
        name = head[at + _LOCAL.size : begins].decode("ascii", "replace")
        if compressed or begins > len(head):
            return []
        members.append((name, begins + extra))
        if "/data/" in name:
            break
        at = head.find(_SIGNATURE, begins + extra)
    return members


def _is_plain(layout: _Layout) -> bool:
    """Return whether the tensor is the whole of storage 0, in row-major order."""
    numbers = math.prod(layout.shape)
    kind, *storage = layout.storage if isinstance(layout.storage, tuple) else ("",)
    if kind != "storage" or len(storage) < 4 or storage[1] != "0":
        return False
    if layout.offset != 0 or storage[3] != numbers or len(layout.stride) != len(layout.shape):
        return False
    expected = 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= max(1, size)
    return True


_MAX_SLICE_BYTES = 1 << 20
"""Maximum number of bytes to read and copy at once, unless a row is longer."""


class RowReader(FileSystemReader):
    """Reader of the shards in a folder.

    Args:
        folder: folder that ``torch.distributed.checkpoint`` wrote.
        sums: block check sums by file name; other files are not checked.
        name: path of the snapshot, for messages.
    """

    def __init__(
        self, folder: str, sums: Mapping[str, BlockSums] | None = None, name: str = ""
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        self._sums = sums or {}
        self._name = name or folder
        self._metadata: Metadata | None = None
        self.bytes_read = 0
        """Number of bytes read so far, with heads and blocks, without the metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata of the shards; reads it once."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of ``plan``.

        Args:
            plan: what to read.
            planner: provides the tensors to fill.

        Raises:
            DamagedSnapshotError: a block is not what was written, or a file with known check sums
                is absent.
            OSError: another file cannot be read.
        """
        for name, items in self.by_file(plan).items():
            with self._open(name) as file:
                for item in items:
                    self._read(file, item, planner)
                self.bytes_read += file.bytes_read
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        """Return the items of ``plan`` by file name, in the order of their offsets."""
        items: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda i: self.storage_data[i.storage_index].offset):
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        return dict(sorted(items.items()))

    def heads(self, items: Sequence[ReadItem]) -> list[tuple[int, int]]:
        """Return (offset, length) of the head of each item's shard, bytes."""
        pieces = (self.storage_data[item.storage_index] for item in items)
        return [(piece.offset, min(HEAD, piece.length)) for piece in pieces]

    def rows(self, name: str, items: Sequence[ReadItem]) -> list[tuple[int, int]]:
        """Return (offset, length) of the parts of the file ``name`` to read after the heads, bytes.
        The heads must be readable.
        """
        with self._open(name) as file:
            return [self._needed(item, self._locate(file, item)) for item in items]

    # --- one piece ---

    def _open(self, name: str) -> BlockFile:
        path, sums = os.path.join(self._folder, name), self._sums.get(name)
        try:
            return BlockFile(path, sums, lambda: self._damaged_error(path))
        except OSError as error:
            if sums is None:
                raise
            raise DamagedSnapshotError(
                f"Snapshot {self._name} is damaged: {path}: {error.strerror}."
            ) from error

    def _damaged_error(self, path: str) -> DamagedSnapshotError:
        return DamagedSnapshotError(
            f"Snapshot {self._name} is damaged: the check sum of {path} is wrong."
        )

    def _locate(self, file: BlockFile, item: ReadItem) -> SavedTensor | None:
        """Locate the elements in the item's shard; None if it must be read in full."""
        piece = self.storage_data[item.storage_index]
        if item.type != LoadItemType.TENSOR:
            return None
        (head,) = self.heads([item])
        location = locate(bytes(file.read(*head)), piece.length, self._dtype(item).itemsize)
        if location is None or len(location.shape) != len(item.lengths):
            return None
        return location

    def _dtype(self, item: ReadItem) -> torch.dtype:
        entry = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def _needed(self, item: ReadItem, location: SavedTensor | None) -> tuple[int, int]:
        piece = self.storage_data[item.storage_index]
        if location is None:
            return piece.offset, piece.length
        row = _row_bytes(location, self._dtype(item))
        first, count = _rows(item)
        return piece.offset + location.start + first * row, count * row

    def _read(self, file: BlockFile, item: ReadItem, planner: LoadPlanner) -> None:
        location = self._locate(file, item)
        offset, length = self._needed(item, location)
        if location is None:
            self._read_whole(io.BytesIO(file.read(offset, length)), item, planner)
            return
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise ValueError(
                f"{item.dest_index.fqn}: the script's tensor has the shape {tuple(target.size())}, "
                f"and the saved piece {tuple(item.lengths)}."
            )
        row, dtype = _row_bytes(location, self._dtype(item)), self._dtype(item)
        rows_at_once = max(1, _MAX_SLICE_BYTES // row) if row else 1
        for first, count in _slices(_rows(item)[1] if length else 0, rows_at_once):
            data = file.read(offset + first * row, count * row)
            part = _tensor(data, dtype).view((count, *location.shape[1:]) if location.shape else ())
            for dim in range(1, part.ndim):
                part = part.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            (target.narrow(0, first, count) if target.ndim else target).copy_(part)
        planner.commit_tensor(item, target)

    def _read_whole(self, data: io.BytesIO, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, data)
            return
        part = torch.load(data, map_location="cpu", weights_only=True)
        for dim in range(part.ndim):
            part = part.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)


def _rows(item: ReadItem) -> tuple[int, int]:
    """Return (first, count) along the first dimension. A scalar is one row."""
    return (item.storage_offsets[0], item.lengths[0]) if item.lengths else (0, 1)


def _row_bytes(location: SavedTensor, dtype: torch.dtype) -> int:
    return torch.Size(location.shape[1:]).numel() * dtype.itemsize


def _slices(rows: int, max_rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, rows, max_rows):
        yield first, min(max_rows, rows - first)


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements in ``data`` as a tensor; copies them if they are not aligned."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
