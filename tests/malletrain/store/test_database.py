"""The database itself: kill -9, two writers, a full disk, and files that are none."""

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from malletrain.store import copies, database
from malletrain.store.copies import CopyError, check
from malletrain.store.database import open_engine
from malletrain.store.ownership import own
from malletrain.store.session import Session
from malletrain.store.store import Store, StoreError
from tests.malletrain.store.conftest import new_job

pytestmark = pytest.mark.slow

WRITER = """
import os, sys
from malletrain.store.records import EventRow, JobRow
from malletrain.store.store import Store
store = Store.open(sys.argv[1])
job = store.add_job(JobRow(store.new_job_id(), "x", "ada", "{}", "running"))
n = 0
while n != int(sys.argv[2]):
    n += 1
    with store.transaction():
        store.update_job(job.id, generation=n)
        store.add_event(EventRow(float(n), "step", job=job.id, data={"pad": "x" * 3000}))
    os.write(1, f"{job.id} {n}\\n".encode())
"""


@contextmanager
def writer(url: str, steps: int = -1):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url, str(steps)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("lines", [1, 17, 400])
def test_kill_9_loses_nothing_that_was_committed(url, lines):
    with writer(url) as process:
        for _ in range(lines):
            job, number = process.stdout.readline().split()
        os.kill(process.pid, signal.SIGKILL)
        for line in process.stdout:  # what it committed before the signal arrived
            job, number = line.split()
        process.wait()
    with Store.open(url) as store:
        generation = store.get_job(job).generation
        steps = [event.time for event in store.events_since(0, limit=100_000, job=job)]
        # The last step may have been committed and not yet printed.
        assert int(number) <= generation <= int(number) + 1
        assert steps == [float(n) for n in range(1, generation + 1)]


def test_two_processes_write_without_losing_anything(url):
    with writer(url, 150) as one, writer(url, 150) as two:
        outputs = [process.communicate()[0].splitlines() for process in (one, two)]
    assert [len(lines) for lines in outputs] == [150, 150]
    with Store.open(url) as store:
        assert sorted(job.id for job in store.list_jobs()) == ["j1", "j2"]
        assert [job.generation for job in store.list_jobs()] == [150, 150]
        seqs = [event.seq for event in store.events_since(0, limit=1000)]
        assert len(seqs) == len(set(seqs)) == 300


def test_a_full_disk_is_told_and_changes_nothing(store):
    job = new_job(store)
    with store.transaction() as connection:
        pages = connection.execute(text("PRAGMA page_count")).scalar()
        connection.execute(text(f"PRAGMA max_page_count={pages}"))
    with pytest.raises(StoreError, match=r"full.*Nothing of this transaction was saved"):
        store.update_job(job.id, failure="x" * 1_000_000)
    assert store.get_job(job.id) == job


# --- opening ---


def test_the_file_is_private_and_safe(url, tmp_path):
    with Store.open(url) as store, store.transaction() as connection:
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
        assert pragmas == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1}
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:////dev/null/x.db", "cannot be opened"),
        ("nonsense", "not the URL of a database"),
        ("oracel://x", "not the URL of a database"),
        ("mysql+mysqldb://x/y", "driver.*not installed"),
    ],
)
def test_databases_that_cannot_be_opened(url, words):
    with pytest.raises(StoreError, match=words):
        Store.open(url)


def test_a_file_that_is_no_database(tmp_path):
    (tmp_path / "x.db").write_text(
        "this is a letter and not a database, whatever its name says" * 20
    )
    with pytest.raises(StoreError, match="not a database"):
        Store.open(f"sqlite:///{tmp_path}/x.db")


def test_a_damaged_database_is_told_with_the_way_back(store, url, tmp_path):
    for number in range(50):
        new_job(store, name=f"job{number}", failure="x" * 5000)
    copy = tmp_path / "copy.db"
    copies.backup(url, copy)
    with store.transaction() as connection:
        connection.execute(text("SELECT 1"))
    store.close()
    path = tmp_path / "malletrain.db"
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)
    with (
        pytest.raises(StoreError, match="malletrain db restore --config FILE COPY"),
        Store.open(url) as opened,
    ):
        opened.list_jobs()
    damaged = path.read_bytes()
    former = copies.restore(url, copy)
    assert former.read_bytes() == damaged
    with Store.open(url) as opened:
        assert len(opened.list_jobs()) == 50


def test_a_database_that_another_process_holds_is_told(store, url, tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 20)
    with contextlib.closing(sqlite3.connect(tmp_path / "malletrain.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"is locked.*`fuser` on the file names it"):
            Store.open(url)
    Store.open(url).close()


def test_several_that_open_a_new_database_at_once_all_can(tmp_path):
    """Turning the write-ahead log on takes a lock that SQLite itself does not wait for."""

    def opened(number: int, gate: threading.Barrier) -> str:
        gate.wait()
        with Store.open(f"sqlite:///{tmp_path}/new{number}.db") as store:
            return new_job(store).id

    with ThreadPoolExecutor(6) as pool:
        for number in range(30):
            gate = threading.Barrier(6)
            job_ids = list(pool.map(opened, [number] * 6, [gate] * 6))
            assert len(set(job_ids)) == 6


def parse_and_open(url):
    """As the daemon does; there is no lock of an unknown kind of database."""
    with own(url, "me", print):
        Store.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://ann:s3cret@db/m",
        "postgresql://ann:s3cret@db:port/m",
        "postgresql://ann:abc/s3cret",
        "nonsense://ann:s3cret@db",
        "postgresql+nodriver://ann@/m?password=s3cret",
    ],
)
def test_an_unusable_url_is_told_without_its_password(url):
    for use in (open_engine, parse_and_open):
        with pytest.raises(StoreError, match="is not the URL of a database") as refused:
            use(url)
        assert "s3cret" not in str(refused.value)
    with pytest.raises(CopyError, match=r"is not the URL of a database|pg_dump") as refused:
        check(url)
    assert "s3cret" not in str(refused.value)


def test_a_password_among_the_parameters_is_not_shown():
    session = Session(open_engine("postgresql+psycopg://ann@/m?password=s3cret&host=db"))
    assert session.url == "postgresql+psycopg://ann@/m?host=db&password=***"
