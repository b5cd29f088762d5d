"""Cells of NAS-Bench-101: validity, parameters and operations."""

from __future__ import annotations

import csv
import gzip

import numpy as np
import pytest

from malletrain.sim.nas import MAX_EDGES, Cell, Op, nas, network, parse_cell, random_cell
from malletrain.sim.workloads import WorkloadError
from tests.malletrain.sim.conftest import shared

C3, C1, POOL = Op.CONV3X3, Op.CONV1X1, Op.MAXPOOL3X3


def conv(k, a, b):
    return k * k * a * b + 2 * b


def test_parameters_by_hand():
    """One 3x3 convolution between input and output: stem, nine cells of a projection and a
    convolution, dense layer.
    """
    cell = Cell(((0, 1), (1, 2)), (C3,))
    cells = 0
    before = 128
    for channels in (128, 256, 512):
        for _ in range(3):
            cells += conv(1, before, channels) + conv(3, channels, channels)
            before = channels
    assert network(cell, size=32, classes=10).parameters == conv(3, 3, 128) + cells + 512 * 10 + 10


def test_a_cell_that_only_passes_on_is_a_projection():
    cell = Cell(((0, 1),), ())
    expected = conv(3, 3, 128) + sum(
        conv(1, a, b) for a, b in ((128, 128),) * 3 + ((128, 256), (256, 256), (256, 256))
    )
    expected += conv(1, 256, 512) + 2 * conv(1, 512, 512) + 512 * 10 + 10
    assert network(cell, size=32, classes=10).parameters == expected


def test_operations_grow_with_the_area_of_the_image():
    cell = Cell(((0, 1), (1, 3), (0, 2), (2, 3), (0, 3)), (C3, POOL))
    small, large = network(cell, size=64), network(cell, size=128)
    assert small.parameters == large.parameters
    assert large.flops / small.flops == pytest.approx(4.0, rel=1e-3)


def test_vertices_without_a_path_do_not_count():
    with_dead_end = Cell(((0, 1), (1, 4), (0, 2), (3, 4)), (C3, C1, POOL))
    assert with_dead_end.pruned() == Cell(((0, 1), (1, 2)), (C3,))
    assert network(with_dead_end) == network(Cell(((0, 1), (1, 2)), (C3,)))


@pytest.mark.parametrize(
    ("edges", "ops"),
    [
        (((1, 2),), (C3,)),
        (((0, 1),), (C3,)),
        (((1, 0),), ()),
        (((0, 1), (0, 1)), ()),
        (tuple((a, b) for a in range(5) for b in range(a + 1, 5)), (C3, C3, C3)),
        (((0, 7),), (C3,) * 6),
    ],
)
def test_impossible_cells_are_refused(edges, ops):
    with pytest.raises(WorkloadError):
        Cell(edges, ops)


def test_random_cells_are_valid_and_differ():
    rng = np.random.default_rng(0)
    cells = [random_cell(rng) for _ in range(200)]
    assert len(set(cells)) > 100
    for cell in cells:
        assert cell.pruned() == cell
        assert len(cell.edges) <= MAX_EDGES
    assert {op for cell in cells for op in cell.ops} == set(Op)


def test_a_search_is_made_of_jobs_nobody_measured():
    jobs = nas(20, seed=5, max_nodes=48)
    assert jobs == nas(20, seed=5, max_nodes=48)
    assert all(j.stated_curve is None and j.max_nodes == 48 == j.curve.largest for j in jobs)
    assert len({j.curve for j in jobs}) > 10


@pytest.mark.parametrize(
    ("n", "bits", "ops"),
    [(3, "010001", "0"), (3, "010001000", "00"), (3, "010001000", "5"), (3, "01000100x", "0")],
)
def test_damaged_cells_are_refused(n, bits, ops):
    with pytest.raises(WorkloadError, match="needs"):
        parse_cell(n, bits, ops)


def test_parameters_are_those_of_the_benchmark():
    """Trainable parameters as published for every 10th of 30,001 cells."""
    path = shared("nasbench/nasbench101_sample30k.csv.gz")
    with gzip.open(path, "rt") as file:
        rows = list(csv.DictReader(file))[::10]
    wrong = 0
    for row in rows:
        cell = parse_cell(int(row["num_vertices"]), row["adjacency_rowmajor"], row["interior_ops"])
        wrong += network(cell, size=32, classes=10).parameters != int(row["trainable_parameters"])
    assert len(rows) == 3001
    assert wrong == 0
