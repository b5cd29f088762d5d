"""Accelerate: progress reports, every sample of an epoch exactly once, and ``save_state`` before a
rescale.

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

Decides when the state is saved, and saves the position in the data with it. The accelerator decides
the content of the state, and the sampler the order of the data.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import malletrain
from malletrain.integrations import checkpoints
from malletrain.integrations.checkpoints import RandomStates, read_states, save_states
from malletrain.integrations.guard import StateGuard
from malletrain.training import owner, report
from malletrain.training.batch_change import check_batch_norm
from malletrain.training.epoch_begin import EpochBegin
from malletrain.training.module_attributes import ModuleNumbers
from malletrain.training.objects import warn_about_unsaved_parameters
from malletrain.training.ranks import rank_and_world
from malletrain.training.sampler import ElasticSampler
from malletrain.training.schedulers import Schedulers
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.step_end import StepEnd
from malletrain.training.step_times import counted_as

NAMES = ("state-a", "state-b")
"""Folders of the two newest states, used alternately."""


class Guard(StateGuard):
    """Saves the state of ``accelerator`` when MalleTrain requests it, and periodically.

    All objects of the state must be prepared by the accelerator or registered with it
    (``register_for_checkpointing``). Do not pass to ``prepare()``: the loader, because it yields
    only this rank's batches, and the scheduler, because Accelerate would step it once per rank
    (register it).

    Args:
        accelerator: the ``Accelerator`` of the script.
        folder: folder for the states; all nodes must share it.
        sampler: the loader's ``batch_sampler``, which has the position in the data.
        every_s: maximum time between states, seconds.

    Raises:
        TypeError: ``sampler`` is not an ElasticSampler.
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
        self._step_end = StepEnd(self._after_step)
        self._has_looked = False
        self._has_saved = False
        """Whether a step has saved since :meth:`step` was called."""
        self._saved_registered_states: str | None = None
        self._in_open_epoch = ""
        """Name of the folder of the state that was saved in the code after the steps of an epoch,
        while that code runs; else empty.
        """
        sampler.on_epoch_closed(self._epoch_closed)
        sampler.watch_begin(EpochBegin(lambda: {**self._models(), **self._others()}))
        sampler.check_sizes(functools.partial(check_batch_norm, self._models()))
        self._step_end.watch(sampler)
        self._every_s = every_s
        self._due = time.monotonic() + every_s

    def _models(self) -> dict[str, Any]:
        """Return the prepared models, by number."""
        # Accelerate has no public name for the prepared objects.
        models = getattr(self._accelerator, "_models", [])
        return {str(number): model for number, model in enumerate(models)}

    def _begin_numbers(self) -> ModuleNumbers:
        return ModuleNumbers(self._models())

    def _others(self) -> dict[str, Any]:
        """Return the prepared optimizers and schedulers and the registered objects, by kind and
        number.
        """
        # nor for these
        return {
            f"{kind} {number}": registered
            for kind in ("optimizer", "scheduler", "custom_object")
            for number, registered in enumerate(getattr(self._accelerator, f"_{kind}s", []))
        }

    def _watched_schedulers(self) -> Schedulers:
        return Schedulers(
            "Guard",
            self._others(),
            SnapshotError,
            "Make it before guard.resume() and call "
            "accelerator.register_for_checkpointing(scheduler).",
        )

    def resume(self) -> bool:
        """Load the newest state. Call it after ``prepare()``.

        Returns:
            True if a state was loaded, False in a new run.

        Raises:
            SnapshotError: the state belongs to another job that was not requested.
            ValueError: the state has no position in the data or belongs to other data, or a
                scheduler was passed to ``prepare()``, so that its rates would depend on the number
                of ranks.
        """
        # Accelerate has no public name for the prepared objects.
        schedulers = getattr(self._accelerator, "_schedulers", [])
        if schedulers and not self._accelerator.split_batches:
            raise ValueError(
                "Guard: accelerator.prepare(scheduler) steps a scheduler once per rank, so that "
                "the learning rate would depend on the number of nodes. Leave it out of prepare() "
                "and call accelerator.register_for_checkpointing(scheduler)."
            )
        self._numbers = self._begin_numbers()
        self._schedulers = self._watched_schedulers()
        newest = self._find_state()
        if newest is None:
            return False
        record = checkpoints.read_record(newest)
        if not record:
            raise ValueError(
                f"The state {newest} does not say where in the data it was saved (it is of an "
                "earlier release). Begin anew in another folder."
            )
        self.sampler.load_state_dict(record)
        rank, world_size = rank_and_world()
        saved_ranks = record.get("world_size", world_size)
        states = None
        if world_size > saved_ranks:
            states = RandomStates(read_states(newest), self.from_rank_0)
        with self._without_automatic_names():
            self._accelerator.load_state(newest)
        if states is not None and rank >= saved_ranks:
            states.load()
        self._numbers.restore(record.get("numbers", {}))
        self._schedulers.resumed(record.get("schedulers", {}))
        # the script's own states continue with their numbers
        self._accelerator.project_configuration.iteration = int(record.get("iteration", 0))
        return True

    def _find_state(self) -> str | None:
        """Return the state to resume from: the newest of this run, else a requested one; None in a
        new run.
        """
        newest, requested = self.newest(), owner.resume_source(None)
        record = checkpoints.read_record(newest) if newest else {}
        if newest is not None and checkpoints.is_own(record, self._run):
            return newest
        if os.path.isdir(requested):
            report.tell(f"Going on from the state {requested}, as requested.")
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
    def _without_automatic_names(self) -> Iterator[None]:
        """In this context Accelerate's automatic_checkpoint_naming is off, because this class names
        the folder. The numbers of the script's own states do not change.
        """
        project = self._accelerator.project_configuration
        automatic, number = project.automatic_checkpoint_naming, project.iteration
        project.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            project.automatic_checkpoint_naming, project.iteration = automatic, number

    def newest(self) -> str | None:
        """Return the folder of the newest complete state; None if there is none."""
        try:
            with open(os.path.join(self.folder, "newest")) as file:
                return os.path.join(self.folder, file.read().strip())
        except FileNotFoundError:
            return None

    def step(self, samples: float | None = None, batches: int = 1) -> bool:
        """Finish a step: advance the sampler, report, and save if a state is due. Call it after
        each optimizer step, on every rank. Within ``accelerator.accumulate()`` call it after each
        micro-batch: it saves only after a micro-batch with an optimizer step.

        It saves when the loop requests its next batch; after the last step of an epoch, or after a
        ``break`` by which the loop leaves it, when the loop requests the next epoch.

        Args:
            samples: number of samples of this process. Default: those of the sampler's batches.
            batches: number of batches that the step took from the loader (more than 1 with gradient
                accumulation).

        Returns:
            Whether the state was saved since the call before, because it was due after a step.
        """
        if samples is None:
            samples = sum(own for own, _ in self.sampler.upcoming(batches))
        self.sampler.advance(batches)
        malletrain.report(samples)
        self._tell_unsaved_parameters()
        self.announce()
        self._step_end.step_done(self.sampler)
        if self._accumulates and self.sampler.between_epochs:
            # The last micro-batch averaged nothing. While rank 0, which has saved, waits to be
            # stopped, no other rank runs the code after the epoch.
            self.any_rank(False)
        saved, self._has_saved = self._has_saved, False
        return saved

    def _tell_unsaved_parameters(self) -> None:
        """Tell the user at the first step about parameters that no state has."""
        if self._has_looked or rank_and_world()[0] != 0:
            return
        self._has_looked = True
        with contextlib.suppress(Exception):  # a diagnosis must not stop the training
            warn_about_unsaved_parameters(
                {**self._models(), **self._others()},
                "accelerator.save_state()",
                "Prepare the module that has them, or register it (register_for_checkpointing).",
            )

    def _after_step(self) -> None:
        if not self._accumulates and self._save_if_due():
            self._has_saved = True

    @property
    def _accumulates(self) -> bool:
        """True if there are accumulated gradients, which no state includes."""
        return not self._accelerator.sync_gradients

    def _epoch_closed(self) -> None:
        report.between_epochs(False)
        saved, self._saved_registered_states = self._saved_registered_states, None
        if saved is not None:
            atexit.unregister(self._close_epoch_at_exit)
        self._has_saved = False
        self._step_end.epoch_closed()
        if self._has_saved:
            return
        if saved not in (None, self._registered_states()):
            self.save()  # for example, the script saved before its scheduler made a step
        elif self._in_open_epoch:
            self._set_newest(self._in_open_epoch)

    def _set_newest(self, name: str) -> None:
        checkpoints.write_whole(os.path.join(self.folder, "newest"), name)
        self._in_open_epoch = ""

    def _close_epoch_at_exit(self) -> None:
        """Close the epoch of a script that has ended without requesting the next epoch (``break``,
        its own counter).
        """
        if self._in_open_epoch and getattr(sys, "last_value", None) is None:
            self._set_newest(self._in_open_epoch)

    def _registered_states(self) -> str:
        """Return the states of the registered objects, such as schedulers, without models."""
        registered = getattr(self._accelerator, "_custom_objects", [])
        return repr([item.state_dict() for item in registered if not hasattr(item, "parameters")])

    def _save_if_due(self) -> bool:
        requested = self.wants_checkpoint(time.monotonic() >= self._due)
        if not requested and not self.late:
            return False
        began = time.monotonic()
        self.save()
        self.saved(self.folder, began, self.sampler.finished)
        return True

    @counted_as("snapshot")
    def save(self) -> None:
        """Save now. Call it on every rank. The previous state stays until the new one is complete.

        In the code after the steps of an epoch, a run resumes from the previous state until that
        code has run. Between the micro-batches of ``accelerator.accumulate()`` it saves only after
        the next optimizer step, because no state includes accumulated gradients.

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
            if self._saved_registered_states is None:
                atexit.register(self._close_epoch_at_exit)
            self._saved_registered_states = self._registered_states()
        previous = self.newest()
        for name in NAMES:
            state = os.path.join(self.folder, name)
            checkpoints.refuse_to_overwrite(checkpoints.read_record(state), state, self._run)
        name = NAMES[1] if previous is not None and previous.endswith(NAMES[0]) else NAMES[0]
        state = os.path.join(self.folder, name)
        # no rank overwrites the other folder before all ranks have chosen this one
        self.any_rank(False)
        with self._without_automatic_names():
            self._accelerator.save_state(state)
        self.any_rank(False)
        if self._accelerator.is_main_process:
            number = self._accelerator.project_configuration.iteration
            facts = {**self.sampler.state_dict(), "iteration": number}
            facts["numbers"] = self._numbers.changed()
            facts["schedulers"] = self._schedulers.progress()
            facts["world_size"] = rank_and_world()[1]
            save_states(state)
            checkpoints.write_record(state, self._run, facts)
            if self.sampler.between_epochs:
                self._in_open_epoch = name
            else:
                self._set_newest(name)
        self._due = time.monotonic() + self._every_s
