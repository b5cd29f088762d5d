"""Restart mode: trainings that tools follow, the real ones, without a server."""

from __future__ import annotations

import os
from pathlib import Path

import mlflow
import wandb
from torch.utils.tensorboard import SummaryWriter

from malletrain.training.tracking import mlflow_run
from tests.zoo.scripts.parts import EPOCHS, evaluate
from tests.zoo.scripts.plain import Training
from tests.zoo.trace import Trace


def weights_and_biases(trace: Trace) -> None:
    """W&B offline: ``wandb.init()`` is the first thing that rank 0 does."""
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(Path.cwd()), WANDB_SILENT="true")
    main = os.environ["RANK"] == "0"
    run = wandb.init(project="zoo") if main else None
    t = Training(trace, step=0)
    t.prepare()

    def after_step() -> None:
        t.facts["step"] += 1
        if run is not None:
            run.log({"loss": evaluate(t.model), "step": t.facts["step"]})
        trace.point("logged")

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
        if run is not None:
            run.log({"evaluation": evaluate(t.model, 5), "step": epoch})
        trace.point("evaluation logged")
    t.snapshot.save()
    if run is not None:
        run.finish()
    trace.point("finished")
    trace.finish(t.model)


def mlflow_files(trace: Trace) -> None:
    """MLflow on a store of files."""
    os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", GIT_PYTHON_REFRESH="quiet")
    mlflow.set_tracking_uri((Path.cwd() / "mlruns").as_uri())
    main = os.environ["RANK"] == "0"
    if main:
        mlflow_run("zoo")
        mlflow.start_run()
    t = Training(trace, step=0)
    t.prepare()

    def after_step() -> None:
        t.facts["step"] += 1
        if main:
            mlflow.log_metric("loss", evaluate(t.model), step=t.facts["step"])
        trace.point("logged")

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
        if main:
            mlflow.log_metric("evaluation", evaluate(t.model, 5), step=epoch)
        trace.point("evaluation logged")
    t.snapshot.save()
    if main:
        mlflow.end_run()
    trace.point("finished")
    trace.finish(t.model)


def tensorboard_writer(trace: Trace) -> None:
    """TensorBoard's writer in a folder of the run, with ``purge_step`` as its page recommends."""
    main = os.environ["RANK"] == "0"
    t = Training(trace, step=0)
    t.prepare()
    writer = SummaryWriter("board", purge_step=t.facts["step"] + 1) if main else None

    def after_step() -> None:
        t.facts["step"] += 1
        if writer is not None:
            writer.add_scalar("loss", evaluate(t.model), t.facts["step"])
        trace.point("logged")

    for epoch in t.sampler.epochs(EPOCHS):
        t.train_epoch(epoch, after_step)
        if writer is not None:
            writer.add_scalar("evaluation", evaluate(t.model, 5), t.facts["step"])
        trace.point("evaluation logged")
    t.snapshot.save()
    if writer is not None:
        writer.close()
    trace.point("finished")
    trace.finish(t.model)
