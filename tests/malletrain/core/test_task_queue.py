"""The queue of tasks: its table, known orders, and a random search in which each task is done
exactly once.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from malletrain.core.failing_workers import FailingWorkers
from malletrain.core.task_queue import (
    TRANSITIONS,
    StoredTask,
    TaskAttempt,
    TaskEvent,
    TaskQueue,
    TaskState,
    hand_out_limit,
)

WAITING, RUNNING, DONE, FAILED = (
    TaskState.WAITING,
    TaskState.RUNNING,
    TaskState.DONE,
    TaskState.FAILED,
)


@pytest.mark.parametrize(
    ("capacity", "slots", "present", "present_in_all", "max_running", "count"),
    [
        (8, 4, 0, 50, 0, 8),  # no limit: tasks wait on the node
        (8, 4, 6, 50, 0, 2),
        (8, 4, 9, 50, 0, 0),
        (8, 4, 0, 0, 10, 4),  # none waits there
        (8, 4, 0, 8, 10, 2),
        (8, 4, 3, 3, 10, 1),
        (2, 4, 0, 0, 10, 2),  # it wants no more
        (8, 0, 0, 0, 10, 1),  # not known how many it runs
        (8, 4, 0, 12, 10, 0),
    ],
)
def test_how_many_a_worker_gets(capacity, slots, present, present_in_all, max_running, count):
    assert hand_out_limit(capacity, slots, present, present_in_all, max_running) == count


def test_no_event_leaves_done():
    states = {state for state, _ in TRANSITIONS}
    assert states == {WAITING, RUNNING, FAILED}
    assert {event for _, event in TRANSITIONS} == set(TaskEvent)


def test_lowest_numbers_are_handed_out_first():
    queue = TaskQueue(6)
    assert queue.hand_out("a", 2, 0.0) == [(0, 1), (1, 1)]
    assert queue.hand_out("b", 2, 0.0) == [(2, 1), (3, 1)]
    assert queue.lose("a", 5.0) == [0, 1]
    assert queue.hand_out("b", 3, 6.0) == [(0, 2), (1, 2), (4, 1)]


def test_a_success_is_counted_once():
    queue = TaskQueue(1)
    [attempt] = queue.hand_out("a", 1, 0.0)
    assert queue.finish("a", attempt, True, 1.0, 1.0).state is DONE
    assert queue.finish("a", attempt, True, 1.0, 1.0).state is None
    assert queue.counts()[DONE] == 1


def test_failures_use_up_tries_and_losses_do_not():
    queue = TaskQueue(1, retries=1)
    for _ in range(5):
        queue.hand_out("a", 1, 0.0)
        queue.lose("a", 1.0)
    [first] = queue.hand_out("a", 1, 0.0)
    assert queue.finish("a", first, False, 1.0, 1.0).state is WAITING
    [second] = queue.hand_out("a", 1, 0.0)
    outcome = queue.finish("a", second, False, 1.0, 1.0)
    assert (outcome.state, outcome.tries) == (FAILED, 2)
    assert queue.unfinished == 0
    assert queue.retry([0, 7]) == [0]
    assert queue.hand_out("a", 1, 0.0) == [(0, 8)]


def test_a_late_failure_changes_nothing():
    queue = TaskQueue(1)
    [old] = queue.hand_out("a", 1, 0.0)
    queue.lose("a", 1.0)
    [new] = queue.hand_out("b", 1, 1.0)
    assert queue.finish("a", old, False, 1.0, 2.0).state is None
    assert queue.attempts_of("b") == [new]


def test_a_late_success_counts_and_stops_the_newer_attempt():
    queue = TaskQueue(1)
    [old] = queue.hand_out("a", 1, 0.0)
    queue.lose("a", 1.0)
    [new] = queue.hand_out("b", 1, 1.0)
    outcome = queue.finish("a", old, True, 1.0, 2.0)
    assert outcome.state is DONE
    assert outcome.obsolete == (("b", new),)
    assert queue.finish("b", new, True, 1.0, 3.0).state is None


def test_a_result_that_was_never_handed_out_changes_nothing():
    queue = TaskQueue(2)
    queue.hand_out("a", 1, 0.0)
    for attempt in (
        TaskAttempt(0, 0),
        TaskAttempt(0, 2),
        TaskAttempt(1, 1),
        TaskAttempt(1, 0),
        TaskAttempt(9, 1),
    ):
        assert queue.finish("a", attempt, True, 1.0, 1.0).state is None
    assert queue.counts()[DONE] == 0


def test_another_worker_cannot_fail_a_task():
    queue = TaskQueue(1)
    [attempt] = queue.hand_out("a", 1, 0.0)
    assert queue.finish("b", attempt, False, 1.0, 1.0).state is None
    assert queue.attempts_of("a") == [attempt]


def test_a_worker_that_was_lost_too_early_is_adopted():
    queue = TaskQueue(2)
    first, second = queue.hand_out("a", 2, 0.0)
    queue.lose("a", 1.0)
    [again] = queue.hand_out("b", 1, 2.0)
    assert again == (0, 2)
    assert queue.adopt("a", [first, second]) == [first]
    assert queue.attempts_of("a") == [second]
    assert queue.hand_out("b", 1, 3.0) == []


def lose_after_ten_minutes(queue: TaskQueue) -> None:
    [attempt] = queue.hand_out("a", 1, 0.0)
    assert queue.begin("a", attempt, 0.0)
    assert queue.lose("a", 600.0) == [attempt.number]


def test_a_task_that_was_not_begun_is_not_long():
    queue = TaskQueue(1)
    queue.hand_out("a", 1, 0.0)
    queue.lose("a", 600.0)
    assert queue.hand_out("short", 1, 600.0, lasts_s=300.0, longest_s=3600.0) == [(0, 2)]


def test_tasks_are_begun_once_and_by_their_worker():
    queue = TaskQueue(3)
    first, second = queue.hand_out("a", 2, 0.0)
    assert queue.begun() == {}
    assert queue.begin("a", first, 5.0)
    assert not queue.begin("a", first, 5.0)
    assert not queue.begin("b", second, 5.0)
    assert not queue.begin("a", TaskAttempt(2, 1), 5.0)
    assert queue.begun() == {0: 5.0}
    queue.finish("a", first, True, 1.0, 6.0)
    assert queue.begun() == {}


def test_a_long_task_waits_for_a_worker_that_lasts():
    queue = TaskQueue(2)
    lose_after_ten_minutes(queue)
    assert queue.hand_out("short", 1, 600.0, lasts_s=300.0, longest_s=3600.0) == [(1, 1)]
    assert queue.hand_out("short", 1, 600.0, lasts_s=300.0, longest_s=3600.0) == []
    assert queue.hand_out("long", 1, 600.0, lasts_s=3600.0, longest_s=3600.0) == [(0, 2)]


def test_a_long_task_goes_to_any_worker_if_none_lasts():
    queue = TaskQueue(1)
    lose_after_ten_minutes(queue)
    assert queue.hand_out("short", 1, 600.0, lasts_s=300.0, longest_s=500.0) == [(0, 2)]


def with_durations(queue: TaskQueue, count: int) -> None:
    for attempt in queue.hand_out("fast", count, 0.0):
        queue.finish("fast", attempt, True, 1.0, 1.0)


def test_a_straggler_runs_twice_and_the_first_result_counts():
    queue = TaskQueue(11, duplicate_stragglers=True)
    with_durations(queue, 10)
    [slow] = queue.hand_out("slow", 1, 1.0)
    assert queue.hand_out("fast", 1, 99.0) == [], "it has not begun"
    queue.begin("slow", slow, 1.0)
    assert queue.hand_out("fast", 1, 2.5) == []
    [copy] = queue.hand_out("fast", 1, 4.0)
    assert copy == (10, 2)
    assert queue.hand_out("third", 1, 99.0) == []
    outcome = queue.finish("fast", copy, True, 1.0, 5.0)
    assert outcome.obsolete == (("slow", slow),)
    assert queue.finish("slow", slow, True, 4.0, 5.0).state is None


def test_a_straggler_whose_copy_fails_still_runs():
    queue = TaskQueue(11, retries=1, duplicate_stragglers=True)
    with_durations(queue, 10)
    [slow] = queue.hand_out("slow", 1, 1.0)
    queue.begin("slow", slow, 1.0)
    [copy] = queue.hand_out("fast", 1, 4.0)
    assert queue.finish("fast", copy, False, 1.0, 5.0).state is RUNNING
    assert queue.lose("fast", 6.0) == []
    assert queue.finish("slow", slow, True, 9.0, 9.0).state is DONE


def fail(queue: TaskQueue, worker: str, attempts, others=True):
    """The last outcome."""
    for attempt in attempts:
        outcome = queue.finish(worker, attempt, False, 1.0, 1.0, lambda: others)
    return outcome


def test_the_tasks_that_fail_on_a_suspected_worker_wait_again():
    queue = TaskQueue(20)
    attempts = queue.hand_out("bad", 7, 0.0)
    queue.begin("bad", attempts[5], 0.5)
    outcome = fail(queue, "bad", attempts[:5])
    assert outcome.suspected
    assert outcome.excused == tuple((n, WAITING, 0, True) for n in range(5))
    assert outcome.obsolete == (("bad", attempts[6]),), "the one that was not begun"
    assert outcome.back == (6,)
    assert queue.attempts_of("bad") == [attempts[5]]
    assert queue.hand_out("bad", 5, 2.0) == []
    others = queue.hand_out("good", 7, 2.0)
    assert [each.number for each in others] == [0, 1, 2, 3, 4, 6, 7]
    assert queue.finish("good", others[0], True, 1.0, 3.0).rejected == ("bad",)
    assert queue.finish("good", others[1], False, 1.0, 3.0).state is FAILED, "its own failure"
    assert queue.finish("bad", attempts[6], True, 1.0, 3.0).state is DONE


def test_a_worker_becomes_suspected_though_no_failure_of_its_tasks_is_excused():
    queue = TaskQueue(7)
    for worker in ("n0", "n1", "n2"):
        assert fail(queue, worker, queue.hand_out(worker, 5, 0.0)).suspected
    *failed, unbegun = queue.hand_out("n3", 6, 0.0)
    outcome = fail(queue, "n3", failed)
    assert (outcome.state, outcome.excused) == (FAILED, ())
    assert outcome.suspected
    assert (outcome.back, outcome.obsolete) == ((unbegun.number,), (("n3", unbegun),))


def test_without_another_worker_failures_count():
    queue = TaskQueue(20)
    assert not fail(queue, "a", queue.hand_out("a", 10, 0.0), others=False).suspected
    assert queue.counts()[FAILED] == 10
    assert queue.finish("a", *queue.hand_out("a", 1, 0.0), True, 1.0, 1.0).state is DONE
    assert queue.counts()[FAILED] == 10


def test_tries_are_given_back_to_tasks_that_are_tried_again():
    queue = TaskQueue(5, retries=2)
    for _ in range(2):
        outcome = fail(queue, "bad", queue.hand_out("bad", 4, 0.0))
        assert not outcome.excused, "four tasks, however often"
    outcome = fail(queue, "bad", queue.hand_out("bad", 5, 0.0)[4:])
    assert [each.tries for each in outcome.excused] == [0] * 5
    assert [queue.tries(number) for number in range(5)] == [0] * 5


def test_a_worker_that_is_left_alone_tries_its_failed_tasks_again():
    queue = TaskQueue(5)
    fail(queue, "bad", queue.hand_out("bad", 5, 0.0))
    assert queue.hand_out("bad", 5, 1000.0) == []
    [trial] = queue.hand_out("bad", 1, 1000.0, alone=True)
    assert [a.number for a in queue.hand_out("bad", 5, 1001.0, alone=True)] == [1, 2, 3, 4]
    assert queue.finish("bad", trial, False, 1.0, 1002.0).state is FAILED, "it counts now"


def test_a_suspected_worker_that_is_left_alone_ends_the_farm_without_trials():
    queue = TaskQueue(50)
    now = 0.0
    fail(queue, "bad", queue.hand_out("bad", 5, now))
    while attempts := queue.hand_out("bad", 5, now, alone=True):
        now += 1.0
        for attempt in attempts:
            outcome = queue.finish("bad", attempt, False, 1.0, now)
            assert (outcome.state, outcome.excused) == (FAILED, ())
    assert (queue.counts()[FAILED], now) == (50, 10.0)


def test_a_rejected_worker_that_is_left_alone_gets_trials_only():
    queue = TaskQueue(20)
    attempts = queue.hand_out("bad", 5, 0.0)
    fail(queue, "bad", attempts)
    queue.finish("good", *queue.hand_out("good", 1, 0.0), True, 1.0, 1.0)
    assert queue.hand_out("bad", 5, 1.0, alone=True) == []
    [trial] = queue.hand_out("bad", 5, 1000.0, alone=True)
    assert queue.hand_out("bad", 5, 1000.0, alone=True) == []
    queue.finish("bad", trial, True, 1.0, 1001.0)
    assert len(queue.hand_out("bad", 5, 1001.0, alone=True)) == 5


def test_a_million_tasks_take_little_memory():
    tracemalloc.start()
    try:
        queue = TaskQueue(10**6)
        for attempt in queue.hand_out("a", 100_000, 0.0)[::2]:
            queue.finish("a", attempt, True, 1.0, 1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * 10**6


WORKERS = ("a", "b", "c")


class QueueMachine(RuleBasedStateMachine):
    """Random hand-outs, losses, late and repeated results, restarts from the store."""

    attempts = Bundle("attempts")

    @initialize(total=st.integers(1, 8), retries=st.integers(0, 2), duplicate=st.booleans())
    def begin(self, total, retries, duplicate):
        self.total, self.retries, self.duplicate, self.now = total, retries, duplicate, 0.0
        self.queue = TaskQueue(total, retries, duplicate)
        self.queue.failing = FailingWorkers(needed=2)
        self.store = {n: StoredTask(n, WAITING, 0, 0, "", None) for n in range(total)}
        self.successes = dict.fromkeys(range(total), 0)
        self.failures = dict.fromkeys(range(total), 0)

    @rule(
        target=attempts,
        worker=st.sampled_from(WORKERS),
        lasts_s=st.sampled_from([None, 1, 99]),
        alone=st.booleans(),
        later_s=st.sampled_from([0, 100]),
    )
    def hand_out(self, worker, lasts_s, alone, later_s):
        self.now += 1 + later_s
        longest_s = None if lasts_s is None else 99
        handed_out = self.queue.hand_out(worker, 1, self.now, lasts_s, longest_s, alone)
        for number, attempt in handed_out:
            assert self.successes[number] == 0
            self.store[number] = self.store[number]._replace(
                state=RUNNING, attempt=attempt, worker=worker, begun=None
            )
        return (worker, handed_out[0] if handed_out else None)

    @rule(handed_out=attempts)
    def start(self, handed_out):
        worker, attempt = handed_out
        if attempt is not None and self.queue.begin(worker, attempt, self.now):
            self.store[attempt.number] = self.store[attempt.number]._replace(begun=self.now)

    @rule(handed_out=attempts, success=st.booleans(), others=st.booleans())
    def result(self, handed_out, success, others):
        """A result that may come at any time, and more than once."""
        self.finish(handed_out, success, others)

    @rule(handed_out=consumes(attempts), success=st.booleans(), others=st.booleans())
    def last_result(self, handed_out, success, others):
        self.finish(handed_out, success, others)

    def finish(self, handed_out, success, others):
        self.now += 1
        worker, attempt = handed_out
        if attempt is None:
            return
        outcome = self.queue.finish(worker, attempt, success, 1.0, self.now, lambda: others)
        if outcome.state is None:
            return
        number = attempt.number
        assert self.successes[number] == 0
        self.successes[number] += success
        self.failures[number] += not success
        self.store[number] = self.store[number]._replace(state=outcome.state, tries=outcome.tries)
        assert (outcome.state is DONE) == success
        if not success:
            for_good = outcome.tries > self.retries
            assert (outcome.state is FAILED) == for_good
        for excused in outcome.excused:
            assert self.store[excused.number].tries >= excused.tries
            assert excused.had_failed == (self.store[excused.number].state is FAILED)
            self.store[excused.number] = self.store[excused.number]._replace(
                state=excused.state, tries=excused.tries
            )
        for back in outcome.back:
            self.store[back] = self.store[back]._replace(state=WAITING)

    @rule(worker=st.sampled_from(WORKERS))
    def lose(self, worker):
        self.now += 1
        for number in self.queue.lose(worker, self.now):
            self.store[number] = self.store[number]._replace(state=WAITING)

    @rule(handed_out=attempts)
    def come_back(self, handed_out):
        worker, attempt = handed_out
        if attempt is not None and not self.queue.adopt(worker, [attempt]):
            self.store[attempt.number] = self.store[attempt.number]._replace(
                state=RUNNING, worker=worker
            )
            assert self.successes[attempt.number] == 0

    @rule()
    def restart(self):
        self.queue = TaskQueue.restored(
            self.total, self.store.values(), self.retries, self.duplicate
        )
        self.queue.failing = FailingWorkers(needed=2)

    @rule()
    def retry(self):
        for number in self.queue.retry(self.queue.numbers(FAILED)):
            self.store[number] = self.store[number]._replace(state=WAITING, tries=0)

    @invariant()
    def each_task_is_in_one_place(self):
        counts = dict.fromkeys(TaskState, 0)
        for number, row in self.store.items():
            assert self.queue.state(number) is row.state
            assert self.successes[number] == (row.state is DONE)
            counts[row.state] += 1
        assert self.queue.counts() == counts
        for number, row in self.store.items():
            assert self.queue.tries(number) == row.tries
        holders = {a.number for w in self.queue.workers() for a in self.queue.attempts_of(w)}
        assert holders == {n for n, row in self.store.items() if row.state is RUNNING}

    def teardown(self):
        """One worker that stays completes all tasks."""
        if not hasattr(self, "queue"):
            return
        for worker in WORKERS:
            self.queue.lose(worker, self.now)
        self.queue.retry(self.queue.numbers(FAILED))
        while attempts := self.queue.hand_out("last", 3, self.now):
            for attempt in attempts:
                assert self.queue.finish("last", attempt, True, 1.0, self.now).state is DONE
                self.successes[attempt.number] += 1
        assert set(self.successes.values()) == {1}


TestQueueMachine = QueueMachine.TestCase
