"""Which of the snapshots on disk is restored, the same one on all ranks.

Decides that a damaged one is passed over for the one before, and so is one that was saved in the
code after an epoch's steps when that code did not run to its end; that rank 0 chooses and that the
others load what it chose. It loads nothing into the script's objects
(:mod:`malletrain.training.objects`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from malletrain.training import report, shard_files, snapshot_file
from malletrain.training.snapshot_file import SnapshotError

SHARED_FOLDER_WAIT_S = 30.0
Check = Callable[[dict[str, Any], str], None]
"""(payload, path): raises SnapshotError for one that must not be used."""


def newest(
    path: str, keep: int, check: Check, bad: Mapping[str, str] | None = None
) -> tuple[dict[str, Any] | None, str]:
    """(payload, file) of the newest good snapshot at ``path``; (None, "") when there is none yet.

    Args:
        path: of the newest snapshot.
        keep: how many earlier ones may lie beside it.
        check: see :data:`Check`.
        bad: those that are known to be damaged, and what was found.

    Raises:
        SnapshotError: when there are some and none is good, or the newest good one must not be
            used.
    """
    problems: list[str] = []
    names = snapshot_file.candidates(path, keep)
    marked = snapshot_file.in_open_epoch(path)
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
        if payload.get("id") in marked:
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
            "not run to its end. There is none before: the training begins anew."
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


def agreed(
    path: str,
    keep: int,
    check: Check,
    store: Any,
    key: str,
    rank: int,
    bad: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any] | None, str]:
    """As :func:`newest`, on all ranks: rank 0 chooses and says which; the others load that one.
    Folders of network file systems show a new file late on some nodes.

    Args:
        path, keep, bad: as there.
        check: see :data:`Check`; rank 0 asks it.
        store: the process group's key-value store.
        key: names this restore among all of the group.
        rank: of this process.

    Raises:
        SnapshotError: what rank 0 met, on all ranks alike; or this rank cannot see the snapshot
            that rank 0 chose.
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
    """The key-value store of the default process group, which works with every backend; None when
    there is no group.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    get: Callable[[], Any] | None = getattr(
        distributed.distributed_c10d, "_get_default_store", None
    )
    return get() if get is not None else None


def clock(when: float | None) -> str:
    """A time of the epoch as text."""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "at an unknown time"
    )
