"""Commands that stay until a job has ended, and end as it did."""

import json
import sys
from types import SimpleNamespace

import pytest

from malletrain.cli.common import jobs_go_on
from malletrain.cli.wait import exit_code
from malletrain.client import Connection
from tests.malletrain.cli.fake_daemon import FakeDaemon, Refuse, default_answers, detail, job_view

ENDINGS = [("completed", 0), ("failed", 1), ("cancelled", 3)]


def ends(daemon, states):
    """The daemon answers with each job's states in turn, and with the last one from then on."""
    remaining = {job: list(each) for job, each in states.items()}

    def job(params):
        name = params["job"]
        state = remaining[name].pop(0) if len(remaining[name]) > 1 else remaining[name][0]
        why = "Rank 0 exited with code 1." if state == "failed" else ""
        return detail(job=job_view(id=name, name=f"n{name}", state=state, reason=why))

    daemon.answers["job"] = job
    daemon.answers["events"] = lambda p: []


@pytest.mark.parametrize(("state", "code"), ENDINGS)
def test_wait(run, daemon, state, code):
    ends(daemon, {"j1": ["running", "running", "running", state]})
    result = run("wait", "j1")
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.startswith(f"Job j1 (nj1) {'was ' * (code == 3)}{state}")


def test_wait_for_several_ends_as_the_worst(run, daemon):
    running = ["running"] * 3
    ends(daemon, {"a": [*running, "completed"], "b": ["cancelled"], "c": [*running, "failed"]})
    result = run("wait", "a", "b", "c", "a", "--json")
    assert result.exit_code == 1
    assert sorted(j["state"] for j in json.loads(result.stdout)) == [
        "cancelled",
        "completed",
        "failed",
    ]


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], 0),
        (["completed"], 0),
        (["completed", "cancelled"], 3),
        (["cancelled", "failed", "completed"], 1),
    ],
)
def test_a_failed_job_counts_before_a_cancelled(states, code):
    assert exit_code(states) == code


def test_wait_means_the_job_that_had_the_name_at_first(run, daemon):
    """A name is the newest job's, and a newer one may come meanwhile."""

    def job(params):
        if params["job"] == "train":
            return detail(job=job_view(id="j1"))
        return detail(job=job_view(id=params["job"], state="completed"))

    daemon.answers["job"] = job
    assert run("wait", "train").exit_code == 0
    assert [p["job"] for op, p in daemon.seen if op == "job"] == ["train", "j1"]


def test_wait_for_an_unknown_job(run, daemon):
    def refuse(params):
        raise Refuse("There is no job 'nope'.")

    daemon.answers["job"] = refuse
    result = run("wait", "nope")
    assert (result.exit_code, result.stderr) == (1, "There is no job 'nope'.\n")


def test_wait_goes_on_when_the_daemon_is_restarted(run, daemon, monkeypatch):
    """It goes away while it is asked; another comes in its place."""
    ends(daemon, {"j1": ["running"]})
    second = []

    def restart(seconds):
        if not second:
            daemon.stop()
            second.append(FakeDaemon(daemon.state_dir, default_answers()))
            ends(second[0], {"j1": ["completed"]})

    def away(params):
        raise Refuse("The daemon stops.", "unreachable")

    daemon.answers["events"] = away
    module = sys.modules["malletrain.cli.wait"]
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=restart))
    try:
        result = run("wait", "j1")
    finally:
        for each in second:
            each.stop()
    assert result.exit_code == 0
    assert result.stderr == "The daemon stops. Waiting for it to come back.\n"


@pytest.mark.parametrize("op", ["job", "events"])
def test_wait_asks_again_if_too_many_requests_wait(run, daemon, monkeypatch, op):
    """As with many of these commands at once: their exit code says how a job ended."""
    ends(daemon, {"j1": [*["running"] * 8, "completed"]})
    pauses, answer = [], daemon.answers[op]

    def busy(params):
        if len(pauses) < 6:
            raise Refuse("Too many of your requests wait.", "busy")
        return answer(params)

    daemon.answers[op] = busy
    module = sys.modules["malletrain.cli.wait"]
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pauses.append))
    result = run("wait", "j1")
    assert result.exit_code == 0
    assert result.stderr == "Too many of your requests wait. The command asks again.\n"
    longest = [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))


@pytest.mark.parametrize(("state", "code"), ENDINGS)
@pytest.mark.parametrize("words", [("logs", "train", "-f"), ("status", "train", "--watch"),
                                   ("logs", "-f", "--json", "train")])  # fmt: skip
def test_following_a_job_ends_as_it_did(run, daemon, words, state, code):
    daemon.answers["job"] = lambda p: detail(job=job_view(state=state, ended=1009.0))
    result = run(*words)
    assert (result.exit_code, result.stderr) == (code, "")


def test_looking_once_ends_with_exit_code_0(run, daemon):
    daemon.answers["job"] = lambda p: detail(job=job_view(state="failed", ended=1009.0))
    assert run("logs", "train").exit_code == 0
    assert run("status", "train").exit_code == 0


def interrupted(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (("wait", "j1"), "events"),
        (("submit", "--wait", "train.py"), "events"),
        (("logs", "-f", "train"), "logs"),
        (("logs", "-f", "--task", "3", "train"), "do"),
        (("tasks", "--follow", "train"), "do"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_ctrl_c_says_that_the_job_goes_on(run, daemon, monkeypatch, tmp_path, words, request_):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hi')\n")
    monkeypatch.setattr(Connection, request_, interrupted_in(request_))
    result = run(*words)
    assert result.exit_code == 130
    assert result.stderr == "\nJob j1 goes on; malletrain cancel j1 ends it.\n"


def interrupted_in(request_):
    """``do`` carries every request; that for tasks is the one that is interrupted."""
    if request_ != "do":
        return interrupted
    carried = Connection.do
    return lambda client, operation: (
        interrupted() if operation.op == "tasks" else carried(client, operation)
    )


def test_ctrl_c_does_not_say_that_a_job_goes_on_that_has_ended(run, daemon, monkeypatch):
    daemon.answers["job"] = lambda p: detail(job=job_view(state="completed", ended=1009.0))
    monkeypatch.setattr(Connection, "logs", interrupted)
    result = run("logs", "-f", "train")
    assert (result.exit_code, result.stderr) == (130, "\nStopped.\n")


def test_ctrl_c_where_a_state_is_watched(run, daemon, monkeypatch):
    module = sys.modules["malletrain.cli.status"]
    pause = SimpleNamespace(sleep=interrupted)
    monkeypatch.setattr(module, "time", pause)
    result = run("status", "--watch")
    assert (result.exit_code, result.stderr) == (130, "\nStopped watching.\n")


def test_jobs_that_go_on():
    assert jobs_go_on(["j3", "j4"]) == ("Jobs j3 and j4 go on; malletrain cancel j3 j4 ends them.")
    assert jobs_go_on([f"j{n}" for n in range(1000)]) == (
        "1,000 jobs go on; malletrain cancel JOB ends one."
    )
