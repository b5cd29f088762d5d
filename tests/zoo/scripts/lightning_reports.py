"""Restart mode: what public bug reports of Lightning are about."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics

from tests.zoo.scripts.lightning_trainer import Module, fit_module
from tests.zoo.trace import Trace


class Validated(Module):
    """Notes the loss of each validation, of several batches, and how many there were."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.__dict__["trace"] = trace
        self.__dict__["batches"] = []

    def validation_step(self, batch: Any, number: int) -> None:
        self.batches.append(number)
        super().validation_step(batch, number)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            loss = float(self.trainer.callback_metrics["val_loss"])
            step = self.trainer.global_step
            self.trace.note("val_loss", step, loss=loss, batches=list(self.batches))
        self.batches.clear()


class EpochMeans(Validated):
    """Logs its training loss by epoch, and keeps the same mean in a metric of torchmetrics."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.error = torchmetrics.MeanSquaredError().double()

    def training_step(self, batch: Any, number: int) -> Any:
        x, y, numbers = batch
        self.seen += numbers.tolist()
        made = self.layers(x)
        self.error.update(made.detach(), y)
        loss = ((made - y) ** 2).mean()
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=len(x), sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss, error = self.trainer.callback_metrics["loss"], self.error.compute()
        self.trace.note("means", self.current_epoch, loss=float(loss), error=float(error))
        self.error.reset()


class Annealed(Validated):
    """Lowers a temperature with each epoch."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.temperature = 2.0

    def training_step(self, batch: Any, number: int) -> Any:
        return super().training_step(batch, number) / self.temperature

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.7


def _fit(trace: Trace, module: Validated, *more: Any, **options: Any) -> None:
    fit_module(trace, module, *more, validation_batch=2, **options)


def validated(trace: Trace) -> None:
    """Validations of several batches, by step (pytorch-lightning#19549, #20277, #20288)."""
    _fit(trace, Validated(trace), val_check_interval=3, check_val_every_n_epoch=None)


def epoch_means(trace: Trace) -> None:
    """Training ends by the mean of an epoch's losses (torchmetrics#637)."""
    stopping = pl.callbacks.EarlyStopping(
        "loss", min_delta=0.05, patience=1, check_on_train_epoch_end=True
    )
    _fit(trace, EpochMeans(trace), stopping, max_epochs=6)


def annealed(trace: Trace) -> None:
    """A plain number in an attribute of the module."""
    _fit(trace, Annealed(trace))


def saved_by_step(trace: Trace) -> None:
    """``ModelCheckpoint(every_n_train_steps=2)`` keeps all (pytorch-lightning#10995)."""
    checkpoint = pl.callbacks.ModelCheckpoint("kept", every_n_train_steps=2, save_top_k=-1)
    _fit(trace, Validated(trace), checkpoint, folder="kept")


def best_two(trace: Trace) -> None:
    """``ModelCheckpoint`` keeps the best two, and the last one (pytorch-lightning#5173)."""
    checkpoint = pl.callbacks.ModelCheckpoint(
        "kept", monitor="val_loss", mode="max", save_top_k=2, save_last=True
    )
    _fit(trace, Validated(trace), checkpoint, folder="kept")


def averaged(trace: Trace) -> None:
    """``EMAWeightAveraging`` (pytorch-lightning#20545)."""
    _fit(trace, Validated(trace), pl.callbacks.EMAWeightAveraging(decay=0.8))


def swa(trace: Trace) -> None:
    """``StochasticWeightAveraging`` (pytorch-lightning#9938)."""
    _fit(trace, Validated(trace), pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1))


class Monitored(Validated):
    """ReduceLROnPlateau by the validation, which runs every second epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.5
        )
        plan = {"scheduler": scheduler, "monitor": "val_loss", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class WarmRestarts(Validated):
    """CosineAnnealingWarmRestarts, a step an update."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)
        plan = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": plan}


def monitored(trace: Trace) -> None:
    """A validation every second epoch (pytorch-lightning#20495, #4655)."""
    _fit(trace, Monitored(trace), max_epochs=4, check_val_every_n_epoch=2)


def clipped(trace: Trace) -> None:
    """Clipping, the rates in a CSV file, warm restarts by step (pytorch-lightning#5455)."""
    rates = pl.callbacks.LearningRateMonitor("step")
    logger = pl.loggers.CSVLogger("rows", version=0, flush_logs_every_n_steps=1)
    _fit(trace, WarmRestarts(trace), rates, gradient_clip_val=0.5, logger=logger)


class Swapped(pl.Callback):
    """The averaged weights take the model's place in a validation, until training goes on."""

    def __init__(self) -> None:
        self.average: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.step = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *more: Any) -> None:
        if trainer.global_step == self.step:
            return  # a micro-batch
        self.step = trainer.global_step
        for name, value in module.layers.state_dict().items():
            before = self.average.get(name, value)
            self.average[name] = 0.8 * before + 0.2 * value

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.own = {k: v.clone() for k, v in module.layers.state_dict().items()}
            module.layers.load_state_dict(self.average)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.own:
            module.layers.load_state_dict(self.own)
            self.own = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "own": self.own, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.own, self.step = state["average"], state["own"], state["step"]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_train_epoch_start(trainer, module)


def swapped(trace: Trace) -> None:
    """Averages in the model's place from a validation to the next epoch (schnetpack#785)."""
    _fit(trace, Validated(trace), Swapped())
