"""A node with a GPU: what its agent finds, what its fork server holds, what its workers get."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from malletrain.agent import health
from malletrain.agent.health import checks_of
from malletrain.protocol.gpus import count_gpus
from malletrain.protocol.site_rules import HealthPlan
from tests.gpu.processes import FIRST_GPU, device_files, memory_by_pid, memory_used
from tests.malletrain.agent.node_side import processes_with
from tests.malletrain.launch.test_restart import Cluster

WORKER = """
import json, os, time
began = time.monotonic()
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,cuda:nccl")
numbers = torch.ones(64 << 20, device="cuda")
torch.cuda.synchronize()
context = time.monotonic() - began
dist.all_reduce(numbers)
torch.cuda.synchronize()
generation = os.environ["MALLETRAIN_GENERATION"]
note = {
    "pid": os.getpid(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "context_s": context, "ready_s": time.monotonic() - began, "sum": numbers.sum().item(),
    "parent": os.getppid(),
}
with open(f"tmp-{generation}", "w") as file:
    json.dump(note, file)
os.rename(f"tmp-{generation}", f"g{generation}-r0-w1")
while not os.path.exists("enough"):
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
    time.sleep(0.01)
"""


def test_the_agent_counts_the_gpus_of_the_machine(figure):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    there = sum(line.startswith("GPU ") for line in listed.splitlines())
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    figure("device files", f"{count_gpus(environment)}")
    assert count_gpus(environment) == there
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_a_healthy_gpu_is_fit_by_what_nvidia_smi_says(figure):
    done = subprocess.run(list(health.COMMAND), capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    fields = {path for _, path, _ in health.listing(printed)}
    patterns = [
        pattern.pattern for pattern, _, _ in health.FIELDS if any(map(pattern.fullmatch, fields))
    ]
    figure("fields", f"{len(fields)}")
    figure("known ones", ", ".join(patterns))
    assert health.trouble(done.returncode, printed) == ""
    assert "Remapped Rows/Pending" in patterns
    assert len(patterns) >= 3
    assert len(checks_of(HealthPlan(), 1)) == 1


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", FIRST_GPU)
    made = Cluster(tmp_path, ("n0",), script=WORKER)
    made.wait_ready()
    yield made
    (tmp_path / "enough").touch()
    made.close()


def test_a_fork_server_has_no_context_and_its_workers_have(cluster, figure):
    before = memory_used()
    servers = list(processes_with(cluster.agents["n0"].mark))
    opened = {pid: files for pid in servers if (files := device_files(pid))}
    assert not opened, opened
    notes = []
    for _ in range(3):
        generation = cluster.form("n0")
        notes.append(cluster.workers(generation, 1)[0])
    worker = notes[-1]
    assert worker["visible"] == FIRST_GPU
    assert worker["sum"] == float(64 << 20)
    assert device_files(worker["pid"])
    of_the_lease = set(processes_with(cluster.agents["n0"].mark))
    parents = [p.pid for p in psutil.Process(worker["pid"]).parents() if p.pid in of_the_lease]
    assert parents
    assert not [pid for pid in parents if device_files(pid)]
    listed = memory_by_pid()
    assert not set(parents) & set(listed)
    figure("context s", ", ".join(f"{n['context_s']:.2f}" for n in notes))
    figure("first collective after s", ", ".join(f"{n['ready_s']:.2f}" for n in notes))
    figure("MiB before and with a worker", f"{before}, {memory_used()}")
