"""Deadlines and budgets on the command line: the request, and the output."""

import json
import time

import msgspec
import pytest

from malletrain.protocol.views import GoalView
from malletrain.render.goals import moment, past, sentence
from tests.malletrain.cli.fake_daemon import detail, job_view

NOW = time.mktime((2026, 11, 24, 9, 0, 0, 0, 0, -1))
"""A Tuesday."""
DAY = 86400.0
GOAL = GoalView(
    NOW + 3 * DAY, 200.0, 12.5, 1.3e8, "on_track", NOW + 2 * DAY, NOW + DAY, NOW + 2.5 * DAY, 168.0
)


def submitted(daemon):
    specs = []

    def answer(params):
        specs.append(params["spec"])
        return {"job": job_view(goal=GOAL)}

    daemon.answers["submit"] = answer
    return specs


def test_goals_of_the_command_line_go_before_those_of_the_script(run, daemon, tmp_path):
    specs = submitted(daemon)
    script = tmp_path / "train.py"
    script.write_text('#MALLETRAIN --budget 10nh --work 1e6 --deadline "in 6 h"\n')
    before = time.time()
    result = run("submit", "--budget", "200nh", script)
    assert result.exit_code == 0, result.stderr
    assert (specs[0]["budget_nh"], specs[0]["work"]) == (200.0, 1e6)
    assert before + 6 * 3600 <= specs[0]["deadline"] <= time.time() + 6 * 3600
    assert "this ends" in result.stdout


def test_a_deadline_as_people_say_it_is_said_back_at_submission(run, daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)
    specs = []

    def answer(params):
        specs.append(params["spec"])
        return {"job": job_view(goal=GoalView(deadline=params["spec"]["deadline"]))}

    daemon.answers["submit"] = answer
    script = tmp_path / "train.py"
    script.write_text("")
    result = run("submit", "--deadline", "tomorrow 08:30", script)
    assert result.exit_code == 0, result.stderr
    assert specs[0]["deadline"] == NOW + DAY - 1800
    assert "By Wed 08:30." in result.stdout, "whatever is forecast"
    result = run("submit", "--array", "1-2", "--deadline", "tomorrow 08:30", script)
    assert "By Wed 08:30." in result.stdout
    result = run("submit", "--deadline", "friday 25:00", script)
    assert result.exit_code == 2
    assert "there is no such time of the day" in result.stderr


def test_a_mistake_names_its_line(run, daemon, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("#MALLETRAIN --budget 200\n")
    result = run("submit", script)
    assert result.exit_code == 2
    assert "line 1" in result.stderr
    assert "200nh" in result.stderr


def test_a_service_has_no_deadline(run, daemon, tmp_path):
    script, value = tmp_path / "cache.py", tmp_path / "value.csv"
    script.write_text("")
    value.write_text("nodes,value\n1,1\n2,2\n")
    result = run("submit", "--service", "--value", value, "--deadline", "in 6 h", script)
    assert result.exit_code == 2
    assert "A service has no end" in result.stderr


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (["--budget", "+50nh"], {"more_nh": 50.0}),
        (["--budget", "50nh", "--work", "1e6"], {"budget_nh": 50.0, "work": 1e6}),
        (["--deadline", "none", "--budget", "none"], {"deadline": None, "budget_nh": None}),
    ],
)
def test_extend(run, daemon, words, changes):
    requests = []

    def answer(params):
        requests.append(params)
        return {"job": job_view(goal=GOAL)}

    daemon.answers["extend"] = answer
    result = run("extend", "train", *words)
    assert result.exit_code == 0, result.stderr
    assert requests == [{"job": "train", "changes": changes}]
    assert json.loads(run("extend", "train", *words, "--json").stdout)["goal"]["budget_nh"] == 200.0


def test_extend_says_what_it_needs(run, daemon):
    assert "--deadline, --budget or --work" in run("extend", "train").stderr
    result = run("extend", "train", "--deadline", "yesterday")
    assert result.exit_code == 2
    assert "is no deadline" in result.stderr


def test_status_and_show_say_how_it_stands(run, daemon):
    daemon.answers["jobs"] = lambda params: [job_view(goal=GOAL), job_view(id="j2", name="other")]
    shown = run("status").stdout
    assert "GOALS" in shown
    assert "on track" in shown
    daemon.answers["jobs"] = lambda params: [job_view()]
    assert "GOALS" not in run("status").stdout
    daemon.answers["job"] = lambda params: detail(job=job_view(goal=GOAL))
    shown = run("show", "train").stdout
    assert "12.5 of 200 nh" in shown
    assert "With the nodes of the last week this ends" in shown
    data = json.loads(run("show", "train", "--json").stdout)
    assert data["job"]["goal"]["standing"] == "on_track"


def test_the_sentence_at_submission():
    assert sentence(GOAL, NOW) == (
        "With the nodes of the last week this ends Thu 09:00 (Wed 09:00 … Thu 21:00). "
        "By Fri 09:00, 12.5 of 200 nh, 130.0 M samples: on track."
    )
    unknown = GoalView(deadline=NOW + 3 * DAY, why="When it ends can be said later.")
    assert sentence(unknown, NOW) == "When it ends can be said later. By Fri 09:00."
    assert sentence(GoalView(), NOW) == ""


def test_a_job_whose_budget_is_spent_is_not_said_to_end():
    spent = msgspec.structs.replace(GOAL, budget_nh=0.02, charged_nh=0.0202, standing="infeasible")
    assert "this ends" not in sentence(spent, NOW)
    assert "extend JOB --budget +10nh continues it." in sentence(spent, NOW)
    late = msgspec.structs.replace(GOAL, standing="infeasible")
    assert "this ends" in sentence(late, NOW), "it goes on, and ends too late"


def test_times_and_pasts_in_words():
    assert [moment(NOW + days * DAY, NOW) for days in (0.1, 1, 30)] == [
        "11:24",
        "Wed 09:00",
        "2026-12-24 09:00",
    ]
    assert [past(hours) for hours in (0, 0.5, 5, 48, 168)] == [
        "the nodes there are now",
        "the nodes of late",
        "the nodes of the last 5 h",
        "the nodes of the last 2 days",
        "the nodes of the last week",
    ]
