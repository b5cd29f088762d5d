"""Saves the shards of each rank to the memory of its node, and reads them from any node.

Decides the order: every rank writes its shards to its node's memory; then every node writes the
snapshot file, which lists all shard files with their check sums; only then may a node copy both to
another node. A rank reads only the parts that it needs from another node's files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malletrain.memory.folder import VIEW, NoRoomError
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import rng, shard_files, sharded_snapshot, sharded_state, snapshot_file
from malletrain.training.memory_tier import (
    CompleteSnapshot,
    MemoryTier,
    SnapshotTime,
    peer,
    tensor_bytes,
)
from malletrain.training.ranks import leads_its_node, rank_and_world
from malletrain.training.shard_files import METADATA
from malletrain.training.side_group import Team

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future

    from malletrain.training.shard_reader import RowReader


def save(
    tier: MemoryTier,
    objects: Mapping[str, Any],
    header: Callable[[], dict[str, Any]],
    moment: SnapshotTime,
    team: Team,
) -> int:
    """Save the shards of all ranks to their nodes' memory. Collective.

    Args:
        tier: snapshots in this node's memory.
        objects: the script's objects, by name.
        header: returns the snapshot's other entries; called on rank 0.
        moment: moment of the snapshot; only rank 0's is used.
        team: all ranks.

    Returns:
        The total size of the shard files of all ranks, bytes.

    Raises:
        Exception: the error of a rank, on all ranks; older snapshots are unchanged.
    """
    moment, entries = team.from_rank_0(lambda: (moment, header()))
    folder = tier.shards(moment)
    extracted: list[Any] = []

    def begin() -> None:
        extracted.append(sharded_state.take_apart(objects))
        tier.folder.claim(_bytes(extracted[0][1]))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def commit() -> None:
        if leads_its_node():
            (folder / METADATA).write_bytes(metadata)
            tier.write(moment, payload)

    try:
        team.run_on_all(begin)
        states = team.run_on_all(rng.state)
        shard_files.write(str(folder), extracted[0][1], team)
        checksums_by_rank = team.run_on_all(lambda: shard_files.seal(str(folder), team.rank))
        metadata = team.from_rank_0((folder / METADATA).read_bytes)

        def build_payload() -> dict[str, Any]:
            files = {
                name: value[:2]
                for checksums in checksums_by_rank
                for name, value in checksums.items()
            }
            files[METADATA] = shard_files.sum_of(str(folder / METADATA))
            return {
                **entries,
                "malletrain_snapshot": snapshot_file.SHARDED_FORMAT,
                "objects": extracted[0][0],
                shard_files.KEY: {"folder": str(moment), "files": files},
                sharded_snapshot.RNG: states,
            }

        payload = team.from_rank_0(build_payload)
        reached(FaultPoint.MEMORY_WRITTEN)
        team.run_on_all(commit)
        reached(FaultPoint.MEMORY_KEPT)
    except BaseException:
        if leads_its_node():
            tier.drop(moment)
        raise
    return sum(size for size, _ in payload[shard_files.KEY]["files"].values())


def bytes_of_node(objects: Mapping[str, Any]) -> int:
    """Estimate the size of this node's shards, bytes: this rank's shards times the number of ranks
    on the node. Collective.
    """
    return _bytes(sharded_state.take_apart(objects)[1])


def _bytes(tensors: Mapping[str, Any]) -> int:
    shard_bytes = sum(tensor_bytes(_local(tensor)) for tensor in tensors.values())
    return shard_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hand_over(tier: MemoryTier, moment: SnapshotTime, address: str, silence_s: float) -> int:
    """Send the shard files of this node's ranks to another node. The snapshot file goes last; it
    makes the copy valid. Called by the first rank of the node.

    Args:
        tier: snapshots in this node's memory.
        moment: moment of the snapshot.
        address: address of the other node's keeper.
        silence_s: maximum time without a message from it, seconds.

    Returns:
        The number of bytes sent.

    Raises:
        PeerError, OSError: the other node does not accept the files.
    """
    folder, sent = tier.shards(moment), 0
    first, local_world_size = rank_and_world()[0], int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    prefixes = tuple(f"__{rank}_" for rank in range(first, first + local_world_size))
    with peer(address, silence_s) as other:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            # skip files that other nodes are sending
            if path.name == METADATA or path.name.startswith(prefixes):
                sent += other.push(path, tier.name(moment, path.name))
        reached(FaultPoint.MEMORY_GIVES)
        sent += other.push(tier.file(moment), tier.name(moment))
    reached(FaultPoint.MEMORY_GAVE)
    return sent


def restore(
    objects: Mapping[str, Any],
    payload: Mapping[str, Any],
    name: str,
    tier: MemoryTier | None,
    snapshot: CompleteSnapshot,
    label: str,
    team: Team,
) -> None:
    """Restore ``objects`` from shards in the memory of any node. Collective.

    Args:
        objects: the script's objects, by name.
        payload: the snapshot.
        name: its name for messages.
        tier: snapshots in this node's memory; None if it has no memory for them.
        snapshot: address of the keeper that has each file, and the file sizes.
        label: name that distinguishes this run's snapshots from those of other runs of the job.
        team: all ranks.

    Raises:
        SnapshotError: as for :func:`malletrain.training.sharded_snapshot.restore`.
    """
    with _view(tier, snapshot, label, team) as folder:
        remote = RemoteShards(folder, snapshot, label, tier)
        reader = fetching_reader(folder, set(os.listdir(folder)), remote)
        sharded_snapshot.restore(objects, payload, name, team, reader)


@contextmanager
def _view(
    tier: MemoryTier | None, snapshot: CompleteSnapshot, label: str, team: Team
) -> Iterator[str]:
    """Create a folder for this rank, with links to the shards that its node has; removed at the
    end.
    """
    home = tier.folder.path if tier is not None else None
    view = Path(tempfile.mkdtemp(prefix=f"{VIEW}{os.getpid()}-", dir=home))
    try:

        def link_local_shards() -> None:
            shard_folder = tier.shards(snapshot.moment) if tier is not None else None
            if shard_folder is not None and shard_folder.is_dir():
                for path in shard_folder.iterdir():
                    (view / path.name).symlink_to(path)
            if not (view / METADATA).exists():
                with peer(snapshot.files[METADATA]) as other, open(view / METADATA, "wb") as file:
                    size = snapshot.sizes[METADATA]
                    remote = f"{label}/{snapshot.moment}/{METADATA}"
                    other.fetch(remote, [(0, size)], lambda at, data: file.write(data))

        team.run_on_all(link_local_shards)
        yield str(view)
    finally:
        for disk_file in Path(tempfile.gettempdir()).glob(_disk_file_prefix(str(view)) + "*"):
            disk_file.unlink()
        shutil.rmtree(view, ignore_errors=True)


class RemoteShards:
    """The shard files that only other nodes have. Fetches parts of them into a folder of this rank:
    into memory up to the limit, else onto the node's disk.

    Args:
        folder: folder in which this rank collects its files.
        snapshot: address of the keeper that has each file, and the file sizes.
        label: name that distinguishes this run's snapshots from those of other runs of the job.
        tier: snapshots in this node's memory; None if it has no memory for them, in which case
            ``folder`` is on disk.
    """

    def __init__(
        self, folder: str, snapshot: CompleteSnapshot, label: str, tier: MemoryTier | None
    ) -> None:
        self._folder = folder
        self._snapshot = snapshot
        self._label = label
        self._tier = tier
        self._in_memory: dict[str, list[tuple[int, int]]] = {}
        """Parts fetched into memory, by file name."""

    def fetch(self, name: str, pieces: list[tuple[int, int]]) -> None:
        """Fetch parts of a file, and write them at the same offsets of a sparse local file. If they
        do not fit into memory, all parts of the file that were fetched go to disk.

        Args:
            name: name of the file.
            pieces: (offset, length) of each part, bytes.

        Raises:
            PeerError, OSError: the file cannot be fetched or written.
        """
        path = Path(self._folder) / name
        needed = set(pieces)
        if self._tier is not None and not path.is_symlink():
            try:
                self._tier.folder.claim(sum(length for _, length in needed))
                self._in_memory.setdefault(name, []).extend(needed)
            except NoRoomError:
                needed.update(self._in_memory.pop(name, ()))
                path.unlink(missing_ok=True)
                descriptor, disk_path = tempfile.mkstemp(prefix=_disk_file_prefix(self._folder))
                os.close(descriptor)
                path.symlink_to(disk_path)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with peer(self._snapshot.files[name]) as other:
                remote = f"{self._label}/{self._snapshot.moment}/{name}"
                other.fetch(remote, sorted(needed), lambda at, data: os.pwrite(file, data, at))
        finally:
            os.close(file)


def fetching_reader(folder: str, local_names: Collection[str], remote: RemoteShards) -> RowReader:
    """Return a reader of ``folder`` that first fetches the needed rows of absent files from other
    nodes.

    Args:
        folder: folder with the files that this node has, and the metadata.
        local_names: names of these files.
        remote: the files of other nodes.
    """
    from malletrain.training.shard_reader import RowReader

    class FetchingReader(RowReader):
        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            for name, items in self.by_file(plan).items():
                if name not in local_names:
                    remote.fetch(name, self.heads(items))
                    remote.fetch(name, self.rows(name, items))
            return super().read_data(plan, planner)

    return FetchingReader(folder)


def _disk_file_prefix(folder: str) -> str:
    return f"malletrain-{os.path.basename(folder)}-"
