"""Shards in the memory of the nodes: each rank's in its own node's, read from wherever they are.

Decides the order of things: every rank's shards are in its node's memory, then every node has the
file that names them all and their sums, then they may go to another node. A rank reads of another
node's files only the pieces that it needs.
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
    """Have the shards of all ranks in their nodes' memory. Collective.

    Args:
        tier: of this node.
        objects: the script's, by name.
        facts: asked on rank 0: what a snapshot says beside its objects.
        moment: of rank 0; that of the others does not count.
        team: all ranks.

    Returns:
        The bytes of all ranks.

    Raises:
        Exception: what a rank met, on all ranks; older snapshots are as they were.
    """
    moment, head = team.from_rank_0(lambda: (moment, facts()))
    folder = tier.shards(moment)
    taken: list[Any] = []

    def begin() -> None:
        taken.append(sharded_state.take_apart(objects))
        tier.folder.claim(_bytes(taken[0][1]))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def commit() -> None:
        if leads_its_node():
            (folder / METADATA).write_bytes(metadata)
            tier.write(moment, payload)

    try:
        team.everywhere(begin)
        states = team.everywhere(rng.state)
        shard_files.write(str(folder), taken[0][1], team)
        sealed = team.everywhere(lambda: shard_files.seal(str(folder), team.rank))
        metadata = team.from_rank_0((folder / METADATA).read_bytes)

        def named() -> dict[str, Any]:
            files = {name: value[:2] for part in sealed for name, value in part.items()}
            files[METADATA] = shard_files.sum_of(str(folder / METADATA))
            return {
                **head,
                "malletrain_snapshot": snapshot_file.SHARDED_FORMAT,
                "objects": taken[0][0],
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
    """Bytes of the shards of this node, whose ranks have as much as this one. Collective."""
    return _bytes(sharded_state.take_apart(objects)[1])


def _bytes(tensors: Mapping[str, Any]) -> int:
    own = sum(tensor_bytes(_local(tensor)) for tensor in tensors.values())
    return own * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hand_over(tier: MemoryTier, moment: Moment, address: str, silence_s: float) -> int:
    """Give what this node's ranks have written of a snapshot to the keeper at ``address``, the file
    that makes it count last. Called by the first rank of the node. Returns the bytes.

    Args:
        tier: of this node.
        moment: of the snapshot.
        address: of the other node's keeper.
        silence_s: how long it may say nothing.

    Raises:
        PeerError, OSError: it does not take it.
    """
    folder, moved = tier.shards(moment), 0
    first, here = rank_and_world()[0], int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = tuple(f"__{rank}_" for rank in range(first, first + here))
    with peer(address, silence_s) as other:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name == METADATA or path.name.startswith(own):  # not other nodes' on their way
                moved += other.push(path, tier.name(moment, path.name))
        reached(FaultPoint.MEMORY_GIVES)
        moved += other.push(tier.file(moment), tier.name(moment))
    reached(FaultPoint.MEMORY_GAVE)
    return moved


def put_back(
    objects: Mapping[str, Any],
    payload: Mapping[str, Any],
    name: str,
    tier: MemoryTier | None,
    snapshot: CompleteSnapshot,
    label: str,
    team: Team,
) -> None:
    """As :func:`malletrain.training.sharded_snapshot.put_back`, from wherever the shards are.
    Collective.
    """
    with _view(tier, snapshot, label, team) as folder:
        here = set(os.listdir(folder))
        reader = _reader(folder, here, snapshot, label, tier)
        sharded_snapshot.put_back(objects, payload, name, team, reader)


@contextmanager
def _view(
    tier: MemoryTier | None, snapshot: CompleteSnapshot, label: str, team: Team
) -> Iterator[str]:
    """A folder of this rank's own with what its node has of the shards."""
    home = tier.folder.path if tier is not None else None
    view = Path(tempfile.mkdtemp(prefix=f"{VIEW}{os.getpid()}-", dir=home))
    try:

        def lay_out() -> None:
            there = tier.shards(snapshot.moment) if tier is not None else None
            if there is not None and there.is_dir():
                for path in there.iterdir():
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
    folder: str, here: set[str], snapshot: CompleteSnapshot, label: str, tier: MemoryTier | None
) -> Any:
    """A reader of ``folder`` that first has the rows that are needed of files that are not
    there.
    """
    from malletrain.training.shard_reader import RowReader

    class SpreadReader(RowReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            for name, items in self.by_file(plan).items():
                if name not in here:
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
    """Pieces of a file of another node, at their places in a file that has nothing else."""
    path = Path(folder) / name
    pieces = sorted(set(pieces))
    if tier is not None:
        try:
            tier.folder.claim(sum(length for _, length in pieces))
        except NoRoomError:  # on the node's disk then
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
