"""One engine for each sweep, wherever it runs: a record in the study that the engine renews.

The lock of a file in the state directory (:mod:`malletrain.sweep.process`) keeps two engines of one
directory apart. Two engines with directories of their own, such as those of two clusters, may use
one database. Each would end the trials of the other and start new ones.

Decides whether another engine still runs. No clocks of hosts are compared: an engine is gone if its
record does not change for a while. A thread renews the record, because a turn of the engine can
take longer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna

from malletrain.sweep.ledger import Ledger
from malletrain.sweep.spec import SweepError

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
