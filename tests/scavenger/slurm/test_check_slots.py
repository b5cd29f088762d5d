"""What ``malletrain check`` says about resources to which a Slurm does not confine jobs."""

from __future__ import annotations

import pytest

from scavenger.batch.slots import SlotKind
from scavenger.slurm.check_slots import unconfined

GPU = SlotKind("gpu", {"gpu": 1, "cpus": 8, "memory_mb": 1000})
CPU = SlotKind("cpu", {"cpus": 8, "memory_mb": 1000})
CONFINED = {
    "TaskPlugin": "task/cgroup,task/affinity",
    "SelectTypeParameters": "CR_CORE_MEMORY",
    "ConstrainCores": "yes",
    "ConstrainRAMSpace": "yes",
    "ConstrainDevices": "yes",
}


def beginnings(settings, kinds=(GPU,)):
    return [sentence.split(" (")[0] for sentence in unconfined(settings, kinds)]


NEVER = (
    "Nothing bounds what a lease uses of memory bandwidth, network and PCIe beside other jobs. If "
    'that is not acceptable on a host, set beside = "nobody" for its kinds of slots.'
)


@pytest.mark.parametrize(
    ("without", "sentences"),
    [
        ({}, []),
        ({"ConstrainRAMSpace": "no"}, ["Slurm does not limit the memory of jobs"]),
        ({"ConstrainDevices": "no"}, ["Slurm does not hide the GPUs of other jobs"]),
        ({"ConstrainCores": "no"}, []),  # task/affinity binds them
        ({"ConstrainCores": "no", "TaskPlugin": "task/cgroup"},
         ["Slurm does not confine jobs to their processors"]),
        ({"SelectTypeParameters": "CR_CORE"}, ["Slurm does not allocate memory"]),
        ({"TaskPlugin": "task/none"},
         ["Slurm does not confine jobs to their processors",
          "Slurm does not limit the memory of jobs", "Slurm does not hide the GPUs of other jobs"]),
    ],
)  # fmt: skip
def test_what_is_not_confined(without, sentences):
    assert beginnings({**CONFINED, **without}) == [*sentences, NEVER]


def test_gpus_concern_kinds_with_gpus_only():
    assert beginnings({**CONFINED, "ConstrainDevices": "no"}, (CPU,)) == [NEVER]


@pytest.mark.parametrize("none", ["(null)", "none"], ids=["25.05", "a word"])
def test_a_slurm_without_a_task_plugin(none):
    """Slurm 24.11 and later print (null) for a plugin of which there is none."""
    sentences = list(unconfined({**CONFINED, "TaskPlugin": none}, (GPU,)))
    assert "(TaskPlugin=none)" in sentences[0]
