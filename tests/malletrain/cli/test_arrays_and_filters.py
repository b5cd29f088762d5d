"""What the command line gained beside the client for Python: arrays, waiting, filters, copies."""

from __future__ import annotations

import inspect
import json
import re
import time

import click
import pytest

from malletrain.api.client import Client
from malletrain.api.job import Job
from malletrain.api.options import SubmitOptions
from malletrain.cli import main
from malletrain.cli.common import past_time
from malletrain.protocol.bounds import JOB_ID
from tests.malletrain.cli.fake_daemon import detail, event_view, job_view, log_view


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return path


def answer(daemon, **states):
    """Jobs get the ids j1, j2, … as they are submitted, and are in these states."""
    specs = []

    def submit(params):
        specs.append(params["spec"])
        return {"job": job_view(id=f"j{len(specs)}", name=params["spec"]["name"], state="queued")}

    def job(params):
        assert JOB_ID.fullmatch(params["job"])
        return detail(job=job_view(id=params["job"], state=states[params["job"]]))

    daemon.answers.update(submit=submit, job=job)
    return specs


def test_an_array_is_a_job_for_each_index(run, daemon, script):
    specs = answer(daemon)
    done = run("submit", "--array", "1-3", script, "--seed", "{index}")
    assert done.stdout == "Submitted 3 jobs, train-1 (j1) to train-3 (j3).\n"
    assert [(s["name"], s["args"][1]) for s in specs] == [
        ("train-1", "1"),
        ("train-2", "2"),
        ("train-3", "3"),
    ]
    assert len(json.loads(run("submit", "--json", "--array", "5", script).stdout)) == 1
    wrong = run("submit", "--array", "3-1", script)
    assert (wrong.exit_code, "goes from no index to none" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("states", "code"),
    [(("completed",) * 2, 0), (("completed", "failed"), 1), (("cancelled", "completed"), 3)],
)
def test_a_submission_that_waits_ends_as_its_jobs_do(run, daemon, script, states, code):
    answer(daemon, j1=states[0], j2=states[1])
    done = run("submit", "--wait", "--array", "1,2", script)
    assert done.exit_code == code
    assert done.stdout.count("Job j") == 2


@pytest.mark.parametrize(
    ("exit_codes", "code"),
    [
        ([3], 3),
        ([1, 7], 7),  # the last try's
        ([-9], 137),  # as a shell says that it was killed
        ([None], 1),  # its launcher ended, and no worker is known to have failed
        ([0], 1),
        ([], 1),  # it lacked software, or was refused
    ],
)
def test_a_submission_that_waits_ends_as_the_script_that_failed(
    run, daemon, script, exit_codes, code
):
    answer(daemon, j1="failed")
    tries = [("workers-failed", {"exit_code": one}) for one in exit_codes]
    happened = [("job-started", {}), *tries, ("job-failed", {})]
    events = [event_view(k, kind=kind, data=data) for k, (kind, data) in enumerate(happened)]
    daemon.answers["events"] = lambda p: events[p["since"] :] if p["since"] < 0 else []
    assert run("submit", "--wait", script).exit_code == code


def test_what_the_daemon_is_to_see_to_goes_with_the_job(run, daemon, script):
    specs = answer(daemon)
    words = ("--after", "a", "--after", "j4", "--time-limit", "2 h", "--notify", "end=a@b")
    assert run("submit", *words, script).exit_code == 0
    assert specs[0]["after"] == ["a", "j4"]
    assert specs[0]["time_limit_s"] == 7200.0
    assert specs[0]["notify"] == [{"to": "a@b", "kind": "mail", "on": ["end"]}]


JOBS = [
    job_view(
        id="j2", name="old", state="failed", ended=time.time() - 9e5, owner="ann", samples=9.0
    ),
    job_view(id="j10", name="new", state="completed", ended=time.time() - 60, samples=5.0),
    job_view(id="j11", name="now", state="running", samples=7.0),
]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ["j2", "j10", "j11"]),
        (("--since", "1 d"), ["j10", "j11"]),
        (("--state", "failed,running"), ["j2", "j11"]),
        (("--owner", "ann"), ["j2"]),
        (("--name", "n"), ["j10", "j11"]),
        (("--sort", "samples"), ["j2", "j11", "j10"]),
        (("--sort", "ended", "--all"), ["j11", "j10", "j2"]),
    ],
)
def test_which_jobs_are_shown_and_in_which_order(run, daemon, words, shown):
    daemon.answers["jobs"] = lambda params: JOBS
    done = run("status", "--json", *words)
    assert [job["id"] for job in json.loads(done.stdout)["jobs"]] == shown


def test_all_jobs_are_asked_for_where_they_may_be_among_all(run, daemon):
    for words in ((), ("--all",), ("--since", "1 d")):
        assert run("status", *words).exit_code == 0
    requests = [params for op, params in daemon.seen if op == "jobs"]
    assert requests == [{}, {"ended": 100_000}, {"ended": 100_000}]
    wrong = run("status", "--state", "done")
    assert (wrong.exit_code, "'done' is no state" in wrong.stderr) == (2, True)


def test_moments(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert past_time("2026-01-31T08:00") == 1769846400.0
        assert past_time("1970-01-02") == 86400.0
    finally:
        monkeypatch.undo()
        time.tzset()
    assert abs(time.time() - 120 - past_time("2 min")) < 60
    with pytest.raises(click.BadParameter, match="how long ago"):
        past_time("yesterday")


def test_what_is_left_of_a_job_is_copied(run, daemon, tmp_path):
    work = tmp_path / "work"
    shards = work / "run.pt.shards" / "7"
    shards.mkdir(parents=True)
    (shards / "a.distcp").write_bytes(b"shard")
    (work / "run.pt").write_bytes(b"snapshot")
    spec = {**detail().spec, "workdir": str(work), "args": ["--snapshot", "run.pt"]}
    daemon.answers["job"] = lambda params: detail(spec=spec)
    daemon.answers["logs"] = lambda p: log_view(f"line of {p['stream']}\nlast")
    done = run("cp", "train", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    out = tmp_path / "out"
    assert (out / "run.pt").read_bytes() == b"snapshot"
    assert (out / "run.pt.shards" / "7" / "a.distcp").read_bytes() == b"shard"
    assert (out / "rank1.log").read_text() == "line of rank1\nlast\n"
    assert done.stdout.count("Wrote ") == 4
    (work / "run.pt").unlink()
    refused = run("cp", "train", tmp_path / "out2")
    assert refused.exit_code == 1
    assert f"malletrain cp train {tmp_path / 'out2'} --logs" in refused.stderr
    assert run("cp", "train", tmp_path / "out2", "--logs").exit_code == 0


METHODS = {
    "submit": Client.submit,
    "map": Client.map,
    "tasks": Job.tasks,
    "retry": Job.retry,
    "status": Client.jobs,
    "show": Job.detail,
    "logs": Job.logs,
    "wait": Job.wait,
    "cancel": Job.cancel,
    "extend": Job.extend,
    "scale": Job.scale,
    "export": Job.export,
    "cp": Job.copy,
    "members": Job.members,
    "worth": Client.worth,
    "nodes": Client.nodes,
    "events": Client.events,
    "usage": Client.usage,
    "requeue": Client.requeue,
}
"""Each action of the command line on a daemon, and its method."""
OF_THE_MACHINE = {
    "agent",
    "assess",
    "check",
    "cluster",
    "daemon",
    "db",
    "demo",
    "drain",
    "exclude",
    "exec",
    "key",
    "pause",
    "reload",
    "resume",
    "shipped",
    "simulate",
    "sweep",
    "top",
    "web",
}
"""Commands that ask no daemon, are a screen, are for operators, or have a room of their own."""


def test_every_action_of_the_command_line_has_its_method():
    """A new command belongs into one of the two tables; its method into both clients."""
    assert set(main.commands) == METHODS.keys() | OF_THE_MACHINE


def test_every_option_of_submit_has_its_keyword():
    options = {param.name for param in main.commands["submit"].params}
    elsewhere = {"script", "args", "array", "wait", "state_dir", "as_json"}
    assert options - elsewhere == SubmitOptions.__annotations__.keys()


def test_every_keyword_of_submit_is_told_of():
    text = inspect.getsource(SubmitOptions)
    assert (
        set(re.findall(r'^    (\w+): .*\n    """', text, re.M))
        == SubmitOptions.__annotations__.keys()
    )
