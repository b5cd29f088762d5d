"""The contenders of benchmarks/farm_peers.py. Each gets the same command and the number of tasks,
starts what its users would start, and ends it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers_environments import NotInstalled, cache, python_of
from benchmarks.slurm_site import running_daemon
from tests.slurm.cluster import SlurmCluster

PARTITION = "preemptable"
HERE = Path(__file__).parent
WORKER = "hq-worker"
ALLOCATOR_EVERY_S = 1.0
"""Interval at which HyperQueue's allocator checks its workers, seconds."""
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
[jobs]
stop_grace = "1 s"
[allocation]
debounce = "0.5 s"
min_interval = "0 s"
rescale_up = "1 s"
rescale_down = "1 s"
start = "1 s"
[profiling]
enabled = false
"""


@dataclass(frozen=True)
class Field:
    """The environment of a contender."""

    slurm: SlurmCluster
    root: Path
    """An empty directory."""
    cores: int
    """Number of cores of a node."""
    tasks: int
    results: Path
    """A directory that gets a file for each completed task, named by its number."""
    command: tuple[str, ...]
    """The command of a task; ``{}`` is its number."""
    longest_s: float
    """Maximum length of a task, seconds."""


Prepared = Callable[[], None]
"""Submits the tasks."""
Contender = Callable[[Field], AbstractContextManager[Prepared]]
"""Start what exists at a site before a user comes, yield what the user does, and end everything.
Raises NotInstalled.
"""


@contextlib.contextmanager
def array(field: Field) -> Iterator[Prepared]:
    """Slurm's own job array: a job of one core for each task, requeued if it is preempted."""
    words = " ".join(field.command).replace("{}", "$SLURM_ARRAY_TASK_ID")
    script = field.root / "array.sbatch"
    script.write_text(f"#!/bin/sh\nexec {words}\n")

    def submit() -> None:
        field.slurm.run(
            "sbatch",
            f"--partition={PARTITION}",
            "--requeue",
            f"--array=0-{field.tasks - 1}",
            "--ntasks=1",
            "--cpus-per-task=1",
            "--time=1",
            "--output=/dev/null",
            str(script),
        )

    yield submit


class Allocator(threading.Thread):
    """Keeps a worker's job in the queue for each node of the machine, as HyperQueue's automatic
    allocator with a backlog does, which is part of its program ``hq``.
    """

    def __init__(self, field: Field, command: str) -> None:
        super().__init__(daemon=True)
        self._slurm, self._command = field.slurm, command
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(ALLOCATOR_EVERY_S):
            present = self._slurm.run("squeue", "-h", "-n", WORKER, "-o", "%A").split()
            for _ in range(len(self._slurm.nodes) - len(present)):
                self._slurm.submit(
                    self._command,
                    f"--job-name={WORKER}",
                    "--nodes=1",
                    "--exclusive",
                    "--no-requeue",
                    "--time=60",
                    partition=PARTITION,
                )

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._slurm.run("scancel", "-n", WORKER)


@contextlib.contextmanager
def hyperqueue(field: Field) -> Iterator[Prepared]:
    """HyperQueue: a server, and workers as preemptable jobs of one node."""
    python, program = python_of("hyperqueue", cache()), HERE / "hyperqueue_farm.py"
    folder = field.root / "server"
    folder.mkdir()
    worker = f"exec {python} {program} worker {folder} {field.cores}"
    allocator = Allocator(field, worker)
    server: list[subprocess.Popen[bytes]] = []

    def submit() -> None:
        with open(field.root / "server.log", "wb") as log:
            argv = [str(python), str(program), "server", str(folder), str(field.results)]
            argv += [str(field.tasks), *field.command]
            server.append(subprocess.Popen(argv, stdout=log, stderr=log))
        field.slurm.until((folder / "ready").exists, "HyperQueue's server has the tasks")
        allocator.start()

    try:
        yield submit
    finally:
        if allocator.is_alive():
            allocator.stop()
        for process in server:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def malletrain(field: Field) -> Iterator[Prepared]:
    """``malletrain map``, with a daemon that has no lease when the farm is submitted. Tasks may use
    the grace time of a preemption to end, as those of an array do.
    """
    with running_daemon(field.root, field.slurm, CONFIG) as state:
        environment = {**field.slurm.environment, "MALLETRAIN_STATE_DIR": str(state)}

        def submit() -> None:
            argv = [sys.executable, "-m", "malletrain", "map", "--name", "farm", "--cpus", "1"]
            argv += ["--nodes", f"1:{len(field.slurm.nodes)}", "--drain", f"{field.longest_s:g} s"]
            argv += ["--workdir", str(field.root), "--", *field.command]
            lines = "".join(f"{number}\n" for number in range(field.tasks))
            done = subprocess.run(
                argv, input=lines, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"malletrain map ended with {done.returncode}: {done.stderr}")

        yield submit


CONTENDERS: dict[str, Contender] = {
    "array": array,
    "hyperqueue": hyperqueue,
    "malletrain": malletrain,
}
__all__ = ["CONTENDERS", "Contender", "Field", "NotInstalled"]
