"""A reader of shards that reads of a saved piece only the rows that this rank needs.

Torch's own reads a piece whole where a rank needs a part of it. Decides what is read: of each piece
its head, which says where its numbers are, and the rows; all of a piece that is not as expected.
Where the check sums of blocks are known, whole blocks are read, each once, and nothing is handed on
that is not what was written.

Only torch's public interfaces are used: what a ``StorageReader`` does, and what a
``FileSystemReader`` finds in the metadata.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from malletrain.training.block_sums import BlockFile, BlockSums
from malletrain.training.saved_tensor import HEAD, SavedTensor, located
from malletrain.training.snapshot_file import DamagedSnapshotError

_SLICE = 1 << 20
"""Bytes that are read and copied at once, if a row is not longer."""


class RowReader(FileSystemReader):
    """Of the shards in ``folder``.

    Args:
        folder: as ``torch.distributed.checkpoint`` wrote it.
        sums: of the blocks of its files; a file that is not in it is not checked.
        name: of the snapshot, for messages.
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
        """Of all pieces, heads and blocks included; without the metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What is in the shards; read once."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what ``plan`` asks for.

        Raises:
            DamagedSnapshotError: a block is not what was written, or a file with known sums is
                gone.
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
        """What is asked for, by the file it lies in, in the order in which it lies there."""
        items: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda i: self.storage_data[i.storage_index].offset):
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        return dict(sorted(items.items()))

    def heads(self, items: Sequence[ReadItem]) -> list[tuple[int, int]]:
        """(offset, length) of the heads of the pieces."""
        lies = (self.storage_data[item.storage_index] for item in items)
        return [(piece.offset, min(HEAD, piece.length)) for piece in lies]

    def rows(self, name: str, items: Sequence[ReadItem]) -> list[tuple[int, int]]:
        """(offset, length) of what is read of a file beside the heads, which are there."""
        with self._open(name) as file:
            return [self._needed(item, self._lies(file, item)) for item in items]

    # --- one piece ---

    def _open(self, name: str) -> BlockFile:
        path, sums = os.path.join(self._folder, name), self._sums.get(name)
        try:
            return BlockFile(path, sums, lambda: self._is_damaged(path))
        except OSError as error:
            if sums is None:
                raise
            raise DamagedSnapshotError(
                f"Snapshot {self._name} is damaged: {path}: {error.strerror}."
            ) from error

    def _is_damaged(self, path: str) -> DamagedSnapshotError:
        return DamagedSnapshotError(
            f"Snapshot {self._name} is damaged: the check sum of {path} is wrong."
        )

    def _lies(self, file: BlockFile, item: ReadItem) -> SavedTensor | None:
        """Where the numbers of the item's piece are in it; None: it is to be read whole."""
        piece = self.storage_data[item.storage_index]
        if item.type != LoadItemType.TENSOR:
            return None
        (head,) = self.heads([item])
        place = located(bytes(file.read(*head)), piece.length, self._dtype(item).itemsize)
        if place is None or len(place.shape) != len(item.lengths):
            return None
        return place

    def _dtype(self, item: ReadItem) -> torch.dtype:
        entry = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def _needed(self, item: ReadItem, lies: SavedTensor | None) -> tuple[int, int]:
        piece = self.storage_data[item.storage_index]
        if lies is None:
            return piece.offset, piece.length
        row = _row_bytes(lies, self._dtype(item))
        first, count = _rows(item)
        return piece.offset + lies.start + first * row, count * row

    def _read(self, file: BlockFile, item: ReadItem, planner: LoadPlanner) -> None:
        lies = self._lies(file, item)
        offset, length = self._needed(item, lies)
        if lies is None:
            self._read_whole(io.BytesIO(file.read(offset, length)), item, planner)
            return
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise ValueError(f"{item.dest_index.fqn} has no room of {tuple(item.lengths)}.")
        row, dtype = _row_bytes(lies, self._dtype(item)), self._dtype(item)
        rows_at_once = max(1, _SLICE // row) if row else 1
        for first, count in _slices(_rows(item)[1] if length else 0, rows_at_once):
            data = file.read(offset + first * row, count * row)
            part = _tensor(data, dtype).view((count, *lies.shape[1:]) if lies.shape else ())
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
    """(first, count) along the first dimension; a single number is one row."""
    return (item.storage_offsets[0], item.lengths[0]) if item.lengths else (0, 1)


def _row_bytes(lies: SavedTensor, dtype: torch.dtype) -> int:
    return torch.Size(lies.shape[1:]).numel() * dtype.itemsize


def _slices(rows: int, at_once: int) -> Iterator[tuple[int, int]]:
    for first in range(0, rows, at_once):
        yield first, min(at_once, rows - first)


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in ``data``, on an address on which they may lie."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
