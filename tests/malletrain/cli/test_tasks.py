"""``malletrain tasks``, ``retry`` and ``logs --task`` against a daemon of ten tasks a page."""

from __future__ import annotations

import csv
import json

import msgspec
import pytest

from malletrain.protocol.views import TasksView, TaskView
from tests.malletrain.cli.fake_daemon import Refuse, detail, job_view

COUNT = 25


@pytest.fixture
def farm(daemon, tmp_path):
    """A farm of 25 tasks; every fifth has failed. Answers have ten tasks at most."""

    def task(number):
        failed = number % 5 == 4
        state = "failed" if failed else "done"
        log = f"logs/{number}.log"
        tail = f"error {number}" if failed else ""
        return TaskView(number, (f"v{number}",), state, 1, int(failed), "n1", 1.0, 2.0, log, tail)

    def tasks(params):
        matching = [
            task(number)
            for number in range(params["after"] + 1, COUNT)
            if params["state"] in ("", task(number).state)
        ]
        counts = {"waiting": 0, "running": 0, "done": 20, "failed": 5, "cancelled": 0}
        limit = min(params["limit"], 10)
        return TasksView("j1", ("x",), COUNT, counts, tuple(matching[:limit]))

    view = detail(job=job_view(id="j1", name="study", state="failed"))
    spec = {**view.spec, "farm": {"command": ["echo"]}, "workdir": str(tmp_path)}
    daemon.answers.update(
        tasks=tasks,
        job=lambda params: msgspec.structs.replace(view, spec=spec),
        retry=lambda params: {"retried": len(params["numbers"]) or 5},
    )
    return tmp_path


def test_the_table_goes_over_pages(run, farm):
    done = run("tasks", "study", "--limit", 22)
    assert done.stdout.startswith("20 done, 5 failed of 25 tasks.\n")
    assert [int(line.split()[0]) for line in done.stdout.splitlines()[4:]] == list(range(22))
    assert "3 more; --limit N shows more" in done.stderr
    failed = run("tasks", "study", "--failed")
    assert [int(line.split()[0]) for line in failed.stdout.splitlines()[4:]] == [4, 9, 14, 19, 24]
    assert "error 24" in failed.stdout
    assert "more" not in failed.stderr
    assert len(json.loads(run("tasks", "study", "--json").stdout)["tasks"]) == COUNT
    assert run("tasks", "study", "--limit", 0).stdout == "20 done, 5 failed of 25 tasks.\n"


def test_csv_has_all_tasks(run, farm):
    done = run("tasks", "study", "--csv", farm / "all.csv")
    assert done.stderr == f"Wrote 25 tasks to {farm / 'all.csv'}.\n"
    with open(farm / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["x"] for row in rows] == [f"v{k}" for k in range(COUNT)]
    assert (rows[4]["state"], rows[4]["exit_code"], rows[4]["seconds"]) == ("failed", "1", "1.000")
    done = run("tasks", "study", "--csv", farm / "none" / "all.csv")
    assert (done.exit_code, "cannot be written" in done.stderr) == (1, True)


def test_follow_ends_as_the_farm(run, farm):
    done = run("tasks", "study", "--follow")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == "20 done, 5 failed of 25 tasks."


def test_retry(run, daemon, farm):
    assert run("retry", "study", 4, 9).stdout == "2 tasks are tried again.\n"
    assert daemon.seen[-1][1]["numbers"] == [4, 9]
    assert run("retry", "study", "--failed").stdout == "5 tasks are tried again.\n"
    assert daemon.seen[-1][1]["state"] == "failed"
    assert run("retry", "study").exit_code == 2
    assert run("retry", "study", "--failed", 4).exit_code == 2


def test_the_log_of_a_task(run, farm):
    (farm / "logs").mkdir()
    (farm / "logs" / "4.log").write_text("all of it\n")
    assert run("logs", "study", "--task", 4).stdout == "all of it\n"
    assert run("logs", "study", "--task", 4, "-f").exit_code == 1
    elsewhere = run("logs", "study", "--task", 9)
    assert elsewhere.stdout == "error 9\n"
    assert "logs/9.log is not on this host" in elsewhere.stderr
    assert "read it on node n1" in run("logs", "study", "--task", 0).stderr
    missing = run("logs", "study", "--task", 25)
    assert (missing.exit_code, missing.stderr) == (1, "j1 has no task 25; it has 0 to 24.\n")


def test_a_farm_has_no_log_of_a_rank(run, farm):
    done = run("logs", "study", "-f")
    assert done.exit_code == 1
    assert "study is a farm: malletrain logs study --task N" in done.stderr


def test_tasks_of_another_are_left_out_of_show(run, daemon, farm):
    def refuse(params):
        raise Refuse("Job j1 belongs to ann.")

    assert "Tasks: 20 done" in run("show", "study").stdout
    daemon.answers["tasks"] = refuse
    done = run("show", "study")
    assert (done.exit_code, "Tasks:" in done.stdout) == (0, False)
    assert run("tasks", "study").exit_code == 1
