"""The contenders of benchmarks/requeue.py. Each starts what its users would start, and ends it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers_environments import NotInstalled, cache, python_of
from benchmarks.requeue_training import BATCH
from benchmarks.slurm_site import running_daemon
from tests.slurm.cluster import SlurmCluster

PARTITION = "preemptable"
HERE = Path(__file__).parent
CONFIG = """
[daemon]
state_dir = "{state}"
metrics_listen = ""
heartbeat = "2 s"
agent_timeout = "60 s"
[scheduler]
kind = "slurm"
poll_interval = "1 s"
[scheduler.slurm]
partition = "preemptable"
time_min = "1 min"
spare = "5 s"
[gaps]
use_planned = true
[allocation]
min_interval = "0 s"
rescale_up = "2 s"
rescale_down = "2 s"
start = "2 s"
[profiling]
enabled = false
"""
SETUP = f"export PYTHONPATH={HERE.parent} OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1"
REQUEUE = "scontrol requeue $SLURM_JOB_ID"
"""Last line of a batch script. A training ends because it was told to, or because it failed; in
both cases it continues later.
"""
SCRIPT = """#!/bin/sh
#SBATCH --requeue
#SBATCH --signal={signal}@60
#SBATCH --open-mode=append
{setup}
srun --kill-on-bad-exit=1 {python} {training} {arguments} --training {number}
{requeue}
"""


@dataclass(frozen=True)
class Field:
    """The environment of a contender."""

    slurm: SlurmCluster
    root: Path
    """An empty directory."""
    trainings: int
    """Number of trainings."""
    arguments: tuple[str, ...]
    """Arguments of the script of a training, except its number."""
    step_s: float
    """Pause in every step, seconds."""
    library_nodes: int
    """Number of nodes of a job of submitit and of Lightning."""


Prepared = Callable[[], None]
"""Submits the trainings."""
Contender = Callable[[Field], AbstractContextManager[Prepared]]
"""Start what exists at a site before a user comes, and yield what the user does. Raises
NotInstalled.
"""


@contextlib.contextmanager
def none(field: Field) -> Iterator[Prepared]:
    """Nobody: the main jobs alone."""
    yield lambda: None


def write_script(field: Field, number: str, training: str, signal: str) -> Path:
    """Write a batch script.

    Args:
        field: the environment of the contender.
        number: number of the training, for the shell.
        training: name of the Python script.
        signal: signal for the tasks when the job is preempted.
    """
    script = field.root / f"{number.strip('$')}.sbatch"
    script.write_text(
        SCRIPT.format(
            setup=SETUP,
            requeue=REQUEUE,
            signal=signal,
            python=sys.executable,
            training=HERE / training,
            arguments=" ".join(field.arguments),
            number=number,
        )
    )
    return script


def sbatch(field: Field, script: Path, nodes: int, *options: str) -> None:
    """Submit a batch script to the preemptable partition."""
    field.slurm.run(
        "sbatch",
        f"--partition={PARTITION}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--time=600",
        f"--output={field.root}/%A-%a.log",
        *options,
        str(script),
    )


@contextlib.contextmanager
def rigid(field: Field, nodes: int) -> Iterator[Prepared]:
    """A job of a fixed number of nodes for each training, which saves and requeues itself when it
    is preempted.
    """

    def submit() -> None:
        for number in range(field.trainings):
            sbatch(field, write_script(field, str(number), "train_requeue.py", "TERM"), nodes)

    yield submit


@contextlib.contextmanager
def array(field: Field) -> Iterator[Prepared]:
    """A job array of one-node jobs, each a training of its own."""

    def submit() -> None:
        script = write_script(field, "$SLURM_ARRAY_TASK_ID", "train_requeue.py", "TERM")
        sbatch(field, script, 1, f"--array=0-{field.trainings - 1}")

    yield submit


@contextlib.contextmanager
def submitit(field: Field) -> Iterator[Prepared]:
    """A function submitted by submitit for each training, with its own requeue."""
    python = python_of("submitit", cache())
    argv = [str(python), str(HERE / "train_requeue_submitit.py"), *field.arguments]
    argv += ["--partition", PARTITION, "--nodes", str(field.library_nodes)]
    argv += ["--logs", str(field.root), "--setup", SETUP, "--teardown", REQUEUE]
    environment = {**field.slurm.environment, "PYTHONPATH": str(HERE.parent)}

    def submit() -> None:
        for number in range(field.trainings):
            words = [*argv, "--training", str(number)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"submitit ended with {done.returncode}: {done.stderr}")

    yield submit


@contextlib.contextmanager
def lightning(field: Field) -> Iterator[Prepared]:
    """A job of Lightning for each training, with its automatic requeue."""

    def submit() -> None:
        for number in range(field.trainings):
            script = write_script(field, str(number), "train_requeue_lightning.py", "USR1")
            sbatch(field, script, field.library_nodes)

    yield submit


@contextlib.contextmanager
def malletrain(field: Field, live: bool) -> Iterator[Prepared]:
    """MalleTrain, and a daemon that has no lease when the trainings are submitted."""
    largest, curve = len(field.slurm.nodes), field.root / "curve.json"
    curve.write_text(json.dumps({str(n): n * BATCH / field.step_s for n in (1, largest)}))
    options = ["--nodes", f"1:{largest}", "--curve", str(curve), "--workdir", str(field.root)]
    options += ["--env", f"PYTHONPATH={HERE.parent}", "--env", "OMP_NUM_THREADS=1"]
    options += ["--live"] if live else []
    script = HERE / ("train_requeue_live.py" if live else "train_requeue_restart.py")
    with running_daemon(field.root, field.slurm, CONFIG) as state:
        environment = {**field.slurm.environment, "MALLETRAIN_STATE_DIR": str(state)}

        def submit() -> None:
            for number in range(field.trainings):
                argv = [sys.executable, "-m", "malletrain", "submit", "--name", f"train-{number}"]
                argv += [*options, str(script), *field.arguments, "--training", str(number)]
                done = subprocess.run(argv, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(
                        f"malletrain submit ended with {done.returncode}: {done.stderr}"
                    )

        yield submit


PEERS: dict[str, Contender] = {
    "job": partial(rigid, nodes=1),
    "rigid-2": partial(rigid, nodes=2),
    "rigid-4": partial(rigid, nodes=4),
    "rigid-8": partial(rigid, nodes=8),
    "array": array,
    "submitit": submitit,
    "lightning": lightning,
}
PRODUCT: dict[str, Contender] = {
    "restart": partial(malletrain, live=False),
    "live": partial(malletrain, live=True),
}
CONTENDERS: dict[str, Contender] = {"none": none, **PEERS, **PRODUCT}
__all__ = ["CONTENDERS", "PEERS", "PRODUCT", "Contender", "Field", "NotInstalled"]
