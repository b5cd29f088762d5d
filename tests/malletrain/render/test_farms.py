"""Tasks of a farm as text: known answers."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from malletrain.protocol.views import GoalView, ProfileView, TasksView, TaskView
from malletrain.render import farms, job_detail, tables
from tests.malletrain.cli.fake_daemon import detail, job_view, node_view, status_view

NOW = 1000.0
FAILED = TaskView(
    7, ("7", "a b"), "failed", 2, 1, "n1", 990.0, 992.5, "l/7.log", "one\nlast \x1b[31mwords\n\n"
)
RUNNING = TaskView(8, ("8", "x"), "running", 0, None, "n2", 940.0)
WAITING = TaskView(9, ("9", "y"), "waiting")


def view(*tasks: TaskView, **fields) -> TasksView:
    counts = {"waiting": 1, "running": 1, "done": 1200, "failed": 1, "cancelled": 0}
    return TasksView("j5", ("seed", "name"), 1203, **{"counts": counts, "tasks": tasks, **fields})


def printed(renderable, width: int = 120) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_summary():
    line = "1 waiting, 1 running, 1,200 done, 1 failed of 1,203 tasks."
    assert farms.summary(view(), NOW).plain == line
    with_rate = farms.summary(view(rate=2.0, ends=NOW + 90), NOW).plain
    assert with_rate.startswith(line + " 2.00/s; at this rate done in 1 min 30 s (")
    assert farms.summary(view(rate=2.0), NOW).plain == line + " 2.00/s."


def test_a_line_for_each_task():
    head, _, failed, running, waiting = printed(farms.tasks(view(FAILED, RUNNING, WAITING), NOW))
    assert head.split() == ["TASK", "VALUES", "STATE", "EXIT", "TRIES", "NODE", "STARTED", "TIME"]
    assert failed.split()[:7] == ["7", "seed=7", "name=a", "b", "failed", "1", "2"]
    assert failed.endswith("2.5 s  last ·[31mwords")
    assert running.split()[-2:] == ["1", "min"]
    assert waiting.split() == ["9", "seed=9", "name=y", "waiting"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminals_keep_number_and_state(width):
    lines = printed(farms.tasks(view(FAILED, RUNNING), NOW), width)
    assert all(len(line) <= width for line in lines)
    assert any("7" in line and "failed" in line for line in lines)


def test_show_names_the_tasks_that_run_longest():
    text = "\n".join(printed(farms.farm(view(slowest=(RUNNING,)), NOW)))
    assert "Longest running: 8 (1 min on n2)" in text
    assert "malletrain tasks j5 --failed" in text
    ended = view(counts={"done": 1202, "failed": 1})
    assert "--failed" not in "\n".join(printed(farms.farm(ended, NOW)))


@pytest.mark.parametrize("farm", [True, False])
def test_show_speaks_of_tasks_and_not_of_scaling(farm):
    goal = GoalView(work=25.0)
    made = detail(job=job_view(id="j1", name="study", goal=goal), profile=ProfileView("known"))
    spec = {**made.spec, **({"farm": {"command": ["echo"]}} if farm else {})}
    text = "\n".join(printed(job_detail.job(msgspec.structs.replace(made, spec=spec))))
    assert ("Scaling" in text) is not farm
    assert ("25 tasks" if farm else "25 samples") in text


def test_rows_of_csv():
    assert farms.csv_header(("seed", "name")) == [
        *("index", "seed", "name", "state", "exit_code", "tries", "node", "started", "ended"),
        *("seconds", "log"),
    ]
    row = farms.csv_row(("seed", "name"), FAILED, NOW)
    assert row == ["7", "7", "a b", "failed", 1, 2, "n1", "990.000", "992.500", "2.500", "l/7.log"]
    assert farms.csv_row(("seed", "name"), WAITING, NOW)[4:] == ["", 0, "", "", "", "", ""]


def test_columns_of_results_do_not_hide_those_of_the_list():
    header = farms.csv_header(("index", "state"))
    assert header[:3] == ["index", "state", "task_state"]
    assert len(set(header)) == len(header)
    assert farms.csv_row(("index", "state"), FAILED, NOW)[:3] == ["7", "a b", "failed"]


@pytest.mark.parametrize(
    ("training", "farming", "words"),
    [
        (2, 0, "3 nodes held: 2 train, 1 without a job"),
        (1, 1, "3 nodes held: 1 trains, 1 runs tasks, 1 without a job"),
        (0, 2, "3 nodes held: 2 run tasks, 1 without a job"),
        (0, 0, "3 nodes held: 0 train, 3 without a job"),
    ],
)
def test_nodes_of_farms_are_counted_by_themselves(training, farming, words):
    status = status_view(nodes_training=training, nodes_farming=farming)
    assert words in tables.headline(status).plain


def test_a_node_of_a_farm_runs_tasks_and_a_farm_has_done_tasks():
    farm_node, other = node_view(mode="farm"), node_view("n2", mode="live")
    lines = printed(tables.nodes([farm_node, other], NOW))
    assert "n1 running tasks" in " ".join(lines[2].split())
    assert "n2 training" in " ".join(lines[3].split())
    lines = printed(tables.jobs([job_view(mode="farm"), job_view(id="j2")], NOW))
    assert "5,000 tasks" in lines[2]
    assert "tasks" not in lines[3]
