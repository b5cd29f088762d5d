"""Runs in accounting whose jobs or clocks change: jobs that are resized, and logs of machines in
other time zones.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from datetime import datetime, timezone

import pytest

from malletrain.sim.accounting_logs import read_pbs, read_sacct
from malletrain.sim.idle import idle_nodes
from malletrain.sim.observation import Observation
from malletrain.sim.workloads import WorkloadError
from tests.malletrain.sim.test_joblogs import write

HEADER = "JobID|Submit|Start|End|State|NNodes|NodeList"
RESIZED = f"""{HEADER}
1|2026-11-29T10:00:00|2026-11-29T10:00:10|2026-11-29T11:00:00|RESIZING|3|n[1-3]
1|2026-11-29T11:00:00|2026-11-29T10:00:10|2026-11-29T12:00:00|RESIZING|1|n1
1|2026-11-29T12:00:00|2026-11-29T10:00:10|2026-11-29T14:00:10|CANCELLED by 0|4|n[1-4]
2|2026-11-29T10:00:00|2026-11-29T10:00:10|2026-11-29T14:00:10|COMPLETED|1|n5
"""
"""As Slurm 22.05 lists a job that was resized twice: every size has the start of the job."""


@contextmanager
def zone(monkeypatch, name):
    """The time zone of this computer."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


def as_json(text):
    """The same log as ``sacct --json`` prints it."""

    def of(moment):
        return int(datetime.fromisoformat(moment).timestamp())

    rows = [line.split("|") for line in text.splitlines()[1:]]
    jobs = [
        {
            "job_id": int(row[0]),
            "time": {"submission": of(row[1]), "start": of(row[2]), "end": of(row[3])},
            "nodes": row[6],
            "allocation_nodes": int(row[5]),
        }
        for row in rows
    ]
    return json.dumps({"jobs": jobs})


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("form", ["names", "numbers", "JSON"])
def test_a_job_that_is_resized_holds_each_of_its_sizes_in_turn(tmp_path, form, order):
    header, *rows = RESIZED.splitlines()
    text = "\n".join([header, *rows[::order]]) + "\n"
    if form == "numbers":
        text = "\n".join(line.rpartition("|")[0] for line in text.splitlines()) + "\n"
    log = read_sacct(write(tmp_path, as_json(text) if form == "JSON" else text))
    spans = sorted((job.start_s, job.run_s, job.nodes) for job in log.jobs)
    assert spans == [(10, 3590, 3), (10, 14400, 1), (3600, 3600, 1), (7200, 7210, 4)]
    idle = idle_nodes(log, 5, Observation(10.0, 14410.0))
    assert idle.bounds.least_node_s == 4 * 14400 - (3 * 3590 + 3600 + 4 * 7210)
    assert any("No job of the log ran twice" in note for note in log.notes)


def test_a_job_that_is_resized_in_two_files_counts_once(tmp_path):
    header, first, second, third, _ = RESIZED.splitlines()
    running = second.replace("2026-11-29T12:00:00|RESIZING", "Unknown|RUNNING")
    text = "\n".join([header, first, running, header, first, second, third]) + "\n"
    log = read_sacct(write(tmp_path, text))
    assert [(job.start_s, job.run_s, job.nodes) for job in log.jobs] == [
        (10, 3590, 3),
        (3600, 3600, 1),
        (7200, 7210, 4),
    ]


def test_a_size_without_an_end_ends_with_the_next_one(tmp_path):
    """The first file was written before the job was resized, and later ones do not list that size
    again. The last size still runs.
    """
    header, first, second, third, _ = RESIZED.splitlines()
    running = first.replace("2026-11-29T11:00:00|RESIZING", "Unknown|RUNNING")
    last = third.replace("2026-11-29T14:00:10|CANCELLED by 0", "Unknown|RUNNING")
    log = read_sacct(write(tmp_path, "\n".join([header, last, running, second]) + "\n"))
    assert sorted((job.start_s, job.run_s, job.nodes) for job in log.jobs) == [
        (10, 3590, 3),
        (3600, 3600, 1),
        (7200, None, 4),
    ]


@pytest.mark.parametrize(
    ("name", "moment"), [("UTC", "0001-01-01T00:00:00"), ("Europe/Berlin", "9999-12-31T23:59:59")]
)
def test_a_time_of_an_impossible_year_is_refused_in_a_sentence(tmp_path, monkeypatch, name, moment):
    text = f"{HEADER}\n1|{moment}|2026-11-02T10:00:10|2026-11-02T11:00:00|COMPLETED|1|n1\n"
    with zone(monkeypatch, name), pytest.raises(WorkloadError, match=f"line 2: '{moment}' is no"):
        read_sacct(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "is_noted", "runs"), [("Europe/Berlin", True, []), ("UTC", False, [1200.0])]
)
def test_times_that_do_not_exist_here_are_of_another_zone(
    tmp_path, monkeypatch, name, is_noted, runs
):
    """A log in UTC. In Berlin no clock showed two to three on that day."""
    text = f"{HEADER}\n"
    for job, start, end in ((1, "02:50", "03:10"), (2, "12:00", "13:00")):
        times = "|".join(f"2024-03-31T{each}:00" for each in (start, start, end))
        text += f"{job}|{times}|COMPLETED|1|n1\n"
    with zone(monkeypatch, name):
        log = read_sacct(write(tmp_path, text))
    assert [job.run_s for job in log.jobs] == [*runs, 3600.0]
    assert any("2 times of the log do not exist" in note for note in log.notes) == is_noted


def test_the_clocks_of_a_pbs_machine_change_and_those_of_the_reader_do_not(tmp_path, monkeypatch):
    """An abort says when it was by the machine's clock only."""

    def start(job, moment, hour):
        began = datetime(2024, 11, int(moment[3:5]), hour, tzinfo=timezone.utc).timestamp()
        fields = f"ctime={began:.0f} start={began:.0f} exec_host=n{job}/0"
        return f"{moment};S;{job}.s;{fields}\n"

    text = start(1, "11/02/2024 10:00:00", 15) + "11/02/2024 12:00:00;A;1.s;aborted\n"
    text += start(2, "11/04/2024 10:00:00", 16) + "11/04/2024 12:00:00;A;2.s;aborted\n"
    with zone(monkeypatch, "UTC"):
        log = read_pbs(write(tmp_path, text))
    assert [job.run_s for job in log.jobs] == [7200.0, 7200.0]
    assert log.since_s == 0.0
