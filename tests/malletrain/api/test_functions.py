"""A function goes into a folder, is called there by every rank, and comes back as it ended."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from malletrain import Client
from malletrain.client import ClientError
from malletrain.training.functions import FunctionLost, FunctionTraceback, outcome, pack
from tests.malletrain.cli.fake_daemon import FakeDaemon, default_answers, event_view, job_view
from tests.waiting import PATIENCE_S


def run(script, *ranks, generation=1):
    """The script as a job's workers run it, one after another."""
    codes = []
    for rank in ranks or (0,):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(ranks) or 1),
            "MALLETRAIN_GENERATION": str(generation),
        }
        done = subprocess.run(
            [sys.executable, str(script)], env={**os.environ, **variables}, capture_output=True
        )
        codes.append(done.returncode)
    return codes


def test_rank_0_returns_and_everybody_is_called(tmp_path):
    offset = 40

    def add(x, *, y):
        return os.environ["RANK"], x + y + offset

    script = pack(tmp_path / "f", "call", add, (1,), {"y": 2})
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o700
    assert run(script, 1, 0) == [0, 0]
    assert outcome(tmp_path / "f").result() == ("0", 43)


def test_what_a_function_raises_is_raised_here_with_where_it_came_from(tmp_path):
    def fail():
        raise ValueError("lr must be positive")

    script = pack(tmp_path / "f", "call", fail, (), {})
    assert run(script) == [1]
    with pytest.raises(ValueError, match="lr must be positive") as caught:
        outcome(tmp_path / "f").result()
    assert isinstance(caught.value.__cause__, FunctionTraceback)
    assert "in fail" in str(caught.value.__cause__)


def test_of_several_failures_the_first_of_the_last_round_counts(tmp_path):
    def fail():
        raise KeyError(f"{os.environ['MALLETRAIN_GENERATION']} of {os.environ['RANK']}")

    script = pack(tmp_path / "f", "call", fail, (), {})
    run(script, 2, generation=1)
    run(script, 1, 0, generation=2)
    with pytest.raises(KeyError, match="2 of 1"):
        outcome(tmp_path / "f").result()


def test_what_cannot_be_sent_back_is_told_in_words(tmp_path):
    def lock():
        return threading.Lock()

    script = pack(tmp_path / "f", "call", lock, (), {})
    assert run(script) == [1]
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        outcome(tmp_path / "f").result()


def test_what_cannot_be_sent_there_is_refused_before_it_is_submitted(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be sent to another process.*inside the function"):
        pack(tmp_path / "f", "call", print, (threading.Lock(),), {})
    assert not (tmp_path / "f").exists()


class Site:
    """A fake daemon that runs each job of a function at once, in this machine's processes."""

    def __init__(self, root):
        self.state = dict[str, str]()
        self.spec = dict[str, dict]()
        self.ended = list[str]()
        self.daemon = FakeDaemon(
            root / "state",
            {
                **default_answers(),
                "submit": self.submit,
                "job": self.job,
                "events": self.events,
                "cancel": self.cancel,
            },
        )

    def submit(self, params):
        job = f"j{len(self.spec) + 1}"
        self.spec[job], self.state[job] = params["spec"], "queued"
        return {"job": job_view(id=job, name=params["spec"]["name"], state="queued")}

    def job(self, params):
        job = params["job"]
        view = job_view(id=job, name=self.spec[job]["name"], state=self.state[job])
        return {"job": view, "spec": self.spec[job], "failure": "Killed by signal 9."}

    def end(self, job, state=""):
        """Run the job, or end it as told."""
        if not state:
            state = "completed" if run(self.spec[job]["script"]) == [0] else "failed"
        self.state[job] = state
        self.ended.append(job)

    def cancel(self, params):
        (job,) = params["jobs"]
        self.end(job, "cancelled")
        return {"results": [{"job": job, "ok": True, "sentence": ""}]}

    def events(self, params):
        if params["since"] < 0:
            return []
        told = [event_view(1 + k, "job-completed", job=job) for k, job in enumerate(self.ended)]
        return [event for event in told if event.seq > params["since"]]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Site(tmp_path)
    yield made
    made.daemon.stop()


def square(x):
    return x * x


def boom():
    raise OSError(28, "No space left")


def test_futures_end_as_their_jobs_do(site):
    with Client(site.daemon.state_dir) as client, client.executor(nodes="1:4") as pool:
        good, bad, killed = pool.submit(square, 7), pool.submit(boom), pool.submit(square, 1)
        assert (good.job.name, site.spec["j1"]["max_nodes"]) == ("square", 4)
        assert not good.done()
        gone = pool.submit(square, 2)
        assert gone.cancel()
        site.end("j1")
        site.end("j2")
        site.end("j3", "failed")
        assert (
            concurrent.futures.wait([good, bad, killed, gone], timeout=PATIENCE_S).not_done == set()
        )
        assert good.result() == 49
        with pytest.raises(OSError, match="No space left"):
            bad.result()
        with pytest.raises(FunctionLost, match="was failed without a result: Killed by signal 9"):
            killed.result()
        with pytest.raises(concurrent.futures.CancelledError):
            gone.result()
    with pytest.raises(RuntimeError, match="was shut down"):
        pool.submit(square, 3)


def test_results_of_others_are_not_unpacked(site, monkeypatch):
    """An operator may see everybody's jobs; a pickle runs as who reads it."""
    with Client(site.daemon.state_dir) as client:
        client.submit_function(square, 6)
        site.end("j1")
        monkeypatch.setattr("os.getuid", lambda: os.stat("/").st_uid + 4711)
        with pytest.raises(ClientError, match="would run code of its owner as you"):
            client.job("j1").result()


def test_a_function_is_submitted_by_itself_and_its_job_knows_the_result(site):
    with Client(site.daemon.state_dir) as client:
        future = client.submit_function(square, 6, options={"name": "six", "env": {"A": "1"}})
        site.end("j1")
        assert future.result(timeout=PATIENCE_S) == 36
        assert Path(site.spec["j1"]["workdir"]) == Path.cwd()
        assert site.spec["j1"]["env"] == {"A": "1"}
        assert client.job("j1").result() == 36
        site.spec["j1"]["script"] = str(Path.cwd() / "train.py")
        with pytest.raises(ClientError, match="is a script's and not a function's"):
            client.job("j1").result()
