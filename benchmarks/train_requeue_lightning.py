"""The training of benchmarks/requeue.py for Lightning, whose SLURMEnvironment saves and requeues
the job on SIGUSR1.
"""

from __future__ import annotations

import argparse
import signal
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.requeue_slurm import exact_sampler, task
from benchmarks.requeue_training import SAMPLES, Digits, StepLog, arguments, network


class DigitsModule(LightningModule):
    """The model, its data, and the records of its steps.

    Args:
        args: the arguments of the script.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        rank, self._world = task()
        self.net, self._optimizer = network()
        self._sampler = exact_sampler(rank, self._world)
        self._digits, self._args = Digits(args.folder), args
        self._log: StepLog | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(
            range(SAMPLES),
            batch_sampler=self._sampler,
            collate_fn=list,
        )

    def on_train_start(self) -> None:
        self._log = StepLog(self._args.folder, self._args.training, self._args.step_s)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self._log is not None
        self._log.begin(self._sampler.position)

    def training_step(self, batch: list[int], batch_idx: int) -> torch.Tensor:
        return self._digits.loss(self.net, batch)

    def on_after_backward(self) -> None:
        assert self._log is not None
        self._log.wait_for_accelerator()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._log is not None
        self._sampler.advance()
        self._log.end(self._world)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sampler"] = self._sampler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._sampler.load_state_dict(checkpoint["sampler"])


def main() -> None:
    args = arguments(__doc__)
    folder = args.checkpoints / str(args.training)
    newest = ModelCheckpoint(
        folder, save_last=True, train_time_interval=timedelta(seconds=args.checkpoint_every_s)
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=task()[1],
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        max_epochs=1,
        callbacks=[newest],
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsModule(args), ckpt_path="last")


if __name__ == "__main__":
    main()
