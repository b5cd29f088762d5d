"""The command and the environment of a job's launcher. Pure.

:mod:`malletrain.agent.software` decides in which software environment it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from malletrain.launch import fabric, supervisor
from malletrain.protocol import env
from malletrain.protocol.launcher_channel import LaunchOrder
from malletrain.protocol.messages import JobSpec

# The lease is a job of the main scheduler, but the training script is not a step of it: what
# describes ranks, steps and MPI would mislead it (and torch, Lightning, mpi4py …), and what
# concerns the agent is not the job's.
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
}
_KEPT = {
    env.CLUSTER,
    env.FAULTS,
    "SLURM_JOB_ID",
    "SLURM_JOBID",
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
    """Where a job runs: ``directory`` is its own, the sockets are the agent's; ``host`` and
    ``interface``: its network.
    """

    directory: Path
    launcher_endpoint: str
    worker_socket: str
    host: str
    interface: str
    node: str
    lease: str
    environment: Mapping[str, str]
    """The agent's own."""
    memory: Path | None = None
    """The job's folder in the node's memory, for snapshots; None: there is none."""
    daemon: str = ""
    """Name of the daemon whose jobs these are."""
    chosen: bool = False
    """The site names the network; else the environment may name another."""


def base_environment(agents: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What all jobs with these variables of their ``own`` have in common: the ``agents``' without
    what misleads, and their own.
    """
    environment = {
        name: value
        for name, value in agents.items()
        if name in _KEPT or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    environment["PYTHONUNBUFFERED"] = "1"
    # A store or a group that ends with a round would be told with a C++ backtrace.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
) -> dict[str, str]:
    """Environment of the launcher and its workers: the agent's without what misleads, the job's
    own, where to find the agent, the network, ``memory_bytes`` for snapshots, and how many bytes of
    them a node that leaves can hand over.
    """
    spec = order.spec
    environment = base_environment(place.environment, spec.env)
    if not fabric.sets_network(spec.env):
        usual = fabric.gloo_variables(place.interface)
        environment.update(
            fabric.network_variables(place.interface) if place.chosen else {**usual, **environment}
        )
    environment.update(
        {
            env.JOB: order.job,
            env.DAEMON_ID: place.daemon,
            env.SOCKET: place.worker_socket,
            env.FLAGS: flags,
            env.AGENT: order.endpoint,
            env.HOST: order.host,
            env.MAX_WORLD_SIZE: str(spec.largest * spec.nproc_per_node),
            env.NODE: place.node,
            env.LEASE: place.lease,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(order.stop_grace_s))),
        }
    )
    if key:
        environment[env.JOB_KEY] = key
    if place.memory is not None and memory_bytes > 0:
        environment[env.MEMORY] = str(place.memory)
        environment[env.MEMORY_LIMIT] = str(memory_bytes)
        environment[env.HAND_OVER] = str(hand_over_bytes)
    return environment


@dataclass(frozen=True)
class LauncherEntry:
    """What the job's Python begins with (:mod:`malletrain.launch.entry`)."""

    path: str
    """Of its file, as the job sees it."""
    where: str
    """The job's environment, as sentences name it."""
    library: str = ""
    """In a container: where the agent's malletrain lies."""


def launch_arguments(spec: JobSpec, order_file: Path, entry: LauncherEntry) -> list[str]:
    """What the job's Python is given to become the launcher."""
    kind = "restart" if spec.launcher == "builtin" else spec.launcher
    kind = "service" if spec.mode == "service" else kind
    return [entry.path, kind, entry.where, entry.library, *launcher_words(order_file)]


def launcher_words(order_file: Path) -> list[str]:
    """What a launcher itself is told."""
    return ["--launch", str(order_file)]


def warm_arguments(entry: LauncherEntry, socket: Path) -> list[str]:
    """What a Python is given to become a fork server that waits for jobs at ``socket``."""
    return [entry.path, "warm", entry.where, entry.library, *launcher_words(socket)]


def supervised_command(
    command: list[str], parent: int, workdir: str, log: Path, memory: Path | None = None
) -> list[str]:
    """``command`` under a supervisor that leaves nothing of it behind when it or ``parent`` ends,
    and nothing in the folder ``memory`` when ``parent`` does (see supervisor.py).
    """
    return [
        sys.executable,
        "-I",
        "-S",
        supervisor.__file__,
        "--keep",
        "--parent",
        str(parent),
        "--log",
        str(log),
        "--chdir",
        workdir,
        *(("--remove", str(memory)) if memory is not None else ()),
        "--",
        *command,
    ]
