"""Hugging Face ``Trainer``: progress reports, the same steps at any number of ranks, and a
checkpoint before a rescale.

callback = MalleTrainCallback()
trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.latest(args.output_dir))

Decides the trainer's training data loader and its accumulation of gradients, so that ``Trainer``
counts the same steps and epochs at any number of ranks. The library owns the loop, the schedule and
the content of a checkpoint.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import time
from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from malletrain.integrations import checkpoints
from malletrain.integrations.callback_attributes import CallbackAttributes
from malletrain.integrations.checkpoints import read_record, write_record
from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.integrations.guard import StateGuard
from malletrain.training import owner, report
from malletrain.training.epoch_begin import undo_of
from malletrain.training.module_attributes import ModuleNumbers
from malletrain.training.objects import warn_about_unsaved_parameters
from malletrain.training.snapshot_file import SnapshotError
from malletrain.training.step_times import counted_as
from malletrain.training.tracking import mlflow_run, run_id

_OWN_ORDER_REASON = "its data order is its own, and cannot be kept over a change of nodes"


class MalleTrainCallback(TrainerCallback):
    """Callback for ``Trainer(callbacks=[…])``. All nodes must share the output folder.

    The global batch is the same at every number of ranks: each rank processes its share, in
    micro-batches of at most ``per_device_train_batch_size`` samples. For losses without notice set
    ``save_strategy="steps"`` and ``save_steps`` as usual, because only a loss with notice requests
    a checkpoint.

    Args:
        global_batch_size: number of samples of a step over all ranks. Default:
            ``per_device_train_batch_size * gradient_accumulation_steps`` times the job's maximum
            number of ranks.
    """

    def __init__(self, global_batch_size: int | None = None) -> None:
        self._global_batch_size = global_batch_size
        self._guard = StateGuard()
        self._run = owner.this_run()
        self._trainer: Any = None
        self._batches: ConstantBatch | None = None
        self._resumed = ""
        self._step = self._micro = 0
        self._epochs = self._num_epochs = 0
        self._epoch_over = False
        self._eval_on_start = False
        self._numbers = ModuleNumbers({})
        self._callbacks = CallbackAttributes(
            "MalleTrainCallback",
            ("state",),
            "Make such a callback an ExportableState, whose state() returns them, if later steps "
            "need them.",
        )
        self._rng: checkpoints.RandomStates | None = None
        """States of the random generators at the checkpoint from which the run resumes."""
        self._requested = self._postponed = False
        self._is_own = False
        """True if the trainer would write the due checkpoint without a request."""
        self._began = 0.0

    def latest(self, output_dir: str) -> str | None:
        """Return the path of the newest complete checkpoint to resume from; None in a new run.

        Args:
            output_dir: the output folder of the trainer's arguments.

        Raises:
            SnapshotError: the folder has another job's checkpoint, which was not requested.
        """
        folder = checkpoints.own_folder(output_dir)
        paths = _checkpoints(folder)
        records = {path: read_record(path) for path in paths}
        complete = [
            path
            for path in paths
            if (checkpoints.is_whole(records[path]) if records[path] else _has_trainer_state(path))
        ]
        recorded = [path for path in complete if records[path]]
        own_checkpoints = [
            path for path in recorded if checkpoints.is_own(records[path], self._run)
        ]
        self._resumed = next(iter(own_checkpoints), "") or self._find_other_checkpoint(
            folder, complete, records
        )
        newest = next(iter(paths), self._resumed)
        if self._resumed and newest != self._resumed and not checkpoints.is_whole(records[newest]):
            report.tell(f"{newest} was not written to its end. Going on from {self._resumed}.")
        return self._resumed or None

    def _find_other_checkpoint(
        self, folder: str, paths: list[str], records: dict[str, dict[str, Any]]
    ) -> str:
        """Return another run's checkpoint from which this run, which has none yet, may start; empty
        if there is none.
        """
        requested = owner.resume_source(None)
        if os.path.isdir(requested):
            report.tell(f"Going on from the checkpoint {requested}, as requested.")
            return os.path.abspath(requested)
        of_requested_job = [
            path for path in paths if checkpoints.is_of_job(records[path], requested, self._run)
        ]
        first = next(
            iter(of_requested_job or [path for path in paths if records[path]] or paths), ""
        )
        if first:
            checkpoints.check_owner(records[first], first, self._run)
        elif requested:
            raise SnapshotError(
                f"There is no checkpoint of job {requested} in {folder}. Name the one to go on "
                "from by the path of its folder (checkpoint-…)."
            )
        return first

    def attach(self, trainer: Trainer) -> None:
        """Make ``trainer`` use the batches of this callback. Needed only if the callback was added
        after the trainer was created.
        """
        if trainer is self._trainer:
            return
        make, loss, train = trainer.get_train_dataloader, trainer.compute_loss, trainer.train
        handler = trainer.callback_handler
        begin_epoch = handler.on_epoch_begin
        save = trainer._save_checkpoint
        self._trainer = trainer
        trainer.args.output_dir = checkpoints.own_folder(trainer.args.output_dir)
        _continue_trackers(trainer)

        def begin(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            return train(self._checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)

        @counted_as("snapshot")
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
            self._begin_checkpoint(trainer.args.output_dir, trainer.state)
            trainer.args.save_total_limit = None  # on_save() removes superfluous checkpoints
            try:
                result = save(*args, **kwargs)
            finally:
                trainer.args.save_total_limit = limit
            self._keep_best(trainer, best)
            return result

        def get_train_dataloader() -> DataLoader[Any]:
            _check(trainer)
            return self._loader(trainer, make)

        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            weight = self._weight(trainer, kwargs.get("num_items_in_batch"), model.training)
            result = loss(model, inputs, *args, **kwargs)
            if weight == 1.0:
                return result
            return (
                (result[0] * weight, *result[1:])
                if isinstance(result, tuple)
                else (result * weight)
            )

        def on_epoch_begin(*args: Any, **kwargs: Any) -> Any:
            # Callbacks have been called for this epoch before the checkpoint.
            objects = {"model": trainer.model, "optimizer": trainer.optimizer}
            undo = undo_of(objects, constant_batch=True) if self._step else []
            control = begin_epoch(*args, **kwargs)
            for set_back in undo:
                set_back()
            if undo and self._rng is not None:
                self._rng.load_for_loader(trainer.state.global_step)
            return control

        load_rng = trainer._load_rng_state

        def load_rng_state(checkpoint: str | None) -> None:
            load_rng(checkpoint)
            states, self._rng = self._rng, None
            if states is not None and not checkpoints.has_rng_state(trainer.args, checkpoint):
                states.load()

        handler.on_epoch_begin = on_epoch_begin
        trainer._load_rng_state = load_rng_state
        trainer.get_train_dataloader = get_train_dataloader
        trainer.compute_loss = compute_loss
        trainer.train = begin
        trainer._save_checkpoint = save_checkpoint
        if hasattr(trainer, "set_initial_training_values"):
            values = trainer.set_initial_training_values
            trainer.set_initial_training_values = lambda *args, **kwargs: self._limit_epochs(
                values(*args, **kwargs)
            )

    def _limit_epochs(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Set the number of epochs to 0 if the resumed training had already ended: by early
        stopping, or in the middle of an epoch by ``max_steps``.
        """
        self._num_epochs, *others, max_steps = values
        record = read_record(self._resumed) if self._resumed else {}
        over = record.get("ended") and record.get("max_steps") == max_steps
        return (0 if over else self._num_epochs, *others, max_steps)

    def _checkpoint_to_resume(self, resume_from: str | bool | None) -> str | None:
        """Return the checkpoint from which ``Trainer.train`` resumes. A checkpoint in the output
        folder must belong to this run or be a requested one, also if the script has chosen it
        itself.
        """
        folder = os.path.abspath(self._trainer.args.output_dir)
        if resume_from is True:
            path = self.latest(folder)
            if path is None:
                report.tell(f"There is no checkpoint in {folder} yet: a new run begins.")
            return path
        self._resumed = os.path.abspath(resume_from) if resume_from else ""
        if self._resumed and os.path.dirname(self._resumed) == folder:
            checkpoints.check_owner(read_record(self._resumed), self._resumed, self._run)
        return resume_from or None

    def _begin_checkpoint(self, folder: str, state: Any) -> None:
        """Write the record of a checkpoint that is about to be written. Raises ForeignSnapshotError
        if the folder has another job's checkpoints.
        """
        self._refuse_foreign(folder)
        if state.is_world_process_zero:
            path = os.path.join(folder, f"checkpoint-{state.global_step}")
            os.makedirs(path, exist_ok=True)
            facts = {"whole": False, "requested": self._is_requested(state)}
            write_record(path, self._run, facts)

    def _is_requested(self, state: Any) -> bool:
        """Return whether the checkpoint is written only on MalleTrain's request."""
        best = self._trainer.args.save_strategy == "best"
        is_own = self._is_own or (best and state.best_global_step == state.global_step)
        return self._requested and not is_own

    def _keep_best(self, trainer: Any, previous_best: str | None) -> None:
        """Restore the best checkpoint if Trainer has taken one that was written only on
        MalleTrain's request: an uninterrupted run would not have it.
        """
        state = trainer.state
        if not read_record(state.best_model_checkpoint or "").get("requested"):
            return
        state.best_model_checkpoint = previous_best
        if state.is_world_process_zero:
            folder = os.path.join(trainer.args.output_dir, f"checkpoint-{state.global_step}")
            state.save_to_json(os.path.join(folder, "trainer_state.json"))

    def _remove_superseded(self, args: Any, state: Any, spared: int) -> None:
        """Remove the checkpoints that were written only on MalleTrain's request, except among the
        ``spared`` newest ones, and the trainer's own beyond ``save_total_limit``.
        """
        for path in _checkpoints(args.output_dir)[spared:]:
            record = read_record(path)
            if record.get("requested") and checkpoints.is_own(record, self._run):
                shutil.rmtree(path, ignore_errors=True)
        if not self._is_requested(state):
            limit = args.save_total_limit
            requested = sum(
                bool(read_record(path).get("requested")) for path in _checkpoints(args.output_dir)
            )
            rotate_checkpoints(
                args.output_dir,
                limit and limit + requested,
                state.best_model_checkpoint,
                use_mtime=True,
            )

    def _refuse_foreign(self, folder: str) -> None:
        for path in _checkpoints(folder):
            if path != self._resumed:
                checkpoints.refuse_to_overwrite(read_record(path), path, self._run)

    def _loader(self, trainer: Trainer, make: Any) -> DataLoader[Any]:
        args, original = trainer.args, make()
        record = read_record(self._resumed) if self._resumed else {}
        self._batches = batches = ConstantBatch(
            len(original.dataset),
            args.train_batch_size,
            self._global_batch_size or record.get("global_batch_size"),
            args.gradient_accumulation_steps,
            args.seed if args.data_seed is None else args.data_seed,
            getattr(args, "train_sampling_strategy", "random") != "sequential",
            args.dataloader_drop_last,
        )
        _check_record(record, self._resumed, batches, args)
        args.gradient_accumulation_steps = batches.accumulate
        return DataLoader(
            original.dataset,
            batch_sampler=batches,
            collate_fn=original.collate_fn,
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            worker_init_fn=original.worker_init_fn,
            persistent_workers=original.persistent_workers,
            prefetch_factor=original.prefetch_factor,
            multiprocessing_context=original.multiprocessing_context,
        )

    def _weight(self, trainer: Trainer, items: Any, training: bool) -> float:
        batches = self._batches
        if batches is None or not training:
            return 1.0
        step, micro = self._step, self._micro
        self._micro += 1
        # Without items the loss is a mean, which Trainer divides by the number of micro-batches
        if items is None:
            return batches.weight(step, micro)
        # With this setting the loss is a part of the sum over all ranks.
        if trainer.args.average_tokens_across_devices:
            return 1.0
        global_batch_size, _ = batches.batch(step)
        return batches.share(step) * batches.plan.world_size / global_batch_size

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach to the new trainer. Trainer does not pass itself, but it is in the call stack."""
        frame = inspect.currentframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prepare the training loop.

        Raises:
            RuntimeError: the trainer does not use the batches of this callback.
            ForeignSnapshotError: the output folder has another job's checkpoints.
        """
        if self._batches is None:
            raise RuntimeError(
                "This Trainer was made without MalleTrainCallback, so that a change of nodes would "
                "change its steps. Give it to Trainer(callbacks=[callback]), or call "
                "callback.attach(trainer) before trainer.train()."
            )
        self._refuse_foreign(args.output_dir)
        state.num_train_epochs = self._num_epochs or state.num_train_epochs
        self._epochs = state.global_step // self._batches.steps_per_epoch
        self._step = state.global_step % self._batches.steps_per_epoch
        self._eval_on_start = args.eval_on_start
        self._callbacks.begun = False
        self._numbers = ModuleNumbers({"model": self._trainer.model})
        if self._resumed:
            args.eval_on_start = False  # done when the training started
            self._restore_state(state)
            self._rng = checkpoints.RandomStates(
                checkpoints.read_states(self._resumed), self._guard.from_rank_0
            )

    def _restore_state(self, state: Any) -> None:
        """Restore callbacks with a state (early stopping), plain numbers of the model, and the loss
        that is not logged yet.
        """
        trainer, record = self._trainer, read_record(self._resumed)
        self._numbers.restore(record.get("numbers", {}))
        self._callbacks.has_notice = bool(record.get("callbacks_notice"))
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                alike = [c for c in trainer.callback_handler.callbacks if type(c) is type(callback)]
                states = state.stateful_callbacks.get(name) or []
                states = states[-len(alike) :] if isinstance(states, list) else [states]
                for each, stored in zip(alike, states, strict=False):
                    vars(each).update(stored.get("attributes", {}))
        unlogged = record.get("unlogged")
        if unlogged and hasattr(trainer, "_tr_loss"):
            loss, trainer._globalstep_last_logged = unlogged
            trainer._tr_loss += loss
            # The loss is of steps that are not in the mean of this part of the run.
            trainer._total_loss_scalar -= loss

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the end of the training: the code after it must run only once."""
        args.eval_on_start = self._eval_on_start
        if state.is_world_process_zero:
            self._remove_superseded(args, state, 1)
        report.training_over()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch. Trainer itself skips the batches that were trained on."""
        assert self._batches is not None
        self._epoch_over = False
        self._batches.epoch = self._epochs
        self._epochs += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Request the checkpoint that was due at the epoch's last step. Trainer writes it after
        evaluation and logging of the epoch.
        """
        self._epoch_over = True
        self._is_own = self._is_own or control.should_save
        self._step = 0  # even if the loop left the epoch early
        if self._requested or self._postponed:
            control.should_save = True
        self._postponed = False
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step at its first micro-batch."""
        self._micro = 0
        if not self._callbacks.begun:  # other callbacks have set up what they need
            self._callbacks.begin(self._trainer.callback_handler.callbacks)
            if state.is_world_process_zero:
                warn_about_unsaved_parameters(
                    {"model": self._trainer.model, "optimizer": self._trainer.optimizer},
                    "Trainer",
                    "Make what has them, such as a loss, a module of the model.",
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Count an optimizer step. A checkpoint of an epoch's last step is written only after the
        epoch's end, so that a run that resumes from it does not repeat the end.
        """
        assert self._batches is not None
        self._is_own = control.should_save
        self._requested = self._guard.step(self._batches.share(self._step))
        self._step += 1
        # Trainer counts micro-batches, whose number depends on the number of ranks.
        state.epoch = self._epochs - 1 + self._step / self._batches.steps_per_epoch
        if self._requested:
            self._began = time.monotonic()
            control.should_save = True
        if control.should_save and self._is_last_step(control):
            control.should_save, self._postponed = False, True
        return control

    def _is_last_step(self, control: Any) -> bool:
        """Return whether the end of the epoch follows the current step."""
        assert self._batches is not None
        leaves = control.should_training_stop or control.should_epoch_stop
        return bool(leaves) or self._step == self._batches.steps_per_epoch

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete the record of a checkpoint that was written, and remove superseded ones."""
        unlogged = self._unlogged()
        over = self._epoch_over and control.should_training_stop
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and self._batches is not None and os.path.isdir(folder):
            checkpoints.save_states(folder)
            self._callbacks.tell_changed()
            plan = self._batches.plan
            facts = {
                "global_batch_size": plan.global_batch_size,
                "num_samples": plan.num_samples,
                "max_steps": state.max_steps,
                "steps_per_epoch": self._batches.steps_per_epoch,
                "unlogged": unlogged,
                "numbers": self._numbers.changed(),
                "callbacks_notice": self._callbacks.has_notice,
                "ended": over,
                "whole": True,
                "requested": self._is_requested(state),
            }
            write_record(folder, self._run, facts)
            # the previous checkpoint stays until the next one
            self._remove_superseded(args, state, 2)
        if not self._epoch_over and self._is_last_step(control):
            self._postponed = True  # an evaluation at this step has ended the training
        elif self._requested:
            self._requested = False
            self._guard.saved(args.output_dir, self._began, over)

    def _unlogged(self) -> tuple[float, int] | None:
        """Return (sum of the losses since the last log, averaged over the ranks; step of that log);
        None if unknown.
        """
        loss = getattr(self._trainer, "_tr_loss", None)
        if loss is None:
            return None
        return self._guard.mean(float(loss)), self._trainer._globalstep_last_logged


def _continue_trackers(trainer: Any) -> None:
    """Make the experiment trackers of ``trainer`` continue the run of this job."""
    if not run_id():
        return
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        if name == "TensorBoardCallback" and getattr(callback, "logging_dir", "") is None:
            callback.logging_dir = os.path.join(trainer.args.output_dir, "runs", run_id())
        elif name == "MLflowCallback" and trainer.is_world_process_zero():
            mlflow_run()


def _checkpoints(folder: str) -> list[str]:
    """Return the checkpoint folders in ``folder``, newest first."""
    folder = os.path.abspath(folder)
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    numbers = [name.partition("checkpoint-")[2] for name in names]
    return [
        os.path.join(folder, f"checkpoint-{number}")
        for number in sorted((int(n) for n in numbers if n.isdecimal()), reverse=True)
    ]


def _has_trainer_state(path: str) -> bool:
    """Return whether a checkpoint without a record, of another release or of Trainer alone, is
    complete: Trainer writes its state last.
    """
    return os.path.exists(os.path.join(path, "trainer_state.json"))


def _check(trainer: Trainer) -> None:
    """Raise ValueError if the trainer's steps cannot be the same at every number of ranks."""
    args, kind = trainer.args, type(trainer)
    strategy = getattr(args, "train_sampling_strategy", "random")
    overridden = any(
        getattr(kind, name, None) is not getattr(Trainer, name, None)
        for name in ("get_train_dataloader", "_get_train_sampler")
    )
    reasons = {
        "train_dataset has no length": not isinstance(trainer.train_dataset, Sized),
        f"{kind.__name__} makes its own data loader or sampler": overridden,
        f"train_sampling_strategy={strategy!r} is set": strategy not in ("random", "sequential"),
        "group_by_length is set": bool(getattr(args, "group_by_length", False)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"MalleTrainCallback: {reason}: {_OWN_ORDER_REASON}.")
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    if sharded or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise ValueError(
            "MalleTrainCallback: the model is sharded over the ranks (DeepSpeed, FSDP, tensor or "
            "sequence parallel). A checkpoint of it cannot be resumed on another number of ranks."
        )
    if args.ignore_data_skip:
        raise ValueError(
            "MalleTrainCallback: with ignore_data_skip each rescale would repeat the epoch's first "
            "samples. Leave it out; skipping costs no reading of data here."
        )
    if args.save_only_model:
        raise ValueError(
            "MalleTrainCallback: with save_only_model a checkpoint has no optimizer and no "
            "schedule, so that a change of nodes would begin both anew. Leave it out."
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "MalleTrainCallback: auto_find_batch_size may choose another batch after each rescale. "
            "Set per_device_train_batch_size."
        )


def _check_record(
    record: dict[str, Any], checkpoint: str, batches: ConstantBatch, args: Any
) -> None:
    """Raise ValueError if the steps of a checkpoint are based on other sizes than those of this
    run.
    """
    if not checkpoint:
        return
    if not record:
        try:
            with open(os.path.join(checkpoint, "trainer_state.json")) as file:
                steps = json.load(file).get("max_steps")
        except (OSError, ValueError):
            return  # Trainer reports the problem itself
        if args.max_steps > 0 or steps == -(-args.num_train_epochs * batches.steps_per_epoch // 1):
            return
        raise ValueError(
            f"{checkpoint} was written without MalleTrainCallback, or by a release before it kept "
            f"the global batch: its {steps} steps are not those of this run, so that samples would "
            "be left out or repeated. Give MalleTrainCallback(global_batch_size=…) the global "
            "batch it was trained with, or begin anew in another output folder."
        )
    expected = {
        "global_batch_size": batches.plan.global_batch_size,
        "num_samples": batches.plan.num_samples,
        "steps_per_epoch": batches.steps_per_epoch,
    }
    changed = [f"{key} {record.get(key)}, now {value}" for key, value in expected.items()
               if record.get(key) != value]  # fmt: skip
    if changed:
        raise ValueError(
            f"The steps of {checkpoint} count other samples ({'; '.join(changed)}). Go on with the "
            "same data, the same global batch and the same largest number of ranks, or begin anew "
            "in another output folder."
        )
