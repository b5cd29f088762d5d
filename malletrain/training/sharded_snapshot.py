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
        shards = shard_files.seal_rest(path, folder, sealed)
        skeletons, _ = taken[0]
        payload = {**head, "objects": skeletons, shard_files.KEY: shards, RNG: states}
        size: int = sum(size for size, _ in shards["files"].values())
        return size + snapshot_file.write(path, payload, keep, keep_newest, overtaken)

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
    """What is wrong with the shards of a snapshot, found by all ranks together, as far as it has to
    be known before they are read; empty for nothing. Collective.
    """
    try:
        team.everywhere(
            lambda: shard_files.check_before_reading(payload, name, team.rank, team.world)
        )
    except SnapshotError as error:
        return str(error)
    return ""


def put_back(
    objects: Mapping[str, Any],
    payload: Mapping[str, Any],
    name: str,
    team: Team,
    reader: Any = None,
) -> None:
    """Have ``objects`` and the random number generators be as a snapshot says, whatever layout it
    was written in and whatever layout they have. Collective.

    Args:
        objects: the script's, by name.
        payload, name: the snapshot, and its path.
        team: all ranks.
        reader: of its shards; by default one that reads them where the snapshot says.

    Raises:
        DamagedSnapshotError: the shards are not what was written; the objects are as they were.
        SnapshotError: when a state does not fit its object.
    """
    sums = reader is None and bool(payload.get(shard_files.KEY, {}).get(shard_files.SUMS))
    if reader is None and payload.get(shard_files.KEY):
        reader = shard_files.reader(payload, name)
    parts.tell_differences(objects, payload, name)
    sharded_state.put_together(
        objects,
        payload["objects"],
        shard_files.shapes(reader) if reader else {},
        bool(reader),
        lambda tensors: shard_files.read(reader, tensors, team) if reader else None,
        lambda key, target, error: parts.does_not_fit(key, target, name, error),
        aside=sums,
    )
    states = payload.get(RNG)
    # A rank that had none takes that of one in the same place of its node's group.
    rng.load(states[team.rank % len(states)] if states else payload.get("rng", {}))
