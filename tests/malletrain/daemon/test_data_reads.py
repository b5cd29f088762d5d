"""The reads of jobs through data caches: newer counts replace older ones of a process, and nothing
that a process reports breaks the sums.
"""

import pytest

from malletrain.daemon.jobs import worker_counts
from malletrain.daemon.jobs.worker_counts import DataReads


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
