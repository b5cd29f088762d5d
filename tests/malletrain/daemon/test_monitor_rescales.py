"""The monitor: what each rescale cost, and where its time went."""

from __future__ import annotations

import math

import pytest

from malletrain.daemon.jobs.monitor import REPORT_DELAY_S, JobMonitor
from malletrain.protocol.messages import Mark, Progress
from tests.malletrain.daemon.worker_counts import job_monitor, progress, trained


def marks(monitor, generation, **times):
    for name, time in times.items():
        monitor.mark(Mark("job", generation, 0, name, time))


def test_a_start_is_split_into_its_phases():
    m = JobMonitor("j7")
    m.rescale_began((), ("a",), 100.0)
    m.forming(1, ("a",), 103.0)
    m.workers_running(1, 103.5)
    marks(m, 1, start=103.6, **{"import": 105.0})
    marks(m, 1, restoring=105.5, restored=105.6)
    m.progress(progress(10, 107.0, first=106.6))
    (r,) = m.finished_rescales()
    assert (r.kind, r.generation, r.from_nodes, r.to_nodes, r.began, r.ended) == (
        "start",
        1,
        0,
        1,
        100.0,
        106.6,
    )
    assert r.cost_s == pytest.approx(6.6)
    assert r.phases == pytest.approx(
        {
            "warm": 3.0,
            "rendezvous": 0.5,
            "start": 0.1,
            "import": 1.4,
            "build": 0.5,
            "state": 0.1,
            "first": 1.0,
        }
    )
    assert sum(r.phases.values()) == pytest.approx(r.cost_s)
    assert r.job == "j7"
    assert m.finished_rescales() == []


def test_growing_costs_from_the_last_sample_before_to_the_first_after():
    m = job_monitor()
    end = trained(m, 1, 1, 100.0, 10.0)
    m.finished_rescales()
    m.rescale_began(("n0",), ("n0", "n1"), end)
    m.progress(progress(2000.0, end + 4.0, first=100.0))  # trains on while the joiner comes up
    m.draining(end + 5.0)
    m.forming(2, ("n0", "n1"), end + 5.5)
    m.progress(progress(2050.0, end + 5.3, first=100.0))  # on its way while the round was formed
    m.workers_running(2, end + 6.0)
    m.progress(progress(10, end + 9.3, generation=2, pid=7, first=end + 9.3))
    (r,) = m.finished_rescales()
    assert (r.kind, r.from_nodes, r.to_nodes) == ("up", 1, 2)
    assert r.cost_s == pytest.approx(4.0)
    assert r.phases == pytest.approx({"warm": 5.0, "drain": 0.5, "rendezvous": 0.5, "first": 3.3})


def test_a_loss_costs_from_the_last_sample_and_says_how_long_noticing_took():
    m = job_monitor()
    end = trained(m, 1, 2, 100.0, 10.0)
    m.finished_rescales()
    m.rescale_began(("n0", "n1"), ("n0",), end + 3.0, lost=True)
    m.forming(2, ("n0",), end + 3.1)
    m.workers_running(2, end + 3.6)
    m.progress(progress(10, end + 7.0, generation=2, pid=7, first=end + 7.0))
    (r,) = m.finished_rescales()
    assert (r.kind, r.from_nodes, r.to_nodes) == ("loss", 2, 1)
    assert r.cost_s == pytest.approx(7.0)
    assert r.phases == pytest.approx({"detect": 3.0, "warm": 0.1, "rendezvous": 0.5, "first": 3.4})
    assert sum(r.phases.values()) == pytest.approx(r.cost_s)


@pytest.mark.parametrize(
    ("before", "after", "kind"), [(1, 3, "up"), (3, 1, "down"), (2, 2, "same")]
)
def test_kinds(before, after, kind):
    m = job_monitor()
    end = trained(m, 1, before, 100.0, 5.0)
    m.finished_rescales()
    m.rescale_began(tuple(range(before)), tuple(range(after)), end)
    m.forming(2, tuple(range(after)), end + 1)
    m.workers_running(2, end + 2)
    m.progress(progress(10, end + 3, generation=2, pid=7, first=end + 3))
    assert [r.kind for r in m.finished_rescales()] == [kind]


def test_a_node_lost_while_the_round_was_formed_is_one_rescale_with_the_whole_cost():
    m = job_monitor()
    end = trained(m, 1, 3, 100.0, 10.0)
    m.finished_rescales()
    m.rescale_began(("n0", "n1", "n2"), ("n0", "n1"), end)
    m.forming(2, ("n0", "n1"), end + 1.0)
    m.rescale_began(("n0", "n1"), ("n0",), end + 2.0, lost=True)
    m.forming(3, ("n0",), end + 2.5)
    m.workers_running(3, end + 3.0)
    m.progress(progress(10, end + 6.0, generation=3, pid=7, first=end + 6.0))
    (r,) = m.finished_rescales()
    assert (r.generation, r.kind, r.from_nodes, r.to_nodes, r.began) == (3, "loss", 3, 1, end)
    assert r.cost_s == pytest.approx(6.0)


def test_a_round_that_came_to_nothing_leaves_no_marks_in_the_phases_of_the_next():
    m = job_monitor()
    m.rescale_began((), ("a", "b"), 100.0)
    m.forming(1, ("a", "b"), 102.0)
    m.workers_running(1, 103.0)
    marks(m, 1, start=104.0, restored=106.0)
    m.forming(2, ("a",), 110.0)
    m.progress(progress(10, 115.0, generation=2, first=114.0))
    (r,) = m.finished_rescales()
    assert r.phases == pytest.approx({"warm": 10.0, "first": 4.0})
    assert (r.kind, r.from_nodes, r.to_nodes) == ("start", 0, 1)


def test_a_node_lost_while_the_job_starts_is_still_a_start():
    m = job_monitor()
    m.rescale_began((), ("a", "b"), 100.0)
    m.forming(1, ("a", "b"), 102.0)
    m.rescale_began(("a", "b"), ("a",), 103.0, lost=True)
    m.forming(2, ("a",), 104.0)
    m.workers_running(2, 105.0)
    m.progress(progress(10, 108.0, generation=2, first=107.0))
    (r,) = m.finished_rescales()
    assert (r.kind, r.cost_s) == ("start", 7.0)


def test_growth_that_the_rounds_began_by_themselves_is_measured_too():
    m = job_monitor()
    end = trained(m, 1, 1, 100.0, 10.0)
    m.finished_rescales()
    m.draining(end + 1.0)
    m.forming(2, ("n0", "n1"), end + 1.5)
    m.workers_running(2, end + 2.0)
    m.progress(progress(10, end + 4.0, generation=2, pid=7, first=end + 4.0))
    (r,) = m.finished_rescales()
    assert (r.kind, r.from_nodes, r.to_nodes) == ("up", 1, 2)
    assert r.cost_s == pytest.approx(4.0)


def test_a_rescale_that_needed_no_round_leaves_nothing_behind():
    m = job_monitor()
    end = trained(m, 1, 1, 100.0, 10.0)
    m.finished_rescales()
    m.rescale_began(("n0",), ("n0", "n1"), end)
    m.workers_running(1, end + 60.0)  # the joiner never came up
    m.progress(progress(9999.0, end + 61.0, first=100.0))
    assert m.finished_rescales() == []
    m.rescale_began(("n0",), ("n0", "n2"), end + 200.0)
    m.forming(2, ("n0", "n2"), end + 205.0)
    m.workers_running(2, end + 206.0)
    m.progress(progress(10, end + 208.0, generation=2, pid=7, first=end + 208.0))
    (r,) = m.finished_rescales()
    assert r.began == end + 200.0


def test_a_suspended_job_starts_anew():
    m = job_monitor()
    end = trained(m, 1, 1, 100.0, 10.0)
    m.finished_rescales()
    m.rescale_began(("n0",), (), end)
    m.rescale_began((), ("n5",), end + 1000.0)
    m.forming(2, ("n5",), end + 1003.0)
    m.workers_running(2, end + 1004.0)
    m.progress(progress(10, end + 1008.0, generation=2, pid=7, first=end + 1008.0))
    (r,) = m.finished_rescales()
    assert (r.kind, r.from_nodes) == ("start", 0)
    assert r.cost_s == pytest.approx(8.0)


def test_marks_of_other_rounds_and_without_a_time_are_ignored():
    m = job_monitor()
    m.rescale_began((), ("a",), 100.0)
    m.forming(2, ("a",), 103.0)
    marks(m, 1, start=104.0)
    marks(m, 2, restoring=math.nan, restored=math.inf)
    m.progress(progress(10, 107.0, generation=2, first=106.0))
    (r,) = m.finished_rescales()
    assert r.phases == pytest.approx({"warm": 3.0, "first": 3.0})


def test_the_time_of_a_suspension_is_no_cost_of_the_start_that_ends_it():
    monitor = job_monitor()
    monitor.rescale_began((), ("a",), 0.0)
    monitor.forming(1, ("a",), 1.0)
    monitor.workers_running(1, 2.0)
    monitor.progress(Progress("j", 1, 0, 7, 10.0, 5, 2.0, 3.0, 5.0))
    monitor.rescale_began(("a",), (), 6.0)
    monitor.draining(6.0)
    monitor.rescale_began((), ("b", "c"), 100.0)
    monitor.forming(2, ("b", "c"), 101.0)
    monitor.workers_running(2, 102.0)
    monitor.progress(Progress("j", 2, 0, 8, 10.0, 5, 2.0, 103.0, 105.0))
    start, resumed = monitor.finished_rescales()
    assert (start.kind, start.cost_s) == ("start", 3.0)
    assert (resumed.kind, resumed.from_nodes, resumed.to_nodes, resumed.cost_s) == (
        "start",
        0,
        2,
        3.0,
    )


# --- what forged reports may not do ---


def test_counts_of_a_round_that_was_not_formed_yet_finish_no_rescale():
    m = job_monitor()
    m.rescale_began((), ("a",), 90.0)
    m.progress(progress(5, 101.0, generation=0))
    m.progress(progress(9, 102.0, generation=0))
    assert m.finished_rescales() == []
    m.forming(1, ("a",), 103.0)
    m.workers_running(1, 104.0)
    m.progress(progress(3, 106.0, first=105.0))
    (record,) = m.finished_rescales()
    assert record.kind == "start"


def test_unknown_points_of_a_start_up_are_not_kept():
    m = job_monitor()
    m.rescale_began((), ("a",), 90.0)
    m.forming(1, ("a",), 91.0)
    for i in range(100):
        m.mark(Mark("job", 1, 0, f"name{i}", 92.0))
    m.mark(Mark("job", 1, 0, "import", 93.0))
    assert m.pending is not None
    assert m.pending.marks == {"import": 93.0}


@pytest.mark.parametrize("ahead_s", [0.0, 1.1, 5.0, 18_000.0, -18_000.0])
def test_a_clock_that_is_wrong_all_the_time_changes_no_cost_of_a_move(ahead_s):
    m = job_monitor()
    m.forming(1, ("n0",), 1e6)
    m.progress(progress(10, 1e6 + 9.9 + ahead_s, first=1e6 + 1.0 + ahead_s), 1e6 + 10.0)
    m.finished_rescales()
    m.rescale_began(("n0",), ("n0", "n1"), 1e6 + 10.1)
    m.forming(2, ("n0", "n1"), 1e6 + 10.2)
    m.progress(
        progress(10, 1e6 + 10.6 + ahead_s, generation=2, first=1e6 + 10.4 + ahead_s), 1e6 + 10.7
    )
    (r,) = m.finished_rescales()
    assert (r.kind, r.cost_s) == ("up", pytest.approx(0.5, abs=1e-6))


@pytest.mark.parametrize("kind", ["start", "up", "loss"])
def test_a_rescale_within_which_the_clocks_are_set_costs_no_more_than_between_two_arrivals(kind):
    m, set_by_s = job_monitor(), 18_000.0
    if kind != "start":
        m.forming(1, ("n0",), 1e6)
        m.progress(progress(10, 1e6 + 9.9, first=1e6 + 1.0), 1e6 + 10.0)
        m.finished_rescales()
    members = () if kind == "start" else ("n0",)
    m.rescale_began(members, ("n0", "n1"), 1e6 + 10.1, lost=kind == "loss")
    m.forming(2, ("n0", "n1"), 1e6 + 10.2)
    marks(m, 2, start=1e6 + 10.3 + set_by_s)
    m.progress(
        progress(10, 1e6 + 10.6 + set_by_s, generation=2, first=1e6 + 10.4 + set_by_s), 1e6 + 10.7
    )
    (r,) = m.finished_rescales()
    assert r.kind == kind
    assert 0.5 <= r.cost_s <= 0.7 + REPORT_DELAY_S
    assert r.ended <= 1e6 + 10.7 + REPORT_DELAY_S
    assert sum(r.phases.values()) <= 0.8 + REPORT_DELAY_S
