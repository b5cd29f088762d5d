"""Nodes that operators name at the command line, as the daemon receives them, and jobs that their
owners submit again.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from malletrain.identity.keys import user_name
from malletrain.protocol import env, messages
from malletrain.submission.error import SpecError
from malletrain.submission.resuming import requeued, resubmitted
from tests.malletrain.cli.fake_daemon import Refuse, detail, job_view

MANY = [f"node-{number:06d}.cluster" for number in range(50_000)]


@pytest.mark.parametrize("op", ["drain", "exclude", "resume"])
def test_more_names_than_a_request_holds_come_in_several(run, daemon, op):
    daemon.answers[op] = lambda params: {"sentence": f"{len(params['nodes'])} of them."}
    result = run(op, *MANY)
    assert result.exit_code == 0, result.output
    requests = [params["nodes"] for seen, params in daemon.seen if seen == op]
    assert [name for some in requests for name in some] == MANY
    assert len(requests) > 1
    assert result.output.splitlines() == [f"{len(some)} of them." for some in requests]


def refusing(without, code="refused"):
    """An operation that is refused where none of its nodes is in ``without``."""

    def do(params):
        there = without.intersection(params["nodes"])
        if not there:
            raise Refuse("May be leased again: nothing.", code)
        return {"sentence": f"May be leased again: {len(there)}."}

    return do


@pytest.mark.parametrize("there", [MANY[0], MANY[-1]], ids=["first", "last"])
def test_a_request_that_is_refused_keeps_none_of_the_others_back(run, daemon, there):
    daemon.answers["resume"] = refusing({there})
    result = run("resume", *MANY)
    requests = [params["nodes"] for op, params in daemon.seen if op == "resume"]
    assert [name for some in requests for name in some] == MANY
    assert len(requests) > 1
    assert (result.exit_code, result.stdout) == (0, "May be leased again: 1.\n")
    assert result.stderr.splitlines() == [
        f"Refused for {len(some):,} nodes, {some[0]} to {some[-1]}: May be leased again: nothing."
        for some in requests
        if there not in some
    ]


@pytest.mark.parametrize(("code", "ends"), [("refused", 1), ("usage", 2)])
def test_the_command_fails_where_all_of_them_are_refused(run, daemon, code, ends):
    daemon.answers["resume"] = refusing(set(), code)
    result = run("resume", *MANY)
    requests = [params["nodes"] for op, params in daemon.seen if op == "resume"]
    assert [name for some in requests for name in some] == MANY
    assert (result.exit_code, result.stdout) == (ends, "")
    assert len(result.stderr.splitlines()) == len(requests)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["drain", "n1", "n2"], {"nodes": ["n1", "n2"], "until": None, "why": ""}),
        (["drain", "--all"], {"nodes": ["*"], "until": None, "why": ""}),
        (["pause", "--why", "x"], {"release": False, "why": "x"}),
    ],
)
def test_few_come_in_one(run, daemon, words, expected):
    daemon.answers[words[0]] = lambda params: {"sentence": "Done."}
    result = run(*words)
    assert (result.exit_code, result.output) == (0, "Done.\n")
    assert [params for op, params in daemon.seen if op == words[0]] == [expected]


OLD = messages.JobSpec(
    "lr", user_name(), "/home/ada/train.py", "/home/ada", "/usr/bin/python3",
    ("--epochs", "90"), env={"A": "b"}, min_nodes=2, max_nodes=8, deadline=50.0, work=1e6,
    key="once", after=("j3",),
)  # fmt: skip


def test_a_job_once_more():
    same = resubmitted(OLD, "j7", (), now=10.0)
    assert same.env == {"A": "b", env.RESUME_FROM: "j7"}
    assert (same.key, same.after, same.deadline, same.work) == ("", (), 50.0, 1e6)
    original = msgspec.structs.replace(
        same, key="once", after=("j3",), env=OLD.env, owner=OLD.owner
    )
    assert original == OLD
    longer = resubmitted(OLD, "j7", ("--epochs", "120"), now=60.0)
    assert longer.args == ("--epochs", "90", "--epochs", "120")
    assert longer.deadline is None
    assert longer.work is None


def test_a_farm_is_not_requeued():
    tasks = messages.FarmSpec(("run", "{x}"), ("x",), 3, "{index}.log")
    farm = msgspec.structs.replace(OLD, mode="farm", farm=tasks)
    old = detail(
        job=job_view(id="j9", state="failed", ended=1.0, owner=user_name()),
        spec=msgspec.to_builtins(farm),
    )
    with pytest.raises(SpecError, match="`malletrain map` takes the rows"):
        requeued(old, (), 10.0, user_name())


@pytest.fixture
def ended(daemon):
    jobs = {
        "j1": job_view(id="j1", state="failed", ended=100.0, owner=user_name()),
        "j2": job_view(id="j2", state="failed", ended=900.0, owner=user_name()),
        "j3": job_view(id="j3", state="completed", ended=900.0, owner=user_name()),
        "j4": job_view(id="j4", state="failed", ended=900.0, owner="somebody"),
        "j5": job_view(id="j5", state="running", ended=None, owner=user_name()),
    }
    daemon.answers["jobs"] = lambda params: list(jobs.values())
    daemon.answers["job"] = lambda params: detail(
        job=jobs[params["job"]], spec=msgspec.to_builtins(OLD)
    )
    return daemon


def submitted(daemon):
    return [params["spec"] for op, params in daemon.seen if op == "submit"]


def test_words_after_two_dashes_are_the_scripts(run, ended):
    done = run("requeue", "j3", "--", "--epochs", "120", "--failed")
    assert done.exit_code == 0, done.stderr
    assert "It goes on from the snapshot of j3, if that saved one." in done.stdout
    (spec,) = submitted(ended)
    assert spec["args"] == ["--epochs", "90", "--epochs", "120", "--failed"]
    assert spec["env"][env.RESUME_FROM] == "j3"


def test_what_the_old_job_waited_for_is_told_to_be_left_out(run, ended):
    done = run("requeue", "j3", "--", "--epochs", "120")
    assert "Unlike the old one it does not wait for j3 (--after)." in done.stderr
    assert "The old one's deadline is over and left out." in done.stderr
    assert "The old one's --work is left out" in done.stderr
    assert run("requeue", "j3", "--json").stderr == ""


def test_all_that_failed_of_ones_own(run, ended):
    assert run("requeue", "--failed", "--since", "2000-01-01").exit_code == 1
    assert run("requeue", "--failed").exit_code == 0
    assert [spec["env"][env.RESUME_FROM] for spec in submitted(ended)] == ["j1", "j2"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["j5"], "j5 .* is running"),
        (["j4"], "belongs to somebody"),
        ([], "Name the jobs"),
        (["--failed", "j1"], "Name the jobs"),
    ],
)
def test_what_is_not_done(run, ended, words, why):
    done = run("requeue", *words)
    assert done.exit_code != 0
    assert re.search(why, done.stderr)
    assert submitted(ended) == []
