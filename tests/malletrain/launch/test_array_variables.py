"""What a task finds of a job array: variables whose values are known, and the task's srun."""

from __future__ import annotations

import os
import subprocess

import pytest

from malletrain.launch.task_process import (
    ARRAY_VARIABLES,
    COMMANDS,
    FIRST_ID,
    array_variables,
    job_id,
    with_commands,
)
from malletrain.protocol.farm import FarmSpec, TaskItem


def farm_of(**fields):
    return FarmSpec(("x",), **{"columns": ("index",), "total": 6, "log": "{index}", **fields})


def test_the_variables_of_a_task():
    farm = farm_of(cpus=4, array_range=(10, 60, 10))
    values = array_variables("j17", "parts", farm, TaskItem(2, 1, ("30",)), "/home/ann", "n7", 4)
    own, array = str(job_id("j17", 2)), str(job_id("j17", 0))
    assert values == {
        "SLURM_ARRAY_TASK_ID": "30",
        "SLURM_ARRAY_TASK_COUNT": "6",
        "SLURM_ARRAY_TASK_MIN": "10",
        "SLURM_ARRAY_TASK_MAX": "60",
        "SLURM_ARRAY_TASK_STEP": "10",
        "SLURM_ARRAY_JOB_ID": array,
        "SLURM_JOB_ID": own,
        "SLURM_JOBID": own,
        "SLURM_JOB_NAME": "parts",
        "SLURM_SUBMIT_DIR": "/home/ann",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": "n7",
        "SLURM_NODELIST": "n7",
        "SLURMD_NODENAME": "n7",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_JOB_CPUS_PER_NODE": "4",
        "SLURM_TASKS_PER_NODE": "4",
        "HYDRA_LAUNCHER": "fork",
        "I_MPI_HYDRA_BOOTSTRAP": "fork",
        "PBS_ARRAY_INDEX": "30",
        "PBS_JOBID": f"{array}[30].malletrain",
        "PBS_JOBNAME": "parts",
        "PBS_O_WORKDIR": "/home/ann",
    }
    assert set(values) == set(ARRAY_VARIABLES), "containers pass ARRAY_VARIABLES on"


def test_the_index_is_the_number_without_such_a_column():
    farm = farm_of(columns=("x",))
    values = array_variables("j17", "parts", farm, TaskItem(5, 1, ("a",)), "/w", "n", 8)
    assert values["SLURM_ARRAY_TASK_ID"] == "5"
    assert (values["SLURM_ARRAY_TASK_MIN"], values["SLURM_ARRAY_TASK_MAX"]) == ("0", "5")
    assert values["SLURM_CPUS_PER_TASK"] == "8", "of a task that has the whole node"


def test_no_scheduler_has_a_job_of_that_id_and_no_two_tasks_have_one():
    ids = {job_id(f"j{job}", task) for job in range(1, 40) for task in (0, 1, 999_999)}
    assert len(ids) == 39 * 3
    assert all(FIRST_ID <= value < 2**31 for value in ids)
    assert FIRST_ID <= job_id("j987654321", 999_999) < 2**31


def srun(*words, **more):
    return subprocess.run(
        ["srun", *words],
        env=with_commands({"PATH": os.environ["PATH"]}),
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-n", "1", "--cpu-bind=cores"],
        ["-n1", "-N1", "-c", "4", "--exclusive"],
        ["--ntasks=1", "--nodes=1-1", "--mpi=pmix", "-u"],
        ["--mem=0", "--export=ALL", "--"],
        ["--gpus-per-task", "1", "--nodelist", "n1", "--input", "none", "--label"],
    ],
)
def test_srun_runs_the_program_once(options):
    done = srun(*options, "sh", "-c", 'echo "$1"; cat; exit 3', "sh", "-n 8", input="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "-n 8\nin\n", "")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-n", "4", "./mpi"], "srun: -n asks for 4."),
        (["-n4", "./mpi"], "srun: -n asks for 4."),
        (["--ntasks=2", "./mpi"], "srun: --ntasks asks for 2."),
        (["-N", "2", "x"], "srun: -N asks for 2."),
        (["--multi-prog", "conf"], "srun: This srun does not know --multi-prog."),
        (["-o", "out", "x"], "srun: This srun does not know -o."),
        (["-n", "1"], "srun: No program is named."),
        (["--mem"], "srun: --mem has no value."),
        (["--export=ALL,A=1", "x"], "srun: --export is ALL,A=1; set the variables before"),
    ],
)
def test_srun_refuses_what_it_would_not_do(options, sentence):
    done = srun(*options)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith(sentence)
    assert "call the program without srun" in done.stderr


def test_the_commands_come_before_those_of_the_scheduler():
    assert with_commands({"PATH": "/a:/b", "X": "1"}) == {"PATH": f"{COMMANDS}:/a:/b", "X": "1"}
    assert with_commands({})["PATH"] == f"{COMMANDS}:{os.defpath}"
