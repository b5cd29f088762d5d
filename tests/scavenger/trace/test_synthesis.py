"""The synthesiser gives the statistics asked for, for any size; and the same trace for the same
seed.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scavenger.trace import synthesis
from scavenger.trace.trace import TraceError
from tests.draws import cases

pytestmark = pytest.mark.slow


def test_the_summit_law_has_the_published_numbers():
    law = synthesis.SUMMIT.lengths
    assert law.median_s == pytest.approx(475)
    assert law.mean_s == pytest.approx(1192, rel=1e-4)
    z = np.random.default_rng(0).standard_normal(200_000)
    assert (law.at(z) < 600).mean() == pytest.approx(0.56, abs=0.015)


def test_synthetic_weeks_have_summits_statistics():
    weeks = [
        synthesis.synthesise(synthesis.SUMMIT, 1024, 7 * 86400.0, seed).statistics()
        for seed in range(8)
    ]
    assert np.mean([s.idle_fraction for s in weeks]) == pytest.approx(391 / 4734, rel=0.25)
    assert np.mean([s.gap_median_s for s in weeks]) == pytest.approx(475, rel=0.12)
    assert np.mean([s.gap_mean_s for s in weeks]) == pytest.approx(1192, rel=0.12)
    assert np.mean([s.gap_short_fraction for s in weeks]) == pytest.approx(0.56, abs=0.05)
    assert max(s.idle_max for s in weeks) > 900
    assert min(s.idle_min for s in weeks) == 0


@given(
    nodes=st.integers(1, 40),
    fraction=st.floats(0.02, 0.95),
    seed=st.integers(0, 1000),
    swing=st.sampled_from([0.0, 0.7]),
    batch=st.floats(1.0, 20.0),
)
@settings(max_examples=cases(40), deadline=None)
def test_any_model_gives_a_valid_and_repeatable_trace(nodes, fraction, seed, swing, batch):
    longs = synthesis.lognormal(300.0, 700.0)
    model = synthesis.MachineModel(
        fraction,
        longs,
        batch_mean=batch,
        swing=swing,
        similarity=0.5,
        block_mean=2.0,
        quantum_s=10.0,
    )
    trace = synthesis.synthesise(model, nodes, 20_000.0, seed)
    again = synthesis.synthesise(model, nodes, 20_000.0, seed)
    assert len(trace.names) == nodes
    assert trace.duration_s == 20_000.0
    assert (trace.time % 10.0 == 0).all()
    assert trace.time.tolist() == again.time.tolist()


@pytest.mark.parametrize("mean_idle", [1.0, 10.0, 30.0])
def test_the_mean_idle_asked_for_is_met_in_the_long_run(mean_idle):
    model = synthesis.MachineModel(
        0.1, synthesis.lognormal(475.0, 1192.0), batch_median=1.5, batch_mean=2.0
    )
    trace = synthesis.synthesise(model, 40, 20 * 86400.0, seed=3, mean_idle=mean_idle)
    assert trace.statistics().idle_mean == pytest.approx(mean_idle, rel=0.08)


def test_a_swinging_rate_keeps_the_mean():
    model = synthesis.MachineModel(
        0.3, synthesis.lognormal(475.0, 1192.0), swing=1.0, swing_s=1800.0
    )
    trace = synthesis.synthesise(model, 60, 30 * 86400.0, seed=1)
    # The law used for the rate takes the swing as slow against a gap; it is not quite.
    assert trace.statistics().idle_fraction == pytest.approx(0.3, rel=0.12)


def test_a_histogram_of_lengths_is_reproduced():
    edges, weights = (60.0, 300.0, 600.0, 3600.0), (5.0, 0.0, 5.0)
    model = synthesis.MachineModel(0.3, synthesis.histogram(edges, weights))
    gaps = synthesis.synthesise(model, 50, 10 * 86400.0, seed=1).gaps()
    longs = gaps.length[gaps.complete]
    assert longs.min() >= 60.0
    assert longs.max() <= 3600.0
    assert (longs < 300).mean() == pytest.approx(0.5, abs=0.03)
    assert ((longs > 305) & (longs < 595)).mean() < 0.01


def test_a_minimum_cuts_the_law_below():
    law = synthesis.lognormal(475.0, 1192.0, 240.0)
    z = np.random.default_rng(1).standard_normal(100_000)
    assert law.at(z).min() >= 239.9
    plain = synthesis.lognormal(475.0, 1192.0).at(np.random.default_rng(2).standard_normal(400_000))
    assert law.median_s == pytest.approx(np.median(plain[plain >= 240]), rel=0.02)


def test_the_statistics_of_a_trace_can_be_taken_over():
    original = synthesis.synthesise(synthesis.SUMMIT, 300, 3 * 86400.0, seed=5)
    model = synthesis.like(original)
    s, t = (
        original.statistics(),
        synthesis.synthesise(model, 300, 20 * 86400.0, seed=6).statistics(),
    )
    assert t.gap_median_s == pytest.approx(s.gap_median_s, rel=0.25)
    assert t.gap_mean_s == pytest.approx(s.gap_mean_s, rel=0.25)
    assert t.idle_fraction == pytest.approx(s.idle_fraction, rel=0.35)
    assert model.quantum_s == 10.0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: synthesis.lognormal(10.0, 5.0), "0 < median < mean"),
        (lambda: synthesis.histogram([1.0, 2.0], [1.0, 2.0]), "one more than weights"),
        (lambda: synthesis.histogram([1.0, 2.0], [0.0]), "not all 0"),
        (lambda: synthesis.histogram([1.0, 2.0], [math.nan]), "not all 0"),
        (lambda: synthesis.MachineModel(1.5, synthesis.SUMMIT.lengths), "idle fraction"),
        (
            lambda: synthesis.MachineModel(0.5, synthesis.SUMMIT.lengths, batch_mean=0.5),
            "Batches need",
        ),
        (
            lambda: synthesis.MachineModel(0.5, synthesis.SUMMIT.lengths, similarity=2.0),
            "similarity",
        ),
        (lambda: synthesis.synthesise(synthesis.SUMMIT, 0, 10.0), "at least one node"),
        (lambda: synthesis.synthesise(synthesis.SUMMIT, 5, -1.0), "duration above 0"),
        (lambda: synthesis.synthesise(synthesis.SUMMIT, 5, 10.0, mean_idle=6.0), "idle fraction"),
        (lambda: synthesis.demo_trace(6, 1.0, 30.0), "No lively trace"),
        (
            lambda: synthesis.like(synthesis.synthesise(synthesis.SUMMIT, 2, 100.0)),
            "at least 20 are needed",
        ),
    ],
)
def test_bad_parameters_are_refused(call, sentence):
    with pytest.raises(TraceError, match=sentence):
        call()
