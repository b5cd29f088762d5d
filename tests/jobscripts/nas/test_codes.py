"""Cells as numbers, and their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nas import NasError
from nas.codes import MOST_EDGES_CODE, decode, draw, encode, neighbour, text

from malletrain.sim.nas import Cell, Op, network, parse_cell, random_cell


@given(st.integers(0, 2**32))
def test_a_cell_survives_its_numbers(seed):
    cell = random_cell(np.random.default_rng(seed))
    again = decode(*encode(cell)).pruned()
    assert again == cell.pruned()
    assert network(again) == network(cell)


@given(st.integers(0, 2**32))
def test_a_neighbour_is_another_valid_network(seed):
    rng = np.random.default_rng(seed)
    edges, ops = draw(rng)
    new = neighbour(edges, ops, rng)
    assert decode(*new).pruned() != decode(edges, ops).pruned()
    assert decode(*new).vertices == 7


def test_neighbours_differ_in_little():
    rng = np.random.default_rng(2)
    cells = [draw(rng) for _ in range(100)]
    differ = []
    for edges, ops in cells:
        new = neighbour(edges, ops, rng)
        differ.append((new[0] ^ edges).bit_count() + (new[1] != ops))
    assert differ.count(1) > 30
    assert sorted(differ)[50] == 2


def test_a_cell_whose_input_is_its_output_has_neighbours():
    through = encode(Cell(((0, 1),), ()))
    cell = decode(*neighbour(*through, np.random.default_rng(0))).pruned()
    assert cell.ops


def test_every_cell_can_be_reached():
    """From one cell the walk meets as many as there are steps, nearly."""
    rng = np.random.default_rng(1)
    at, met = draw(rng), set()
    for _ in range(300):
        at = neighbour(*at, rng)
        met.add(at)
    assert len(met) > 250
    assert {op for e, o in met for op in decode(e, o).pruned().ops} == set(Op)


def test_the_text_is_that_of_the_tables():
    bits, digits = "0100010001001000010000000101000001000000010000000", "02121"
    cell = parse_cell(7, bits, digits)
    assert text(cell) == f"{bits}:{digits}"
    assert text(decode(*encode(cell))) == f"{bits}:{digits}"
    assert network(cell, size=32, classes=10).parameters == 3729162  # as in NAS-Bench-101


@pytest.mark.parametrize(
    ("edges", "ops", "words"),
    [
        (-1, 0, "edges from 0 to 2097151"),
        (0, 243, "ops from 0 to 242"),
        (MOST_EDGES_CODE, 0, "at most 7 vertices and 9 edges"),
        (0, 0, "No path leads from the input"),
    ],
)
def test_what_is_no_cell(edges, ops, words):
    with pytest.raises(NasError, match=words):
        decode(edges, ops)


def test_the_smallest():
    assert encode(Cell(((0, 1),), ())) == (2**15, 0)
