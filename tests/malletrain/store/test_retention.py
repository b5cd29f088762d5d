"""What is kept no longer."""

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
        status = LeaseStatus.ENDED if ended else LeaseStatus.RUNNING
        store.put_lease(LeaseRow(store.new_lease_id(), "n", status, started=1.0, ended=ended))
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
        assert store.goals.all().keys() == {"j3", "j4", "j5"}
        assert len(store.events_since()) == 5, "the audit log stays"
        assert store.forget(250.0) == 0
        assert (store.new_job_id(), store.new_lease_id()) == ("j6", "l6"), "no id is given twice"


def test_much_goes_piece_by_piece(url, monkeypatch):
    monkeypatch.setattr("malletrain.store.store.ROWS_AT_ONCE", 1)
    with filled(url) as store:
        cleanup = Retention(store, keep_s=1000.0)
        assert cleanup.look(1450.0) == 2
        assert cleanup.look(1450.0 + NEXT_BATCH_S / 2) == 0
        assert [cleanup.look(1450.0 + NEXT_BATCH_S * k) for k in (1, 2, 3, 4)] == [2, 2, 2, 0]
        assert [job.id for job in store.list_jobs()] == ["j5"], "one that runs is never old"
        assert cleanup.look(1450.0 + INTERVAL_S) == 0


def test_for_ever(url):
    with filled(url) as store:
        assert Retention(store, keep_s=0.0).look(1e12) == 0
        assert len(store.list_jobs()) == 5


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
