import itertools
import os
import signal
import subprocess
import sys

import pytest
from sqlalchemy import Engine, event, text

from malletrain.protocol.event_kinds import EventKind
from malletrain.store import copies, migrations, schema
from malletrain.store.database import open_engine, schema_version
from malletrain.store.records import GoalRow, NodeSpanRow
from malletrain.store.schema import HEAD
from malletrain.store.store import EventRow, JobRow, Store, StoreError


def at_version(url: str, revision: str):
    """An engine on a database that Alembic brought to ``revision``."""
    engine = open_engine(url)
    with engine.begin() as connection:
        migrations.upgrade(connection, revision)
        assert schema_version(connection) == revision
    return engine


FIRST_JOB = (
    "INSERT INTO jobs (id, number, name, owner, spec, state, reason, submitted, generation, "
    "planned_nodes, members, tries, samples, "
    "samples_before, node_seconds, metrics, notices, snapshot, failure) "
    "VALUES ('j7', 7, 'old', 'ada', '{}', 'running', '', 1.5, 3, '[\"a\"]', '[\"a\"]', 0, 9.0, "
    "4.0, 2.0, '{}', '[]', '{}', '')"
)


def test_what_the_first_version_stored_is_there_after_every_later_step(url):
    engine = at_version(url, "0001")
    with engine.begin() as connection:
        connection.execute(text(FIRST_JOB))
        connection.execute(text("INSERT INTO meta VALUES ('last_job', '7')"))
        connection.execute(
            text(
                "INSERT INTO events (time, kind, job, node, lease, data) VALUES (2.0, "
                "'job-started', 'j7', 'a', '', '{\"x\": 1}')"
            )
        )
    engine.dispose()
    with Store.open(url) as store:
        job = store.get_job("j7")
        assert (job.name, job.state, job.generation, job.planned_nodes, job.samples) == (
            "old",
            "running",
            3,
            ("a",),
            9.0,
        )
        assert store.events_since() == [
            EventRow(2.0, "job-started", job="j7", node="a", data={"x": 1}, seq=1)
        ]
        assert store.new_job_id() == "j8"
        with store.transaction() as connection:
            assert schema_version(connection) == HEAD


def killed_at(url: str, number: int) -> bool:
    """Open the database in a process that is killed before its statement of this number; whether it
    came that far.
    """
    child = os.fork()
    if child == 0:
        statements = itertools.count(1)

        @event.listens_for(Engine, "before_cursor_execute")
        def killed(*_):
            if next(statements) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            Store.open(url)
            os._exit(0)
        finally:
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def kill_through_the_migration(url: str) -> None:
    """Kill a daemon that migrates, at one statement after another. Each time the database is either
    unchanged or migrated.
    """
    engine = at_version(url, "0001")
    with engine.begin() as connection:
        connection.execute(text(FIRST_JOB))
    engine.dispose()
    number = 1
    while killed_at(url, number):
        with engine.connect() as connection:
            assert schema_version(connection) == "0001"
            result = connection.execute(text("SELECT count(*) FROM jobs WHERE id = 'j7'"))
            assert result.scalar() == 1
        engine.dispose()
        number += 4
    assert number > 20, "there were steps to be killed at"
    with Store.open(url) as store:
        assert store.get_job("j7").samples == 9.0


def test_a_daemon_killed_while_it_migrates_leaves_what_was(url):
    kill_through_the_migration(url)


def test_kinds_of_events_from_before_they_were_renamed_are_shown_by_their_new_names(url):
    engine = at_version(url, "0001")
    old = ["node-unfit", "job-broke", "job-interrupted", "lease-given-back", "node-lost"]
    with engine.begin() as connection:
        for kind in old:
            connection.execute(
                text(
                    "INSERT INTO events (time, kind, job, node, lease, data) VALUES (2.0, :kind, "
                    "'j7', 'a', '', '{\"x\": 1}')"
                ),
                {"kind": kind},
            )
    engine.dispose()
    with Store.open(url) as store:
        events = store.events_since()
        assert [(e.seq, e.kind) for e in events] == [
            (1, "node-rejected"),
            (2, "workers-failed"),
            (3, "nodes-donated"),
            (4, "lease-released"),
            (5, "node-lost"),
        ]
        assert {(e.time, e.job, e.node, e.data["x"]) for e in events} == {(2.0, "j7", "a", 1)}
        assert {EventKind(e.kind) for e in events} <= set(EventKind)
        for statement in ("UPDATE events SET kind = 'x'", "DELETE FROM events"):
            with pytest.raises(StoreError, match="audit log"), store.transaction() as connection:
                connection.execute(text(statement))
        assert store.events_since() == events


def test_the_code_knows_its_newest_step():
    assert migrations.versions()[-1] == HEAD
    assert migrations.versions() == sorted(migrations.versions())


def test_the_steps_lead_to_the_tables_that_the_code_uses(url):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = at_version(url, HEAD)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_opening_twice_changes_nothing(url):
    with Store.open(url) as store:
        store.add_job(JobRow("j1", "x", "ada", "{}", "queued"))
    with Store.open(url) as store:
        assert [job.id for job in store.list_jobs()] == ["j1"]


def test_a_later_version_is_refused_and_left_alone(url):
    engine = at_version(url, HEAD)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9876'"))
    with pytest.raises(
        StoreError,
        match=f"schema version 9876; this malletrain knows versions up to {HEAD}.*later malletrain",
    ):
        Store.open(url)
    with engine.connect() as connection:
        assert schema_version(connection) == "9876"
    engine.dispose()


def test_a_step_that_fails_leaves_nothing_behind(url):
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE rescales (somebody_elses INTEGER)")
        )  # the last table of the first step
    with pytest.raises(StoreError, match=r"already exists.*Nothing of this transaction was saved"):
        Store.open(url)
    with engine.connect() as connection:
        tables = (
            connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))
            .scalars()
            .all()
        )
    assert tables == ["rescales"]
    engine.dispose()


def test_no_migration_no_alembic(url):
    """Alembic costs 12 MB of memory; a start on a database that is up to date does without."""
    Store.open(url).close()
    code = (
        f"import sys; from malletrain.store.store import Store; Store.open({url!r}); "
        "print('alembic' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


def test_goals_and_node_history_come_back_from_a_database_that_had_none(url):
    engine = at_version(url, "0002")
    with engine.begin() as connection:
        connection.execute(
            text(FIRST_JOB.replace("node_seconds, ", "").replace("2.0, '{}'", "'{}'"))
        )
    engine.dispose()
    goal = GoalRow("j7", 1e9, 7200.0, 1e6, 1, 36.5, 1e8, "on_track")
    with Store.open(url) as store:
        assert store.goals.all() == {}
        assert store.goals.of("j7") is None
        store.goals.put(GoalRow("j7"))
        store.goals.put(goal)
        old, new = NodeSpanRow(100.0, "default", 3.5), NodeSpanRow(400.0, "default", 4.0)
        store.goals.put_spans([old], forget_before=0.0)
        store.goals.put_spans([new], forget_before=50.0)
        assert store.goals.spans(0.0) == [old, new]
        store.goals.put_spans([], forget_before=200.0)
    with Store.open(url) as store:
        assert store.goals.all() == {"j7": goal}
        assert store.goals.spans(0.0) == [new]


@pytest.mark.parametrize("version", migrations.versions()[:-1])
def test_an_upgrade_from_each_version_can_be_taken_back(tmp_path, url, version):
    engine = at_version(url, version)
    columns = {"node_seconds, ": "", "2.0, '{}'": "'{}'"} if version > "0001" else {}
    insert = FIRST_JOB
    for old, new in columns.items():
        insert = insert.replace(old, new)
    with engine.begin() as connection:
        connection.execute(text(insert))
    engine.dispose()
    with Store.open(url) as store:
        assert store.get_job("j7").samples == 9.0
        store.add_job(JobRow("j8", "new", "ada", "{}", "queued"))
    (backup,) = tmp_path.glob(f"malletrain.db.schema-{version}-*")
    assert backup.stat().st_mode & 0o077 == 0

    # Back: what the earlier malletrain knew, in its own tables; and once more to the newest.
    copies.restore(url, backup)
    engine = open_engine(url)
    with engine.begin() as connection:
        assert schema_version(connection) == version
        assert connection.execute(text("SELECT id FROM jobs")).scalars().all() == ["j7"]
    engine.dispose()
    with Store.open(url) as store:
        assert [job.id for job in store.list_jobs()] == ["j7"]


def test_without_room_for_a_copy_nothing_is_migrated(tmp_path, url, monkeypatch):
    at_version(url, "0001").dispose()

    def full(url, target):
        raise copies.CopyError("No space left on device.")

    monkeypatch.setattr(copies, "backup", full)
    with pytest.raises(
        StoreError, match=r"cannot be copied before: No space left.* Nothing has changed"
    ):
        Store.open(url)
    engine = open_engine(url)
    with engine.begin() as connection:
        assert schema_version(connection) == "0001"
    engine.dispose()


def test_a_start_removes_what_interrupted_copies_have_left(tmp_path, url):
    at_version(url, "0001").dispose()
    ended = subprocess.Popen(["true"])
    ended.wait()
    name = f".malletrain.db.schema-0001-20261128-101500-000000.{ended.pid}.part"
    stale_parts = [tmp_path / name, tmp_path / f"{name}-wal"]
    other_parts = [
        tmp_path / name.replace(str(ended.pid), str(os.getppid())),
        tmp_path / ".notes.1.part",
    ]
    for path in (*stale_parts, *other_parts):
        path.touch()
    Store.open(url).close()
    assert not any(path.exists() for path in stale_parts)
    assert all(path.exists() for path in other_parts)
