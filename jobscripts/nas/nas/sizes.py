"""How large the network of a cell is in each preset, known before anything trains: what a sweep's
file names as ``model_size``, and what the training itself says when it runs. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from malletrain.sim.nas import Cell, network
from malletrain.sim.workloads import TRAINING_COST
from nas import NasError
from nas.codes import decode

SIDE, CLASSES, PLANES = 28, 10, 1
"""Of Fashion-MNIST: pixels of a side, classes, channels."""


@dataclass(frozen=True)
class NetworkSize:
    """How large the network is."""

    stem: int
    """Channels of the first convolution."""
    per_stack: int
    """Cells in each of the three stacks."""


PRESETS = {
    "cpu": NetworkSize(8, 1),
    "small": NetworkSize(32, 2),
    "nasbench": NetworkSize(128, 3),
}


def size_of(cell: Cell, preset: str) -> tuple[int, float]:
    """Parameters of the cell's network, and what training one image takes, FLOPs."""
    size = PRESETS[preset]
    cell_network = network(
        cell,
        size=SIDE,
        classes=CLASSES,
        planes=PLANES,
        stem=size.stem,
        per_stack=size.per_stack,
    )
    return cell_network.parameters, TRAINING_COST * cell_network.flops


def cpu(edges: int, ops: int, **_: object) -> tuple[int, float] | None:
    """A trial's size with ``--preset cpu``; None where its two numbers are no cell."""
    return _trial(edges, ops, "cpu")


def small(edges: int, ops: int, **_: object) -> tuple[int, float] | None:
    """The same with ``--preset small``."""
    return _trial(edges, ops, "small")


def nasbench(edges: int, ops: int, **_: object) -> tuple[int, float] | None:
    """The same with ``--preset nasbench``."""
    return _trial(edges, ops, "nasbench")


def _trial(edges: int, ops: int, preset: str) -> tuple[int, float] | None:
    try:
        return size_of(decode(edges, ops), preset)
    except NasError:
        return None
