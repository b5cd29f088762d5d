"""What a log left idle."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from malletrain.sim.idle import IdleBounds, idle_nodes
from malletrain.sim.joblogs import read_log
from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.observation import observe
from malletrain.sim.workloads import WorkloadError
from tests.malletrain.sim.conftest import shared


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


def daily(name, first, last):
    """A job of 20 hours on each of these days."""
    return [LogJob(86400.0 * k, 86400.0 * k, 72000.0, 1, (name,)) for k in range(first, last)]


@pytest.mark.parametrize(
    ("days", "named", "hours"),
    [
        ({"a": (0, 30), "b": (0, 30)}, None, None),
        ({"old": (0, 15), "new": (15, 30), "a": (0, 30)}, 2, 14 * 24 + 4 + 15 * 24),
        ({"added": (20, 30), "a": (0, 30)}, 1, 20 * 24),
        ({"for some days": (10, 20), "a": (0, 30)}, 1, 10 * 24 + 9 * 24 + 4),
        ({"late": (4, 30), "a": (0, 30), "b": (0, 26)}, None, None),
    ],
)
def test_nodes_without_jobs_for_long_at_an_edge_are_named(days, named, hours):
    """They may have been added, removed or renamed."""
    jobs = [job for name, span in days.items() for job in daily(name, *span)]
    jobs.sort(key=lambda job: job.start_s)
    sentences = [s for s in idle_nodes(log(*jobs)).assumptions if "renamed" in s]
    assert len(sentences) == (named is not None)
    if sentences:
        assert sentences[0].startswith(f"{named} of the named nodes have no job in the first or ")
        assert f"with {hours} node-hours" in sentences[0]


@pytest.mark.parametrize("names", [("a", "b"), ()])
def test_times_without_any_job_are_named(names):
    """Two nodes: each hour both have a job of 50 minutes, but on the second day of four."""
    hours = [h for h in range(4 * 24) if not 24 <= h < 48]
    jobs = [LogJob(3600 * h, 3600 * h, 3000, 2, names) for h in hours]
    day = datetime(2024, 1, 1).timestamp()
    idle = idle_nodes(replace(log(*jobs), zero=day))
    sentence = (
        "No job ran at all for 24.2 hours (times of an hour or more), with 67 % of the idle "
        "node-hours; the longest time is of 24.2 hours, from 2024-01-01 23:50."
    )
    assert sum(sentence in each for each in idle.assumptions) == 1
    others = idle_nodes(log(*jobs[:24]))
    assert not any("No job ran at all" in each for each in others.assumptions)


@pytest.mark.parametrize("zero", [0.0, 7200.0, 1e14, 253402300799.0])
def test_times_without_any_job_have_no_date_in_a_log_without_one(zero):
    """Headers state 0 for it, or milliseconds."""
    jobs = [LogJob(3600 * h, 3600 * h, 3000, 2) for h in (*range(24), *range(48, 72))]
    idle = idle_nodes(replace(log(*jobs), zero=zero))
    sentence = "hours, from 1.0 days after the first submission. If the machine was closed"
    assert any(sentence in each for each in idle.assumptions)


def test_jobs_whose_end_the_accounting_missed_are_named():
    """Slurm lists a runaway job as RUNNING with an unknown end, for ever."""
    usual = [LogJob(100.0 * k, 100.0 * k, 90.0, 1, ("a",)) for k in range(100)]
    runs_still = LogJob(9950.0, 9950.0, None, 1, ("b",))
    assert not any("no end" in s for s in idle_nodes(log(*usual, runs_still)).assumptions)
    runaway = LogJob(0.0, 2000.0, None, 2, ("c", "d"))
    [sentence] = [s for s in idle_nodes(log(*usual, runaway)).assumptions if "no end" in s]
    assert sentence.startswith("1 job has no end in the log")
    assert "with 4 node-hours" in sentence
    assert "runawayjobs" in sentence


def test_jobs_whose_start_the_log_does_not_say_are_named():
    jobs = [LogJob(0, 0, 50, 1), LogJob(0, None, 50, 1), LogJob(0, 100, 50, 1)]
    assert any("1 job is left out: the log does not say when" in s
               for s in idle_nodes(log(*jobs)).assumptions)  # fmt: skip


def test_a_few_jobs_without_names_do_not_cost_the_others_theirs():
    named = [LogJob(10.0 * k, 10.0 * k, 10.0, 1, (f"n{k % 2}",)) for k in range(100)]
    whole = idle_nodes(log(*named))
    idle = idle_nodes(log(*named, LogJob(50.0, 50.0, 5.0, 1)))
    assert idle.trace.gaps().length.tolist() == whole.trace.gaps().length.tolist()
    assert any("1 job is left out, with 0.5 % of the node-hours" in s for s in idle.assumptions)
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


def test_a_job_short_of_nodes_gets_those_freed_later():
    idle = idle_nodes(
        log(LogJob(0, 0, 100, 1), LogJob(0, 10, 100, 2), LogJob(0, 200, 1, 1), nodes=2)
    )
    assert spans(idle.trace) == [("n1", 110.0, 200.0), ("n2", 0.0, 10.0), ("n2", 110.0, 200.0)]
    assert idle.short_node_s == 90.0


def test_two_jobs_short_of_nodes_get_them_in_the_order_of_their_starts():
    jobs = [LogJob(0, 0, 100, 2), LogJob(0, 10, 200, 1), LogJob(0, 20, 50, 2), LogJob(0, 300, 1, 1)]
    # At 70 the third job ends without ever having had a node; at 100 the second gets one of two.
    idle = idle_nodes(log(*jobs, nodes=2))
    assert spans(idle.trace) == [("n1", 210.0, 300.0), ("n2", 100.0, 300.0)]


def test_the_real_log_agrees_with_a_count_by_second():
    log_ = read_log(shared("hpc_jobs/KTH-SP2-1996.swf.gz"))
    seen = observe(log_)
    begin, end = int(seen.begin_s), int(seen.end_s)
    assert (begin, end) == (seen.begin_s, seen.end_s)
    changes = np.zeros(end - begin + 1, dtype=np.int64)
    for job in log_.jobs:
        first, last = (
            min(max(int(at), begin), end) - begin for at in (job.start_s, job.start_s + job.run_s)
        )
        changes[first] += job.nodes
        changes[last] -= job.nodes
    used = np.cumsum(changes)[:-1]
    result = idle_nodes(log_, observed=seen)
    idle_s = int(np.maximum(100 - used, 0).sum())
    assert result.bounds.least_node_s == result.trace.gaps().length.sum() == idle_s
    assert result.short_node_s == int(np.maximum(used - 100, 0).sum()) > 0
    assert idle_s < result.bounds.most_node_s < 1.01 * idle_s
    moments = np.random.default_rng(1).integers(0, end - begin, 50)
    assert [int(result.trace.idle_at(at).sum()) for at in moments] == [
        max(0, 100 - used[at]) for at in moments
    ]


def test_jobs_without_names_beside_named_ones_give_bounds():
    named = [LogJob(10.0 * k, 10.0 * k, 10.0, 1, (f"n{k % 2}",)) for k in range(100)]
    idle = idle_nodes(log(*named, LogJob(50.0, 50.0, 5.0, 1)))
    # One of the two nodes is idle at any time, so that the job can have had it.
    assert idle.bounds == IdleBounds(990.0 - 5.0, 990.0)
    assert idle_nodes(log(*named)).bounds.exact


def test_how_the_number_of_nodes_is_known():
    jobs = [LogJob(0, 0, 7200, 3), LogJob(0, 86400, 3600, 1), LogJob(0, 172800, 1, 1)]

    def sentence(*args, **more):
        lines = idle_nodes(log(*jobs, **more), *args).assumptions
        return next(line for line in lines if "machine" in line and "nodes" in line)

    inferred = sentence()
    assert "taken to have the 3 nodes that jobs used at once at most, 0.0 days after" in inferred
    assert "for 2.0 hours in all; 96 % of the time" in inferred
    assert sentence(5) == "The machine has 5 nodes, as stated."
    assert sentence(nodes=4) == "The machine has 4 nodes, as the log says."


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
