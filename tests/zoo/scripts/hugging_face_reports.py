"""Restart mode: what public bug reports of Trainer are about."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from malletrain.integrations.transformers import MalleTrainCallback
from tests.zoo.scripts.hugging_face import Recorder, train_with_trainer
from tests.zoo.scripts.parts import BATCH, EPOCHS, SAMPLES
from tests.zoo.trace import Trace

_TIMES = ("runtime", "per_second", "flos", "grad_norm", "train_loss")
"""Parts of the names of what an entry of the log history has anew in each run."""


class History(TrainerCallback):
    """Notes what was logged, the best step, and the checkpoints that are left."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if not state.is_world_process_zero:
            return
        for number, entry in enumerate(state.log_history):
            values = {k: v for k, v in entry.items() if not any(part in k for part in _TIMES)}
            self.trace.note("logged", number, **values)
        best = os.path.basename(state.best_model_checkpoint or "")
        self.trace.note("best", "end", step=state.best_global_step, checkpoint=best)
        if args.save_strategy != "no":
            names = [name for name in os.listdir("out") if name.startswith("checkpoint")]
            self.trace.note("files", "end", names=sorted(names))


def begun_with_evaluation(trace: Trace) -> None:
    """``eval_on_start``, two and a half epochs, logs each three steps (transformers#31677)."""
    train_with_trainer(
        trace,
        [History(trace)],
        eval_on_start=True,
        eval_strategy="epoch",
        num_train_epochs=2.5,
        logging_steps=3,
    )


def plateau(trace: Trace) -> None:
    """A schedule by the evaluations, and the first step logged."""
    train_with_trainer(
        trace,
        [History(trace)],
        eval_strategy="epoch",
        logging_steps=2,
        logging_first_step=True,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.9},
        metric_for_best_model="eval_loss",
    )


def two_kept(trace: Trace) -> None:
    """``save_total_limit=2`` keeps the last two of the script's own (transformers#11748)."""
    train_with_trainer(
        trace, [History(trace)], save_strategy="steps", save_steps=4, save_total_limit=2
    )


def best_kept(trace: Trace) -> None:
    """One checkpoint is kept beside the best one, of a step that was saved (transformers#35070)."""
    train_with_trainer(
        trace,
        [History(trace)],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )


class Cooling(TrainerCallback):
    """Lowers a temperature of the model when an epoch begins."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        more["model"].temperature *= 0.7

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trace.note("temperature", state.global_step, value=more["model"].temperature)


def cooled(trace: Trace) -> None:
    """A callback changes the model when an epoch begins (OneTrainer#1470, ace#1233)."""
    train_with_trainer(trace, [Cooling(trace)], eval_strategy="epoch")


class Sentences(torch.utils.data.Dataset[Any]):
    """Sequences of which different numbers of tokens count."""

    def __init__(self, count: int = SAMPLES, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 7, (count, 5), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Any]:
        labels = self.tokens[number].clone()
        labels[1 + number % 4 :] = -100
        return {"input_ids": self.tokens[number], "labels": labels, "number": number}


class Language(nn.Module):
    """Takes ``num_items_in_batch`` as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7))
        self.seen: list[int] = []

    def forward(
        self, input_ids: Any, labels: Any, number: Any, num_items_in_batch: Any = None, **more: Any
    ) -> dict[str, Any]:
        if self.training:
            self.seen += number.tolist()
        made = self.layers(input_ids.roll(1, 1))
        kind = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(made.transpose(1, 2), labels, reduction=kind)
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return {"loss": loss, "logits": made}


def tokens(trace: Trace) -> None:
    """A loss by token over sequences of different lengths, tokens counted (transformers#35438,
    #34373).
    """
    net = Language()
    callback = MalleTrainCallback(global_batch_size=BATCH)
    args = TrainingArguments(
        "out",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        learning_rate=0.05,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        remove_unused_columns=False,
        include_num_input_tokens_seen="all",
    )
    trainer = Trainer(
        net,
        args,
        train_dataset=Sentences(),
        callbacks=[Recorder(trace, net), callback, History(trace)],
    )
    trainer.train(resume_from_checkpoint=callback.latest("out"))
    trace.note("trained", "end", tokens=int(trainer.state.num_input_tokens_seen))
    trace.finish(net.layers)


def best_only(trace: Trace) -> None:
    """``save_strategy="best"``, warm-up by ratio, gradients clipped, a limit in steps."""
    train_with_trainer(
        trace,
        [History(trace)],
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        save_total_limit=1,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        load_best_model_at_end=True,
        warmup_steps=3,
        max_steps=10,
        max_grad_norm=0.5,
    )


def accumulated(trace: Trace) -> None:
    """The arguments ask for accumulation themselves, and for decay and a polynomial schedule."""
    train_with_trainer(
        trace,
        [History(trace)],
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        lr_scheduler_type="polynomial",
        logging_steps=1,
        eval_strategy="epoch",
    )
