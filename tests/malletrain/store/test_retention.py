"""What is kept no longer."""

import os

from malletrain.daemon.jobs.logsink import delete_old_logs
from malletrain.daemon.jobs.repository import INTERVAL_S, NEXT_BATCH_S, Retention
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.store import copies
from malletrain.store.records import (
    EventRow,
    GoalRow,
    JobRow,
    LeaseRow,
    ObservationRow,
    ProfileRow,
    RescaleRow,
    ServiceStartsRow,
)
from malletrain.store.store import Store


def filled(url):
    """Jobs and leases that ended at 100, 200, … and one of each that has not ended."""
    store = Store.open(url)
    for k in range(1, 6):
        ended = 100.0 * k if k < 5 else None
        state = "completed" if ended else "running"
        store.add_job(JobRow(store.new_job_id(), "j", "ann", "{}", state, ended=ended))
        store.put_observation(ObservationRow(f"j{k}", 2, 8.0, 1.0, 0.1, 9.0, 9.0, 50.0))
        store.put_rescale(RescaleRow(f"j{k}", 1, "start", 0, 2, 50.0, 51.0, 1.0))
        store.put_profile(ProfileRow(f"j{k}"))
        store.goals.put(GoalRow(f"j{k}"))
        store.service_starts.put(ServiceStartsRow(f"j{k}", "default", (3.0, 4.5)))
        status = LeaseStatus.ENDED if ended else LeaseStatus.RUNNING
        [lease_id] = store.new_lease_ids(1)
        store.add_leases([LeaseRow(lease_id, "n", status, started=1.0, ended=ended)])
        store.add_event(EventRow(50.0, EventKind.JOB_STARTED, job=f"j{k}"))
    return store


def test_what_ended_before_goes_with_all_that_was_measured(url):
    with filled(url) as store:
        assert store.forget(250.0) == 4
        assert [job.id for job in store.list_jobs()] == ["j3", "j4", "j5"]
        assert [lease.id for lease in store.list_leases()] == ["l3", "l4", "l5"]
        assert (store.observations("j2"), store.rescales("j2"), store.profile("j2")) == (
            [],
            [],
            None,
        )
        assert store.observations("j3")
        assert store.service_starts.of("j2") == {}
        assert store.service_starts.of("j3") == {"default": (3.0, 4.5)}
        assert store.goals.all().keys() == {"j3", "j4", "j5"}
        assert len(store.events_since()) == 5, "the audit log stays"
        assert store.forget(250.0) == 0
        assert (store.new_job_id(), *store.new_lease_ids(1)) == ("j6", "l6"), "no id is given twice"


def test_much_goes_piece_by_piece(url, monkeypatch, tmp_path):
    monkeypatch.setattr("malletrain.store.store.ROWS_AT_ONCE", 1)
    with filled(url) as store:
        cleanup = Retention(store, tmp_path / "logs", keep_s=1000.0, keep_logs_s=0.0)
        assert cleanup.delete_old(1450.0) == 2
        assert cleanup.delete_old(1450.0 + NEXT_BATCH_S / 2) == 0
        assert [cleanup.delete_old(1450.0 + NEXT_BATCH_S * k) for k in (1, 2, 3, 4)] == [2, 2, 2, 0]
        assert [job.id for job in store.list_jobs()] == ["j5"], "one that runs is never old"
        assert cleanup.delete_old(1450.0 + INTERVAL_S) == 0


def test_for_ever(url, tmp_path):
    logs = written_logs(tmp_path, j1=100.0)
    with filled(url) as store:
        assert Retention(store, logs, keep_s=0.0, keep_logs_s=0.0).delete_old(1e12) == 0
        assert len(store.list_jobs()) == 5
    assert names(logs) == ["j1"]


def written_logs(folder, **last_writes):
    """Folders of logs as the daemon writes them, by job id and time of the last write."""
    for job, last_write in last_writes.items():
        (folder / "logs" / job).mkdir(parents=True)
        for name, age in (("g1-rank0@n1.log", 5.0), ("g1-rank1@n1.log", 0.0)):
            file = folder / "logs" / job / name
            file.write_text("a line\n")
            os.utime(file, (last_write - age, last_write - age))
        os.utime(file.parent, (last_write - 10.0, last_write - 10.0))
    return folder / "logs"


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_logs_of_ended_jobs_are_deleted_after_their_time(url, tmp_path):
    logs = written_logs(tmp_path, j1=100.0, j2=200.0, j5=100.0, j77=300.0, j78=1.0)
    with filled(url) as store:
        cleanup = Retention(store, logs, keep_s=0.0, keep_logs_s=1000.0)
        assert cleanup.delete_old(1150.0) == 2
        assert names(logs) == ["j2", "j5", "j77"], "j5 has not ended, j77 is recent"
        assert cleanup.delete_old(1150.0 + NEXT_BATCH_S) == 0
        assert cleanup.delete_old(1350.0 + INTERVAL_S) == 2
    assert names(logs) == ["j5"]


def test_logs_go_with_their_job(url, tmp_path):
    logs = written_logs(tmp_path, j1=100.0, j2=2000.0)
    with filled(url) as store:
        Retention(store, logs, keep_s=1000.0, keep_logs_s=5000.0).delete_old(1150.0)
        assert "j1" not in [job.id for job in store.list_jobs()]
    assert names(logs) == ["j2"]


def test_logs_that_cannot_be_read_keep_no_others(tmp_path, monkeypatch):
    """Such as those that an operator deletes at the same time."""
    logs = written_logs(tmp_path, j1=1.0, j2=1.0, j3=1.0)

    def last_write(folder):
        if folder.name == "j2":
            raise FileNotFoundError(folder.path)
        return 1.0

    monkeypatch.setattr("malletrain.daemon.jobs.logsink._last_write", last_write)
    assert delete_old_logs(logs, 10.0, ()) == 2
    assert names(logs) == ["j2"]


def test_many_logs_are_deleted_in_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("malletrain.daemon.jobs.logsink.JOBS_AT_ONCE", 2)
    logs = written_logs(tmp_path, **{f"j{k}": 1.0 for k in range(5)})
    assert [delete_old_logs(logs, 10.0, ()) for _ in range(4)] == [2, 2, 1, 0]
    assert delete_old_logs(tmp_path / "none", 10.0, ()) == 0


def test_a_vacuum_gives_back_the_room_and_keeps_the_rest(url, tmp_path):
    with filled(url) as store, store.transaction():
        for _ in range(3000):
            store.add_job(
                JobRow(store.new_job_id(), "x" * 200, "ann", "{}", "completed", ended=1.0)
            )
    with Store.open(url) as store:
        while store.forget(250.0):
            pass
        remaining = [job.id for job in store.list_jobs()], store.events_since()
    before, after = copies.vacuum(url)
    assert after < before / 2
    assert after == (tmp_path / "malletrain.db").stat().st_size
    with Store.open(url) as store:
        assert ([job.id for job in store.list_jobs()], store.events_since()) == remaining
