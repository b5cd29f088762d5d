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


def fit_module(
    trace: Trace,
    module: Module,
    *more: pl.Callback,
    folder: str = "",
    validation_batch: int = 6,
    **options: Any,
) -> None:
    """Train ``module`` with options of ``Trainer`` and ``more`` callbacks; note the names of the
    files in ``folder`` at the end.
    """
    callback = MalleTrainCallback("states", every_s=trace.save_every_s)
    trainer = pl.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "devices": 1,
            "num_nodes": int(os.environ["WORLD_SIZE"]),
            "strategy": "ddp",
            "callbacks": [Recorder(trace), callback, *more],
            "default_root_dir": "out",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(folder),
            # Each rank validates on all: with a sampler of Lightning's the ranks would see other
            # samples.
            "use_distributed_sampler": False,
            **options,
        }
    )
    loader = callback.loader(Numbered(), 2, BATCH, seed=7)
    test = DataLoader(Numbered(6, 4), batch_size=validation_batch)
    trainer.fit(module, loader, test, ckpt_path=callback.latest())
    trace.note("trained", "end", step=trainer.global_step)
    if folder and trainer.is_global_zero:
        files = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        trace.note("files", "end", names=sorted(files))
    trace.finish(module.layers)


def fit(trace: Trace) -> None:
    """A schedule by epoch and a validation after each epoch."""
    fit_module(trace, Module())


def fit_early_stopping(trace: Trace) -> None:
    """EarlyStopping and ModelCheckpoint by the validation's loss."""
    fit_module(
        trace,
        Module(),
        pl.callbacks.EarlyStopping("val_loss", patience=2),
        pl.callbacks.ModelCheckpoint("best", monitor="val_loss", save_top_k=1),
        folder="best",
    )


def fit_limited(trace: Trace) -> None:
    """``limit_train_batches`` and ``val_check_interval`` in batches."""
    fit_module(trace, Module(), limit_train_batches=6, val_check_interval=3)


def fit_csv(trace: Trace) -> None:
    """Lightning's CSV logger, a row for each step, and its checkpoints beside the rows."""
    logger = pl.loggers.CSVLogger("results", name="csv", version=0)
    fit_module(trace, Module(), logger=logger, log_every_n_steps=1)


def fit_as_it_comes(trace: Trace) -> None:
    """A logger that chooses its version, and Lightning's own ModelCheckpoint in its folder."""
    logger = pl.loggers.CSVLogger("out", name="csv")
    fit_module(trace, Module(), folder="out", logger=logger, log_every_n_steps=1)
