"""Restart mode: Lightning with validation, callbacks and schedules."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from malletrain.integrations.lightning import MalleTrainCallback
from tests.zoo.scripts.parts import BATCH, EPOCHS, Numbered, make_model
from tests.zoo.trace import Trace


class Module(pl.LightningModule):
    """A regression whose schedule moves once an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.seen: list[int] = []
        self.lr = 0.0

    def training_step(self, batch: Any, _: int) -> Any:
        x, y, numbers = batch
        self.seen += numbers.tolist()
        return ((self.layers(x) - y) ** 2).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        x, y, _numbers = batch
        self.log("val_loss", ((self.layers(x) - y) ** 2).mean(), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.lr = optimizer.param_groups[0]["lr"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Recorder(pl.Callback):
    """Writes down what Lightning calls."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.before = trace, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, *more: Any) -> None:
        if trainer.global_step > self.before:
            self.before = trainer.global_step
            self.trace.step(trainer.global_step, module.seen, module.lr)
            module.seen = []

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.trace.note("validation", trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.trace.note("epoch end", trainer.current_epoch)


def _fit(trace: Trace, more: list[Any] | None = None, **options: Any) -> None:
    callback = MalleTrainCallback("states")
    module = Module()
    trainer = pl.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "devices": 1,
            "num_nodes": int(os.environ["WORLD_SIZE"]),
            "strategy": "ddp",
            "callbacks": [Recorder(trace), callback, *(more or [])],
            "default_root_dir": "out",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        }
    )
    loader = callback.loader(Numbered(), 2, BATCH, seed=7)
    # Each rank validates on all: with a sampler of Lightning's the ranks would see other samples.
    test = DataLoader(Numbered(6, 4), batch_size=6)
    trainer.fit(module, loader, test, ckpt_path=callback.latest())
    trace.note("trained", "end", step=trainer.global_step)
    trace.finish(module.layers)


def fit(trace: Trace) -> None:
    """A schedule by epoch and a validation after each epoch."""
    _fit(trace, use_distributed_sampler=False)


def fit_early_stopping(trace: Trace) -> None:
    """EarlyStopping and ModelCheckpoint by the validation's loss."""
    _fit(
        trace,
        [
            pl.callbacks.EarlyStopping("val_loss", patience=2),
            pl.callbacks.ModelCheckpoint("best", monitor="val_loss", save_top_k=1),
        ],
        use_distributed_sampler=False,
        enable_checkpointing=True,
    )


def fit_limited(trace: Trace) -> None:
    """``limit_train_batches`` and ``val_check_interval`` in batches."""
    _fit(trace, use_distributed_sampler=False, limit_train_batches=6, val_check_interval=3)


def fit_csv(trace: Trace) -> None:
    """Lightning's CSV logger, a row for each step."""
    logger = pl.loggers.CSVLogger("results", name="csv", version=0)
    _fit(trace, use_distributed_sampler=False, logger=logger, log_every_n_steps=1)
