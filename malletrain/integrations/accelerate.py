"""A loop written with Accelerate: progress, every sample of an epoch once, and ``save_state``
before the job is moved.

sampler = malletrain.ElasticSampler(len(data), global_batch_size=64)
loader = DataLoader(data, batch_sampler=sampler)
model, optimizer = accelerator.prepare(model, optimizer)
guard = Guard(accelerator, "checkpoints", sampler)
guard.resume()
for epoch in sampler.epochs(10):
    for batch in loader:
        loss = criterion(model(batch.to(accelerator.device))) * sampler.loss_weight
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
guard.save()

Decides when the state is saved and where in the data it was. What is in it is the accelerator's,
the order of the data the sampler's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import malletrain
from malletrain.integrations import checkpoints
from malletrain.integrations.guard import StateGuard
from malletrain.training import owner, report
from malletrain.training.module_numbers import ModuleNumbers
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import Schedulers
from malletrain.training.snapshot_file import SnapshotError

NAMES = ("state-a", "state-b")
"""Folders of the two newest states, in turn."""


class Guard(StateGuard):
    """Saves the state of ``accelerator`` when MalleTrain asks for it, and every so often.

    Everything that belongs to the state must be prepared by, or registered with, the accelerator
    (``register_for_checkpointing``). Leave out of ``prepare()``: the loader, whose batches are this
    rank's already, and the scheduler, which Accelerate would step once per rank (register it).

    Args:
        accelerator: Accelerate's.
        folder: of the states, which all nodes must share.
        sampler: the loader's ``batch_sampler``: how far the training is.
        every_s: seconds between states saved without being asked for.

    Raises:
        TypeError: without a sampler.
    """

    def __init__(
        self,
        accelerator: Any,
        folder: str | os.PathLike[str],
        sampler: ElasticSampler | None = None,
        every_s: float = 600.0,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, ElasticSampler):
            raise TypeError(
                "Guard needs the sampler, to go on where the training was: "
                "Guard(accelerator, folder, sampler), with sampler = "
                "malletrain.ElasticSampler(len(data), global_batch_size=…) and "
                "DataLoader(data, batch_sampler=sampler)."
            )
        self._accelerator = accelerator
        self.folder = checkpoints.own_folder(folder)
        self._run = owner.this_run()
        self.sampler = sampler
        self._numbers = self._begin_numbers()
        self._schedulers = self._watched_schedulers()
        self._deferred = False
        """A step was the last of its epoch: the state is saved when the epoch is over."""
        self._saved_schedules: str | None = None
        self._in_open_epoch = ""
        """Folder of the state that was saved in the code after the steps of an epoch."""
        sampler.on_epoch_closed(self._epoch_closed)
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def _begin_numbers(self) -> ModuleNumbers:
        # Accelerate has no public name for what was prepared.
        models = getattr(self._accelerator, "_models", [])
        return ModuleNumbers({str(number): model for number, model in enumerate(models)})

    def _watched_schedulers(self) -> Schedulers:
        # nor for what was registered
        named = {
            f"{kind} {number}": one
            for kind in ("optimizer", "scheduler", "custom_object")
            for number, one in enumerate(getattr(self._accelerator, f"_{kind}s", []))
        }
        return Schedulers(
            "Guard",
            named,
            SnapshotError,
            "Make it before guard.resume() and call "
            "accelerator.register_for_checkpointing(scheduler).",
        )

    def resume(self) -> bool:
        """Load the newest state, after ``prepare()``.

        Returns:
            False in a new run.

        Raises:
            ValueError: when the state does not say where in the data it was saved or is that of
                other data, or a schedule would depend on the number of ranks.
        """
        # Accelerate has no public name for what was prepared.
        schedulers = getattr(self._accelerator, "_schedulers", [])
        if schedulers and not self._accelerator.split_batches:
            raise ValueError(
                "Guard: accelerator.prepare(scheduler) steps a scheduler once per rank, so that "
                "the learning rate would depend on the number of nodes. Leave it out of prepare() "
                "and call accelerator.register_for_checkpointing(scheduler)."
            )
        self._numbers = self._begin_numbers()
        self._schedulers = self._watched_schedulers()
        newest = self._to_resume()
        if newest is None:
            return False
        record = checkpoints.read_record(newest)
        if not record:
            raise ValueError(
                f"The state {newest} does not say where in the data it was saved (it is of an "
                "earlier release). Begin anew in another folder."
            )
        self.sampler.load_state_dict(record)
        with self._named_here():
            self._accelerator.load_state(newest)
        self._numbers.put_back(record.get("numbers", {}))
        self._schedulers.resumed(record.get("schedulers", {}))
        # the script's own states go on with their numbers
        self._accelerator.project_configuration.iteration = int(record.get("iteration", 0))
        return True

    def _to_resume(self) -> str | None:
        """The state to go on from: the newest of this run, else one that was asked for."""
        newest, requested = self.newest(), owner.resume_source(None)
        record = checkpoints.read_record(newest) if newest else {}
        if newest is not None and checkpoints.is_own(record, self._run):
            return newest
        if os.path.isdir(requested):
            report.tell(f"Going on from the state {requested}, as asked for.")
            return os.path.abspath(requested)
        if newest is not None:
            checkpoints.check_owner(record, newest, self._run)
        elif requested:
            raise SnapshotError(
                f"There is no state of job {requested} in {self.folder}. Name the one to go on "
                "from by the path of its folder (state-a or state-b)."
            )
        return newest

    @contextlib.contextmanager
    def _named_here(self) -> Iterator[None]:
        """The folder of a state is named here, whatever Accelerate's automatic_checkpoint_naming
        says for those of the script; they keep their numbers.
        """
        project = self._accelerator.project_configuration
        automatic, number = project.automatic_checkpoint_naming, project.iteration
        project.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            project.automatic_checkpoint_naming, project.iteration = automatic, number

    def newest(self) -> str | None:
        """The folder of the newest whole state."""
        try:
            with open(os.path.join(self.folder, "newest")) as file:
                return os.path.join(self.folder, file.read().strip())
        except FileNotFoundError:
            return None

    def step(self, samples: float | None = None, batches: int = 1) -> bool:
        """An optimizer step is done: moves the sampler on, reports, and saves if that is due. After
        the last step of an epoch it saves when the loop asks for the next epoch, and the code that
        follows the epoch's steps has run. Within ``accelerator.accumulate()`` call it after each
        micro-batch: it saves after the one with which the optimizer made its step.

        Args:
            samples: of this process; those of the sampler's batches when not given.
            batches: how many the step took from the loader (more than 1 with accumulation).

        Returns:
            Whether it saved.
        """
        if samples is None:
            samples = sum(own for own, _ in self.sampler.upcoming(batches))
        self.sampler.advance(batches)
        malletrain.report(samples)
        self._deferred = self.sampler.between_epochs
        return not (self._deferred or self._accumulates) and self._save_if_due()

    @property
    def _accumulates(self) -> bool:
        """There are gradients of micro-batches that are in no state."""
        return not self._accelerator.sync_gradients

    def _epoch_closed(self) -> None:
        deferred, self._deferred = self._deferred and not self._accumulates, False
        saved, self._saved_schedules = self._saved_schedules, None
        if saved is not None:
            atexit.unregister(self._closed_by_exit)
        if deferred and self._save_if_due():
            return
        if saved not in (None, self._schedules()):
            self.save()  # the script has saved before its scheduler made a step, say
        elif self._in_open_epoch:
            self._newest_is(self._in_open_epoch)

    def _newest_is(self, name: str) -> None:
        checkpoints.write_whole(os.path.join(self.folder, "newest"), name)
        self._in_open_epoch = ""

    def _closed_by_exit(self) -> None:
        """A script whose loop asks for no next epoch (``break``, a count of its own) has ended."""
        if self._in_open_epoch and getattr(sys, "last_value", None) is None:
            self._newest_is(self._in_open_epoch)

    def _schedules(self) -> str:
        """The states of what was registered, such as schedulers, but for models."""
        registered = getattr(self._accelerator, "_custom_objects", [])
        return repr([each.state_dict() for each in registered if not hasattr(each, "parameters")])

    def _save_if_due(self) -> bool:
        requested = self.wants_checkpoint(time.monotonic() >= self._due)
        if not requested and not self.late:
            return False
        began = time.monotonic()
        self.save()
        self.saved(self.folder, began, self.sampler.finished)
        return True

    def save(self) -> None:
        """Save now, on every rank; the state before stays until the new one is whole. In the code
        after the steps of an epoch, the state before is the one to resume from until that code has
        run. Between the micro-batches of ``accelerator.accumulate()`` it saves after the step that
        they make: their gradients are in no state.

        Raises:
            ForeignSnapshotError: another job has saved in this folder.
        """
        if self._accumulates and not self.sampler.finished:
            self._due = time.monotonic()
            report.tell(
                "Guard.save() between micro-batches waits for the optimizer's next step: gradients "
                "are in no state.",
                once="guard accumulates",
            )
            return
        if self.sampler.between_epochs:
            if self._saved_schedules is None:
                atexit.register(self._closed_by_exit)
            self._saved_schedules = self._schedules()
        before = self.newest()
        for name in NAMES:
            state = os.path.join(self.folder, name)
            checkpoints.refuse_to_overwrite(checkpoints.read_record(state), state, self._run)
        name = NAMES[1] if before is not None and before.endswith(NAMES[0]) else NAMES[0]
        state = os.path.join(self.folder, name)
        # nobody writes into the one after it before all know which it is
        self.any_rank(False)
        with self._named_here():
            self._accelerator.save_state(state)
        self.any_rank(False)
        if self._accelerator.is_main_process:
            number = self._accelerator.project_configuration.iteration
            facts = {**self.sampler.state_dict(), "iteration": number}
            facts["numbers"] = self._numbers.changed()
            facts["schedulers"] = self._schedulers.progress()
            checkpoints.write_record(state, self._run, facts)
            if self.sampler.between_epochs:
                self._in_open_epoch = name
            else:
                self._newest_is(name)
        self._due = time.monotonic() + self._every_s
