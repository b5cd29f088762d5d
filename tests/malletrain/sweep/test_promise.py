"""How much a trial counts by how far it has come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.sweep.promise import rung, weights


@pytest.mark.parametrize(
    ("step", "passed"), [(None, 0), (0, 0), (1, 0), (2, 1), (5, 1), (6, 2), (17, 2), (18, 3)]
)
def test_rungs_passed(step, passed):
    assert rung(step, first=2, reduction=3) == passed


def test_those_above_count_more_and_the_last_have_all_of_it():
    assert weights({1: 0, 2: 1, 3: 3}, 8.0) == {1: 1.0, 2: 2.0, 3: 8.0}
    assert weights({3: 3}, 8.0) == {3: 8.0}
    assert weights({}, 8.0) == {}


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 12), min_size=1))
def test_no_trial_counts_more_than_the_sweep_was_given(rungs):
    found = weights(rungs, 1.0)
    assert max(found.values()) == 1.0
    assert min(found.values()) > 0
    for a, b in zip(rungs, list(rungs)[1:], strict=False):
        assert (found[a] >= found[b]) or rungs[a] < rungs[b]
