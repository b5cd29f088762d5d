"""How a lease stays within its slot: processors, priorities, memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from malletrain.agent.launch import job_environment
from malletrain.agent.sharing import (
    MemoryWatch,
    SlotBounds,
    chosen_cpus,
    lease_bytes,
    watch_of,
)
from malletrain.launch import cores
from malletrain.launch.worker_variables import WorkerVariables
from malletrain.memory import folder
from malletrain.protocol import messages
from malletrain.protocol.payloads import RoundLayout
from malletrain.protocol.site_rules import SharingRules
from tests.malletrain.agent.launchers import OBEDIENT, running
from tests.malletrain.agent.test_launch import order, place
from tests.waiting import until

MIB = 1 << 20


@pytest.mark.parametrize(
    ("allowed", "cpus", "node", "chosen"),
    [
        (range(8), 2, "c1/gpu.0", {0, 1}),
        (range(8), 2, "c1/gpu.3", {6, 7}),
        ({1, 3, 5, 7}, 2, "c1/gpu.1", {5, 7}),
        (range(8), 3, "c1/gpu.2", {6, 7, 0}),
        ({4, 5}, 2, "c1/gpu.1", {4, 5}),  # confined by the scheduler
        ({4}, 2, "c1/gpu.1", {4}),
    ],
)
def test_processors_of_a_slot(allowed, cpus, node, chosen):
    assert chosen_cpus(allowed, cpus, node) == chosen


def test_slots_that_fill_a_host_share_no_processor():
    sets = [chosen_cpus(range(16), 4, f"c1/gpu.{number}") for number in range(4)]
    assert set().union(*sets) == set(range(16))
    assert sum(map(len, sets)) == 16


def test_a_single_measurement_above_the_slot_is_no_reason():
    watch = MemoryWatch(SlotBounds(1, 100 * MIB), None)
    verdicts = [watch.verdict(used * MIB) for used in (101, 100, 101, 102, 103)]
    assert verdicts[:3] == ["", "", ""]
    assert verdicts[3] == (
        "The job uses 102 MiB of memory on this node, and its slot has 100 MiB. Use smaller "
        "batches or fewer loader workers, or a kind of slots with more memory."
    )
    assert verdicts[4] == ""  # the job is being ended


@pytest.mark.parametrize(
    ("bounds", "confined", "most"),
    [
        (None, None, None),
        (SlotBounds(1, 100 * MIB), None, 100 * MIB),
        (SlotBounds(1, 100 * MIB), 110 * MIB, None),  # the scheduler's own limit of the job
        (SlotBounds(1, 100 * MIB), 9000 * MIB, 100 * MIB),  # a limit of the host
        (SlotBounds(1, 100 * MIB, SharingRules(bound_memory=False)), None, None),
    ],
)
def test_where_memory_is_measured(bounds, confined, most):
    assert watch_of(bounds, lambda: confined).most == most


TWINS = """
import mmap, os
from malletrain.agent.sharing import proportional_bytes, resident_bytes
size = 64 << 20
shared = mmap.mmap(-1, size)
shared.write(b"x" * size)
(from_child, to_parent), (from_parent, to_child) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    touched = sum(shared[page] for page in range(0, size, 4096))
    os.write(to_parent, b"x")
    os.read(from_parent, 1)
    os._exit(0)
os.read(from_child, 1)
both = [os.getpid(), child]
print(resident_bytes(both) // size, proportional_bytes(both) // size)
os.write(to_child, b"x")
os.waitpid(child, 0)
"""


def test_shared_pages_count_once():
    made = subprocess.run([sys.executable, "-c", TWINS], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["2", "1"]


WITH_FILE = """
import sys
from pathlib import Path
from malletrain.agent.sharing import lease_bytes
size = 64 << 20
folder = Path(sys.argv[1])
before = lease_bytes(folder, 0)
(folder / "snapshot").write_bytes(bytes(size))
print(round((lease_bytes(folder, 0) - before) / size))
"""


def test_files_in_memory_count(tmp_path):
    """In a process of its own: the memory of this one that is shared with others is measured
    differently while they come and go.
    """
    argv = [sys.executable, "-c", WITH_FILE, str(tmp_path)]
    made = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["1"]
    assert lease_bytes(None, 1 << 60) > 0


MAPPED = """
import mmap, os, sys
from pathlib import Path
from malletrain.agent.sharing import proportional_bytes
size = 64 << 20
path = Path(sys.argv[1]) / "samples"
path.write_bytes(bytes(size))
with open(path, "r+b") as file:
    samples = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
touched = sum(samples[page] for page in range(0, size, 4096))
own = [os.getpid()]
mapped = proportional_bytes(own) - proportional_bytes(own, path.parent)
print(round(mapped / size))
"""


def test_files_in_memory_that_processes_map_do_not_count_twice(tmp_path):
    argv = [sys.executable, "-c", MAPPED, str(tmp_path)]
    made = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["1"]


def test_snapshots_have_a_part_of_the_slots_memory():
    assert folder.bound(0.25, 400 * MIB) == 100 * MIB
    assert folder.bound(0.25) > 100 * MIB


@pytest.mark.parametrize(
    ("cpus", "processes", "own", "threads"),
    [(8, 2, {}, "4"), (8, 1, {}, "8"), (2, 4, {}, "1"), (0, 2, {}, "32"),
     (8, 2, {"OMP_NUM_THREADS": "3"}, "3")],
)  # fmt: skip
def test_threads_of_a_process(tmp_path, monkeypatch, cpus, processes, own, threads):
    """The launcher decides, from the slot's number that the agent passes on."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cores, "_siblings", lambda _: {})
    monkeypatch.setattr(cores, "_quotas", list)
    launch = order(tmp_path, nproc_per_node=processes, env=own)
    of_pbs = {"OMP_NUM_THREADS": "64"}  # in each of its jobs
    inside = job_environment(place(tmp_path, of_pbs, cpus=cpus), launch, flags="/f")
    assert inside.get("OMP_NUM_THREADS") == own.get("OMP_NUM_THREADS")
    WorkerVariables(inside).set(RoundLayout(processes))
    assert inside["OMP_NUM_THREADS"] == threads


RESTRICTED = """
import os, subprocess, sys
from malletrain.agent.sharing import SlotBounds, restrict
from malletrain.protocol.site_rules import SharingRules
def refuse(*_):
    raise PermissionError(1, "Operation not permitted")
for name in sys.argv[3:]:
    setattr(os, name, refuse)
restrict(SlotBounds(1, 1 << 30, SharingRules(7, "idle")), "c1/gpu.1")
subprocess.run([sys.executable, "-c", *sys.argv[1:3]], check=True)
"""
LIMITS = """
import ctypes, os, sys
word = ctypes.CDLL(None).syscall(int(sys.argv[1]), 1, 0)
print(len(os.sched_getaffinity(0)), os.nice(0), word >> 13)
"""
IOPRIO_GET = {"x86_64": 252, "aarch64": 31, "ppc64le": 274, "riscv64": 31, "s390x": 283}
"""Number of the system call ioprio_get(2) by architecture."""
IDLE_CLASS = 3


@pytest.mark.skipif(platform.machine() not in IOPRIO_GET, reason="number of ioprio_get unknown")
@pytest.mark.parametrize("refused", [[], ["sched_setaffinity"], ["nice"]])
def test_what_a_lease_does_to_itself_holds_for_what_it_starts(refused):
    """What the kernel refuses changes nothing of the rest."""
    number = str(IOPRIO_GET[platform.machine()])
    made = subprocess.run(
        [sys.executable, "-c", RESTRICTED, LIMITS, number, *refused],
        capture_output=True,
        text=True,
        check=True,
    )
    cpus, niceness, io_class = map(int, made.stdout.split())
    confined = "sched_setaffinity" not in refused
    assert cpus == (1 if confined else len(os.sched_getaffinity(0)))
    assert niceness == min(19, os.nice(0) + (0 if "nice" in refused else 7))
    assert io_class == IDLE_CLASS
    assert made.stderr.count("the lease goes on without the limit of") == len(refused)


GREEDY = (
    OBEDIENT.replace("served = 0", "served = 0\nmuch = []", 1)
    .replace("for step in range(1, 10**9):", "for step in range(1, 10**9):\n        grow()", 1)
    .replace(
        "def who():",
        "def grow():\n    if os.path.exists(os.path.join(order.spec.workdir, 'grow')):\n"
        "        os.unlink(os.path.join(order.spec.workdir, 'grow'))\n"
        "        much.append(b'x' * (400 << 20))\ndef who():",
        1,
    )
)


@pytest.mark.slow
def test_a_job_that_uses_more_memory_than_its_slot_fails_with_the_reason(daemon, start, tmp_path):
    agent = start("n0", **{"slot-cpus": "1", "slot-memory-mb": "400"})
    running(daemon, tmp_path, GREEDY)
    assert agent.job_pids()
    (tmp_path / "grow").touch()
    phase = daemon.expect("n0", messages.Phase, phase="exited", job="j1")
    [failure] = phase.assignment.failures
    assert failure.exitcode == -9
    assert failure.cause.startswith("The job uses ")
    assert "its slot has 400 MiB" in failure.cause
    until(lambda: not agent.job_pids(), "no process of the job is left")
