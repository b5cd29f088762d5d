"""Hugging Face ``Trainer``: progress, the same steps at any number of ranks, and a checkpoint
before the job is moved.

callback = MalleTrainCallback()
trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.latest(args.output_dir))

Decides the trainer's training data loader and its accumulation of gradients, so that ``Trainer``
counts the same steps and epochs whatever the number of ranks. The loop, the schedule and what is in
a checkpoint stay the library's.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from malletrain.integrations.constant_batch import ConstantBatch
from malletrain.integrations.guard import StateGuard
from malletrain.training import report

RECORD = "malletrain.json"
"""In a checkpoint's folder, written last: the global batch that its steps count."""
_OWN_ORDER = "its data order is its own, and cannot be kept over a change of nodes"


class MalleTrainCallback(TrainerCallback):
    """Give it to the ``Trainer`` in ``callbacks=``. The output folder must be one that all nodes
    share.

    The global batch is the same at every number of ranks: each takes its share of it, in as many
    micro-batches as ``per_device_train_batch_size`` needs. For a loss without notice set
    ``save_strategy="steps"`` and ``save_steps`` as usual: only a loss with notice asks for a
    checkpoint.

    Args:
        global_batch_size: samples of a step over all ranks. By default what the trainer's arguments
            make at the job's largest number of ranks: ``per_device_train_batch_size *
            gradient_accumulation_steps`` on each of them.
    """

    def __init__(self, global_batch_size: int | None = None) -> None:
        self._global_batch_size = global_batch_size
        self._guard = StateGuard()
        self._batches: ConstantBatch | None = None
        self._resumed = ""
        self._step = self._micro = 0
        self._epochs = 0
        self._wanted = False
        self._began = 0.0

    def latest(self, output_dir: str) -> str | None:
        """The newest whole checkpoint to resume from; None in a new run."""
        try:
            names = os.listdir(output_dir)
        except FileNotFoundError:
            return None
        numbers = [name.partition("checkpoint-")[2] for name in names]
        paths = [
            os.path.join(output_dir, f"checkpoint-{number}")
            for number in sorted((int(n) for n in numbers if n.isdecimal()), reverse=True)
        ]
        whole = [path for path in paths if os.path.exists(os.path.join(path, RECORD))]
        if whole and paths[0] != whole[0]:
            report.tell(f"{paths[0]} was not written to its end. Going on from {whole[0]}.")
        # those of other releases and of Trainer alone have no record
        self._resumed = next(iter(whole or paths), "")
        return self._resumed or None

    def attach(self, trainer: Trainer) -> None:
        """Have ``trainer`` take its batches from here; needed only when the callback was added
        after the trainer was made.
        """
        make, loss = trainer.get_train_dataloader, trainer.compute_loss

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

        trainer.get_train_dataloader = get_train_dataloader
        trainer.compute_loss = compute_loss

    def _loader(self, trainer: Trainer, make: Any) -> DataLoader[Any]:
        args, made = trainer.args, make()
        record = _record(self._resumed)
        self._batches = batches = ConstantBatch(
            len(made.dataset),
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
            made.dataset,
            batch_sampler=batches,
            collate_fn=made.collate_fn,
            num_workers=made.num_workers,
            pin_memory=made.pin_memory,
            worker_init_fn=made.worker_init_fn,
            persistent_workers=made.persistent_workers,
            prefetch_factor=made.prefetch_factor,
            multiprocessing_context=made.multiprocessing_context,
        )

    def _weight(self, trainer: Trainer, items: Any, training: bool) -> float:
        batches = self._batches
        if batches is None or not training:
            return 1.0
        step, micro = self._step, self._micro
        self._micro += 1
        if items is None:  # a mean, which Trainer divides by the number of micro-batches
            return batches.weight(step, micro)
        if trainer.args.average_tokens_across_devices:  # a share of the sum over all ranks
            return 1.0
        whole, _ = batches.batch(step)
        return batches.share(step) * batches.plan.world_size / whole

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer was made; Trainer does not say which, but it is the one that calls."""
        frame = inspect.currentframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The loop begins. Raises RuntimeError when its batches are not from here."""
        if self._batches is None:
            raise RuntimeError(
                "This Trainer was made without MalleTrainCallback, so that a change of nodes would "
                "change its steps. Give it to Trainer(callbacks=[callback]), or call "
                "callback.attach(trainer) before trainer.train()."
            )
        self._epochs = state.global_step // self._batches.steps_per_epoch
        self._step = state.global_step % self._batches.steps_per_epoch

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What the script does now is done once."""
        report.training_over()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer skips the batches of the epoch that were trained on."""
        assert self._batches is not None
        self._batches.epoch = self._epochs
        self._epochs += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The next begins with its first step, even where this one was left early."""
        self._step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first micro-batch of a step comes."""
        self._micro = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """One optimizer step is done."""
        assert self._batches is not None
        self._wanted = self._guard.step(self._batches.share(self._step))
        self._step += 1
        if self._wanted:
            self._began = time.monotonic()
            control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint was written."""
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and self._batches is not None and os.path.isdir(folder):
            plan = self._batches.plan
            record = {
                "global_batch_size": plan.global_batch_size,
                "num_samples": plan.num_samples,
                "max_steps": state.max_steps,
                "steps_per_epoch": self._batches.steps_per_epoch,
            }
            with open(os.path.join(folder, RECORD), "w") as file:
                json.dump(record, file)
        if self._wanted:
            self._wanted = False
            self._guard.saved(args.output_dir, self._began)


def _check(trainer: Trainer) -> None:
    """Raises ValueError when the trainer's steps cannot be kept over a change of nodes."""
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
    for reason, given in reasons.items():
        if given:
            raise ValueError(f"MalleTrainCallback: {reason}: {_OWN_ORDER}.")
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
    if args.auto_find_batch_size:
        raise ValueError(
            "MalleTrainCallback: auto_find_batch_size may choose another batch after each rescale. "
            "Set per_device_train_batch_size."
        )


def _record(checkpoint: str) -> dict[str, Any]:
    try:
        with open(os.path.join(checkpoint, RECORD)) as file:
            found: dict[str, Any] = json.load(file)
            return found
    except (OSError, ValueError):
        return {}


def _check_record(
    record: dict[str, Any], checkpoint: str, batches: ConstantBatch, args: Any
) -> None:
    """Raises ValueError when the steps of a checkpoint count other samples than those of now."""
    if not checkpoint:
        return
    if not record:
        try:
            with open(os.path.join(checkpoint, "trainer_state.json")) as file:
                steps = json.load(file).get("max_steps")
        except (OSError, ValueError):
            return  # Trainer says what is wrong with it
        if args.max_steps > 0 or steps == -(-args.num_train_epochs * batches.steps_per_epoch // 1):
            return
        raise ValueError(
            f"{checkpoint} was written without MalleTrainCallback, or by a release before it kept "
            f"the global batch: its {steps} steps are not those of this run, so that samples would "
            "be left out or repeated. Give MalleTrainCallback(global_batch_size=…) the global "
            "batch it was trained with, or begin anew in another output folder."
        )
    now = {
        "global_batch_size": batches.plan.global_batch_size,
        "num_samples": batches.plan.num_samples,
        "steps_per_epoch": batches.steps_per_epoch,
    }
    changed = [f"{key} {record.get(key)}, now {value}" for key, value in now.items()
               if record.get(key) != value]  # fmt: skip
    if changed:
        raise ValueError(
            f"The steps of {checkpoint} count other samples ({'; '.join(changed)}). Go on with the "
            "same data, the same global batch and the same largest number of ranks, or begin anew "
            "in another output folder."
        )
