"""Writes and reads a snapshot on all ranks together, each rank its own shards.

Decides the order: first every rank's shards are on disk, then the file that names them replaces the
newest snapshot, then the shards of older snapshots are removed. A run that is killed in between has
the previous snapshot. :mod:`malletrain.training.shard_files` decides how shards reach the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import objects as parts
from malletrain.training import rng, shard_files, sharded_state, snapshot_file
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import SnapshotError

RNG = "rng_by_rank"
"""Key in a snapshot: states of the random number generators, by rank."""


def save(
    path: str,
    objects: Mapping[str, Any],
    header: Callable[[], dict[str, Any]],
    keep: int,
    keep_newest: bool,
    team: Team,
    overtaken: Callable[[], None] | None = None,
) -> int:
    """Write a snapshot at ``path``. Collective.

    Args:
        path: as for :class:`malletrain.Snapshot`.
        objects: the script's objects, by name.
        header: returns the snapshot's other entries; called on rank 0 before anything is written.
            Raises if the snapshot on disk must not be overwritten.
        keep, keep_newest, overtaken: see :func:`malletrain.training.snapshot_file.write`.
        team: all ranks.

    Returns:
        The bytes that all ranks have written.

    Raises:
        SnapshotError, OSError, RuntimeError: the error of the first failed rank, on all ranks; the
            snapshots on disk are unchanged.
    """
    head, folder = team.from_rank_0(lambda: _begin(path, header()))
    extracted: list[Any] = []

    def finish() -> int:
        shards = shard_files.seal_rest(path, folder, sealed)
        skeletons, _ = extracted[0]
        payload = {**head, "objects": skeletons, shard_files.KEY: shards, RNG: states}
        size: int = sum(size for size, _ in shards["files"].values())
        return size + snapshot_file.write(path, payload, keep, keep_newest, overtaken)

    try:
        team.run_on_all(lambda: extracted.append(sharded_state.take_apart(objects)))
        states = team.run_on_all(rng.state)
        shard_files.write(folder, extracted[0][1], team)
        sealed = team.run_on_all(lambda: shard_files.seal(folder, team.rank))
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
    """Check the shards of a snapshot on all ranks together, as far as necessary before they are
    read. Collective.

    Args:
        payload: the snapshot.
        name: its path.
        team: all ranks.

    Returns:
        A sentence that describes the damage; empty if there is none.
    """
    try:
        team.run_on_all(
            lambda: shard_files.check_before_reading(payload, name, team.rank, team.world)
        )
    except SnapshotError as error:
        return str(error)
    return ""


def restore(
    objects: Mapping[str, Any],
    payload: Mapping[str, Any],
    name: str,
    team: Team,
    reader: Any = None,
) -> None:
    """Restore ``objects`` and the random number generators from a snapshot. The layout of the
    snapshot and that of the objects may differ. Collective.

    Args:
        objects: the script's objects, by name.
        payload: the snapshot.
        name: its path.
        team: all ranks.
        reader: reader of its shards. Default: reads them from the folder in the snapshot.

    Raises:
        DamagedSnapshotError: the shards are not what was written; the objects are unchanged.
        SnapshotError: a state does not fit its object.
    """
    is_checked = reader is None and bool(payload.get(shard_files.KEY, {}).get(shard_files.SUMS))
    if reader is None and payload.get(shard_files.KEY):
        reader = shard_files.reader(payload, name)
    parts.report_differences(objects, payload, name)
    sharded_state.put_together(
        objects,
        payload["objects"],
        shard_files.shapes(reader) if reader else {},
        bool(reader),
        lambda tensors: shard_files.read(reader, tensors, team) if reader else None,
        lambda key, target, error: parts.misfit_error(key, target, name, error),
        aside=is_checked,
    )
    rng_states = payload.get(RNG)
    # A rank beyond the saved ones uses the state of rank modulo their number.
    rng.load(rng_states[team.rank % len(rng_states)] if rng_states else payload.get("rng", {}))
