"""Which samples are hot, and which an epoch reads."""

from __future__ import annotations

import numpy as np
import pytest
from fedcase.hot_samples import hot_samples, plan_epoch
from hypothesis import given
from hypothesis import strategies as st

NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "uses", "count", "weight", "expected"),
    [
        ([], [], 3, 0.7, []),
        ([1, 2, 3], [1, 1, 1], 0, 0.7, []),
        ([1, 4, 3, 2], [1, 1, 1, 1], 2, 0.7, [1, 2]),  # loss
        ([1, 1, 1, 1], [0, 5, 2, 9], 2, 0.7, [1, 3]),  # frequency
        # Both: 0.5 · loss + 0.5 · frequency = 0.5, 0.5, 0.4, 0.
        ([1.0, 0.0, 0.4, 0.0], [0, 10, 4, 0], 2, 0.5, [0, 1]),
        ([2, 2, 2], [1, 1, 1], 2, 0.7, [0, 1]),  # equal: the first ones
        ([NAN, 0.1, NAN, 0.2], [0, 1, 0, 1], 2, 0.7, [1, 3]),  # those that were read
        ([NAN, 0.1, NAN, NAN], [0, 1, 0, 0], 2, 0.7, [0, 1]),  # and others while there is memory
        ([NAN, NAN], [0, 0], 1, 0.7, [0]),
        ([1, 2], [1, 1], 9, 0.7, [0, 1]),
    ],
)
def test_hot_samples(losses, uses, count, weight, expected):
    assert hot_samples(losses, uses, count, weight) == expected


@given(st.integers(1, 50), st.integers(0, 50), st.floats(0.01, 1), st.integers(0, 99))
def test_an_epoch_reads_all_hot_samples_and_weighs_the_others(samples, hot, share, seed):
    random = np.random.default_rng(seed)
    own = sorted(int(s) for s in random.permutation(samples)[:hot])
    plan = plan_epoch(samples, own, share, random)
    assert len(plan.samples) == len(set(plan.samples)) == len(plan.weights)
    assert set(own) <= set(plan.samples) <= set(range(samples))
    # The weights make up for what is not read.
    assert sum(plan.weights) == pytest.approx(samples)
    assert all(w == 1 for s, w in zip(plan.samples, plan.weights, strict=True) if s in own)


def test_a_part_of_the_cold_samples_is_read():
    plan = plan_epoch(100, list(range(10)), 0.3, np.random.default_rng(0))
    assert len(plan.samples) == 10 + 27
    assert sorted(set(plan.weights)) == [1.0, pytest.approx(90 / 27)]
    assert len(plan_epoch(100, [], 0.3, np.random.default_rng(0)).samples) == 100


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="is not in 0 < share <= 1"):
        plan_epoch(10, [1], share, np.random.default_rng(0))
