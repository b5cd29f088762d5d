"""Chooses the snapshot on disk that is restored, the same one on all ranks.

Rank 0 chooses, and the other ranks load the same snapshot. It skips a damaged snapshot, and one
that was saved in the code after an epoch's steps if that code did not run to its end, and tries the
previous one. :mod:`malletrain.training.objects` loads it into the script's objects.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import report, shard_files, snapshot_file
from malletrain.training.snapshot_file import SnapshotError

SHARED_FOLDER_WAIT_S = 30.0
"""Maximum time for which a rank waits to see rank 0's snapshot in the shared folder, seconds."""
Check = Callable[[dict[str, Any], str], None]
"""Function of (payload, path) that raises SnapshotError if the snapshot must not be used."""


def newest(
    path: str, keep: int, check: Check, bad: Mapping[str, str] | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Find the newest good snapshot at ``path``.

    Args:
        path: path of the newest snapshot.
        keep: maximum number of earlier snapshots beside it.
        check: see :data:`Check`.
        bad: message by file name, for snapshots that are known to be damaged.

    Returns:
        (payload, file), or (None, "") if there is no snapshot yet.

    Raises:
        SnapshotError: there are snapshots and none is good, or the newest good one must not be
            used.
    """
    problems: list[str] = []
    names = snapshot_file.candidates(path, keep)
    open_epoch_ids = snapshot_file.in_open_epoch(path)
    passed_over: tuple[dict[str, Any], str] | None = None
    for name in names:
        if bad and name in bad:
            problems.append(bad[name])
            continue
        try:
            payload = snapshot_file.read(name)
            shard_files.check(payload, name)
        except (SnapshotError, OSError) as error:
            problems.append(str(error))
            continue
        check(payload, name)
        if payload.get("id") in open_epoch_ids:
            passed_over = passed_over or (payload, name)
            continue
        if passed_over:
            report.tell(
                f"{passed_over[1]} was saved in the code after the steps of an epoch, which did "
                f"not run to its end. Going on from {name}, saved {clock(payload.get('time'))}."
            )
        elif problems or name != path:
            why = " ".join(problems) or f"{path} is absent."
            report.tell(f"{why} Going on from {name}, saved {clock(payload.get('time'))}.")
        return payload, name
    if passed_over and keep and not problems:
        report.tell(
            f"{passed_over[1]} was saved in the code after the steps of the first epoch, which did "
            "not run to its end. There is no earlier snapshot: the training begins anew."
        )
        return None, ""
    if passed_over:
        return passed_over
    if problems:
        raise SnapshotError(
            f"{' '.join(problems)} No good snapshot is left. To train anew from the "
            "beginning, move "
            f"{'it' if len(names) == 1 else 'them'} away or give Snapshot another path."
        )
    return None, ""


def newest_on_all_ranks(
    path: str,
    keep: int,
    check: Check,
    store: Any,
    key: str,
    rank: int,
    bad: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any] | None, str]:
    """Find the newest good snapshot on all ranks: rank 0 chooses it, and the other ranks load the
    same one. They wait for it, because network file systems show a new file late on some nodes.

    Args:
        path, keep, bad: as for :func:`newest`.
        check: see :data:`Check`; only rank 0 calls it.
        store: key-value store of the process group.
        key: unique name of this restore in the group.
        rank: rank of this process.

    Returns:
        As :func:`newest`.

    Raises:
        SnapshotError: the error of rank 0, on all ranks; or this rank cannot see the snapshot that
            rank 0 chose.
    """
    if rank == 0:
        answer = "!The worker of rank 0 failed while it restored the snapshot; its log says why."
        try:
            payload, name = newest(path, keep, check, bad)
            answer = "" if payload is None else f"={payload['id']}"
        except SnapshotError as error:
            answer = f"!{error}"
            raise
        finally:
            store.set(key, answer or "-")
        return payload, name
    answer = store.get(key).decode()
    if answer == "-":
        return None, ""
    if answer.startswith("!"):
        raise SnapshotError(answer[1:])
    deadline = time.monotonic() + SHARED_FOLDER_WAIT_S
    while True:
        for name in snapshot_file.candidates(path, keep):
            try:
                payload = snapshot_file.read(name, check=False)
                if payload["id"] != answer[1:]:
                    continue
                shard_files.check(payload, name)
            except (SnapshotError, OSError):
                continue
            return payload, name
        if time.monotonic() > deadline:
            raise SnapshotError(
                f"Rank {rank} cannot see the snapshot that rank 0 restored from {path} "
                f"({SHARED_FOLDER_WAIT_S:.0f} s waited). "
                "Give Snapshot a path in a folder that all nodes share."
            )
        time.sleep(0.2)


def group_store() -> Any:
    """Return the key-value store of the default process group, which works with every backend; None
    without a group.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    get: Callable[[], Any] | None = getattr(
        distributed.distributed_c10d, "_get_default_store", None
    )
    return get() if get is not None else None


def clock(when: float | None) -> str:
    """Return a time in seconds since the epoch as text, in local time."""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "at an unknown time"
    )
