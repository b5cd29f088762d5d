"""Known answers of the gradient noise scale, of AdaScale's gain, and of the next batch size."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malletrain.training.gradient_noise import (
    Estimate,
    NoiseAverage,
    from_parts,
    from_successive,
    gain,
    next_size,
    next_towards,
)

SQUARED, NOISE = 4.0, 60.0
"""|G|² and tr Σ; the noise scale is 15 samples."""


def expected(samples):
    """Expectation of the squared norm of a gradient over so many samples."""
    return SQUARED + NOISE / samples


@pytest.mark.parametrize("sizes", [(8, 8), (3, 5), (1, 2, 2), (7, 7, 7, 6)])
def test_the_expected_norms_give_the_true_values(sizes):
    part = sum(map(expected, sizes)) / len(sizes)
    inverse = sum(1 / size for size in sizes) / len(sizes)
    estimate = from_parts(part, inverse, expected(sum(sizes)), sum(sizes))
    assert estimate.squared_gradient == pytest.approx(SQUARED)
    assert estimate.noise == pytest.approx(NOISE)


def test_one_part_says_nothing():
    assert from_parts(expected(8), 1 / 8, expected(8), 8) is None


def test_the_expected_products_of_successive_gradients_give_the_true_values():
    difference = NOISE / 8 + NOISE / 4
    estimate = from_successive(SQUARED, difference, 8, 4)
    assert (estimate.squared_gradient, estimate.noise) == pytest.approx((SQUARED, NOISE))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_synthetic_gradients_of_a_known_noise_scale(ranks):
    """200 elements: each sample's gradient is G plus noise of variance 0.3 an element."""
    generator = torch.Generator().manual_seed(5)
    true = torch.full((200,), 0.1414, dtype=torch.float64)
    average, before, share = NoiseAverage(), None, 4
    for _ in range(400):
        noise = torch.randn(ranks, share, 200, generator=generator, dtype=torch.float64)
        parts = (true + math.sqrt(0.3) * noise).mean(1)
        whole, size = parts.mean(0), ranks * share
        part = float(parts.square().sum(1).mean())
        estimate = from_parts(part, 1 / share, float(whole.square().sum()), size)
        if before is not None and estimate is None:
            product, difference = float(whole @ before), float((whole - before).square().sum())
            estimate = from_successive(product, difference, size, size)
        before = whole
        if estimate is not None:
            average.add(estimate, 1)
    assert average.mean.squared_gradient == pytest.approx(4.0, rel=0.1)
    assert average.mean.noise == pytest.approx(60.0, rel=0.05)
    assert average.scale == pytest.approx(15, rel=0.15)


def test_the_gain_is_1_without_noise_and_the_ratio_with_noise_only():
    assert gain(Estimate(4.0, 0.0), 32, 256) == 1
    assert gain(Estimate(0.0, 60.0), 32, 256) == pytest.approx(8)
    assert gain(Estimate(-1.0, 60.0), 32, 256) == pytest.approx(8)
    assert gain(Estimate(0.0, 0.0), 32, 256) == 1
    # noise of a base batch as large as the gradient: (1 + 1) / (1 / 8 + 1)
    assert gain(Estimate(1.0, 32.0), 32, 256) == pytest.approx(2 / (1 / 8 + 1))


@given(
    st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 100), st.integers(1, 50), st.integers(0, 9)
)
def test_the_gain_lies_between_1_and_the_ratio_and_grows_with_it(squared, noise, base, ratio, more):
    estimate = Estimate(squared, noise)
    value = gain(estimate, base, ratio * base)
    assert 1 - 1e-9 <= value <= ratio * (1 + 1e-9)
    assert gain(estimate, base, (ratio + more) * base) >= value * (1 - 1e-9)


def test_a_batch_below_the_base_has_no_gain():
    assert gain(Estimate(0.0, 60.0), 32, 16) == 1


@pytest.mark.parametrize(
    ("size", "noise_scale", "following"),
    [
        (64, 127.0, 64),
        (64, 128.0, 128),
        (64, math.inf, 128),
        (512, 1e9, 600),
        (600, 1e9, 600),
        (1200, 1e9, 600),
        (1200, 1200.0, 600),
        (2400, 0.0, 600),
        (128, 64.0, 128),
        (128, 63.0, 64),
        (100, 0.0, 64),
        (64, 0.0, 64),
    ],
)
def test_the_batch_follows_the_noise_scale(size, noise_scale, following):
    assert next_size(size, 64, 600, noise_scale) == following


@pytest.mark.parametrize(
    ("size", "target", "following"),
    [
        (64, 64, 64),
        (64, 512, 128),
        (256, 300, 300),
        (512, 64, 256),
        (100, 64, 64),
        (600, 512, 512),
        (1, 1, 1),
    ],
)
def test_the_batch_goes_to_an_advised_one_step_by_step(size, target, following):
    assert next_towards(size, target) == following


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50), st.floats(0, 1e9))
def test_the_batch_stays_between_base_and_most(base, above, more, noise_scale):
    size, most = base + above, base + more
    assert base <= next_size(size, base, most, noise_scale) <= most


def test_the_average_does_not_depend_on_how_samples_are_cut_into_updates():
    small, large = NoiseAverage(), NoiseAverage()
    for noise in (10.0, 30.0):
        for _ in range(8):
            small.add(Estimate(1.0, noise), 1)
        large.add(Estimate(1.0, noise), 8)
    assert small.scale == pytest.approx(large.scale)
    assert 20 < small.scale < 30


def test_an_average_without_estimates_or_without_noise():
    average = NoiseAverage()
    assert average.scale == 0
    average.add(Estimate(math.nan, 1.0), 1)
    average.add(Estimate(1.0, math.inf), 1)
    assert average.scale == 0
    average.add(Estimate(-1.0, 2.0), 1)
    assert average.scale == math.inf
    average.add(Estimate(1e9, -5.0), 1000)
    assert average.scale == 0


def test_the_state_is_plain_numbers_and_continues():
    average, other = NoiseAverage(), NoiseAverage()
    average.add(Estimate(2.0, 6.0), 3)
    other.load(average.state())
    assert other.scale == average.scale == pytest.approx(3)
    assert all(isinstance(value, float) for value in average.state().values())
