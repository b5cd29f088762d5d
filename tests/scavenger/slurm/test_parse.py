import time

import pytest

from scavenger.interface import SchedulerError
from scavenger.slurm.parse import (
    SlurmReservation,
    new_mark,
    own_name,
    planned_uses,
    read_duration,
    read_jobs,
    read_nodes,
    read_reservations,
    read_time,
)
from tests.scavenger.slurm import slurm_world as world

PREFIX = "malletrain-abc-"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (f"{PREFIX}l7", f"{PREFIX}l7"),
        (f"{PREFIX}l1-3+5", f"{PREFIX}l1-3+5"),
        (f"proj_{PREFIX}l7", f"{PREFIX}l7"),
        (f"{PREFIX}l7_x", f"{PREFIX}l7"),
        (f"[p] {PREFIX}l1-3 (a)", f"{PREFIX}l1-3"),
        (f"{PREFIX}lease", f"{PREFIX}lease"),
        (f"my{PREFIX}l7", ""),
        ("malletrain-xyz-l7", ""),
        ("train", ""),
    ],
)
def test_the_name_of_a_job_of_ours_whatever_a_plugin_adds_to_it(name, ours):
    assert own_name(name, PREFIX) == ours


def test_nodes_of_several_partitions():
    table = read_nodes(
        world.sinfo(
            "batch|up|idle|a100,ib|gpu:4|n[1-2]|none",
            "low|up|idle|a100,ib|gpu:4|n[1-2]|none",
            "batch|up|drained*|(null)|(null)|n3|broken | fan\nof n3",
            "low|down|drained*|(null)|(null)|n3|broken | fan\nof n3",
            "empty|up|n/a|(null)|(null)||none",
        ),
        "MARK",
    )
    assert table.partitions == {"n1": ["batch", "low"], "n2": ["batch", "low"], "n3": ["batch"]}
    assert table.nodes["n1"].features == ("a100", "ib")
    assert (table.nodes["n3"].base, table.nodes["n3"].marks, table.nodes["n3"].reason) == (
        "drained",
        "*",
        "broken | fan",
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "slurm_load_node: error",
        "MARK|batch|up|idle",
        "MARK|b|up|idle|(null)|(null)|n[1-|none",
    ],
)
def test_garbage_instead_of_nodes_is_refused(text):
    with pytest.raises(SchedulerError, match="cannot be understood"):
        read_nodes(text, "MARK")


def test_only_waiting_jobs_and_ours_are_kept():
    table = read_jobs(
        world.job("RUNNING", 1, "other", nodes="n1")
        + world.job("PENDING", 2, "a|b", planned="n[1-2]", start=500, reason="Resources")
        + world.job("RUNNING", 3, f"{PREFIX}l1", nodes="n3", start=100, end=900)
        + world.job("COMPLETED", 4, f"{PREFIX}l2", nodes="n4")
        + world.job("PENDING", 5, f"not-{PREFIX}l9")
        + world.job("PENDING", 6, f"x|{PREFIX}l9"),
        "MARK",
        PREFIX,
    )
    assert [job.id for job in table.ours] == ["3", "4", "5", "6"], "if their user is ours"
    assert [(job.id, job.name) for job in table.pending] == [
        ("2", "a|b"),
        ("5", f"not-{PREFIX}l9"),
        ("6", f"x|{PREFIX}l9"),
    ]
    assert table.ours[0].end == 900.0
    assert table.ours[0].requested_nodes == ""
    assert planned_uses(table.pending) == {"n1": 500.0, "n2": 500.0}


def test_a_job_that_was_requeued_with_expedite_waits():
    table = read_jobs(
        world.job("EXPEDITING", 2, "again", planned="n1", start=500, reason="Resources"),
        "MARK",
        PREFIX,
    )
    assert [(job.id, job.state) for job in table.pending] == [("2", "EXPEDITING")]
    assert planned_uses(table.pending) == {"n1": 500.0}


def test_a_name_with_line_breaks_cannot_pretend_to_be_a_job():
    forged = world.job("RUNNING", 66, f"{PREFIX}l1", nodes="n9").replace("MARK", "guess")
    mark = new_mark()
    text = world.job("PENDING", 1, f"evil\n{forged}\nMARKK|RUNNING|").replace(
        "MARK|", f"{mark}|", 1
    )
    table = read_jobs(text, mark, PREFIX)
    assert table.ours == []
    assert [job.id for job in table.pending] == ["1"]
    assert new_mark() != mark


def test_line_breaks_in_an_account_or_a_reason_cost_no_other_job():
    """A Slurm without slurmdbd takes any account, and plugins write reasons. No poll succeeded
    while such a job waited.
    """
    table = read_jobs(
        world.job("PENDING", 1, "a", account="my\naccount", reason="Resources")
        + world.job("PENDING", 2, "b", reason="burst_buffer/lua: stage in:\nno space\n")
        + world.job("PENDING", 3, "c\nd", account="x|y")
        + world.job("RUNNING", 4, f"{PREFIX}l1", nodes="n3", account=f"e\n{PREFIX}l9"),
        "MARK",
        PREFIX,
    )
    accounts = [(job.id, job.account) for job in table.pending]
    assert accounts == [("1", "my\naccount"), ("2", ""), ("3", "x")]
    assert [job.name for job in table.pending] == ["a", "b", "n/a|c"]
    assert table.pending[1].reason == "burst_buffer/lua: stage in:\nno space\n"
    assert [(job.name, job.node_list) for job in table.ours] == [(f"{PREFIX}l1", "n3")]


def test_an_empty_queue_is_no_error_and_garbage_is():
    assert read_jobs("", "MARK", PREFIX).pending == []
    for text in ("slurm_load_jobs error: Invalid", "MARK|PENDING|7|me"):
        with pytest.raises(SchedulerError, match="cannot be understood"):
            read_jobs(text, "MARK", PREFIX)


def test_reservations():
    text = (
        "ReservationName=maint StartTime=1000 EndTime=2000 Duration=01:00:00 Nodes=n[1-2] "
        "NodeCnt=2 Flags=MAINT,SPEC_NODES Users=root\n"
        "ReservationName=class StartTime=1500 EndTime=1600 Nodes=n3 Flags= Users=a b\n"
        "ReservationName=licences StartTime=1 EndTime=2 Nodes=(null) Flags=ANY_NODES\n"
    )
    assert read_reservations(text) == [
        SlurmReservation("maint", 1000.0, 2000.0, "n[1-2]", True),
        SlurmReservation("class", 1500.0, 1600.0, "n3", False),
    ]
    assert read_reservations("No reservations in the system\n") == []
    with pytest.raises(SchedulerError, match="cannot be understood"):
        read_reservations("slurm_load_reservations error")


def test_times_and_durations():
    assert read_time("1795196504") == 1795196504.0
    assert read_time("2026-11-20T17:41:44") == time.mktime((2026, 11, 20, 17, 41, 44, 0, 0, -1))
    assert [read_time(text) for text in ("N/A", "Unknown", "", "None")] == [None] * 4
    assert [
        read_duration(text)
        for text in ("UNLIMITED", "30", "10:00", "1:00:00", "2-00:00:00", "1-12")
    ] == [
        None,
        1800.0,
        600.0,
        3600.0,
        172800.0,
        129600.0,
    ]


@pytest.mark.skipif(not world.RECORDED.is_dir(), reason="no recordings of a real Slurm are at hand")
def test_the_recordings_of_a_real_slurm():
    rows = [
        line.split("|") for line in (world.RECORDED / "sinfo_fmt.txt").read_text().splitlines()[1:]
    ]
    # PARTITION|AVAIL|TIMELIMIT|NODES|STATE|NODELIST|GRES|CPUS → the fields asked for
    text = world.sinfo(
        *(f"{r[0].rstrip('*')}|{r[1]}|{r[4]}|(null)|{r[6]}|{r[5]}|none" for r in rows)
    )
    table = read_nodes(text, "MARK")
    assert {name: group.base for name, group in table.nodes.items()} == {
        **{f"n{i}": "allocated" for i in (1, 2, 3, 4)},
        "n5": "planned",
        "n6": "planned",
        "n7": "down",
        "n8": "drained",
    }
    assert table.partitions["n5"] == ["batch", "preemptable", "requeue", "suspend"]
    head, *lines = (world.RECORDED / "squeue_all.txt").read_text().splitlines()
    names = head.split("|")
    fields = (
        "STATE",
        "USER",
        "SUBMIT_TIME",
        "START_TIME",
        "END_TIME",
        "REQ_NODES",
        "SCHEDNODES",
        "REASON",
        "NAME",
    )
    column = {name: names.index(name) for name in fields}
    queue = ""
    for line in lines:
        v = line.split("|")
        get = {name: v[at] for name, at in column.items()}
        queue += world.job(
            get["STATE"],
            int(v[names.index("ARRAY_JOB_ID")]),
            get["NAME"],
            user=get["USER"],
            submitted=get["SUBMIT_TIME"],
            start=get["START_TIME"],
            end=get["END_TIME"],
            nodes=v[names.index("NODELIST")],
            requested_nodes=get["REQ_NODES"] or "(null)",
            planned=get["SCHEDNODES"],
            reason=get["REASON"],
        )
    jobs = read_jobs(queue, "MARK", "malletrain")
    assert {job.id for job in jobs.pending} == {"12", "13", "14", "15"}
    assert [job.planned_on for job in jobs.ours] == ["n5"]
    uses = planned_uses(jobs.pending)
    assert sorted(uses) == ["n1", "n2", "n3", "n4", "n5", "n6"]
    assert uses["n5"] == read_time("2026-11-20T17:46:38")
    [maint] = read_reservations(
        " ".join((world.RECORDED / "scontrol_show_reservation.txt").read_text().split("\n   "))
    )
    assert (maint.name, maint.nodes, maint.maintenance) == ("maint", "n[1-2]", True)


def test_ten_thousand_nodes_are_read():
    """How long it takes is measured by benchmarks/slurm_poll.py."""
    blocks = [(first, "idle" if first % 200 else "allocated") for first in range(0, 10_000, 100)]
    lines = [
        f"{p}|up|{s}|a100|gpu:4|n[{first}-{first + 99}]|none"
        for p in ("a", "b", "c")
        for first, s in blocks
    ]
    assert len(read_nodes(world.sinfo(*lines), "MARK").nodes) == 10_000


def test_the_comment_of_a_reservation_is_a_text():
    """Admins write it, with line breaks and words like those of Slurm (scontrol prints it last and
    as it is, reservation_info.c).
    """
    text = (
        "ReservationName=m StartTime=100 EndTime=200 Duration=00:01:40 Nodes=n[1-2] NodeCnt=2 "
        "CoreCnt=4 Features=(null) PartitionName=batch Flags=MAINT TRES=cpu=4 State=INACTIVE "
        "BurstBuffer=(null) MaxStartDelay=(null) Comment=was Nodes=n9 EndTime=900\n"
        "then Flags= more\n"
        "ReservationName=r StartTime=300 EndTime=400 Nodes=n3 Flags= State=INACTIVE\n"
    )
    assert read_reservations(text) == [
        SlurmReservation("m", 100.0, 200.0, "n[1-2]", True),
        SlurmReservation("r", 300.0, 400.0, "n3", False),
    ]
