"""One task of a farm: its files, its environment, its process and its end.

Decides the names of its files, which variables it gets, and what a failure to start it means.
:mod:`malletrain.launch.farm` decides when it is started and stopped.

The output goes to a temporary file beside the log, which is renamed when the task has ended, so
that a log with its final name is complete. The same holds for the result file, after exit code 0.

A task finds what it would find in a job array of Slurm or PBS: variables, and ``srun``. It looks
like a job of one process on one node. Its job id differs from that of each other task, because
scripts name temporary directories by it, and no scheduler has a job of that id, because scripts
pass it to ``scancel``. The variables of the lease's own job are not passed on with Slurm
(:mod:`malletrain.agent.launch`).

Slurm's variables are those of https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
and PBS's those of qsub(1B). ``slurm_commands/srun`` runs a program once: a step of the lease's job
would wait until the agent ends.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from malletrain.launch.cores import THREADS_VARIABLE
from malletrain.launch.loop import Child, LaunchLoop
from malletrain.launch.task_limits import is_there
from malletrain.protocol import env
from malletrain.protocol.farm import (
    INDEX,
    MAX_TAIL,
    MAX_TASKS,
    OUTPUT,
    FarmSpec,
    TaskItem,
    TaskResult,
    expand,
)
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.launcher_channel import TaskSetting

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


TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes after a SIGTERM, of a process and of a shell."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a command that cannot be started, as a shell has them."""
TASK_VARIABLES = (
    env.TASK,
    env.CHECKPOINT_DIR,
    "CUDA_VISIBLE_DEVICES",
    THREADS_VARIABLE,
    env.THREADS,
    *ARRAY_VARIABLES,
)
"""Variables that a task has besides those of its node."""


class TaskRefused(Exception):
    """A task cannot be started. ``code``: the exit code that a shell would have."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def tail_of(path: str) -> str:
    """Return the end of a file, at most MAX_TAIL bytes; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - MAX_TAIL))
            text = file.read(MAX_TAIL).decode(errors="replace").rstrip()
    except OSError:
        return ""
    return text.encode()[-MAX_TAIL:].decode(errors="ignore")


class TaskProcess:
    """A task that runs.

    Args:
        loop: the launcher's loop.
        job: id of the job.
        name: name of the job.
        farm: what the tasks run.
        workdir: the job's working directory.
        item: the task.
        setting: how tasks are started here.
        variables: environment variables of the node.
        limits: words before its command that set its limits.
        devices: the GPUs of this task.
        cores: number of its cores.

    Raises:
        TaskRefused: it cannot be started.
    """

    def __init__(
        self,
        loop: LaunchLoop,
        job: str,
        name: str,
        farm: FarmSpec,
        workdir: str,
        item: TaskItem,
        setting: TaskSetting,
        variables: Mapping[str, str],
        limits: Sequence[str],
        devices: Sequence[str],
        cores: int,
    ) -> None:
        self.item = item
        self.devices = tuple(devices)
        self.started = time.time()
        self._began = time.monotonic()
        self._limit_at = self._began + farm.time_s if farm.time_s else None
        self._limit_s = farm.time_s
        self._kill_at: float | None = None
        self._exceeded = False
        self.stopping = False
        """Whether it was asked to end, because its node leaves or it is not needed. Its exit code
        means nothing then: a program may save its state on SIGTERM, and exit with code 0.
        """
        self.ended_at: float | None = None
        """When its end was noticed, monotonic time, seconds; None while it runs."""
        mark = f"{os.getpid()}.{item.number}.{item.attempt}.part"

        def path(pattern: str) -> str:
            [expanded] = expand([pattern], farm.columns, item.values, item.number)
            return os.path.join(workdir, expanded)

        try:
            self._log = path(farm.log)
            self._output = path(farm.output) if farm.output else ""
            checkpoint = path(farm.checkpoint) if farm.checkpoint else ""
            # It ends as the result file does: programs choose a format by that.
            more = {OUTPUT: _beside(self._output, f".{mark}.", "")} if self._output else {}
            command = expand(farm.command, farm.columns, item.values, item.number, more)
        except ValueError as error:
            raise TaskRefused(str(error), NOT_EXECUTABLE) from None
        self._log_part = _beside(self._log, ".", f".{mark}")
        self._output_part = more.get(OUTPUT, "")
        own = {env.TASK: str(item.number)}
        if checkpoint:
            own[env.CHECKPOINT_DIR] = checkpoint
        if farm.array_env:
            node = socket.gethostname()
            of_array = array_variables(job, name, farm, item, workdir, node, cores)
            own |= {k: v for k, v in of_array.items() if k not in LOCAL_MPI or k not in variables}
        if not setting.prefix:  # a container has no such directory, and no srun
            variables = with_commands(variables)
        if farm.gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if setting.variable_prefix:
            own |= {setting.variable_prefix + name: value for name, value in own.items()}
        try:
            os.makedirs(os.path.dirname(self._log), exist_ok=True)
            for directory in (os.path.dirname(self._output), checkpoint):
                if directory:
                    os.makedirs(directory, exist_ok=True)
            log = os.open(
                self._log_part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise TaskRefused(f"{self._log} cannot be written: {reason}.", 1) from None
        try:
            if limits and not is_there(command[0], variables.get("PATH"), workdir):
                raise FileNotFoundError(errno.ENOENT, "not found", command[0])
            self._child = Child(
                loop,
                [*setting.prefix, *limits, *command],
                {**variables, **own},
                workdir=workdir,
                output=log,
                own_group=True,
            )
        except (OSError, ValueError) as error:
            with suppress(OSError):
                os.unlink(self._log_part)
            raise _refusal(error, command[0] if command else "", workdir) from None
        finally:
            os.close(log)

    def ended(self) -> bool:
        """Return whether it has ended. What is left of its process group is killed then."""
        if self.ended_at is None and self._child.ended() is not None:
            self.ended_at = time.monotonic()
            self._signal(signal.SIGKILL)
        return self.ended_at is not None

    @property
    def age_s(self) -> float:
        """Time since its start, seconds."""
        return time.monotonic() - self._began

    @property
    def terminated(self) -> bool:
        """Whether a SIGTERM ended it that the launcher did not send."""
        code = self._child.process.returncode
        return code in TERMINATED and not (self.stopping or self._exceeded)

    def result(self) -> TaskResult:
        """Return its result, after its end, and move its files to their final names."""
        code, sentence = self._child.process.returncode, ""
        if self._exceeded:
            seconds = time.monotonic() - self._began
            sentence = f"It ran for {seconds:.3g} s; its limit is {self._limit_s:g} s."
            code = code or -signal.SIGTERM
        try:
            if code == 0 and self._output and not os.path.exists(self._output_part):
                code, sentence = 1, f"It ended with code 0 and did not write {self._output}."
            elif code == 0 and self._output:
                reached(FaultPoint.TASK_ENDED)
                os.replace(self._output_part, self._output)
                reached(FaultPoint.TASK_RENAMED)
        except OSError as error:
            code, sentence = 1, f"{self._output} cannot be written: {error.strerror}."
        tail = tail_of(self._log_part) if code else ""
        self.move_files()
        number, attempt = self.item.number, self.item.attempt
        return TaskResult(number, attempt, code, self.started, time.time(), tail, sentence)

    def wait(self, limit_s: float) -> None:
        """Wait for its end, at most ``limit_s`` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(limit_s)

    def check_limits(self, now: float, grace_s: float) -> None:
        """Stop it if it exceeds its time limit, and kill it if it was stopped long enough ago.

        Args:
            now: monotonic time, seconds.
            grace_s: time between SIGTERM and SIGKILL, seconds.
        """
        if self._limit_at is not None and now >= self._limit_at and not self._exceeded:
            self._exceeded = True
            self._terminate(now + grace_s)
        if self._kill_at is not None and now >= self._kill_at:
            self._signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after ``grace_s`` seconds."""
        if self._child.process.poll() is None:
            self.stopping = True
            self._terminate(time.monotonic() + grace_s)

    def move_files(self) -> None:
        """Rename the log, and remove a result file that is not complete."""
        with suppress(OSError):
            os.replace(self._log_part, self._log)
        if self._output_part:
            with suppress(OSError):
                os.unlink(self._output_part)

    def next_limit(self) -> float | None:
        """Return when :meth:`check_limits` is due, monotonic time; None if it is not."""
        limits = [self._kill_at, None if self._exceeded else self._limit_at]
        return min((at for at in limits if at is not None), default=None)

    def _terminate(self, kill_at: float) -> None:
        if self._kill_at is None:
            self._signal(signal.SIGTERM)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.process.pid, number)


def _beside(path: str, prefix: str, suffix: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{prefix}{name}{suffix}")


def _refusal(error: Exception, program: str, workdir: str) -> TaskRefused:
    """Return the reason for which a command could not be started."""
    if not isinstance(error, OSError):
        return TaskRefused(f"The command cannot be started: {error}.", NOT_EXECUTABLE)
    if error.filename == workdir and not os.path.isdir(workdir):
        return TaskRefused(f"This node has no directory {workdir}.", NOT_EXECUTABLE)
    if isinstance(error, FileNotFoundError):
        return TaskRefused(f"The command {program} is not found on this node.", NOT_FOUND)
    reason = error.strerror or str(error)
    return TaskRefused(f"The command {program} cannot be started: {reason}.", NOT_EXECUTABLE)
