"""MalleTrain beside main jobs on a real Slurm of this machine: a daemon, stubs as malleable jobs,
and counts of requests to Slurm. Main jobs are those of benchmarks/main_jobs.py.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from malletrain.client import Connection
from malletrain.protocol import messages
from tests.slurm.cluster import SlurmCluster

SCHEDULER = (
    "bf_interval=2,bf_resolution=1,bf_max_job_test=1000,sched_interval=2,sched_min_interval=0,"
    "batch_sched_delay=0"
)
"""Slurm's scheduler decides every two seconds at the latest."""
STOP_S = 60.0
"""Maximum time in which a daemon ends, seconds."""


@contextlib.contextmanager
def running_daemon(root: Path, slurm: SlurmCluster, config: str) -> Iterator[Path]:
    """Run a daemon, with its leases, during the block.

    Args:
        root: the directory of its files.
        slurm: the Slurm.
        config: text of its configuration; ``{state}`` in it is its state directory.

    Yields:
        Its state directory.

    Raises:
        RuntimeError: the daemon has ended at its start.
    """
    state, file = root / "state", root / "site.toml"
    file.write_text(config.replace("{state}", str(state)))
    # Processes of leases start in /; benchmarks.stub_launcher is found beside this file.
    environment = {**slurm.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
    with open(root / "daemon.log", "wb") as log:
        argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(file)]
        daemon = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    try:
        slurm.until(
            lambda: daemon.poll() is not None or nodes_leased(state) is not None,
            "the daemon answers",
        )
        if daemon.poll() is not None:
            raise RuntimeError(f"The daemon has ended: {(root / 'daemon.log').read_text()}")
        yield state
    finally:
        daemon.terminate()
        daemon.wait(STOP_S)
        if leases := slurm.leases():
            slurm.run("scancel", *leases)
            slurm.until(lambda: not slurm.leases(), "the leases end")


def nodes_leased(state: Path) -> int | None:
    """Return how many nodes a daemon has leased; None if it does not answer."""
    try:
        with Connection.of(state) as client:
            return int(client.status().nodes_leased)
    except RuntimeError:
        return None


def submit_stubs(root: Path, state: Path, names: Sequence[str], nodes: int) -> Path:
    """Submit malleable jobs that take all nodes, and are stubs (benchmarks/stub_launcher.py).

    Args:
        root: the directory of their files.
        state: the daemon's state directory.
        names: their names.
        nodes: number of nodes or slots of the site.

    Returns:
        The directory in which the stubs record when they work.
    """
    spans, stub, script = root / "spans", root / "stub-python", root / "job.py"
    spans.mkdir()
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -m benchmarks.stub_launcher "$@"\n')
    stub.chmod(0o755)
    script.write_text("raise SystemExit('a stub: its launcher does the work')\n")
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < nodes] + [nodes]
    curve = {str(n): 16.0 * n**0.95 for n in sizes}
    with Connection.of(state) as client:
        for name in names:
            client.submit(
                messages.JobSpec(
                    name,
                    "",
                    str(script),
                    str(root),
                    str(stub),
                    env={"BENCH_SPANS": str(spans)},
                    max_nodes=nodes,
                    curve=curve,
                )
            )
    return spans


def submissions(slurm: SlurmCluster) -> int:
    """Return how many jobs and arrays were submitted since slurmctld started."""
    match = re.search(r"REQUEST_SUBMIT_BATCH_JOB.*?count:(\d+)", slurm.run("sdiag"))
    return int(match[1]) if match else 0
