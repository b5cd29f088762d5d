"""What a task of a farm finds of a Slurm or PBS job array: variables, and ``srun``. Pure.

Decides the values. A task looks like a job of one process on one node. Its job id differs from that
of each other task, because scripts name temporary directories by it, and no scheduler has a job of
that id, because scripts pass it to ``scancel``. The variables of the lease's own job are not passed
on with Slurm (:mod:`malletrain.agent.launch`).

Slurm's variables are those of https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
and PBS's those of qsub(1B). ``slurm_commands/srun`` runs a program once: a step of the lease's job
would wait until the agent ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from malletrain.protocol.farm import MAX_TASKS, FarmSpec, TaskItem
from malletrain.protocol.task_template import INDEX

FIRST_ID = 2**30
"""Smallest id of a task's job. A Slurm without a federation has ids below 2^26 (``MaxJobId``); in a
federation ids have the number of the cluster from bit 26 on, so that these are those of its 16th to
31st cluster. NumPy takes them as seeds, and C as an ``int``.
"""
COMMANDS = Path(__file__).with_name("slurm_commands")
"""Directory with the task's ``srun``."""
ONES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
ZEROS = ("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID")
NODE_NAMES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME")
CORE_NUMBERS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_CPUS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
)
"""The number of the task's cores. MPI libraries take SLURM_TASKS_PER_NODE for the number of
processes that they may start on the node.
"""
LOCAL_MPI = {"HYDRA_LAUNCHER": "fork", "I_MPI_HYDRA_BOOTSTRAP": "fork"}
"""Has MPICH, and Intel MPI, start processes without srun, which they call by its full path when
there is a SLURM_NODELIST. Open MPI calls none for its own node.
"""
ARRAY_VARIABLES = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_STEP",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NAME",
    "SLURM_SUBMIT_DIR",
    *ONES,
    *ZEROS,
    *NODE_NAMES,
    *CORE_NUMBERS,
    *LOCAL_MPI,
    "PBS_ARRAY_INDEX",
    "PBS_JOBID",
    "PBS_JOBNAME",
    "PBS_O_WORKDIR",
)
"""All variables that :func:`array_variables` can set."""


def job_id(job: str, task: int) -> int:
    """Return the id of a task as a job of its own, from FIRST_ID to 2^31 - 1. Task 0 has the id of
    the array, as one task of a Slurm array has.

    Args:
        job: id of the farm, such as ``j12``.
        task: number of the task.
    """
    number = int("".join(c for c in job if c.isdigit()) or 0)
    return FIRST_ID + (number * MAX_TASKS + task) % FIRST_ID


def array_variables(
    job: str, name: str, farm: FarmSpec, item: TaskItem, workdir: str, node: str, cores: int
) -> dict[str, str]:
    """Return the variables of a task. The index is the value of the column ``index`` if there is
    one, else the task's number.

    Args:
        job: id of the farm.
        name: its name.
        farm: what its tasks need.
        item: the task.
        workdir: the farm's working directory.
        node: name of the host.
        cores: number of the task's cores.
    """
    index = str(item.number)
    if INDEX in farm.columns:
        index = item.values[farm.columns.index(INDEX)]
    low, high, step = farm.array_range or (0, farm.total - 1, 1)
    own = str(job_id(job, item.number))
    return {
        "SLURM_ARRAY_TASK_ID": index,
        "SLURM_ARRAY_TASK_COUNT": str(farm.total),
        "SLURM_ARRAY_TASK_MIN": str(low),
        "SLURM_ARRAY_TASK_MAX": str(high),
        "SLURM_ARRAY_TASK_STEP": str(step),
        "SLURM_ARRAY_JOB_ID": str(job_id(job, 0)),
        "SLURM_JOB_ID": own,
        "SLURM_JOBID": own,
        "SLURM_JOB_NAME": name,
        "SLURM_SUBMIT_DIR": workdir,
        **dict.fromkeys(ONES, "1"),
        **dict.fromkeys(ZEROS, "0"),
        **dict.fromkeys(NODE_NAMES, node),
        **dict.fromkeys(CORE_NUMBERS, str(cores)),
        **LOCAL_MPI,
        "PBS_ARRAY_INDEX": index,
        "PBS_JOBID": f"{job_id(job, 0)}[{index}].malletrain",
        "PBS_JOBNAME": name,
        "PBS_O_WORKDIR": workdir,
    }


def with_commands(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in whose PATH the task's ``srun`` comes before Slurm's."""
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{COMMANDS}{os.pathsep}{path}"}
