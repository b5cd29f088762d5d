"""Logs of batch jobs: what is read, what is skipped, and what is refused with which line."""

from __future__ import annotations

from datetime import datetime

import pytest

from malletrain.sim.accounting_logs import read_pbs, read_sacct
from malletrain.sim.joblogs import read_gpu_csv, read_log, read_swf
from malletrain.sim.logged_jobs import LogJob
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


def seconds(text):
    return datetime.fromisoformat(text).timestamp()


def test_swf(tmp_path):
    log = read_log(write(tmp_path, SWF))
    first, second = LogJob(0.0, 10.0, 60.0, 2, user="u1"), LogJob(60.0, None, 30.0, 2, user="u1")
    assert log.jobs == (first, second)
    assert (log.nodes, log.skipped) == (50, 1)
    assert read_swf(write(tmp_path, SWF), per_node=1).jobs[0].nodes == 4


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


SACCT = """JobID|Submit|Start|End|State|NNodes|NodeList
11|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:00:00|COMPLETED|3|n[01-02],m1
12|2024-01-01T00:10:00|Unknown|Unknown|PENDING|1|None assigned
13|2024-01-01T00:20:00|2024-01-01T00:30:00|Unknown|RUNNING|1|n03
"""


def test_sacct(tmp_path):
    log = read_log(write(tmp_path, SACCT))
    assert log.jobs == (
        LogJob(0.0, 60.0, 3540.0, 3, ("n01", "n02", "m1")),
        LogJob(1200.0, 1800.0, None, 1, ("n03",)),
    )
    assert (log.nodes, log.skipped) == (None, 1)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("|End", "|Ende", "no column End; run: sacct"),
        ("2024-01-01T00:01:00", "yesterday", "line 2: 'yesterday' is no time"),
        ("n[01-02],m1", "n[02-01]", "line 2: This is no list of nodes"),
        ("n[01-02],m1", "n[01-02", "line 2: This is no list of nodes"),
        ("|3|", "|", "line 2: There are 6 columns instead of 7"),
    ],
)
def test_bad_sacct(tmp_path, old, new, says):
    with pytest.raises(WorkloadError, match=says):
        read_sacct(write(tmp_path, SACCT.replace(old, new, 1)))


def pbs(day, records):
    return "".join(f"{day} {time};{kind};{job};{message}\n" for time, kind, job, message in records)


def test_pbs(tmp_path):
    first, second = seconds("2024-03-01T10:00:00"), seconds("2024-03-02T01:00:00")
    host = "exec_host=n1/0*64+n2/0*64 exec_vnode=(n1:ncpus=64)+(n2:ncpus=64)"
    one = f"user=u queue=workq ctime={first:.0f} start={first + 60:.0f} {host}"
    text = pbs(
        "03/01/2024",
        [
            ("10:00:00", "Q", "1.s", "queue=workq"),
            ("10:01:00", "S", "1.s", one),
            ("11:00:00", "S", "2.s", f"ctime={first:.0f} start={first + 3600:.0f} exec_host=n3/0"),
            ("11:30:00", "L", "license", "floating license hour:0"),
            ("12:00:00", "R", "2.s", "user=u"),
            ("13:00:00", "E", "9.s", "user=u session=0 Exit_status=-1"),
            (
                "23:00:00",
                "S",
                "3.s",
                f"ctime={first + 10:.0f} start={first + 46800:.0f} exec_host=n3/0",
            ),
        ],
    )
    write(tmp_path, text, "20240301")
    write(
        tmp_path,
        pbs("03/02/2024", [("01:00:00", "E", "1.s", f"{one} end={second:.0f} Exit_status=0")]),
        "20240302",
    )
    write(tmp_path, "not a log", "notes.txt")
    log = read_log(tmp_path)
    assert log.jobs == (
        LogJob(0.0, 60.0, second - first - 60.0, 2, ("n1", "n2")),
        LogJob(0.0, 3600.0, 3600.0, 1, ("n3",)),
        LogJob(10.0, 46800.0, None, 1, ("n3",)),
    )
    assert log.skipped == 1


def test_bad_pbs(tmp_path):
    with pytest.raises(WorkloadError, match="named by day"):
        read_pbs(tmp_path)
    write(tmp_path, "hello\n", "20240301")
    with pytest.raises(
        WorkloadError, match="20240301, line 1: This is no PBS accounting record: 'hello'"
    ):
        read_pbs(tmp_path)


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
