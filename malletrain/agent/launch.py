"""The command and the environment in which a job's launcher is started. Pure: nothing is started
here.

No part of a job's own text is ever quoted into a shell line, except its ``setup``, which is meant
to be one.
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

# Not ``-m``: that would let a file in the job's working directory named like a module of ours or of
# torch's take its place.
_SAFE_PATH = "import sys; sys.path = [p for p in sys.path if p]; "
_BUILTIN = _SAFE_PATH + "from malletrain.launch.fork_server import main; sys.exit(main())"
_SERVICE = _SAFE_PATH + "from malletrain.launch.service import main; sys.exit(main())"
_STOCK = _SAFE_PATH + "from malletrain.launch.torchrun import main; sys.exit(main())"
_SETUP = '{\n%s\n} && exec "$(command -v python || command -v python3)" "$@"'
_ENDLESS = 1_000_000

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
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_CLUSTER_NAME",
    "SLURM_TMPDIR",
    "SLURM_CONF",
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
    chosen: bool = False
    """The site names the network; else the environment may name another."""


def job_environment(
    place: JobPlace, order: LaunchOrder, *, flags: str, key: str = ""
) -> dict[str, str]:
    """Environment of the launcher and its workers: the agent's without what misleads, the job's
    own, where to find the agent, and the network.
    """
    spec = order.spec
    environment = {
        name: value
        for name, value in place.environment.items()
        if name in _KEPT or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    environment["PYTHONUNBUFFERED"] = "1"
    environment.update(spec.env)
    if not fabric.says_itself(spec.env):
        usual = fabric.for_gloo(place.interface)
        environment.update(
            fabric.for_all(place.interface) if place.chosen else {**usual, **environment}
        )
    environment.update(
        {
            env.JOB: order.job,
            env.SOCKET: place.worker_socket,
            env.FLAGS: flags,
            env.AGENT: order.endpoint,
            env.HOST: order.host,
            env.MAX_WORLD_SIZE: str(spec.max_nodes * spec.nproc_per_node),
            env.NODE: place.node,
            env.LEASE: place.lease,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, round(order.stop_grace_s))),
        }
    )
    if key:
        environment[env.JOB_KEY] = key
    return environment


def _stock_arguments(order: LaunchOrder, scratch: Path) -> list[str]:
    """Arguments of the torchrun command for this job; its workers are tied and log to their own
    files as ours do.
    """
    spec = order.spec
    python = "python" if spec.setup else spec.python
    tie = [
        sys.executable,
        "-I",
        "-S",
        supervisor.__file__,
        "--parent",
        "env",
        "--per-rank-log",
        order.log_dir,
        "--",
    ]
    return [
        "--rdzv-backend=malletrain",
        f"--rdzv-endpoint={order.endpoint}",
        f"--rdzv-id={order.job}",
        f"--rdzv-conf=timeout={max(1, round(order.join_timeout_s))}",
        f"--nnodes={spec.min_nodes}:{spec.max_nodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--max-restarts={_ENDLESS}",
        "--monitor-interval=0.1",
        f"--log-dir={scratch}",
        "--no-python",
        *tie,
        python,
        "-u",
        spec.script,
        *spec.args,
    ]


def launch_command(spec: JobSpec, order: LaunchOrder, order_file: Path, scratch: Path) -> list[str]:
    """The launcher's command: under the job's Python, after its setup if it has one. ``scratch``:
    directory for torchrun's own files.
    """
    if spec.launcher == "torchrun":
        arguments = ["-c", _STOCK, *_stock_arguments(order, scratch)]
    else:
        arguments = [
            "-c",
            _SERVICE if spec.mode == "service" else _BUILTIN,
            "--launch",
            str(order_file),
        ]
    if spec.setup:
        return ["bash", "-c", _SETUP % spec.setup, "bash", *arguments]
    return [spec.python, *arguments]


def kept_command(command: list[str], parent: int, workdir: str, log: Path) -> list[str]:
    """``command`` under a supervisor that leaves nothing of it behind when it or ``parent`` ends
    (see supervisor.py).
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
        "--",
        *command,
    ]
