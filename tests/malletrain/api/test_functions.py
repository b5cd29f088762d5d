"""A function goes into a folder, is called there by every rank, and comes back as it ended."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from malletrain import Client
from malletrain.client import ClientError
from malletrain.training.functions import (
    FunctionFailed,
    FunctionLost,
    FunctionTraceback,
    outcome,
    pack,
)
from tests.malletrain.cli.fake_daemon import (
    FakeDaemon,
    Refuse,
    default_answers,
    event_view,
    job_view,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def run(script, *ranks, generation=1, job="", **more):
    """The script as a job's workers run it, one after another."""
    codes = []
    for rank in ranks or (0,):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(ranks) or 1),
            "MALLETRAIN_GENERATION": str(generation),
            "MALLETRAIN_JOB": job,
            **more,
        }
        done = subprocess.run(
            [sys.executable, str(script)], env={**os.environ, **variables}, capture_output=True
        )
        codes.append(done.returncode)
    return codes


def failure(folder, job=""):
    """What came of a function whose job has failed."""
    return outcome(folder, job, completed=False).result()


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
        failure(tmp_path / "f")
    assert isinstance(caught.value.__cause__, FunctionTraceback)
    assert "in fail" in str(caught.value.__cause__)


def test_of_several_failures_the_first_of_the_last_round_counts(tmp_path):
    def fail():
        raise KeyError(f"{os.environ['MALLETRAIN_GENERATION']} of {os.environ['RANK']}")

    script = pack(tmp_path / "f", "call", fail, (), {})
    run(script, 2, generation=1)
    run(script, 1, 0, generation=2)
    with pytest.raises(KeyError, match="2 of 1"):
        failure(tmp_path / "f")


def test_what_cannot_be_sent_back_is_told_in_words(tmp_path):
    def lock():
        return threading.Lock()

    script = pack(tmp_path / "f", "call", lock, (), {})
    assert run(script) == [1]
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock'"):
        failure(tmp_path / "f")


def test_what_cannot_be_sent_there_is_refused_before_it_is_submitted(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be sent to another process.*inside the function"):
        pack(tmp_path / "f", "call", print, (threading.Lock(),), {})
    assert not (tmp_path / "f").exists()


# --- the result is that of the run ---


def test_a_rank_that_fails_fails_the_function_although_rank_0_has_returned(tmp_path):
    def ok_but_1(spoilt):
        if os.environ["RANK"] in spoilt and os.environ["MALLETRAIN_GENERATION"] == "1":
            raise ValueError("rank 1 has no data")
        return "ok"

    script = pack(tmp_path / "f", "call", ok_but_1, ("1",), {})
    assert run(script, 0, 1) == [0, 1]
    with pytest.raises(ValueError, match="rank 1 has no data"):
        failure(tmp_path / "f")
    with pytest.raises(ValueError, match="rank 1 has no data"):
        outcome(tmp_path / "f").result()
    assert run(script, 0, 1, generation=2) == [0, 0]
    assert outcome(tmp_path / "f").result() == "ok"


def test_a_killed_rank_leaves_no_result(tmp_path):
    def die():
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return "ok"

    script = pack(tmp_path / "f", "call", die, (), {})
    assert run(script, 0, 1) == [0, -9]
    assert outcome(tmp_path / "f", completed=False) is None


def test_a_function_submitted_once_more_does_not_answer_with_the_first_runs_result(tmp_path):
    def whose(folder):
        if os.environ["MALLETRAIN_JOB"] == "j2":
            raise KeyError("second")
        return "first"

    script = pack(tmp_path / "f", "call", whose, (str(tmp_path),), {})
    assert run(script, job="j1") == [0]
    assert run(script, job="j2") == [1]
    assert outcome(tmp_path / "f", "j1").result() == "first"
    assert outcome(tmp_path / "f", "j2") is None
    with pytest.raises(KeyError, match="second"):
        failure(tmp_path / "f", "j2")
    with pytest.raises(AttributeError):
        failure(tmp_path / "f", "j1")


class TwoWords(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_exception_that_cannot_be_rebuilt_arrives_in_words(tmp_path):
    def fail():
        raise TwoWords("salt", "pepper")

    run(pack(tmp_path / "f", "call", fail, (), {}))
    with pytest.raises(FunctionFailed, match="TwoWords: salt and pepper") as caught:
        failure(tmp_path / "f")
    assert "in fail" in str(caught.value.__cause__)


@pytest.mark.parametrize("end", ["returns", "raises", "exits"])
def test_a_fork_that_the_function_does_not_end_changes_no_outcome(tmp_path, end):
    """Such as a child whose command does not exist. Its error was that of the function."""

    def fork():
        child = os.fork()
        if child == 0:
            if end == "raises":
                os.execvp("no-such-command", ["no-such-command"])
            elif end == "exits":
                sys.exit(3)
            return "child"
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    script = pack(tmp_path / "f", "call", fork, (), {})
    assert run(script) == [0]
    assert outcome(tmp_path / "f").result() == {"returns": 0, "raises": 1, "exits": 3}[end]


def test_an_exit_code_of_the_function_does_not_end_who_asks(tmp_path):
    run(pack(tmp_path / "f", "call", sys.exit, (3,), {}))
    with pytest.raises(FunctionFailed, match="SystemExit: 3"):
        failure(tmp_path / "f")


@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration])
def test_the_end_of_an_iterator_within_the_function_ends_no_iteration_here(tmp_path, end):
    """An asyncio.Future refuses StopIteration, and who waits for it would wait for ever."""

    def fail():
        raise end

    run(pack(tmp_path / "f", "call", fail, (), {}))
    with pytest.raises(FunctionFailed, match=f"^{end.__name__}$") as caught:
        failure(tmp_path / "f")
    assert "in fail" in str(caught.value.__cause__)


def test_a_value_that_cannot_be_rebuilt_here_is_told(tmp_path):
    (tmp_path / "only_there.py").write_text("class Value: pass")

    def make():
        import only_there

        return only_there.Value()

    script = pack(tmp_path / "f", "call", make, (), {})
    assert run(script, PYTHONPATH=str(tmp_path)) == [0]
    with pytest.raises(FunctionFailed, match=r"cannot be rebuilt .*: ModuleNotFoundError"):
        outcome(tmp_path / "f").result()


def test_modules_are_found_in_the_submitters_order(tmp_path, monkeypatch):
    """A module of one's own beside the script comes before an installed one of that name; one
    called as our script is one's own.
    """
    for name in ("call", "wave"):
        (tmp_path / f"{name}.py").write_text(f"mine = '{name} of mine'")

    def import_all():
        import wave

        import call

        return call.mine, wave.mine

    monkeypatch.syspath_prepend(tmp_path)
    script = pack(tmp_path / "f", "call", import_all, (), {})
    assert run(script) == [0]
    assert outcome(tmp_path / "f").result() == ("call of mine", "wave of mine")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert run(pack(tmp_path / "g", "call", import_all, (), {})) == [1]
    with pytest.raises(AttributeError, match="module 'wave'"):
        failure(tmp_path / "g")


def test_it_is_called_as_often_as_it_may_be(tmp_path):
    def note(folder):
        with open(f"{folder}/calls", "a") as file:
            file.write(os.environ["RANK"])

    script = pack(tmp_path / "f", "call", note, (str(tmp_path),), {}, tries=1)
    assert run(script, 0, 1, job="j1") == [0, 0]
    assert run(script, 0, 1, job="j1", generation=2) == [1, 1]
    assert (tmp_path / "calls").read_text() == "01"
    with pytest.raises(FunctionLost, match="was called once and did not come to its end"):
        failure(tmp_path / "f", "j1")
    assert run(script, 0, job="j2") == [0], "another job is another run"
    fails = pack(tmp_path / "g", "call", boom, (), {}, tries=1)
    assert run(fails) == run(fails, generation=2) == [1]
    with pytest.raises(OSError, match="No space left"):
        failure(tmp_path / "g")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda c: c.submit_function(takes_all, 1, nodes=4), r"nodes= is an option of jobs .*\*\*"),
        (lambda c: c.submit_function(square, 1, time_limit="1 h"), "has none of that name"),
        (lambda c: c.submit_function(square), "square cannot be called so: missing a required arg"),
        (lambda c: c.executor().submit(square, 1, 2), "square cannot be called so: too many pos"),
        (lambda c: c.submit_function(square, 1, options={"tries": 0}), "tries is 0; accepted"),
        (
            lambda c: c.submit_function(square, 1, options={"tries": 1, "nodes": "1:2"}),
            "goes with a fixed number of nodes, not with 1:2",
        ),
    ],
)
def test_what_would_be_swallowed_or_cannot_be_called_is_refused(site, call, why):
    with Client(site.daemon.state_dir) as client, pytest.raises((TypeError, ValueError), match=why):
        call(client)
    assert site.spec == {}


def test_a_parameter_of_the_functions_own_is_no_option(site):
    with Client(site.daemon.state_dir) as client:
        future = client.submit_function(named, name="x", options={"tries": 1, "nodes": 2})
        assert (site.spec["j1"]["name"], site.spec["j1"]["min_nodes"]) == ("named", 2)
        assert site.spec["j1"]["profile"] is False
        site.end("j1")
        assert future.result(timeout=PATIENCE_S) == "x"


def takes_all(x, **more):
    return x


def named(name):
    return name


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
            state = "completed" if run(self.spec[job]["script"], job=job) == [0] else "failed"
        self.state[job] = state
        self.ended.append(job)

    def cancel(self, params):
        (job,) = params["jobs"]
        self.end(job, "cancelled")
        return {"results": [{"job": job, "ok": True, "sentence": ""}]}

    def events(self, params):
        if params["since"] < 0:
            return []
        views = [event_view(1 + k, "job-completed", job=job) for k, job in enumerate(self.ended)]
        return [event for event in views if event.seq > params["since"]]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = Site(tmp_path)
    yield site
    site.daemon.stop()


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


def test_a_callback_that_exits_ends_no_other_future(site):
    """It is called in the thread that watches all futures."""
    with Client(site.daemon.state_dir) as client, client.executor() as pool:
        one, other = pool.submit(square, 2), pool.submit(square, 3)
        one.add_done_callback(lambda future: sys.exit(1))
        site.end("j1")
        assert one.result(timeout=PATIENCE_S) == 4
        site.end("j2")
        assert other.result(timeout=PATIENCE_S) == 9
        assert pool.submit(square, 4).cancel()


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
        assert site.spec["j1"]["env"] == {"A": "1", "MALLETRAIN_UMASK": "0022"}
        assert client.job("j1").result() == 36
        site.spec["j1"]["script"] = str(Path.cwd() / "train.py")
        with pytest.raises(ClientError, match="is a script's and not a function's"):
            client.job("j1").result()


def flaky(site, op, times, code):
    """The first ``times`` requests ``op`` for a job fail."""
    answered, remaining = site.daemon.answers[op], [times]

    def answer(params):
        if site.ended and remaining[0]:
            remaining[0] -= 1
            raise Refuse("Not now.", code)
        return answered(params)

    site.daemon.answers[op] = answer


@pytest.mark.parametrize("code", ["busy", "internal"])
@pytest.mark.parametrize("op", ["events", "job"])
def test_a_future_ends_although_the_daemon_could_not_answer_at_once(site, op, code):
    """The news that the job has ended is read once; its state is asked for after that."""
    flaky(site, op, 1, code)
    with Client(site.daemon.state_dir) as client:
        future = client.submit_function(square, 3)
        site.end("j1")
        assert future.result(timeout=PATIENCE_S) == 9


def test_a_future_ends_when_its_jobs_event_is_older_than_the_future(site):
    """The job ends before the answer to its submission is read, and its event passes by."""
    submit = site.submit

    def submit_and_end(params):
        answer = submit(params)
        job = answer["job"].id
        site.state[job] = "completed" if run(params["spec"]["script"], job=job) == [0] else "failed"
        return answer

    site.daemon.answers["submit"] = submit_and_end
    with Client(site.daemon.state_dir) as client:
        assert client.submit_function(square, 4).result(timeout=PATIENCE_S) == 16


def test_a_future_whose_job_is_lost_ends_in_a_sentence(site):
    with Client(site.daemon.state_dir) as client:
        lost, other = client.submit_function(square, 2), client.submit_function(square, 3)
        script = site.spec["j1"]["script"]

        def job(params):
            if params["job"] == "j1":
                raise Refuse("There is no job 'j1'; `malletrain status` lists all jobs.")
            return site.job(params)

        site.daemon.answers["job"] = job
        site.end("j1", "failed")
        with pytest.raises(FunctionLost, match=r"job j1 \(square\) is not known .*no job 'j1'"):
            lost.result(timeout=PATIENCE_S)
        site.end("j2")
        assert other.result(timeout=PATIENCE_S) == 9, "the others are still watched"
        assert Path(script).is_file()


def test_a_stale_handle_of_nfs_costs_no_result(site, monkeypatch):
    stale = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def read(*where):
        if stale:
            raise stale.pop()
        return outcome(*where)

    monkeypatch.setattr("malletrain.api.function_job.outcome", read)
    with Client(site.daemon.state_dir) as client:
        future = client.submit_function(square, 3)
        site.end("j1")
        assert future.result(timeout=PATIENCE_S) == 9
    assert not stale


def test_a_result_that_cannot_be_read_is_told(site):
    with Client(site.daemon.state_dir) as client:
        gone, damaged, locked = (client.submit_function(square, x) for x in (2, 3, 4))
        for job in ("j1", "j2", "j3"):
            site.end(job, "" if job != "j1" else "completed")
        for future in (damaged, locked):
            assert future.result(timeout=PATIENCE_S)
        shutil.rmtree(Path(site.spec["j1"]["script"]).parent)
        (Path(site.spec["j2"]["script"]).parent / "result-j2.pkl").write_bytes(b"\x80\x04")
        with pytest.raises(FunctionLost, match=r"the function of job j1 \(square\) is not there"):
            client.job("j1").result()
        with pytest.raises(FunctionLost, match=r"job j2 \(square\) in .* is damaged"):
            client.job("j2").result()
        result = Path(site.spec["j3"]["script"]).parent / "result-j3.pkl"
        result.unlink()
        result.mkdir()
        with pytest.raises(ClientError, match=r"j3 \(square\) cannot be read: .*Is a directory"):
            client.job("j3").result()
        assert gone.exception(timeout=PATIENCE_S)


def test_futures_of_a_closed_client_end(site):
    client = Client(site.daemon.state_dir)
    own, of_executor = client.submit_function(square, 2), client.executor().submit(square, 3)
    client.close()
    for number, future in enumerate((own, of_executor), 1):
        with pytest.raises(ClientError, match=rf'Client\(\)\.job\("j{number}"\)\.result\(\)'):
            future.result(timeout=PATIENCE_S)


def test_all_are_cancelled_although_one_cannot_be(site):
    cancel = site.cancel

    def refuse_one(params):
        if params["jobs"] == ["j1"]:
            raise Refuse("Not now.")
        return cancel(params)

    site.daemon.answers["cancel"] = refuse_one
    with Client(site.daemon.state_dir) as client:
        pool = client.executor()
        futures = [pool.submit(square, x) for x in (1, 2, 3)]
        with pytest.raises(ClientError, match="Not now"):
            pool.shutdown(wait=False, cancel_futures=True)
        assert [future.cancelled() for future in futures] == [False, True, True]
