"""Which workers get no tasks because tasks fail there: the table, and known orders of results."""

from __future__ import annotations

import heapq
import random

import pytest

from malletrain.core.failing_workers import (
    FIRST_TRIAL_S,
    MAX_FAILED_TASKS,
    MAX_TRIAL_S,
    TRANSITIONS,
    FailingWorkers,
    Trust,
    TrustEvent,
)
from malletrain.core.task_queue import TaskQueue, TaskState


def others() -> bool:
    return True


def nobody() -> bool:
    return False


def fail(workers: FailingWorkers, worker: str, *numbers: int, now: float = 0.0) -> dict[int, int]:
    """The last answer."""
    for number in numbers:
        excused = workers.failed(worker, number, others, now)
    return excused


@pytest.fixture
def suspecting() -> FailingWorkers:
    """Five tasks have failed on "bad", and one has succeeded on "good"."""
    workers = FailingWorkers()
    workers.succeeded("good", 10)
    assert fail(workers, "bad", 0, 1, 2, 3) == {}
    assert fail(workers, "bad", 4) == dict.fromkeys(range(5), 1)
    return workers


def test_every_trust_but_the_first_can_be_left_by_a_success():
    assert {before for before, _ in TRANSITIONS} == set(Trust)
    assert {event for _, event in TRANSITIONS} == set(TrustEvent)
    assert all(
        TRANSITIONS[each, TrustEvent.SUCCEED] is Trust.TRUSTED
        for each in Trust
        if each is not Trust.TRUSTED
    )


def test_a_suspected_worker_gets_one_task_from_time_to_time(suspecting):
    assert suspecting.untrusted() == {"bad": (Trust.SUSPECTED, 5)}
    assert suspecting.allowed("good", 8, True, 0.0) == 8
    now, wait_s = 0.0, FIRST_TRIAL_S
    for number in range(20, 30):
        assert suspecting.allowed("bad", 8, False, now + wait_s - 1) == 0
        assert suspecting.allowed("bad", 8, True, now + wait_s) == 0
        assert suspecting.allowed("bad", 8, False, now + wait_s) == 1
        now, wait_s = now + wait_s, min(MAX_TRIAL_S, 2 * wait_s)
        suspecting.note_hand_out("bad", now)
        assert suspecting.failed("bad", number, others, now) == {number: 1}


def test_a_suspected_worker_that_is_left_alone_gets_all_tasks_and_its_failures_count(suspecting):
    assert suspecting.allowed("bad", 8, True, 0.0) == 0
    assert suspecting.allowed("bad", 8, True, 0.0, alone=True) == 8
    suspecting.note_hand_out("bad", 0.0, alone=True)
    assert suspecting.allowed("bad", 8, False, FIRST_TRIAL_S) == 1, "that was no trial"
    assert suspecting.failed("bad", 20, nobody, 0.0) == {}
    assert suspecting.failed("bad", 20, others, 0.0) == {20: 1}
    suspecting.succeeded("good", 3)
    assert suspecting.allowed("bad", 8, True, 0.0, alone=True) == 0
    assert suspecting.failed("bad", 21, nobody, 0.0) == {21: 1}, "it is known to be the worker"


def test_a_task_that_succeeds_elsewhere_convicts_the_worker(suspecting):
    assert suspecting.failed_on("bad", 3)
    assert not suspecting.failed_on("good", 3)
    assert suspecting.succeeded("good", 3) == ["bad"]
    assert suspecting.succeeded("good", 4) == [], "it is told once"
    assert suspecting.untrusted() == {"bad": (Trust.REJECTED, 5)}
    assert suspecting.failed("good", 2, others, 0.0) == {}
    assert suspecting.trust("bad") is Trust.REJECTED
    assert suspecting.succeeded("bad", 30) == []
    assert suspecting.untrusted() == {}


def test_a_task_that_fails_elsewhere_too_acquits_it_once_another_succeeds_there(suspecting):
    assert suspecting.failed("good", 3, others, 0.0) == {}
    assert suspecting.untrusted() == {"bad": (Trust.SUSPECTED, 5)}
    assert suspecting.succeeded("good", 11) == []
    assert suspecting.untrusted() == {}
    assert fail(suspecting, "bad", *range(20, 29)) == {}, "the next suspicion needs ten"
    assert fail(suspecting, "bad", 29) == dict.fromkeys(range(20, 30), 1)


@pytest.mark.parametrize("has_succeeded", [False, True])
def test_a_worker_on_which_nothing_succeeds_any_more_acquits_nobody(suspecting, has_succeeded):
    if has_succeeded:
        suspecting.succeeded("new", 12)
    assert fail(suspecting, "new", 0, 1, 2, 3) == {}
    assert suspecting.trust("bad") is Trust.SUSPECTED
    assert fail(suspecting, "new", 4) == dict.fromkeys(range(5), 1)
    assert suspecting.succeeded("good", 0) == ["bad", "new"]


def test_a_success_ends_the_row():
    workers = FailingWorkers()
    fail(workers, "a", 0, 1, 2, 3)
    workers.succeeded("a", 4)
    assert fail(workers, "a", 5, 6, 7, 8) == {}
    assert workers.untrusted() == {}


def test_one_task_that_fails_often_says_nothing_about_the_worker():
    workers = FailingWorkers()
    assert fail(workers, "a", *[0] * 50) == {}
    assert fail(workers, "a", 1, 2, 3, 4) == {0: 50, 1: 1, 2: 1, 3: 1, 4: 1}


def test_the_only_worker_is_never_suspected_and_its_memory_is_bounded():
    workers = FailingWorkers()
    for number in range(1000):
        assert workers.failed("a", number, nobody, 0.0) == {}
    excused = workers.failed("a", 1000, others, 0.0)
    assert sorted(excused) == list(range(1001 - MAX_FAILED_TASKS, 1001))


def test_a_task_is_excused_a_few_times_only():
    workers = FailingWorkers(needed=1)
    answers = [workers.failed(f"n{k}", 7, others, 0.0) for k in range(4)]
    assert answers == [{7: 1}, {7: 1}, {7: 1}, {}]


LAST_FAILURES = [
    # what happened before the end, and what the review excuses on "bad"
    ("two tasks, and none has succeeded", {"good": "+", "bad": "--"}, {"bad": {1: 1, 2: 1}}),
    ("four", {"good": "+", "bad": "----"}, {"bad": {1: 1, 2: 1, 3: 1, 4: 1}}),
    ("a single one says nothing", {"good": "+", "bad": "-"}, {}),
    ("one has succeeded there", {"good": "+", "bad": "+---"}, {}),
    ("the last one has succeeded there", {"good": "+", "bad": "---+"}, {}),
    ("none has succeeded anywhere", {"good": "-", "bad": "---"}, {}),
    ("tasks succeed only where nobody is", {"gone": "+", "bad": "---"}, {}),
    (
        "two such workers",
        {"good": "+", "bad": "--", "worse": "--"},
        {"bad": {1: 1, 2: 1}, "worse": {3: 1, 4: 1}},
    ),
]


@pytest.mark.parametrize(("results", "excused"), [each[1:] for each in LAST_FAILURES])
def test_the_last_failures_of_a_farm(results, excused):
    workers, number = FailingWorkers(), 0
    for worker, signs in results.items():
        for sign in signs:
            if sign == "+":
                workers.succeeded(worker, number)
            else:
                assert workers.failed(worker, number, others, 0.0) == {}
            number += 1
    assert workers.review(lambda worker: worker != "gone", 5.0) == excused
    assert workers.untrusted() == {
        worker: (Trust.SUSPECTED, len(failures)) for worker, failures in excused.items()
    }
    assert workers.review(lambda worker: worker != "gone", 6.0) == {}, "once"


def test_a_worker_is_reviewed_once():
    workers = FailingWorkers()
    workers.succeeded("good", 0)
    fail(workers, "bad", 1, 2)
    assert workers.review(lambda _: True, 0.0) == {"bad": {1: 1, 2: 1}}
    workers.failed("good", 1, others, 0.0)
    workers.succeeded("good", 3)  # so the fault was the task's
    assert workers.trust("bad") is Trust.TRUSTED
    fail(workers, "bad", 4, 5)
    assert workers.review(lambda _: True, 0.0) == {}


TASK_S, FAILURE_S = 10.0, 0.2
"""Mean durations of a task that succeeds and of one that fails, seconds."""


def failed_tasks(nodes, total, cut_off=0, recover_at=1e9, broken=(), seed=0) -> tuple[int, int]:
    """How many tasks of a farm have failed at its end, and the number of attempts.

    Args:
        nodes: number of workers, each with one task at a time.
        total: number of tasks.
        cut_off: number of workers on which every task fails that begins after 50 s.
        recover_at: time at which these can run tasks again, seconds.
        broken: tasks that fail everywhere.
        seed: seed of the durations.
    """
    durations, queue, now, attempts = random.Random(seed), TaskQueue(total), 0.0, 0
    workers = [f"n{k}" for k in range(nodes)]
    ends: list[tuple] = []

    def has_others(worker):
        trust = queue.failing.trust
        return any(each != worker and trust(each) is Trust.TRUSTED for each in workers)

    while queue.unfinished:
        for k, worker in enumerate(workers):
            count = 1 - queue.count_of(worker)
            for each in queue.hand_out(worker, count, now, alone=not has_others(worker)):
                attempts += 1
                success = each.number not in broken
                success &= k >= cut_off or not 50.0 <= now < recover_at
                mean_s = TASK_S if success else FAILURE_S
                heapq.heappush(ends, (now + durations.uniform(0.5, 1.5) * mean_s, k, each, success))
        now, k, each, success = heapq.heappop(ends)
        worker = workers[k]
        queue.finish(worker, each, success, 1.0, now, lambda of=worker: has_others(of))
    return queue.counts()[TaskState.FAILED], attempts


@pytest.mark.parametrize("recover_at", [250.0, 1e9])
@pytest.mark.parametrize(("nodes", "cut_off"), [(10, 2), (10, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_workers_that_lose_a_file_system_together_use_up_no_task(nodes, cut_off, recover_at, seed):
    failed, attempts = failed_tasks(nodes, 1000, cut_off, recover_at, seed=seed)
    assert failed == 0
    assert attempts < 1100


@pytest.mark.parametrize("nodes", [4, 10])
@pytest.mark.parametrize("broken", [range(300, 500), range(0, 1000, 5), range(1000)])
def test_tasks_that_fail_everywhere_fail_after_few_attempts(nodes, broken):
    failed, attempts = failed_tasks(nodes, 1000, broken=broken)
    assert failed == len(broken)
    assert attempts < 1100
