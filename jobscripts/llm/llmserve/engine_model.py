"""The time that an engine needs: continuous batching, one iteration at a time. Pure.

In each iteration the engine computes some tokens of prompts (chunked prefill) and one token of each
answer that it has begun. The time of an iteration is linear in this work:

    seconds = step_s + prompt_token_s·P + request_s·B + kv_token_s·K

with P tokens of prompts, B answers, and K tokens in their KV caches. :func:`fit` determines the
four coefficients from measured iterations. :class:`SimulatedEngine` uses these times, and generates
the ids of :mod:`llmserve.simulated_model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmserve.replicas import Capacity
from llmserve.simulated_model import complete_until, digest_of, generate

_EPSILON_S = 1e-9


@dataclass(frozen=True)
class EngineTimes:
    """Coefficients of the duration of an iteration, seconds."""

    step_s: float
    """Constant part."""
    prompt_token_s: float
    """Per token of a prompt."""
    request_s: float
    """Per answer."""
    kv_token_s: float
    """Per token in the KV caches of these answers."""
    max_prompt_tokens: int = 2048
    """Maximum number of tokens of prompts in an iteration."""

    def iteration_s(self, prompt_tokens: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one iteration."""
        return (
            self.step_s
            + self.prompt_token_s * prompt_tokens
            + self.request_s * requests
            + self.kv_token_s * kv_tokens
        )

    def decode_s(self, steps: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of ``iterations`` iterations without prompts, during which the caches
        grow.
        """
        grown = requests * steps * (steps - 1) / 2
        return steps * self.iteration_s(0, requests, kv_tokens) + self.kv_token_s * grown

    def steps_within(self, seconds: float, requests: int, kv_tokens: int, limit: int) -> int:
        """Return the number of iterations without prompts that end within a time.

        Args:
            seconds: the time.
            requests: number of answers, at least 1.
            kv_tokens: tokens in their caches at the beginning.
            limit: maximum number of iterations.
        """
        linear = self.iteration_s(0, requests, kv_tokens)
        square = self.kv_token_s * requests / 2
        if square > 0:
            slope = linear - square
            steps = (math.sqrt(slope * slope + 4 * square * max(0.0, seconds)) - slope) / (
                2 * square
            )
        else:
            steps = seconds / linear if linear > 0 else math.inf
        count = limit if steps >= limit else max(0, int(steps))
        while count < limit and self.decode_s(count + 1, requests, kv_tokens) <= (
            seconds + _EPSILON_S
        ):
            count += 1
        while count and self.decode_s(count, requests, kv_tokens) > seconds + _EPSILON_S:
            count -= 1
        return count

    def token_s(self, capacity: Capacity) -> float:
        """Return the seconds for each token of an answer while a replica is full."""
        return self.iteration_s(0, capacity.slots, capacity.kv_tokens)


@dataclass(frozen=True)
class IterationSample:
    """A measured iteration."""

    prompt_tokens: int
    requests: int
    kv_tokens: int
    seconds: float


def fit(samples: Sequence[IterationSample], max_prompt_tokens: int = 2048) -> EngineTimes:
    """Return the times that fit measured iterations best, by least squares of relative errors with
    no time below 0.

    Args:
        samples: at least four, of different batches.
        max_prompt_tokens: maximum number of tokens of prompts in an iteration of the engine.

    Raises:
        ValueError: there are fewer samples, or one lasts no time.
    """
    from scipy.optimize import nnls  # half a second that an engine need not wait for

    if len(samples) < 4:
        raise ValueError(f"A fit needs four iterations or more; {len(samples)} were measured.")
    seconds = np.array([sample.seconds for sample in samples])
    if not (seconds > 0).all():
        raise ValueError("An iteration that lasts 0 s or less cannot be fitted.")
    rows = np.array([[1.0, s.prompt_tokens, s.requests, s.kv_tokens] for s in samples])
    solution, _ = nnls(rows / seconds[:, None], np.ones(len(samples)))
    step_s, prompt_token_s, request_s, kv_token_s = (float(value) for value in solution)
    return EngineTimes(step_s, prompt_token_s, request_s, kv_token_s, max_prompt_tokens)


@dataclass(frozen=True)
class EngineReport:
    """What an engine has generated for an attempt since the last report."""

    attempt: int
    ids: tuple[int, ...]
    complete: int
    """Number of ``ids`` after which the text was complete the last time."""
    first_at: float
    """Time of the first of the ids."""
    last_at: float
    """Time of the last of the ids."""
    is_last: bool
    """Whether the answer ends with these ids."""


@dataclass
class _Sequence:
    attempt: int
    digest: int
    prompt_missing: int
    """Tokens of the prompt that are still to be computed."""
    remaining: int
    kv_tokens: int
    posted_at: float
    whole: bool = True
    ids: list[int] = field(default_factory=list)
    """Ids that are not reported yet."""
    first_at: float = 0.0
    last_at: float = 0.0


class SimulatedEngine:
    """One engine on a virtual clock.

    Args:
        times: of its iterations.
    """

    def __init__(self, times: EngineTimes) -> None:
        self._times = times
        self._clock = 0.0
        """The end of the last iteration."""
        self._prompts: dict[int, _Sequence] = {}
        """Attempts whose prompt is not computed yet, in order."""
        self._answers: dict[int, _Sequence] = {}
        self._ended: list[_Sequence] = []
        """Answers that are complete and not reported yet."""

    def __len__(self) -> int:
        """Number of attempts."""
        return len(self._prompts) + len(self._answers)

    def post(self, attempt: int, ids: Sequence[int], max_tokens: int, now: float) -> None:
        """Begin an attempt with the next iteration.

        Args:
            attempt: its number.
            ids: the prompt and what was generated before.
            max_tokens: ids to generate.
            now: not before the last :meth:`advance`.
        """
        if not len(self):
            self._clock = now
        self._prompts[attempt] = _Sequence(
            attempt, digest_of(ids), len(ids), max_tokens, len(ids), now
        )

    def stop(self, attempt: int) -> None:
        """Forget an attempt; no effect if it has ended."""
        self._prompts.pop(attempt, None)
        self._answers.pop(attempt, None)

    def next_event(self) -> float | None:
        """Return when the next answer begins or ends, or an iteration with prompts ends; None if
        there is nothing to do.
        """
        if self._waiting_prompts():
            _, seconds = self._prompt_iteration()
            return self._clock + seconds
        if not self._answers:
            return None
        steps = 1 if self._prompts else min(s.remaining for s in self._answers.values())
        return self._clock + self._times.decode_s(steps, len(self._answers), self._kv_tokens())

    def next_iteration(self) -> float | None:
        """Return when the next iteration ends; None if there is nothing to do."""
        if self._waiting_prompts():
            return self.next_event()
        if not self._answers:
            return None
        return self._clock + self._times.decode_s(1, len(self._answers), self._kv_tokens())

    def advance(self, now: float) -> list[EngineReport]:
        """Compute all iterations that end until ``now``; return what they generated."""
        while True:
            if self._waiting_prompts():
                chunks, seconds = self._prompt_iteration()
                if self._clock + seconds > now + _EPSILON_S:
                    break
                self._clock += seconds
                self._compute_prompts(chunks)
            elif self._answers:
                limit = 1 if self._prompts else min(s.remaining for s in self._answers.values())
                count, kv_tokens = len(self._answers), self._kv_tokens()
                steps = self._times.steps_within(now - self._clock, count, kv_tokens, limit)
                if not steps:
                    break
                first_at = self._clock + self._times.decode_s(1, count, kv_tokens)
                self._clock += self._times.decode_s(steps, count, kv_tokens)
                for sequence in list(self._answers.values()):
                    self._generate(sequence, steps, first_at)
            else:
                break
        return self._report()

    def _waiting_prompts(self) -> list[_Sequence]:
        """Return the prompts of which the next iteration computes tokens: those posted before it
        begins.
        """
        return [
            s
            for s in self._prompts.values()
            if s.posted_at <= self._clock + _EPSILON_S or not self._answers
        ]

    def _kv_tokens(self) -> int:
        return sum(s.kv_tokens for s in self._answers.values())

    def _prompt_iteration(self) -> tuple[list[tuple[_Sequence, int]], float]:
        """Return the tokens of each prompt that the next iteration computes, and its seconds."""
        budget, chunks = self._times.max_prompt_tokens, []
        for sequence in self._waiting_prompts():
            count = min(budget, sequence.prompt_missing)
            if count:
                chunks.append((sequence, count))
                budget -= count
        tokens = self._times.max_prompt_tokens - budget
        seconds = self._times.iteration_s(tokens, len(self._answers), self._kv_tokens())
        return chunks, seconds

    def _compute_prompts(self, chunks: list[tuple[_Sequence, int]]) -> None:
        for sequence in list(self._answers.values()):
            self._generate(sequence, 1, self._clock)
        for sequence, count in chunks:
            sequence.prompt_missing -= count
            if not sequence.prompt_missing:
                del self._prompts[sequence.attempt]
                self._answers[sequence.attempt] = sequence
                self._generate(sequence, 1, self._clock)

    def _generate(self, sequence: _Sequence, steps: int, first_at: float) -> None:
        """Add ids to an answer, the first one at a given time and the last one now."""
        ids, sequence.digest = generate(sequence.digest, steps)
        if not sequence.ids:
            sequence.first_at = first_at
        sequence.ids.extend(ids)
        sequence.last_at = self._clock
        sequence.remaining -= steps
        sequence.kv_tokens += steps
        if not sequence.remaining:
            del self._answers[sequence.attempt]
            self._ended.append(sequence)

    def _report(self) -> list[EngineReport]:
        """Return what was generated since the last report, beginning with answers that have
        ended.
        """
        reports = []
        for sequence in (*self._ended, *self._answers.values()):
            if sequence.ids:
                ids, sequence.ids = tuple(sequence.ids), []
                complete = complete_until(ids, whole=sequence.whole)
                sequence.whole = complete == len(ids)
                reports.append(
                    EngineReport(
                        sequence.attempt,
                        ids,
                        complete,
                        sequence.first_at,
                        sequence.last_at,
                        not sequence.remaining,
                    )
                )
        self._ended.clear()
        return reports
