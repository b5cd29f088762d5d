"""Restart mode: what more public bug reports of Lightning are about."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from malletrain.integrations.lightning import MalleTrainCallback
from tests.zoo.scripts.lightning_reports import Validated, _fit
from tests.zoo.scripts.lightning_trainer import Module, Recorder
from tests.zoo.scripts.parts import BATCH, EPOCHS, Numbered
from tests.zoo.trace import Trace


class Backed(Validated):
    """A head on a backbone that is trained later."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        torch.manual_seed(2)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
        self.layers = nn.Sequential(self.backbone, nn.Linear(4, 1).double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9
        )

    def on_train_epoch_end(self) -> None:
        groups = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        trains = [p.requires_grad for p in self.backbone.parameters()]
        self.trace.note("groups", self.current_epoch, lrs=groups, trains=trains)


def finetuning(trace: Trace) -> None:
    """``BackboneFinetuning`` (pytorch-lightning#8502, #21901)."""
    later = pl.callbacks.BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False
    )
    _fit(trace, Backed(trace), later, max_epochs=4)


class Growing(Module):
    """More of the data with each epoch, through the hook."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.__dict__["callback"] = callback

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        part = Subset(Numbered(), range(12 + 4 * epoch))
        return self.callback.loader(part, 2, BATCH, seed=7)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbered(6, 4), batch_size=6)


def reloading(trace: Trace) -> None:
    """``reload_dataloaders_every_n_epochs`` (pytorch-lightning#21492)."""
    callback = MalleTrainCallback("states")
    module = Growing(callback)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        callbacks=[Recorder(trace), callback],
        default_root_dir="out",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(module, ckpt_path=callback.latest())
    trace.note("trained", "end", step=trainer.global_step)
    trace.finish(module.layers)
