"""The engine's process: one per sweep, in the foreground or detached, until the sweep is over. It
may be killed at any time.

Decides when the engine has its turn, and how to wait for a daemon that does not answer, or a
database that refuses (a server that is restarted, a full disk, a lock). A turn that was interrupted
is made again. From Python, :func:`run_sweep` starts or resumes a sweep in the calling process.

Each sweep has one engine, wherever it runs. The lock of a file in the state directory keeps two
engines of one directory apart. Two engines with directories of their own, such as those of two
clusters, may use one database. Each would end the trials of the other and start new ones. So an
engine has a record in the study (:class:`SoleEngine`). No clocks of hosts are compared: an engine
is gone if its record does not change for a while. A thread renews the record, because a turn of the
engine can take longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna

from malletrain.identity.state_directory import (
    default_state_dir,
    lock_refusal,
    make_private_dir,
)
from malletrain.protocol import env
from malletrain.sweep.daemon_jobs import DaemonJobs
from malletrain.sweep.engine import Engine, Jobs, JobsAway
from malletrain.sweep.ledger import (
    Ledger,
    open_storage,
    refusal,
    refuses_values,
    storage_url,
)
from malletrain.sweep.spec import Sweep, SweepError
from malletrain.sweep.trials import check, delete_losers, job_of, text_digests

RENEW_S = 5.0
"""Time between two changes of the record, seconds."""
MAX_SILENCE_S = 30.0
"""Time after which an engine whose record does not change is gone, seconds."""
LOOK_S = 1.0
"""Time between two looks at another engine's record, seconds."""


class OtherEngineError(SweepError):
    """Another engine runs the sweep. ``engine``: its process and host."""

    def __init__(self, name: str, engine: str) -> None:
        super().__init__(
            f"The sweep {name} is being run by {engine}, with another state directory. Stop that "
            "process first; its jobs go on."
        )
        self.engine = engine


class SoleEngine:
    """The record of this engine. ``clock``: monotonic seconds."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._sleep = sleep
        self._id = secrets.token_hex(8)
        self._renewed_at = -RENEW_S
        self._count = 0
        self._lock = threading.Lock()

    def claim(self, say: Callable[[str], None]) -> None:
        """Wait until no other engine runs, and make this one the engine of the sweep. Raises
        OtherEngineError if another one does. ``say``: called with a line of text if it takes a
        while.
        """
        before = self._ledger.engine
        if before and is_alive(before) is not False:
            say(
                f"{named(before).capitalize()} ran this sweep last. Looking for "
                f"{MAX_SILENCE_S:g} s whether it still does."
            )
            until = self._clock() + MAX_SILENCE_S
            while self._clock() < until:
                self._sleep(LOOK_S)
                now = self._ledger.engine
                if now and now != before:
                    raise OtherEngineError(self._ledger.name, named(now))
                if not now:
                    break
        self._write()

    def renew(self) -> None:
        """Renew the record, if it is time. Raises OtherEngineError if another engine has taken the
        sweep over. Safe to use from several threads.
        """
        with self._lock:
            if self._clock() - self._renewed_at < RENEW_S:
                return
            now = self._ledger.engine
            if now.get("id") != self._id:
                raise OtherEngineError(self._ledger.name, named(now))
            self._write()

    def release(self) -> None:
        """Delete the record, unless it is another engine's."""
        with contextlib.suppress(optuna.exceptions.StorageInternalError, KeyError):
            if self._ledger.engine.get("id") == self._id:
                self._ledger.note_engine({})

    def _write(self) -> None:
        self._count += 1
        self._renewed_at = self._clock()
        self._ledger.note_engine(
            {
                "id": self._id,
                "host": os.uname().nodename,
                "pid": os.getpid(),
                "namespace": pid_namespace(),
                "count": self._count,
            }
        )


@contextlib.contextmanager
def sole_engine(ledger: Ledger, say: Callable[[str], None]) -> Iterator[SoleEngine]:
    """Be the only engine of the sweep. Raises OtherEngineError if another one runs."""
    engine = SoleEngine(ledger)
    engine.claim(say)
    ended = threading.Event()
    thread = threading.Thread(
        target=_renew_until, args=(engine, ended), name="engine-record", daemon=True
    )
    thread.start()
    try:
        yield engine
    finally:
        ended.set()
        thread.join()
        engine.release()


def _renew_until(engine: SoleEngine, ended: threading.Event) -> None:
    """Renew the record until ``ended`` is set. The engine's own thread meets the same errors in its
    next turn, and reports them.
    """
    while not ended.wait(RENEW_S):
        with contextlib.suppress(optuna.exceptions.StorageInternalError, KeyError, SweepError):
            engine.renew()


def pid_namespace() -> str:
    """Return an identifier of the processes among which a process id of this process is unique:
    this boot of this machine, and the namespace of process ids. Empty if it is not known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def named(engine: Mapping[str, Any]) -> str:
    """Return the process and host of an engine, from its record."""
    return f"process {engine.get('pid')} on {engine.get('host')}"


def is_alive(engine: Mapping[str, Any]) -> bool | None:
    """Return whether the process of an engine's record runs and is not this one; None if it is not
    among the processes that this one sees. Another process can have its number by now.
    """
    pid, namespace = engine.get("pid"), pid_namespace()
    if engine.get("host") != os.uname().nodename or not isinstance(pid, int):
        return None
    if not namespace or engine.get("namespace") != namespace:
        return None
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)  # unlike /proc, not limited by hidepid
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[:1] != ["Z"]


LOCK_TRIES, LOCK_PAUSE_S = 20, 0.01
"""Attempts to lock a sweep, and the time between two, seconds."""
REST_S = 0.05
"""Minimum time between two turns, seconds."""
AWAY_S = 5.0
"""Time between two attempts to reach a daemon or database that is gone, seconds."""


def lock_path(state_dir: Path, name: str) -> Path:
    """Return the file that the engine of a sweep locks."""
    return state_dir / "sweeps" / f"{name}.lock"


def log_path(state_dir: Path, name: str) -> Path:
    """Return the log file of a detached engine."""
    return state_dir / "sweeps" / f"{name}.log"


@contextlib.contextmanager
def alone(state_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock of the only engine of this sweep. The lock ends with its process. Raises
    SweepError if another engine runs, or if the file system has no locks.
    """
    path = lock_path(state_dir, name)
    make_private_dir(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            locked = _lock(handle)
        except OSError as error:
            raise SweepError(lock_refusal(f"The file {path}", error)) from None
        if not locked:
            pid = os.pread(handle, 100, 0).decode("utf-8", "replace").strip()
            raise SweepError(
                f"The sweep {name} is being run by process {pid or 'that starts just now'}."
            ) from None
        with contextlib.suppress(OSError):  # the disk may be full; the lock alone is enough
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Take a lock. Return False if another process keeps it: one that asks :func:`holds_lock`, such
    as the page in the browser, holds it for a moment.
    """
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    return False


def attended(state_dir: Path, name: str, record: Mapping[str, Any]) -> bool:
    """Return whether an engine runs for this sweep: one with this state directory, or one with
    another directory whose process is seen here.

    Args:
        state_dir: state directory.
        name: name of the sweep.
        record: record of its engine in the study.
    """
    return holds_lock(state_dir, name) or bool(is_alive(record))


def holds_lock(state_dir: Path, name: str) -> bool:
    """Return whether an engine with this state directory runs for this sweep."""
    path = lock_path(state_dir, name)
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks, on which no engine can run
    finally:
        os.close(handle)
    return False


def run(
    ledger: Ledger,
    jobs: Jobs,
    say: Callable[[str], None],
    point: Callable[[str], None] = lambda name: None,
) -> str:
    """Run the sweep until it is over. Return why it ended.

    Args:
        ledger: ledger of the sweep.
        jobs: interface to its jobs.
        say: called with a line of text for each event.
        point: see :class:`malletrain.sweep.engine.Engine`.

    Raises:
        SweepError: the sweep cannot continue; its state is kept so that it can be resumed.
        OtherEngineError: another engine runs it.
    """
    with sole_engine(ledger, say) as sole:
        try:
            return _run(ledger, jobs, say, point, sole)
        except KeyError:
            if ledger.exists:
                raise
            raise SweepError(
                f"The study of the sweep {ledger.name} has been deleted from the database. Its "
                f"jobs go on: malletrain status names them ({ledger.job_name(0)}, …), and "
                "malletrain cancel ends them."
            ) from None


def going_on(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``say`` without its errors of a log on a full disk, or of a terminal that is gone: the
    sweep goes on. A closed pipe ends it, as it ends other commands.
    """

    def attempt(line: str) -> None:
        try:
            say(line)
        except BrokenPipeError:
            raise
        except OSError:
            pass

    return attempt


def _run(
    ledger: Ledger,
    jobs: Jobs,
    say: Callable[[str], None],
    point: Callable[[str], None],
    sole: SoleEngine,
) -> str:
    ledger.ready()
    ledger.ends("")
    engine = Engine(ledger, jobs, job_of, point)
    progress = _TrialPrinter(ledger, say)
    texts = _TextWatch(ledger, say)
    away, undeleted = "", ""
    sentences = {""}
    while True:
        try:
            began = time.monotonic()
            sole.renew()
            over = engine.turn(time.time())
            if away:
                say(f"The {away} answers again.")
            away = ""
            progress.print_changes()
            texts.look()
            why = _delete_losers(ledger)
            if why and why != undeleted:
                say(f"Some snapshots of losing trials cannot be deleted now: {why}. Trying again.")
            undeleted = why
            if engine.waits_because not in sentences:
                say(f"{engine.waits_because} The next trial waits for that.")
                sentences.add(engine.waits_because)
            if over:
                return ledger.end
        except (JobsAway, optuna.exceptions.StorageInternalError) as error:
            if isinstance(error, JobsAway):
                noun, sentence = "daemon", str(error)
            else:
                if refuses_values(error):  # waiting does not help
                    ledger.ends(refusal(error))
                    raise SweepError(refusal(error)) from error
                noun, sentence = "database", refusal(error)
            if away != noun:
                say(f"{sentence} Waiting for it to come back; the jobs go on.")
            away = noun
            time.sleep(AWAY_S)
            continue
        except OtherEngineError:
            raise
        except optuna.exceptions.UpdateFinishedTrialError:
            continue  # another program has just ended a trial; the next turn sees it
        except SweepError as error:
            progress.print_changes()
            ledger.ends(str(error))
            raise
        # Reports of one moment share a turn, and turns take at most half of the time.
        time.sleep(max(REST_S, time.monotonic() - began))
        # The next turn reports these errors.
        with contextlib.suppress(JobsAway, optuna.exceptions.StorageInternalError):
            jobs.wait(engine.jobs_under_way(), ledger.sweep.sweep.every)


def _delete_losers(ledger: Ledger) -> str:
    """Delete the snapshots of losing trials. Return why some could not be deleted; empty if all
    were.
    """
    try:
        delete_losers(ledger, time.time())
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return ""


class _TextWatch:
    """Records the digests of the sweep's script and configuration files at its start, and tells
    once of each file that it differs. Looks when a trial has begun.
    """

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._say = say
        self._begun = self._begun_trials()
        is_new = not self._begun and not ledger.texts
        self._unsaved = text_digests(ledger.sweep) if is_new else {}
        """Digests that are not in the study yet."""

    def look(self) -> None:
        """Compare the files with those of the start if trials have begun since the last call.
        Raises StorageInternalError if the database refuses; call it again then.
        """
        if self._unsaved:
            self._ledger.note_texts(self._unsaved)
            self._unsaved = {}
        begun = self._begun_trials()
        if new := begun - self._begun:
            self._compare(min(new))
        self._begun = begun

    def _begun_trials(self) -> set[int]:
        """Return the trials that have begun. Others wait in the study (Optuna's enqueue_trial)."""
        waiting = optuna.trial.TrialState.WAITING
        return {trial.number for trial in self._ledger.trials() if trial.state != waiting}

    def _compare(self, trial: int) -> None:
        """Record and tell what differs. ``trial``: the trial that has begun."""
        ledger = self._ledger
        at_start, earlier = ledger.texts, ledger.changed_texts
        changed = {
            path: trial
            for path, digest in text_digests(ledger.sweep).items()
            if at_start.get(path, digest) != digest and path not in earlier
        }
        if changed:
            ledger.note_changed_texts(changed)
            self._say(
                f"{ledger.change} To compare trials of one text, run a sweep of another name."
            )


class _TrialPrinter:
    """Prints each change of a trial's state once."""

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._say = say
        self._states = {t.number: t.state for t in ledger.trials()}

    def print_changes(self) -> None:
        """Print the changes since the last call."""
        for trial in self._ledger.trials():
            if self._states.get(trial.number) == trial.state:
                continue
            begun = trial.number not in self._states
            self._states[trial.number] = trial.state
            word = trial.state.name.lower()
            values = " ".join(f"{v:.6g}" for v in trial.values or ())
            why = trial.user_attrs.get("malletrain:why", "")
            parameters = ", ".join(f"{k} {v}" for k, v in trial.params.items())
            if word == "running":
                self._say(f"Trial {trial.number}{' begins' if begun else ' goes on'}: {parameters}")
            else:
                self._say(f"Trial {trial.number} {word} {values or why}".rstrip())


def detach(name: str, state_dir: Path, options: list[str], url: str) -> int:
    """Start an engine for an existing sweep, as a process that outlives this one and its terminal.
    Return its process id.
    """
    path = log_path(state_dir, name)
    make_private_dir(path.parent)
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "malletrain", "sweep", "resume", name, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, env.SWEEPS: url},  # may contain a password, so it is not an argument
        )
    return process.pid


def run_sweep(
    sweep: Sweep, state_dir: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> optuna.Study:
    """Run a sweep until it is over; resume it if a sweep of that name exists.

    Args:
        sweep: the sweep; it must have a name.
        state_dir: state directory of the daemon. Default: your own daemon's, else the site's.
        say: called with a line of text for each event.

    Returns:
        Its study.

    Raises:
        SweepError: the sweep cannot be run, or cannot continue; the sentence says why.
    """
    if not sweep.sweep.name:
        raise SweepError("A sweep from Python needs a name.")
    for sentence in check(sweep):
        say(sentence)
    home = state_dir or default_state_dir()
    with open_storage(storage_url(sweep.sweep.storage, home)) as storage:
        # Two that created it at once would give its jobs different keys.
        with alone(home, sweep.sweep.name), DaemonJobs(state_dir) as jobs:
            ledger = _create_or_resume(storage, sweep)
            run(ledger, jobs, say)
        return ledger.study


def create(storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
    """Create a sweep. Raises SweepError if there is one of that name; the sentence names the keys
    in which that one differs, with whose values it would be resumed.
    """
    different: list[str] = []
    if sweep.sweep.name in optuna.get_all_study_names(storage):
        # It may be no sweep, or its creator was killed.
        with contextlib.suppress(SweepError):
            different = _differences(Ledger.open(storage, sweep.sweep.name), sweep)
    if different:
        name = sweep.sweep.name
        raise SweepError(
            f"There is a sweep {name} already, with other values of {', '.join(different)}. Go on "
            f"with its values: malletrain sweep resume {name}; or give the new one another name: "
            "--name OTHER."
        )
    return Ledger.create(storage, sweep)


def _create_or_resume(storage: optuna.storages.BaseStorage, sweep: Sweep) -> Ledger:
    """Return the sweep in the database; create it if there is none of that name."""
    if sweep.sweep.name not in optuna.get_all_study_names(storage):
        return Ledger.create(storage, sweep)
    ledger = Ledger.open(storage, sweep.sweep.name)
    if different := _differences(ledger, sweep):
        raise SweepError(
            f"There is a sweep {ledger.name} with other values of {', '.join(different)}. Give "
            "this one another name"
            + (
                f"; for more trials of that one: malletrain sweep add-trials {ledger.name} COUNT."
                if different == ["sweep.trials"]
                else "."
            )
        )
    ledger.cancel(False)
    return ledger


def _differences(ledger: Ledger, sweep: Sweep) -> list[str]:
    """Return the keys in which ``sweep`` differs from the stored one, except its storage."""
    there, here = (s.model_dump(mode="json") for s in (ledger.sweep, sweep))
    different = [
        f"{section}.{key}"
        for section, keys in here.items()
        for key in sorted({*keys, *there[section]})
        if keys.get(key) != there[section].get(key) and (section, key) != ("sweep", "storage")
    ]
    if sweep.sweep.trials == ledger.own_target:
        different = [key for key in different if key != "sweep.trials"]
    return different
