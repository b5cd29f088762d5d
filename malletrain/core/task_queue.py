"""The queue of a job's tasks: which worker gets which task, and when a task is done. Pure.

    waiting ──handed out──▶ running ──succeeded──▶ done
       ▲                      │ failed for good ──▶ failed
       └── lost, failed ──────┘

:data:`TRANSITIONS` is the state machine. Rules:

* A task is done once: the first success counts, even of an attempt that is not current any more
  (its worker was declared lost too early), because the work is done. A failure counts only if its
  attempt is current.
* A loss of a worker uses up no try; a failure does.
* The lowest waiting number is handed out first. A task that was cut off after some time goes to a
  worker that is expected to last longer than that, if there is one.
* With ``duplicate_stragglers`` a worker without waiting tasks gets a copy of a task that runs much
  longer than most have.

The queue holds a few bytes for each task, so that a million fit into a daemon's memory. The values
of tasks, and the history of their attempts, are in the store.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heappop, heappush
from typing import NamedTuple

from malletrain.core.failing_workers import FailingWorkers


class TaskState(str, Enum):
    """State of a task."""

    WAITING = "waiting"
    RUNNING = "running"
    """On a worker, which may not have started it yet."""
    DONE = "done"
    FAILED = "failed"

    __str__ = str.__str__


class TaskEvent(Enum):
    """Event of a task."""

    HAND_OUT = "handed out"
    ADOPT = "a worker that was lost, or a daemon that restarted, reports the current attempt"
    LOSE = "its last worker is lost, or gives it back"
    SUCCEED = "succeeded"
    FAIL = "failed, and is tried again"
    FAIL_FOR_GOOD = "failed, and no try is left"
    RETRY = "its owner wants it to be tried again"
    EXCUSE = "its failures do not count, because many tasks failed on their workers"


S, E = TaskState, TaskEvent
TRANSITIONS: dict[tuple[TaskState, TaskEvent], TaskState] = {
    (S.WAITING, E.HAND_OUT): S.RUNNING,
    (S.WAITING, E.ADOPT): S.RUNNING,
    (S.WAITING, E.SUCCEED): S.DONE,
    (S.RUNNING, E.HAND_OUT): S.RUNNING,
    (S.RUNNING, E.LOSE): S.WAITING,
    (S.RUNNING, E.SUCCEED): S.DONE,
    (S.RUNNING, E.FAIL): S.WAITING,
    (S.RUNNING, E.FAIL_FOR_GOOD): S.FAILED,
    (S.FAILED, E.SUCCEED): S.DONE,
    (S.FAILED, E.RETRY): S.WAITING,
    (S.FAILED, E.EXCUSE): S.WAITING,
}
"""(state, event) → next state. Other events have no effect."""

MIN_DURATIONS = 5
"""Number of successes before a task can be called late."""
LATE_FACTOR = 2.0
"""A task is late if it runs this many times as long as nine of ten others."""
MAX_PASSED_OVER = 1000
"""Maximum number of tasks that are passed over for a worker that does not last long enough."""
_RECENT = 500
"""Number of durations by which lateness is judged."""
_CODES = {state: code for code, state in enumerate(TaskState)}
_STATES = tuple(TaskState)
_WAITING = _CODES[TaskState.WAITING]


class TaskAttempt(NamedTuple):
    """One attempt of a task."""

    number: int
    attempt: int


class StoredTask(NamedTuple):
    """The stored record of a task."""

    number: int
    state: TaskState
    tries: int
    attempt: int
    worker: str
    """Its newest worker; valid only while the task runs."""
    begun: float | None
    """Time at which its process started, seconds since the epoch; None if it is not known."""


class ExcusedTask(NamedTuple):
    """A task with failures that do not count."""

    number: int
    state: TaskState
    """Its state now."""
    tries: int
    """Number of failures that count."""
    had_failed: bool
    """Whether it had failed for good."""


@dataclass(frozen=True)
class Outcome:
    """The consequences of a result."""

    state: TaskState | None
    """The task's new state; None if the result changes nothing."""
    tries: int = 0
    """Number of failures of the task so far."""
    obsolete: tuple[tuple[str, TaskAttempt], ...] = ()
    """(worker, attempt) of superfluous attempts: further ones of the task, and those that are taken
    back from a suspected worker.
    """
    excused: tuple[ExcusedTask, ...] = ()
    """Tasks with failures that do not count."""
    back: tuple[int, ...] = ()
    """Tasks that wait again because they are taken back from a suspected worker."""
    suspected: bool = False
    """Whether the worker is suspected from now on."""
    rejected: tuple[str, ...] = ()
    """Workers that are rejected from now on."""


def hand_out_limit(
    capacity: int, slots: int, present: int, present_in_all: int, max_running: int
) -> int:
    """Return the maximum number of tasks to hand out to a worker now.

    Args:
        capacity: number of tasks that it wants to have.
        slots: number of tasks that it runs at a time.
        present: number of tasks that it has.
        present_in_all: number of tasks that all workers have.
        max_running: maximum number of tasks that run at a time; 0 for no limit. With a limit a
            worker has no tasks that wait there, because they would count for it.
    """
    if not max_running:
        return max(0, capacity - present)
    return max(0, min(min(capacity, max(1, slots)) - present, max_running - present_in_all))


class TaskQueue:
    """The tasks of one job. A worker is a name, such as that of a node.

    Args:
        total: number of tasks.
        retries: number of failures after which a task is tried again.
        duplicate_stragglers: whether late tasks are run twice.
    """

    def __init__(self, total: int, retries: int = 0, duplicate_stragglers: bool = False) -> None:
        self.total, self.retries = total, retries
        self._duplicate = duplicate_stragglers
        self._states = bytearray(total)
        self._attempts = array("I", bytes(4 * total))
        self._tries = array("H", bytes(2 * total))
        self._counts = dict.fromkeys(TaskState, 0)
        self._counts[TaskState.WAITING] = total
        self._cursor = 0
        """All waiting tasks with lower numbers are in ``_returned``."""
        self._returned: list[int] = []
        """Heap of tasks that wait again. It may contain tasks that do not wait."""
        self._holders: dict[int, dict[str, int]] = {}
        """Running task → worker → attempt, in the order of hand-out."""
        self._of_worker: dict[str, dict[int, float | None]] = {}
        """Worker → its tasks → time at which it started each, seconds; None: not started."""
        self.failing = FailingWorkers()
        self._cut_off_s: dict[int, float] = {}
        """Task → longest time after which it was cut off by a loss, seconds."""
        self._durations: deque[float] = deque(maxlen=_RECENT)

    @classmethod
    def restored(
        cls,
        total: int,
        rows: Iterable[StoredTask],
        retries: int = 0,
        duplicate_stragglers: bool = False,
    ) -> TaskQueue:
        """Return the queue as it was stored. Arguments as for the class; tasks without a row
        wait.
        """
        queue = cls(total, retries, duplicate_stragglers)
        for row in rows:
            queue._set_state(row.number, row.state)
            queue._attempts[row.number] = row.attempt
            queue._tries[row.number] = row.tries
            if row.state is TaskState.RUNNING:
                queue._hold(row.worker, TaskAttempt(row.number, row.attempt), row.begun)
        return queue

    # --- queries ---

    def counts(self) -> dict[TaskState, int]:
        """Return the number of tasks in each state."""
        return dict(self._counts)

    def state(self, number: int) -> TaskState:
        """Return the state of a task."""
        return _STATES[self._states[number]]

    def tries(self, number: int) -> int:
        """Return the number of failures of a task."""
        return self._tries[number]

    @property
    def unfinished(self) -> int:
        """Number of tasks that wait or run."""
        return self._counts[TaskState.WAITING] + self._counts[TaskState.RUNNING]

    def numbers(self, state: TaskState, after: int = -1, limit: int = 1000) -> list[int]:
        """Return the first ``limit`` tasks in a state with numbers above ``after``."""
        numbers: list[int] = []
        code, number = _CODES[state], after
        while len(numbers) < limit:
            number = self._states.find(code, number + 1)
            if number < 0:
                break
            numbers.append(number)
        return numbers

    def attempts_of(self, worker: str) -> list[TaskAttempt]:
        """Return the attempts that a worker has."""
        return [
            TaskAttempt(number, self._holders[number][worker])
            for number in self._of_worker.get(worker, ())
        ]

    def count_of(self, worker: str) -> int:
        """Return the number of tasks that a worker has."""
        return len(self._of_worker.get(worker, ()))

    def workers(self) -> list[str]:
        """Return the workers that have tasks."""
        return list(self._of_worker)

    def begun(self) -> dict[int, float]:
        """Return number → time, seconds, of the tasks that a worker has begun."""
        begun: dict[int, float] = {}
        for tasks in self._of_worker.values():
            for number, at in tasks.items():
                if at is not None:
                    begun[number] = min(at, begun.get(number, at))
        return begun

    # --- hand-out ---

    def hand_out(
        self,
        worker: str,
        count: int,
        now: float,
        lasts_s: float | None = None,
        longest_s: float | None = None,
        alone: bool = False,
    ) -> list[TaskAttempt]:
        """Hand out tasks to a worker.

        Args:
            worker: the worker.
            count: maximum number of tasks.
            now: time, seconds.
            lasts_s: expected remaining time of the worker, seconds; None if unknown.
            longest_s: the longest such time of all workers; None if unknown.
            alone: whether no other trusted worker is there. Then it also gets tasks whose failure
                on it did not count, and as many as it wants if it is suspected.
        """
        count = self.failing.allowed(worker, count, worker in self._of_worker, now, alone)
        attempts: list[TaskAttempt] = []
        passed_over: list[int] = []
        while len(attempts) < count and len(passed_over) < MAX_PASSED_OVER:
            number = self._next_waiting()
            if number is None:
                break
            needs_s = self._cut_off_s.get(number, 0.0)
            if lasts_s is not None and longest_s is not None and lasts_s < needs_s <= longest_s:
                passed_over.append(number)
                continue
            if not alone and self.failing.failed_on(worker, number):
                passed_over.append(number)
                continue
            attempts.append(self._start(worker, number))
        for number in passed_over:
            heappush(self._returned, number)
        if self._duplicate and not self._counts[TaskState.WAITING]:
            attempts += self._copies(worker, count - len(attempts), now)
        if attempts:
            self.failing.note_hand_out(worker, now, alone)
        return attempts

    def begin(self, worker: str, attempt: TaskAttempt, at: float) -> bool:
        """Note that a worker has begun an attempt. Return whether that was not known.

        Args:
            worker: the worker.
            attempt: the attempt.
            at: time, seconds.
        """
        if self._holders.get(attempt.number, {}).get(worker) != attempt.attempt:
            return False
        before = self._of_worker[worker][attempt.number]
        self._of_worker[worker][attempt.number] = at
        return before is None

    def adopt(self, worker: str, attempts: Iterable[TaskAttempt]) -> list[TaskAttempt]:
        """Take over attempts that a worker reports to have, if they are current.

        Returns:
            Those that are not: the worker is to stop them.
        """
        obsolete = []
        for each in attempts:
            if not 0 <= each.number < self.total:
                continue
            if self._holders.get(each.number, {}).get(worker) == each.attempt:
                continue
            waits = self._states[each.number] == _WAITING
            if waits and 0 < each.attempt == self._attempts[each.number]:
                self._apply(each.number, TaskEvent.ADOPT)
                self._hold(worker, each, None)
            else:
                obsolete.append(each)
        return obsolete

    # --- results ---

    def finish(
        self,
        worker: str,
        attempt: TaskAttempt,
        success: bool,
        seconds: float,
        now: float,
        others: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Handle the end of an attempt.

        Args:
            worker: the worker that reports it.
            attempt: the attempt.
            success: whether it succeeded.
            seconds: how long it ran.
            now: time, seconds.
            others: returns whether another trusted worker is there.
        """
        number = attempt.number
        if not 0 <= number < self.total or not 0 < attempt.attempt <= self._attempts[number]:
            return Outcome(None)
        current = self._holders.get(number, {}).get(worker) == attempt.attempt
        if current:
            self._let_go(worker, number)
        if success:
            before = self.state(number)
            if (before, TaskEvent.SUCCEED) not in TRANSITIONS:
                return Outcome(None)
            self._durations.append(max(0.0, seconds))
            obsolete = self._drop_holders(number)
            self._cut_off_s.pop(number, None)
            rejected = self.failing.succeeded(worker, number)
            return Outcome(
                self._apply(number, TaskEvent.SUCCEED),
                self._tries[number],
                tuple(obsolete),
                rejected=tuple(rejected),
            )
        if not current:
            return Outcome(None)
        outcome = self._fail(number)
        before_trust = self.failing.trust(worker)
        excused = self.failing.failed(worker, number, others, now)
        outcome = replace(outcome, excused=tuple(self._excuse(excused)))
        if before_trust is self.failing.trust(worker):
            return outcome
        fetched = [a for a in self.attempts_of(worker) if self._of_worker[worker][a.number] is None]
        remaining = set(self.attempts_of(worker)) - set(fetched)
        return replace(
            outcome,
            obsolete=(*outcome.obsolete, *((worker, each) for each in fetched)),
            back=tuple(self.lose(worker, now, remaining)),
            suspected=True,
        )

    def review(
        self, present: Callable[[str], bool], now: float
    ) -> tuple[list[ExcusedTask], list[str]]:
        """Review the failures of a farm without unfinished tasks, if some have failed.

        Args:
            present: returns whether a worker is there.
            now: time, seconds.

        Returns:
            The tasks with failures that do not count, and the workers that are suspected for it.
        """
        excused: list[ExcusedTask] = []
        suspected = self.failing.review(present, now)
        for failures in suspected.values():
            excused += self._excuse(failures)
        return excused, list(suspected)

    def _fail(self, number: int) -> Outcome:
        """Count a failure of a task that its worker has ended."""
        self._tries[number] = min(self._tries[number] + 1, 65535)
        if self._tries[number] > self.retries:
            obsolete = self._drop_holders(number)
            state = self._apply(number, TaskEvent.FAIL_FOR_GOOD)
            return Outcome(state, self._tries[number], tuple(obsolete))
        if number in self._holders:  # a copy of the task still runs
            return Outcome(TaskState.RUNNING, self._tries[number])
        return Outcome(self._apply(number, TaskEvent.FAIL), self._tries[number])

    def _excuse(self, failures: dict[int, int]) -> list[ExcusedTask]:
        """Discount failures: task → number of failures that do not count."""
        excused = []
        for number, count in failures.items():
            before = self.state(number)
            if before is TaskState.DONE:
                continue
            self._tries[number] = max(0, self._tries[number] - count)
            if before is TaskState.FAILED:
                self._apply(number, TaskEvent.EXCUSE)
            after, tries = self.state(number), self._tries[number]
            excused.append(ExcusedTask(number, after, tries, before is TaskState.FAILED))
        return excused

    def lose(self, worker: str, now: float, present: Collection[TaskAttempt] = ()) -> list[int]:
        """Take tasks back from a worker that is lost or reports that it does not have them.

        Args:
            worker: the worker.
            now: time, seconds.
            present: the attempts that it still has.

        Returns:
            The tasks that wait again.
        """
        back = []
        for attempt in self.attempts_of(worker):
            if attempt in present:
                continue
            number = attempt.number
            begun = self._of_worker[worker][number]
            self._let_go(worker, number)
            if number not in self._holders:
                self._apply(number, TaskEvent.LOSE)
                if begun is not None:
                    self._cut_off_s[number] = max(now - begun, self._cut_off_s.get(number, 0.0))
                back.append(number)
        return back

    # --- the owner ---

    def retry(self, numbers: Iterable[int]) -> list[int]:
        """Put failed tasks back, with all their tries. Return those that wait again."""
        back = []
        for number in numbers:
            if 0 <= number < self.total and self.state(number) is TaskState.FAILED:
                self._tries[number] = 0
                self._apply(number, TaskEvent.RETRY)
                back.append(number)
        return back

    # --- inside ---

    def _next_waiting(self) -> int | None:
        while self._returned:
            number = heappop(self._returned)
            if self._states[number] == _WAITING:
                return number
        number = self._states.find(_WAITING, self._cursor)
        if number < 0:
            self._cursor = self.total
            return None
        self._cursor = number + 1
        return number

    def _start(self, worker: str, number: int) -> TaskAttempt:
        self._attempts[number] += 1
        self._apply(number, TaskEvent.HAND_OUT)
        attempt = TaskAttempt(number, self._attempts[number])
        self._hold(worker, attempt, None)
        return attempt

    def _copies(self, worker: str, count: int, now: float) -> list[TaskAttempt]:
        if count <= 0 or len(self._durations) < MIN_DURATIONS:
            return []
        durations = sorted(self._durations)
        limit_s = LATE_FACTOR * durations[int(0.9 * (len(durations) - 1))]
        late = []
        for number, holders in self._holders.items():
            [begun, *more] = (self._of_worker[holder][number] for holder in holders)
            late_already = begun is not None and now - begun > limit_s
            if late_already and not more and worker not in holders:
                late.append(number)
                if len(late) == count:
                    break
        return [self._start(worker, number) for number in late]

    def _apply(self, number: int, event: TaskEvent) -> TaskState:
        before = self.state(number)
        after = TRANSITIONS[before, event]
        self._set_state(number, after)
        if after is TaskState.WAITING and number < self._cursor:
            heappush(self._returned, number)
        return after

    def _set_state(self, number: int, state: TaskState) -> None:
        self._counts[self.state(number)] -= 1
        self._counts[state] += 1
        self._states[number] = _CODES[state]

    def _hold(self, worker: str, attempt: TaskAttempt, begun: float | None) -> None:
        self._holders.setdefault(attempt.number, {})[worker] = attempt.attempt
        self._of_worker.setdefault(worker, {})[attempt.number] = begun

    def _let_go(self, worker: str, number: int) -> None:
        del self._holders[number][worker]
        if not self._holders[number]:
            del self._holders[number]
        del self._of_worker[worker][number]
        if not self._of_worker[worker]:
            del self._of_worker[worker]

    def _drop_holders(self, number: int) -> list[tuple[str, TaskAttempt]]:
        holders = [
            (worker, TaskAttempt(number, attempt))
            for worker, attempt in self._holders.get(number, {}).items()
        ]
        for worker, _ in holders:
            self._let_go(worker, number)
        return holders
