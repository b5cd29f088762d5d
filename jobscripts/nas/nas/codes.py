"""Cells as two whole numbers, as a sweep's parameters are; and their neighbours. Pure.

``edges``: the adjacency matrix above its diagonal, row by row, the first bit the highest. ``ops``:
the five operations as a number to the base 3 (0 conv3x3, 1 conv1x1, 2 maxpool3x3), the first digit
the highest. A cell of fewer than seven vertices has isolated ones: they are on no path.
"""

from __future__ import annotations

import numpy as np

from malletrain.sim.nas import MAX_VERTICES, Cell, Op, random_cell
from malletrain.sim.workloads import WorkloadError
from nas import NasError

PAIRS = tuple((a, b) for a in range(MAX_VERTICES) for b in range(a + 1, MAX_VERTICES))
OPS = tuple(Op)
INSIDE = MAX_VERTICES - 2
MOST_EDGES_CODE = 2 ** len(PAIRS) - 1
MOST_OPS_CODE = len(OPS) ** INSIDE - 1


def decode(edges: int, ops: int) -> Cell:
    """The cell of these numbers. Raises NasError where they are none."""
    if not (0 <= edges <= MOST_EDGES_CODE and 0 <= ops <= MOST_OPS_CODE):
        raise NasError(
            f"Cells have edges from 0 to {MOST_EDGES_CODE} and ops from 0 to {MOST_OPS_CODE}, not "
            f"{edges} and {ops}."
        )
    bits = f"{edges:0{len(PAIRS)}b}"
    present_edges = tuple(pair for pair, bit in zip(PAIRS, bits, strict=True) if bit == "1")
    digits = [ops // len(OPS) ** k % len(OPS) for k in reversed(range(INSIDE))]
    try:
        return Cell(present_edges, tuple(OPS[digit] for digit in digits))
    except WorkloadError as error:
        raise NasError(str(error)) from None


def encode(cell: Cell) -> tuple[int, int]:
    """(edges, ops) of a cell; of one with fewer vertices the output is moved to the last."""
    last = cell.vertices - 1
    edges = {(a, MAX_VERTICES - 1 if b == last else b) for a, b in cell.edges}
    bits = "".join("1" if pair in edges else "0" for pair in PAIRS)
    digits = [OPS.index(op) for op in cell.ops] + [0] * (INSIDE - len(cell.ops))
    ops = 0
    for digit in digits:
        ops = ops * len(OPS) + digit
    return int(bits, 2), ops


def draw(rng: np.random.Generator) -> tuple[int, int]:
    """A random valid cell."""
    return encode(random_cell(rng))


def neighbour(edges: int, ops: int, rng: np.random.Generator) -> tuple[int, int]:
    """A valid cell that differs in one edge or one operation, and is another network.

    Changes of what lies on no path make no other network; they are kept, and another is made. Else
    a cell whose input is its output would have no neighbour.
    """
    was = decode(edges, ops).pruned()
    while True:
        change = int(rng.integers(len(PAIRS) + INSIDE))
        if change < len(PAIRS):
            new = edges ^ (1 << change), ops
        else:
            place = len(OPS) ** (change - len(PAIRS))
            digit = ops // place % len(OPS)
            other = (digit + int(rng.integers(1, len(OPS)))) % len(OPS)
            new = edges, ops + (other - digit) * place
        try:
            cell = decode(*new)
        except NasError:
            continue
        if cell.pruned() != was:
            return new
        edges, ops = new


def text(cell: Cell) -> str:
    """As in NAS-Bench-101's tables: adjacency bits row by row, a colon, a digit an operation."""
    n = cell.vertices
    bits = "".join("1" if (a, b) in cell.edges else "0" for a in range(n) for b in range(n))
    return f"{bits}:{''.join(str(OPS.index(op)) for op in cell.ops)}"
