"""Tasks in the database: SQLite here, PostgreSQL in ``test_postgres.py``."""

from __future__ import annotations

import pytest

from malletrain.store import task_table
from malletrain.store.store import Store, StoreError
from malletrain.store.task_table import TaskChange, TaskProgress
from tests.malletrain.store.conftest import new_job


def check_life_of_tasks(store: Store) -> None:
    """Tasks of two farms are added, handed out, finished, put back and read."""
    job, other = new_job(store, "farm").id, new_job(store, "other").id
    tasks = store.tasks
    assert (tasks.count(job), tasks.counts(job), list(tasks.progress(job))) == (0, {}, [])
    tasks.add(job, 0, [["a", "1"], ["b\0 ü", "2"]])
    tasks.add(job, 2, [["c", "3"], ["d", "4"], ["e", "5"]])
    tasks.add(other, 0, [["z"]])
    assert (tasks.count(job), tasks.count(other)) == (5, 1)
    assert (tasks.longest(other), tasks.longest("j99")) == (len('["z"]'), 0)
    assert tasks.arguments(job, [1, 3, 9]) == {1: ("b� ü", "2"), 3: ("d", "4")}

    tasks.hand_out(job, "n1", [(0, 1), (1, 1), (2, 1)])
    tasks.hand_out(job, "n2", [(3, 1)])
    tasks.begin(job, [(3, 100.0)])
    tasks.finish(
        job,
        [
            TaskChange(0, "done", 0, "n1", 0, 101.0, 102.5, ""),
            TaskChange(1, "failed", 1, "n1", -9, 101.0, 103.0, "Killed\0"),
        ],
    )
    tasks.put_back(job, [2])
    assert list(tasks.progress(job)) == [
        TaskProgress(0, "done", 0, 1, "n1", 101.0, 102.5),
        TaskProgress(1, "failed", 1, 1, "n1", 101.0, 103.0),
        TaskProgress(2, "waiting", 0, 1, "n1", None, None),
        TaskProgress(3, "running", 0, 1, "n2", 100.0, None),
    ]
    assert tasks.counts(job) == {"done": 1, "failed": 1, "waiting": 2, "running": 1}
    [row] = tasks.listed(job, ["failed"], -1, 10)
    assert (row.number, row.arguments, row.exit_code) == (1, ("b� ü", "2"), -9)
    assert (row.started, row.ended, row.tail) == (101.0, 103.0, "Killed�")
    assert [row.number for row in tasks.listed(job, ["waiting"], 2, 10)] == [4]
    assert [row.number for row in tasks.listed(job, [], 0, 2)] == [1, 2]
    assert [row.number for row in tasks.rows(job, [4, 0])] == [0, 4]

    assert [row.number for row in tasks.listed(job, ["running"], -1, 10)] == [3]
    tasks.hand_out(job, "n2", [(4, 1)])
    assert [row.number for row in tasks.listed(job, ["running"], -1, 10)] == [3]
    assert [row.number for row in tasks.listed(job, ["waiting"], -1, 10)] == [2, 4]
    assert [row.number for row in tasks.listed(job, ["waiting", "running"], -1, 9)] == [2, 3, 4]
    tasks.put_back(job, [4])

    tasks.excuse(job, [(1, "waiting", 0), (3, "running", 2)])
    assert [(r.state, r.tries) for r in tasks.rows(job, [1, 3])] == [("waiting", 0), ("running", 2)]
    tasks.excuse(job, [(1, "failed", 1)])
    tasks.retry(job, [1])
    tasks.adopt(job, "n3", [2])
    assert [(r.state, r.tries) for r in tasks.rows(job, [1])] == [("waiting", 0)]
    assert [(r.state, r.node) for r in tasks.rows(job, [2])] == [("running", "n3")]
    assert tasks.counts(other) == {"waiting": 1}


def test_life_of_tasks(store):
    check_life_of_tasks(store)


def test_a_task_is_added_once(store):
    job = new_job(store).id
    store.tasks.add(job, 0, [["a"]])
    with pytest.raises(StoreError):
        store.tasks.add(job, 0, [["b"]])
    assert store.tasks.arguments(job, [0]) == {0: ("a",)}


def test_reading_in_pieces_misses_nothing(store, monkeypatch):
    monkeypatch.setattr(task_table, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(task_table, "NUMBERS_AT_ONCE", 2)
    job = new_job(store).id
    store.tasks.add(job, 0, [[str(k)] for k in range(9)])
    store.tasks.hand_out(job, "n", [(k, 1) for k in range(7)])
    assert [each.number for each in store.tasks.progress(job)] == list(range(7))
    assert [r.number for r in store.tasks.rows(job, range(7))] == list(range(7))
    assert store.tasks.arguments(job, range(7)) == {k: (str(k),) for k in range(7)}


def test_tasks_go_with_their_job_piece_by_piece(store, monkeypatch):
    monkeypatch.setattr(task_table, "TASKS_AT_ONCE", 4)
    monkeypatch.setattr("malletrain.store.store.TASKS_AT_ONCE", 4)
    ended, current = new_job(store, ended=10.0).id, new_job(store).id
    for job in (ended, current):
        store.tasks.add(job, 0, [["x"]] * 10)
    assert [store.forget(50.0) for _ in range(4)] == [4, 4, 1, 0]
    assert (store.tasks.count(ended), store.tasks.count(current)) == (0, 10)
    assert store.get_job(ended) is None
