"""The law of step times over nodes and batch: recovered laws, held-out points, its uncertainty."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpa.fit import StepPoint, fit_steps, step_terms

SIZES, BASE = (1, 2, 3, 4, 6), 64


def step_law(overhead, compute, bandwidth=0.0, tree=0.0, ring=0.0):
    """Seconds of a step by nodes and samples."""

    def seconds(nodes, batch):
        exchange = bandwidth * (nodes - 1) / nodes + tree * math.log2(nodes) + ring * (nodes - 1)
        return overhead + compute * batch / nodes + exchange

    return seconds


LAWS = {
    "compute": step_law(0.01, 1e-3),
    "bandwidth": step_law(0.005, 1e-3, bandwidth=0.05),
    "latency of a tree": step_law(0.01, 1e-3, 0.02, tree=0.01),
    "latency of a ring": step_law(0.0, 2e-3, 0.02, ring=0.002),
    "overhead": step_law(0.05, 5e-4),
}


def measured(law, cases, noise=0.0, seed=0):
    generator = random.Random(seed)
    return [
        StepPoint(k, m, m / law(k, m) * (1 + noise * generator.gauss(0, 1)), max(noise, 0.005))
        for k, m in cases
    ]


def errors(law, fitted, cases):
    return [fitted.rate(k, m) / (m / law(k, m)) - 1 for k, m in cases]


def test_the_terms_are_those_of_the_docstring():
    assert step_terms(1, 64) == (1.0, 64.0, 0.0, 0.0, 0.0)
    assert step_terms(8, 64) == (1.0, 8.0, 7 / 8, 3.0, 7.0)


@pytest.mark.parametrize("name", LAWS)
def test_one_point_at_a_second_batch_predicts_all_others(name):
    """Held out: every size at 8 times the base batch, and all but one at twice the base batch."""
    law = LAWS[name]
    fitted = fit_steps(measured(law, [*((k, BASE) for k in SIZES), (2, 2 * BASE)]))
    held_out = [(k, m) for k in SIZES for m in (2 * BASE, 8 * BASE)]
    assert max(map(abs, errors(law, fitted, held_out))) < 0.035
    assert all(fitted.relative_std(k, m) < 0.1 for k, m in held_out)


@pytest.mark.parametrize("name", LAWS)
def test_the_base_batch_alone_predicts_others_within_its_own_uncertainty(name):
    law = LAWS[name]
    fitted = fit_steps(measured(law, [(k, BASE) for k in SIZES]))
    for k in SIZES:
        for m in (2 * BASE, 8 * BASE):
            (error,) = errors(law, fitted, [(k, m)])
            assert abs(error) < 2 * fitted.relative_std(k, m) + 0.02


@pytest.mark.parametrize("name", LAWS)
def test_noise_of_two_percent_costs_a_few_percent(name):
    law = LAWS[name]
    cases = [*((k, BASE) for k in SIZES), (2, 2 * BASE), (4, 4 * BASE)]
    held_out = [(k, 8 * BASE) for k in SIZES]
    deviations = [
        error
        for seed in range(20)
        for error in errors(law, fit_steps(measured(law, cases, 0.02, seed)), held_out)
    ]
    assert math.sqrt(sum(e * e for e in deviations) / len(deviations)) < 0.06


def test_the_unit_of_the_batch_does_not_matter():
    law = LAWS["bandwidth"]
    samples = fit_steps(measured(law, [(k, BASE) for k in SIZES]))
    bases = fit_steps(
        StepPoint(p.nodes, 1.0, p.rate / BASE, p.relative_std)
        for p in measured(law, [(k, BASE) for k in SIZES])
    )
    for k in SIZES:
        assert bases.rate(k, 4.0) * BASE == pytest.approx(samples.rate(k, 4 * BASE))
        assert bases.relative_std(k, 4.0) == pytest.approx(samples.relative_std(k, 4 * BASE))


points = st.builds(
    StepPoint,
    st.integers(1, 128),
    st.sampled_from([1.0, 2.0, 4.0, 64.0]),
    st.floats(1e-3, 1e6),
    st.floats(0.001, 0.3),
)


@settings(deadline=None)
@given(st.lists(points, min_size=1, max_size=10))
def test_more_samples_take_longer_and_are_processed_faster(measurements):
    fitted = fit_steps(measurements)
    for nodes in (1, 3, 100):
        steps = [fitted.step_s(nodes, m) for m in (1.0, 2.0, 8.0)]
        rates = [fitted.rate(nodes, m) for m in (1.0, 2.0, 8.0)]
        assert 0 < steps[0] < steps[1] < steps[2] < math.inf
        assert rates[0] <= rates[1] * (1 + 1e-9)
        assert rates[1] <= rates[2] * (1 + 1e-9)
        assert math.isfinite(fitted.relative_std(nodes, 4.0))


def test_a_law_needs_a_throughput():
    with pytest.raises(ValueError, match="at least one measured size"):
        fit_steps([])
    with pytest.raises(ValueError, match=r"throughput 0\.0 at 2 nodes"):
        fit_steps([StepPoint(2, 64.0, 0.0, 0.1)])
    with pytest.raises(ValueError, match="sizes start at 1"):
        step_terms(0, 64)
    with pytest.raises(ValueError, match="a batch is above 0"):
        step_terms(1, 0)
