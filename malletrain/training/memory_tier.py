"""The snapshots of one run in the memory of this node.

Decides their names, checks them before they are offered to other nodes, and removes older ones.
:mod:`malletrain.training.memory_restore` decides which one is restored;
:mod:`malletrain.memory.peers` sends files to other nodes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from malletrain.memory.folder import MemoryFolder, NoRoomError, remove, unfinished
from malletrain.protocol import env
from malletrain.training import report, shard_files, snapshot_file
from malletrain.training.disk_tier import number_of
from malletrain.training.memory_choice import NodeSnapshot, SnapshotTime, superseded
from malletrain.training.owner import Owner
from malletrain.training.snapshot_file import SnapshotError

FILE = ".pt"
_OVERHEAD_BYTES = 1 << 14
"""Bytes to reserve for a snapshot file in addition to its tensors."""


class MemoryTier:
    """The snapshots of one run in the node's folder.

    Args:
        folder: folder of the job on this node.
        label: name that distinguishes the run from others of the job (:func:`label_of`).
        address: address of the node's keeper.
    """

    def __init__(self, folder: MemoryFolder, label: str, address: str) -> None:
        self.folder = folder
        self.address = address
        self.label = label
        self.home = folder.path / label

    @classmethod
    def of_this_node(cls, label: str) -> MemoryTier | None:
        """Return the tier in the folder that the agent has created. None without such a folder, or
        without a keeper that serves it to other nodes (for example under torchrun).
        """
        folder, limit = os.environ.get(env.MEMORY, ""), os.environ.get(env.MEMORY_LIMIT, "0")
        keeper = os.environ.get(env.KEEPER, "")
        if not keeper or not folder or not limit.isdigit() or not os.path.isdir(folder):
            return None
        return cls(MemoryFolder(Path(folder), int(limit)), label, keeper)

    # --- names ---

    def name(self, moment: SnapshotTime, file: str = "") -> str:
        """Return the keepers' name of the snapshot of ``moment``, or of one of its shard files."""
        return f"{self.label}/{moment}/{file}" if file else f"{self.label}/{moment}{FILE}"

    def file(self, moment: SnapshotTime) -> Path:
        """Return the path of the snapshot file."""
        return self.folder.file(self.name(moment))

    def shards(self, moment: SnapshotTime) -> Path:
        """Return the folder of its shards."""
        return self.home / str(moment)

    def moments(self) -> list[SnapshotTime]:
        """Return the moments of the snapshot files here, newest first."""
        moments_ = (
            SnapshotTime.parse(path.name.removesuffix(FILE)) for path in self.home.glob(f"*{FILE}")
        )
        return sorted((moment for moment in moments_ if moment is not None), reverse=True)

    # --- write ---

    def write(self, moment: SnapshotTime, payload: dict[str, Any]) -> int:
        """Write a snapshot file: a whole snapshot, or the part that is the same for all shards.
        Return its size, bytes.

        Raises:
            NoRoomError, OSError: it cannot be written; the snapshots here are unchanged.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.folder.claim(tensor_bytes(payload) + _OVERHEAD_BYTES)
        final = self.file(moment)
        temporary = unfinished(final)
        try:
            with open(temporary, "xb") as file:
                size = snapshot_file.write_to(file, payload)
            os.replace(temporary, final)
        except BaseException:
            remove(temporary)
            raise
        return size

    def begin(self) -> None:
        """Remove unfinished files of killed workers, and shards without a snapshot file. Only one
        process of the node calls it, while no other process writes.
        """
        self.folder.remove_unfinished()
        names = {str(moment) for moment in self.moments()}
        if self.home.is_dir():
            for path in self.home.iterdir():
                if path.is_dir() and path.name not in names:
                    remove(path)

    def remove_superseded(self, complete: SnapshotTime) -> None:
        """Remove the snapshots that are not needed once the snapshot ``complete`` is in place."""
        for moment in superseded(self.moments(), complete):
            self.drop(moment)

    def drop(self, moment: SnapshotTime) -> None:
        """Remove one snapshot and its shards."""
        remove(self.file(moment))
        remove(self.shards(moment))

    # --- read ---

    def snapshots(self) -> list[tuple[NodeSnapshot, dict[str, Any]]]:
        """Return the good snapshots, newest first, each with its payload. Damaged files are
        removed, and the user gets a message.
        """
        snapshots = []
        for moment in self.moments():
            name = str(self.file(moment))
            try:
                payload = snapshot_file.read(name)
                needed = payload.get(shard_files.KEY, {}).get("files", {})
                good_files = self._good_files(moment, needed)
                size = os.path.getsize(name)
            except (SnapshotError, OSError) as error:
                report.tell(f"A snapshot in this node's memory is passed over: {error}")
                self.drop(moment)
                continue
            sizes = {file: length for file, (length, _) in needed.items()}
            snapshot = NodeSnapshot(moment, frozenset(good_files), frozenset(needed), size, sizes)
            snapshots.append((snapshot, payload))
        return snapshots

    def _good_files(self, moment: SnapshotTime, needed: Mapping[str, tuple[int, int]]) -> list[str]:
        good = []
        for file, (size, total) in needed.items():
            path = self.shards(moment) / file
            if not path.exists():
                continue
            if sum_of(path) == (size, total):
                good.append(file)
            else:
                report.tell(
                    f"A part of a snapshot in this node's memory is damaged and passed over: {path}"
                )
                remove(path)
        return good


def label_of(run: Owner, path: str) -> str:
    """Return the keepers' name for the snapshots of a run: a hash of its script, its arguments, and
    the number of the Snapshot object. It is the same on all nodes, even if their folders on disk
    differ.
    """
    text = f"{run.script} {run.arguments} {number_of(path)}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors in ``value``, with some bytes for other entries."""
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    if hasattr(value, "element_size") and hasattr(value, "numel"):
        return int(value.numel()) * int(value.element_size())
    return len(value) if isinstance(value, bytes | str) else 32


def sum_of(path: Path) -> tuple[int, int]:
    """Return (size in bytes, CRC-32) of a file."""
    return shard_files.sum_of(str(path))


def moment_now(generation: int, steps: int, rank: int) -> SnapshotTime:
    """Return the moment of a snapshot that is about to be taken.

    Args:
        generation: number of the round.
        steps: number of steps done since the beginning of the run.
        rank: rank of this process.
    """
    return SnapshotTime(generation, steps, int(time.time() * 1000), rank)


__all__ = ["MemoryTier", "NoRoomError", "label_of", "moment_now", "sum_of", "tensor_bytes"]
