"""Rows of many jobs at once are those that single reading finds."""

import contextlib

import pytest

from malletrain.store.records import CurveRow, GoalRow, ProfileRow
from malletrain.store.store import JOBS_AT_ONCE, StoreError
from tests.malletrain.store.conftest import new_job


def test_many_are_what_each_is(store):
    jobs = [new_job(store, f"job {number}").id for number in range(2 * JOBS_AT_ONCE + 1)]
    with store.transaction():
        for number, job in enumerate(jobs):
            if number % 2:
                store.put_profile(ProfileRow(job, f"k{number % 7}", "gpu", {"at": number}))
            if number % 3:
                store.goals.put(GoalRow(job, budget_s=float(number)))
        for number in range(7):
            store.put_curve(CurveRow(f"k{number}", "gpu", 4, {"at": number}, "j1", 5.0))
    ids = [*jobs, "j0", *jobs[:3]]
    many = store.many
    assert many.jobs(ids) == {job: store.get_job(job) for job in jobs}
    profiles = {job: row for job in jobs if (row := store.profile(job)) is not None}
    assert many.profiles(ids) == profiles != {}
    assert many.goals(ids) == store.goals.all()
    assert all(many.goals([job]).get(job) == store.goals.of(job) for job in jobs[:9])
    assert many.curves(["k3", "none", "k1"]) == {key: store.curve(key) for key in ("k1", "k3")}
    assert many.jobs([]) == {}


def test_a_part_is_undone_alone(store):
    with store.transaction():
        with store.savepoint():
            first = new_job(store).id
        with contextlib.suppress(ZeroDivisionError), store.savepoint():
            undone = new_job(store).id
            1 / 0  # noqa: B018
        with pytest.raises(StoreError, match="UNIQUE"), store.savepoint():
            store.add_job(store.get_job(first))
        with store.savepoint():
            last = new_job(store).id
    assert last == undone, "its number was not given"
    assert [job.id for job in store.list_jobs()] == [first, last]


def test_a_part_needs_a_transaction(store):
    with pytest.raises(RuntimeError), store.savepoint():
        pass
