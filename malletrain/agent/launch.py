"""The command and the environment of a job's launcher. Pure.

:mod:`malletrain.agent.software` decides in which software environment it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from malletrain.launch import supervisor, worker_variables
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.messages import JobSpec

# The lease is a job of the main scheduler, but the training script is not a step of that job.
# Variables that describe ranks, steps and MPI would mislead the script (and torch, Lightning,
# mpi4py …), and the variables of the agent do not concern it. SLURM_JOB_ID alone is enough for
# Open MPI 4, PRRTE and jax to look for the nodes and tasks of a Slurm job, and to fail.
_DROPPED_PREFIXES = (
    "MALLETRAIN_",
    "SLURM_",
    "PBS_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "TORCHELASTIC_",
    "TORCH_ELASTIC_",
)
_DROPPED = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONSAFEPATH",
    # PBS sets it in each job to the processors of the chunk; no user chose that number.
    "OMP_NUM_THREADS",
}
_ALLOWED = {
    env.CLUSTER,
    env.FAULTS,
    "SLURM_CLUSTER_NAME",
    "SLURM_TMPDIR",
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_SACK_SOCKET",
    "PBS_JOBID",
    "PBS_JOBDIR",
}


@dataclass(frozen=True)
class JobPlace:
    """Host, directory, sockets and network of a job on this node."""

    directory: Path
    """Directory of the job."""
    launcher_endpoint: str
    """Address of the agent's socket for launchers."""
    worker_socket: str
    """Path of the agent's socket for workers."""
    host: str
    """Address at which other nodes reach the job."""
    interface: str
    """Network interface with that address; empty if none is known."""
    node: str
    """Name of the node."""
    lease: str
    """Id of the lease."""
    environment: Mapping[str, str]
    """Environment of the agent."""
    memory: Path | None = None
    """The job's directory in the node's memory, for snapshots; None if there is none."""
    data: Path | None = None
    """The directory of data caches in the node's memory, for all jobs; None if there is none."""
    daemon: str = ""
    """Name of the daemon of the job."""
    chosen: bool = False
    """Whether the daemon has chosen the network. If not, the agent's environment may select
    another.
    """
    cpus: int = 0
    """Processors of the lease, if it shares its host with other jobs; 0 for a whole node."""
    memory_bytes: int | None = None
    """Memory of such a lease, bytes; None for a whole node."""


def base_environment(
    agents: Mapping[str, str], own: Mapping[str, str], trains: bool = True
) -> dict[str, str]:
    """Return the environment that all jobs with the variables ``own`` share: the ``agents``'
    environment without misleading variables, and ``own``. ``trains``: whether these are trainings.
    """
    environment = {
        name: value
        for name, value in agents.items()
        if name in _ALLOWED or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    environment["PYTHONUNBUFFERED"] = "1"
    # Otherwise torch logs a C++ backtrace for each store or group that ends with a round.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if trains:
        # A script that numbers the words of a set, or splits its data by hash(), must do so alike
        # in each round. A service is spared, because its clients could choose colliding keys.
        environment.setdefault("PYTHONHASHSEED", "0")
    environment.update(own)
    return environment


def job_environment(
    place: JobPlace,
    order: LaunchOrder,
    *,
    flags: str,
    key: str = "",
    memory_bytes: int = 0,
    hand_over_bytes: int = 0,
    max_processes: int = 0,
) -> dict[str, str]:
    """Return the environment of the launcher and its workers.

    Args:
        place: host, directory, sockets and network of the job.
        order: order for the launcher.
        flags: file in which drains are requested.
        key: the job's secret; empty for none.
        memory_bytes: size limit of the snapshots in memory, bytes; 0 for none.
        hand_over_bytes: size of the snapshots that a leaving node can hand over, bytes.
        max_processes: maximum number of processes on a node in any round; 0: as in the order.
    """
    spec = order.spec
    environment = base_environment(place.environment, spec.env, spec.trains)
    if not worker_variables.sets_network(spec.env):
        if place.chosen:
            environment.update(worker_variables.network_variables(place.interface))
        else:
            environment = {**worker_variables.gloo_variables(place.interface), **environment}
    environment.update(
        {
            env.JOB: order.job,
            env.DAEMON_ID: place.daemon,
            env.SOCKET: place.worker_socket,
            env.FLAGS: flags,
            env.STEP_TIMES: "1",
            env.AGENT: order.endpoint,
            env.HOST: order.host,
            env.MAX_WORLD_SIZE: str(spec.largest * spec.nproc_per_node),
            env.NODE: place.node,
            env.LEASE: place.lease,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(order.stop_grace_s))),
        }
    )
    if max_processes:
        environment[env.MAX_WORLD_SIZE_OF_LAYOUTS] = str(spec.largest * max_processes)
    if place.cpus:
        environment[env.SLOT_CPUS] = str(place.cpus)
    if key:
        environment[env.JOB_KEY] = key
    if place.memory is not None and memory_bytes > 0:
        environment[env.MEMORY] = str(place.memory)
        environment[env.MEMORY_LIMIT] = str(memory_bytes)
        environment[env.HAND_OVER] = str(hand_over_bytes)
    if place.data is not None:
        environment[env.DATA] = str(place.data)
    if place.memory_bytes is not None:
        environment[env.SLOT_MEMORY_MB] = str(place.memory_bytes >> 20)
    return environment


@dataclass(frozen=True)
class LauncherEntry:
    """The program that the job's Python runs first (:mod:`malletrain.launch.entry`)."""

    path: str
    """Path of its file in the job's environment."""
    where: str
    """Description of the job's environment, for messages."""
    library: str = ""
    """Directory of the agent's malletrain in a container; else empty."""


def launch_arguments(spec: JobSpec, order_file: Path, entry: LauncherEntry) -> list[str]:
    """Return the arguments with which the job's Python becomes the launcher.

    Args:
        spec: specification of the job.
        order_file: file of the order.
        entry: the program that the Python runs first.
    """
    kind = "restart" if spec.launcher == "builtin" else spec.launcher
    kind = kind if spec.trains else spec.mode
    return [entry.path, kind, entry.where, entry.library, *launcher_arguments(order_file)]


def launcher_arguments(order_file: Path) -> list[str]:
    """Return the arguments of the launcher itself."""
    return ["--launch", str(order_file)]


def warm_arguments(entry: LauncherEntry, socket: Path) -> list[str]:
    """Return the arguments with which a Python becomes a fork server that waits for jobs at
    ``socket``.
    """
    return [entry.path, "warm", entry.where, entry.library, *launcher_arguments(socket)]


def supervised_command(
    command: list[str],
    parent: int,
    workdir: str,
    log: Path | None = None,
    memory: Path | None = None,
    niceness: int = 0,
) -> list[str]:
    """Return ``command`` under a supervisor (see supervisor.py), which kills all its processes
    when ``command`` or ``parent`` ends.

    Args:
        command: the command.
        parent: pid of the process that starts it.
        workdir: its working directory.
        log: file for its output; None for that of the process that starts it.
        memory: directory that the supervisor removes when ``parent`` ends; None for none.
        niceness: added to the niceness of the processes.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        supervisor.__file__,
        "--keep",
        "--parent",
        str(parent),
        *(("--nice", str(niceness)) if niceness else ()),
        *(("--log", str(log)) if log is not None else ()),
        "--chdir",
        workdir,
        *(("--remove", str(memory)) if memory is not None else ()),
        "--",
        *command,
    ]
