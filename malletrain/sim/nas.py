"""Neural architecture search as a workload: random cells of NAS-Bench-101, each a training job.

Decides which cells are valid, and how many parameters and operations a network of one has (Ying et
al., NAS-Bench-101, ICML 2019, arXiv 1902.09635, section 2 and appendix; channel rules as in its
published code). :mod:`malletrain.sim.workloads` derives the throughput on n nodes from these two
numbers.

The network: a 3×3 convolution to 128 channels, three stacks of three cells, between stacks a 2×2
pooling with stride 2 and twice the channels, global average pooling, one dense layer. Every
convolution is followed by batch normalisation (two parameters per channel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from malletrain.sim.workloads import NODE, TRAINING_COST, Cluster, SimJob, WorkloadError

MAX_VERTICES = 7
MAX_EDGES = 9
STEM_CHANNELS = 128
STACKS = 3
CELLS_PER_STACK = 3
NAS_SAMPLES = 1.28e7
"""Samples of one candidate: ten epochs of ImageNet."""


class Op(Enum):
    """Operation of an interior vertex."""

    CONV3X3 = "conv3x3-bn-relu"
    CONV1X1 = "conv1x1-bn-relu"
    MAXPOOL3X3 = "maxpool3x3"


_KERNEL = {Op.CONV3X3: 3, Op.CONV1X1: 1}


@dataclass(frozen=True)
class Cell:
    """A directed acyclic graph from the input (vertex 0) to the output (the last vertex).

    ``edges``: (from, to) with from < to. ``ops``: operations of the interior vertices, in order.
    Vertices that are on no path from input to output are ignored; see :meth:`pruned`.

    Raises:
        WorkloadError: it has more than 7 vertices or 9 edges, an edge goes back, or no path leads
            from input to output.
    """

    edges: tuple[tuple[int, int], ...]
    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        n = self.vertices
        if n > MAX_VERTICES or len(self.edges) > MAX_EDGES:
            raise WorkloadError(
                f"A cell has at most {MAX_VERTICES} vertices and {MAX_EDGES} edges; got {n} and "
                f"{len(self.edges)}."
            )
        if len(set(self.edges)) != len(self.edges) or not all(
            0 <= a < b < n for a, b in self.edges
        ):
            raise WorkloadError("The edges of a cell go from lower to higher vertices, each once.")
        if len(_on_paths(n, self.edges)) < 2:
            raise WorkloadError("No path leads from the input of the cell to its output.")

    @property
    def vertices(self) -> int:
        """Number of vertices, input and output included."""
        return len(self.ops) + 2

    def pruned(self) -> Cell:
        """Return the cell without the vertices that are on no path from input to output."""
        path_vertices = _on_paths(self.vertices, self.edges)
        number = {v: k for k, v in enumerate(path_vertices)}
        edges = tuple((number[a], number[b]) for a, b in self.edges if a in number and b in number)
        return Cell(edges, tuple(self.ops[v - 1] for v in path_vertices[1:-1]))


@dataclass(frozen=True)
class Network:
    """Size of a network. ``parameters``: number of trainable parameters; ``flops``: operations of a
    forward pass of one sample, where a multiply-add counts as two.
    """

    parameters: int
    flops: float


def network(
    cell: Cell,
    *,
    size: int = 224,
    classes: int = 1000,
    planes: int = 3,
    stem: int = STEM_CHANNELS,
    per_stack: int = CELLS_PER_STACK,
) -> Network:
    """Return the size of the network of ``cell``.

    Args:
        cell: cell that is repeated.
        size: height and width of the images.
        classes: number of classes.
        planes: number of planes of the images.
        stem: channels of the first convolution.
        per_stack: cells per stack.
    """
    cell = cell.pruned()
    total = _Sum()
    total.convolution(3, planes, stem, size)
    width, before, side = stem, stem, size
    for stack in range(STACKS):
        if stack:
            side = (side + 1) // 2  # stride 2 with 'same' padding
            width *= 2
        for _ in range(per_stack):
            _add_cell(total, cell, before, width, side)
            before = width
    total.parameters += width * classes + classes
    total.flops += 2.0 * width * classes
    return Network(total.parameters, total.flops)


def random_cell(rng: np.random.Generator) -> Cell:
    """Return a random valid cell: every possible edge of 7 vertices with probability 1/2, every
    operation with equal probability; repeated until at most 9 edges remain after pruning (as in
    NAS-Bench-101's own example).
    """
    ops = tuple(Op)
    while True:
        pairs = [(a, b) for a in range(MAX_VERTICES) for b in range(a + 1, MAX_VERTICES)]
        edges = tuple(
            pair for pair, there in zip(pairs, rng.random(len(pairs)) < 0.5, strict=True) if there
        )
        chosen = tuple(ops[k] for k in rng.integers(len(ops), size=MAX_VERTICES - 2))
        path_vertices = _on_paths(MAX_VERTICES, edges)
        inside = [(a, b) for a, b in edges if a in path_vertices and b in path_vertices]
        if len(path_vertices) >= 2 and len(inside) <= MAX_EDGES:
            return Cell(tuple(inside), chosen).pruned()


def nas(
    count: int,
    seed: int = 0,
    *,
    samples: float = NAS_SAMPLES,
    max_nodes: int = 64,
    cluster: Cluster = NODE,
    size: int = 224,
) -> list[SimJob]:
    """Return a search over random cells, all submitted at the start. Owners state no curve, because
    these networks are unmeasured.

    Args:
        count: number of cells.
        seed: seed of the random numbers.
        samples: work of each job.
        max_nodes: maximum size of each job.
        cluster: performance of the nodes.
        size: height and width of the images.
    """
    if count < 1:
        raise WorkloadError(f"A workload of {count} jobs cannot be simulated; give 1 or more.")
    rng = np.random.default_rng(seed)
    sizes = sorted({1 << p for p in range(max_nodes.bit_length())} | {max_nodes})
    width = len(str(count))
    jobs = []
    for number in range(1, count + 1):
        net = network(random_cell(rng), size=size)
        curve = cluster.curve(TRAINING_COST * net.flops, net.parameters, sizes)
        name, flops = f"cell-{number:0{width}d}", TRAINING_COST * net.flops
        jobs.append(
            SimJob(
                name,
                1,
                max_nodes,
                samples,
                curve,
                model="nas",
                parameters=net.parameters,
                flops=flops,
            )
        )
    return jobs


def parse_cell(vertices: int, adjacency: str, ops: str) -> Cell:
    """Return a cell from its text form.

    Args:
        vertices: number of vertices.
        adjacency: bits of the upper triangular adjacency matrix, row by row.
        ops: one digit per interior vertex (0 conv3x3, 1 conv1x1, 2 maxpool3x3).
    """
    if (
        len(adjacency) != vertices * vertices
        or len(ops) != vertices - 2
        or set(adjacency) - {"0", "1"}
        or set(ops) - set("012")
    ):
        raise WorkloadError(
            f"A cell of {vertices} vertices needs {vertices * vertices} bits and {vertices - 2} "
            "digits 0, 1 or 2."
        )
    edges = tuple(divmod(k, vertices) for k, bit in enumerate(adjacency) if bit == "1")
    return Cell(edges, tuple(tuple(Op)[int(digit)] for digit in ops))


def _on_paths(vertices: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the vertices on paths from the first to the last, in order; empty if there is no
    path.
    """
    reachable, reaching = {0}, {vertices - 1}
    for a, b in sorted(edges):
        if a in reachable:
            reachable.add(b)
    for a, b in sorted(edges, key=lambda edge: -edge[1]):
        if b in reaching:
            reaching.add(a)
    both = sorted(reachable & reaching)
    return both if vertices - 1 in reachable else []


def channels(cell: Cell, before: int, after: int) -> list[int]:
    """Return the channels of each vertex. Vertices before the output share its channels; the others
    have the maximum of their successors.
    """
    n, out = cell.vertices, cell.vertices - 1
    widths = [before] + [0] * (n - 2) + [after]
    into = [a for a, b in sorted(cell.edges) if b == out and a != 0]
    for k, v in enumerate(into):
        widths[v] = after // len(into) + (k < after % len(into))
    for v in range(n - 3, 0, -1):
        if (v, out) not in cell.edges:
            widths[v] = max(widths[b] for a, b in cell.edges if a == v and b != out)
    return widths


def _add_cell(total: _Sum, cell: Cell, before: int, after: int, side: int) -> None:
    n, out = cell.vertices, cell.vertices - 1
    width = channels(cell, before, after)
    for v in range(1, n - 1):
        if (0, v) in cell.edges:
            total.convolution(
                1, before, width[v], side
            )  # projects the input to the vertex's channels
        op = cell.ops[v - 1]
        if op is Op.MAXPOOL3X3:
            total.flops += 9.0 * width[v] * side * side
        else:
            total.convolution(_KERNEL[op], width[v], width[v], side)
    if (0, out) in cell.edges:
        total.convolution(1, before, after, side)


class _Sum:
    """Running totals of parameters and operations."""

    def __init__(self) -> None:
        self.parameters = 0
        self.flops = 0.0

    def convolution(self, kernel: int, before: int, after: int, side: int) -> None:
        """Add a convolution without bias, and its batch normalisation."""
        weights = kernel * kernel * before * after
        self.parameters += weights + 2 * after
        self.flops += 2.0 * weights * side * side
