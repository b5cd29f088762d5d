"""The tasks of a farm over time: known answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.core.task_history import MAX_BUCKETS, MAX_SLOWEST, TaskHistory
from malletrain.core.task_queue import TaskState

DONE, FAILED, WAITING = TaskState.DONE, TaskState.FAILED, TaskState.WAITING


def test_nothing_has_happened():
    assert TaskHistory(100.0).counts() == []
    assert TaskHistory(100.0).slowest() == []


def test_three_tasks():
    history = TaskHistory(100.0)
    history.ended(0, 100.2, 102.5, DONE)
    history.ended(1, 100.5, 104.5, FAILED)
    history.ended(2, 102.7, 104.9, WAITING)  # is tried again
    assert history.counts(running=[104.1]) == [
        (100.0, 0, 0, 0),
        (101.0, 0, 0, 2),
        (103.0, 1, 0, 2),
        (105.0, 1, 1, 1),
    ]


def test_failed_tasks_that_wait_again_are_taken_off():
    history = TaskHistory(0.0)
    history.ended(0, 0.0, 1.0, FAILED)
    history.ended(1, 0.0, 1.0, FAILED)
    history.put_back(2, 5.5)
    history.put_back(0, 7.0)
    assert [(each.time, each.failed) for each in history.counts()][-2:] == [(2.0, 2), (6.0, 0)]


def test_the_start_of_running_tasks_is_not_remembered():
    history = TaskHistory(0.0)
    history.ended(0, 0.0, 1.0, DONE)
    assert history.counts(running=[1e6])[-1].running == 1
    assert history.counts()[-1] == (2.0, 1, 0, 0)


def test_times_of_a_wrong_clock_are_those_of_the_submission():
    history = TaskHistory(1e9)
    history.ended(0, 0.0, 5.0, DONE)
    history.ended(1, 1e9 + 3, 1e9 + 1, DONE)  # it ended before it began
    assert history.counts()[0] == (1e9, 0, 0, 0)
    assert history.counts()[-1] == (1e9 + 2, 2, 0, 0)


def test_the_slowest_done_tasks():
    history = TaskHistory(0.0)
    for number in range(30):
        history.ended(number, 0.0, float(number % 20), DONE)
    history.ended(99, 0.0, 1000.0, FAILED)
    assert history.slowest() == [19, 18, 17, 16, 15, 14, 13, 12, 11, 10][:MAX_SLOWEST]


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e5), st.sampled_from([DONE, FAILED, WAITING])),
        max_size=50,
    ),
    st.lists(st.floats(0, 2e6), max_size=5),
)
def test_few_intervals_have_all_tasks(tries, running):
    history = TaskHistory(0.0)
    for number, (started, seconds, state) in enumerate(tries):
        history.ended(number, started, started + seconds, state)
    counts = history.counts(running)
    assert len(counts) <= MAX_BUCKETS + 1
    assert [each.time for each in counts] == sorted({each.time for each in counts})
    assert all(each.running >= 0 for each in counts)
    if tries or running:
        states = [state for *_, state in tries]
        assert counts[-1][1:] == (states.count(DONE), states.count(FAILED), len(running))
