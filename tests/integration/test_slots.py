"""Slots on a whole site: jobs and the trials of a sweep side by side on one host of the embedded
cluster, of which a main job takes back one slot.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.embedded.hosts import Division
from scavenger.interface import host_of
from scavenger.trace.amounts import HEADER
from tests.integration.embedded import site

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 2, "memory_mb": 1024})
GPUS = 5
"""Of the host; a main job has one of them from the beginning."""
HOST = Division({"gpu": GPUS, "cpus": 2 * GPUS, "memory_mb": 2048 * GPUS}, (GPU,))
KINDS = """
[[scheduler.local.slots]]
name = "gpu"
gpus = 1
cpus = 2
memory = "1 GiB"
"""
TRAIN = """
import os, time, malletrain
with open(f"new-{os.getpid()}", "w") as file:
    file.write(os.environ["CUDA_VISIBLE_DEVICES"])
os.rename(f"new-{os.getpid()}", f"devices-{os.getpid()}")
while not os.path.exists("go"):
    time.sleep(0.02)
    malletrain.report(8)
malletrain.metric("loss", 0.5, step=1)
"""
SWEEP = """
[sweep]
metric = "loss"
trials = 2
at_once = 2
every = "200 ms"
[job]
script = "train.py"
gpus = "1"
env = { MALLETRAIN_PRELOAD = "0" }
profile = "off"
[space]
x = { low = 0.0, high = 1.0 }
"""


def test_a_job_and_trials_share_a_host_and_a_main_job_takes_back_one_slot(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{HEADER}\n0,n1,idle,{GPUS - 1}\n0,n1,busy,1\n1,n1,busy,1\n")
    options = {"division": HOST, "trace": trace, "hold": True, "at_end": "hold"}
    with site(tmp_path / "site", nodes=1, config=KINDS, cluster=options) as made:
        script = made.script("train.py", TRAIN)
        job = made.submit(script, nodes=(1, 2), counts="gpus", name="one", profile=False)
        with made.client() as client:
            assert client.job(job).spec["node_class"] == "gpu"
        made.until(lambda: len(made.job(job).nodes) == 2, "the job has two slots")
        with (tmp_path / "engine.log").open("ab") as log:
            engine = subprocess.Popen(
                [
                    *(sys.executable, "-m", "malletrain", "sweep", "run"),
                    *(str(made.script("s.toml", SWEEP)), "--state-dir", str(made.state)),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            made.until(lambda: len(devices_of(made, script)) == GPUS - 1, "every slot trains")
            nodes = nodes_of(made)
            names = [name for slots in nodes.values() for name in slots]
            assert sorted(names) == [f"n1/gpu.{number}" for number in range(GPUS - 1)]
            assert {host_of(name) for name in names} == {"n1"}
            devices = devices_of(made, script)
            assert set(devices) <= {str(number) for number in range(GPUS)}
            assert len(set(devices)) == GPUS - 1
            with made.client() as client:
                assert {node.node_class for node in client.nodes()} == {"gpu"}

            made.cluster.go_on()
            made.until(lambda: made.events("node-lost"), "a lease ends")
            made.until(lambda: len(nodes_of(made, running=True)) >= 2, "jobs go on")
            made.until(lambda: len(made.agents()) == GPUS - 2, "the agent of that lease has ended")
            made.until(lambda: preemptions(made) == (1, 0), "with notice, and no other")
            made.script("go", "")
            assert made.until_state(job, "completed", "failed").state == "completed"
            assert made.job(job).tries == 0
            assert engine.wait() == 0, (tmp_path / "engine.log").read_text()
        finally:
            engine.kill()
            engine.wait()
        with made.client() as client:
            assert {(job.state, job.counts) for job in client.jobs()} == {("completed", "gpus")}
            [used] = client.usage()
        assert used.node_class == "gpu"
        assert used.charged_nh == pytest.approx(used.leased_nh / GPUS)  # its part of the host
        assert used.gpu_h == pytest.approx(used.leased_nh)
        assert used.leased_nh > 0


def devices_of(made, script):
    """The devices of the training processes, once they have written them down."""
    paths = (made.work / f"devices-{process.pid}" for process in made.workers(script))
    return [path.read_text() for path in paths if path.exists()]


def preemptions(made):
    """Leases that were preempted with notice, and without."""
    totals = made.cluster.scavenger().totals()
    return totals["preemptions_with_notice"], totals["preemptions_without_notice"]


def nodes_of(made, running=False):
    """Job → its slots."""
    with made.client() as client:
        return {
            job.name: list(job.nodes)
            for job in client.jobs()
            if job.nodes and (not running or job.state == "running")
        }
