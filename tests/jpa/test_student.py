"""Quantiles of Student's t, against scipy.stats.t.ppf."""

from __future__ import annotations

import pytest

from jpa.student import t975, t995


@pytest.mark.parametrize(
    ("degrees", "at_975", "at_995"),
    [
        (1, 12.706, 63.657),
        (1.9, 12.706, 63.657),
        (4, 2.776, 4.604),
        (12.99, 2.179, 3.055),
        (30, 2.042, 2.750),
        (30.9, 2.042, 2.750),
        (31, 1.960, 2.576),
        (1e9, 1.960, 2.576),
    ],
)
def test_quantiles(degrees, at_975, at_995):
    assert (t975(degrees), t995(degrees)) == (at_975, at_995)


def test_below_one_degree_the_interval_is_that_of_one():
    assert t975(0.5) == t975(1)


def test_an_interval_is_never_wider_with_more_data():
    for quantile in (t975, t995):
        values = [quantile(degrees) for degrees in range(1, 60)]
        assert values == sorted(values, reverse=True)
