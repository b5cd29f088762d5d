"""The entry point by which torchrun finds MalleTrain's rendezvous (group ``torchrun.handlers``):
``torchrun --rdzv-backend=malletrain …``.

torch loads this module and calls :func:`handler_creator` in every process that imports
torch.distributed.elastic, so it imports the standard library only. The handler itself is
:mod:`malletrain.launch.rendezvous`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from malletrain.protocol.launcher_channel import LaunchOrder

_UNLIMITED = 1_000_000


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that creates a handler, as the entry point must
    (torch/distributed/elastic/rendezvous/registry.py).
    """
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the rendezvous handler for torchrun's parameters."""
    from malletrain.launch.rendezvous import DaemonRendezvous

    return DaemonRendezvous.from_parameters(params)


def stock_arguments(order: LaunchOrder, scratch: Path) -> list[str]:
    """Return the arguments of the torchrun command for a job. As with MalleTrain's own launcher,
    workers end with the launcher and write to their own logs.

    Args:
        order: the agent's order.
        scratch: directory for torchrun's own files.
    """
    from malletrain.launch.script import script_command

    spec = order.spec
    tie = [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))]
    return [
        "--rdzv-backend=malletrain",
        f"--rdzv-endpoint={order.endpoint}",
        f"--rdzv-id={order.job}",
        f"--rdzv-conf=timeout={max(1, round(order.join_timeout_s))}",
        f"--nnodes={spec.min_nodes}:{spec.max_nodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--max-restarts={_UNLIMITED}",
        "--monitor-interval=0.1",
        f"--log-dir={scratch}",
        "--no-python",
        *tie,
        *("--parent", "env", "--per-rank-log", order.log_dir, "--"),
        *script_command(spec),
    ]


def main() -> int:
    """Read the order and become the torchrun command. Registers the handler, because torch before
    2.5 does not find it by its entry point.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as torchrun

    from malletrain.launch.loop import order_from_arguments
    from malletrain.launch.worker_variables import WorkerVariables

    order = order_from_arguments(
        "malletrain.launch.torchrun", "Run one job on this node by torchrun."
    )
    if order is None:
        return 2
    WorkerVariables().set(order.spec.layout)
    rendezvous_handler_registry.register("malletrain", create_handler)
    torchrun(stock_arguments(order, Path(order.log_dir).with_name("torchrun")))
    return 0
