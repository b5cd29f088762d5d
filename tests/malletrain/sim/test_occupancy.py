"""How many nodes jobs can have occupied if the log does not name the nodes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.sim.idle import idle_nodes
from malletrain.sim.logged_jobs import JobLog, LogJob, Resources
from malletrain.sim.observation import Observation
from malletrain.sim.occupancy import JobSpan, cpus_of_a_node, names_nodes, occupancy, spans_of


def span(start, end, nodes, cpus=0):
    resources = Resources(cpus=cpus) if cpus else None
    return JobSpan(start, end, LogJob(start, start, end - start, nodes, allocated=resources))


def steps(used, values):
    return list(zip(used.edges[:-1].tolist(), values.tolist(), strict=True))


def test_jobs_that_fit_on_one_node_may_share_it():
    jobs = [span(0, 40, 1, 3), span(10, 30, 1, 5), span(20, 30, 2, 16)]
    used = occupancy(jobs, 0, 50, size=None, cpus_per_node=8)
    assert steps(used, used.most) == [(0, 1), (10, 2), (20, 4), (30, 1), (40, 0)]
    # 3 and 5 CPUs fill a node; the third job has all CPUs of two nodes and shares none.
    assert steps(used, used.fewest) == [(0, 1), (10, 1), (20, 3), (30, 1), (40, 0)]
    assert (used.partial_jobs, used.partial_node_s) == (2, 60.0)


def test_a_job_on_many_nodes_occupies_them_however_few_its_cpus_are():
    used = occupancy([span(0, 10, 4, 4), span(0, 10, 1, 1)], 0, 10, size=None, cpus_per_node=8)
    assert (used.most.tolist(), used.fewest.tolist()) == ([5], [4])


def test_jobs_that_exceed_the_machine_shared_nodes():
    jobs = [span(0, 100, 3), span(50, 60, 2), span(70, 100, 1)]
    used = occupancy(jobs, 0, 100, size=4, cpus_per_node=None)
    assert used.conflicting_jobs == 2
    # The first two ran when five nodes were in use of four; the last one had its node alone.
    assert steps(used, used.most) == [(0, 3), (50, 5), (60, 3), (70, 4)]
    assert steps(used, used.fewest) == [(0, 3), (50, 3), (60, 3), (70, 4)]
    assert used.peak(used.most) == (5, 50.0, 10.0)


def test_no_job_occupies_nothing():
    used = occupancy([span(0, 10, 3)], 20, 30, size=4, cpus_per_node=None)
    assert (used.most.tolist(), used.fewest.tolist()) == ([0], [0])


CPUS, NODES, END = 4, 5, 60


@st.composite
def placed_jobs(draw):
    """Jobs with the CPUs that they have on each node of a machine, which never exceed it."""
    free = np.full((NODES, END), CPUS)
    jobs = []
    for _ in range(draw(st.integers(1, 12))):
        start = draw(st.integers(0, END - 2))
        end = draw(st.integers(start + 1, END))
        share = draw(st.integers(1, CPUS))
        able = np.flatnonzero(free[:, start:end].min(axis=1) >= share).tolist()
        nodes = draw(st.lists(st.sampled_from(able), unique=True, min_size=1)) if able else []
        if nodes:
            free[nodes, start:end] -= share
            jobs.append((start, end, nodes, share))
    return jobs


@given(placed_jobs())
def test_the_true_number_of_idle_nodes_lies_within_the_bounds(jobs):
    """Counted by second and node, from placements that the log does not have."""
    busy = np.zeros((NODES, END), dtype=bool)
    for start, end, nodes, _ in jobs:
        busy[nodes, start:end] = True
    log = JobLog(
        "test",
        tuple(
            LogJob(a, a, b - a, len(nodes), allocated=Resources(cpus=len(nodes) * share))
            for a, b, nodes, share in sorted(jobs, key=lambda each: each[0])
        ),
        NODES,
        cpus_per_node=CPUS,
    )
    result = idle_nodes(log, observed=Observation(0.0, float(END)))
    true_s = int((~busy).sum())
    assert result.bounds.least_node_s <= true_s <= result.bounds.most_node_s
    assert math.isclose(result.trace.gaps().length.sum(), result.bounds.least_node_s)
    if all(share == CPUS for *_, share in jobs):
        assert result.bounds.exact


@pytest.mark.parametrize(("cpus", "bounds"), [(8, (300.0, 300.0)), (4, (300.0, 400.0))])
def test_the_sentence_says_why_there_are_bounds(cpus, bounds):
    jobs = [LogJob(0, 0, 100, 1, allocated=Resources(cpus=cpus)) for _ in range(2)]
    log = JobLog("test", (*jobs, LogJob(0, 100, 1, 1)), 5)
    result = idle_nodes(log, cpus_per_node=8)
    assert (result.bounds.least_node_s, result.bounds.most_node_s) == bounds
    text = " ".join(result.assumptions)
    if cpus == 8:
        assert "exact: no job of the log is known to have shared its nodes" in text
    else:
        assert (
            "within bounds only, 60.00 to 80.00 % of the machine (0 to 0 node-hours): 2 jobs"
            in (text)
        )
        assert "100.0 % of the node-hours of jobs hold fewer than the 8 CPUs of a node" in text


@pytest.mark.parametrize(("unnamed_s", "is_named"), [(0, True), (1, True), (2, False)])
def test_a_log_names_nodes_if_at_most_a_hundredth_of_the_node_hours_lack_them(unnamed_s, is_named):
    jobs = [LogJob(0, 0, 99, 1, ("a",)), LogJob(0, 0, unnamed_s, 1), LogJob(0, 500, 1000, 1)]
    spans = spans_of(JobLog("test", tuple(jobs)))
    # The last job, which nobody names, runs after the observation.
    assert names_nodes(spans, Observation(0.0, 100.0)) == is_named
    assert not names_nodes(spans[1:], Observation(400.0, 450.0))


def test_jobs_in_order_of_their_starts():
    jobs = (LogJob(0, 7, 1, 1), LogJob(1, None, 1, 1), LogJob(2, 3, None, 1))
    spans = spans_of(JobLog("test", jobs))
    assert [(one.start, one.end) for one in spans] == [(3, math.inf), (7, 8)]


@pytest.mark.parametrize(
    ("cpus", "stated", "of_log", "count", "is_inferred"),
    [
        ((0, 0), 8, 8, None, None),
        ((3, 9), 8, 6, 8, False),
        ((3, 9), None, 6, 6, False),
        # 9 CPUs on 2 nodes: 5 on one of them.
        ((3, 9), None, None, 5, True),
    ],
)
def test_the_cpus_of_a_node(cpus, stated, of_log, count, is_inferred):
    log = JobLog("test", tuple(span(0, 1, n + 1, c).job for n, c in enumerate(cpus)),
                 cpus_per_node=of_log)  # fmt: skip
    node = cpus_of_a_node(log, spans_of(log), stated)
    assert (node and node.count, node and node.is_inferred) == (count, is_inferred)


def test_a_number_of_idle_nodes_that_rests_on_inferred_cpus_is_not_called_exact():
    """If nodes have 8 CPUs and not 4, two of these jobs fit on each."""
    jobs = tuple(
        LogJob(10 * k, 10 * k, 10, 1, allocated=Resources(cpus=4)) for k in range(100) for _ in "ab"
    )
    log, seen = JobLog("test", jobs), Observation(0.0, 1000.0)
    result = idle_nodes(log, 20, seen)
    assert result.bounds.least_node_s == result.bounds.most_node_s == 18 * 1000
    assert (result.bounds.exact, result.bounds.cpus_inferred) == (False, True)
    (sentence,) = [line for line in result.assumptions if "number of idle nodes" in line]
    assert sentence.startswith(
        "The number of idle nodes is exact if no node has more than 4 CPUs (the most that a job "
        "holds on a node; else: --cpus-per-node): "
    )
    stated = idle_nodes(log, 20, seen, cpus_per_node=4)
    assert stated.bounds.exact
    wider = idle_nodes(log, 20, seen, cpus_per_node=8)
    assert (wider.bounds.least_node_s, wider.bounds.most_node_s) == (18_000.0, 19_000.0)
