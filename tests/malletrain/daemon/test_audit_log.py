"""Who follows the audit log."""

import shutil

from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.store import Store


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
