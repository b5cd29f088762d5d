"""Live mode: trainings that tools follow, the real ones, without a server. Rank 0 may be another
process after a change, so it opens the tool's run when it first has something to write.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlflow
import wandb
from torch.utils.tensorboard import SummaryWriter

from malletrain.training.tracking import mlflow_run, set_wandb_run
from tests.zoo.scripts.live import Training
from tests.zoo.scripts.parts import EPOCHS, evaluate
from tests.zoo.trace import Trace

Log = Callable[[str, float, int], None]


def _train(trace: Trace, log: Log) -> None:
    t = Training(trace)
    t.begin()
    for epoch in t.sampler.epochs(EPOCHS):
        for x, y, numbers in t.run.batches(t.loader):
            steps = t.run.steps_done
            t.train_batch(epoch, x, y, numbers)
            if t.run.rank == 0 and t.run.steps_done > steps:
                log("loss", evaluate(t.model), t.run.steps_done)
                trace.note("row", t.run.steps_done)
            trace.point("logged")
        if t.run.rank == 0:
            log("evaluation", evaluate(t.model, 5), t.run.steps_done)
        trace.point("evaluation logged")
    t.end()


def weights_and_biases(trace: Trace) -> None:
    """W&B offline."""
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(Path.cwd()), WANDB_SILENT="true")

    def log(name: str, value: float, step: int) -> None:
        if wandb.run is None:
            set_wandb_run()  # as "import malletrain" does in a process of a job
            wandb.init(project="zoo")
        wandb.log({name: value, "step": step})

    _train(trace, log)
    wandb.finish()


def mlflow_files(trace: Trace) -> None:
    """MLflow on a store of files."""
    os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", GIT_PYTHON_REFRESH="quiet")
    mlflow.set_tracking_uri((Path.cwd() / "mlruns").as_uri())

    def log(name: str, value: float, step: int) -> None:
        if mlflow.active_run() is None:
            mlflow_run("zoo")
            mlflow.start_run()
        mlflow.log_metric(name, value, step=step)

    _train(trace, log)
    mlflow.end_run()


def tensorboard_writer(trace: Trace) -> None:
    """TensorBoard's writer."""
    writers: list[SummaryWriter] = []

    def log(name: str, value: float, step: int) -> None:
        if not writers:
            writers.append(SummaryWriter("board", purge_step=step))
        writers[0].add_scalar(name, value, step)

    _train(trace, log)
    for writer in writers:
        writer.close()
