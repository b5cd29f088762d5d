"""Snapshots of a training run: taken periodically and on demand, restored at any number of ranks.

:class:`Snapshot` decides when a snapshot is taken and what it contains. If it cannot be written,
training continues. :mod:`malletrain.training.snapshot_file` decides how it reaches the disk. torch
is imported only when a snapshot is saved or restored.

In data-parallel training only rank 0 writes: parameters and optimizer are identical on every rank,
and the sampler's position is global, so the state of rank 0 at its own step boundary is the state
of all ranks. If a model is sharded (FSDP2, HSDP, tensor parallelism), all ranks write at a step
that they agree on: :mod:`malletrain.training.sharded_snapshot`.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from malletrain.protocol.flags import FlagsReader
from malletrain.protocol.worker_channel import Capable, DrainDone
from malletrain.training import (
    drain,
    owner,
    report,
    rng,
    shard_files,
    sharded_snapshot,
    snapshot_file,
)
from malletrain.training import objects as parts
from malletrain.training.batch_change import check_batch_norm
from malletrain.training.dict_tensors import DictTensors
from malletrain.training.disk_tier import DiskTier, snapshot_index
from malletrain.training.drain import wait_to_be_stopped
from malletrain.training.epoch_begin import EpochBegin
from malletrain.training.epochs import CountedEpochs
from malletrain.training.first_sigterm import ignore_first_sigterm
from malletrain.training.module_attributes import ModuleAttributes, ModuleNumbers
from malletrain.training.outcomes import Attempt, Outcomes
from malletrain.training.ranks import rank_and_world
from malletrain.training.replicas import DiskCopies, Replicas
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import LoopRates, ScheduledRates, Schedulers
from malletrain.training.sharded_state import check_gradients, is_sharded
from malletrain.training.side_group import Agreement, Team, new_side_group
from malletrain.training.snapshot_file import ForeignSnapshotError, SnapshotError
from malletrain.training.snapshot_pace import Pace
from malletrain.training.step_end import EpochEnds, StepEnd
from malletrain.training.step_times import counted_as
from malletrain.training.unsaved_objects import UnsavedAverages, UnsavedOptimizers

if TYPE_CHECKING:
    from malletrain.training.memory_snapshots import MemorySnapshots


__all__ = ["Snapshot", "SnapshotError"]

_RETRY_S = 60.0
"""Maximum time until the next attempt after a failed snapshot, seconds."""


@dataclass(frozen=True)
class Taken:
    """A copied state that is to be written."""

    payload: dict[str, Any]
    """Content of the snapshot."""
    totals: tuple[float, int]
    """(samples, steps) reported when the state was copied."""


class Snapshot:
    """The state of a training run on disk.

    Args:
        path: path of the newest snapshot, in a folder that all nodes share. The previous one is
            ``path.prev``. Default: a folder for this run below ``malletrain-snapshots`` in the
            working folder, named by job, script and arguments; the log prints it.
        every_s: maximum time between snapshots taken by :meth:`step`, seconds; ``math.inf`` for
            snapshots on demand only.
        keep: number of earlier snapshots to keep (``.prev``, ``.prev2``, …).
        memory: whether snapshots go to the memory of the job's nodes first. A rescale then needs no
            folder that all nodes share. A copy is written to disk every ``every_s`` seconds, in the
            background unless the model is sharded.
        replicate_every: number of steps between copies to another node, from which the run
            continues if a node is lost without notice; 0 for none. Implies ``memory``.
        objects: objects to save, by name: anything with ``state_dict()`` and ``load_state_dict()``
            (modules, optimizers, schedulers, GradScaler, ElasticSampler), or a plain dict of
            numbers, strings and tensors, which is updated in place on restore. Modules wrapped by
            DDP, DataParallel or torch.compile are saved without the wrapper, so that the state
            loads into any wrapper. Modules sharded by ``fully_shard`` or tensor parallelism, and
            their optimizers, are saved by all ranks, and load at any other number of ranks. The
            states of the random number generators (torch on CPU and CUDA, Python, and numpy if it
            is imported) are always included: those of rank 0, from which a rank that the script
            seeds differently derives its own, or those of each rank for a sharded model.

    Raises:
        TypeError: an object cannot be saved this way (FSDP1, DeepSpeed); the message says what to
            do.
        ValueError: ``every_s``, ``keep`` or ``replicate_every`` is negative, or there is no object.
    """

    _caller = "Snapshot"
    """Name of the class in scripts, for messages."""
    _refusal: type[Exception] = SnapshotError
    """Exception to raise if the run cannot continue as it was."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every_s: float = 60.0,
        keep: int = 1,
        memory: bool = False,
        replicate_every: int = 0,
        **objects: Any,
    ) -> None:
        if not every_s >= 0:
            raise ValueError(
                f"Snapshot: every_s must be a number of seconds from 0, not {every_s!r}."
            )
        if keep < 0:
            raise ValueError(f"Snapshot: keep must be a number from 0, not {keep!r}.")
        if replicate_every < 0:
            raise ValueError(
                f"Snapshot: replicate_every must be a number of steps from 0, not "
                f"{replicate_every!r}."
            )
        if not objects:
            raise ValueError(
                "Snapshot: nothing to save; pass objects by name, e.g. Snapshot(path, "
                "model=model, optimizer=optimizer)."
            )
        for name, value in objects.items():
            parts.check_object("Snapshot", name, value, sharded=True)
        self._run = owner.this_run()
        if path is None:
            path = owner.own_path(self._run)
            if rank_and_world()[0] == 0:
                report.tell(f"Snapshots of this run go to {path}.", once=f"path {path}")
        self.path = os.path.abspath(os.fspath(path))
        if rank_and_world()[0] == 0:
            owner.warn_of_dated_folder(self.path)
        self.every_s = every_s
        self.keep = keep
        self._objects = objects
        self._numbers = ModuleNumbers(objects)
        self._dict_tensors = DictTensors(objects)
        self._is_in_use = False
        """Whether the script has called :meth:`restore` or :meth:`save`. What it restores later may
        be a snapshot of this process.
        """
        self._flags: FlagsReader | None = report.open_flags()
        self._served_request = 0
        self._pace = Pace(every_s, self._flags)
        self._outcomes = Outcomes(self.path, objects, lambda: self.replicas.exist)
        self._disk = DiskTier(self.path, keep, self._run, self._all_ranks)
        self._copies = DiskCopies(self._disk, self._outcomes)
        self._memory: MemorySnapshots | None = None
        if memory or replicate_every:
            from malletrain.training.memory_snapshots import MemorySnapshots

            self._memory = MemorySnapshots(
                *(self.path, self._run, objects),
                *(self._facts, self._payload, self._all_ranks),
            )
        self.replicas = Replicas(replicate_every, self._memory)
        self._steps = 0
        self._counted = parts.all_epochs_of(objects)
        self._rates = LoopRates(objects, self._epochs)
        self._schedulers = Schedulers(self._caller, objects, self._refusal)
        self._scheduled_rates = ScheduledRates(objects)
        self._attributes = ModuleAttributes(self._caller, objects)
        self._averages = UnsavedAverages(self._caller, objects)
        # elastic.Run refuses the updates of others itself
        self._optimizers = UnsavedOptimizers(
            {} if self._caller != "Snapshot" else objects, SnapshotError
        )
        self._step_end = StepEnd(self._after_step)
        self._epoch_begin = EpochBegin(lambda: objects)
        self._epoch_ends = EpochEnds(snapshot_index(self.path))
        self._saved_fingerprint: str | None = None
        """:func:`malletrain.training.objects.after_epoch_fingerprint` at the time of the snapshot
        that the script saved in the code after an epoch's steps; None if it saved none.
        """
        for counted in self._counted:
            counted.on_epoch_closed(functools.partial(self._on_epoch_closed, counted))
            if self._caller == "Snapshot":  # elastic.Run knows the ends of its steps itself
                counted.watch_begin(self._epoch_begin)
                self._step_end.watch(counted)
                if isinstance(counted, ElasticSampler):
                    counted.check_sizes(functools.partial(check_batch_norm, objects))
        self._disk_saved_at = time.time()
        self._announced = False
        self._looked = False
        self._flush: drain.StepFlush | None = None
        self._team: Team | None = None
        self._agreement: Agreement | None = None
        self._request = 0

    # --- restore ---

    def restore(self, resume_from: str | os.PathLike[str] | None = None) -> bool:
        """Load the newest good snapshot. Call it on every rank, after ``init_process_group`` and
        before the training loop.

        If the newest snapshot is damaged, the user gets a message and the previous one is loaded.
        Every rank loads the snapshot that rank 0 chose. The next optimizer update raises
        SnapshotError if a scheduler that Snapshot was not given has made fewer steps than before.

        Args:
            resume_from: job id or snapshot path from which this run may start if it has no snapshot
                of its own. Default: the value of ``malletrain submit --resume-from``.

        Returns:
            True if the state was restored, False if there is no snapshot yet (a new run).

        Raises:
            SnapshotError: snapshots exist but none is good (a silent restart would discard the
                run); the snapshot belongs to another job that was not requested; a state does not
                fit its object; or this rank cannot see the snapshot that rank 0 restored.
        """
        report.mark("restoring")
        requested = owner.resume_source(resume_from)
        self._numbers.begin()
        self._attributes.begin()
        if self._caller == "Snapshot" and not (self._steps or self._is_in_use):
            self._dict_tensors.begin()
        self._is_in_use = True
        seeds = self._seeds()
        if self._memory is None:
            payload = self._from_disk(requested)
        else:
            payload = self._memory.restore(lambda: self._from_disk(requested))
        due_in = self.every_s
        if payload is not None:
            if seeds is not None:
                seeds.separate()
            self._steps = int(payload.get("steps", 0))
            self._numbers.restore(payload.get("numbers", {}))
            self._dict_tensors.restore(payload.get("dict_tensors", {}))
            self._scheduled_rates.restore(payload.get("scheduled_rates", {}))
            self._rates.restore(payload.get("rates", {}))
            self._epoch_begin.load_state_dict(payload.get("epoch_begin", {}))
            if seeds is not None:
                self._epoch_begin.separate(seeds)
            self._schedulers.resumed(payload.get("schedulers", {}))
            self._optimizers.resumed(payload.get("unsaved_optimizers", ()))
            in_memory = self._memory is not None and self._memory.newest is not None
            if in_memory:  # the snapshot on disk is older, or absent
                self._disk_saved_at = float(payload.get("disk_since", self._disk_saved_at))
                due_in -= time.time() - self._disk_saved_at
                self._disk.allow_overwriting_resume_source(requested)
            if not in_memory or os.path.exists(self.path):
                self._outcomes.saved_at = self._disk_saved_at if in_memory else payload.get("time")
        self._pace.begin(due_in, payload and payload.get("save_s"))
        report.mark("restored")
        return payload is not None

    def _seeds(self) -> rng.RankSeeds | None:
        # A sharded model's snapshot has the states of each rank; in live mode one rank restores.
        if is_sharded(self._objects) or self._caller != "Snapshot":
            return None
        return rng.RankSeeds(self._disk.from_rank_0)

    def _from_disk(self, requested: str) -> dict[str, Any] | None:
        return self._disk.restore(requested, self._put_back)

    def _put_back(self, payload: dict[str, Any], name: str) -> None:
        if payload.get(shard_files.KEY) or is_sharded(self._objects):
            sharded_snapshot.restore(self._objects, payload, name, self._all_ranks())
        else:
            parts.restore(self._objects, payload, name)

    def _all_ranks(self) -> Team:
        """Return the team of all ranks. Its first call is collective."""
        if self._team is None:
            self._team = Team(new_side_group())
        return self._team

    # --- save ---

    def save(self) -> bool:
        """Take a snapshot now. Call it on every rank. Only rank 0 writes, unless a model is
        sharded: then all ranks write. A disk error does not stop the training.

        In the code after the steps of an epoch, a run resumes from the previous snapshot until that
        code has run (with ``keep=0`` there is none).

        Returns:
            True if this process wrote the snapshot and it is on disk. If it cannot be written, the
            last good one stays, the user gets one message per cause, and :meth:`step` tries again.

        Raises:
            SnapshotError: another run has saved at this path, so no snapshot of this run would be
                kept.
        """
        self._is_in_use = True
        if self._epochs is not None and self._epochs.between_epochs:
            if self._saved_fingerprint is None:
                self._close_epoch_later()
            self._saved_fingerprint = parts.after_epoch_fingerprint(self._objects)
        return self._is_writer() and self._save() is None

    def _is_writer(self) -> bool:
        return rank_and_world()[0] == 0 or is_sharded(self._objects)

    @counted_as("snapshot")
    def _save(self, taken: Taken | None = None) -> str | None:
        """Save ``taken``, or the current state. Return None, or a sentence that says why it
        failed.
        """
        if taken is None:
            self._tell_attributes()
        report.flush()
        drain.flush()
        totals = report.totals() if taken is None else taken.totals
        is_rank_0 = rank_and_world()[0] == 0  # if several ranks save, one reports it
        started, size = time.monotonic(), 0
        failed: Exception | None = None
        try:
            size = self._write(taken)
        except ForeignSnapshotError:
            raise
        # no full disk, failing state_dict() or lack of memory may stop the training
        except Exception as error:
            failed = error
        finished = time.monotonic()
        attempt = Attempt(finished - started, *totals)
        if failed is None:
            self._pace.saved(finished - started)
            if is_rank_0:
                self._outcomes.report_saved(size, attempt)
            return None
        wait = min(self.every_s, _RETRY_S)
        self._pace.failed(wait)
        return self._outcomes.report_failed(failed, wait, attempt) if is_rank_0 else str(failed)

    def _tell_attributes(self) -> None:
        if rank_and_world()[0] == 0:
            self._attributes.tell_changed()
            self._averages.tell_unsaved()

    def _write(self, taken: Taken | None) -> int:
        """Write the snapshot to disk. Return its size in bytes; raises any error of the disk or
        the objects.
        """
        self._copies.wait()
        if taken is not None:
            return self._disk.write(taken.payload)
        open_epoch = self._epochs is not None and self._epochs.between_epochs
        if is_sharded(self._objects):
            return self._disk.write_sharded(self._objects, self._facts, open_epoch)
        return self._disk.write(self._payload(), open_epoch)

    def _payload(self) -> dict[str, Any]:
        return {
            **self._facts(),
            "objects": parts.states(self._objects),
            "parameter_names": parts.names_by_optimizer(self._objects),
            "rng": rng.state(),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "malletrain_snapshot": snapshot_file.FORMAT,
            "id": uuid.uuid4().hex,
            "owner": owner.to_record(self._run),
            "generation": report.generation(),
            "time": time.time(),
            "steps": self._steps,
            "numbers": self._numbers.changed(),
            "dict_tensors": self._dict_tensors.record(),
            "rates": self._rates.state(),
            "epoch_begin": self._epoch_begin.state_dict(),
            "schedulers": self._schedulers.progress(),
            "scheduled_rates": self._scheduled_rates.state(),
            "unsaved_optimizers": self._optimizers.kinds(),
            "save_s": self._pace.cost_s,
            "disk_since": self._outcomes.saved_at or self._disk_saved_at,
            "world_size": rank_and_world()[1],
        }

    # --- the training loop ---

    def step(self) -> None:
        """End a training step. Call it on every rank, after ``advance()`` and ``report()``. It
        takes less than 1 µs if nothing is due, and raises only what :meth:`save` raises, and at the
        first step SnapshotError if this torch computes wrong gradients for a sharded model.

        A snapshot that is due is taken when the loop requests its next batch from a DataLoader, so
        that a ``break`` between the two ends the epoch in every run; in other loops at once
        (:mod:`malletrain.training.step_end`).

        Rank 0 saves when ``every_s`` seconds have passed, and when the agent requests it because
        the job is about to be rescaled or to lose a node. After a requested snapshot rank 0 waits,
        for at most 60 s, to be stopped: the launcher is about to stop it, and further steps would
        be lost. The other ranks wait for it in their next collective. With a sharded model all
        ranks save, one step later.

        After the last step of an epoch the snapshot is taken when the code that follows the epoch's
        steps has run (:attr:`malletrain.ElasticSampler.between_epochs`). A run that resumes from an
        earlier state would start in the next epoch and skip that code.
        """
        if not self._looked:
            self._look()
        if not self._announced:  # before anything can request a snapshot of this step
            self._announce()
        self._optimizers.after_step()
        self._steps += 1
        self._step_end.step_done(self._epochs)

    @property
    def _epochs(self) -> CountedEpochs | None:
        """The sampler or stream that the script loops over, else the first one; None without
        any.
        """
        for counted in self._counted:
            if counted.looping:
                return counted
        return self._counted[0] if self._counted else None

    def _on_epoch_closed(self, counted: CountedEpochs) -> None:
        if counted is self._epochs:
            self._epoch_closed()

    def _epoch_closed(self) -> None:
        report.between_epochs(False)
        if self._caller == "Snapshot" and self._flags is not None and self._agreement is None:
            self._epoch_ends.closed()
        saved, self._saved_fingerprint = self._saved_fingerprint, None
        if saved is not None:
            atexit.unregister(self.close_epoch_at_exit)
            # False if the script saved before its scheduler made a step
            complete = saved == parts.after_epoch_fingerprint(self._objects)
            if is_sharded(self._objects):
                team = self._all_ranks()
                by_rank = team.run_on_all(lambda: complete)
                complete = team.from_rank_0(lambda: all(by_rank))
            if self._disk.in_open_epoch:
                self._disk.close_epoch(complete)
            if not complete and self._is_writer():
                self._save()
        self._step_end.epoch_closed()
        self._epoch_ends.over()

    def _close_epoch_later(self) -> None:
        atexit.register(self.close_epoch_at_exit)

    def close_epoch_at_exit(self) -> None:
        """Close the epoch of a script that has ended without requesting the next epoch (``break``,
        its own counter).
        """
        if self._disk.in_open_epoch and getattr(sys, "last_value", None) is None:
            self._disk.close_epoch(complete=True)

    def _after_training(self) -> None:
        """Save if a snapshot is due or requested, without waiting to be stopped: the code that
        follows the training runs in this process. If the process must stop in that code, this is
        the newest state.
        """
        if rank_and_world()[0] != 0 or self._agreement is not None:
            return
        request = self._flags.drain_request() if self._flags is not None else 0
        if request not in (0, self._served_request) or self._pace.is_due():
            self._save()

    def _after_step(self) -> None:
        if self._flush is not None:
            self._flush.after_step()
        if self._epochs is not None and self._epochs.finished:
            self._after_training()
            return
        if self._agreement is not None:
            self._step_together(self._agreement)
            return
        flags = self._flags
        if flags is not None:
            number = flags.drain_request()
            if number and number != self._served_request:
                self._serve_drain_request(number)
                return
        self.replicas.after_step(self._steps)
        if self._pace.is_due():
            self._save_periodically()

    def _look(self) -> None:
        self._looked = True
        if self._flags is not None and rank_and_world()[0] != 0:
            self._flush = drain.StepFlush()
        if is_sharded(self._objects):
            check_gradients(self._objects)
            self._agreement = Agreement(self._all_ranks().group)

    def _step_together(self, agreement: Agreement) -> None:
        """Save on all ranks at the same step: one step after rank 0 saw a reason."""
        message = 0
        if rank_and_world()[0] == 0:
            number = self._flags.drain_request() if self._flags is not None else 0
            if number and number not in (self._served_request, self._request):
                self._request, message = number, 1 + number
            elif self._pace.is_due():
                self._pace.saved()
                message = 1
        decided = agreement.exchange(message)
        if decided > 1:
            self._serve_drain_request(decided - 1)
        elif decided:
            self._save()
            self.replicas.with_snapshot(self._steps)
        else:
            self.replicas.after_step(self._steps)

    def _save_periodically(self) -> None:
        if rank_and_world()[0] != 0:
            drain.flush()
            self._pace.saved()
        elif not self._save_in_background():
            self._save()
        self.replicas.with_snapshot(self._steps)

    @counted_as("snapshot")
    def _save_in_background(self) -> bool:
        """Save to memory, and start the copy to disk in the background. Return whether a copy is
        in progress.
        """
        memory = self._memory
        if memory is None or memory.tier is None:
            return False
        if self._copies.busy:
            return True
        self._copies.raise_refused()
        self._tell_attributes()
        drain.flush()
        began = time.monotonic()
        moment = memory.save(self._steps)
        if moment is None:
            return False
        self._pace.saved(time.monotonic() - began)
        self._copies.begin(memory.tier.file(moment), report.totals(), self.every_s)
        return True

    def _announce(self) -> None:
        self._announced = True
        if self._flags is not None:
            ignore_first_sigterm()
        if rank_and_world()[0] != 0:
            return
        if self._flags is not None:
            report.send(Capable)
        parts.warn_about_unsaved_parameters(self._objects)
        count = parts.parameter_count(self._objects)
        if count:
            report.describe(parameters=count)

    def _serve_drain_request(self, number: int) -> None:
        self._served_request = number
        report.flush()
        is_rank_0 = rank_and_world()[0] == 0
        if not is_rank_0 and self._agreement is None:
            drain.flush()
            return
        memory, heirs = self._memory, self._heirs(number)
        in_memory = memory is not None and memory.save_for_drain(heirs, self._steps, self._outcomes)
        sentence = None if in_memory else self._save()
        if not is_rank_0:
            return
        if sentence is not None:
            report.send(DrainDone, number=number, saved=False, sentence=sentence)
            return

        def state_is_there(later: int) -> bool:
            if not in_memory or memory is None:
                return True
            if self._agreement is not None:
                return False  # the other ranks are already in their next collective
            return memory.copy_to_one_of(self._heirs(later)) or self._save() is None

        assert self._flags is not None
        self._epoch_ends.wait_for_all()
        self._served_request = wait_to_be_stopped(self._flags, number, again=state_is_there)
        if not in_memory:
            self._pace.saved()

    def _heirs(self, number: int) -> tuple[str, ...]:
        return self._flags.heirs(number) if self._flags is not None else ()
