"""Logs of batch jobs: what is read, what is skipped, and what is refused with which line."""

from __future__ import annotations

import pytest

from malletrain.sim.joblogs import read_gpu_csv, read_log, read_swf
from malletrain.sim.logged_jobs import LogJob, Resources
from malletrain.sim.workloads import WorkloadError
from tests.malletrain.sim.conftest import shared

SWF = """; MaxNodes: 50
; MaxProcs: 100
1 100 10 60 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1
2 160 -1 30 -1 -1 -1 3 -1 -1 1 1 1 -1 -1 -1 -1 -1
3 150 0 0 4 -1 -1 4 -1 -1 5 1 1 -1 -1 -1 -1 -1
"""


def write(tmp_path, text, name="log"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_swf(tmp_path):
    log = read_log(write(tmp_path, SWF))
    first = LogJob(0.0, 10.0, 60.0, 2, user="u1", allocated=Resources(cpus=4))
    second = LogJob(60.0, None, 30.0, 2, user="u1", allocated=Resources(cpus=3))
    assert log.jobs == (first, second)
    assert (log.nodes, log.cpus_per_node, log.skipped) == (50, 2, 1)
    counted = read_swf(write(tmp_path, SWF), per_node=1)
    assert (counted.jobs[0].nodes, counted.jobs[0].allocated) == (4, None)


def test_parts_of_a_job_of_swf_are_not_counted_beside_the_whole(tmp_path):
    """Its second and third line are what it ran before and after a stop."""
    rest = "-1 -1 4 -1 -1 {0} 1 1 -1 -1 -1 -1 -1"
    rows = [
        f"1 0 10 100 4 {rest.format(1)}",
        f"1 0 10 40 4 {rest.format(2)}",
        f"1 -1 20 60 4 {rest.format(3)}",
        f"2 5 10 30 4 {rest.format(2)}",
    ]
    log = read_log(write(tmp_path, "\n".join(rows) + "\n"))
    assert [(job.start_s, job.run_s) for job in log.jobs] == [(10.0, 100.0), (15.0, 30.0)]
    assert "2 lines of parts of jobs (status 2 to 4)" in log.notes[0]


@pytest.mark.parametrize("number", [-1, 0])
def test_jobs_of_swf_without_numbers_are_not_parts_of_each_other(tmp_path, number):
    rest = "4 -1 -1 4 -1 -1 {0} 1 1 -1 -1 -1 -1 -1"
    rows = [f"{number} {at} 10 40 {rest.format(status)}" for at, status in enumerate((1, 2, 3, 4))]
    log = read_log(write(tmp_path, "\n".join(rows) + "\n"))
    assert [job.submit_s for job in log.jobs] == [0.0, 1.0, 2.0, 3.0]
    assert not log.notes


def test_numbers_of_a_header_may_have_commas(tmp_path):
    text = SWF.replace(" 50", " 1,050", 1).replace(" 100", " 2,100", 1)
    log = read_log(write(tmp_path, text))
    assert (log.nodes, log.cpus_per_node) == (1050, 2)


def test_how_the_cpus_of_a_node_are_known(tmp_path):
    def cpus_of_a_node(text, **more):
        log = read_swf(write(tmp_path, text), **more)
        return log.cpus_per_node, log.cpus_ground, log.cpus_inferred

    assert cpus_of_a_node(SWF) == (2, "by the log's header, MaxProcs and MaxNodes", False)
    assert cpus_of_a_node(SWF, per_node=4) == (4, "as stated, --per-node", False)
    sizes = "; MaxProcs: 96000\n1 100 10 60 96 -1 -1 96 -1 -1 1 1 1 -1 -1 -1 -1 -1\n"
    assert cpus_of_a_node(sizes) == (96, "by the sizes of jobs; else: --per-node", True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 2 3", "line 1: A job in this format .SWF. is 18 numbers"),
        ("; x\n1 100 10 60 4 -1 -1 four -1 -1 1 1 1 -1 -1 -1 -1 -1", "line 2"),
        ("; only a comment\n", "no job that ran"),
        (
            "1 100 10 -1 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1",
            "all 1 entries are of jobs that never ran",
        ),
    ],
)
def test_bad_swf(tmp_path, text, says):
    with pytest.raises(WorkloadError, match=says):
        read_swf(write(tmp_path, text))


def test_gpu_csv(tmp_path):
    text = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,9,1,a\n"
    text += "2017-10-09 07:00:55,10,1,1,a\n2017-10-09 07:00:56,0,1,1,a\n"
    log = read_log(write(tmp_path, text), per_node=8)
    first, second = LogJob(0.0, None, 10.0, 1, user="a"), LogJob(60.0, None, 66.0, 2, user="a")
    assert log.jobs == (first, second)
    assert log.skipped == 1
    with pytest.raises(WorkloadError, match="line 2: The job cannot be read"):
        read_gpu_csv(write(tmp_path, text.replace("66.0", "x")))
    with pytest.raises(WorkloadError, match="no column num_gpus"):
        read_gpu_csv(write(tmp_path, text.replace("num_gpus", "gpus")))


def test_the_public_logs():
    log = read_log(shared("hpc_jobs/KTH-SP2-1996.swf.gz"))
    assert (len(log.jobs), log.nodes, log.skipped) == (28481, 100, 8)
    assert read_log(shared("hpc_jobs/philly_jobs.csv.gz"), per_node=8).jobs[0].nodes == 1
