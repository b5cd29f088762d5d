"""Restart mode: what further public bug reports of Lightning are about."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from tests.zoo.scripts.lightning_trainer import Module, fit_module
from tests.zoo.trace import Trace


class Plateau(Module):
    """A schedule by a validation that runs within the epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=0.2, cooldown=1
        )
        config = {"scheduler": scheduler, "monitor": "val_loss", "interval": "step"}
        return [optimizer], [{**config, "frequency": 2, "strict": False}]


class Patience(pl.Callback):
    """Notes how long the early stopping has waited."""

    def __init__(self, trace: Trace, stopping: pl.callbacks.EarlyStopping) -> None:
        self.trace, self.stopping = trace, stopping

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        waited, best = self.stopping.wait_count, float(self.stopping.best_score)
        self.trace.note("patience", trainer.current_epoch, waited=waited, best=best)


def stopping_within(trace: Trace) -> None:
    """Early stopping and a plateau by validations within the epoch (pytorch-lightning#18727,
    #14699, #14579).
    """
    stopping = pl.callbacks.EarlyStopping(
        "val_loss", patience=3, min_delta=0.05, check_on_train_epoch_end=False
    )
    patience = Patience(trace, stopping)
    fit_module(trace, Plateau(), stopping, patience, val_check_interval=2, max_epochs=5)
