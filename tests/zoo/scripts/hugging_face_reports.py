"""Restart mode: what public bug reports of Trainer are about."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from tests.zoo.scripts.hugging_face import _trainer
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
    _trainer(
        trace,
        [History(trace)],
        eval_on_start=True,
        eval_strategy="epoch",
        num_train_epochs=2.5,
        logging_steps=3,
    )


def plateau(trace: Trace) -> None:
    """A schedule by the evaluations, and the first step logged."""
    _trainer(
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
    _trainer(trace, [History(trace)], save_strategy="steps", save_steps=4, save_total_limit=2)


def best_kept(trace: Trace) -> None:
    """One checkpoint is kept beside the best one, of a step that was saved (transformers#35070)."""
    _trainer(
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
