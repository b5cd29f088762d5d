"""What the store remembers, added up."""

import asyncio

import pytest

from malletrain.daemon.api import usage
from malletrain.daemon.api.usage import ClassCharge, NodePower, usage_views
from malletrain.protocol.event_kinds import EventKind, LeaseStatus
from malletrain.store.records import EventRow, JobRow, LeaseRow, RescaleRow
from malletrain.store.store import Store

T = 1_795_000_000.0
HOUR = 3600.0


def lease(store, number, node, begin, end, **more):
    state = LeaseStatus.RUNNING if end is None else LeaseStatus.ENDED
    row = LeaseRow(f"l{number}", node, state, requested=T + begin, started=T + begin, ended=end)
    store.add_leases([LeaseRow(**{**vars(row), **more, "ended": None if end is None else T + end})])


def event(store, kind, at, **data):
    store.add_event(EventRow(T + at, kind, job="j1", data=data))


@pytest.fixture
def store(tmp_path):
    """Ann's job on two a100 nodes for an hour; her own lease of another class stays unused. A lease
    of the daemon's own user has not ended.
    """
    with Store.open(f"sqlite:///{tmp_path}/s.db") as opened:
        lease(opened, 1, "n1", 0, HOUR, owner="ann", node_class="a100")
        lease(opened, 2, "n2", 0, HOUR, owner="ann", node_class="a100")
        lease(opened, 3, "n3", 0, HOUR / 2, owner="ann")
        lease(opened, 4, "n4", HOUR, None)
        opened.add_leases([LeaseRow("l5", "n5", LeaseStatus.ENDED, requested=T, ended=T + 60)])
        opened.add_job(
            JobRow("j1", "j", "ann", "{}", "completed", submitted=T, ended=T + HOUR, samples=500.0)
        )
        event(opened, EventKind.JOB_STARTED, 0, nodes=["n1", "n2"])
        event(opened, EventKind.JOB_NOTICE, 5, sentence="x")
        event(opened, EventKind.JOB_SUSPENDED, HOUR / 2)
        event(opened, EventKind.JOB_STARTED, HOUR / 2 + 60, nodes=["n1"])
        for generation, nodes, first, cost in ((1, 2, 36.0, 36.0), (2, 1, HOUR / 2 + 96, 36.0)):
            opened.put_rescale(RescaleRow("j1", generation, "start", 0, nodes, T, T + first, cost))
        yield opened


CHARGES = {"gpu": ClassCharge(0.25, 2)}, ClassCharge(1.5, None)
"""What an hour of a slot counts, and one of a whole node."""


def rows(store, since=0.0, until=T + 2 * HOUR, owner=None):
    watts, now = {"a100": NodePower(500, 1000)}, T + 2 * HOUR
    return asyncio.run(
        usage_views(store.history, since, until, "daemon", watts, owner, now, *CHARGES)
    )


def test_slots_count_by_the_price_of_their_kind(store):
    lease(store, 6, "h/gpu.0", 0, HOUR, owner="cyd", node_class="gpu")
    lease(store, 7, "h/gpu.1", 0, HOUR / 2, owner="cyd", node_class="gpu")
    row_of = {(row.user, row.node_class): row for row in rows(store)}
    slots, whole = row_of["cyd", "gpu"], row_of["ann", "a100"]
    assert (slots.leased_nh, slots.charged_nh, slots.gpu_h) == (1.5, 0.375, 3.0)
    assert (whole.leased_nh, whole.charged_nh, whole.gpu_h) == (2.0, 3.0, None)


def test_known_node_hours(store):
    row_of = {(row.user, row.node_class): row for row in rows(store)}
    assert set(row_of) == {("ann", "a100"), ("ann", "default"), ("daemon", "default")}
    a100 = row_of["ann", "a100"]
    trained = 2 * (HOUR / 2 - 36) / HOUR + (HOUR / 2 - 96) / HOUR
    assert a100.leased_nh == pytest.approx(2.0)
    assert a100.trained_nh == pytest.approx(trained)
    assert a100.starting_nh == pytest.approx((2 * 36 + 36) / HOUR)
    assert (a100.rescaling_nh, a100.preempted_nh) == (0, 0)
    assert a100.unused_nh == pytest.approx(2.0 - trained - 108 / HOUR)
    assert a100.samples == pytest.approx(500.0)
    busy = trained + 108 / HOUR
    assert a100.kwh == pytest.approx(busy * 1.0 + (2.0 - busy) * 0.5)
    assert row_of["ann", "default"].unused_nh == pytest.approx(0.5)
    assert row_of["ann", "default"].kwh is None
    assert row_of["daemon", "default"].leased_nh == pytest.approx(1.0), "to now"


def test_the_nodes_of_a_job_that_never_reports_are_not_without_a_job(store):
    store.add_job(JobRow("j2", "f", "ann", "{}", "completed", submitted=T, ended=T + HOUR / 4))
    for kind, at, nodes in (
        (EventKind.JOB_STARTED, 0.0, ["n3"]),
        (EventKind.JOB_COMPLETED, HOUR / 4, []),
    ):
        store.add_event(EventRow(T + at, kind, job="j2", data={"nodes": nodes}))
    usage_row = {(row.user, row.node_class): row for row in rows(store)}["ann", "default"]
    assert (usage_row.silent_nh, usage_row.unused_nh) == (pytest.approx(0.25), pytest.approx(0.25))


def test_others_are_not_shown_and_other_times_not_counted(store):
    assert rows(store, owner="ann") == [row for row in rows(store) if row.user == "ann"] != []
    assert rows(store, owner="bob") == []
    assert [row.leased_nh for row in rows(store, until=T + 36.0)] == pytest.approx([0.02, 0.01])
    assert rows(store, until=T - 1) == []


def test_a_job_that_goes_on_has_in_a_time_that_is_over_what_it_trained_in_it(store):
    """Two hours on one node, 720 samples, of which the first hour is asked for."""
    lease(store, 6, "n6", 0, None, owner="bob")
    store.add_job(JobRow("j2", "j", "bob", "{}", "running", submitted=T, samples=720.0))
    store.put_rescale(RescaleRow("j2", 1, "start", 0, 1, T, T, 0.0))
    (bob,) = [row for row in rows(store, until=T + HOUR) if row.user == "bob"]
    assert bob.trained_nh == pytest.approx(1.0)
    assert bob.samples == pytest.approx(360.0)
    halves = [rows(store), rows(store, since=T + HOUR)]
    assert [row.samples for half in halves for row in half if row.user == "bob"] == [720.0, 360.0]


def test_a_long_past_is_added_up_piece_by_piece_and_others_go_on_meanwhile(store, monkeypatch):
    """However little is read at a time, the sums are the same."""
    for number in range(7, 30):
        lease(store, number, f"n{number}", number, HOUR, owner="bob")
        row = JobRow(f"j{number}", "j", "bob", "{}", "completed", submitted=T, ended=T + HOUR)
        store.add_job(row)
        store.put_rescale(RescaleRow(row.id, 1, "start", 0, 1, T, T + number, 0.0))
    together = rows(store)
    monkeypatch.setattr(usage, "AT_ONCE", 1)
    turns = 0

    async def counted():
        nonlocal turns
        views = asyncio.ensure_future(
            usage_views(
                store.history, 0.0, T + HOUR * 2, "daemon", {}, None, T + 2 * HOUR, *CHARGES
            )
        )
        while not views.done():
            turns += 1
            await asyncio.sleep(0)
        return views.result()

    piece_by_piece = asyncio.run(counted())
    assert turns > 40
    assert [(r.user, r.node_class) for r in piece_by_piece] == [
        (r.user, r.node_class) for r in together
    ]
    for one, other in zip(piece_by_piece, together, strict=True):
        assert one.leased_nh == pytest.approx(other.leased_nh)
        assert one.trained_nh == pytest.approx(other.trained_nh)
    bob = next(r for r in together if r.user == "bob")
    seconds = sum(HOUR - number for number in range(7, 30))
    assert bob.leased_nh == pytest.approx(seconds / HOUR)
    assert bob.trained_nh == pytest.approx(seconds / HOUR)
