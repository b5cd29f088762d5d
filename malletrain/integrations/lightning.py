"""Lightning: progress reports, the same steps at any number of ranks, and a checkpoint before a
rescale.

callback = MalleTrainCallback("checkpoints")
loader = callback.loader(data, batch_size=8, global_batch_size=48)
trainer = Trainer(callbacks=[callback], …)
trainer.fit(model, loader, ckpt_path=callback.latest())

Decides the batches and the accumulation of gradients, and converts a checkpoint's batch counts,
limits and intervals, so that Lightning counts the same steps and epochs at any number of ranks. A
checkpoint is written before the next step starts, after validation and callbacks of the step, or of
the epoch that it ends. The library owns the loop, the schedule and the content of a checkpoint.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sized
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader, IterableDataset

import malletrain
from malletrain.integrations import checkpoints, lightning_rounds
from malletrain.integrations.callback_attributes import CallbackAttributes
from malletrain.integrations.checkpoints import RandomStates
from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.integrations.guard import StateGuard
from malletrain.integrations.lightning_rounds import (
    EpochResults,
    Loader,
    ModelFiles,
    StepSchedulers,
)
from malletrain.training import owner, report, rng
from malletrain.training.module_attributes import ModuleAttributes, ModuleNumbers
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.step_times import counted_as

NAME = "malletrain.ckpt"
_ONE_LOADER_ADVICE = (
    "Make one loader before trainer.fit(), or in the __init__ of a LightningDataModule, for all "
    "epochs: train_dataloader() may return it, and must not make another one "
    "(reload_dataloaders_every_n_epochs)."
)


class MalleTrainCallback(Callback):
    """Saves ``malletrain.ckpt`` in ``folder`` when MalleTrain requests it, and periodically. The
    training data must come from :meth:`loader`.

    Args:
        folder: folder of the checkpoint; all nodes must share it.
        every_s: maximum time between checkpoints, seconds.
    """

    def __init__(self, folder: str | os.PathLike[str], every_s: float = 600.0) -> None:
        self._guard = StateGuard()
        self._run = owner.this_run()
        self.folder = checkpoints.own_folder(folder)
        self.path = os.path.join(self.folder, NAME)
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._batches: ConstantBatch | None = None
        self._loader: Loader | None = None
        self._trainer: Any = None
        self._limits: tuple[Any, ...] = ()
        self._has_stepped = self._fit_over = False
        self._epoch = self._step = self._log_every = 0
        self._metrics: dict[str, float] = {}
        self._results = EpochResults(self._total)
        self._epoch_results: dict[str, Any] = {}
        """Results of the epoch so far over all ranks, for the checkpoint that is being written."""
        self._numbers = ModuleNumbers({})
        self._attributes = ModuleAttributes("MalleTrainCallback", {})
        self._callbacks = CallbackAttributes(
            "MalleTrainCallback",
            ("state_dict", "on_save_checkpoint"),
            "Give such a callback state_dict() and load_state_dict() if later steps need them.",
        )
        self._files = ModelFiles(self.folder, self._run)
        self._schedulers = StepSchedulers()
        self._rng: dict[str, Any] = {}
        """States of the random generators, for the checkpoint that is being written."""
        self._loaded_rng: dict[str, Any] = {}
        """Those of rank 0 in the checkpoint from which the run resumes."""
        self._resumed_rng: RandomStates | None = None
        """Those of this rank, until the training goes on."""

    def _total(self, numbers: list[float]) -> list[float]:
        assert self._batches is not None
        return [self._guard.mean(number) * self._batches.plan.world_size for number in numbers]

    def latest(self) -> str | None:
        """Return the path of the checkpoint to resume from; None in a new run.

        Raises:
            SnapshotError: it belongs to another job and was not requested.
        """
        exists, requested = os.path.exists(self.path), owner.resume_source(None)
        record = checkpoints.read_record(self.folder)
        if exists and checkpoints.is_own(record, self._run):
            return self.path
        if os.path.exists(requested):
            report.tell(f"Going on from the checkpoint {requested}, as requested.")
            path = os.path.join(requested, NAME) if os.path.isdir(requested) else requested
            return os.path.abspath(path)
        if exists:
            checkpoints.check_owner(record, self.path, self._run)
        elif requested:
            raise SnapshotError(
                f"There is no checkpoint of job {requested} in {self.folder}. Name the one to go "
                f"on from by its path (…/{NAME})."
            )
        return self.path if exists else None

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> Loader:
        """Return the training data for ``trainer.fit(model, …)``, with the same global batches at
        every number of ranks.

        Args:
            dataset: dataset with a length and indices.
            batch_size: maximum number of samples of a micro-batch of a rank; larger shares are
                accumulated.
            global_batch_size: number of samples of a step over all ranks. Default: ``batch_size``
                times the job's maximum number of ranks.
            seed: seed of the order.
            shuffle: False yields the samples in order.
            drop_last: drop a remainder smaller than a global batch.
            options: other options of torch's DataLoader.

        Raises:
            TypeError: the dataset has no length.
            ValueError: the sizes are inconsistent, or ``fit`` is running.
        """
        if self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING:
            raise ValueError(
                f"callback.loader() is called while trainer.fit() runs. {_ONE_LOADER_ADVICE}"
            )
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise TypeError(
                f"callback.loader() needs a dataset with a length and indices; "
                f"{type(dataset).__name__} is read one sample after the other, and where it was "
                "cannot be kept over a change of nodes. Give it a __len__ and a __getitem__, or "
                "train with malletrain.ElasticStream in a loop of your own."
            )
        samples: Any = dataset
        self._batches = ConstantBatch(
            len(dataset), batch_size, global_batch_size, 1, seed, shuffle, drop_last
        )
        plain: DataLoader[Any] = DataLoader(samples, batch_sampler=self._batches, **options)
        self._loader = Loader(plain, self._batches)
        return self._loader

    # --- hooks ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the trainer, before anything is loaded. Raises ValueError if the steps cannot be
        the same at every number of ranks.
        """
        if stage != "fit":
            return
        if self._batches is None:
            raise ValueError(
                "MalleTrainCallback: the training data must come from callback.loader(dataset, "
                "batch_size=…): with a loader of its own a change of nodes would change "
                f"Lightning's steps, epochs and samples. {_ONE_LOADER_ADVICE}"
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "MalleTrainCallback: with manual optimization the module counts its own steps, and "
                "they cannot be kept over a change of nodes. Use automatic optimization, or a loop "
                "of your own with malletrain.Snapshot."
            )
        world = self._batches.plan.world_size
        if trainer.world_size != world:
            raise ValueError(
                f"MalleTrainCallback: the trainer has {trainer.world_size} processes, but torchrun "
                f"or MalleTrain started {world}. Start all of them so, with devices=1 per process "
                "or the number of processes of a node."
            )
        has_own_accumulation = any(
            isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks
        )
        if has_own_accumulation or trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "MalleTrainCallback: accumulation follows from the global batch. Leave "
                "accumulate_grad_batches out and say callback.loader(global_batch_size=…)."
            )
        _check_averaging(trainer, pl_module)
        _check_searches(trainer)
        _check_finetuning(trainer, self._batches)
        self._trainer = trainer
        library = vars(LightningModule())
        self._numbers = ModuleNumbers({"module": pl_module}, without=library)
        self._attributes = ModuleAttributes("MalleTrainCallback", {"module": pl_module}, library)
        self._log_every = trainer.log_every_n_steps
        self._limits = trainer.accumulate_grad_batches, trainer.limit_train_batches
        _check_limits(trainer, self._batches)
        trainer.accumulate_grad_batches = self._batches.accumulate
        if trainer.limit_train_batches:
            self._batches.limit(
                _in_steps(trainer.limit_train_batches, self._batches.plan.steps_from(0))
            )
            trainer.limit_train_batches = 1.0
        _check_interval(trainer, self._batches)
        self._files.begin(trainer)
        # A checkpoint is written before the other callbacks are called for the next step.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the trainer to its original state."""
        if stage == "fit" and self._limits:
            trainer.accumulate_grad_batches, trainer.limit_train_batches = self._limits
            self._limits = ()
            self._files.end(trainer)
            self._schedulers.end()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the initial numbers, after all callbacks have set up the module."""
        self._attributes.begin()
        self._callbacks.begun = False
        if self._batches is not None and self._batches.resumed == (0, 0):
            self._numbers.begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the data and the folder, and restore callbacks and metrics. Raises ValueError if
        the data is not from :meth:`loader`, ForeignSnapshotError if the folder has another job's
        checkpoint.
        """
        if trainer.train_dataloader is not self._loader:
            raise ValueError(
                "MalleTrainCallback: give trainer.fit() what callback.loader() returned."
            )
        checkpoints.refuse_to_overwrite(checkpoints.read_record(self.folder), self.path, self._run)
        self._files.record(trainer)
        self._fit_over = False
        if trainer.val_check_batch is not None:
            trainer.val_check_batch = math.inf
        # schedulers and early stopping need these if this part of the run has not validated yet
        connector: Any = getattr(trainer, "_logger_connector", None)
        if self._metrics and hasattr(connector, "_callback_metrics"):
            stored = {name: torch.tensor(value) for name, value in self._metrics.items()}
            connector._callback_metrics.update(stored)
        self._schedulers.begin(trainer)
        if self._loaded_rng:
            self._resumed_rng = RandomStates(self._loaded_rng, self._guard.from_rank_0)
            self._loaded_rng = {}
        if self._step:  # Lightning calls that only at the start of an epoch
            for callback in trainer.callbacks:
                if isinstance(callback, StochasticWeightAveraging):
                    callback.on_train_epoch_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Report the end of the training: the code after it must run only once."""
        report.training_over()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start an epoch, and save if due: the previous epoch is complete. Lightning creates the
        epoch's iterator after this, except in an epoch in which it resumes.
        """
        if self._resume_rng() and trainer.current_epoch and self._loader is not None:
            self._loader.is_late = True
        assert self._batches is not None
        self._batches.epoch = self._epoch = trainer.current_epoch
        self._step = 0
        self._results.forget()
        self._save_if_due(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if due: the previous step is complete, with its validation. Callbacks that log here
        (the learning rate) log once per step.
        """
        self._resume_rng()
        if not self._callbacks.begun:  # other callbacks have set up what they need
            self._callbacks.begin(trainer.callbacks)
        if self._loader is not None and self._loader.is_late:
            self._loader.draw()
            self._loader.is_late = False
        self._save_if_due(trainer)
        assert self._batches is not None
        self._schedulers.before_step(batch_idx // self._batches.accumulate + 1)
        # Lightning skips a plateau scheduler in an epoch in which it resumed.
        trainer.fit_loop._restarting = False
        if batch_idx % self._batches.accumulate:
            trainer.log_every_n_steps = lightning_rounds.NEVER

    def _resume_rng(self) -> bool:
        """Set the random generators to their states at the checkpoint, where it was written. Return
        whether there are any.
        """
        states, self._resumed_rng = self._resumed_rng, None
        if states is not None:
            states.load()
        return states is not None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if due: only the script's code after ``fit`` remains."""
        assert self._batches is not None
        if self._has_stepped:
            self._fit_over, self._step = True, self._batches.steps_per_epoch
        self._save_if_due(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Weight the gradient of a micro-batch of another size. Lightning divides a loss by the
        number of micro-batches, and DDP averages over the ranks.
        """
        batches = self._batches
        assert batches is not None
        step, micro = divmod(trainer.fit_loop.batch_idx, batches.accumulate)
        weight = batches.weight(step, micro) * batches.accumulate / batches.batch(step)[1]
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a micro-batch, and a step after its last micro-batch."""
        batches = self._batches
        assert batches is not None
        trainer.log_every_n_steps = self._log_every
        self._results.after_batch(trainer)
        by_step = trainer.val_check_batch is not None
        if by_step:
            trainer.val_check_batch = lightning_rounds.NEVER
        step, micro = divmod(batch_idx, batches.accumulate)
        if micro + 1 < batches.batch(step)[1]:
            return
        self._step = step + 1
        self._has_stepped = True
        malletrain.report(batches.share(step))
        if by_step and self._is_validation_due(trainer):
            trainer.val_check_batch = 1

    def _is_validation_due(self, trainer: Any) -> bool:
        """Return whether a validation follows the step. Intervals count steps over all ranks."""
        assert self._batches is not None
        steps_per_epoch = self._batches.steps_per_epoch
        interval = _in_steps(trainer.val_check_interval, steps_per_epoch)
        if trainer.check_val_every_n_epoch is None:
            return (self._epoch * steps_per_epoch + self._step) % interval == 0
        return self._step % interval == 0

    @counted_as("snapshot")
    def _save_if_due(self, trainer: Any) -> None:
        if not self._has_stepped:
            return
        self._has_stepped = False
        requested = self._guard.wants_checkpoint(time.monotonic() >= self._due)
        if not requested and not self._guard.late:
            return
        began = time.monotonic()
        record = checkpoints.read_record(self.folder)
        checkpoints.refuse_to_overwrite(record, self.path, self._run)
        if trainer.is_global_zero:
            os.makedirs(self.folder, exist_ok=True)
            checkpoints.write_record(self.folder, self._run, {})
            lightning_rounds.keep(trainer.loggers, self.path)
        assert self._batches is not None
        if 0 < self._step < self._batches.steps_per_epoch:
            self._epoch_results = self._results.whole(trainer, trainer.lightning_module)
        # First under another name: a crash while saving must leave the previous checkpoint.
        if trainer.is_global_zero:
            self._attributes.tell_changed()
            self._callbacks.tell_changed()
        self._rng = rng.state()
        trainer.save_checkpoint(self.path + ".new")
        self._epoch_results, self._rng = {}, {}
        if trainer.is_global_zero:
            os.replace(self.path + ".new", self.path)
        self._guard.any_rank(False)
        self._due = time.monotonic() + self._every_s
        self._guard.saved(self.path, began, self._fit_over)

    # --- what a checkpoint says ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the sizes that the steps are based on."""
        if self._batches is None:
            return {}
        metrics = {} if self._trainer is None else self._trainer.callback_metrics
        return {
            "epoch": self._epoch,
            "step": self._step,
            "ended": self._fit_over and self._trainer.should_stop,
            "versions": []
            if self._trainer is None
            else lightning_rounds.versions(self._trainer.loggers),
            "metrics": {name: float(value) for name, value in metrics.items()},
            "saved_at": _saved_at(self._trainer),
            "files": self._files.written(),
            "results": self._epoch_results,
            "numbers": self._numbers.changed(),
            "rng": self._rng,
            "callbacks_notice": self._callbacks.has_notice,
            **self._counts(),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Start at the position in the checkpoint, and convert its batch counts to this number of
        ranks.

        Raises:
            ValueError: its steps are based on other sizes than those of this run.
        """
        batches = self._batches
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if batches is None:  # not a fit
            return
        if saved is None or "step" not in saved:
            raise ValueError(
                f"{self.path} does not say where in the data it was written (it is of an earlier "
                "release). Begin anew in another folder."
            )
        changed = [
            f"{key} {saved[key]}, now {value}"
            for key, value in self._counts().items()
            if saved[key] != value
        ]
        if changed:
            raise ValueError(
                f"The steps of {self.path} count other samples ({'; '.join(changed)}). Go on with "
                "the same data, the same global batch and the same largest number of ranks, or "
                "begin anew in another folder."
            )
        self._metrics = dict(saved.get("metrics", {}))
        self._loaded_rng = dict(saved.get("rng", {}))
        self._callbacks.has_notice = bool(saved.get("callbacks_notice"))
        self._numbers.begin()  # after other callbacks have set up the module: one may freeze layers
        self._numbers.restore(saved.get("numbers", {}))
        self._results.restore(pl_module, saved.get("results", {}), trainer.is_global_zero)
        for callback in trainer.checkpoint_callbacks:
            if callback.state_key in saved.get("saved_at", {}):
                callback._last_global_step_saved = saved["saved_at"][callback.state_key]
        self._files.resume(saved.get("files", ()))
        lightning_rounds.go_on(
            *(trainer.loggers, saved.get("versions", ()), self.path),
            *(checkpoint["global_step"], trainer.is_global_zero),
        )
        trainer.should_stop = bool(saved.get("ended"))
        over = saved["step"] >= batches.steps_per_epoch
        self._epoch, self._step = saved["epoch"] + over, 0 if over else saved["step"]
        batches.epoch = self._epoch
        batches.resumed = (self._epoch, self._step)
        # Lightning's own count of an epoch is one behind after a checkpoint at the end of one.
        loops = checkpoint["loops"]["fit_loop"]
        done = self._step * batches.accumulate
        steps = checkpoint["global_step"]
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
        _set_counts(loops["epoch_loop.batch_progress"]["current"], done, done)
        batches_before = self._epoch * len(batches)
        _set_counts(
            loops["epoch_loop.batch_progress"]["total"],
            batches_before + done,
            batches_before + done,
        )
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        # At the start of an epoch its hooks are still to be called: it has not begun.
        epochs_begun = self._epoch + bool(self._step)
        for counts in loops["epoch_progress"].values():
            _set_counts(counts, epochs_begun, self._epoch)

    def _counts(self) -> dict[str, int]:
        assert self._batches is not None
        return {
            "global_batch_size": self._batches.plan.global_batch_size,
            "num_samples": self._batches.plan.num_samples,
            "steps_per_epoch": self._batches.steps_per_epoch,
        }


def _saved_at(trainer: Any) -> dict[str, int]:
    """Return the step at which each ModelCheckpoint saved last, which it would otherwise save
    again.
    """
    callbacks = [] if trainer is None else trainer.checkpoint_callbacks
    return {
        callback.state_key: callback._last_global_step_saved
        for callback in callbacks
        if hasattr(callback, "_last_global_step_saved")
    }


def _set_counts(counts: dict[str, int], started: int, over: int) -> None:
    """Set the counts of one of Lightning's trackers."""
    counts.update(ready=started, started=started, processed=over, completed=over)


def _in_steps(limit: int | float, steps: int) -> int:
    """Convert one of Lightning's limits or intervals, a number of steps or a fraction of an epoch,
    to steps.
    """
    return max(1, int(limit if isinstance(limit, int) else limit * steps))


def _check_limits(trainer: Any, batches: ConstantBatch) -> None:
    """Raise ValueError for limits whose meaning depends on the number of ranks."""
    if trainer.overfit_batches:
        raise ValueError(
            "MalleTrainCallback: overfit_batches takes the same batches of a rank again, which are "
            "others at another number of ranks. Give callback.loader() a Subset of the data."
        )
    limit, max_ranks = trainer.limit_val_batches, batches.plan.max_world_size
    if max_ranks > 1 and limit not in (0, 1.0) and not trainer.fast_dev_run:
        raise ValueError(
            f"MalleTrainCallback: limit_val_batches={limit} counts the batches of a rank, so that "
            "more nodes would validate on more samples. Validate on a Subset of the data, or "
            "submit the job with one process at most."
        )


def _check_finetuning(trainer: Any, batches: ConstantBatch) -> None:
    """Raise ValueError for callbacks whose parameters would not be averaged over the ranks."""
    if batches.plan.max_world_size > 1 and any(
        isinstance(callback, BaseFinetuning) for callback in trainer.callbacks
    ):
        raise ValueError(
            "MalleTrainCallback: with a callback such as BackboneFinetuning the layers that are "
            "frozen at first are not averaged over the ranks later, because "
            "DistributedDataParallel leaves out what is frozen when it is made. Train with the "
            "backbone frozen in one job and all of it in a second one, give its parameter group a "
            "rate of 0 instead, or submit the job with one process at most."
        )


def _check_averaging(trainer: Any, module: LightningModule) -> None:
    averages = any(
        isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks
    )
    if averages and StochasticWeightAveraging.pl_module_contains_batch_norm(module):
        raise ValueError(
            "MalleTrainCallback: StochasticWeightAveraging passes through the data once more for a "
            "model with batch normalisation, and a change of nodes in that pass cannot be kept. "
            "Use EMAWeightAveraging, or normalise otherwise."
        )


def _check_searches(trainer: Any) -> None:
    for callback in trainer.callbacks:
        # The search of a Tuner ends the fit that it begins.
        ends = getattr(callback, "_early_exit", False)
        if isinstance(callback, LearningRateFinder | BatchSizeFinder) and not ends:
            raise ValueError(
                f"MalleTrainCallback: {type(callback).__name__} searches at each start. Lightning "
                "then begins at step 0 with a new optimizer, also where the training goes on from "
                "a checkpoint. Search in a run of its own, and write the value into the script."
            )


def _check_interval(trainer: Any, batches: ConstantBatch) -> None:
    interval, steps = trainer.val_check_interval, batches.steps_per_epoch
    by_epoch = trainer.check_val_every_n_epoch is not None
    if by_epoch and isinstance(interval, int) and interval > steps and trainer.limit_val_batches:
        raise ValueError(
            f"MalleTrainCallback: val_check_interval={interval} is more than the {steps} steps of "
            "an epoch (a step has a whole global batch). Lower it, or count over epochs with "
            "check_val_every_n_epoch=None."
        )
