"""Nodes are found out by jobs that fail there and work elsewhere, and not by bad jobs."""

from __future__ import annotations

from malletrain.core.unleased_nodes import (
    MAX_FAILURE_AGE_S,
    MAX_JOBS,
    MAX_SCRIPTS,
    MIN_FAILED_JOBS,
    FailingNodes,
)


def fails(nodes, jobs, node="bad", script="/a/train.py", now=0.0):
    for job in jobs:
        nodes.failed(job, script, node, now)


def test_a_node_on_which_good_scripts_fail_one_after_the_other_is_found_out():
    nodes = FailingNodes()
    nodes.works("/a/train.py", ["n1"])
    nodes.works("/b/train.py", ["n2", "bad"])
    fails(nodes, ["j1", "j1", "j1", "j2"])
    assert nodes.findings == {}, "two jobs are not enough, however often they fail"
    fails(nodes, ["j3"], script="/b/train.py")
    [(node, why)] = nodes.findings.items()
    assert node == "bad"
    assert "3 jobs failed on it within a day" in why
    assert why.endswith("j1, j2, j3.")


def test_scripts_that_worked_nowhere_else_say_nothing():
    nodes = FailingNodes()
    nodes.works("/a/train.py", ["bad"])
    fails(nodes, [f"j{n}" for n in range(5 * MIN_FAILED_JOBS)])
    fails(nodes, [f"k{n}" for n in range(5 * MIN_FAILED_JOBS)], script="/never/worked.py")
    assert nodes.findings == {}
    nodes.works("/a/train.py", ["n1"])
    fails(nodes, ["j99"])
    assert list(nodes.findings) == ["bad"]


def test_a_job_that_is_done_there_clears_it():
    nodes = FailingNodes()
    nodes.works("/a/train.py", ["n1"])
    fails(nodes, ["j1", "j2"])
    nodes.done(["bad", "n1"])
    fails(nodes, ["j3", "j4"])
    assert nodes.findings == {}


def test_a_job_that_grew_from_the_bad_node_has_worked_elsewhere_too():
    """Who was there first is named first in each round."""
    nodes = FailingNodes()
    nodes.works("/a/train.py", ["bad"])
    nodes.works("/a/train.py", ["bad", "n1", "n2"])
    fails(nodes, ["j1", "j2", "j3"])
    assert list(nodes.findings) == ["bad"]


def test_what_failed_long_ago_counts_no_more():
    nodes = FailingNodes()
    nodes.works("/a/train.py", ["n1"])
    for day, job in enumerate(["j1", "j2", "j3", "j4"]):
        fails(nodes, [job], now=0.6 * day * MAX_FAILURE_AGE_S)
    assert nodes.findings == {}
    fails(nodes, ["j5"], now=0.6 * 3 * MAX_FAILURE_AGE_S)
    assert list(nodes.findings) == ["bad"]


def test_memory_is_bounded():
    nodes = FailingNodes()
    for n in range(MAX_SCRIPTS + 10):
        nodes.works(f"/{n}.py", (f"n{k}" for k in range(5)))
    for n in range(2 * MAX_JOBS):
        nodes.failed(f"j{n}", "/unknown.py", "bad", 0.0)
    nodes.works("/unknown.py", ["n1"])
    fails(nodes, ["last"], script="/unknown.py")
    assert f"{MAX_JOBS} jobs" in nodes.findings["bad"]
