"""One process runs a sweep.

One engine for each sweep, also if engines have state directories of their own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
import sqlalchemy.exc

from malletrain.sweep import process
from malletrain.sweep.ledger import Ledger, open_storage
from malletrain.sweep.process import OtherEngineError, SoleEngine, pid_namespace
from malletrain.sweep.spec import SweepError, parse_sweep
from tests.malletrain.sweep.sweep_world import TEXT, World, WorldJobs, described
from tests.waiting import until


def test_a_look_whether_a_sweep_is_run_keeps_nobody_from_running_it(tmp_path, monkeypatch):
    """The page in the browser looks all the time, and takes the lock for a moment."""
    with process.alone(tmp_path, "lr"):
        assert process.holds_lock(tmp_path, "lr")
        refused = pytest.raises(SweepError, match=f"is being run by process {os.getpid()} on")
        with refused, process.alone(tmp_path, "lr"):
            pass
    look = os.open(process.lock_path(tmp_path, "lr"), os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_EX)
    monkeypatch.setattr(process.time, "sleep", lambda s: fcntl.flock(look, fcntl.LOCK_UN))
    with process.alone(tmp_path, "lr"):
        assert process.holds_lock(tmp_path, "lr")
    os.close(look)
    assert not process.holds_lock(tmp_path, "lr")


class TrainingJobs(WorldJobs):
    """Jobs that train while the engine waits for news of them."""

    def wait(self, ids, within_s):
        self.train()


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "train.py").touch()
    text = TEXT.format(trials=3, at_once=3, pruner="asha", more="")
    return parse_sweep(text, "sweep.toml", tmp_path, "s")


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A database in a file, and a function that takes it away and returns one that brings it
    back."""
    monkeypatch.setattr(process, "AWAY_S", 0.0)
    monkeypatch.setattr(process, "REST_S", 0.0)
    file, elsewhere = tmp_path / "sweeps.db", tmp_path / "elsewhere.db"

    def away():
        file.rename(elsewhere)
        return lambda: elsewhere.replace(file)

    return f"sqlite:///{file}", away


def test_a_sweep_waits_for_its_database_and_goes_on(moved, sweep):
    """As when its server is restarted; the points are those between any two writes."""
    url, away = moved
    lines, back = [], []

    def say(text):
        lines.append(text)
        if "Waiting" in text:
            back.pop()()

    def point(name):
        if name == "submitted" and not any("Waiting" in text for text in lines) and not back:
            back.append(away())

    with open_storage(url) as storage:
        ledger = Ledger.create(storage, sweep)
        jobs = TrainingJobs()
        process.run(ledger, jobs, say, point)
        assert len(ledger.trials(optuna.trial.TrialState.RUNNING)) == 0
        assert len(ledger.trials()) == len(jobs.jobs) == 3, "no job was submitted twice"
    [waiting] = [text for text in lines if "Waiting" in text]
    assert waiting.startswith("The database of sweeps refuses: no such table: ")
    assert "The database answers again." in lines


def test_a_database_that_refuses_a_query_is_a_sentence(moved, sweep):
    url, away = moved
    refused = pytest.raises(SweepError, match=r"refuses: no such table.*What is stored is kept")
    with refused, open_storage(url) as storage:
        ledger = Ledger.create(storage, sweep)
        away()
        ledger.cancel()


def test_without_locks_of_files_no_sweep_runs_and_a_sentence_says_why(tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(process.fcntl, "flock", refuse)
    refused = pytest.raises(
        SweepError, match=r"lr\.lock cannot be locked: Function not implemented\. .*-o flock"
    )
    with refused, process.alone(tmp_path, "lr"):
        pass
    assert not process.holds_lock(tmp_path, "lr")


def test_a_value_that_the_database_refuses_is_not_waited_for(tmp_path, sweep, monkeypatch):
    def turn(engine, now):
        cause = sqlalchemy.exc.DataError("INSERT", {}, Exception("value too long"))
        raise optuna.exceptions.StorageInternalError("invalid data") from cause

    monkeypatch.setattr(process.Engine, "turn", turn)
    monkeypatch.setattr(process.time, "sleep", lambda s: pytest.fail("it waits"))
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    with pytest.raises(SweepError, match="refuses: value too long"):
        process.run(ledger, TrainingJobs(), lambda line: None)
    assert "value too long" in ledger.end


def test_a_study_that_is_deleted_meanwhile_is_a_sentence(tmp_path, sweep):
    with open_storage(f"sqlite:///{tmp_path / 'sweeps.db'}") as storage:
        ledger = Ledger.create(storage, sweep)

        def point(name):
            if name == "bound" and ledger.exists:
                optuna.delete_study(study_name="s", storage=storage.url)

        words = r"study of the sweep s has been deleted.*Its jobs go on: malletrain status"
        with pytest.raises(SweepError, match=words):
            process.run(ledger, TrainingJobs(), lambda line: None, point)


def test_a_trial_that_another_program_ends_within_a_turn_stops_no_sweep(sweep):
    storage = optuna.storages.InMemoryStorage()
    ledger = Ledger.create(storage, sweep)
    jobs = TrainingJobs()

    def point(name):
        if name == "submitted" and list(jobs.jobs) == ["j1", "j2"]:
            study = optuna.load_study(study_name="s", storage=storage)
            study.tell(1, state=optuna.trial.TrialState.FAIL)

    assert process.run(ledger, jobs, lambda line: None, point) == "All trials have ended."
    states = [trial.state.name for trial in ledger.trials()]
    assert states[1] == "FAIL"
    assert "RUNNING" not in states
    assert jobs.jobs["j2"].state == "cancelled"


def test_a_log_on_a_full_disk_or_a_terminal_that_is_gone_ends_no_sweep(sweep):
    def say(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    run_on = process.going_on(say)
    assert process.run(ledger, TrainingJobs(), run_on) == "All trials have ended."

    def to_a_closed_pipe(line):
        raise BrokenPipeError

    ledger.want(4)
    with pytest.raises(BrokenPipeError):
        process.run(ledger, TrainingJobs(), process.going_on(to_a_closed_pipe))
    ledger.want(6)
    with pytest.raises(OSError, match="No space left"):  # an owner's own function may stop a sweep
        process.run(ledger, TrainingJobs(), say)


def test_a_snapshot_that_cannot_be_deleted_now_ends_no_sweep(sweep, monkeypatch):
    """Such as on NFS while its server restarts. All others are deleted."""
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "s/0.pt")
    searched, lines = [], []

    def snapshots(ledger, trial):
        searched.append(trial.number)
        if trial.number == searched[0] and searched.count(trial.number) < 3:
            raise stale
        return []

    monkeypatch.setattr("malletrain.sweep.trials.snapshots", snapshots)
    assert process.run(ledger, TrainingJobs(), lines.append) == "All trials have ended."
    assert [line for line in lines if "cannot be deleted" in line] == [
        "Some snapshots of losing trials cannot be deleted now: s/0.pt: Stale file handle. Trying "
        "again."
    ]
    assert len(set(searched)) > 1, "the others are searched for, too"


def test_who_may_have_no_more_jobs_is_told_once(sweep):
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    ledger.want(8)
    jobs, lines = TrainingJobs(), []
    jobs.quota = 2
    process.run(ledger, jobs, lines.append)
    assert len(ledger.trials(optuna.trial.TrialState.FAIL)) == 0
    assert lines.count("You have 2 jobs. The next trial waits for that.") == 1


@pytest.mark.parametrize("file", ["train.py", "conf.yaml"])
@pytest.mark.parametrize("resumed", [True, False])
def test_a_text_that_is_changed_while_a_sweep_runs_is_told_once(tmp_path, sweep, file, resumed):
    """Trials of one sweep run different code then. The output is none of its texts."""
    (tmp_path / "conf.yaml").write_text("a: 1")
    job = sweep.job.model_copy(update={"args": ["--config", "conf.yaml", "--out", "out.json"]})
    described = sweep.model_copy(update={"job": job})
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), described)
    lines, jobs = [], TrainingJobs()
    process.run(ledger, jobs, lines.append)

    def change(name):
        (tmp_path / "out.json").write_text(name)
        if name == "asked" and not resumed and len(ledger.trials()) == 7:
            (tmp_path / file).write_text("a: 2")

    if resumed:
        (tmp_path / file).write_text("a: 2")
    ledger.want(8)
    process.run(ledger, jobs, lines.append, change)
    warnings = [line for line in lines if "was not as" in line]
    first = 3 if resumed else 6
    assert warnings == [
        f"When trial {first} began, {file} was not as at the beginning of the sweep; other trials "
        "may have run other text. To compare trials of one text, run a sweep of another name."
    ]
    assert ledger.summary().change in warnings[0]


def test_of_a_sweep_that_is_over_no_change_is_told(tmp_path, sweep):
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    lines = []
    process.run(ledger, TrainingJobs(), lines.append)
    (tmp_path / "train.py").write_text("print(2)")
    process.run(ledger, TrainingJobs(), lines.append)
    assert not [line for line in lines if "was not as" in line]
    assert ledger.summary().change == ""


@pytest.mark.parametrize("refused", ["note_texts", "note_changed_texts"])
def test_a_database_that_refuses_digests_is_waited_for(tmp_path, sweep, monkeypatch, refused):
    """As SQLite does ("database is locked") while another program writes for long."""
    monkeypatch.setattr(process, "AWAY_S", 0.0)
    note, lines = getattr(Ledger, refused), []

    def refuse_once(ledger, texts):
        monkeypatch.setattr(Ledger, refused, note)
        raise optuna.exceptions.StorageInternalError("database is locked")

    def change(name):
        if name == "submitted" and len(ledger.trials()) == 3:
            (tmp_path / "train.py").write_text("print(2)")

    monkeypatch.setattr(Ledger, refused, refuse_once)
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    process.run(ledger, TrainingJobs(), lines.append, change)
    assert [line for line in lines if "Waiting for it to come back" in line]
    assert len(ledger.trials(optuna.trial.TrialState.RUNNING)) == 0
    assert list(ledger.texts) == list(ledger.changed_texts) == [str(tmp_path / "train.py")]


def test_a_change_is_told_of_a_trial_that_has_begun(tmp_path, sweep):
    """Trial 3 waits in the study until the sweep is to have more trials."""
    ledger = Ledger.create(optuna.storages.InMemoryStorage(), sweep)
    jobs = TrainingJobs()
    process.run(ledger, jobs, lambda line: None)
    (tmp_path / "train.py").write_text("print(2)")
    ledger.study.enqueue_trial(ledger.trials()[0].params)
    process.run(ledger, jobs, lambda line: None)
    assert ledger.change == ""
    ledger.want(4)
    process.run(ledger, jobs, lambda line: None)
    assert ledger.change.startswith("When trial 3 began, train.py was not as at the beginning")


ELSEWHERE = {"id": "x", "host": "login2", "pid": 7, "count": 1}


def here(pid):
    """The record of an engine on this host."""
    host, namespace = os.uname().nodename, pid_namespace()
    return {**ELSEWHERE, "host": host, "pid": pid, "namespace": namespace}


class Time:
    """A clock that goes on when somebody sleeps; ``then``: what happens meanwhile."""

    def __init__(self, then=lambda now: None):
        self.now, self.then = 100.0, then

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.then(self.now)


@pytest.fixture
def ledger():
    return Ledger.create(optuna.storages.InMemoryStorage(), described())


def test_an_engine_whose_record_changes_keeps_others_away(ledger):
    ledger.note_engine(ELSEWHERE)
    time = Time(lambda now: ledger.note_engine({**ELSEWHERE, "count": int(now)}))
    lines = []
    with pytest.raises(OtherEngineError, match="s is being run by process 7 on login2") as caught:
        SoleEngine(ledger, time.clock, time.sleep).claim(lines.append)
    assert caught.value.engine == "process 7 on login2"
    assert lines == [
        "Process 7 on login2 ran this sweep last. Looking for 30 s whether it still does."
    ]
    assert ledger.engine["id"] == "x"


def test_an_engine_that_is_silent_is_replaced_and_stops_when_it_comes_back(ledger):
    time = Time()
    first = SoleEngine(ledger, time.clock, time.sleep)
    first.claim(pytest.fail)
    ledger.note_engine({**ledger.engine, "host": "login2"})
    second = SoleEngine(ledger, time.clock, time.sleep)
    second.claim(lambda line: None)
    assert time.now == 100.0 + process.MAX_SILENCE_S
    with pytest.raises(OtherEngineError, match=f"process {os.getpid()} on"):
        first.renew()
    first.release()
    second.renew()
    count = ledger.engine["count"]
    time.now += process.RENEW_S
    second.renew()
    assert ledger.engine["count"] == count + 1
    second.release()
    assert ledger.engine == {}


def test_an_engine_that_has_died_on_this_host_is_not_waited_for(ledger):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ledger.note_engine(here(child.pid))
    SoleEngine(ledger, sleep=pytest.fail).claim(pytest.fail)
    assert ledger.engine["pid"] == os.getpid()


def test_a_process_that_is_not_reaped_yet_has_died(ledger):
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ledger.note_engine(here(child.pid))
    SoleEngine(ledger, sleep=pytest.fail).claim(pytest.fail)
    child.wait()


@pytest.mark.parametrize("namespace", ["another", ""])
def test_an_engine_among_other_processes_of_a_host_of_this_name_is_waited_for(ledger, namespace):
    """Such as in a container, where process ids are others: the same one, or one that none has."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for pid in (os.getpid(), child.pid):
        record = {**here(pid), "namespace": namespace}
        ledger.note_engine(record)
        time = Time(lambda now, record=record: ledger.note_engine({**record, "count": int(now)}))
        with pytest.raises(OtherEngineError):
            SoleEngine(ledger, time.clock, time.sleep).claim(lambda line: None)


def test_a_live_process_of_another_user_has_not_died(ledger, monkeypatch):
    """With hidepid its directory in /proc is not visible, and a signal to it is refused."""

    def refused(pid, signal):
        raise PermissionError

    monkeypatch.setattr("os.kill", refused)
    missing = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    ledger.note_engine(here(missing))
    time = Time(lambda now: ledger.note_engine({**here(missing), "count": int(now)}))
    with pytest.raises(OtherEngineError):
        SoleEngine(ledger, time.clock, time.sleep).claim(lambda line: None)


def test_the_record_changes_during_a_long_turn_and_is_deleted_afterwards(ledger, monkeypatch):
    monkeypatch.setattr(process, "RENEW_S", 0.01)
    with process.sole_engine(ledger, pytest.fail):
        until(lambda: ledger.engine["count"] > 2, "the record has changed twice")
    assert "engine-record" not in [thread.name for thread in threading.enumerate()]
    assert ledger.engine == {}


def test_two_engines_with_directories_of_their_own_run_no_trial_twice(monkeypatch):
    """The second one begins while the first one runs: it would end the first one's trials."""
    world = World()
    ledger = world.engine.ledger
    ledger.note_engine(ELSEWHERE)
    time = Time(lambda now: ledger.note_engine({**ELSEWHERE, "count": int(now)}))
    monkeypatch.setattr(SoleEngine.__init__, "__defaults__", (time.clock, time.sleep))
    with pytest.raises(OtherEngineError):
        process.run(ledger, world.jobs, lambda line: None)
    assert world.jobs.jobs == {}
    assert ledger.trials() == []
    assert ledger.end == ""


@pytest.mark.parametrize(
    ("trials", "refused"), [(4, "already. Go on with it"), (3, "sweep.trials")]
)
def test_a_grid_with_a_queued_trial_is_the_same_sweep_with_its_own_number(trials, refused):
    """The trials that another program has queued come besides a whole grid."""
    text = TEXT.replace("{{ low = 0.0, high = 1.0 }}", "[0.1, 0.2]\ny = [1, 2]")
    text = text.replace('kind = "random"', 'kind = "grid"')
    world = World(described(trials=2, text=text))
    ledger = world.engine.ledger
    ledger.study.enqueue_trial({"x": 0.2, "y": 1})
    ledger.want(ledger.target_trials + 2)
    assert (ledger.own_target, ledger.target_trials) == (4, 5)
    with pytest.raises(SweepError, match=refused):
        process.create(world.storage, described(trials=trials, text=text))
