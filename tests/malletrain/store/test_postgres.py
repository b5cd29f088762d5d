"""A real PostgreSQL that is restarted while a store uses it."""

from __future__ import annotations

import contextlib
import itertools
import socket

import pytest

from malletrain.store.database import SERVER_WAITS, open_engine
from malletrain.store.store import Store, StoreError
from tests import postgres
from tests.malletrain.store.conftest import new_job
from tests.malletrain.store.test_migrations import kill_through_the_migration
from tests.malletrain.store.test_task_table import check_life_of_tasks
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with postgres.running() as server:
        yield server


NUMBERS = itertools.count()


@pytest.fixture
def empty(server):
    """URL of a database without the jobs of other tests."""
    name = f"empty{next(NUMBERS)}"
    engine = open_engine(server.url)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return server.url.replace("/postgres?", f"/{name}?")


@contextlib.contextmanager
def frozen(server):
    """Within the block the server's processes are stopped, and connections time out early: not
    before it, when a slow machine has to answer.
    """
    import psycopg

    connect = psycopg.Connection.connect.__func__

    def connect_or_time_out(kind, *arguments, **parameters):
        return connect(kind, *arguments, **{**parameters, "connect_timeout": 2})

    with server.stopped(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Connection, "connect", classmethod(connect_or_time_out))
        patch.setattr(psycopg, "connect", psycopg.Connection.connect)
        yield


def test_a_server_whose_host_is_silent_is_waited_for_as_long_as_a_locked_file(server):
    for url, least in ((server.url, 10), (f"{server.url}&connect_timeout=7", 7)):
        engine = open_engine(url)
        with engine.connect() as connection:
            parameters = connection.connection.driver_connection.info.get_parameters()
        engine.dispose()
        waits = {**SERVER_WAITS, "connect_timeout": least}
        assert {name: int(parameters[name]) for name in waits} == waits


def test_who_holds_a_lock_does_not_hold_the_daemon_for_ever(empty, monkeypatch):
    monkeypatch.setattr("malletrain.store.database.BUSY_TIMEOUT_MS", 100)
    with Store.open(empty) as store, Store.open(empty) as forgotten:
        with forgotten.transaction() as holder:
            holder.exec_driver_sql("LOCK TABLE jobs")
            with pytest.raises(StoreError, match=r"lock timeout.*pg_stat_activity"):
                store.list_jobs()
        assert store.list_jobs() == []


def cut_short(store, outage):
    """A transaction in which an outage of the server begins."""
    with store.transaction():
        new_job(store, name="lost")
        outage()
        new_job(store, name="lost, too")


def test_a_daemon_killed_while_it_migrates_leaves_what_was(empty):
    kill_through_the_migration(empty)


def test_a_server_that_is_restarted_costs_the_transaction_under_way_and_no_other(server, empty):
    with Store.open(empty) as store:
        job = new_job(store, name="before")
        server.stop()
        server.start()
        assert store.get_job(job.id) == job, "between two transactions nobody notices"
        with pytest.raises(StoreError, match="Nothing of this transaction was saved"):
            cut_short(store, server.stop)
        with pytest.raises(StoreError, match=r"refused: .*Start its server"):
            store.list_jobs()
        server.start()
        assert [row.name for row in store.list_jobs()] == ["before"]
        assert new_job(store, name="after").id == "j2"
    with Store.open(empty) as store:
        assert [row.name for row in store.list_jobs()] == ["before", "after"]


def test_a_standby_is_named_as_such(server):
    """A standby answers reads, and refuses writes with the same words (SQLSTATE 25006)."""
    with Store.open(server.url):
        pass
    standby = f"{server.url}&options=-c%20default_transaction_read_only%3Don"
    with (
        pytest.raises(StoreError, match=r"read-only transaction.*target_session_attrs=read-write"),
        Store.open(standby) as store,
    ):
        new_job(store)


def test_tasks_of_farms(server):
    with Store.open(server.url) as store:
        check_life_of_tasks(store)


def test_a_server_that_has_stopped_is_lost_and_a_slow_one_is_waited_for(server, monkeypatch):
    monkeypatch.setattr("malletrain.store.database.SILENCE_S", 0.2)
    with Store.open(f"{server.url}&connect_timeout={PATIENCE_S:.0f}") as store:
        job = new_job(store)
        with store.transaction() as connection:
            assert connection.exec_driver_sql("SELECT pg_sleep(1.5), 7").scalar_one_or_none() == ""
        with contextlib.ExitStack() as outage:
            with pytest.raises(
                StoreError, match=r"no answer for 0.2 s, nor to 2 .*Start its server"
            ):
                cut_short(store, lambda: outage.enter_context(frozen(server)))
            with pytest.raises(StoreError, match=r"timeout.*Start its server"):
                store.get_job(job.id)
        assert store.get_job(job.id) == job
        assert "lost" not in [row.name for row in store.list_jobs()]


def test_a_stopped_server_is_lost_although_the_url_names_another_one(server, monkeypatch):
    """The other one refuses connections, and a refusal by the silent one is an answer."""
    monkeypatch.setattr("malletrain.store.database.SILENCE_S", 0.2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        hosts = f"{server.folder},127.0.0.1&port=5432,{other.getsockname()[1]}"
        url = server.url.replace(
            f"host={server.folder}", f"host={hosts}&connect_timeout={PATIENCE_S:.0f}"
        )
        with (
            Store.open(url) as store,
            contextlib.ExitStack() as outage,
            pytest.raises(StoreError, match="nor to 2 other connections"),
        ):
            cut_short(store, lambda: outage.enter_context(frozen(server)))


@pytest.mark.parametrize(
    ("given_s", "used_s"), [("", 10), ("&connect_timeout=0", 10), ("&connect_timeout=7", 7)]
)
def test_a_server_is_waited_for_if_one_attempt_of_two_times_out(
    server, monkeypatch, given_s, used_s
):
    attempts = []

    def connect(*arguments, **parameters):
        attempts.append(parameters)
        if len(attempts) % 2:
            raise psycopg.errors.ConnectionTimeout("connection timeout expired")
        return psycopg.Connection.connect(*arguments, **parameters)

    monkeypatch.setattr("malletrain.store.database.SILENCE_S", 0.1)
    psycopg = pytest.importorskip("psycopg", reason="needs pip install malletrain[postgres]")
    monkeypatch.setattr(psycopg, "connect", connect)
    with Store.open(f"{server.url}{given_s}") as store, store.transaction() as connection:
        assert connection.exec_driver_sql("SELECT pg_sleep(2), 7").scalar_one_or_none() == ""
    assert len(attempts) > 2
    assert {each["connect_timeout"] for each in attempts} == {used_s}
    assert {each["host"] for each in attempts} == {str(server.folder)}
