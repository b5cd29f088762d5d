"""Jobs of accounting logs that were suspended, that wait, or that ended before they started."""

from __future__ import annotations

import json
import time

import pytest

from malletrain.sim.accounting_logs import read_pbs, read_sacct
from malletrain.sim.joblogs import read_log
from tests.malletrain.sim.test_accounting_logs import CHICAGO, SACCT, json_job, write


def test_a_job_that_ended_before_it_started_never_ran(tmp_path, monkeypatch):
    """As one that is cancelled while it starts; no hour is repeated then."""
    cancelled = "15|2024-06-01T12:00:00|2024-06-01T12:00:10|2024-06-01T12:00:00|CANCELLED|3|n[7-9]"
    with monkeypatch.context() as patch:
        patch.setenv("TZ", CHICAGO)
        time.tzset()
        log = read_sacct(write(tmp_path, f"{SACCT}{cancelled}\n"))
        before = read_sacct(write(tmp_path, SACCT))
    time.tzset()
    assert log.jobs == before.jobs
    assert log.skipped == before.skipped + 1


def test_a_job_that_waits_has_not_started(tmp_path):
    """Whatever the log says of its start: it may be the expected one."""
    waiting = "15|2024-01-01T00:00:00|2024-01-01T00:30:00|Unknown|PENDING|40|"
    log = read_sacct(write(tmp_path, f"{SACCT}{waiting}\n"))
    assert log.jobs == read_sacct(write(tmp_path, SACCT)).jobs


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (("00:10:00", "", "1-00:00:00"), ["2 jobs were suspended for a time: the nodes"]),
        (("00:00:00", "", ""), []),
    ],
)
def test_jobs_that_were_suspended_are_named(tmp_path, cells, expected):
    header, *rows = SACCT.splitlines()
    text = [f"{header}|Suspended", *(f"{r}|{c}" for r, c in zip(rows, cells, strict=True))]
    log = read_sacct(write(tmp_path, "\n".join(text) + "\n"))
    assert [n[:43] for n in log.notes if "suspended" in n] == expected


def test_suspended_jobs_of_json_and_of_pbs_are_named(tmp_path):
    at = "2024-01-01T00:00"
    job = json_job(1, at, at, "2024-01-01T01:00", "n1", 1, "cpu=1", True)
    job["time"]["suspended"] = 60
    (note,) = [
        n for n in read_log(write(tmp_path, json.dumps({"jobs": [job]}))).notes if "susp" in n
    ]
    assert note.startswith("1 job was suspended")
    used = "resources_used.walltime=00:00:32"
    text = "".join(
        (
            "01/01/2024 00:00:00;S;1.s;ctime=1704067200 start=1704067200 exec_host=n1/0\n",
            f"01/01/2024 00:10:00;z;1.s;{used}\n01/01/2024 00:20:00;r;1.s;\n",
            "01/01/2024 01:00:00;E;1.s;ctime=1704067200 start=1704067200 exec_host=n1/0 "
            "end=1704070800\n",
        )
    )
    (note,) = [n for n in read_pbs(write(tmp_path, text, "20240101")).notes if "susp" in n]
    assert note.startswith("In 1 cases a job was suspended: the nodes count as those of the job")
