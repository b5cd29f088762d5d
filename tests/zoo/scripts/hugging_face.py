"""Restart mode: Hugging Face's Trainer with evaluations, callbacks and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from malletrain.integrations.transformers import MalleTrainCallback
from tests.zoo.scripts.parts import BATCH, EPOCHS, Numbered, make_model
from tests.zoo.trace import Trace


class Items(torch.utils.data.Dataset[Any]):
    """Samples in the form that Trainer's collator takes."""

    def __init__(self, *numbered: int) -> None:
        self.data = Numbered(*numbered)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> dict[str, Any]:
        x, y, own = self.data[number]
        return {"x": x.float(), "labels": y.float(), "number": own}


class Net(nn.Module):
    """A model that returns its loss and remembers the samples of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model().float()
        self.temperature = 1.0
        self.seen: list[int] = []

    def forward(self, x: Any, labels: Any, number: Any) -> dict[str, Any]:
        if self.training:
            self.seen += number.tolist()
        made = self.layers(x) / self.temperature
        return {"loss": ((made - labels) ** 2).mean(), "logits": made}


class Recorder(TrainerCallback):
    """Writes down what Trainer calls."""

    def __init__(self, trace: Trace, net: Net) -> None:
        self.trace, self.net, self.lr = trace, net, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.lr = more["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trace.step(state.global_step, self.net.seen, self.lr)
        self.net.seen = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trace.note("epoch end", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.trace.note("evaluation", state.global_step, loss=more["metrics"]["eval_loss"])


def train_with_trainer(trace: Trace, more: list[Any] | None = None, **arguments: Any) -> None:
    """Train with arguments of ``TrainingArguments`` and ``more`` callbacks."""
    net = Net()
    callback = MalleTrainCallback(global_batch_size=BATCH)
    args = TrainingArguments(
        "out",
        **{
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 1,  # the mean over ranks is that over samples
            "learning_rate": 0.05,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "ddp_backend": "gloo",
            "remove_unused_columns": False,
            **arguments,
        },
    )
    trainer = Trainer(
        net,
        args,
        train_dataset=Items(),
        eval_dataset=Items(6, 4),
        callbacks=[Recorder(trace, net), callback, *(more or [])],
    )
    trainer.train(resume_from_checkpoint=callback.latest("out"))
    trace.note("trained", "end", step=trainer.state.global_step)
    trace.finish(net.layers)


def trainer(trace: Trace) -> None:
    """A linear schedule and an evaluation after each epoch."""
    train_with_trainer(trace, eval_strategy="epoch")


def trainer_cosine(trace: Trace) -> None:
    """A warm-up and a cosine, evaluated every three steps."""
    train_with_trainer(
        trace, eval_strategy="steps", eval_steps=3, lr_scheduler_type="cosine", warmup_steps=3
    )


def trainer_early_stopping(trace: Trace) -> None:
    """The best model is kept, and training ends when nothing gets better."""
    train_with_trainer(
        trace,
        [EarlyStoppingCallback(early_stopping_patience=2)],
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
    )
