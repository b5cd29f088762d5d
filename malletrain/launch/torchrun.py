"""The entry point by which torchrun finds MalleTrain (group ``torchrun.handlers``): ``torchrun
--rdzv-backend=malletrain …``.

torch loads this module and calls :func:`handler_creator` in every process that imports
torch.distributed.elastic, so it imports nothing. The handler itself is
:mod:`malletrain.launch.rendezvous`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point must return: the function that makes a handler
    (torch/distributed/elastic/rendezvous/registry.py).
    """
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous handler for torchrun's parameters."""
    from malletrain.launch.rendezvous import DaemonRendezvous

    return DaemonRendezvous.from_parameters(params)


def main() -> None:
    """The torchrun command with this handler: torch before 2.5 does not look for entry points."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main as torchrun

    rendezvous_handler_registry.register("malletrain", create_handler)
    torchrun()
