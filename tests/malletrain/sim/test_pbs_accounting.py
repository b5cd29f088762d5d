"""Which runs of jobs PBS's accounting records open and close."""

from __future__ import annotations

import gzip

import pytest

from malletrain.sim.accounting_logs import read_pbs
from tests.malletrain.sim.test_accounting_logs import pbs, seconds
from tests.malletrain.sim.test_joblogs import write

FIRST = "ctime=0 start={0:.0f} exec_host=n1/0"
SECOND = "ctime=0 start={0:.0f} exec_host=n2/0"


def at(clock):
    return seconds(f"2024-03-01T{clock}")


def pbs_jobs(tmp_path, records, names=("20240301",)):
    for name in names:
        write(tmp_path, pbs("03/01/2024", [("00:30:00", "Q", "0.s", ""), *records]), name)
    log = read_pbs(tmp_path)
    began = [log.zero + job.start_s for job in log.jobs]
    return [
        (job.names[0], begin - at("00:00:00"), job.run_s)
        for begin, job in zip(began, log.jobs, strict=True)
    ], log.notes


def test_a_job_of_pbs_that_the_server_aborts_has_ended(tmp_path):
    records = [
        ("01:00:00", "S", "1.s", FIRST.format(at("01:00:00"))),
        ("01:30:00", "A", "1.s", "Job was aborted"),
        ("01:40:00", "A", "7.s", "Job never ran"),
        ("02:00:00", "S", "2.s", SECOND.format(at("02:00:00"))),
    ]
    jobs, _ = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 1800), ("n2", 7200, None)]


def test_a_job_of_pbs_whose_host_is_down_when_it_is_deleted_has_ended(tmp_path):
    """PBS writes no E for such a job. The D of a qdel is followed by one."""
    first = FIRST.format(at("01:00:00"))
    records = [
        ("01:00:00", "S", "1.s", first),
        ("01:20:00", "D", "2.s", "Job deleted, execution node n7 down"),
        ("01:30:00", "D", "1.s", "Job deleted, execution node n1 down"),
        ("02:00:00", "S", "2.s", SECOND.format(at("02:00:00"))),
        ("02:10:00", "D", "2.s", "requestor=ann@head"),
        ("02:20:00", "E", "2.s", SECOND.format(at("02:00:00")) + f" end={at('02:20:00'):.0f}"),
    ]
    jobs, notes = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 1800), ("n2", 7200, 1200)]
    assert not notes


def test_a_job_of_pbs_that_was_deleted_before_it_started_held_no_node(tmp_path):
    records = [
        ("00:30:00", "E", "3.s", SECOND.format(0) + f" end={at('00:30:00'):.0f}"),
        ("01:00:00", "S", "1.s", FIRST.format(at("01:00:00"))),
    ]
    jobs, _ = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, None)]


def test_a_requeued_run_of_pbs_that_began_before_the_log_counts(tmp_path):
    records = [
        ("02:00:00", "R", "1.s", FIRST.format(at("01:00:00")) + f" end={at('02:00:00'):.0f}"),
        ("03:00:00", "S", "2.s", SECOND.format(at("03:00:00"))),
    ]
    jobs, _ = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 3600), ("n2", 10800, None)]


def test_an_end_of_pbs_that_stands_before_its_start_ends_it(tmp_path):
    first = FIRST.format(at("01:00:00"))
    records = [
        ("01:00:05", "E", "1.s", f"{first} end={at('01:00:05'):.0f}"),
        ("01:00:05", "S", "1.s", first),
        ("02:00:00", "S", "2.s", SECOND.format(at("02:00:00"))),
    ]
    jobs, _ = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 5), ("n2", 7200, None)]


def test_a_run_of_pbs_whose_end_is_lost_counts_until_the_next_one(tmp_path):
    records = [
        ("01:00:00", "S", "1.s", FIRST.format(at("01:00:00"))),
        ("03:00:00", "S", "1.s", SECOND.format(at("03:00:00"))),
        ("03:00:00", "S", "1.s", SECOND.format(at("03:00:00"))),
    ]
    jobs, (note,) = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 7200), ("n2", 10800, None)]
    assert "1 runs of jobs have no end in the log" in note


@pytest.mark.parametrize("kind", ["u", "s"])
def test_nodes_that_a_job_of_pbs_released_are_named(tmp_path, kind):
    first = FIRST.format(at("01:00:00"))
    records = [
        ("01:00:00", "S", "1.s", first),
        ("01:30:00", kind, "1.s", first),
        ("02:00:00", "E", "1.s", f"{first} end={at('02:00:00'):.0f}"),
    ]
    jobs, (note,) = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, 3600)]
    assert "In 1 cases a job released a part of its nodes" in note


def test_reservations_of_pbs_are_named(tmp_path):
    """U, Y and K are about the same reservation before it begins, F and k about its end."""
    reservation = (
        "owner=ann@head queue=R9 ctime=0 start=0 end=7200 duration=7200 nodes=(n9:ncpus=4)"
    )
    records = [
        ("00:40:00", "U", "R9.s", "requestor=ann@head"),
        ("00:41:00", "Y", "R9.s", "requestor=Scheduler@head start=0 end=7200 nodes=(n9:ncpus=4)"),
        ("01:00:00", "S", "1.s", FIRST.format(at("01:00:00"))),
        ("01:30:00", "B", "R9.s", reservation),
        ("02:00:00", "k", "R9.s", "requestor=ann@head"),
    ]
    jobs, (note,) = pbs_jobs(tmp_path, records)
    assert jobs == [("n1", 3600, None)]
    assert note.startswith("In 1 cases a reservation began: its nodes count as idle while no job")


def test_a_day_of_pbs_that_lies_there_twice_counts_once(tmp_path):
    records = [
        ("01:00:00", "S", "1.s", FIRST.format(at("01:00:00"))),
        ("02:00:00", "E", "1.s", FIRST.format(at("01:00:00")) + f" end={at('02:00:00'):.0f}"),
    ]
    jobs, _ = pbs_jobs(tmp_path, records)
    (tmp_path / "20240301.gz").write_bytes(gzip.compress((tmp_path / "20240301").read_bytes()))
    assert pbs_jobs(tmp_path, records)[0] == jobs == [("n1", 3600, 3600)]
