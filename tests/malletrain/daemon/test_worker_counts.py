"""Averages of steps over the last minutes, and the reads of jobs through data caches, from
cumulative counts: newer ones replace older ones of a process, and nothing that a process reports
breaks the sums."""

from __future__ import annotations

import pytest

from malletrain.core.step_times import Bottleneck
from malletrain.daemon.api.job_views import steps_view
from malletrain.daemon.jobs import worker_counts
from malletrain.daemon.jobs.worker_counts import (
    MARK_S,
    MARKS,
    MAX_STORED_RANKS,
    MIN_STEPS,
    REFRESH_S,
    DataReads,
    StepWindows,
    step_times_record,
)
from malletrain.protocol.messages import Progress


class Ranks:
    """Ranks that step together; their counts are reported once a second."""

    def __init__(self, count=2, generation=1):
        self.windows = StepWindows()
        self.generation, self.now = generation, 1000.0
        self.counts = [[0, None, None, None] for _ in range(count)]

    def report(self, pid=7):
        for number, (steps, *parts) in enumerate(self.counts):
            counts = (8.0 * steps, steps, 8.0, 1000.0, self.now, None, *parts)
            record = Progress("j1", self.generation, number, pid, *counts)
            self.windows.add(f"n{number}", record)

    def step(self, seconds, *parts_of, steps=10):
        """For so many seconds, ten steps a second; ``parts_of``: (data, exchange, snapshot) of each
        rank, seconds per step.
        """
        for _ in range(seconds):
            self.now += 1.0
            for count, parts in zip(self.counts, parts_of, strict=True):
                count[0] += steps
                for index, part in enumerate(parts, 1):
                    if part is not None:
                        count[index] = (count[index] or 0.0) + steps * part
            self.report()


EVEN = (0.04, 0.01, None), (0.04, 0.02, None)


def test_the_first_counts_are_no_step():
    ranks = Ranks()
    ranks.report()
    assert ranks.windows.ranks(1) == ()
    assert ranks.windows.recent(1) is None


def test_the_mean_step_of_each_rank():
    ranks = Ranks()
    ranks.step(5, *EVEN)
    first, second = ranks.windows.ranks(1)
    assert (first.rank, first.node, second.rank, second.node) == (0, "n0", 1, "n1")
    assert first.step_s == pytest.approx(0.1)
    assert (first.data_s, first.exchange_s) == pytest.approx((0.04, 0.01))
    assert first.snapshot_s is None
    assert second.exchange_s == pytest.approx(0.02)


def test_a_part_that_begins_later_was_nothing_before():
    ranks = Ranks()
    ranks.step(2, *EVEN)
    ranks.step(2, (0.04, 0.01, 0.02), (0.04, 0.03, None))
    first, _ = ranks.windows.ranks(1)
    # in two of the three seconds after the first counts
    assert first.snapshot_s == pytest.approx(0.02 * 2 / 3)


def test_jobs_that_measure_nothing_have_no_shares():
    ranks = Ranks()
    ranks.step(20, (None, None, None), (None, None, None))
    assert ranks.windows.ranks(1) == ()
    assert ranks.windows.recent(1) is None


def test_the_newest_shares_are_of_the_last_seconds_and_the_others_of_the_last_minutes():
    ranks = Ranks()
    ranks.step(60, *EVEN)
    ranks.step(2 * round(MARK_S) + 2, (0.08, 0.01, None), (0.08, 0.02, None))
    recent = ranks.windows.recent(1)
    assert recent is not None
    assert recent.shares["data"] == pytest.approx(0.8)
    assert recent.cause is Bottleneck.DATA
    all_of_it = step_times_record(ranks.windows.ranks(1))
    assert 0.4 < all_of_it["shares"]["data"] < 0.6


def test_old_steps_are_forgotten():
    ranks = Ranks()
    ranks.step(30, (0.09, 0.01, None), (0.09, 0.01, None))
    ranks.step(round((MARKS + 2) * (MARK_S + 1)), *EVEN)
    assert step_times_record(ranks.windows.ranks(1))["shares"]["data"] == pytest.approx(0.4)


def test_few_steps_are_no_average():
    ranks = Ranks()
    ranks.report()
    ranks.step(MIN_STEPS - 1, *EVEN, steps=1)
    assert ranks.windows.ranks(1) == ()
    ranks.step(1, *EVEN, steps=1)
    assert len(ranks.windows.ranks(1)) == 2


def test_a_new_round_and_a_new_process_begin_anew():
    ranks = Ranks()
    ranks.step(5, *EVEN)
    late = ranks.generation
    ranks.generation = 2
    ranks.report()
    assert ranks.windows.ranks(2) == ()
    assert ranks.windows.ranks(1) == (), "the steps of another round"
    ranks.generation = late
    ranks.step(5, *EVEN)
    assert ranks.windows.ranks(2) == (), "late counts are ignored"
    ranks.generation = 2
    ranks.step(5, *EVEN)
    assert len(ranks.windows.ranks(2)) == 2
    ranks.report(pid=8)
    assert ranks.windows.ranks(2) == ()


def test_repeated_and_overtaken_counts_change_nothing():
    ranks = Ranks()
    ranks.step(5, *EVEN)
    ranks.report()
    counts = (8.0, 1, 8.0, 1000.0, 1000.5, None, 9.0)
    ranks.windows.add("n0", Progress("j1", 1, 0, 7, *counts))
    undisturbed = Ranks()
    undisturbed.step(5, *EVEN)
    assert ranks.windows.ranks(1) == undisturbed.windows.ranks(1)


def test_the_averages_of_many_ranks_are_not_computed_at_each_request():
    ranks = Ranks()
    ranks.step(60, *EVEN)
    means = ranks.windows.ranks(1)
    ranks.step(round(REFRESH_S) - 1, (0.08, 0.01, None), (0.08, 0.01, None))
    assert ranks.windows.ranks(1) is means
    ranks.step(1, (0.08, 0.01, None), (0.08, 0.01, None))
    # 61 seconds since the first counts: 59 with 0.04, 2 with 0.08
    assert ranks.windows.ranks(1)[0].data_s == pytest.approx((59 * 0.04 + 2 * 0.08) / 61)


@pytest.mark.parametrize("average", ["ranks", "recent"])
def test_an_average_of_the_first_steps_is_not_kept(average):
    """A request soon after the start must not hide what the next steps show."""
    ranks = Ranks()
    ranks.step(2, *EVEN)
    assert getattr(ranks.windows, average)(1)
    ranks.step(1, (0.01, 0.01, 0.06), (0.01, 0.07, None))
    if average == "ranks":
        assert ranks.windows.ranks(1)[0].snapshot_s == pytest.approx(0.06 / 2)
    else:
        assert ranks.windows.recent(1).cause is Bottleneck.SNAPSHOT


def test_an_average_without_one_of_the_ranks_is_not_kept():
    ranks = Ranks()
    ranks.counts.append([0, None, None, None])
    ranks.step(5, *EVEN, (None, None, None))
    assert len(ranks.windows.ranks(1)) == 2
    ranks.step(1, *EVEN, (0.01, None, None))
    assert len(ranks.windows.ranks(1)) == 3


def test_a_rank_that_measures_nothing_costs_no_memory_and_its_first_part_is_averaged():
    ranks = Ranks(1)
    ranks.step(200, (None, None, None))
    ((_, rank),) = ranks.windows._ranks.items()  # noqa: SLF001 (what is kept is the point)
    assert len(rank.marks) == 1
    ranks.step(1, (None, None, 0.05))
    (mean,) = ranks.windows.ranks(1)
    assert mean.snapshot_s == pytest.approx(0.05 / (ranks.now - rank.marks[0].last))


def test_the_view_has_the_cause_and_what_is_left_of_a_step():
    ranks = Ranks()
    ranks.step(5, *EVEN)
    record = step_times_record(ranks.windows.ranks(1))
    view = steps_view(record)
    assert view is not None
    assert view.cause == Bottleneck.DATA.value
    assert view.ranks[0].computing_s == pytest.approx(0.05)
    del record["cause"]  # as an earlier version stored it
    older = steps_view(record)
    assert older is not None
    assert (older.cause, older.advice) == ("", view.advice)
    assert steps_view({}) is None


def test_the_stored_ranks_are_those_that_come_last():
    ranks = Ranks(MAX_STORED_RANKS + 6)
    parts = [(0.01, 0.05 - 0.0005 * number, None) for number in range(MAX_STORED_RANKS + 6)]
    ranks.step(3, *parts)
    record = step_times_record(ranks.windows.ranks(1))
    assert [row[0] for row in record["ranks"]] == list(range(6, MAX_STORED_RANKS + 6))
    assert step_times_record(()) == {}


def test_the_rank_that_the_advice_names_is_stored_without_exchanges_too():
    ranks = Ranks(MAX_STORED_RANKS + 6)
    late = MAX_STORED_RANKS + 5
    ranks.step(3, *((0.05 if number == late else 0.01, None, None) for number in range(late + 1)))
    record = step_times_record(ranks.windows.ranks(1))
    assert f"rank {late} on" in record["advice"]
    assert late in [row[0] for row in record["ranks"]]


def facts(**changes):
    return {
        "name": "images",
        "process": "1.100",
        "node": "n1",
        "node_hits": 10,
        "peer_hits": 5,
        "source_reads": 20,
        "hit_bytes": 1500,
        "source_bytes": 2000,
        "unpacked": 1,
        "samples": 100,
        "present": 20,
        "data_bytes": 10_000,
        "memory_bytes": 4_000,
        "node_bytes": 64_000,
        "coverage": 1.0,
        **changes,
    }


def test_counts_of_processes_add_up_and_those_of_one_process_are_replaced():
    reads = DataReads()
    reads.add("j1", 0, facts())
    reads.add("j1", 0, facts(node_hits=12))
    reads.add("j1", 1, facts(node_hits=1, process="1.101", node="n2", present=30))
    reads.add("j1", 0, facts(node_hits=100, process="2.200", present=25))  # after a rescale
    reads.add("j2", 0, facts(node_hits=1000))
    (view,) = reads.views("j1", ["n1", "n2"])
    assert (view.node_hits, view.peer_hits, view.source_reads) == (113, 15, 60)
    assert (view.hit_bytes, view.source_bytes, view.unpacked) == (4500, 6000, 3)
    assert (view.present, view.memory_bytes, view.samples) == (55, 8_000, 100)
    (view,) = reads.views("j1", ["n1"])  # n2 has left
    assert (view.present, view.memory_bytes, view.node_hits) == (25, 4_000, 113)
    assert reads.views("j3", ["n1"]) == ()


def test_reading_the_data_of_a_node_again_takes_what_reading_took_before():
    reads = DataReads()
    reads.add("j1", 0, facts(source_us=100_000, present=400))
    reads.add("j1", 1, facts(source_us=300_000, process="1.101", node="n2", present=200))
    for nodes, processes, expected in (
        (["n1", "n2"], 1, {"n1": 4.0, "n2": 2.0}),  # 10 ms a sample
        (["n1", "n2", "n3"], 1, {"n1": 2.0, "n2": 1.0}),  # two read it
        (["n1", "n2"], 4, {"n1": 1.0, "n2": 0.5}),  # four ranks on a node
        (["n1", "n2"], 0, {"n1": 4.0, "n2": 2.0}),  # unknown
    ):
        assert reads.reread_s("j1", nodes, processes) == pytest.approx(expected)
    reads.add("j1", 0, facts(name="test", source_us=20_000, present=100))
    both = reads.reread_s("j1", ["n1", "n2"], 1)
    assert both == pytest.approx({"n1": 4.1, "n2": 2.0})
    reads.add("j2", 0, facts(source_reads=0, source_us=0))
    assert reads.reread_s("j2", ["n1"], 1) == {}
    assert reads.reread_s("j3", ["n1"], 1) == {}


def test_data_sets_are_told_apart():
    reads = DataReads()
    reads.add("j1", 0, facts(name="train"))
    reads.add("j1", 0, facts(name="test", coverage=None))
    assert [(v.name, v.coverage) for v in reads.views("j1", [])] == [("test", None), ("train", 1.0)]


def test_the_counts_of_processes_that_are_no_longer_told_apart_stay(monkeypatch):
    monkeypatch.setattr(worker_counts, "MAX_PROCESSES", 2)
    reads = DataReads()
    for process in range(5):
        reads.add("j1", 0, facts(process=str(process)))
    (view,) = reads.views("j1", ["n1"])
    assert view.node_hits == 50


def test_no_report_fills_the_memory_of_the_daemon(monkeypatch):
    monkeypatch.setattr(worker_counts, "MAX_JOBS", 3)
    monkeypatch.setattr(worker_counts, "MAX_NAMES", 2)
    reads = DataReads()
    for job in range(5):
        for name in "abc":
            reads.add(f"j{job}", 0, facts(name=name))
    assert [len(reads.views(f"j{job}", [])) for job in range(5)] == [0, 0, 2, 2, 2]


def test_what_is_no_count_is_0():
    reads = DataReads()
    strange = facts(node_hits=-1, peer_hits="many", source_reads=None, hit_bytes=True, coverage=7.0)
    reads.add("j1", 0, strange)
    reads.add("j1", 0, {})
    (view,) = reads.views("j1", [])
    assert (view.node_hits, view.peer_hits, view.source_reads, view.hit_bytes) == (0, 0, 0, 0)
    assert view.coverage is None
