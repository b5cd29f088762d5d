"""One run of a job in the tools that follow trainings (Weights & Biases, MLflow, TensorBoard),
however often its processes are started.

Decides the name of that run, sets what the tools read from the environment, and has them store
their rows before the process is stopped for a change of nodes. A tool's own settings win. Imports
no tool but MLflow, in :func:`mlflow_run`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from malletrain.protocol import env
from malletrain.training import steadfast

_TENSORBOARD = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
"""Modules of writers that keep rows for minutes."""
TAG = "malletrain.run"
"""Tag of the MLflow run of a job."""


def run_id() -> str:
    """What the run of this job is called: the same in all its rounds and of no other job; empty
    outside MalleTrain.
    """
    job, key = os.environ.get(env.JOB, ""), os.environ.get(env.JOB_KEY, "")
    return f"{job}-{hashlib.sha256(f'run {key}'.encode()).hexdigest()[:10]}" if job else ""


def name_runs() -> None:
    """Have W&B go on with the run of this job. For rank 0: a run that several processes write to
    at one time has each row of one of them only.
    """
    first = os.environ.get("RANK", "0") == "0"
    if first and run_id() and "WANDB_RUN_ID" not in os.environ:
        os.environ["WANDB_RUN_ID"] = run_id()
        os.environ.setdefault("WANDB_RESUME", "allow")


def mlflow_run(experiment: str | None = None) -> str:
    """Have MLflow go on with the run of this job: call it on rank 0, before ``start_run()`` or the
    trainer. MLflow chooses the ids of runs, so that the run is found by a tag; it is made where
    there is none. Outside MalleTrain nothing happens.

    Args:
        experiment: its name; by default what MLflow takes (``MLFLOW_EXPERIMENT_NAME``).

    Returns:
        The run's id, which is in ``MLFLOW_RUN_ID`` from then on; empty outside MalleTrain.

    Raises:
        ImportError: MLflow is not installed.
    """
    if "MLFLOW_RUN_ID" in os.environ or not run_id():
        return os.environ.get("MLFLOW_RUN_ID", "")
    import mlflow

    if experiment is not None:
        mlflow.set_experiment(experiment)
    client: Any = mlflow.MlflowClient()
    name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
    existing = client.get_experiment_by_name(name)
    place = existing.experiment_id if existing is not None else client.create_experiment(name)
    runs = client.search_runs([place], f"tags.`{TAG}` = '{run_id()}'", max_results=1)
    run = runs[0] if runs else client.create_run(place, tags={TAG: run_id()})
    os.environ["MLFLOW_RUN_ID"] = run.info.run_id
    return str(run.info.run_id)


def mirror(name: str, value: float, step: int | None) -> None:
    """Pass a value of :func:`malletrain.metric` on to the tools that ``MALLETRAIN_TRACK`` names
    (``wandb``, ``mlflow``, with commas), where the script has a run of theirs open.
    """
    for tool in os.environ.get(env.TRACK, "").split(","):
        module: Any = sys.modules.get(tool.strip())
        if tool.strip() == "wandb" and module is not None and module.run is not None:
            module.run.log({name: value} if step is None else {name: value, f"{name}/step": step})
        if tool.strip() == "mlflow" and module is not None and module.active_run() is not None:
            module.log_metric(name, value, step=step)


def flush_rows() -> None:
    """Have TensorBoard's writers store the rows that they keep in this process."""
    if not any(module in sys.modules for module in _TENSORBOARD):
        return
    for one in gc.get_objects():
        if type(one).__name__ == "SummaryWriter" and type(one).__module__ in _TENSORBOARD:
            with contextlib.suppress(Exception):  # a full disk must not stop a training
                one.flush()


@contextlib.contextmanager
def finished_when_stopped() -> Iterator[None]:
    """In this context SIGTERM finishes the open run of W&B before it ends this process: offline
    W&B keeps all rows in a process of its own until then. A run that is finished cannot go on, so
    that nothing happens where nobody stops the process. A script's own handler stays.
    """
    module: Any = sys.modules.get("wandb")
    run = getattr(module, "run", None)
    main = threading.current_thread() is threading.main_thread()
    if run is None or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def finish(number: int, frame: object) -> None:
        try:
            run.finish()
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, finish)
    try:
        yield
    finally:
        steadfast.bear_again()
