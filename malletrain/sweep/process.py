"""The engine's process: one per sweep, in the foreground or detached, until the sweep is over. It
may be killed at any time.

Decides when the engine has its turn, and how to wait for a daemon that does not answer, or a
database that refuses (a server that is restarted, a full disk, a lock). A turn that was interrupted
is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna

from malletrain.identity.state_directory import make_private_dir
from malletrain.protocol import env
from malletrain.sweep.engine import Engine
from malletrain.sweep.jobs import Jobs, JobsAway
from malletrain.sweep.ledger import Ledger, refusal
from malletrain.sweep.spec import SweepError
from malletrain.sweep.trials import delete_losers, job_of

LOCK_TRIES, LOCK_PAUSE_S = 20, 0.01
"""Attempts to lock a sweep, and the time between two, seconds."""
REST_S = 0.05
"""Minimum time between two turns, seconds."""
AWAY_S = 5.0
"""Time between two attempts to reach a daemon or database that is gone, seconds."""


def lock_path(state_dir: Path, name: str) -> Path:
    """Returns the file that the engine of a sweep locks."""
    return state_dir / "sweeps" / f"{name}.lock"


def log_path(state_dir: Path, name: str) -> Path:
    """Returns the log file of a detached engine."""
    return state_dir / "sweeps" / f"{name}.log"


@contextlib.contextmanager
def alone(state_dir: Path, name: str) -> Iterator[None]:
    """Hold the lock of the only engine of this sweep. The lock ends with its process. Raises
    SweepError if another engine runs.
    """
    path = lock_path(state_dir, name)
    make_private_dir(path.parent)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _lock(handle):
            pid = os.pread(handle, 100, 0).decode("utf-8", "replace").strip()
            raise SweepError(
                f"The sweep {name} is being run by process {pid or 'that starts just now'}."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Take a lock. Returns False if another process keeps it: one that asks :func:`attended`, such
    as the page in the browser, holds it for a moment.
    """
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    return False


def attended(state_dir: Path, name: str) -> bool:
    """Returns whether an engine runs for this sweep."""
    path = lock_path(state_dir, name)
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def run(
    ledger: Ledger,
    jobs: Jobs,
    say: Callable[[str], None],
    point: Callable[[str], None] = lambda name: None,
) -> str:
    """Run the sweep until it is over. Returns why it ended.

    Args:
        ledger: ledger of the sweep.
        jobs: interface to its jobs.
        say: called with a line of text for each event.
        point: see :class:`malletrain.sweep.engine.Engine`.

    Raises:
        SweepError: the sweep cannot continue; its state is kept so that it can be resumed.
    """
    ledger.ready()
    ledger.ends("")
    engine = Engine(ledger, jobs, job_of, point)
    progress = _TrialPrinter(ledger, say)
    away = ""
    while True:
        try:
            began = time.monotonic()
            over = engine.turn(time.time())
            if away:
                say(f"The {away} answers again.")
            away = ""
            progress.print_changes()
            delete_losers(ledger, time.time())
            if over:
                return ledger.end
        except (JobsAway, optuna.exceptions.StorageInternalError) as error:
            if isinstance(error, JobsAway):
                noun, sentence = "daemon", str(error)
            else:
                noun, sentence = "database", refusal(error)
            if away != noun:
                say(f"{sentence} Waiting for it to come back; the jobs go on.")
            away = noun
            time.sleep(AWAY_S)
            continue
        except SweepError as error:
            progress.print_changes()
            ledger.ends(str(error))
            raise
        # Reports of one moment share a turn, and turns take at most half of the time.
        time.sleep(max(REST_S, time.monotonic() - began))
        # The next turn reports these errors.
        with contextlib.suppress(JobsAway, optuna.exceptions.StorageInternalError):
            jobs.wait(engine.jobs_under_way(), ledger.sweep.sweep.every)


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
            what = ", ".join(f"{k} {v}" for k, v in trial.params.items())
            if word == "running":
                self._say(f"Trial {trial.number}{' begins' if begun else ' goes on'}: {what}")
            else:
                self._say(f"Trial {trial.number} {word} {values or why}".rstrip())


def detach(name: str, state_dir: Path, options: list[str], url: str) -> int:
    """Start an engine for an existing sweep, as a process that outlives this one and its terminal.
    Returns its process id.
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
