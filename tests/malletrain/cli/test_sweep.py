"""`malletrain sweep`: what is printed, and what is refused. The daemon's jobs train three steps
whenever they are looked at.
"""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress

import msgspec
import psutil
import pytest

from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import EventView, JobDetail, JobView, NewsView, SeriesView
from malletrain.sweep import SweepError, load_sweep, run_sweep
from malletrain.sweep.ledger import SPEC, Ledger, open_storage
from malletrain.sweep.process import alone, pid_namespace
from tests.malletrain.cli.fake_daemon import Refuse
from tests.malletrain.sweep.sweep_world import STEPS, WorldJobs
from tests.waiting import until

pytestmark = pytest.mark.slow

FILE = """
[sweep]
metric = "loss"
trials = 6
at_once = 3
every = "1 ms"
[job]
script = "train.py"
[space]
x = { low = 0.0, high = 1.0 }
[sampler]
kind = "random"
[pruner]
kind = "asha"
"""


def view(job):
    return JobView(
        job.id, job.spec.name, "ann", job.state, "", (), 1, 1, 0.0, 0.0, 0, 0, 0.0, 0.0, None
    )


def open_databases() -> list[str]:
    """Files of databases that this process has open."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return [path for path in paths if "sweeps.db" in path]


@pytest.fixture
def run(run):
    """Every command closes the database, whether it succeeds or not."""

    def call(*words):
        done = run(*words)
        assert open_databases() == [], words
        return done

    return call


@pytest.fixture
def jobs(daemon):
    """The fake daemon's jobs."""
    world = WorldJobs()

    def submit(params):
        return {"job": view(world.jobs[world.submit(msgspec.convert(params["spec"], JobSpec))])}

    def looked(params):
        for _ in range(3):
            world.train()
        return [view(job) for job in world.jobs.values()]

    def one(params):
        if params["job"] not in world.jobs:
            raise Refuse("There is no such job.")
        job = world.jobs[params["job"]]
        return JobDetail(view(job), {})

    def events(params):
        if params["since"]:
            return []
        facts = (params["job"], "", "", "")
        return [
            EventView(1, 100.0, "job-submitted", *facts),
            EventView(2, 1000.0, "job-started", *facts, {"nodes": ["a", "b"]}),
            EventView(3, 1900.0, "job-rescaled", *facts, {"nodes": ["a"]}),
            EventView(4, 2800.0, "job-suspended", *facts),
            EventView(5, 9000.0, "job-started", *facts, {"nodes": ["a", "b", "c"]}),
            EventView(6, 10500.0, "job-completed", *facts),
        ]

    def metrics(params):
        points = world.jobs[params["job"]].reported
        steps, values = zip(*points, strict=True) if points else ((), ())
        if len(points) == STEPS:  # a last word without a step
            steps, values = (*steps, None), (*values, values[-1])
        many = len(values)
        return [SeriesView("loss", values, (0.0,) * many, (0.0,) * many, (1,) * many, steps, many)]

    def cancel(params):
        world.cancel(params["jobs"][0], params["why"])
        return {"results": []}

    def weigh(params):
        world.weigh(params["job"], params["weight"])
        return view(world.jobs[params["job"]])

    daemon.answers |= {
        "submit": submit,
        "jobs": looked,
        "job": one,
        "metrics": metrics,
        "events": events,
        "news": lambda params: NewsView("1", tuple(params["jobs"])),
    }
    daemon.answers |= {"cancel": cancel, "weigh": weigh}
    return world


@pytest.fixture
def file(tmp_path):
    (tmp_path / "train.py").write_text("pass")
    path = tmp_path / "lr.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def book(tmp_path):
    with ExitStack() as stack:

        def opened():
            storage = open_storage(f"sqlite:///{tmp_path}/state/sweeps.db")
            return Ledger.open(stack.enter_context(storage), "lr")

        yield opened


def test_a_sweep_from_beginning_to_end(run, jobs, file, book, tmp_path):
    done = run("sweep", "run", file)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == f"Sweep lr: 6 trials of {tmp_path}/train.py."
    assert lines[1].startswith("Trial 0 begins: x 0.")
    assert lines[-2] == "All trials have ended."
    best = book().best()[0]
    assert lines[-1].startswith(f"Best: trial {best.number}, {best.value:.6g}.")
    assert len(jobs.jobs) == 6

    assert {t.last_step for t in book().trials() if t.state.name == "COMPLETE"} == {STEPS}
    (line,) = [s for s in run("sweep", "status").stdout.splitlines() if s.startswith("lr")]
    assert line.split()[5:7] == ["6", f"{best.value:.6g}"]
    assert line.endswith("All trials have ended.")

    rows = list(csv.DictReader(io.StringIO(run("sweep", "show", "lr", "--csv").stdout)))
    assert [row["best"] for row in rows] == ["True"] + ["False"] * 5
    assert float(rows[0]["loss"]) == best.value
    assert float(rows[0]["x"]) == best.params["x"]
    assert float(rows[0]["node_hours"]) == 2.0
    shown = run("sweep", "show", "lr").stdout
    assert shown.split()[:4] == ["TRIAL", "STATE", "LOSS", "STEP"]

    answer = json.loads(run("sweep", "best", "lr", "--json").stdout)
    assert answer["trials"][0]["parameters"] == best.params
    assert "It left no snapshot." in run("sweep", "best", "lr").stdout

    assert run("sweep", "add-trials", "lr", "2").stdout == "Sweep lr is to have 8 trials.\n"
    assert "No process runs it" in run("sweep", "status", "lr").stdout
    (tmp_path / "train.py").write_text("pass  # another text")
    resumed = run("sweep", "resume", "lr")
    assert resumed.exit_code == 0
    changed = "When trial 6 began, train.py was not as at the beginning of the sweep"
    assert resumed.stdout.count(changed) == 1
    (row,) = json.loads(run("sweep", "status", "lr", "--json").stdout)
    assert changed in row["sentence"]
    assert len(book().trials()) == 8
    assert len(jobs.jobs) == 8

    again = run("sweep", "run", file)
    assert again.exit_code == 1
    assert "There is a sweep lr already. Go on with it: malletrain sweep resume lr" in again.stderr
    # Who has changed the file would else resume the sweep with the values that it had.
    file.write_text(FILE.replace("high = 1.0", "high = 2.0").replace("at_once = 3", "at_once = 2"))
    changed = run("sweep", "run", file)
    assert changed.exit_code == 1
    words = "already, with other values of sweep.at_once, space.x. Go on with its values:"
    assert f"There is a sweep lr {words} malletrain sweep resume lr" in changed.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("add-trials", "lr", "x"), "'x' is no number of trials. Give the number of trials to add"),
        (("add-trials", "lr", "0"), "'0' is no number of trials. Give the number of trials to add"),
        (("weigh", "lr", "heavy"), "'heavy' is no weight. Give a number from 0.0001 to 1,000,000."),
        (("weigh", "lr", "0"), "'0' is no weight. Give a number from 0.0001 to 1,000,000."),
    ],
)
def test_what_is_no_number_is_told_what_to_give(run, words, sentence):
    done = run("sweep", *words)
    assert done.exit_code == 2
    output = " ".join(done.stderr.split())
    assert sentence in output
    assert f"malletrain sweep {words[0]} NAME" in output


def test_from_python(jobs, file, tmp_path):
    sweep = load_sweep(file)
    lines = []
    study = run_sweep(sweep, tmp_path / "state", lines.append)
    assert len(study.trials) == 6
    assert study.best_value == min(t.value for t in study.trials if t.state.name == "COMPLETE")
    assert lines[0].startswith("The smallest loss is the best")
    assert lines[1].startswith("Trial 0 begins")
    assert open_databases() == []
    assert len(run_sweep(sweep, tmp_path / "state").trials) == 6
    assert len(jobs.jobs) == 6
    for text, words in (
        (FILE.replace("x = {", "y = {"), r"space\.x, space\.y\. Give this one another name"),
        (FILE.replace("[sweep]", '[sweep]\ndirection = "maximize"'), r"of sweep\.direction\."),
        (FILE.replace("[job]", '[job]\nargs = ["--other"]'), r"of job\.args\."),
        (FILE.replace("trials = 6", "trials = 9"), r"of sweep\.trials\. .*add-trials lr COUNT"),
    ):
        file.write_text(text)
        with pytest.raises(SweepError, match=words):
            run_sweep(load_sweep(file), tmp_path / "state")


def test_cancel_without_anybody_who_attends(run, jobs, file, book, monkeypatch):
    missing = run("sweep", "status", "lr")
    assert missing.exit_code == 1
    assert "There is no sweep lr; known: there is none." in missing.stderr
    jobs.train = lambda: None

    def interrupted(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("malletrain.sweep.process.time.sleep", interrupted)
        stopped = run("sweep", "run", file)
    assert stopped.exit_code == 130
    assert "Resume the sweep: malletrain sweep resume lr" in stopped.stderr
    assert len(book().running()) == 3
    result = run("sweep", "weigh", "lr", "3")
    assert result.stdout == "The most promising trial of lr counts 3.\n"
    assert "until you resume it: malletrain sweep resume lr" in result.stderr
    assert book().highest == 3.0
    assert run("sweep", "weigh", "lr", "0").exit_code == 2
    (line,) = [s for s in run("sweep", "status").stdout.splitlines() if s.startswith("lr")]
    assert line.endswith("No process runs it. Resume it: malletrain sweep resume lr")
    assert run("sweep", "cancel", "lr").exit_code == 0
    assert {job.state for job in jobs.jobs.values()} == {"cancelled"}
    assert not book().running()


def test_detached_a_process_of_its_own_attends_to_it(run, jobs, file, book, tmp_path):
    done = run("sweep", "run", file, "--detach")
    assert done.exit_code == 0, done.output
    first, second = done.stdout.splitlines()
    assert first == f"Sweep lr: 6 trials of {tmp_path}/train.py."
    log = tmp_path / "state" / "sweeps" / "lr.log"
    assert second.endswith(f"runs it; its output is in {log}")
    engine = psutil.Process(int(second.split()[1]))
    assert engine.parent().pid == os.getpid()
    assert os.getsid(engine.pid) == engine.pid, "it outlives this terminal"
    try:
        until(lambda: engine.status() == psutil.STATUS_ZOMBIE, "it ends", details=log.read_text)
    finally:
        engine.kill()
        engine.wait()
    assert log.read_text().splitlines()[-2] == "All trials have ended."
    assert book().end == "All trials have ended."
    assert len(jobs.jobs) == 6


def test_one_engine_at_a_time(run, jobs, file, tmp_path):
    with alone(tmp_path / "state", "lr"):
        refused = run("sweep", "run", file)
        assert refused.exit_code == 1
        assert "The sweep lr is being run by process" in refused.stderr
        assert "no sweep" in run("sweep", "status", "lr").stderr, "nothing is stored of it"
        with open_storage(f"sqlite:///{tmp_path}/state/sweeps.db") as storage:
            Ledger.create(storage, load_sweep(file, None))
        assert "A process runs it." in run("sweep", "status", "lr").stdout
        assert "the process that runs it" in run("sweep", "cancel", "lr").stdout


def test_an_engine_with_another_state_directory_is_told(run, jobs, file, tmp_path):
    """Which has a lock of its own; only its record in the study says that it runs."""

    def status():
        [row] = json.loads(run("sweep", "status", "lr", "--json").stdout)
        return row["attended"], row["sentence"]

    url = f"sqlite:///{tmp_path}/state/sweeps.db"
    (tmp_path / "state").mkdir(exist_ok=True)
    nobody = "No process runs it. Resume it: malletrain sweep resume lr"
    here = {"host": os.uname().nodename, "namespace": pid_namespace(), "id": "x", "count": 1}
    with open_storage(url) as storage:
        ledger = Ledger.create(storage, load_sweep(file, None))
        assert status() == (False, nobody)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        ledger.note_engine({**here, "pid": child.pid})
        assert status() == (True, "A process runs it.")
        assert run("sweep", "weigh", "lr", "2").stderr == ""
        child.communicate()
        assert status() == (False, nobody)
        ledger.note_engine({**here, "pid": child.pid, "host": "login2"})
        last = f"Process {child.pid} on login2 ran it last. If that process has ended, "
        assert status() == (False, last + "resume it: malletrain sweep resume lr")
        detached = run("sweep", "resume", "lr", "--detach")
        engine = psutil.Process(int(detached.stdout.split()[1]))
        engine.kill()
        engine.wait()
        assert detached.stderr == (
            f"Process {child.pid} on login2 ran it last. If it still runs it, process "
            f"{engine.pid} ends within 30 s, and its output says so.\n"
        )


def test_what_is_wrong_is_said_before_anything_is_kept(run, daemon, file, tmp_path):
    file.write_text(FILE.replace('metric = "loss"', 'metrics = "loss"'))
    refused = run("sweep", "run", file)
    assert refused.exit_code == 1
    assert 'line 3: sweep.metrics: there is no such key; did you mean "metric"?' in refused.stderr
    file.write_text(FILE)
    (tmp_path / "train.py").unlink()
    assert "There is no script" in run("sweep", "run", file).stderr
    (tmp_path / "train.py").write_text("pass")
    daemon.stop()
    assert "Start one with: malletrain daemon" in run("sweep", "run", file).stderr
    assert not (tmp_path / "state" / "sweeps.db").exists()


def test_another_programs_database_is_left_alone(run, file, jobs, tmp_path):
    from malletrain.store.store import Store

    url = f"sqlite:///{tmp_path}/other.db"
    with Store.open(url):
        pass
    refused = run("sweep", "run", file, "--storage", url)
    assert refused.exit_code == 1
    assert "is another program's" in refused.stderr
    with Store.open(url):
        pass


@pytest.mark.parametrize("missing", ["optuna", "malletrain.sweep.spec"])
def test_without_optuna_it_says_what_to_install(run, monkeypatch, missing):
    """An environment of a daemon has pydantic and no Optuna."""
    monkeypatch.delitem(sys.modules, "malletrain.sweep.ledger", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    refused = run("sweep", "status")
    assert refused.exit_code == 1
    assert "pip install --find-links WHEELS 'malletrain[sweep]'" in refused.stderr


def test_a_sweep_that_cannot_be_read_hides_no_other_and_says_how_to_remove_it(run, jobs, file):
    assert run("sweep", "run", file).exit_code == 0
    with open_storage(f"sqlite:///{file.parent}/state/sweeps.db") as storage:
        study = Ledger.create(storage, load_sweep(file, "bad")).study
        study.set_user_attr(SPEC, {**study.user_attrs[SPEC], "space": {"x": [1.0, None]}})
    rows = json.loads(run("sweep", "status", "--json").stdout)
    assert [row["name"] for row in rows] == ["bad", "lr"]
    assert "optuna delete-study --study-name bad" in rows[0]["sentence"]
    refused = run("sweep", "cancel", "bad")
    assert refused.exit_code == 1
    url = f"sqlite:///{file.parent}/state/sweeps.db"
    words = " ".join(refused.stderr.split())
    assert f"optuna delete-study --study-name bad --storage '{url}'" in words
