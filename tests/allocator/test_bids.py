"""Valid and invalid bids."""

from __future__ import annotations

import math

import numpy as np
import pytest

from allocator import Bid, BidError, SizeValues


@pytest.mark.parametrize(
    ("sizes", "values", "says"),
    [
        ([1, 2], [1.0], "2 sizes but 1 values"),
        ([0, 1], [0.0, 1.0], "sizes start at 1"),
        ([2, 1], [1.0, 1.0], "strictly increasing"),
        ([2, 2], [1.0, 1.0], "strictly increasing"),
        ([1.5], [1.0], "whole numbers"),
        ([3], [math.nan], "value at 3 nodes is nan"),
        ([1, 4], [1.0, math.inf], "value at 4 nodes is inf"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    sizes: list[int], values: list[float], says: str
) -> None:
    with pytest.raises(BidError, match=says):
        SizeValues(sizes, values)


@pytest.mark.parametrize("idle", [math.nan, math.inf])
def test_an_idle_value_is_finite_or_minus_infinity(idle: float) -> None:
    with pytest.raises(BidError, match="bid of job a values no nodes"):
        Bid("a", {}, idle)


def test_options_are_values() -> None:
    one, same, other = (
        SizeValues([1, 3], [1.0, 2.0]),
        SizeValues(np.array([1, 3]), np.array([1.0, 2.0])),
        SizeValues([1, 3], [1.0, 2.5]),
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one.value(3) == 2.0
    assert one.value(2) is None


def test_options_do_not_change_with_the_arrays_they_were_made_of() -> None:
    sizes, values = np.array([1, 2]), np.array([1.0, 2.0])
    options = SizeValues(sizes, values)
    sizes[0], values[0] = 7, 9.0
    assert options == SizeValues([1, 2], [1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        options.values[0] = 3.0
