"""What is stored comes back as it went, all of a step or nothing."""

import json
import math
import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from malletrain.store.records import MetricRow
from malletrain.store.store import (
    EventRow,
    JobRow,
    LeaseRow,
    ObservationRow,
    RescaleRow,
    Store,
    StoreError,
)
from tests.draws import cases
from tests.malletrain.store.conftest import new_job

# --- rows ---

anything = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8)
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3))
maybe = st.none() | numbers
counts = st.integers(0, 2**31 - 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One store for all examples of the round trips: opening one for each would take a minute."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('store')}/s.db") as opened:
        opened.add_job(JobRow("j0", "base", "ada", "{}", "queued"))
        yield opened


@settings(max_examples=cases(60), deadline=None)
@given(
    row=st.builds(
        JobRow,
        id=st.just("new"),
        name=anything,
        owner=anything,
        spec=anything,
        state=anything,
        reason=anything,
        submitted=numbers,
        started=maybe,
        ended=maybe,
        generation=st.integers(0, 2**62),
        planned_nodes=st.lists(anything).map(tuple),
        members=st.lists(anything).map(tuple),
        tries=counts,
        last_broke=maybe,
        samples=numbers,
        last_progress=maybe,
        metrics=st.dictionaries(anything, numbers),
        notices=st.lists(anything).map(tuple),
        snapshot=st.dictionaries(anything, json_values),
        failure=anything,
    )
)
def test_jobs_come_back_as_they_went(shared, row):
    row = replace(row, id=shared.new_job_id())
    shared.add_job(row)
    assert shared.get_job(row.id) == row
    changed = replace(
        row, name=row.name + "'", planned_nodes=(*row.planned_nodes, "n"), started=1.5
    )
    assert (
        shared.update_job(
            row.id, name=changed.name, planned_nodes=changed.planned_nodes, started=1.5
        )
        == changed
    )
    assert shared.get_job(row.id) == changed


@settings(max_examples=cases(40), deadline=None)
@given(
    st.lists(
        st.builds(
            EventRow,
            time=numbers,
            kind=anything,
            job=anything,
            node=anything,
            lease=anything,
            generation=st.none() | st.integers(0, 2**62),
            data=st.dictionaries(anything, json_values),
        ),
        max_size=5,
    )
)
def test_events_come_back_as_they_went(shared, rows):
    before = max((event.seq for event in shared.last_events(1)), default=0)
    for row in rows:
        shared.add_event(row)
    stored = shared.events_since(before)
    assert [replace(row, seq=0) for row in stored] == rows
    assert [row.seq for row in stored] == sorted({row.seq for row in stored})


@settings(max_examples=cases(40), deadline=None)
@given(
    lease=st.builds(
        LeaseRow,
        id=st.integers(1, 50).map("l{}".format),
        node=anything,
        state=anything,
        scheduler_id=anything,
        public_key=anything,
        node_class=anything,
        owner=anything,
        requested=numbers,
        started=maybe,
        ended=maybe,
        end_reason=anything,
    ),
    observation=st.builds(
        ObservationRow,
        job=st.just("j0"),
        nodes=counts,
        batch=numbers,
        rate=numbers,
        spread=numbers,
        seconds=numbers,
        samples=numbers,
        time=numbers,
    ),
    rescale=st.builds(
        RescaleRow,
        job=st.just("j0"),
        generation=st.integers(0, 30),
        kind=anything,
        from_nodes=counts,
        to_nodes=counts,
        began=numbers,
        ended=numbers,
        cost_s=numbers,
        phases=st.dictionaries(anything, numbers),
    ),
)
def test_the_other_rows_come_back_as_they_went(shared, lease, observation, rescale):
    [lease_id] = shared.new_lease_ids(1)
    lease = replace(lease, id=lease_id)
    shared.add_leases([lease])
    assert shared.get_lease(lease.id) == lease
    shared.put_observation(observation)
    assert observation in shared.observations("j0")
    shared.put_rescale(rescale)
    assert rescale in shared.rescales("j0")


def test_text_that_is_none_costs_a_character_only(store):
    job = new_job(store)
    store.update_job(job.id, failure="a\0b\udcffc", metrics={"loss": math.nan, "big": math.inf})
    row = store.get_job(job.id)
    assert row.failure == "a\N{REPLACEMENT CHARACTER}b?c"
    assert math.isnan(row.metrics["loss"])
    assert row.metrics["big"] == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
def test_a_metric_that_is_no_number_comes_back(store, value):
    job = new_job(store)
    store.update_job(job.id, metrics={"loss": value})
    row = MetricRow(job.id, "loss", 0, 1.0, value, None, 0.0, 1)
    store.series.replace(job.id, "loss", 0, [row])
    assert str(store.get_job(job.id).metrics["loss"]) == str(value)
    assert str(store.series.newest(job.id, "loss").value) == str(value)


# --- jobs and leases ---


def test_ids_are_never_given_twice(url):
    with Store.open(url) as store:
        assert [store.new_job_id(), store.new_job_id(), *store.new_lease_ids(1)] == [
            "j1",
            "j2",
            "l1",
        ]
    with Store.open(url) as store:
        assert [store.new_job_id(), *store.new_lease_ids(1)] == ["j3", "l2"]


def test_boots_are_counted_under_one_name(url):
    with Store.open(url) as store:
        first = store.boot()
    with Store.open(url) as store:
        second = store.boot()
    assert (first.number, second.number) == (1, 2)
    assert first.daemon_id == second.daemon_id
    assert str(first) != str(second)


def test_jobs_are_listed_in_order_of_submission(store):
    ids = [new_job(store).id for _ in range(12)]
    store.update_job("j3", state="running")
    store.update_job("j11", state="running")
    assert [job.id for job in store.list_jobs()] == ids
    assert [job.id for job in store.list_jobs(states=["running"])] == ["j3", "j11"]
    assert store.list_jobs(states=[]) == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("j1", ["j1"]),
        ("j", ["j1", "j2", "j3", "j4"]),
        ("mnist", ["j1", "j2"]),
        ("mnist-", ["j3"]),
        ("mn%", []),
        ("m_", ["j4"]),
        ("j9", []),
        ("", []),
    ],
)
def test_jobs_are_found_by_what_people_type(store, text, ids):
    for name in ("mnist", "mnist", "mnist-large", "m_x"):
        new_job(store, name)
    assert [job.id for job in store.find_jobs(text)] == ids


def test_wrong_updates_are_refused(store):
    job = new_job(store)
    with pytest.raises(TypeError, match="no field colour"):
        store.update_job(job.id, colour="red")
    with pytest.raises(TypeError, match="no field id"):
        store.update_job(job.id, id="j7")
    with pytest.raises(StoreError, match='no row "j7"'):
        store.update_job("j7", state="running")
    with pytest.raises(StoreError, match="refused"):
        store.add_job(job)
    with pytest.raises(ValueError, match="is not an id"):
        store.add_job(replace(job, id="../x"))
    with pytest.raises(StoreError, match="FOREIGN KEY"):
        store.put_rescale(RescaleRow("j7", 1, "up", 1, 2, 0.0, 1.0, 1.0))


def test_active_leases_are_those_that_have_not_ended(store):
    leases = [
        LeaseRow(lease_id, node, "requested")
        for lease_id, node in zip(store.new_lease_ids(3), "abc", strict=True)
    ]
    store.add_leases(leases)
    store.change_leases([(leases[0], {"state": "ended", "ended": 5.0, "end_reason": "preempted"})])
    store.change_leases([(leases[1], {"state": "leaving"})])
    assert [(lease.id, lease.state) for lease in store.active_leases()] == [
        ("l2", "leaving"),
        ("l3", "requested"),
    ]
    assert [lease.id for lease in store.list_leases()] == ["l1", "l2", "l3"]


# --- transactions ---


def test_a_transaction_is_all_or_nothing(store):
    job = new_job(store)

    def half_way():
        with store.transaction():
            store.update_job(job.id, state="running")
            with store.transaction():
                store.add_event(EventRow(1.0, "job-started", job=job.id))
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    assert store.get_job(job.id).state == "queued"
    assert store.events_since() == []
    with store.transaction():
        store.update_job(job.id, state="running")
        store.add_event(EventRow(1.0, "job-started", job=job.id))
    assert store.get_job(job.id).state == "running"
    assert len(store.events_since()) == 1


# --- the audit log ---


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM events", "UPDATE events SET kind = 'x'", "DELETE FROM events WHERE seq = 1"],
)
def test_the_database_itself_refuses_to_change_events(store, statement):
    store.add_event(EventRow(1.0, "job-started"))
    stored = store.events_since()
    assert len(stored) == 1
    with pytest.raises(StoreError, match="audit log"), store.transaction() as connection:
        connection.execute(text(statement))
    assert store.events_since() == stored


def test_events_are_read_from_a_number_on(store):
    for i in range(6):
        store.add_event(EventRow(float(i), "xyz"[i // 2], job=f"j{i % 2}"))
    assert [event.seq for event in store.events_since()] == [1, 2, 3, 4, 5, 6]
    assert [event.seq for event in store.events_since(2, limit=3)] == [3, 4, 5]
    assert [event.seq for event in store.events_since(0, job="j1")] == [2, 4, 6]
    assert [event.seq for event in store.events_since(1, kinds=("x", "z"))] == [2, 5, 6]
    assert store.events_since(0, kinds=()) == []
    assert [event.seq for event in store.last_events(2)] == [5, 6]
    assert [event.seq for event in store.last_events(2, job="j0")] == [3, 5]


# --- what was measured ---


def test_one_observation_a_scale(store):
    one, two = new_job(store), new_job(store)
    store.put_observation(ObservationRow(two.id, 1, 32.0, 5.0, 0.5, 10.0, 50.0, 0.0))
    for i in range(25):
        store.put_observation(
            ObservationRow(one.id, 1 + i % 3, 32.0, float(i), 0.5, 10.0, 320.0, float(i))
        )
    assert [(row.nodes, row.rate) for row in store.observations(one.id)] == [
        (1, 24.0),
        (2, 22.0),
        (3, 23.0),
    ]


def test_a_rescale_that_is_stored_again_replaces_the_first(store):
    job = new_job(store)
    row = RescaleRow(job.id, 1, "up", 1, 4, began=10.0, ended=11.0, cost_s=1.0)
    store.put_rescale(row)
    done = replace(row, ended=16.0, cost_s=5.5, phases={"import": 3.0})
    store.put_rescale(done)
    store.put_rescale(replace(row, generation=2, kind="loss"))
    assert store.rescales(job.id)[0] == done
    assert store.totals().rescales == {"up": 1, "loss": 1}


def test_totals(store):
    assert store.totals().samples == 0.0
    new_job(store, samples=10.0)
    new_job(store, samples=5.0)
    store.add_event(EventRow(0.0, "preempted"))
    totals = store.totals()
    assert (totals.jobs, totals.samples, totals.events) == ({"queued": 2}, 15.0, {"preempted": 1})


def test_specs_are_kept_byte_for_byte(store):
    spec = json.dumps({"z": 1, "a": [1.0, "é"]}, indent=3, ensure_ascii=False)
    job = store.add_job(JobRow(store.new_job_id(), "x", "ada", spec, "queued"))
    assert store.get_job(job.id).spec == spec


def test_the_newest_jobs_come_in_order_of_submission_too(store):
    for i in range(1, 6):
        store.add_job(
            JobRow(store.new_job_id(), f"job{i}", "me", "{}", "running" if i == 3 else "completed")
        )
    assert [j.id for j in store.list_jobs(newest=2)] == ["j4", "j5"]
    assert [j.id for j in store.list_jobs(["completed"], newest=3)] == ["j2", "j4", "j5"]
    assert store.list_jobs(newest=0) == []
    assert len(store.list_jobs(newest=100)) == 5


def test_rescales_are_counted_by_job(store):
    for _ in range(2):
        store.add_job(JobRow(store.new_job_id(), "job", "me", "{}", "running"))
    for generation in (1, 2, 3):
        store.put_rescale(RescaleRow("j2", generation, "up", 1, 2, 0.0, 1.0, 1.0))
    store.put_rescale(RescaleRow("j1", 4, "start", 0, 2, 0.0, 1.0, 1.0))  # which is no rescale
    assert store.rescale_counts() == {"j2": 3}


@pytest.mark.parametrize("text", ["x" * 70_000, "%" * 9_000, "%" * 70_000])
def test_a_text_that_is_too_long_for_a_pattern_finds_nothing(store, text):
    """SQLite refused it, and a daemon whose database refuses ends: any user could end it."""
    assert store.find_jobs(text) == []


def test_databases_of_other_versions_have_the_same_key_for_restrictions(store, tmp_path):
    store.put_restrictions('{"nodes": ["n1"]}')
    with sqlite3.connect(tmp_path / "malletrain.db") as database:
        rows = database.execute("SELECT value FROM meta WHERE key = 'restraint'").fetchall()
    assert rows == [('{"nodes": ["n1"]}',)]
