"""A database has one daemon at a time; the second one waits, and takes over."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from malletrain.cli.db import db
from malletrain.store import copies, ownership
from malletrain.store.database import StoreError, open_engine
from malletrain.store.ownership import FENCE_S, own
from malletrain.store.store import Store
from tests import postgres
from tests.command_runner import CliRunner
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/m.db"
        return
    with postgres.running() as server:
        yield server.url


class Waiting:
    """A daemon that comes second. What it does while it waits is ``then``, once."""

    def __init__(self, url, then):
        self.then = then
        self.holders, self.slept = [], []
        self.owned = own(url, "the second", self.holders.append, sleep=self.sleep)

    def sleep(self, seconds):
        self.slept.append(seconds)
        then, self.then = self.then, lambda: None
        then()


def test_the_second_waits_and_takes_over_and_both_are_told(url):
    first = own(url, "the first", pytest.fail)
    assert first.check() == []
    seen = []

    def ends():
        seen.extend(first.check())
        first.close()

    second = Waiting(url, ends)
    assert second.holders == ["the first"]
    assert seen == ["the second"]
    assert second.owned.check() == []
    fence = [FENCE_S] if url.startswith("postgresql") else []
    assert second.slept[-len(fence) :] == fence or not fence
    second.owned.close()


def test_who_ends_leaves_it_free(url):
    for _ in range(2):
        with own(url, "one", pytest.fail), Store.open(url):
            pass


def test_an_owner_whose_connection_was_cut_begins_no_transaction(monkeypatch):
    with postgres.running() as server:
        now = 0.0
        first = own(server.url, "the first", pytest.fail, clock=lambda: now)
        store = Store.open(server.url, first.verify)
        store.boot()
        engine = open_engine(server.url)

        def of_owner(what):
            query = f"SELECT {what} FROM pg_locks WHERE locktype = 'advisory'"
            with engine.begin() as connection:
                return connection.execute(text(query)).all()

        assert of_owner("pg_terminate_backend(pid)") == [(True,)]
        until(lambda: not of_owner("pid"), "the server has closed the connection")
        engine.dispose()
        second = own(server.url, "the second", pytest.fail)
        now += FENCE_S + 1
        with pytest.raises(StoreError, match="Another daemon may have the database"):
            store.boot()
        second.close()
        first.close()


def test_an_owner_that_is_silent_for_long_is_cut_off(monkeypatch):
    """Its host has lost power: nobody closes its connection."""
    with postgres.running() as server:
        first = own(server.url, "the first", pytest.fail)
        monkeypatch.setattr("malletrain.store.ownership.SILENT_S", 0.0)
        second = Waiting(server.url, lambda: None)
        assert second.holders == ["the first"]
        with pytest.raises(StoreError, match="Another daemon may have the database"):
            first.check()
        second.owned.close()


def test_an_owner_without_a_name_for_a_moment_is_not_another_owner(monkeypatch):
    """Its connection is being closed: it has the lock, and is not in the list of connections."""

    class Ends:
        may_be_lost = False
        owners = iter(["the first", "", "the first", "the third", "", None])

        def take(self):
            return next(self.owners)

        def wait(self):
            pass

    monkeypatch.setattr(ownership, "_lock_of", lambda url, who: Ends())
    assert Waiting("postgresql://", lambda: None).holders == ["the first", "the third"]


def test_databases_without_such_a_lock_are_not_locked():
    for _ in range(2):
        assert ownership.own("sqlite://", "one", pytest.fail).check() == []


@pytest.mark.parametrize("command", [["vacuum"], ["restore", "copy.db"], ["adopt"]])
def test_commands_that_change_the_file_leave_another_daemons_alone(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/m.db"
    site = '[daemon]\nstate_dir = "state"\ndatabase = "{url}"\n[scheduler]\nkind = "local"\n'
    (tmp_path / "site.toml").write_text(site.format(url=url))
    with Store.open(url) as store:
        store.boot()
    copies.backup(url, tmp_path / "copy.db")
    arguments = [command[0], "--config", "site.toml", *command[1:]]
    with own(url, "malletraind h pid 7", pytest.fail):
        result = CliRunner().invoke(db, arguments)
    assert result.exit_code == 1
    assert "The database is in use by malletraind h pid 7. Stop it first." in result.output
    assert CliRunner().invoke(db, arguments).exit_code == 0
