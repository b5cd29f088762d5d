"""Copies of a database in use: whole, of one moment, private, and never in the place of anything
else.
"""

from __future__ import annotations

import io
import json
import os
import stat
import threading

import pytest

from malletrain.cli import main
from malletrain.identity.state_directory import lock_state_dir
from malletrain.store.copies import CopyError, backup, check, export, restore
from malletrain.store.records import EventRow
from malletrain.store.store import Store
from tests.command_runner import CliRunner
from tests.malletrain.store.conftest import new_job


def jobs_in(url):
    with Store.open(url) as store:
        return [row.name for row in store.list_jobs()]


def test_a_copy_is_of_one_moment_whatever_is_written_meanwhile(store, url, tmp_path):
    stop = threading.Event()
    written = threading.Event()

    def write():
        with Store.open(url) as other:
            while not stop.is_set():
                with other.transaction():  # a job and its event: both or none
                    row = new_job(other)
                    other.add_event(EventRow(1.0, "job-submitted", row.id, "", "", None, {}))
                written.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        written.wait()
        copies = [tmp_path / f"copy{k}.db" for k in range(3)]
        for copy in copies:
            assert backup(url, copy) == copy.stat().st_size
    finally:
        stop.set()
        writer.join()
    for copy in copies:
        with Store.open(f"sqlite:///{copy}") as copied_store:
            rows = copied_store.list_jobs()
            assert rows
            assert {row.id for row in rows} == {e.job for e in copied_store.events_since(0, 10**6)}


def test_a_copy_is_private_and_replaces_nothing(store, url, tmp_path):
    copy = tmp_path / "copy.db"
    backup(url, copy)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with pytest.raises(CopyError, match="exists already"):
        backup(url, copy)
    assert [name for name in os.listdir(tmp_path) if "part" in name] == []


def test_restoring_brings_back_what_was_and_keeps_what_is(url, tmp_path):
    with Store.open(url) as store:
        new_job(store, "before")
        backup(url, tmp_path / "copy.db")
        new_job(store, "after")
        [younger] = store.new_lease_ids(1)
    former = restore(url, tmp_path / "copy.db")
    assert jobs_in(url) == ["before"]
    with Store.open(url) as store:  # the younger lease still runs, and no other may get its id
        assert int(store.new_lease_ids(1)[0][1:]) > int(younger[1:]) + 900
    assert former is not None
    assert jobs_in(f"sqlite:///{former}") == ["before", "after"]


def test_restoring_where_nothing_was(store, url, tmp_path):
    new_job(store, "before")
    backup(url, tmp_path / "copy.db")
    elsewhere = f"sqlite:///{tmp_path}/new/malletrain.db"
    assert restore(elsewhere, tmp_path / "copy.db") is None
    assert jobs_in(elsewhere) == ["before"]


def test_what_is_not_whole_is_neither_copied_nor_restored(url, tmp_path):
    with Store.open(url) as store:
        for _ in range(200):
            new_job(store)
    good = tmp_path / "good.db"
    backup(url, good)
    torn = tmp_path / "torn.db"
    data = bytearray(good.read_bytes())
    data[8192:12288] = os.urandom(4096)
    torn.write_bytes(data)
    (tmp_path / "empty.db").touch()
    for bad in (torn, tmp_path / "empty.db", tmp_path / "copy.db"):
        with pytest.raises(CopyError):
            check(f"sqlite:///{bad}")
    for bad in (torn, tmp_path / "empty.db"):
        with pytest.raises(CopyError):
            restore(url, bad)
    assert len(jobs_in(url)) == 200
    with pytest.raises(CopyError):
        backup(f"sqlite:///{torn}", tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_what_is_in_it(store, url):
    row = new_job(store)
    store.add_event(EventRow(1.0, "job-submitted", row.id, "", "", None, {"sentence": "so"}))
    assert "is whole: 1 job, 0 leases, 1 event; schema" in check(url)
    out = io.StringIO()
    export(url, out)
    job, event = map(json.loads, out.getvalue().splitlines())
    assert (job["table"], job["id"], job["spec"]) == ("jobs", row.id, {"script": "train.py"})
    assert (event["table"], event["kind"], event["data"]) == (
        "events",
        "job-submitted",
        {"sentence": "so"},
    )


def test_other_databases_have_tools_of_their_own(tmp_path):
    with pytest.raises(CopyError, match="pg_dump") as refused:
        backup("postgresql://ann:secret@db/malletrain", tmp_path / "copy.db")
    assert "secret" not in str(refused.value)


def test_nothing_is_restored_under_a_daemon(tmp_path):
    state = tmp_path / "state"
    config = tmp_path / "site.toml"
    config.write_text(
        f'[daemon]\nstate_dir = "{state}"\n[scheduler]\nkind = "local"\n[scheduler.local]\nnodes=1'
    )
    run = CliRunner()
    with lock_state_dir(state), Store.open(f"sqlite:///{state}/malletrain.db") as store:
        new_job(store, "one")
        copied = run.invoke(
            main, ["db", "backup", "--config", str(config), str(tmp_path / "copy.db")]
        )
        assert copied.exit_code == 0, copied.output
        new_job(store, "two")
        again = ["db", "restore", "--config", str(config), str(tmp_path / "copy.db")]
        refused = run.invoke(main, again)
        assert refused.exit_code == 1
        assert "Another daemon" in refused.output
    assert run.invoke(main, again).exit_code == 0
    assert jobs_in(f"sqlite:///{state}/malletrain.db") == ["one"]
    result = run.invoke(main, ["db", "check", "--config", str(config)])
    assert "1 job," in result.output


def test_text_that_looks_like_json_is_exported_as_text(store, url):
    row = new_job(store)
    store.update_job(row.id, reason='["worker 1 failed"]')
    out = io.StringIO()
    export(url, out)
    assert json.loads(out.getvalue().splitlines()[0])["reason"] == '["worker 1 failed"]'


def test_a_copy_that_is_not_there_is_not_made(url, tmp_path):
    with pytest.raises(CopyError, match="There is no file"):
        restore(url, tmp_path / "nothing.db")
    assert not (tmp_path / "nothing.db").exists()


def test_a_database_behind_a_link_is_restored_where_it_is(tmp_path):
    """The database is on a disk of its own; its side files are beside the file, not the link."""
    disk, state = tmp_path / "disk", tmp_path / "state"
    disk.mkdir()
    state.mkdir()
    link = state / "malletrain.db"
    link.symlink_to(disk / "malletrain.db")
    url = f"sqlite:///{link}"
    with Store.open(url) as store:
        new_job(store, "one")
    copy = tmp_path / "copy.db"
    backup(url, copy)
    with Store.open(url) as store:
        new_job(store, "two")
    restored = restore(url, copy)
    assert restored is not None
    assert link.is_symlink()
    assert restored.parent == disk
    assert jobs_in(url) == ["one"]
    assert sorted(jobs_in(f"sqlite:///{restored}")) == ["one", "two"]
