"""Simulated searches with known answers."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.layout_search import NOISES, Noise, World, cell, search, some_rates
from jpa.layout import SearchConfig

QUIET = Noise("normal", 0.0)


def test_without_noise_the_best_layout_is_found():
    figures = cell(QUIET, 0.05, SearchConfig(), 20, 8)
    assert (figures["good"], figures["worse"], figures["abandoned"]) == (1.0, 0.0, 0.0)
    assert figures["mean"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: f"{noise.name}-{noise.deviation}")
def test_noise_is_what_it_says(noise):
    """Its mean deviation over many batches; stalls and load make batches slower."""
    rates = some_rates(1, 8)
    layout = next(iter(rates))
    factors = []
    for seed in range(400):
        world = World(rates, noise, 0.05, seed)
        world.advance(1000.0)  # the node is loaded now, if it ever is
        factors += [world.batch(layout) / rates[layout] for _ in range(10)]
    mean, deviation = statistics.fmean(factors), statistics.pstdev(factors)
    if noise.load:
        assert mean == pytest.approx(0.6, abs=0.01)
    elif noise.stalls:
        assert mean == pytest.approx(0.9 + 0.1 * 0.6, abs=0.02)
    else:
        expected = noise.deviation * ((0.25 + 1 + 4) / 3) ** 0.5 if noise.unequal else None
        assert mean == pytest.approx(1.0, abs=0.02)
        assert deviation == pytest.approx(expected or noise.deviation, rel=0.2)


def test_a_search_of_slow_steps_ends_in_time():
    rates = some_rates(3, 12)
    end = search(World(rates, NOISES[1], 0.4, 3), rates, SearchConfig())
    assert end.outcome is not None
    assert end.seconds <= 60.0 + 2.5 + 1.2 + 1.0


def test_pooling_finds_more_good_layouts_with_slow_steps():
    pooled, own = (
        cell(Noise("normal", 0.05), 0.4, SearchConfig(pooled=each), 60, 8) for each in (True, False)
    )
    assert pooled["good"] > own["good"]
    assert pooled["worse"] == own["worse"] == 0.0
