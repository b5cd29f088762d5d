"""Whether a curve's intervals are honest: as often right as they say, between, below and above the
measured sizes.
"""

import math
import random

import pytest

from jpa.curve import MeasuredCurve
from jpa.phase import PhaseCurve
from jpa.points import Point
from tests.jpa.models import fixed_global_batch, summit

SIZES = (1, 2, 4, 8, 16, 32, 64)


def laws():
    rng = random.Random(1)
    family = []
    for _ in range(20):
        law = fixed_global_batch(10 ** -rng.uniform(0.3, 2.2), 10 ** -rng.uniform(1.5, 4))
        family.append({k: law(k) for k in SIZES})
    return family


CURVES = {"laws": laws(), "measured": list(summit().values())}


def windows(where, used):
    """(sizes measured, size asked for) for every place of ``used`` neighbouring sizes."""
    for low in range(len(SIZES) - used + 1):
        chosen = SIZES[low : low + used]
        if where == "between":
            yield from (([k for k in chosen if k != out], out) for out in chosen[1:-1])
        elif where == "below" and low > 0:
            yield chosen, SIZES[low - 1]
        elif where == "above" and low + used < len(SIZES):
            yield chosen, SIZES[low + used]


@pytest.mark.parametrize("family", CURVES)
@pytest.mark.parametrize("where", ["between", "below", "above"])
@pytest.mark.parametrize("used", [3, 4, 5])
def test_nine_of_ten_intervals_hold_the_truth(family, where, used):
    if not CURVES[family]:
        pytest.skip("the measured curves are not present")
    rng, inside, total = random.Random(3), 0, 0
    for truth in CURVES[family]:
        for chosen, asked in windows(where, used):
            curve = MeasuredCurve()
            for k in chosen:
                rate = truth[k] * math.exp(rng.gauss(0, 0.012))
                curve = curve.with_measurement(k, rate, 0.0235 * rate, 0.0)
            rate, std = curve.estimate(asked)
            inside += abs(math.log(rate / truth[asked])) < 1.96 * std / rate
            total += 1
    assert total >= 14
    assert inside / total >= 0.9


def test_a_curve_that_jumps_about_is_trusted_less_between_its_points():
    def width(rates):
        points = tuple(
            Point(k, r, (0.01 * r) ** 2) for k, r in zip((1, 2, 4, 8, 16), rates, strict=True)
        )
        rate, std = PhaseCurve(points).estimate(11)
        return std / rate

    straight = width((100.0, 200.0, 400.0, 800.0, 1600.0))
    jumpy = width((100.0, 140.0, 400.0, 560.0, 1600.0))
    assert jumpy > 2 * straight
