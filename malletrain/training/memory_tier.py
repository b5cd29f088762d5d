"""One run's snapshots in the memory of this node.

Decides how they are named there, which of them are looked through and offered to the other nodes,
and when older ones go. Which is restored is :mod:`malletrain.training.memory_restore`'s, how files
get to other nodes :mod:`malletrain.memory.peers`'s.
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
from malletrain.training.memory_moment import Moment, NodeSnapshot, superseded
from malletrain.training.owner import Owner
from malletrain.training.snapshot_file import SnapshotError

FILE = ".pt"
_SPARE_BYTES = 1 << 14
"""Of a snapshot's file beside its tensors, at least."""


class MemoryTier:
    """A run's part of the node's folder.

    Args:
        folder: the job's on this node.
        label: what the run is told by from others of the job (:func:`label_of`).
        address: of the node's keeper.
    """

    def __init__(self, folder: MemoryFolder, label: str, address: str) -> None:
        self.folder = folder
        self.address = address
        self.label = label
        self.home = folder.path / label

    @classmethod
    def of_this_node(cls, label: str) -> MemoryTier | None:
        """The one that the agent has made; None where there is none, or where no keeper (none of
        torchrun's launcher, for one) would show to the others what is in it.
        """
        place, limit = os.environ.get(env.MEMORY, ""), os.environ.get(env.MEMORY_LIMIT, "0")
        keeper = os.environ.get(env.KEEPER, "")
        if not keeper or not place or not limit.isdigit() or not os.path.isdir(place):
            return None
        return cls(MemoryFolder(Path(place), int(limit)), label, keeper)

    # --- names ---

    def name(self, moment: Moment, file: str = "") -> str:
        """What keepers call the snapshot of ``moment``, or a file of its shards."""
        return f"{self.label}/{moment}/{file}" if file else f"{self.label}/{moment}{FILE}"

    def file(self, moment: Moment) -> Path:
        """The snapshot itself."""
        return self.folder.file(self.name(moment))

    def shards(self, moment: Moment) -> Path:
        """Where its shards lie."""
        return self.home / str(moment)

    def moments(self) -> list[Moment]:
        """The snapshots here, by their own files."""
        moments_ = (
            Moment.parse(path.name.removesuffix(FILE)) for path in self.home.glob(f"*{FILE}")
        )
        return sorted((one for one in moments_ if one is not None), reverse=True)

    # --- write ---

    def write(self, moment: Moment, payload: dict[str, Any]) -> int:
        """Put a snapshot, or what is the same for all of its shards, here. Returns its bytes.

        Raises:
            NoRoomError, OSError: it cannot be; what was here still is.
        """
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.folder.claim(tensor_bytes(payload) + _SPARE_BYTES)
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
        """Remove what workers that were killed had begun to write, and shards without a
        snapshot. One process of the node calls it, while no other writes.
        """
        self.folder.remove_unfinished()
        names = {str(moment) for moment in self.moments()}
        if self.home.is_dir():
            for path in self.home.iterdir():
                if path.is_dir() and path.name not in names:
                    remove(path)

    def keep_from(self, complete: Moment) -> None:
        """Remove what ``complete``, which is whole wherever it has to be, makes needless."""
        for moment in superseded(self.moments(), complete):
            self.drop(moment)

    def drop(self, moment: Moment) -> None:
        """Remove one snapshot; its shards without it are nothing."""
        remove(self.file(moment))
        remove(self.shards(moment))

    # --- read ---

    def snapshots(self) -> list[tuple[NodeSnapshot, dict[str, Any]]]:
        """What is here and good, newest first, with what each snapshot says. What is damaged is
        told and removed.
        """
        snapshots = []
        for moment in self.moments():
            name = str(self.file(moment))
            try:
                payload = snapshot_file.read(name)
                needed = payload.get(shard_files.KEY, {}).get("files", {})
                there = self._good(moment, needed)
                size = os.path.getsize(name)
            except (SnapshotError, OSError) as error:
                report.tell(f"A snapshot in this node's memory is passed over: {error}")
                self.drop(moment)
                continue
            sizes = {file: length for file, (length, _) in needed.items()}
            snapshot = NodeSnapshot(moment, frozenset(there), frozenset(needed), size, sizes)
            snapshots.append((snapshot, payload))
        return snapshots

    def _good(self, moment: Moment, needed: Mapping[str, tuple[int, int]]) -> list[str]:
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


def label_of(who: Owner, path: str) -> str:
    """What keepers call the snapshots of a run, the same on all nodes, whatever folder each has for
    the disk's: its script, its arguments, and which of its Snapshots it is.
    """
    text = f"{who.script} {who.arguments} {number_of(path)}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in ``value``."""
    if isinstance(value, Mapping):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(tensor_bytes, value))
    if hasattr(value, "element_size") and hasattr(value, "numel"):
        return int(value.numel()) * int(value.element_size())
    return len(value) if isinstance(value, bytes | str) else 32


def sum_of(path: Path) -> tuple[int, int]:
    """(size, CRC-32) of a file."""
    return shard_files.sum_of(str(path))


def moment_now(generation: int, steps: int, rank: int) -> Moment:
    """That of a snapshot that is about to be taken."""
    return Moment(generation, steps, int(time.time() * 1000), rank)


__all__ = ["MemoryTier", "NoRoomError", "label_of", "moment_now", "sum_of", "tensor_bytes"]
