"""A real Slurm that has lost its state and numbers its jobs from the beginning."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time

import psutil
import pytest

from scavenger.interface import Lease, LeaseRequest, LeaseState
from tests.slurm.test_leases import scavenger, states


def killed(processes):
    """Kill them, and return them: a script may start another one meanwhile."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return processes


def lose_state(slurm):
    """Everything of Slurm is killed, and what it has saved is gone; it starts anew."""
    for daemon in ("slurmctld", *slurm.nodes):
        slurm.end(daemon, signal.SIGKILL)
    slurm.until(lambda: not killed(slurm.jobs_processes()), "no process of a job is left")
    for folder in (slurm.root / "state", slurm.root / "spool"):
        shutil.rmtree(folder)
        folder.mkdir()
    slurm.start_controller(fresh=True)
    for node in slurm.nodes:
        slurm.start_node(node)
    slurm.until(lambda: set(slurm.states()) == {"idle"}, "all nodes are idle")


@pytest.mark.parametrize("daemon", ["goes on", "is started anew"])
def test_a_main_job_with_the_number_of_a_lease_is_not_cancelled(cluster, daemon):
    slurm = cluster(1)
    one = scavenger(slurm)
    one.poll()
    [lease] = one.take([LeaseRequest("l1", "n1", ("sleep", "600"))])
    slurm.until(lambda: states(one)["l1"] is LeaseState.RUNNING, "the lease runs")
    lose_state(slurm)
    main = slurm.submit("sleep 3600", "--time=60")
    assert main == lease.scheduler_id
    slurm.until(lambda: slurm.jobs()[main][0] == "RUNNING", "the main job runs")
    if daemon == "goes on":
        one.clock = lambda: time.time() + 120.0  # Slurm was away for two minutes
    else:
        one = scavenger(slurm)
        one.know({"l1": ""}, {"l1": "n1"})
        lease = Lease("l1", lease.scheduler_id, LeaseState.RUNNING, "n1")
    one.give_back([lease])
    assert "scancel" not in {command for command, _ in one.commands.calls.counts()}
    assert slurm.jobs()[main][0] == "RUNNING"
