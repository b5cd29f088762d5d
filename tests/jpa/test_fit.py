"""The α-β law: recovered coefficients, bounds of predictions, calibration of its uncertainty."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpa.fit import fit, terms
from jpa.phase import ROUGHNESS
from tests.jpa.models import fixed_global_batch, linear, summit

LAWS = {
    "linear": linear,
    "communication-bound": fixed_global_batch(0.3),
    "nearly flat": fixed_global_batch(1.0),
    "with latency": fixed_global_batch(0.02, 0.003),
    "tree latency, batch per node fixed": lambda k: 100.0 * k / (1 + 0.05 * math.log2(k)),
    "ring bandwidth, batch per node fixed": lambda k: 100.0 * k / (1 + 0.4 * (k - 1) / k),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_within_the_family_is_recovered_between_and_near_its_points(name):
    law = LAWS[name]
    fitted = fit([(k, law(k), 0.005) for k in (1, 2, 4, 8, 16)])
    for k in (1, 2, 3, 6, 12, 16, 20):
        assert fitted.rate(k) == pytest.approx(law(k), rel=0.04)


def test_the_terms_follow_the_two_ways_of_scaling():
    assert terms(1) == (1.0, 0.0, 0.0, 0.0)
    assert terms(8) == (1.0, 7 / 8, 3.0, 7.0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 128), st.floats(1e-3, 1e7), st.floats(0.001, 0.3)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_efficiency_never_grows_with_nodes_and_every_rate_is_finite(points):
    fitted = fit(points)
    per_node = [fitted.rate(k) / k for k in (1, 2, 3, 5, 8, 13, 100)]
    assert all(math.isfinite(r) and r > 0 for r in per_node)
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(per_node))
    assert all(math.isfinite(fitted.relative_std(k)) for k in (1, 7, 100))


def test_one_point_leaves_the_rest_wide_open():
    fitted = fit([(16, 1000.0, 0.01)])
    assert fitted.relative_std(1) > 0.3
    assert fitted.rate(16) == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize(
    "points", [[], [(1, 0.0, 0.1)], [(1, -3.0, 0.1)], [(2, math.nan, 0.1)], [(2, math.inf, 0.1)]]
)
def test_points_that_make_no_sense_are_refused_in_a_sentence(points):
    with pytest.raises(ValueError, match="scaling law"):
        fit(points)


def test_sizes_start_at_one():
    with pytest.raises(ValueError, match="start at 1"):
        terms(0)


def _coverage(curves, direction: str, used: int, octaves_away: int) -> tuple[float, int]:
    """Share of extrapolations within their 95 % interval."""
    rng, inside, total = random.Random(2), 0, 0
    for curve in curves:
        sizes = sorted(curve)
        for low in range(len(sizes) - used + 1):
            at = low - octaves_away if direction == "down" else low + used - 1 + octaves_away
            if not 0 <= at < len(sizes):
                continue
            chosen = sizes[low : low + used]
            law = fit([(k, curve[k] * math.exp(rng.gauss(0, 0.012)), 0.012) for k in chosen])
            target = sizes[at]
            edge = chosen[0] if direction == "down" else chosen[-1]
            std = math.hypot(
                law.relative_std(target), ROUGHNESS * math.sqrt(abs(math.log2(target / edge)))
            )
            inside += abs(math.log(law.rate(target) / curve[target])) < 1.96 * std
            total += 1
    return inside / total, total


@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("octaves_away", [1, 2])
def test_intervals_hold_on_a_family_of_laws(direction, used, octaves_away):
    rng = random.Random(1)
    sizes = (1, 2, 4, 8, 16, 32, 64)
    family = []
    for _ in range(30):
        law = fixed_global_batch(10 ** -rng.uniform(0.3, 2.2), 10 ** -rng.uniform(1.5, 4))
        family.append({k: law(k) for k in sizes})
    share, _ = _coverage(family, direction, used, octaves_away)
    assert share >= 0.9


@pytest.mark.skipif(not summit(), reason="the measured curves are not present")
@pytest.mark.parametrize("direction", ["down", "up"])
@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("octaves_away", [1, 2])
def test_intervals_hold_on_measured_curves(direction, used, octaves_away):
    share, total = _coverage(list(summit().values()), direction, used, octaves_away)
    assert total >= 21
    assert share >= 0.9
