"""Where the observation of a machine begins and ends: known answers."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.sim.accounting_logs import read_pbs, read_sacct
from malletrain.sim.idle import idle_nodes
from malletrain.sim.joblogs import read_swf
from malletrain.sim.logged_jobs import JobLog, LogJob
from malletrain.sim.observation import moment, observe
from malletrain.sim.workloads import WorkloadError

FROM, TO = datetime(2024, 1, 1), datetime(2024, 2, 1)
HEADER = "JobID|Submit|Start|End|State|NNodes|NodeList"


def busy_machine(seed, nodes=12, longest_h=72.0):
    """(start, end, node) of jobs that leave no node idle from mid December to mid February."""
    rng = np.random.default_rng(seed)
    for node in range(nodes):
        at = FROM - timedelta(days=14, seconds=int(rng.uniform(0, 86400)))
        while at < TO + timedelta(days=14):
            end = at + timedelta(seconds=int(rng.uniform(600, longest_h * 3600)))
            yield at, end, f"n{node:02d}"
            at = end


def rows(jobs, logged=lambda start, end: start < TO and end > FROM, running=False):
    """What sacct prints of them for January."""
    yield HEADER
    for number, (start, end, node) in enumerate(jobs):
        if logged(start, end):
            unknown = running and end > TO
            submit = (start - timedelta(hours=1)).isoformat()
            yield (
                f"{number}|{submit}|{start.isoformat()}|"
                f"{'Unknown' if unknown else end.isoformat()}|"
                f"{'RUNNING' if unknown else 'COMPLETED'}|1|{node}"
            )


def written(tmp_path, lines):
    path = tmp_path / "january.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("running", [True, False])
def test_a_machine_that_is_busy_all_month_yields_nothing(tmp_path, seed, running):
    log = read_sacct(written(tmp_path, rows(busy_machine(seed), running=running)))
    assert idle_nodes(log).trace.gaps().length.sum() == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_still_ran_may_be_missing(tmp_path, seed):
    """A log of what had ended by the first of February."""
    lines = rows(busy_machine(seed), logged=lambda start, end: FROM < end <= TO)
    result = idle_nodes(read_sacct(written(tmp_path, lines)))
    assert result.trace.gaps().length.sum() == 0.0
    assert result.trace.duration_s > 20 * 86400
    assert any("jobs that still ran" in sentence for sentence in result.assumptions)


def test_where_the_longest_job_is_too_long_little_is_missing(tmp_path):
    jobs = [*busy_machine(7, nodes=100, longest_h=24.0)]
    cut = next(k for k, (start, _, _) in enumerate(jobs) if start > FROM)
    # One job takes 20 days: to cut that much off both ends would leave nothing.
    whole = (FROM + timedelta(days=1), FROM + timedelta(days=21), jobs[cut][2])
    jobs = [j for j in jobs if j[2] != whole[2]] + [whole]
    lines = rows(jobs, logged=lambda start, end: FROM < end <= TO)
    result = idle_nodes(read_sacct(written(tmp_path, lines)))
    idle = result.trace.gaps().length.sum() / result.trace.duration_s / 99
    assert 0.0 < idle < 0.05
    assert any("longer than a quarter" in sentence for sentence in result.assumptions)


def test_what_the_reader_knows_counts(tmp_path):
    log = read_sacct(written(tmp_path, rows(busy_machine(1))))
    seen = observe(log, moment("2024-01-01", log), moment("2024-02-01", log))
    assert seen.end_s - seen.begin_s == 31 * 86400
    assert not seen.sentences
    assert idle_nodes(log, observed=seen).trace.gaps().length.sum() == 0.0


def test_counts_suffice(tmp_path):
    lines = [line.rpartition("|")[0] for line in rows(busy_machine(2))]
    result = idle_nodes(read_sacct(written(tmp_path, lines)))
    assert result.trace.gaps().length.sum() == 0.0
    assert len(result.trace.names) == 12
    emptied = [line.replace("|n03", "|").replace("|n04", "|None assigned") for line in lines]
    assert len(read_sacct(written(tmp_path, emptied)).jobs) == len(lines) - 1


@pytest.mark.parametrize("nodes", ["n[01-02],m1", "m1", "rack[1-2]n[1,3-4],m1,m2"])
@pytest.mark.parametrize("quote", ["", '"'])
def test_commas_between_the_columns(tmp_path, nodes, quote):
    def columns(end):
        start, listed = end - timedelta(hours=1), f"{quote}{nodes}{quote}"
        return f"7,{start.isoformat()},{start.isoformat()},{end.isoformat()},COMPLETED,9,{listed}"

    lines = [HEADER.replace("|", ","), *(columns(FROM + timedelta(hours=k)) for k in (1, 2, 3))]
    log = read_sacct(written(tmp_path, lines))
    assert len(log.jobs) == 3
    assert log.jobs[0].names[-1] in ("m1", "m2")
    between = HEADER.replace("|", ",").replace("State,NNodes,NodeList", "NodeList,NNodes,State")
    assert between.endswith("State")
    moved = [between, *(f"{x.split(',COMP')[0]},{quote}{nodes}{quote},9,DONE" for x in lines[1:])]
    assert read_sacct(written(tmp_path, moved)).jobs == log.jobs


def test_pbs_knows_everything_from_its_first_record(tmp_path):
    def record(at, kind, job, start, end=None):
        stop = "" if end is None else f" end={int(end.timestamp())}"
        return (
            f"{at:%m/%d/%Y %H:%M:%S};{kind};{job};ctime={int(start.timestamp())} "
            f"start={int(start.timestamp())} exec_host={job.partition('.')[2]}/0{stop}"
        )

    records = []
    for number, (start, end, node) in enumerate(busy_machine(3, nodes=5)):
        if FROM <= start < TO:
            records.append((start, record(start, "S", f"{number}.{node}", start)))
        if FROM <= end < TO:
            records.append((end, record(end, "E", f"{number}.{node}", start, end)))
    path = written(tmp_path, [line for _, line in sorted(records)])
    log = read_pbs(path)
    seen = observe(log)
    assert log.zero + seen.begin_s == min(at for at, _ in records).timestamp()
    # A job that began before and ended after has no record at all; none is so long here.
    assert idle_nodes(log, observed=seen).trace.gaps().length.sum() == 0.0


def swf(tmp_path, jobs, header=""):
    text = "".join(
        f"{n} {submit} 0 {run} {procs} -1 -1 {procs} -1 -1 1 1 1 -1 -1 -1 -1 -1\n"
        for n, (submit, run, procs) in enumerate(jobs)
    )
    return written(tmp_path, [header, text.rstrip()])


def test_the_edges_of_a_log_by_submission(tmp_path):
    """Four nodes with one job after another; jobs before and after the log are missing."""
    jobs = sorted((100 * k + 25 * node, 100, 1) for node in range(4) for k in range(100))
    result = idle_nodes(read_swf(swf(tmp_path, jobs)))
    assert result.trace.gaps().length.sum() == 0.0
    assert result.trace.duration_s > 9000


def test_nodes_run_empty_after_the_last_submission(tmp_path):
    """A queue that the machine works off: jobs that were submitted later are not in the log."""
    lines = "".join(
        f"{k} {60 * k} {540 * k} 600 1 -1 -1 1 -1 -1 1 1 1 -1 -1 -1 -1 -1\n" for k in range(100)
    )
    log = read_swf(written(tmp_path, [lines.rstrip()]))
    seen = observe(log)
    assert (seen.begin_s, seen.end_s) == (600.0, 99 * 60.0)
    (line,) = [line for line in seen.sentences if "last submission" in line]
    assert "14.8 hours, after the last submission, are left out" in line
    stated = observe(log, end=50000.0)
    assert stated.end_s == 50000.0
    assert "In the last 12.2 hours before the stated end (--to) no job" in stated.sentences[-1]


def test_an_unusual_time_without_submissions_is_left_out(tmp_path):
    """sacct of a machine that is drained: jobs of the queue start until the end of the month."""

    def lines(last_submission_h):
        yield HEADER
        for k in range(300):
            start = FROM + timedelta(hours=2 * k)
            submit = min(start, FROM + timedelta(hours=last_submission_h))
            end = start + timedelta(hours=2)
            yield f"{k}|{submit.isoformat()}|{start.isoformat()}|{end.isoformat()}|DONE|1|n1"
        late = FROM + timedelta(hours=598)
        yield f"300|{FROM.isoformat()}|{late.isoformat()}|Unknown|RUNNING|1|n2"

    usual = observe(read_sacct(written(tmp_path, lines(1000))))
    assert usual.end_s == 598 * 3600.0
    drained = observe(read_sacct(written(tmp_path, lines(400))))
    assert drained.end_s == 400 * 3600.0
    assert any("without submissions for so long before" in line for line in drained.sentences)
    # The silence is no longer than one before it.
    assert observe(read_sacct(written(tmp_path, lines(596)))).end_s == 598 * 3600.0


def test_processors_are_no_nodes(tmp_path):
    header = "; MaxNodes: 93312\n; MaxProcs: 93312"
    jobs = [(60 * k, 600, 16 * (1 + k % 9)) for k in range(100)] + [(6100, 60, 5)]
    log = read_swf(swf(tmp_path, jobs, header))
    assert (log.nodes, log.jobs[1].nodes) == (93312 // 16, 2)
    assert any("taken to have 16" in sentence for sentence in log.notes)
    odd = [(60 * k, 600, 1 + k % 7) for k in range(100)]
    with pytest.raises(WorkloadError, match=r"93,312 processors .* Give --per-node N"):
        read_swf(swf(tmp_path, odd, header))
    assert read_swf(swf(tmp_path, odd, header), per_node=1).nodes == 93312


def test_times_on_the_command_line():
    log = JobLog("test", (LogJob(0, 0, 1, 1),), zero=FROM.timestamp())
    assert moment("2024-01-02", log) == 86400.0
    assert moment("2024-01-01T06:00", log) == 6 * 3600.0
    assert moment("1.5 d", log) == 36 * 3600.0
    assert moment("36h", log) == 36 * 3600.0
    with pytest.raises(WorkloadError, match="'soon' is no time"):
        moment("soon", log)
    with pytest.raises(WorkloadError, match="knows no dates"):
        moment("2024-01-02", JobLog("test", log.jobs))


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(1, 1e5), st.integers(1, 9)), min_size=2, max_size=30
    ),
    st.sampled_from(["all", "running", "submitted"]),
)
def test_an_observation_lies_within_its_log_or_is_refused(jobs, lists):
    log = JobLog(
        "test", tuple(LogJob(at, at, run, n) for at, run, n in sorted(jobs)), None, 0, lists
    )
    try:
        seen = observe(log)
    except WorkloadError:
        return
    first, last = min(at for at, _, _ in jobs), max(at for at, _, _ in jobs)
    assert first <= seen.begin_s < seen.end_s <= last


def pbs_of_a_busy_machine(hours, nodes=400, job_h=48.0):
    """What PBS records within so many hours of nodes that are never idle: their jobs take two days
    and start one after another. The log's zero is two days before its first record.
    """
    jobs = []
    for node in range(nodes):
        end_h, names = (node + 0.5) * job_h / nodes, (f"n{node}",)
        while end_h <= hours:  # the record of an end says the start, too
            jobs.append(LogJob(3600 * end_h, 3600 * end_h, 3600 * job_h, 1, names))
            end_h += job_h
        if end_h > job_h:  # the next job, which still runs
            jobs.append(LogJob(3600 * end_h, 3600 * end_h, None, 1, names))
    jobs.sort(key=lambda job: job.start_s)
    return JobLog("PBS accounting", tuple(jobs), lists="since", since_s=3600 * job_h)


def test_jobs_that_run_through_a_short_log_of_pbs_are_named():
    """Half of the nodes have no record within a day: as many node-hours as are known."""
    log = pbs_of_a_busy_machine(24)
    assert len({name for job in log.jobs for name in job.names}) == 200
    [sentence] = [s for s in observe(log).sentences if "until after the last one" in s]
    assert "in the log of 23.9 hours" in sentence
    assert "200 jobs ended that had run for longer" in sentence
    assert "about 4,812 node-hours are missing, beside 4,788 that are known" in sentence
    assert idle_nodes(log).assumptions.count(sentence) == 1


@pytest.mark.parametrize("hours", [47.9, 96, 400])
def test_a_longer_log_of_pbs_has_all_jobs(hours):
    log = pbs_of_a_busy_machine(hours)
    assert len({name for job in log.jobs for name in job.names}) >= 399
    assert not any("until after the last one" in s for s in observe(log).sentences)
