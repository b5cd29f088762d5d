"""The times of an engine: sums, fits, and iterations with known ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmserve.engine_model import EngineTimes, IterationSample, SimulatedEngine, fit
from llmserve.replicas import Capacity
from llmserve.simulated_model import digest_of, generate

UNIT = EngineTimes(step_s=1.0, prompt_token_s=0.1, request_s=0.0, kv_token_s=0.0)


def test_an_iteration_is_a_sum():
    times = EngineTimes(1.0, 0.1, 0.01, 0.001)
    assert times.iteration_s(5, 3, 7) == pytest.approx(1.0 + 0.5 + 0.03 + 0.007)
    assert times.token_s(Capacity(10, 100)) == pytest.approx(1.0 + 0.1 + 0.1)


@given(
    st.integers(0, 40),
    st.integers(1, 20),
    st.integers(1, 500),
    st.sampled_from([0.0, 0.001, 0.1]),
)
def test_the_time_of_iterations_is_the_sum_of_each(steps, requests, kv_tokens, kv_token_s):
    times = EngineTimes(0.5, 0.1, 0.01, kv_token_s)
    each = [times.iteration_s(0, requests, kv_tokens + requests * i) for i in range(steps)]
    seconds = times.decode_s(steps, requests, kv_tokens)
    assert seconds == pytest.approx(sum(each))
    assert times.steps_within(seconds, requests, kv_tokens, 100) == steps
    assert times.steps_within(
        seconds + each[-1] / 2 if each else 0.1, requests, kv_tokens, 100
    ) == (steps)
    assert times.steps_within(seconds, requests, kv_tokens, 3) == min(3, steps)


def test_a_fit_finds_the_times_of_measured_iterations():
    times = EngineTimes(0.02, 5e-5, 1e-4, 2e-7)
    samples = [
        IterationSample(p, b, k, times.iteration_s(p, b, k))
        for p in (0, 100, 2_000)
        for b, k in ((1, 50), (8, 4_000), (32, 60_000))
    ]
    estimate = fit(samples)
    assert estimate.step_s == pytest.approx(times.step_s)
    assert estimate.prompt_token_s == pytest.approx(times.prompt_token_s)
    assert estimate.request_s == pytest.approx(times.request_s, rel=1e-3)
    assert estimate.kv_token_s == pytest.approx(times.kv_token_s, rel=1e-3)


def test_a_fit_has_no_negative_times():
    samples = [IterationSample(0, b, 100 * b, 1.0 - b / 100) for b in (1, 2, 4, 8)]
    estimate = fit(samples)
    assert (
        min(estimate.step_s, estimate.prompt_token_s, estimate.request_s, estimate.kv_token_s) >= 0
    )
    with pytest.raises(ValueError, match="four iterations"):
        fit(samples[:3])
    with pytest.raises(ValueError, match="0 s or less"):
        fit([*samples, IterationSample(0, 1, 1, 0.0)])


def test_an_engine_generates_at_known_times():
    engine = SimulatedEngine(UNIT)
    assert engine.next_event() is None
    engine.post(1, [1, 2, 3, 4, 5], 3, 10.0)
    assert engine.next_event() == pytest.approx(11.5)  # 1 + 5·0.1, with the first token
    assert engine.advance(11.0) == []
    [begun] = engine.advance(11.5)
    assert (begun.attempt, len(begun.ids), begun.is_last) == (1, 1, False)
    assert engine.next_event() == pytest.approx(13.5)
    engine.post(2, [1], 1, 11.7)  # joins with the iteration that begins at 12.5
    reports = engine.advance(20.0)
    assert [(r.attempt, r.first_at, r.last_at, r.is_last) for r in reports] == [
        (1, pytest.approx(12.5), pytest.approx(13.6), True),
        (2, pytest.approx(13.6), pytest.approx(13.6), True),
    ]
    ids, _ = generate(digest_of([1, 2, 3, 4, 5]), 3)
    assert [*begun.ids, *reports[0].ids] == ids
    assert not len(engine)


def test_a_long_prompt_takes_several_iterations():
    engine = SimulatedEngine(EngineTimes(1.0, 0.0, 0.0, 0.0, max_prompt_tokens=4))
    engine.post(1, [1] * 10, 1, 0.0)
    engine.post(2, [2] * 2, 1, 0.0)
    reports = engine.advance(100.0)
    assert [(r.attempt, r.last_at) for r in reports] == [(1, 3.0), (2, 3.0)]


def test_a_stopped_attempt_generates_no_more():
    engine = SimulatedEngine(UNIT)
    engine.post(1, [1], 100, 0.0)
    engine.advance(5.0)
    engine.stop(1)
    engine.stop(7)
    assert engine.advance(50.0) == []
    assert engine.next_event() is None


@given(st.lists(st.floats(0.01, 5.0), max_size=30))
def test_what_an_engine_generates_does_not_depend_on_when_it_is_asked(pauses):
    polled, once = SimulatedEngine(UNIT), SimulatedEngine(UNIT)
    for engine in (polled, once):
        engine.post(1, [1, 2], 20, 0.0)
        engine.post(2, [3], 30, 0.0)
    ids = {1: [], 2: []}
    now = 0.0
    for pause in pauses:
        now += pause
        for report in polled.advance(now):
            ids[report.attempt] += report.ids
    total = {1: [], 2: []}
    for report in once.advance(now):
        total[report.attempt] += report.ids
    assert ids == total
