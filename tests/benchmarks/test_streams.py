"""What is compared with what, and how sure one may be of it."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.streams import WAYS, Cell, cell, rows


def test_samples_are_over_those_of_freetrain_in_the_same_cell():
    cells = [Cell("nas", 10.0, 1), Cell("nas", 20.0, 2), Cell("hpo", 10.0, 1)]
    outcomes = {}
    for number, c in enumerate(cells):
        for way in WAYS:
            samples = 100.0 * (number + 1) * (1.1 if way == "told" and number else 1.0)
            counts = {"jobs_completed": 2, "rescales": 3, "profiles": number}
            outcomes[c, way] = {"samples": samples, "fraction_of_ideal": 0.5, **counts}
    by_cell = {(row["kind"], row["way"]): row for row in rows(cells, outcomes)}
    assert len(by_cell) == 2 * len(WAYS)
    assert by_cell["nas", "told"]["over_freetrain"] == pytest.approx(0.05)
    assert by_cell["nas", "told"]["standard_error"] == pytest.approx(0.05)
    assert by_cell["hpo", "told"]["over_freetrain"] == pytest.approx(0.1)
    assert by_cell["hpo", "told"]["standard_error"] == 0.0, "of one cell nothing can be said"
    assert by_cell["nas", "worth"]["profiles"] == 1
    assert by_cell["nas", "worth"]["over_freetrain"] == 0.0


def test_a_cell_is_a_kind_an_hour_and_a_seed():
    assert cell("sweep,12.5,3") == Cell("sweep", 12.5, 3)
    with pytest.raises(argparse.ArgumentTypeError, match="kinds are nas, hpo"):
        cell("sweeps,1,2")
