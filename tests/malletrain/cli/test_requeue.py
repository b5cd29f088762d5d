"""``malletrain requeue``: the new job is the old one, and goes on from its snapshot."""

import re

import msgspec
import pytest

from malletrain.identity.keys import user_name
from malletrain.protocol import env, messages
from malletrain.submission.error import SpecError
from malletrain.submission.resuming import requeued, resubmitted
from tests.malletrain.cli.fake_daemon import detail, job_view

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
    assert "it goes on where j3 was" in done.stdout
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
