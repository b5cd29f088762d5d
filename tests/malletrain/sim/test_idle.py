"""What a log left idle."""

from __future__ import annotations

import numpy as np
import pytest

from malletrain.sim.idle import idle_nodes
from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.workloads import WorkloadError


def log(*jobs, nodes=None):
    return JobLog("test", tuple(jobs), nodes)


def spans(trace):
    gaps = trace.gaps()
    return sorted(
        (trace.names[n], a, b) for n, a, b in zip(gaps.node, gaps.start, gaps.end, strict=True)
    )


def test_named_nodes_are_idle_where_no_job_is():
    idle = idle_nodes(
        log(
            LogJob(0, 100, 50, 1, ("a",)),
            LogJob(0, 120, 100, 2, ("b", "c")),
            LogJob(0, 300, None, 1, ("a",)),
        )
    )
    assert spans(idle.trace) == [
        ("a", 50.0, 200.0),
        ("b", 0.0, 20.0),
        ("b", 120.0, 200.0),
        ("c", 0.0, 20.0),
        ("c", 120.0, 200.0),
    ]
    assert any("not counted" in sentence for sentence in idle.assumptions)


def test_nodes_never_used_count_where_the_size_is_given():
    idle = idle_nodes(log(LogJob(0, 0, 50, 1, ("a",)), LogJob(0, 100, 50, 1, ("a",))), nodes=2)
    assert spans(idle.trace) == [("a", 50.0, 100.0), ("unseen-1", 0.0, 100.0)]
    with pytest.raises(WorkloadError, match="names 2 nodes, more than the 1 given"):
        idle_nodes(log(LogJob(0, 0, 50, 2, ("a", "b")), LogJob(0, 100, 50, 1, ("a",))), nodes=1)


def test_overlapping_jobs_on_one_node_are_one_busy_time():
    idle = idle_nodes(
        log(LogJob(0, 0, 80, 1, ("a",)), LogJob(0, 10, 20, 1, ("a",)), LogJob(0, 100, 1, 1, ("a",)))
    )
    assert spans(idle.trace) == [("a", 80.0, 100.0)]


def test_a_few_jobs_without_names_do_not_cost_the_others_theirs():
    named = [LogJob(10.0 * k, 10.0 * k, 10.0, 1, (f"n{k % 2}",)) for k in range(100)]
    whole = idle_nodes(log(*named))
    idle = idle_nodes(log(*named, LogJob(50.0, 50.0, 5.0, 1)))
    assert idle.trace.gaps().length.tolist() == whole.trace.gaps().length.tolist()
    assert any("1 jobs are left out, with 0.5 % of the node-hours" in s for s in idle.assumptions)
    many = idle_nodes(log(*named, LogJob(50.0, 50.0, 50.0, 1)))
    assert any("does not say which nodes jobs used" in s for s in many.assumptions)


def test_without_names_the_node_idle_longest_is_taken():
    idle = idle_nodes(
        log(
            LogJob(0, 0, 10, 1),
            LogJob(0, 0, 20, 1),
            LogJob(0, 30, 10, 1),
            LogJob(0, 100, 1, 2),
            nodes=2,
        )
    )
    assert spans(idle.trace) == [("n1", 10.0, 30.0), ("n1", 40.0, 100.0), ("n2", 20.0, 100.0)]


def test_a_node_given_back_and_taken_at_once_was_never_idle():
    idle = idle_nodes(log(LogJob(0, 0, 50, 1), LogJob(0, 50, 50, 1), LogJob(0, 110, 1, 1), nodes=1))
    assert spans(idle.trace) == [("n1", 100.0, 110.0)]


def test_a_log_that_uses_more_than_there_is_says_so():
    idle = idle_nodes(log(LogJob(0, 0, 50, 3), LogJob(0, 100, 50, 1), nodes=2))
    assert idle.short_node_s == 50.0
    assert any("0.0 node-hours" in sentence for sentence in idle.assumptions)


def test_the_size_is_the_most_used_at_once_when_nobody_says():
    idle = idle_nodes(log(LogJob(0, 0, 50, 3), LogJob(0, 40, 50, 2), LogJob(0, 100, 50, 1)))
    assert len(idle.trace.names) == 5
    assert idle.short_node_s == 0.0


def test_idle_counts_are_exact_whichever_nodes_jobs_used():
    rng = np.random.default_rng(2)
    jobs, free_at = [], np.zeros(20)
    for _ in range(200):
        at = float(rng.integers(0, 5000))
        mine = np.flatnonzero(free_at <= at)[: rng.integers(1, 6)]
        if len(mine):
            length = float(rng.integers(1, 400))
            free_at[mine] = at + length
            jobs.append(LogJob(at, at, length, len(mine)))
    jobs.sort(key=lambda job: job.start_s)
    # Jobs are drawn in no order, so that some find too few nodes: leave those out.
    fitting = []
    for job in jobs:
        used = sum(j.nodes for j in fitting if j.start_s <= job.start_s < j.start_s + j.run_s)
        if used + job.nodes <= 20:
            fitting.append(job)
    trace = idle_nodes(log(*fitting, nodes=20)).trace
    begin = fitting[0].start_s
    for at in rng.uniform(0, trace.duration_s, 100):
        used = sum(
            j.nodes for j in fitting if j.start_s - begin <= at < j.start_s + j.run_s - begin
        )
        assert trace.idle_at(at).sum() == 20 - used


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([LogJob(0, None, 5, 1)], "does not say when jobs started"),
        ([LogJob(0, 3, 5, 1)] * 2, "start at one time"),
    ],
)
def test_logs_that_say_nothing_of_idle_nodes(jobs, says):
    with pytest.raises(WorkloadError, match=says):
        idle_nodes(log(*jobs))
