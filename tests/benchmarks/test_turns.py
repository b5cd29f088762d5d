"""What is compared with what when turns are weighed."""

from __future__ import annotations

import pytest

from benchmarks.streams import Cell
from benchmarks.turns import KEPT, rows, tell


def test_a_cell_with_turns_is_compared_with_the_same_without():
    cells = [Cell("nas", 10.0, 1), Cell("nas", 20.0, 2), Cell("hpo", 10.0, 1)]
    outcomes = {}
    for number, c in enumerate(cells):
        for turns in (True, False):
            outcome = dict.fromkeys(KEPT, 0.5)
            samples = 100.0 * (number + 1) * (0.9 if turns and number else 1.0)
            longest = 1.0 + number if turns else 10.0
            outcome |= {"samples": samples, "work": 7.0, "longest_wait_hours": longest}
            outcomes[c, turns] = outcome
    nas, hpo = rows(cells, outcomes)
    assert nas["samples"] == (pytest.approx(-0.05), pytest.approx(0.05))
    assert nas["longest"] == [2.0, 10.0], "the longest of all cells"
    assert hpo["samples"] == (pytest.approx(-0.1), 0.0), "of one cell nothing can be said"
    assert hpo["work"][0] == nas["harvested"] == 0.0
    table = tell([nas, hpo])
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| nas (2) | -5.0 % ± 5.0 | +0.0 % ± 0.0 | 2.0, 10.0 h |")
