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
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from malletrain.protocol.worker_channel import Capable, Drained, FlagsReader, SnapshotTaken
from malletrain.training import report, rng, snapshot_file
from malletrain.training.drain import stand_still
from malletrain.training.sampler import rank_and_world
from malletrain.training.snapshot_file import SnapshotError

__all__ = ["Snapshot", "SnapshotError"]

STAND_STILL_S = 60.0
SHARED_FOLDER_WAIT_S = 30.0
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
    """A state set aside to be written: what goes to the disk, and (samples, steps) reported by
    then.
    """

    payload: dict[str, Any]
    totals: tuple[float, int]


class Snapshot:
    """The state of a training run on disk.

    Args:
        path: of the newest snapshot, in a folder that all nodes share. The one before stays beside
            it as ``path.prev``.
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
        self, path: str | os.PathLike[str], every_s: float = 60.0, keep: int = 1, **objects: Any
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
            check_object("Snapshot", name, value)
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

    def restore(self) -> bool:
        """Load the newest good snapshot; call it on every rank, after ``init_process_group`` and
        before the training loop.

        Returns:
            False when there is no snapshot yet (a new run), True when the objects now are as they
            were when it was saved.

        A damaged newest snapshot is passed over for the one before, and the user told. Every rank
        loads the one that rank 0 chose.

        Raises:
            SnapshotError: when snapshots exist but none is good (starting anew silently would throw
                the run away), when a state does not fit its object, or when this rank cannot see
                the snapshot that rank 0 restored.
        """
        report.mark("restoring")
        rank, world = rank_and_world()
        store = _group_store() if world > 1 else None
        if store is None:
            payload, name = self._newest()
        else:
            payload, name = self._agreed(store, rank)
        if payload is not None:
            self._newest_is_bad = name != self.path
            self._known = None if self._newest_is_bad else snapshot_file.signature(self.path)
            self._load(payload, name)
            self._saved_at = payload.get("time")
        self._due = time.monotonic() + self.every_s
        report.mark("restored")
        return payload is not None

    def _newest(self) -> tuple[dict[str, Any] | None, str]:
        problems: list[str] = []
        names = snapshot_file.candidates(self.path, self.keep)
        for name in names:
            try:
                payload = snapshot_file.read(name)
            except (SnapshotError, OSError) as error:
                problems.append(str(error))
                continue
            if problems:
                report.tell(
                    f"{' '.join(problems)} Going on from {name}, saved "
                    f"{_clock(payload.get('time'))}."
                )
            elif name != self.path:
                report.tell(
                    f"{self.path} is absent. Going on from {name}, saved "
                    f"{_clock(payload.get('time'))}."
                )
            return payload, name
        if problems:
            raise SnapshotError(
                f"{' '.join(problems)} No good snapshot is left. To train anew from the "
                "beginning, move "
                f"{'it' if len(names) == 1 else 'them'} away or give Snapshot another path."
            )
        return None, ""

    def _agreed(self, store: Any, rank: int) -> tuple[dict[str, Any] | None, str]:
        """Rank 0 chooses and says which; the others load that one. Folders of network file systems
        show a new file late on some nodes.
        """
        self._restores += 1
        label = hashlib.sha256(self.path.encode(errors="surrogateescape")).hexdigest()[:16]
        key = f"malletrain/snapshot/{report.generation()}/{label}/{self._restores}"
        if rank == 0:
            verdict = (
                "!The worker of rank 0 failed while it restored the snapshot; its log says why."
            )
            try:
                payload, name = self._newest()
                verdict = "" if payload is None else f"={payload['id']}"
            except SnapshotError as error:
                verdict = f"!{error}"
                raise
            finally:
                store.set(key, verdict or "-")
            return payload, name
        verdict = store.get(key).decode()
        if verdict == "-":
            return None, ""
        if verdict.startswith("!"):
            raise SnapshotError(verdict[1:])
        deadline = time.monotonic() + SHARED_FOLDER_WAIT_S
        while True:
            for name in snapshot_file.candidates(self.path, self.keep):
                try:
                    payload = snapshot_file.read(name, check=False)
                except (SnapshotError, OSError):
                    continue
                if payload["id"] == verdict[1:]:
                    return payload, name
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"Rank {rank} cannot see the snapshot that rank 0 restored from {self.path} "
                    f"({SHARED_FOLDER_WAIT_S:.0f} s waited). "
                    "Give Snapshot a path in a folder that all nodes share."
                )
            time.sleep(0.2)

    def _load(self, payload: dict[str, Any], name: str) -> None:
        saved = payload["objects"]
        for key, value in self._objects.items():
            if key not in saved:
                report.tell(
                    f"Snapshot {name} holds nothing called {key!r}; it starts as the script "
                    "made it."
                )
                continue
            target = unwrapped(value)
            try:
                if isinstance(target, dict):
                    target.update(saved[key])
                else:
                    target.load_state_dict(saved[key])
            except (
                RuntimeError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                IndexError,
            ) as error:
                reason = " ".join(str(error).split())  # torch writes several lines
                raise SnapshotError(
                    f"The state of {key!r} in snapshot {name} does not fit the script's "
                    f"{type(target).__name__}: {reason} "
                    "If the script changed on purpose, give Snapshot another path."
                ) from error
        for key in saved:
            if key not in self._objects:
                report.tell(
                    f"Snapshot {name} also holds {key!r}, which this script does not use; it is "
                    "left out of later snapshots."
                )
        rng.load(payload.get("rng", {}))

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
            f"The last good one, saved {_clock(self._saved_at)}, stays"
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
        """A worker left over from an earlier round (its launcher was killed) must not overwrite the
        snapshots of the round after it.
        """
        now = snapshot_file.signature(self.path)
        if now is None or now == self._known:
            return
        try:
            theirs = int(snapshot_file.read(self.path, check=False).get("generation", 0))
        except (SnapshotError, OSError):
            return
        if theirs > report.generation():
            raise SnapshotError(
                f"Round {theirs} of this job has saved there, and this process belongs to round "
                f"{report.generation()}: it is left over "
                "and its work is not kept."
            )
        self._known = now

    def _payload(self) -> dict[str, Any]:
        states: dict[str, Any] = {}
        for name, value in self._objects.items():
            target = unwrapped(value)
            states[name] = dict(target) if isinstance(target, dict) else target.state_dict()
        return {
            "malletrain_snapshot": snapshot_file.FORMAT,
            "id": uuid.uuid4().hex,
            "generation": report.generation(),
            "time": time.time(),
            "world_size": rank_and_world()[1],
            "objects": states,
            "rng": rng.state(),
        }

    # --- the training loop ---

    def step(self) -> None:
        """Call it at the end of each training step, on every rank, after ``advance()`` and
        ``report()``. Never raises; costs under 1 µs when nothing is due.

        Rank 0 saves when ``every_s`` has passed, and when the agent asks for it because the job is
        about to be rescaled or its node is wanted. After such a snapshot it stands still (60 s at
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
            if writes and self._flags is not None:
                report.send(Capable)
            if writes:
                self._describe()
        if time.monotonic() >= self._due:
            if writes:
                self._save()
            else:
                self._due = time.monotonic() + self.every_s

    def _describe(self) -> None:
        modules = [
            value
            for value in map(unwrapped, self._objects.values())
            if callable(getattr(value, "parameters", None))
        ]
        try:
            count = sum(
                int(parameter.numel()) for module in modules for parameter in module.parameters()
            )
        except Exception:  # something with parameters() that are not tensors
            return
        if count:
            report.describe(parameters=count)

    def _serve(self, number: int) -> None:
        self._served = number
        report.flush()
        if rank_and_world()[0] != 0:
            return
        sentence = self._save()
        if sentence is not None:
            report.send(Drained, number=number, saved=False, sentence=sentence)
            return
        self._stand_still(number)

    def _stand_still(self, number: int) -> None:
        assert self._flags is not None
        self._served = stand_still(self._flags, number, STAND_STILL_S)
        self._due = time.monotonic() + self.every_s


_NOT_SAVABLE = {
    "FullyShardedDataParallel": "its state is spread over the ranks (use "
    "torch.distributed.checkpoint)",
    "FSDPModule": "its state is spread over the ranks (use torch.distributed.checkpoint)",
    "ZeroRedundancyOptimizer": "its state is spread over the ranks",
}


def check_object(owner: str, name: str, value: Any) -> None:
    """Raises TypeError when ``value`` is nothing whose state can be saved; ``owner`` is who asks,
    for the message.
    """
    for cls in type(value).__mro__:
        if cls.__name__ in _NOT_SAVABLE:
            raise TypeError(
                f"{owner}: {name} is a {cls.__name__}, which rank 0 cannot save alone: "
                f"{_NOT_SAVABLE[cls.__name__]}."
            )
    if isinstance(value, dict):
        return
    if not (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    ):
        raise TypeError(
            f"{owner}: {name} is a {type(value).__name__} without state_dict() and "
            "load_state_dict(). Pass objects that have them, "
            "or a dict of plain values."
        )


def unwrapped(value: Any) -> Any:
    """The module inside DDP, DataParallel and torch.compile, in whatever order they were
    applied.
    """
    while True:
        names = {cls.__name__ for cls in type(value).__mro__}
        if names & {"DistributedDataParallel", "DataParallel"}:
            value = value.module
        elif "OptimizedModule" in names:
            value = value._orig_mod
        else:
            return value


def _group_store() -> Any:
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


def _clock(when: float | None) -> str:
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else "at an unknown time"
    )
