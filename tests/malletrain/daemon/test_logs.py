"""The daemon's own log, and who follows the audit log."""

from __future__ import annotations

import json
import logging
import re
import shutil

import pytest
import structlog

from malletrain.daemon.site import logs
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.store import Store
from tests.disks import fill, small_disk


@pytest.fixture
def written(capsys):
    """What was logged so far, as a function."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_lines_for_people(written):
    logs.configure("info", "text")
    log = structlog.get_logger(node="n07").bind(job="j3")
    log.debug("not shown")
    log.warning("node lost", notice=False, after=1.23456789, why="a b", empty="")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} warning node lost  job=j3 node=n07 "
        r"after=1\.23457 empty='' notice=false why='a b'\n",
        written(),
    )


def test_lines_for_a_collector(written):
    logs.configure("debug", "json")
    structlog.get_logger(lease="l1").debug("taken", path=json, n=3)
    entry = json.loads(written())
    assert (entry["event"], entry["level"], entry["lease"], entry["n"]) == (
        "taken",
        "debug",
        "l1",
        3,
    )
    assert entry["timestamp"].endswith("Z")


@pytest.mark.parametrize("fmt", logs.FORMATS)
def test_exceptions_are_written_without_the_values_of_variables(written, fmt):
    logs.configure("info", fmt)
    try:
        secret = "pass" + "word-1"
        int(secret[:0] or "x")
    except ValueError:
        structlog.get_logger().exception("it broke")
    text = written()
    assert "ValueError" in text
    assert "it broke" in text
    assert "password-1" not in text
    if fmt == "json":
        assert len(text.splitlines()) == 1


def test_libraries_take_the_same_way_and_are_quieter(written):
    logs.configure("info", "json")
    logging.getLogger("alembic.runtime").info("not shown")
    logging.getLogger("some.library").warning("told %s", "once")
    entry = json.loads(written())
    assert (entry["event"], entry["level"], entry["logger"]) == (
        "told once",
        "warning",
        "some.library",
    )


def test_a_value_cannot_forge_a_line(written):
    logs.configure("info", "text")
    structlog.get_logger().info("script said", text="x\n2026-01-01 error all is lost")
    assert len(written().splitlines()) == 1


def test_configured_twice_each_line_comes_once(written):
    logs.configure("info", "text")
    logs.configure("error", "text")
    logging.getLogger("x").error("once")
    structlog.get_logger().info("not shown")
    assert len(written().splitlines()) == 1


@pytest.mark.parametrize(("level", "fmt"), [("loud", "text"), ("info", "xml")])
def test_unknown_words_are_refused(level, fmt):
    with pytest.raises(
        ValueError,
        match="Log level is one of debug, info, warning, error and format one of text, json",
    ):
        logs.configure(level, fmt)


def test_a_log_file_is_rotated_by_its_size(written, tmp_path):
    path = tmp_path / "daemon.log"
    file = logs.RotatedLog(path, limit=1000)
    logs.configure("info", "json", file)
    for number in range(100):
        structlog.get_logger(n=number).info("a line")
        logging.getLogger("some.library").warning("another")
    file.close()
    files = sorted(path.parent.glob("daemon.log*"))
    assert [each.name for each in files] == [
        "daemon.log", *(f"daemon.log.{k}" for k in range(1, 1 + logs.MAX_OLD_FILES))
    ]  # fmt: skip
    assert all(each.stat().st_size <= 1000 for each in files)
    oldest_first = [
        line for each in [*files[:0:-1], files[0]] for line in each.read_text().splitlines()
    ]
    numbers = [entry["n"] for line in oldest_first if "n" in (entry := json.loads(line))]
    assert numbers == list(range(numbers[0], 100)), "no line is lost or torn between the files"
    assert written() == ""


def test_lines_for_a_log_file_on_a_full_disk_go_to_standard_error_and_why_is_told_once(
    written, tmp_path
):
    with small_disk(tmp_path):
        fill(tmp_path)
        file = logs.RotatedLog(tmp_path / "daemon.log", limit=1000)
        logs.configure("info", "json", file)
        for number in range(3):
            structlog.get_logger(n=number).info("a line")
        (tmp_path / "full").unlink()
        structlog.get_logger(n=3).info("a line")
        fill(tmp_path)
        file.close()
        reason, *lines = written().splitlines()
        assert reason == (
            f"malletraind: The log file {tmp_path}/daemon.log cannot be written: No space left on "
            "device. Make room on its file system. Its lines go here meanwhile."
        )
        assert [json.loads(line)["n"] for line in lines] == [0, 1, 2]
        assert json.loads((tmp_path / "daemon.log").read_text())["n"] == 3


def record(log, *sentences):
    for sentence in sentences:
        log.record(EventKind.DAEMON_STARTED, sentence)


def sentences(events):
    return [event.sentence for event in events]


def test_a_client_goes_on_after_the_database_was_replaced_by_an_older_one(tmp_path):
    database, backup = tmp_path / "s.db", tmp_path / "backup.db"
    with Store.open(f"sqlite:///{database}") as store:
        log = AuditLog(store, Clock())
        record(log, "one", "two")
    shutil.copy(database, backup)
    with Store.open(f"sqlite:///{database}") as store:
        log = AuditLog(store, Clock())
        record(log, "three", "four", "five")
        last = log.since(0, 100, None)[-1].seq
        assert log.since(last, 100, None) == [], "nothing is new"
    shutil.copy(backup, database)
    with Store.open(f"sqlite:///{database}") as store:
        log = AuditLog(store, Clock())
        assert log.since(last, 100, None) == [], "nothing happened since the start"
        record(log, "three again")
        [event] = log.since(last, 100, None)
        assert event.sentence == "three again"
        record(log, "four again")
        assert sentences(log.since(event.seq, 100, None)) == ["four again"]
        assert sentences(log.since(0, 100, None)) == ["one", "two", "three again", "four again"]
