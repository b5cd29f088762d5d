"""One run's snapshots on disk: the newest good one, and the next one in its place.

Decides which of them all ranks restore, and that neither another run's nor a later round's is
overwritten. How bytes reach the disk is :mod:`malletrain.training.snapshot_file`'s, when a snapshot
is taken :mod:`malletrain.training.snapshot`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import IO, Any

from malletrain.training import choice, owner, report, shard_files, sharded_snapshot, snapshot_file
from malletrain.training.ranks import rank_and_world
from malletrain.training.side_group import Team
from malletrain.training.snapshot_file import DamagedSnapshotError, SnapshotError

AllRanks = Callable[[], Team]
_numbers: dict[str, int] = {}
_in_open_epoch: set[str] = set()
"""Paths whose newest snapshot this process took in the code after an epoch's steps, which may still
be running.
"""


def number_of(path: str) -> int:
    """Which of the script's Snapshots the one at ``path`` is. All ranks make them in the same
    order, while their paths may differ.
    """
    return _numbers.setdefault(path, len(_numbers))


class DiskTier:
    """The snapshots of ``who`` at ``path``, of which ``keep`` earlier ones stay."""

    def __init__(self, path: str, keep: int, who: owner.Owner, all_ranks: AllRanks) -> None:
        self.path = path
        self.keep = keep
        self._owner = who
        self._all_ranks = all_ranks
        self._signature: tuple[int, int, int] | None = None
        self._newest_is_bad = False
        """It is replaced by the next one and not kept as an earlier one."""
        self._bad: dict[str, str] = {}
        """Files that this restore found damaged, and what of them."""
        self._number = number_of(path)
        self._restores = (0, 0)
        """A round, and how many there were in it."""
        self._first_save = True
        if path in _in_open_epoch:  # the script has gone on to another training
            _in_open_epoch.discard(path)
            snapshot_file.close_epoch(path)
        self.in_open_epoch = False
        """The newest was written by this process in the code after an epoch's steps."""

    # --- read ---

    def restore(
        self, requested: str, put_back: Callable[[dict[str, Any], str], None]
    ) -> dict[str, Any] | None:
        """Have ``put_back(payload, file)`` restore the newest good snapshot, the same one on all
        ranks: the run's own, else that of ``requested`` (see
        :func:`malletrain.training.owner.resume_source`). Where it finds that one damaged, it is the
        turn of the one before.

        Returns:
            The snapshot; None when there is none.

        Raises:
            SnapshotError: see :meth:`malletrain.Snapshot.restore`.
        """
        self._bad = {}
        while True:
            payload, name = self._choose(self.path, requested)
            if payload is None and requested:
                payload, name = self._choose(
                    owner.path_of(requested, daemon=self._owner.daemon), requested
                )
            if payload is None:
                self._newest_is_bad = os.path.exists(self.path)
                return None
            self._is_restored(name)
            try:
                put_back(payload, name)
            except DamagedSnapshotError as error:  # on all ranks alike
                self._bad[name] = str(error)
                continue
            return payload

    def _is_restored(self, name: str) -> None:
        mine = name == self.path
        self._newest_is_bad = not mine and os.path.exists(self.path)
        self._signature = snapshot_file.signature(self.path) if mine else None

    def is_behind(self, requested: str) -> None:
        """The objects are what another place had of this run. What the run may have begun from
        (``requested``) is overwritten as if it had been restored in this process.
        """
        there = snapshot_file.peek(self.path)
        theirs = owner.of(there) if there is not None else None
        if theirs and owner.is_resume_source(theirs, self.path, requested, self._owner):
            self._signature = snapshot_file.signature(self.path)

    def _choose(self, path: str, requested: str) -> tuple[dict[str, Any] | None, str]:
        def check(payload: dict[str, Any], name: str) -> None:
            owner.check(payload, name, self._owner, requested)

        while True:
            payload, name = self._newest(path, check)
            if payload is None or not payload.get(shard_files.KEY):
                return payload, name
            problem = sharded_snapshot.problem(payload, name, self._all_ranks())
            if not problem:
                return payload, name
            self._bad[name] = problem

    def _newest(self, path: str, check: choice.Check) -> tuple[dict[str, Any] | None, str]:
        rank, world = rank_and_world()
        store = choice.group_store() if world > 1 else None
        if store is None:
            return choice.newest(path, self.keep, check, self._bad)
        generation, count = report.generation(), 0
        if self._restores[0] == generation:
            count = self._restores[1] + 1
        self._restores = (generation, count)
        whose = "own" if path == self.path else "wanted"
        key = f"malletrain/snapshot/{generation}/{self._number}{whose}/{count}"
        return choice.agreed(path, self.keep, check, store, key, rank, self._bad)

    # --- write ---

    def write(self, payload: dict[str, Any], open_epoch: bool = False) -> int:
        """Put a whole snapshot on disk; returns its bytes. Raises what was met.

        Args:
            payload: the snapshot.
            open_epoch: The code after an epoch's steps is running: until :meth:`close_epoch` the
                snapshot before is resumed from.
        """
        return self._put(
            lambda keep_newest, first: snapshot_file.write(
                self.path, payload, self.keep, keep_newest, overtaken=first
            ),
            payload if open_epoch else None,
        )

    def copy(self, source: IO[bytes]) -> int:
        """Put on disk what ``source`` is a file of; returns its bytes. Raises what was met."""
        return self._put(
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
        """Put a snapshot of all ranks on disk. Collective; as :meth:`write`."""
        leads = rank_and_world()[0] == 0
        if leads:
            self._begin()

        def header() -> dict[str, Any]:
            self.refuse_if_overtaken()
            head = facts()
            if open_epoch:
                self._mark_open_epoch(head)
            return head

        size = sharded_snapshot.save(
            self.path,
            objects,
            header,
            self.keep,
            # A damaged newest file is replaced and not kept: it would push the last good one out.
            not self._newest_is_bad,
            self._all_ranks(),
            overtaken=self._if_first(),
        )
        self._done(leads, open_epoch)
        return size

    def _mark_open_epoch(self, payload: Mapping[str, Any]) -> None:
        snapshot_file.mark_open_epoch(self.path, payload["id"])
        if self.in_open_epoch:  # the second one in this code takes the place of the first
            self._newest_is_bad = True
        self.in_open_epoch = True
        _in_open_epoch.add(self.path)

    def close_epoch(self, complete: bool) -> None:
        """The code after the steps of an epoch, in which a snapshot was written, has run.

        Args:
            complete: Nothing has changed since it was written. If not, the snapshot before is
                resumed from until the next one is written in the place of this.
        """
        if complete:
            snapshot_file.close_epoch(self.path)
        else:
            self._newest_is_bad = True
        self._epoch_left()

    def _epoch_left(self) -> None:
        self.in_open_epoch = False
        _in_open_epoch.discard(self.path)

    def _put(
        self,
        write: Callable[[bool, Callable[[], None] | None], int],
        in_open_epoch: Mapping[str, Any] | None = None,
    ) -> int:
        self._begin()
        self.refuse_if_overtaken()
        if in_open_epoch is not None:
            self._mark_open_epoch(in_open_epoch)
        size = write(not self._newest_is_bad, self._if_first())
        if os.path.isdir(self.path + shard_files.SUFFIX):
            shard_files.sweep(self.path, self.keep)
        self._done(True, in_open_epoch is not None)
        return size

    def _begin(self) -> None:
        if self._first_save:
            snapshot_file.remove_leftovers(self.path)
        self._first_save = False

    def _done(self, leads: bool, open_epoch: bool) -> None:
        if leads:
            self._signature = snapshot_file.signature(self.path)
            if not open_epoch:
                snapshot_file.close_epoch(self.path)
        self._newest_is_bad = False
        if not open_epoch:
            self._epoch_left()

    def _if_first(self) -> Callable[[], None] | None:
        """What is asked when somebody is before this process with the first snapshot."""
        return None if os.path.exists(self.path) else self.refuse_if_overtaken

    def refuse_if_overtaken(self) -> None:
        """Neither another run that names the same path, nor a worker left over from an earlier
        round (its launcher was killed), overwrites what is there.

        Raises:
            SnapshotError: it would.
        """
        now = snapshot_file.signature(self.path)
        if now is None or now == self._signature:
            return
        try:
            there = snapshot_file.read(self.path, check=False)
        except (SnapshotError, OSError):
            return
        owner.refuse_to_overwrite(there, self.path, self._owner, report.generation())
        self._signature = now
