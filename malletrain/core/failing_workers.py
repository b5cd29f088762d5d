"""Decides which workers of one farm get no more of its tasks because the tasks fail there. Pure.

Most failures are the task's own. A worker is suspected if several tasks in a row fail on it, and
another worker could run them. The failures on it do not count: the tasks run again on other
workers, and what they do there decides who is to blame.

    trusted ──tasks in a row fail──▶ suspected ──one succeeds elsewhere──▶ rejected
       ▲  ▲                            │  │                                   │
       │  └──one fails elsewhere, too──┘  │                                   │
       └──────────────────────────────────┴────────a task succeeds on it──────┘

A failure elsewhere counts only once a task has succeeded there after it: workers that lose a file
system together fail the same tasks, and none of them says anything about the tasks.

A farm that would end as failed is reviewed first (:meth:`FailingWorkers.review`): fewer tasks than
make a row may have been left for a worker on which nothing works. Such a worker is suspected too,
once.

A worker that is not trusted gets one task from time to time, so that one that has been repaired is
used again. A suspected worker that is left alone gets all tasks, and its failures count. Each time
a suspicion was wrong, the next one needs twice as many failures. A failure of one task is excused
at most :data:`MAX_EXCUSED` times, so that each task comes to an end.

:mod:`malletrain.core.task_queue` keeps the tasks. :mod:`malletrain.core.unleased_nodes` decides
which nodes are not leased because whole jobs fail on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

MIN_FAILED_TASKS = 5
"""Number of different tasks in a row that fail on a worker before it is suspected, at first."""
MIN_LAST_FAILED = 2
"""Minimum number of different tasks that have failed on a worker, without any success, for a
suspicion at the end of a farm. One failed task says nothing about its worker.
"""
MAX_FAILED_TASKS = 320
"""Upper limit of the number of failed tasks for a suspicion: it starts at :data:`MIN_FAILED_TASKS`
and doubles with each wrong suspicion. Also the maximum number of failures that are remembered of a
worker.
"""
MAX_EXCUSED = 3
"""Maximum number of workers on which the failure of one task does not count."""
FIRST_TRIAL_S = 60.0
"""Time until a worker that is not trusted gets a task, seconds. It doubles with each that fails."""
MAX_TRIAL_S = 1800.0
"""Upper limit of that time, seconds."""


class Trust(str, Enum):
    """Whether a worker gets tasks."""

    TRUSTED = "trusted"
    SUSPECTED = "suspected"
    """Its failed tasks run on other workers."""
    REJECTED = "rejected"
    """A task that failed on it has succeeded on another one."""

    __str__ = str.__str__


class TrustEvent(Enum):
    """What changes the trust in a worker."""

    FAIL_IN_A_ROW = "several tasks in a row fail on it"
    FAIL_ALL = "all its tasks have failed, fewer than make a row, when the farm would end"
    SUCCEED = "a task succeeds on it"
    FAIL_ELSEWHERE = "one of its failed tasks fails on another worker, on which then one succeeds"
    SUCCEED_ELSEWHERE = "one of its failed tasks succeeds on another worker"


T, E = Trust, TrustEvent
TRANSITIONS: dict[tuple[Trust, TrustEvent], Trust] = {
    (T.TRUSTED, E.FAIL_IN_A_ROW): T.SUSPECTED,
    (T.TRUSTED, E.FAIL_ALL): T.SUSPECTED,
    (T.SUSPECTED, E.SUCCEED): T.TRUSTED,
    (T.SUSPECTED, E.FAIL_ELSEWHERE): T.TRUSTED,
    (T.SUSPECTED, E.SUCCEED_ELSEWHERE): T.REJECTED,
    (T.REJECTED, E.SUCCEED): T.TRUSTED,
}
"""(trust, event) → next trust. Other events have no effect."""


@dataclass
class _Worker:
    trust: Trust = Trust.TRUSTED
    has_succeeded: bool = False
    """Whether a task has succeeded on it."""
    reviewed: bool = False
    """Whether it was suspected at the end of the farm."""
    failures: dict[int, int] = field(default_factory=dict)
    """Task → number of its failures here since the last success, the oldest first."""
    in_a_row: int = 0
    """Number of tasks in a row that had failed when it was suspected."""
    trial_at: float = 0.0
    """Time from which it gets a task although it is not trusted, seconds."""
    trial_s: float = FIRST_TRIAL_S


class FailingWorkers:
    """The trust in the workers of one farm, since the daemon's start.

    Args:
        needed: number of tasks in a row that fail on a worker before it is suspected.
    """

    def __init__(self, needed: int = MIN_FAILED_TASKS) -> None:
        self._workers: dict[str, _Worker] = {}
        self._excused: dict[int, list[str]] = {}
        """Task → workers on which its failures did not count."""
        self._needed = needed

    @property
    def has_excused(self) -> bool:
        """Whether failures of any unfinished task did not count."""
        return bool(self._excused)

    def trust(self, worker: str) -> Trust:
        """Return the trust in a worker."""
        entry = self._workers.get(worker)
        return Trust.TRUSTED if entry is None else entry.trust

    def untrusted(self) -> dict[str, tuple[Trust, int]]:
        """Return worker → its trust, and the number of tasks in a row that failed on it, for those
        that are not trusted.
        """
        return {
            name: (worker.trust, worker.in_a_row)
            for name, worker in self._workers.items()
            if worker.trust is not Trust.TRUSTED
        }

    # --- hand-out ---

    def allowed(
        self, worker: str, count: int, has_tasks: bool, now: float, alone: bool = False
    ) -> int:
        """Return how many tasks a worker may get.

        Args:
            worker: the worker.
            count: number of tasks that it wants.
            has_tasks: whether it has any.
            now: time, seconds.
            alone: whether no other trusted worker is there. Then no other can clear a suspicion.
        """
        entry = self._workers.get(worker)
        if entry is None or not self._on_trial(entry, alone):
            return count
        return min(count, 0 if has_tasks or now < entry.trial_at else 1)

    def note_hand_out(self, worker: str, now: float, alone: bool = False) -> None:
        """Note that a worker got tasks. If that was a trial, the next one is later. Arguments as
        for :meth:`allowed`.
        """
        entry = self._workers.get(worker)
        if entry is not None and self._on_trial(entry, alone):
            entry.trial_s = min(MAX_TRIAL_S, 2 * entry.trial_s)
            entry.trial_at = now + entry.trial_s

    @staticmethod
    def _on_trial(entry: _Worker, alone: bool) -> bool:
        """Return whether a worker gets one task at a time."""
        return entry.trust is Trust.REJECTED or (entry.trust is Trust.SUSPECTED and not alone)

    def failed_on(self, worker: str, number: int) -> bool:
        """Return whether a failure of the task on this worker did not count."""
        return worker in self._excused.get(number, ())

    # --- results ---

    def succeeded(self, worker: str, number: int) -> list[str]:
        """Note a success. Return the workers that are rejected for it."""
        entry = self._workers.setdefault(worker, _Worker())
        entry.has_succeeded = True
        self._acquit(worker, entry.failures)
        entry.failures.clear()
        self._apply(worker, TrustEvent.SUCCEED)
        others = [each for each in self._excused.pop(number, ()) if each != worker]
        return [each for each in others if self._apply(each, TrustEvent.SUCCEED_ELSEWHERE)]

    def failed(
        self, worker: str, number: int, others: Callable[[], bool], now: float
    ) -> dict[int, int]:
        """Note a failure.

        Args:
            worker: the worker.
            number: the task.
            others: returns whether another trusted worker is there.
            now: time, seconds.

        Returns:
            Task → number of its failures that do not count.
        """
        entry = self._workers.setdefault(worker, _Worker())
        if entry.trust is not Trust.TRUSTED:
            counts = entry.trust is Trust.SUSPECTED and not others()
            return {} if counts else self._excuse(worker, {number: 1})
        entry.failures[number] = entry.failures.pop(number, 0) + 1
        if len(entry.failures) > MAX_FAILED_TASKS:
            del entry.failures[next(iter(entry.failures))]
        if len(entry.failures) < self._needed or not others():
            return {}
        return self._suspect(worker, TrustEvent.FAIL_IN_A_ROW, now)

    def review(self, present: Callable[[str], bool], now: float) -> dict[str, dict[int, int]]:
        """Suspect workers before a farm ends as failed: those on which several tasks have failed
        and none has ever succeeded, if a trusted worker on which one has succeeded is there.

        Args:
            present: returns whether a worker is there.
            now: time, seconds.

        Returns:
            Worker that is suspected from now on → task → number of its failures that do not count.
        """
        proven = (name for name, entry in self._workers.items() if self._is_proven(entry))
        if not any(map(present, proven)):
            return {}
        due = [
            name
            for name, entry in self._workers.items()
            if entry.trust is Trust.TRUSTED
            and not (entry.has_succeeded or entry.reviewed)
            and len(entry.failures) >= MIN_LAST_FAILED
        ]
        for name in due:
            self._workers[name].reviewed = True
        return {name: self._suspect(name, TrustEvent.FAIL_ALL, now) for name in due}

    @staticmethod
    def _is_proven(entry: _Worker) -> bool:
        return entry.trust is Trust.TRUSTED and entry.has_succeeded

    def _suspect(self, worker: str, event: TrustEvent, now: float) -> dict[int, int]:
        """Suspect a worker. Return task → number of its failures that do not count."""
        entry = self._workers[worker]
        entry.in_a_row, entry.trial_s = len(entry.failures), FIRST_TRIAL_S
        entry.trial_at = now + entry.trial_s
        failures, entry.failures = entry.failures, {}
        self._apply(worker, event)
        return self._excuse(worker, failures)

    def _acquit(self, worker: str, failed: Iterable[int]) -> None:
        """Trust other workers again that failed the same tasks as this one. Call it when a task
        succeeds on this worker: before that, it may be unable to run any.
        """
        for number in failed:
            for other in self._excused.get(number, ()):
                if other != worker and self._apply(other, TrustEvent.FAIL_ELSEWHERE):
                    self._needed = min(MAX_FAILED_TASKS, 2 * self._needed)

    def _excuse(self, worker: str, failures: dict[int, int]) -> dict[int, int]:
        excused = {}
        for number, count in failures.items():
            workers = self._excused.setdefault(number, [])
            if worker not in workers and len(workers) < MAX_EXCUSED:
                workers.append(worker)
                excused[number] = count
        return excused

    def _apply(self, worker: str, event: TrustEvent) -> bool:
        """Apply an event. Return whether it changed the trust."""
        entry = self._workers[worker]
        after = TRANSITIONS.get((entry.trust, event))
        if after is None:
            return False
        entry.trust = after
        return True
