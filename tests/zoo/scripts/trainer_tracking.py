"""Restart mode: the loggers of Trainer and Lightning, with the real tools, without a server."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from malletrain.training.tracking import mlflow_run
from tests.zoo.scripts.hugging_face import train_with_trainer
from tests.zoo.scripts.lightning_trainer import Module, fit_module
from tests.zoo.trace import Trace


def _offline() -> None:
    os.environ.update(
        WANDB_MODE="offline",
        WANDB_DIR=str(Path.cwd()),
        WANDB_SILENT="true",
        WANDB_PROJECT="zoo",
        MLFLOW_ALLOW_FILE_STORE="true",
        MLFLOW_EXPERIMENT_NAME="zoo",
        MLFLOW_TRACKING_URI=(Path.cwd() / "mlruns").as_uri(),
        GIT_PYTHON_REFRESH="quiet",
    )


class LoggingModule(Module):
    """A regression that logs its learning rate at each step."""

    def on_before_optimizer_step(self, optimizer: object) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("rate", self.lr)


def trainer_wandb(trace: Trace) -> None:
    """Trainer's callback of W&B."""
    _offline()
    train_with_trainer(trace, report_to=["wandb"], logging_steps=1, eval_strategy="epoch")


def trainer_mlflow(trace: Trace) -> None:
    """Trainer's callbacks of MLflow and TensorBoard."""
    _offline()
    os.environ["TENSORBOARD_LOGGING_DIR"] = "board"
    tools = ["mlflow", "tensorboard"]
    train_with_trainer(trace, report_to=tools, logging_steps=1, eval_strategy="epoch")


def fit_wandb(trace: Trace) -> None:
    """Lightning's WandbLogger."""
    _offline()
    logger = WandbLogger(project="zoo", save_dir=".")
    fit_module(trace, LoggingModule(), logger=logger, log_every_n_steps=1)


def fit_mlflow(trace: Trace) -> None:
    """Lightning's MLFlowLogger and TensorBoardLogger."""
    _offline()
    run = mlflow_run("zoo") if os.environ["RANK"] == "0" else ""
    loggers = [
        MLFlowLogger("zoo", run_id=run or None, tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
        TensorBoardLogger("board", name=""),
    ]
    fit_module(trace, LoggingModule(), logger=loggers, log_every_n_steps=1)
