"""The commands that show things: text and JSON, colour, pipes, exit codes, errors as one
sentence.
"""

import json
import os
import subprocess
import sys

import pytest

from malletrain.cli import main
from malletrain.protocol.views import ProfileView, RateView, RescaleView
from tests.command_runner import CliRunner
from tests.malletrain.cli.fake_daemon import (
    Refuse,
    detail,
    event_view,
    job_view,
    node_view,
    status_view,
)

pytestmark = pytest.mark.slow

COMMANDS = sorted(main.commands)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "agent"])
def test_help_teaches(command):
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"malletrain {command}" in result.stdout


def test_agent_is_hidden():
    listed = CliRunner().invoke(main, ["--help"]).stdout.split("Commands:")[1]
    assert "agent" not in listed
    assert "submit" in listed


def test_importing_the_command_line_imports_nothing_heavy():
    """What makes ``malletrain --help`` and completion quick."""
    heavy = ("zmq", "msgspec", "rich", "pydantic", "sqlalchemy", "numpy", "torch")
    code = f"import sys, malletrain.cli; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_an_unknown_command_is_refused_with_click_before_8_2():
    """That has no exception of its own for a group without a command."""
    code = """
import click
vars(click.exceptions).pop("NoArgsIsHelpError", None)
from malletrain.cli import main
main(["statsu"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No such command 'statsu'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_what_a_scientist_runs_does_without_numpy():
    """torch brings it no more, and a training environment has nothing else that does."""
    code = """
import importlib, pkgutil, sys
sys.modules["numpy"] = None
import torch
for name in ("cli", "client", "submission", "render", "api", "training", "launch", "agent"):
    room = importlib.import_module(f"malletrain.{name}")
    for module in pkgutil.iter_modules(room.__path__, f"malletrain.{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_completion():
    environment = {
        **os.environ,
        "_MALLETRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": "malletrain su",
        "COMP_CWORD": "1",
    }
    code = "from malletrain.cli import main; main(prog_name='malletrain')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "plain,submit\n"


def test_status(run, daemon):
    result = run("status")
    assert result.exit_code == 0, result.stderr
    for words in (
        "malletraind 0.1.0",
        "3 nodes held: 2 train, 1 without a job; 1 more is idle",
        "train",
        "running",
        "1:4",
        "123/s",
        "5,000",
        "2 preemptions",
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


def test_status_json(run, daemon):
    data = json.loads(run("status", "--json").stdout)
    assert data["status"]["preemptions"] == 2
    assert data["jobs"][0]["nodes"] == ["n1", "n2"]


def test_status_of_one_job(run, daemon):
    result = run("status", "train", "--json")
    assert json.loads(result.stdout)["id"] == "j1"
    assert ("job", {"job": "train"}) in daemon.seen


def test_status_without_jobs(run, daemon):
    daemon.answers["jobs"] = lambda p: []
    assert "malletrain submit" in run("status").stdout


def test_status_tells_a_poll_error(run, daemon):
    daemon.answers["status"] = lambda p: status_view(poll_error="sinfo: command not found")
    assert "sinfo: command not found" in run("status").stdout


def test_status_tells_operators_what_is_wrong_with_the_list_of_users(run, daemon):
    problem = "/etc/malletrain/users, line 3, is left out: 'ann/x' is no user name."
    daemon.answers["status"] = lambda p: status_view(users_problems=(problem,))
    assert problem in " ".join(run("status").stdout.split())


def test_status_tells_operators_of_leases_from_which_no_agent_reports(run, daemon):
    sentence = "Leases start on n1, and no agent reports from them. The last one: no module."
    daemon.answers["status"] = lambda p: status_view(failed_starts=(sentence,))
    assert sentence in " ".join(run("status").stdout.split())


def test_status_watch_ends_with_the_job(run, daemon):
    daemon.answers["job"] = lambda p: detail(job=job_view(state="completed", ended=1099.0))
    result = run("status", "train", "--watch")
    assert result.exit_code == 0
    assert "completed" in result.stdout


def test_show(run, daemon):
    out = run("show", "train").stdout
    for words in (
        "/home/ada/train.py --lr 0.1",
        "3.25 s",
        "rendezvous 0.50",
        "1 → 2",
        "unfinished",
        "no space left",
        "accuracy 0.98",
    ):
        assert words in out


def test_show_how_it_scales(run, daemon):
    out = run("show", "train").stdout
    for words in (
        "Scaling: measured. Every size has been visited.",
        "70.0/s",
        "± 1.00/s",
        "estimated",
        "2.0 s to grow",
        "4 → 2 nodes",
        "j9",
    ):
        assert words in out
    daemon.answers["job"] = lambda p: detail(
        profile=ProfileView("waiting", "It needs 2 nodes more.")
    )
    assert "Scaling: not measured yet. It needs 2 nodes more." in run("show", "train").stdout


def test_show_says_one_rate_for_a_size_and_what_was_seen_beside_it(run, daemon):
    """Two tables told two numbers for one size."""
    daemon.answers["job"] = lambda p: detail(
        rates=(
            RateView(nodes=2, rate=120.0, spread=1.5, samples=4000.0, seconds=30.0),
            RateView(nodes=2, rate=110.0, spread=1.5, samples=1000.0, seconds=10.0),
            RateView(nodes=4, rate=99.0, spread=1.5, samples=500.0, seconds=5.0),
        )
    )
    lines = run("show", "train").stdout.splitlines()
    (head,) = (line for line in lines if "EXPECTED" in line)
    assert [c.split() for c in ("NODES", "EXPECTED", "SEEN", "TIME") if c not in head] == []
    table = [line.split() for line in lines if line[:5].strip().isdigit() and "→" not in line]
    rows = {row[0]: row for row in table}
    assert rows["2"][1:5] == ["123/s", "±", "2.00/s", "estimated"]
    assert rows["2"][-4:] == ["118/s", "5,000", "40", "s"]
    assert rows["4"] == ["4", "99.0/s", "500", "5.0", "s"]


def test_words_that_people_understand(run, daemon):
    """What confused them: a rescale that was a start, "gone", BID, SPREAD, "95 %", a dash."""
    first = RescaleView(
        generation=1, kind="start", from_nodes=0, to_nodes=1, began=1000.0, cost_s=9.0
    )
    gone = ProfileView("gone", "The job ended while it was being profiled.")
    daemon.answers["job"] = lambda p: detail(rescales=(first,), profile=gone)
    out = run("show", "train").stdout
    assert "started on 1 node " in out
    assert "Scaling: measured in part. The job ended" in out
    for command in ("show train", "status", "nodes", "top --once"):
        out = run(*command.split()).stdout
        for word in ("BID", "SPREAD", "95 %", "kappa", "–", "gone", "free"):
            assert word not in out, (command, word)


def test_a_loss_that_left_all_nodes_is_not_one_of_nodes(run, daemon):
    """In live mode a killed worker that joins again is a loss, too."""
    loss = RescaleView(
        generation=2, kind="loss", from_nodes=3, to_nodes=3, began=1000.0, cost_s=2.0
    )
    daemon.answers["job"] = lambda p: detail(rescales=(loss,))
    out = run("show", "train").stdout
    assert "after a loss: 3 → 3 nodes" in out
    assert "lost nodes" not in out


def test_show_why_it_failed(run, daemon):
    daemon.answers["job"] = lambda p: detail(
        job=job_view(state="failed", tries=3), failure="rank 1 exited with 1:\nValueError: bad"
    )
    out = run("show", "train").stdout
    assert "Why it failed" in out
    assert "ValueError: bad" in out


FAILURE = "Rank 1 was killed by signal 9.\n[rank 1]\nepoch 4"


@pytest.mark.parametrize("reason", ["Rank 1 was killed by signal 9", "Its time limit is over."])
def test_why_a_job_failed_begins_with_a_sentence(run, daemon, reason):
    daemon.answers["job"] = lambda p: detail(
        job=job_view(state="failed", reason=reason), failure=FAILURE
    )
    lines = run("show", "train").stdout.splitlines()
    lines = lines[lines.index("Why it failed") + 1 :]
    own = [] if reason in FAILURE else [reason]
    assert lines == [*own, *FAILURE.splitlines()]


@pytest.mark.parametrize("state", ["running", "suspended", "queued"])
def test_the_last_failure_of_a_job_that_goes_on_is_not_why_it_waits(run, daemon, state):
    view = job_view(state=state, reason="others are served first")
    daemon.answers["job"] = lambda p: detail(job=view, failure=FAILURE)
    out = run("show", "train").stdout
    assert "Why it failed" not in out
    lines = out.splitlines()
    assert lines[lines.index("Last failure") + 1 :] == FAILURE.splitlines()


def test_show_json_is_the_view(run, daemon):
    data = json.loads(run("show", "train", "--json").stdout)
    assert data["rescales"][0]["phases"] == {"rendezvous": 0.5}
    assert data["rescales"][1]["cost_s"] is None


def test_unknown_job(run, daemon):
    def refuse(params):
        raise Refuse(f"There is no job {params['job']}.")

    daemon.answers["job"] = refuse
    result = run("show", "nope")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "There is no job nope.\n")


def test_nodes(run, daemon):
    out = run("nodes").stdout
    assert "leaving in 4.0 s" in out
    assert "train" in out  # the job's name, not its id
    assert "j1" not in out


def test_nodes_of_several_users_are_shown_with_their_owners(run, daemon):
    assert "OWNER" not in run("nodes").stdout
    daemon.answers["nodes"] = lambda p: [node_view("n1", owner="ann"), node_view("n2", "idle", "")]
    head, _, first, second = run("nodes").stdout.splitlines()[:4]
    assert head.split()[-1] == "OWNER"
    assert first.split()[-1] == "ann"
    assert second.split()[-1] == "nobody"


def test_nodes_explain(run, daemon):
    rules = (("state", True, "It is idle."), ("reservation", False, "It is reserved for 'maint'."))
    daemon.answers["nodes"] = lambda p: (
        [node_view("n9", "idle", "", rules=rules)] if p["explain"] else []
    )
    out = run("nodes", "--explain").stdout
    assert "It is reserved for 'maint'." in out
    data = json.loads(run("nodes", "--explain", "--json").stdout)
    assert data[0]["rules"][1] == ["reservation", False, "It is reserved for 'maint'."]


def test_top_once(run, daemon):
    result = run("top", "--once")
    assert result.exit_code == 0, result.stderr
    for words in ("train", "n2", "●●○○", "Event number 3.", "accuracy 0.98"):
        assert words in result.stdout


def test_top_in_a_pipe_says_what_to_do(run, daemon):
    result = run("top")
    assert result.exit_code == 1
    assert "--once" in result.stderr


def test_names_cannot_control_the_terminal(run, daemon):
    daemon.answers["jobs"] = lambda p: [job_view(name="evil\x1b[31m[bold]x", reason="\x07bell")]
    out = run("status").stdout
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "evil·[31m[bold]x" in out


def test_colour_on_a_terminal_and_not_with_no_color(daemon):
    script = "from malletrain.cli import main; main(['status'], prog_name='malletrain')"
    base = {
        **os.environ,
        "MALLETRAIN_STATE_DIR": str(daemon.state_dir),
        "FORCE_COLOR": "1",
        "TERM": "xterm",
    }
    base.pop("NO_COLOR", None)

    def output(**more):
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**base, **more},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert "\x1b[32m" in output()
    assert "\x1b[32m" not in output(NO_COLOR="1")


def test_a_closed_pipe_is_no_error(daemon):
    """``malletrain events | head -1``"""
    daemon.answers["events"] = lambda p: [event_view(k) for k in range(1, 400)]
    environment = {**os.environ, "MALLETRAIN_STATE_DIR": str(daemon.state_dir)}
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-c",
            "from malletrain.cli import main; main(['events', '--json'], prog_name='malletrain')",
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_an_unexpected_error_is_a_sentence(run, daemon, monkeypatch):
    monkeypatch.setattr("malletrain.client.Connection.status", lambda self: 1 / 0)
    result = run("status")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "division by zero" in result.stderr
    assert "MALLETRAIN_DEBUG=1" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["show"],
        ["logs", "x", "--rank", "-1"],
        ["nosuch"],
        ["cancel"],
        ["events", "--since", "x"],
    ],
)
def test_usage(run, words):
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == "" or not words  # the bare command prints its help
