"""What the gateway remembers of the last minutes: percentiles, tokens per second, errors."""

from __future__ import annotations

import pytest
from llmserve.gateway.recent import (
    MAX_ERRORS,
    RATE_S,
    WINDOW_S,
    AnswerTimes,
    LatencySummary,
    RecentActivity,
    by_user,
    latencies,
    mean_token_s,
    percentile,
)


@pytest.mark.parametrize(
    ("ordered", "part", "value"),
    [
        ([], 0.5, None),
        ([3.0], 0.5, 3.0),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0], 0.51, 2.0),
        ([float(n) for n in range(1, 101)], 0.5, 50.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
        ([float(n) for n in range(1, 102)], 0.99, 100.0),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_percentiles(ordered, part, value):
    assert percentile(ordered, part) == value


@pytest.mark.parametrize(("tokens", "mean"), [(0, None), (1, None), (2, 3.0), (4, 1.0)])
def test_the_time_of_each_further_token(tokens, mean):
    assert mean_token_s(10.0, 13.0, tokens) == mean


def test_latencies_by_model_and_by_user_of_the_last_minutes():
    recent = RecentActivity()
    recent.add_answer(AnswerTimes("llama", "alice", 0.0, 9.0, 9.0))
    recent.add_answer(AnswerTimes("llama", "alice", 10.0, 1.0, 0.1))
    recent.add_answer(AnswerTimes("llama", "bob", 20.0, 3.0, None))
    recent.add_answer(AnswerTimes("qwen", "bob", 30.0, 2.0, 0.2))
    now = WINDOW_S + 5.0
    assert latencies(recent.answers(now), lambda answer: answer.model) == {
        "llama": LatencySummary(2, 1.0, 3.0, 0.1, 0.1),
        "qwen": LatencySummary(1, 2.0, 2.0, 0.2, 0.2),
    }
    assert latencies(recent.answers(now), lambda answer: answer.user) == {
        "alice": LatencySummary(1, 1.0, 1.0, 0.1, 0.1),
        "bob": LatencySummary(2, 2.0, 3.0, 0.2, 0.2),
    }
    assert recent.answers(2 * WINDOW_S) == []


def test_tokens_per_second_are_those_of_the_last_half_minute():
    recent = RecentActivity()
    assert recent.tokens_per_s("llama") == 0.0
    recent.add_tokens("llama", 5, 0.0)
    assert recent.tokens_per_s("llama") == 0.0
    for second in range(1, 101):
        recent.add_tokens("llama", 5 + 7 * second, float(second))
    assert recent.tokens_per_s("llama") == 7.0
    for second in range(101, 101 + int(RATE_S)):
        recent.add_tokens("llama", 705, float(second))
    assert recent.tokens_per_s("llama") == 0.0
    assert recent.tokens_per_s("qwen") == 0.0


def test_an_error_is_remembered_once_and_after_its_replica_is_gone():
    recent = RecentActivity()
    for now in (1.0, 2.0):
        recent.add_sentences("llama", {"n1": "out of memory", "n2": ""}, now)
    recent.add_sentences("llama", {"n2": "out of memory"}, 3.0)
    recent.add_sentences("qwen", {"n2": "no such file"}, 3.0)
    recent.add_sentences("llama", {"n1": "out of memory", "n2": "out of memory"}, 4.0)
    assert [(error.time, error.model, error.replica) for error in recent.errors()] == [
        (4.0, "llama", "n1"),  # a new replica on the same node
        (3.0, "qwen", "n2"),
        (3.0, "llama", "n2"),
        (1.0, "llama", "n1"),
    ]
    for number in range(2 * MAX_ERRORS):
        recent.add_sentences("llama", {"n1": f"error {number}"}, 5.0)
    assert len(recent.errors()) == MAX_ERRORS
    assert recent.errors()[0].sentence == f"error {2 * MAX_ERRORS - 1}"


def test_counters_are_summed_by_user():
    samples = [("alice", "done", 2.0), ("bob", "done", 1.0), ("alice", "done", 3.0)]
    samples.append(("alice", "failed", 1.0))
    assert by_user(samples) == {"alice": {"done": 5, "failed": 1}, "bob": {"done": 1}}
