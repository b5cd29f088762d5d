"""Snapshots of a training run: taken every so often and on demand, restored at any number of ranks.

Decides when a snapshot is taken, what is in it, and what happens when it cannot be written:
training goes on. It does not decide how it reaches the disk
(:mod:`malletrain.training.snapshot_file`). torch is imported when a snapshot is saved or restored,
not before.

Rank 0 alone writes. In data-parallel training its state at its own step boundary is the state of
all: parameters and optimizer are identical on every rank, and the sampler's position is global.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.worker_channel import Capable, DrainDone, SnapshotTaken
from malletrain.training import choice, owner, report, rng, snapshot_file
from malletrain.training import objects as parts
from malletrain.training.drain import wait_to_be_stopped
from malletrain.training.ranks import rank_and_world
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.steadfast import bear_one_sigterm

__all__ = ["Snapshot", "SnapshotError"]

_RETRY_S = 60.0

# What the person at the keyboard can do, by the disk's reason.
_ADVICE = {
    errno.ENOSPC: "Free space there, or give Snapshot another path.",
    errno.EDQUOT: "Your quota is used up: free space, or give Snapshot another path.",
    errno.EFBIG: "A limit on file sizes is in force (ulimit -f): raise it, or give Snapshot "
    "another path.",
    errno.EROFS: "Give Snapshot a path on a file system that can be written.",
    errno.EACCES: "Give Snapshot a path in a folder that you may write to.",
    errno.EPERM: "Give Snapshot a path in a folder that you may write to.",
    errno.ENOTDIR: "A part of the path is a file: give Snapshot a path inside a folder.",
    errno.EEXIST: "A part of the path is a file: give Snapshot a path inside a folder.",
}


@dataclass(frozen=True)
class Taken:
    """A state set aside to be written."""

    payload: dict[str, Any]
    """What goes to the disk."""
    totals: tuple[float, int]
    """(samples, steps) reported by then."""


class Snapshot:
    """The state of a training run on disk.

    Args:
        path: of the newest snapshot, in a folder that all nodes share. The one before stays beside
            it as ``path.prev``. Without it a folder of the run's own below ``malletrain-snapshots``
            in the working folder, by job, script and arguments; the log says which.
        every_s: seconds between snapshots taken by :meth:`step`; ``math.inf`` for on demand only.
        keep: how many earlier snapshots stay (``.prev``, ``.prev2``, …).
        objects: what to save, by name: anything with ``state_dict()`` and ``load_state_dict()``
            (modules, optimizers, schedulers, GradScaler, ElasticSampler), or a plain dict of
            numbers, texts and tensors, which is updated in place on restore. Modules wrapped by
            DDP, DataParallel or torch.compile are saved as if they were not, so that the state
            loads into any wrapping. The states of the random number generators of rank 0 (torch on
            CPU and CUDA, python, numpy where it is imported) come along by themselves.

    Raises:
        TypeError: for an object that cannot be saved this way, such as a sharded module, whose
            parts rank 0 alone does not have.
        ValueError: for a negative ``every_s`` or ``keep``, or no object at all.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every_s: float = 60.0,
        keep: int = 1,
        **objects: Any,
    ) -> None:
        if not every_s >= 0:
            raise ValueError(
                f"Snapshot: every_s must be a number of seconds from 0, not {every_s!r}."
            )
        if keep < 0:
            raise ValueError(f"Snapshot: keep must be a number from 0, not {keep!r}.")
        if not objects:
            raise ValueError(
                "Snapshot: nothing to save; pass objects by name, e.g. Snapshot(path, "
                "model=model, optimizer=optimizer)."
            )
        for name, value in objects.items():
            parts.check_object("Snapshot", name, value)
        self._owner = owner.this_run()
        if path is None:
            path = owner.own_path(self._owner)
            if rank_and_world()[0] == 0:
                report.tell(f"Snapshots of this run go to {path}.", once=f"path {path}")
        self.path = os.path.abspath(os.fspath(path))
        self.every_s = every_s
        self.keep = keep
        self._objects = objects
        self._flags: FlagsReader | None = report.open_flags()
        self._served = 0
        self._due = time.monotonic() + every_s
        self._known: tuple[int, int, int] | None = None
        self._newest_is_bad = False
        self._causes: set[str] = set()
        self._saved_at: float | None = None
        self._restores = 0
        self._first_save = True
        self._announced = False

    # --- restore ---

    def restore(self, resume_from: str | os.PathLike[str] | None = None) -> bool:
        """Load the newest good snapshot; call it on every rank, after ``init_process_group`` and
        before the training loop.

        A damaged newest snapshot is passed over for the one before, and the user told. Every rank
        loads the one that rank 0 chose.

        Args:
            resume_from: another job, or the path of a snapshot, that this run may begin from; by
                default what ``malletrain submit --resume-from`` said. The run's own snapshot comes
                first.

        Returns:
            False when there is no snapshot yet (a new run), True when the objects now are as they
            were when it was saved.

        Raises:
            SnapshotError: when snapshots exist but none is good (starting anew silently would throw
                the run away), when it belongs to another job that was not asked for, when a state
                does not fit its object, or when this rank cannot see the snapshot that rank 0
                restored.
        """
        report.mark("restoring")
        wanted = owner.asked_for(resume_from)
        payload, name = self._choose(self.path, wanted)
        if payload is None and wanted:
            payload, name = self._choose(owner.path_of(wanted), wanted)
        if payload is not None:
            mine = name == self.path
            self._newest_is_bad = not mine and name.startswith(self.path)
            self._known = snapshot_file.signature(self.path) if mine else None
            parts.put_back(self._objects, payload, name)
            self._saved_at = payload.get("time")
        self._due = time.monotonic() + self.every_s
        report.mark("restored")
        return payload is not None

    def _choose(self, path: str, wanted: str) -> tuple[dict[str, Any] | None, str]:
        """(payload, file) of the newest snapshot at ``path`` that may be used, the same on all
        ranks.
        """

        def check(payload: dict[str, Any], name: str) -> None:
            owner.check(payload, name, self._owner, wanted)

        rank, world = rank_and_world()
        store = choice.group_store() if world > 1 else None
        if store is None:
            return choice.newest(path, self.keep, check)
        self._restores += 1
        label = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
        key = f"malletrain/snapshot/{report.generation()}/{label}/{self._restores}"
        return choice.agreed(path, self.keep, check, store, key, rank)

    # --- save ---

    def save(self) -> bool:
        """Take a snapshot now. Rank 0 writes; on other ranks nothing happens. Never raises into
        training.

        Returns:
            True when this process wrote it and it is on disk. When it cannot be written the last
            good one stays, the user is told once per cause, and :meth:`step` tries again.
        """
        return rank_and_world()[0] == 0 and self._save() is None

    def _save(self, taken: Taken | None = None) -> str | None:
        """Save ``taken``, or the state of this moment; returns None, or the sentence why it
        failed.
        """
        report.flush()
        samples, steps = report.totals() if taken is None else taken.totals
        started = time.monotonic()
        size = 0
        cause = problem = None
        try:
            if self._first_save:
                snapshot_file.remove_leftovers(self.path)
                self._first_save = False
            self._refuse_if_overtaken()
            # A damaged newest file is replaced and not kept: it would push the last good one out.
            payload = taken.payload if taken else self._payload()
            size = snapshot_file.write(
                self.path, payload, self.keep, keep_newest=not self._newest_is_bad
            )
            self._known = snapshot_file.signature(self.path)
            self._newest_is_bad = False
        except OSError as error:
            cause = f"errno {error.errno}"
            problem = f"{error.strerror or error}. {_ADVICE.get(error.errno or 0, '')}".strip()
        # a state_dict that fails, memory, an object that cannot be pickled: none may stop the
        # training
        except Exception as error:
            cause = type(error).__name__ + str(error)[:80]
            problem = (
                str(error)
                if isinstance(error, SnapshotError)
                else f"{type(error).__name__}: {error}."
            )
        finished = time.monotonic()
        seconds = finished - started
        if cause is None or problem is None:
            if self._causes:
                report.tell(f"Snapshots to {self.path} work again.")
                self._causes.clear()
            self._due = finished + self.every_s
            self._saved_at = time.time()
            report.send(
                SnapshotTaken,
                saved=True,
                path=self.path,
                bytes=size,
                seconds=seconds,
                samples=samples,
                steps=steps,
            )
            return None
        wait = min(self.every_s, _RETRY_S)
        self._due = finished + wait
        last = (
            f"The last good one, saved {choice.clock(self._saved_at)}, stays"
            if self._saved_at
            else "There is none yet"
        )
        sentence = (
            f"Snapshot to {self.path} failed: {problem} {last}; training goes on and the "
            f"next attempt is in {wait:.0f} s."
        )
        if cause not in self._causes:
            self._causes.add(cause)
            report.tell(sentence)
            report.send(
                SnapshotTaken,
                saved=False,
                path=self.path,
                bytes=0,
                seconds=seconds,
                samples=samples,
                steps=steps,
                sentence=sentence,
            )
        return sentence

    def _refuse_if_overtaken(self) -> None:
        """Neither another run that names the same path, nor a worker left over from an earlier
        round (its launcher was killed), overwrites what is there.
        """
        now = snapshot_file.signature(self.path)
        if now is None or now == self._known:
            return
        try:
            there = snapshot_file.read(self.path, check=False)
        except (SnapshotError, OSError):
            return
        theirs = owner.of(there)
        if theirs and theirs != self._owner and (theirs.job or self._owner.job):
            raise SnapshotError(
                f"It is that of {theirs}, and is not overwritten. Give each run a path of its own, "
                "or none at all."
            )
        round_there = int(there.get("generation", 0))
        if round_there > report.generation():
            raise SnapshotError(
                f"Round {round_there} of this job has saved there, and this process belongs to "
                f"round {report.generation()}: it is left over "
                "and its work is not kept."
            )
        self._known = now

    def _payload(self) -> dict[str, Any]:
        return {
            "malletrain_snapshot": snapshot_file.FORMAT,
            "id": uuid.uuid4().hex,
            "owner": owner.named(self._owner),
            "generation": report.generation(),
            "time": time.time(),
            "world_size": rank_and_world()[1],
            "objects": parts.states(self._objects),
            "rng": rng.state(),
        }

    # --- the training loop ---

    def step(self) -> None:
        """Call it at the end of each training step, on every rank, after ``advance()`` and
        ``report()``. Never raises; costs under 1 µs when nothing is due.

        Rank 0 saves when ``every_s`` has passed, and when the agent asks for it because the job is
        about to be rescaled or its node is wanted. After such a snapshot it waits (60 s at
        most), because the launcher is about to stop it and what it would do now would be lost; the
        other ranks wait for it in their next collective.
        """
        flags = self._flags
        if flags is not None:
            number = flags.drain_request()
            if number and number != self._served:
                self._serve(number)
                return
        if time.monotonic() >= self._due or not self._announced:
            self._announce_or_save()

    def _announce_or_save(self) -> None:
        writes = rank_and_world()[0] == 0
        if not self._announced:
            self._announced = True
            if self._flags is not None:
                bear_one_sigterm()
                if writes:
                    report.send(Capable)
            count = parts.parameters(self._objects) if writes else 0
            if count:
                report.describe(parameters=count)
        if time.monotonic() >= self._due:
            if writes:
                self._save()
            else:
                self._due = time.monotonic() + self.every_s

    def _serve(self, number: int) -> None:
        self._served = number
        report.flush()
        if rank_and_world()[0] != 0:
            return
        sentence = self._save()
        if sentence is not None:
            report.send(DrainDone, number=number, saved=False, sentence=sentence)
            return
        assert self._flags is not None
        self._served = wait_to_be_stopped(self._flags, number)
        self._due = time.monotonic() + self.every_s
