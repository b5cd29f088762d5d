"""The recent activity that the page shows: latencies of answers, tokens per second, errors of
engines. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

WINDOW_S = 300.0
"""Age of the oldest answers that latencies are computed from, seconds."""
MAX_ANSWERS = 10_000
"""Maximum number of answers in that window; older ones are dropped."""
RATE_S = 30.0
"""Time over which tokens per second are averaged, seconds."""
MAX_ERRORS = 20
"""Maximum number of errors of engines that are remembered."""


@dataclass(frozen=True)
class AnswerTimes:
    """The latencies of one answer."""

    model: str
    user: str
    ended_at: float
    """Seconds, on the clock of the caller."""
    ttft_s: float
    """Time from arrival to the first token, seconds."""
    token_s: float | None
    """Mean time of each further token, seconds; None: there was only one."""


@dataclass(frozen=True)
class EngineError:
    """An error of its engine that a replica reported."""

    time: float
    """Seconds, on the clock of the caller."""
    model: str
    replica: str
    sentence: str


@dataclass(frozen=True)
class LatencySummary:
    """Percentiles over answers, seconds; None: there is none."""

    answers: int = 0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    token_p50_s: float | None = None
    token_p99_s: float | None = None


class RecentActivity:
    """Answers and errors of the last minutes. Times must not decrease."""

    def __init__(self) -> None:
        self._answers: deque[AnswerTimes] = deque(maxlen=MAX_ANSWERS)
        self._tokens: dict[str, deque[tuple[float, int]]] = {}
        """Model → (time, number of tokens that were generated until then)."""
        self._sentences: dict[tuple[str, str], str] = {}
        """(model, replica) → the error that it reported last."""
        self._errors: deque[EngineError] = deque(maxlen=MAX_ERRORS)

    def add_answer(self, answer: AnswerTimes) -> None:
        """Record a complete answer."""
        self._answers.append(answer)

    def add_tokens(self, model: str, total: int, now: float) -> None:
        """Record that a model has generated ``total`` tokens since the start."""
        counts = self._tokens.setdefault(model, deque())
        counts.append((now, total))
        while len(counts) > 2 and counts[1][0] <= now - RATE_S:
            counts.popleft()

    def add_sentences(self, model: str, sentences: Mapping[str, str], now: float) -> None:
        """Record the reports of replicas about their engines. A replica that repeats its last
        report adds no error.

        Args:
            model: its name.
            sentences: replica → what is wrong with it; empty: nothing.
            now: the time.
        """
        for key in [key for key in self._sentences if key[0] == model and key[1] not in sentences]:
            del self._sentences[key]
        for replica, sentence in sentences.items():
            if sentence and self._sentences.get((model, replica)) != sentence:
                self._errors.append(EngineError(now, model, replica, sentence))
            self._sentences[model, replica] = sentence

    def errors(self) -> list[EngineError]:
        """Return the errors, the newest first."""
        return list(reversed(self._errors))

    def tokens_per_s(self, model: str) -> float:
        """Return the tokens that a model generates per second; 0 if that is not known yet."""
        counts = self._tokens.get(model, deque())
        if len(counts) < 2:
            return 0.0
        (first_at, first), (last_at, last) = counts[0], counts[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def answers(self, now: float) -> list[AnswerTimes]:
        """Return the answers of the last :data:`WINDOW_S` seconds."""
        while self._answers and self._answers[0].ended_at < now - WINDOW_S:
            self._answers.popleft()
        return list(self._answers)


def latencies(
    answers: Iterable[AnswerTimes], group: Callable[[AnswerTimes], str]
) -> dict[str, LatencySummary]:
    """Return name of a group → latencies of its answers.

    Args:
        answers: of all groups.
        group: returns the name of the group of an answer.
    """
    groups: dict[str, list[AnswerTimes]] = {}
    for answer in answers:
        groups.setdefault(group(answer), []).append(answer)
    return {name: _summary(answers) for name, answers in groups.items()}


def _summary(answers: Sequence[AnswerTimes]) -> LatencySummary:
    first = sorted(answer.ttft_s for answer in answers)
    further = sorted(answer.token_s for answer in answers if answer.token_s is not None)
    return LatencySummary(
        len(answers),
        percentile(first, 0.5),
        percentile(first, 0.99),
        percentile(further, 0.5),
        percentile(further, 0.99),
    )


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """Return the smallest value that at least ``part`` of all values do not exceed.

    Args:
        ordered: values in ascending order.
        part: from 0 to 1.

    Returns:
        The value; None if there are none.
    """
    if not ordered:
        return None
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def mean_token_s(first_at: float, ended_at: float, tokens: int) -> float | None:
    """Return the mean time of each token of an answer after its first one, seconds; None if it
    has only one.
    """
    return (ended_at - first_at) / (tokens - 1) if tokens > 1 else None


def by_user(samples: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, int]]:
    """Return user → kind → sum of the values.

    Args:
        samples: (user, kind, value) of each counter.
    """
    sums: dict[str, dict[str, int]] = {}
    for user, kind, value in samples:
        kinds = sums.setdefault(user, {})
        kinds[kind] = kinds.get(kind, 0) + int(value)
    return sums
