"""Saves the shards of each rank to the memory of its node, and reads them from any node.

Decides the order: first every rank's shards are in its node's memory, then every node has the
snapshot file that names all shards and their check sums, then they can be copied to another node. A
rank reads only the parts that it needs from another node's files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from malletrain.memory.folder import VIEW, NoRoomError
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.training import rng, shard_files, sharded_snapshot, sharded_state, snapshot_file
from malletrain.training.memory_moment import CompleteSnapshot, Moment
from malletrain.training.memory_restore import peer
from malletrain.training.memory_tier import MemoryTier, tensor_bytes
from malletrain.training.ranks import leads_its_node, rank_and_world
from malletrain.training.shard_files import METADATA
from malletrain.training.side_group import Team


def save(
    tier: MemoryTier,
    objects: Mapping[str, Any],
    facts: Callable[[], dict[str, Any]],
    moment: Moment,
    team: Team,
) -> int:
    """Save the shards of all ranks to their nodes' memory. Collective.

    Args:
        tier: snapshots in this node's memory.
        objects: the script's objects, by name.
        facts: returns the snapshot's other entries; called on rank 0.
        moment: moment of the snapshot; only rank 0's is used.
        team: all ranks.

    Returns:
        The bytes of all ranks.

    Raises:
        Exception: the error of a rank, on all ranks; older snapshots are unchanged.
    """
    moment, head = team.from_rank_0(lambda: (moment, facts()))
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
        team.everywhere(begin)
        states = team.everywhere(rng.state)
        shard_files.write(str(folder), extracted[0][1], team)
        sealed = team.everywhere(lambda: shard_files.seal(str(folder), team.rank))
        metadata = team.from_rank_0((folder / METADATA).read_bytes)

        def named() -> dict[str, Any]:
            files = {name: value[:2] for part in sealed for name, value in part.items()}
            files[METADATA] = shard_files.sum_of(str(folder / METADATA))
            return {
                **head,
                "malletrain_snapshot": snapshot_file.SHARDED_FORMAT,
                "objects": extracted[0][0],
                shard_files.KEY: {"folder": str(moment), "files": files},
                sharded_snapshot.RNG: states,
            }

        payload = team.from_rank_0(named)
        reached(FaultPoint.MEMORY_WRITTEN)
        team.everywhere(commit)
        reached(FaultPoint.MEMORY_KEPT)
    except BaseException:
        if leads_its_node():
            tier.drop(moment)
        raise
    return sum(size for size, _ in payload[shard_files.KEY]["files"].values())


def bytes_of_node(objects: Mapping[str, Any]) -> int:
    """Return the bytes of the shards of this node, if its other ranks have as many as this one.
    Collective.
    """
    return _bytes(sharded_state.take_apart(objects)[1])


def _bytes(tensors: Mapping[str, Any]) -> int:
    shard_bytes = sum(tensor_bytes(_local(tensor)) for tensor in tensors.values())
    return shard_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hand_over(tier: MemoryTier, moment: Moment, address: str, silence_s: float) -> int:
    """Copy the files that this node's ranks have written to another node, and last the snapshot
    file, which makes them valid. Called by the first rank of the node.

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


def put_back(
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
        snapshot: which keepers have its files.
        label: label of the run.
        team: all ranks.

    Raises:
        SnapshotError: as for :func:`malletrain.training.sharded_snapshot.put_back`.
    """
    with _view(tier, snapshot, label, team) as folder:
        local_names = set(os.listdir(folder))
        reader = _reader(folder, local_names, snapshot, label, tier)
        sharded_snapshot.put_back(objects, payload, name, team, reader)


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

        def lay_out() -> None:
            shard_folder = tier.shards(snapshot.moment) if tier is not None else None
            if shard_folder is not None and shard_folder.is_dir():
                for path in shard_folder.iterdir():
                    (view / path.name).symlink_to(path)
            if not (view / METADATA).exists():
                with peer(snapshot.files[METADATA]) as other, open(view / METADATA, "wb") as file:
                    size = snapshot.sizes[METADATA]
                    remote = f"{label}/{snapshot.moment}/{METADATA}"
                    other.fetch(remote, [(0, size)], lambda at, data: file.write(data))

        team.everywhere(lay_out)
        yield str(view)
    finally:
        for spare in Path(tempfile.gettempdir()).glob(_spare(str(view)) + "*"):
            spare.unlink()
        shutil.rmtree(view, ignore_errors=True)


def _reader(
    folder: str,
    local_names: set[str],
    snapshot: CompleteSnapshot,
    label: str,
    tier: MemoryTier | None,
) -> Any:
    """Return a reader of ``folder`` that first fetches the needed rows of absent files from other
    nodes.
    """
    from malletrain.training.shard_reader import RowReader

    class SpreadReader(RowReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            for name, items in self.by_file(plan).items():
                if name not in local_names:
                    _fetch(folder, name, self.heads(items), snapshot, label, tier)
                    _fetch(folder, name, self.rows(name, items), snapshot, label, tier)
            return super().read_data(plan, planner)

    return SpreadReader(folder)


def _fetch(
    folder: str,
    name: str,
    pieces: list[tuple[int, int]],
    snapshot: CompleteSnapshot,
    label: str,
    tier: MemoryTier | None,
) -> None:
    """Fetch parts of another node's file, and write them at the same offsets of an otherwise empty
    file.
    """
    path = Path(folder) / name
    pieces = sorted(set(pieces))
    if tier is not None:
        try:
            tier.folder.claim(sum(length for _, length in pieces))
        except NoRoomError:  # use the node's disk instead
            if not path.exists():
                path.symlink_to(tempfile.mkstemp(prefix=_spare(folder))[1])
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with peer(snapshot.files[name]) as other:
            remote = f"{label}/{snapshot.moment}/{name}"
            other.fetch(remote, pieces, lambda at, data: os.pwrite(file, data, at))
    finally:
        os.close(file)


def _spare(folder: str) -> str:
    return f"malletrain-{os.path.basename(folder)}-"
