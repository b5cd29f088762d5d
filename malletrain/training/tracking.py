"""Keeps one run per job in experiment trackers (Weights & Biases, MLflow, TensorBoard) when the
job's processes restart.

Decides the name of that run, sets the environment variables that the tools read, and flushes their
rows before a rescale stops the process. The tool's own settings take precedence. Imports no tool
but MLflow, in :func:`mlflow_run`.
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
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from malletrain.protocol import env
from malletrain.training import first_sigterm

_TENSORBOARD = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
"""Modules whose writers buffer rows for minutes."""
WANDB_FLUSH_S = 1.0
"""Time between two writes of W&B's offline file, seconds. W&B's own default is 15."""
_WANDB_FLUSH = "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"
MLFLOW_TAG = "malletrain.run"
"""Tag of the MLflow run of a job."""


def run_id() -> str:
    """Return the id of this job's run. It is unique to the job and the same in all its rounds;
    empty outside MalleTrain.
    """
    job, key = os.environ.get(env.JOB, ""), os.environ.get(env.JOB_KEY, "")
    return f"{job}-{hashlib.sha256(f'run {key}'.encode()).hexdigest()[:10]}" if job else ""


def set_wandb_run() -> None:
    """Make W&B resume the run of this job. Only rank 0 does so: if several processes write to one
    run, W&B keeps each row from one process only. W&B also stores the rows of an offline run more
    often, because a process that is lost without notice loses those that are not stored.
    """
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    if is_rank_zero and run_id() and "WANDB_RUN_ID" not in os.environ:
        os.environ["WANDB_RUN_ID"] = run_id()
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault(_WANDB_FLUSH, f"{WANDB_FLUSH_S:g}")


def mlflow_run(experiment: str | None = None) -> str:
    """Make MLflow resume the run of this job. Call it on rank 0, before ``start_run()`` or the
    trainer. MLflow chooses the ids of runs, so this function finds the run by a tag, or creates it.
    It does nothing outside MalleTrain.

    Args:
        experiment: name of the experiment. Default: MLflow's (``MLFLOW_EXPERIMENT_NAME``).

    Returns:
        The run's id, which is also set in ``MLFLOW_RUN_ID``; empty outside MalleTrain.

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
    experiment_id = (
        existing.experiment_id if existing is not None else client.create_experiment(name)
    )
    store = urlsplit(mlflow.get_tracking_uri())
    if store.scheme in ("", "file"):
        _remove_empty_metrics(Path(unquote(store.path), experiment_id))
    runs = client.search_runs([experiment_id], f"tags.`{MLFLOW_TAG}` = '{run_id()}'", max_results=1)
    run = runs[0] if runs else client.create_run(experiment_id, tags={MLFLOW_TAG: run_id()})
    os.environ["MLFLOW_RUN_ID"] = run.info.run_id
    return str(run.info.run_id)


def _remove_empty_metrics(experiment: Path) -> None:
    """Remove the empty metrics of this job's run from a file store. A process that is lost while it
    begins a metric leaves one, and MLflow then refuses to read the run.

    Args:
        experiment: the folder of the run's experiment.
    """
    with contextlib.suppress(OSError):
        for tag in experiment.glob(f"*/tags/{MLFLOW_TAG}"):
            if tag.read_text() == run_id():
                for metric in tag.parents[1].glob("metrics/**/*"):
                    if metric.is_file() and not metric.stat().st_size:
                        metric.unlink()


def log_to_trackers(name: str, value: float, step: int | None) -> None:
    """Log a value of :func:`malletrain.metric` in each tool of ``MALLETRAIN_TRACK`` (``wandb``,
    ``mlflow``, separated by commas) in which the script has an open run.

    Args:
        name: name of the metric.
        value: its value.
        step: the script's own count; None for none.
    """
    for tool in os.environ.get(env.TRACK, "").split(","):
        module: Any = sys.modules.get(tool.strip())
        if tool.strip() == "wandb" and module is not None and module.run is not None:
            module.run.log({name: value} if step is None else {name: value, f"{name}/step": step})
        if tool.strip() == "mlflow" and module is not None and module.active_run() is not None:
            module.log_metric(name, value, step=step)


def flush_rows() -> None:
    """Flush the rows that TensorBoard's writers buffer in this process."""
    if not any(module in sys.modules for module in _TENSORBOARD):
        return
    for writer in gc.get_objects():
        if type(writer).__name__ == "SummaryWriter" and type(writer).__module__ in _TENSORBOARD:
            with contextlib.suppress(Exception):  # a full disk must not stop a training
                writer.flush()


@contextlib.contextmanager
def finish_wandb_on_sigterm() -> Iterator[None]:
    """In this context SIGTERM finishes the open W&B run before it ends this process, because
    offline W&B buffers all rows in a separate process. A finished run cannot be resumed, so the run
    is finished only on SIGTERM. A script's own handler is not replaced.
    """
    module: Any = sys.modules.get("wandb")
    run = getattr(module, "run", None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if run is None or not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
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
        first_sigterm.restore_sigterm_handling()
