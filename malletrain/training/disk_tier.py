"""Reads and writes the snapshots of one run on disk.

Decides which snapshot is restored, the same one on all ranks: rank 0 chooses, and the other ranks
load the same snapshot. It skips a damaged snapshot, and one that was saved in the code after an
epoch's steps if that code did not run to its end, and tries the previous one.

Overwrites neither the snapshot of another run nor that of a later round.
:mod:`malletrain.training.snapshot_file` decides how bytes reach the disk, and
:mod:`malletrain.training.snapshot` when a snapshot is taken.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from malletrain.training import owner, report, shard_files, sharded_snapshot, snapshot_file
from malletrain.training.ranks import rank_and_world
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import DamagedSnapshotError, SnapshotError

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
        moment = payload.get("time")
        if passed_over:
            report.tell(
                f"{passed_over[1]} was saved in the code after the steps of an epoch, which did "
                f"not run to its end. Going on from {name}, saved {local_time_text(moment)}."
            )
        elif problems or name != path:
            why = " ".join(problems) or f"{path} is absent."
            report.tell(f"{why} Going on from {name}, saved {local_time_text(moment)}.")
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


def local_time_text(when: float | None) -> str:
    """Return a time in seconds since the epoch as text, in local time."""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "at an unknown time"
    )


AllRanks = Callable[[], Team]
_indices: dict[str, int] = {}
_in_open_epoch: set[str] = set()
"""Paths whose newest snapshot this process took in the code after an epoch's steps, if that code
may still be running.
"""


def snapshot_index(path: str) -> int:
    """Return the index of the Snapshot object at ``path`` among those of this script. All ranks
    create them in the same order, while their paths may differ.
    """
    return _indices.setdefault(path, len(_indices))


class DiskTier:
    """The snapshots of one run on disk.

    Args:
        path: path of the newest snapshot.
        keep: number of earlier snapshots to keep.
        run: the run.
        all_ranks: returns the team of all ranks.
    """

    def __init__(self, path: str, keep: int, run: owner.RunIdentity, all_ranks: AllRanks) -> None:
        self.path = path
        self.keep = keep
        self._run = run
        self._all_ranks = all_ranks
        self._signature: tuple[int, int, int] | None = None
        self._replace_newest = False
        """True if the next snapshot replaces the newest one, which is then not kept as an earlier
        one.
        """
        self._bad: dict[str, str] = {}
        """Message by file name, for files that this restore found damaged."""
        self._index = snapshot_index(path)
        self._restores = (0, 0)
        """Generation of a round, and number of restores in it before the current one."""
        self._first_save = True
        if path in _in_open_epoch:  # the script has started another training
            _in_open_epoch.discard(path)
            snapshot_file.close_epoch(path)
        self.in_open_epoch = False
        """True if this process wrote the newest snapshot in the code after an epoch's steps."""

    # --- read ---

    def restore(
        self, requested: str, load: Callable[[dict[str, Any], str], None]
    ) -> dict[str, Any] | None:
        """Restore the newest good snapshot, the same one on all ranks. If it turns out to be
        damaged, the previous one is restored.

        Args:
            requested: job or path whose snapshot is used if the run has none of its own
                (:func:`malletrain.training.owner.resume_source`).
            load: function of (payload, file) that loads the snapshot into the objects.

        Returns:
            The snapshot; None if there is none.

        Raises:
            SnapshotError: see :meth:`malletrain.Snapshot.restore`.
        """
        self._bad = {}
        while True:
            payload, name = self._choose(self.path, requested)
            if payload is None and requested:
                payload, name = self._choose(
                    owner.path_of(requested, daemon=self._run.daemon), requested
                )
            if payload is None:
                self._replace_newest = os.path.exists(self.path)
                return None
            self._note_restored(name)
            try:
                load(payload, name)
            except DamagedSnapshotError as error:  # on all ranks alike
                self._bad[name] = str(error)
                continue
            return payload

    def _note_restored(self, name: str) -> None:
        is_own = name == self.path
        self._replace_newest = not is_own and os.path.exists(self.path)
        self._signature = snapshot_file.signature(self.path) if is_own else None

    def allow_overwriting_resume_source(self, requested: str) -> None:
        """Allow the next save to overwrite the snapshot on disk if it is the one from which the run
        may have started (``requested``), as if this process had restored it. Called when the
        objects were restored from memory.
        """
        on_disk = snapshot_file.peek(self.path)
        recorded = owner.owner_of(on_disk) if on_disk is not None else None
        if recorded and owner.is_resume_source(recorded, self.path, requested, self._run):
            self._signature = snapshot_file.signature(self.path)

    def _choose(self, path: str, requested: str) -> tuple[dict[str, Any] | None, str]:
        def check(payload: dict[str, Any], name: str) -> None:
            owner.check(payload, name, self._run, requested)

        while True:
            payload, name = self._newest(path, check)
            if payload is None or not payload.get(shard_files.KEY):
                return payload, name
            problem = sharded_snapshot.problem(payload, name, self._all_ranks())
            if not problem:
                return payload, name
            self._bad[name] = problem

    def _newest(self, path: str, check: Check) -> tuple[dict[str, Any] | None, str]:
        rank, world = rank_and_world()
        store = group_store() if world > 1 else None
        if store is None:
            return newest(path, self.keep, check, self._bad)
        source = "own" if path == self.path else "wanted"
        key = f"malletrain/snapshot/{self._next_key(source)}"
        return newest_on_all_ranks(path, self.keep, check, store, key, rank, self._bad)

    def _next_key(self, source: str) -> str:
        """Return a part of a key that is new in the group's store, and the same on all ranks."""
        generation, count = report.generation(), 0
        if self._restores[0] == generation:
            count = self._restores[1] + 1
        self._restores = (generation, count)
        return f"{generation}/{self._index}{source}/{count}"

    def from_rank_0(self, text: str) -> str:
        """Return on all ranks the ``text`` of rank 0. Called on every rank."""
        rank, world = rank_and_world()
        store = group_store() if world > 1 else None
        if store is None:
            return text
        key = f"malletrain/text/{self._next_key('rank 0')}"
        if rank == 0:
            store.set(key, text)
        return str(store.get(key).decode())

    # --- write ---

    def write(self, payload: dict[str, Any], open_epoch: bool = False) -> int:
        """Write a snapshot that is not sharded to disk.

        Args:
            payload: the snapshot.
            open_epoch: whether the code after an epoch's steps is running. Until
                :meth:`close_epoch` a run then resumes from the previous snapshot.

        Returns:
            Its size, bytes.

        Raises:
            SnapshotError: the snapshot on disk must not be overwritten
                (:meth:`refuse_if_overtaken`).
            OSError: the disk's error.
        """
        return self._save(
            lambda keep_newest, first: snapshot_file.write(
                self.path, payload, self.keep, keep_newest, overtaken=first
            ),
            payload if open_epoch else None,
        )

    def copy(self, source: IO[bytes]) -> int:
        """Write the snapshot in the open file ``source`` to disk. Return its size, bytes; raises
        as :meth:`write`.
        """
        return self._save(
            lambda keep_newest, first: snapshot_file.write_copy(
                self.path, source, self.keep, keep_newest, overtaken=first
            )
        )

    def write_sharded(
        self,
        objects: Mapping[str, Any],
        facts: Callable[[], dict[str, Any]],
        open_epoch: bool = False,
    ) -> int:
        """Write a sharded snapshot of all ranks to disk. Collective.

        Args:
            objects: the script's objects, by name.
            facts: returns the snapshot's other entries; called on rank 0.
            open_epoch: as for :meth:`write`.

        Returns:
            The bytes that all ranks have written.
        """
        is_rank_0 = rank_and_world()[0] == 0
        if is_rank_0:
            self._begin_save()

        def header() -> dict[str, Any]:
            self.refuse_if_overtaken()
            facts_ = facts()
            if open_epoch:
                self._mark_open_epoch(facts_)
            return facts_

        size = sharded_snapshot.save(
            self.path,
            objects,
            header,
            self.keep,
            # Do not keep a damaged newest file: it would displace the last good one.
            not self._replace_newest,
            self._all_ranks(),
            overtaken=self._overtaken_check(),
        )
        self._finish_save(is_rank_0, open_epoch)
        return size

    def _mark_open_epoch(self, payload: Mapping[str, Any]) -> None:
        snapshot_file.mark_open_epoch(self.path, payload["id"])
        if self.in_open_epoch:  # a second snapshot in this code replaces the first
            self._replace_newest = True
        self.in_open_epoch = True
        _in_open_epoch.add(self.path)

    def close_epoch(self, complete: bool) -> None:
        """End the open epoch: the code after the epoch's steps, in which a snapshot was written,
        has run.

        Args:
            complete: whether nothing has changed since the snapshot was written. If not, a run
                resumes from the previous snapshot until the next one replaces this one.
        """
        if complete:
            snapshot_file.close_epoch(self.path)
        else:
            self._replace_newest = True
        self._leave_open_epoch()

    def _leave_open_epoch(self) -> None:
        self.in_open_epoch = False
        _in_open_epoch.discard(self.path)

    def _save(
        self,
        write: Callable[[bool, Callable[[], None] | None], int],
        in_open_epoch: Mapping[str, Any] | None = None,
    ) -> int:
        self._begin_save()
        self.refuse_if_overtaken()
        if in_open_epoch is not None:
            self._mark_open_epoch(in_open_epoch)
        size = write(not self._replace_newest, self._overtaken_check())
        if os.path.isdir(self.path + shard_files.SUFFIX):
            shard_files.sweep(self.path, self.keep)
        self._finish_save(True, in_open_epoch is not None)
        return size

    def _begin_save(self) -> None:
        if self._first_save:
            snapshot_file.remove_leftovers(self.path)
        self._first_save = False

    def _finish_save(self, is_rank_0: bool, open_epoch: bool) -> None:
        if is_rank_0:
            self._signature = snapshot_file.signature(self.path)
            if not open_epoch:
                snapshot_file.close_epoch(self.path)
        self._replace_newest = False
        if not open_epoch:
            self._leave_open_epoch()

    def _overtaken_check(self) -> Callable[[], None] | None:
        """Return the function to call if another process writes the first snapshot first; None if
        there is one already.
        """
        return None if os.path.exists(self.path) else self.refuse_if_overtaken

    def refuse_if_overtaken(self) -> None:
        """Check that this process may overwrite the snapshot on disk. Another run with the same
        path may not, nor a worker that is left over from an earlier round (its launcher was
        killed).

        Raises:
            SnapshotError: it may not.
        """
        signature = snapshot_file.signature(self.path)
        if signature is None or signature == self._signature:
            return
        try:
            on_disk = snapshot_file.read(self.path, check=False)
        except (SnapshotError, OSError):
            return
        owner.refuse_to_overwrite(on_disk, self.path, self._run, report.generation())
        self._signature = signature
