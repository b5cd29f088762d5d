"""A snapshot that all ranks write and read together, each its own shards.

Decides the order of things: every rank's shards are on disk, then the file that names them takes
the place of the newest snapshot, then the shards of older ones go. Killed anywhere in between, the
run has the snapshot of before. How shards reach the disk is
:mod:`malletrain.training.shard_files`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import objects as parts
from malletrain.training import rng, shard_files, sharded_state, snapshot_file
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError

RNG = "rng_by_rank"
"""In a snapshot: the states of each rank's random number generators."""


def save(
    path: str,
    objects: Mapping[str, Any],
    header: Callable[[], dict[str, Any]],
    keep: int,
    keep_newest: bool,
    team: Team,
    overtaken: Callable[[], None] | None = None,
) -> int:
    """Take a snapshot at ``path``. Collective.

    Args:
        path: as for :class:`malletrain.Snapshot`.
        objects: the script's, by name.
        header: asked on rank 0, before anything is written: what a snapshot says beside its
            objects. It raises for a snapshot that must not be overwritten.
        keep, keep_newest, overtaken: see :func:`malletrain.training.snapshot_file.write`.
        team: all ranks.

    Returns:
        The bytes written by all ranks.

    Raises:
        SnapshotError, OSError, RuntimeError: what the first rank met, on all ranks; the snapshots
            on disk are as before.
    """
    head, folder = team.from_rank_0(lambda: _begin(path, header()))
    taken: list[Any] = []

    def finish() -> int:
        files = shard_files.seal_rest(path, folder, sealed)
        shards = {"folder": shard_files.relative(path, folder), "files": files}
        skeletons, _ = taken[0]
        payload = {**head, "objects": skeletons, shard_files.KEY: shards, RNG: states}
        size = snapshot_file.write(path, payload, keep, keep_newest, overtaken)
        return size + sum(n for n, _ in files.values())

    try:
        team.everywhere(lambda: taken.append(sharded_state.take_apart(objects)))
        states = team.everywhere(rng.state)
        shard_files.write(folder, taken[0][1], team)
        sealed = team.everywhere(lambda: shard_files.seal(folder, team.rank))
        size = team.from_rank_0(finish)
    except BaseException:
        if team.rank == 0:
            shard_files.remove(folder)
        raise
    if team.rank == 0:
        shard_files.sweep(path, keep)
    return size


def _begin(path: str, head: dict[str, Any]) -> tuple[dict[str, Any], str]:
    head = {**head, "malletrain_snapshot": snapshot_file.SHARDED_FORMAT}
    return head, shard_files.new_folder(path, head["id"])


def problem(payload: Mapping[str, Any], name: str, team: Team) -> str:
    """What is wrong with the shards of a snapshot, found by all ranks together; empty for nothing.
    Collective.
    """
    try:
        team.everywhere(lambda: shard_files.check_sums(payload, name, team.rank, team.world))
    except SnapshotError as error:
        return str(error)
    return ""


def put_back(
    objects: Mapping[str, Any],
    payload: Mapping[str, Any],
    name: str,
    team: Team,
    folder: str | None = None,
    reader: Any = None,
) -> None:
    """Have ``objects`` and the random number generators be as a snapshot says, whatever layout it
    was written in and whatever layout they have. Collective.

    Args:
        objects: the script's, by name.
        payload, name: the snapshot, and its path.
        team: all ranks.
        folder, reader: see :func:`malletrain.training.shard_files.read`; by default where the
            snapshot says.

    Raises:
        SnapshotError: when a state does not fit its object.
    """
    folder = folder or shard_files.folder_of(payload, name)
    parts.tell_differences(objects, payload, name)
    sharded_state.put_together(
        objects,
        payload["objects"],
        shard_files.shapes(folder) if folder else {},
        bool(folder),
        lambda tensors: shard_files.read(folder, tensors, team, reader) if folder else None,
        lambda key, target, error: parts.does_not_fit(key, target, name, error),
    )
    states = payload.get(RNG)
    # A rank that had none takes that of one in the same place of its node's group.
    rng.load(states[team.rank % len(states)] if states else payload.get("rng", {}))
