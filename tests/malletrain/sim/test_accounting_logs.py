"""Accounting of batch schedulers: what is read, what is skipped, and what is refused with which
line.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from malletrain.cli import main
from malletrain.sim.accounting_logs import SACCT as COMMAND
from malletrain.sim.accounting_logs import read_pbs, read_sacct
from malletrain.sim.joblogs import read_log
from malletrain.sim.logged_jobs import LogJob, Resources
from malletrain.sim.text_files import json_objects
from malletrain.sim.workloads import WorkloadError
from tests.command_runner import CliRunner
from tests.malletrain.sim.test_joblogs import write


def seconds(text):
    return datetime.fromisoformat(text).timestamp()


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
    cpus = {"allocated": Resources(), "per_node": (Resources(cpus=64),) * 2}
    assert log.jobs == (
        LogJob(0.0, 60.0, second - first - 60.0, 2, ("n1", "n2"), **cpus),
        LogJob(0.0, 3600.0, 3600.0, 1, ("n3",)),
        LogJob(10.0, 46800.0, None, 1, ("n3",)),
    )
    assert log.skipped == 1
    places = [
        f"{tmp_path / '20240302'}, line 1",
        *(f"{tmp_path / '20240301'}, line {k}" for k in (3, 7)),
    ]
    assert [log.place(job) for job in log.jobs] == places


def test_bad_pbs(tmp_path):
    with pytest.raises(WorkloadError, match="named by day"):
        read_pbs(tmp_path)
    write(tmp_path, "hello\n", "20240301")
    with pytest.raises(
        WorkloadError, match="20240301, line 1: This is no PBS accounting record: 'hello'"
    ):
        read_pbs(tmp_path)


@pytest.mark.parametrize(
    ("zone", "end", "run_s"),
    [("America/Chicago", "01:10", 1200), ("UTC", "01:10", 0), ("America/Chicago", "00:59", 0)],
)
def test_a_job_of_sacct_that_ran_while_clocks_were_set_back(
    tmp_path, monkeypatch, zone, end, run_s
):
    """From 01:50 to 01:10 of the hour after it, which Slurm calls the same."""
    times = f"2024-11-03T01:00:00|2024-11-03T01:50:00|2024-11-03T{end}:00"
    text = f"{SACCT}15|{times}|COMPLETED|1|n9\n"
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        log = read_log(write(tmp_path, text))
    time.tzset()
    assert [job.run_s for job in log.jobs[2:]] == [run_s] * bool(run_s)
    assert log.skipped == 1 + (not run_s)


def test_sacct_of_a_month_and_the_next_one(tmp_path):
    """Two files put together: the header stands twice, and so does what ran in both months."""
    ended = SACCT.replace("00:30:00|Unknown|RUNNING", "00:30:00|2024-01-01T02:00:00|COMPLETED")
    once = read_sacct(write(tmp_path, ended)).jobs
    assert once[1] == LogJob(1200.0, 1800.0, 5400.0, 1, ("n03",))
    for both in (SACCT + ended, ended + SACCT, ended + ended):
        assert read_sacct(write(tmp_path, both)).jobs == once


def test_steps_of_jobs_are_no_jobs(tmp_path):
    first = SACCT.splitlines()[1]
    assert first.startswith("11|")
    steps = [first.replace("11|", f"11.{step}|") for step in ("batch", "extern", "0")]
    log = read_sacct(write(tmp_path, SACCT + "\n".join(steps) + "\n"))
    assert log.jobs == read_sacct(write(tmp_path, SACCT)).jobs
    note = log.notes[0]
    assert "lists 3 steps of jobs, which are left out" in note


def test_sacct_by_another_name_of_the_number_of_nodes_or_without(tmp_path):
    jobs = read_sacct(write(tmp_path, SACCT)).jobs
    assert read_sacct(write(tmp_path, SACCT.replace("NNodes", "AllocNodes"))).jobs == jobs
    rows = [line.split("|") for line in SACCT.splitlines()]
    without = "\n".join("|".join([*row[:5], row[6]]) for row in rows)
    assert read_sacct(write(tmp_path, without)).jobs == jobs
    neither = "\n".join("|".join(row[:5]) for row in rows)
    with pytest.raises(WorkloadError, match="no column NNodes; run: sacct"):
        read_sacct(write(tmp_path, neither))
    thousands = "\n".join("|".join([*row[:5], row[5].replace("3", "1.50K")]) for row in rows)
    assert read_sacct(write(tmp_path, thousands)).jobs[0].nodes == 1536


def test_runs_of_requeued_jobs_count_and_the_command_asks_for_them(tmp_path):
    """A full machine of two nodes whose jobs were requeued again and again."""
    rows = [
        f"{job}|2024-01-01T00:00:00|2024-01-01T{hour:02d}:00:00|2024-01-01T{hour + 1:02d}:00:00"
        f"|{'REQUEUED' if hour < 3 else 'COMPLETED'}|1|n{job}"
        for job in (1, 2)
        for hour in range(4)
    ]
    whole = "\n".join([SACCT.splitlines()[0], *rows, ""])
    log = read_sacct(write(tmp_path, whole))
    assert sum(job.run_s for job in log.jobs) == 2 * 4 * 3600
    assert log.notes == ()
    last = "\n".join([SACCT.splitlines()[0], rows[3], rows[7], ""])
    (note,) = read_sacct(write(tmp_path, last)).notes
    assert "with --duplicates only" in note
    assert " --duplicates " in COMMAND
    help_of_command = CliRunner().invoke(main, ["assess", "--help"]).output
    for text in (help_of_command, (Path(__file__).parents[3] / "docs/assess.md").read_text()):
        assert "sacct --allusers --allocations --duplicates --parsable2" in " ".join(text.split())


def test_times_may_be_epoch_seconds(tmp_path):
    text = SACCT
    for word in {word for word in SACCT.replace("\n", "|").split("|") if word.startswith("2024")}:
        text = text.replace(word, f"{seconds(word):.0f}")
    assert "2024" not in text
    assert read_sacct(write(tmp_path, text)).jobs == read_sacct(write(tmp_path, SACCT)).jobs


def test_a_record_of_pbs_with_line_breaks_in_it(tmp_path):
    start = seconds("2024-03-01T10:00:00")
    one = f"user=u ctime={start:.0f} start={start:.0f} exec_host=n1/0*64 project=a\nb\n\x0b;c"
    records = [
        ("10:00:00", "S", "1.x", one),
        ("11:00:00", "E", "1.x", f"jobname=x\n03/01/2024;y\n{one} end={start + 3600:.0f}"),
    ]
    (job,) = read_pbs(write(tmp_path, pbs("03/01/2024", records), "20240301")).jobs
    assert (job.run_s, job.names) == (3600.0, ("n1",))


def test_a_name_in_another_encoding_does_not_matter(tmp_path):
    rows = [f"{line}|{'JobName' if not k else 'tést'}" for k, line in enumerate(SACCT.splitlines())]
    path = tmp_path / "log"
    path.write_bytes("\n".join(rows).encode("latin-1"))
    assert read_sacct(path).jobs == read_sacct(write(tmp_path, SACCT)).jobs


def test_a_file_that_was_cut_short(tmp_path):
    with pytest.raises(WorkloadError, match="the file ends in the middle of a line"):
        read_sacct(write(tmp_path, SACCT[:-20]))
    with pytest.raises(WorkloadError, match="line 2: There are 8 columns instead of 7; use"):
        read_sacct(write(tmp_path, SACCT.replace("n[01-02],m1", "a|b", 1)))


def test_pbs_of_a_machine_in_another_time_zone(tmp_path):
    """Its records say the time of its own clock, and starts and ends in seconds since the epoch."""
    began = seconds("2024-03-01T10:00:00")
    job = f"ctime={began - 600:.0f} start={began:.0f} exec_host=n1/0"
    records = [("%02d:00:00", "S", "1.s", job), ("%02d:30:00", "R", "1.s", "user=u")]
    here, there = (
        pbs("03/01/2024", [("08:00:00" if hour == 10 else "02:00:00", "Q", "1.s", "")])
        + pbs("03/01/2024", [(time % hour, *more) for time, *more in records])
        for hour in (10, 4)
    )
    first, second = (
        read_pbs(write(tmp_path, text, name)) for text, name in ((here, "1"), (there, "2"))
    )
    assert first.jobs == second.jobs == (LogJob(0.0, 600.0, 1800.0, 1, ("n1",)),)
    assert first.since_s == second.since_s == -6600.0


GPU_SACCT = """JobID|Submit|Start|End|State|NNodes|NodeList|AllocTRES
11|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:00:00|COMPLETED|3|n[01-02],m1|billing=12,cpu=12,gres/gpu:a100=6,gres/gpu=6,mem=60G,node=3
13|2024-01-01T00:20:00|2024-01-01T00:30:00|Unknown|RUNNING|1|n03|cpu=1,mem=61440M,node=1
14|2024-01-01T00:20:00|2024-01-01T00:40:00|Unknown|RUNNING|1|n04|
"""


def test_what_jobs_of_sacct_hold(tmp_path):
    log = read_sacct(write(tmp_path, GPU_SACCT))
    assert log.lists_resources
    assert not read_sacct(write(tmp_path, SACCT)).lists_resources
    allocated = [job.allocated for job in log.jobs]
    sixty = 60 * 2**30
    assert allocated == [Resources(6, 12, sixty), Resources(0, 1, sixty), None]
    assert [log.place(job).rpartition(", ")[2] for job in log.jobs] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    commas = GPU_SACCT.replace("|", ",")
    assert read_sacct(write(tmp_path, commas)).jobs == log.jobs
    quoted = "\n".join(
        ",".join(f'"{word}"' for word in line.split("|")) for line in GPU_SACCT.splitlines()
    )
    assert read_sacct(write(tmp_path, quoted.replace('"', "", 16))).jobs == log.jobs
    with pytest.raises(WorkloadError, match="line 3: 'mem=61440X' has no amount that Slurm writes"):
        read_sacct(write(tmp_path, GPU_SACCT.replace("61440M", "61440X")))
    shards = GPU_SACCT.replace("cpu=1,mem", "cpu=1,gres/shard=2,mem")
    assert any(
        "1 job holds parts of GPUs" in note for note in read_sacct(write(tmp_path, shards)).notes
    )


def json_job(job, submit, start, end, nodes, count, tres, wrap):
    """A job as sacct --json prints it; ``wrap``: as newer versions print numbers."""
    number = (lambda n: {"set": True, "infinite": False, "number": n}) if wrap else (lambda n: n)
    kinds = [word.partition("=")[::2] for word in tres.split(",")]
    return {
        "job_id": job,
        "nodes": nodes,
        "allocation_nodes": count,
        "time": {
            "submission": number(seconds(submit)),
            "start": number(seconds(start)),
            "end": number(seconds(end)) if end else {"set": False, "number": 5} if wrap else 0,
        },
        "state": {"current": ["COMPLETED"] if wrap else "COMPLETED", "reason": "None"},
        "steps": [{"tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 6}]}}] * 3,
        "tres": {
            "allocated": [
                {"type": kind.partition("/")[0], "name": kind.partition("/")[2] or None, "count": n}
                for kind, n in ((kind, int(n)) for kind, n in kinds)
            ]
            + [{"type": "energy", "name": None, "count": None}]
        },
    }


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrap", [False, True])
def test_json_of_sacct_says_the_same(tmp_path, wrap, indent, monkeypatch):
    monkeypatch.setattr("malletrain.sim.text_files.CHUNK_CHARACTERS", 7)
    begin = "2024-01-01T00:"
    first = "cpu=12,gres/gpu=6,gres/gpu:a100=6,mem=61440,node=3"
    text = json.dumps(
        {
            "meta": {"jobs": [1], "version": 12},
            "jobs": [
                json_job(
                    11,
                    f"{begin}00",
                    f"{begin}01",
                    "2024-01-01T01:00",
                    "n[01-02],m1",
                    3,
                    first,
                    wrap,
                ),
                json_job(
                    13, f"{begin}20", f"{begin}30", "", "n03", 1, "cpu=1,mem=61440,node=1", wrap
                ),
            ],
            "errors": [],
        },
        indent=indent,
    )
    path = write(tmp_path, text)
    log = read_log(path)
    rows = GPU_SACCT.rpartition("14|")[0]
    assert log.jobs == read_sacct(write(tmp_path, rows, "rows")).jobs
    assert log.lists_resources
    where = "line 1:" if indent is None else "line 9:"
    with pytest.raises(WorkloadError, match=f"{where} The job is not as sacct --json prints it"):
        read_sacct(write(tmp_path, text.replace('"submission"', '"submitted"', 1)))
    with pytest.raises(WorkloadError, match="This is not JSON"):
        read_sacct(write(tmp_path, text[: len(text) // 2]))
    with pytest.raises(WorkloadError, match="has no list 'jobs'"):
        read_sacct(write(tmp_path, '{"meta": 1}'))


def test_json_of_a_real_slurm(tmp_path):
    path = Path(__file__).parents[3].parent / "shared" / "slurm" / "outputs" / "sacct.json"
    if not path.exists():
        pytest.skip("the recorded output is not here")
    entries = json.loads(path.read_text())["jobs"]
    ran = [job for job in entries if job["time"]["start"] and job["nodes"] != "None assigned"]
    log = read_sacct(path)
    assert 0 < len(log.jobs) <= len(ran)
    first = next(job for job in ran if job["job_id"] == 1)
    (read,) = [job for job in log.jobs if job.names == ("n1", "n2", "n3", "n4")][:1]
    assert read.allocated == Resources(cpus=8)
    assert read.run_s == first["time"]["end"] - first["time"]["start"]


RECORDED = Path(__file__).parents[2] / "scavenger" / "slurm" / "recorded"


@pytest.mark.parametrize("recorded", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_text_and_json_of_a_release_of_slurm_say_the_same(tmp_path, recorded):
    """Recorded by ``python -m tests.slurm.record``."""
    answers = json.loads(recorded.read_text())
    (tmp_path / "text").write_text(answers["sacct"])
    (tmp_path / "json").write_text(answers["sacct json"])
    text, listed = (
        [replace(job, line=0) for job in read_sacct(tmp_path / name).jobs]
        for name in ("text", "json")
    )
    assert text == listed
    ran = {job.names: job for job in text if job.run_s and job.run_s > 5}
    assert ran[("n1",)].allocated == Resources(cpus=2, memory=300 * 2**20)
    assert ran[("n2",)].allocated == Resources(cpus=8, memory=2000 * 2**20)


def test_bad_resources_of_pbs(tmp_path):
    start = seconds("2024-03-01T10:00:00")
    job = f"ctime={start:.0f} start={start:.0f} exec_host=n1/0 exec_vnode=(n1:ngpus=two)"
    path = write(tmp_path, pbs("03/01/2024", [("10:00:00", "S", "1.s", job)]), "20240301")
    with pytest.raises(WorkloadError, match="20240301, line 1: 'ngpus=two' is no number"):
        read_pbs(path)


def test_a_large_json_file_is_read_piece_by_piece(tmp_path):
    """The first jobs are there before the end of the file is read, which is damaged."""
    path = write(tmp_path, '{"jobs": [{"a": 1}, ' + '{"a": 2}, ' * 200_000 + "oops]}")
    entries = json_objects(path, "jobs")
    assert next(entries) == (1, {"a": 1})
    assert next(entries) == (1, {"a": 2})
    with pytest.raises(WorkloadError, match="line 1: This is not JSON"):
        list(entries)


CHICAGO = "America/Chicago"
"""Its clocks were set back from 2:00 to 1:00 on 3 November 2024: 7:00 UTC."""


@pytest.mark.parametrize(
    ("submit", "start", "end", "utc"),
    [
        ("00:50", "01:50", "01:20", ("05:50", "06:50", "07:20")),
        ("01:50", "01:10", "05:00", ("06:50", "07:10", "11:00")),
        ("01:50", "01:10", "01:40", ("06:50", "07:10", "07:40")),
        ("00:10", "00:40", "03:00", ("05:10", "05:40", "09:00")),
    ],
)
def test_times_of_sacct_around_the_end_of_summer_time(
    tmp_path, monkeypatch, submit, start, end, utc
):
    row = "|".join(f"2024-11-03T{each}:00" for each in (submit, start, end))
    text = f"{SACCT.splitlines()[0]}\n11|{row}|COMPLETED|1|n1\n"
    with monkeypatch.context() as patch:
        patch.setenv("TZ", CHICAGO)
        time.tzset()
        log = read_sacct(write(tmp_path, text))
    time.tzset()
    (job,) = log.jobs
    times = (0.0, job.start_s, job.start_s + job.run_s)
    midnight = datetime(2024, 11, 3, tzinfo=timezone.utc).timestamp()
    assert [log.zero + each - midnight for each in times] == [
        3600 * int(each[:2]) + 60 * int(each[3:]) for each in utc
    ]


def test_a_job_that_started_before_its_submission_keeps_its_time(tmp_path):
    """Its end would be wrong if its start were moved."""
    text = SACCT.replace("11|2024-01-01T00:00:00", "11|2024-01-01T00:05:00")
    log = read_log(write(tmp_path, text))
    assert log.jobs[0] == LogJob(0.0, 0.0, 3540.0, 3, ("n01", "n02", "m1"))
    assert log.jobs[1].start_s == 29 * 60
    assert log.zero == seconds("2024-01-01T00:01:00")


def test_steps_are_known_by_the_raw_number_of_their_job_too(tmp_path):
    header, job, *_ = SACCT.splitlines()
    rows = [header, job, job.replace("11|", "11.batch|"), job.replace("11|", "11.0|")]
    text = "\n".join(row.rpartition("|")[0] for row in rows) + "\n"
    log = read_sacct(write(tmp_path, text.replace("JobID", "JobIDRaw")))
    assert [(job.nodes, job.names) for job in log.jobs] == [(3, ())]
    assert "lists 2 steps" in log.notes[0]
    both = "\n".join(f"{row.partition('|')[0]}|{row}" for row in text.splitlines())
    both = both.replace("JobID|JobID", "JobIDRaw|JobID") + "\n"
    assert len(read_sacct(write(tmp_path, both)).jobs) == 1
    without = "\n".join(row.partition("|")[2] for row in text.splitlines()) + "\n"
    assert "no column JobID: steps" in read_sacct(write(tmp_path, without)).notes[0]


def test_jobs_of_two_clusters_are_not_one_machine(tmp_path):
    lines = SACCT.splitlines()
    rows = [f"Cluster|{lines[0]}", f"a|{lines[1]}", f"a |{lines[3]}"]
    assert len(read_sacct(write(tmp_path, "\n".join(rows) + "\n")).jobs) == 2
    rows[2] = f"b|{lines[1]}"
    with pytest.raises(
        WorkloadError, match=r"line 3: The log has jobs of several clusters \(a, b\)"
    ):
        read_sacct(write(tmp_path, "\n".join(rows) + "\n"))


def test_a_job_that_was_assigned_no_node_held_none(tmp_path):
    """As the origin of a job of a federation that another cluster ran (REVOKED), whose times are
    those of the job. Without a NodeList nothing says so.
    """
    times = "2024-01-01T00:00:00|2024-01-01T00:10:00|2024-01-01T01:10:00"
    text = f"JobID|Submit|Start|End|State|NNodes|NodeList\n1|{times}|REVOKED|2|None assigned\n"
    text += f"2|{times}|COMPLETED|1|n1\n3|{times}|COMPLETED|4|\n"
    log = read_sacct(write(tmp_path, text))
    expected = [(1, ("n1",)), (4, ())]
    assert [(job.nodes, job.names) for job in log.jobs] == expected
    assert log.skipped == 1
    moments = [each.rpartition(":")[0] for each in times.split("|")]
    jobs = [
        json_job(job, *moments, nodes, count, "cpu=1", True)
        for job, nodes, count in ((1, "None assigned", 2), (2, "n1", 1), (3, "", 4))
    ]
    log = read_sacct(write(tmp_path, json.dumps({"jobs": jobs})))
    assert [(job.nodes, job.names) for job in log.jobs] == expected


def test_jobs_of_two_clusters_in_json_are_not_one_machine(tmp_path):
    """sacct --json names the cluster of each job."""

    def log(*clusters):
        start, end = "2024-01-01T00:00", "2024-01-01T01:00"
        jobs = [
            json_job(k, start, start, end, "n1", 1, "cpu=1,node=1", True) | {"cluster": cluster}
            for k, cluster in enumerate(clusters)
        ]
        return read_sacct(write(tmp_path, json.dumps({"jobs": jobs})))

    assert len(log("a", "a").jobs) == 2
    with pytest.raises(
        WorkloadError, match=r"line 1: The log has jobs of several clusters \(a, b\)"
    ):
        log("a", "b")


@pytest.mark.parametrize("as_json", [True, False])
def test_seconds_since_the_epoch_are_not_repeated(tmp_path, as_json):
    """A job that ended before it started never ran: no clock was set back."""
    submit, start, end = (seconds(f"2024-01-01T00:{minute}") for minute in ("00", "30", "20"))
    text = f"JobID|Submit|Start|End|NNodes\n1|{submit:.0f}|{start:.0f}|{end:.0f}|4\n"
    text += f"2|{submit:.0f}|{submit:.0f}|{end:.0f}|1\n"
    if as_json:
        jobs = [
            {"job_id": k, "nodes": "", "allocation_nodes": nodes,
             "time": {"submission": submit, "start": begin, "end": end}}
            for k, begin, nodes in ((1, start, 4), (2, submit, 1))
        ]  # fmt: skip
        text = json.dumps({"jobs": jobs})
    log = read_sacct(write(tmp_path, text))
    assert [(job.nodes, job.run_s) for job in log.jobs] == [(1, 1200.0)]
    assert log.skipped == 1


def test_columns_that_are_cut_to_a_width_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match="are cut to a width; run: sacct"):
        read_log(write(tmp_path, SACCT.replace("|", "  ")))
