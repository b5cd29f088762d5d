"""Processes of this machine, read from /proc: which are alive, and which belong to a lease.

Decides only which processes belong together. The caller ends them. :func:`install` handles the
signals of the cluster's own process: requests to stop, and ended children. Linux only, like the
embedded cluster.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One process."""

    pid: int
    """Process id."""
    parent: int
    """Process id of the parent."""
    session: int
    """Session id."""
    state: str
    """State letter (proc(5))."""
    start: int
    """Start time in clock ticks since boot; with the pid it identifies a process uniquely."""


def read(pid: int) -> Process | None:
    """Return the process, or None if it does not exist (proc(5), stat)."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name can contain spaces and brackets; the fields begin after the last bracket.
    fields = data[data.rfind(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def alive(pid: int, start: int | None = None) -> bool:
    """Return whether the process runs (a zombie does not). With ``start``, whether it is still the
    same process.
    """
    process = read(pid)
    return (
        process is not None
        and process.state not in "ZX"
        and (start is None or process.start == start)
    )


def boot_id() -> str:
    """Return the id of this boot. It changes at every boot; pids of another boot are
    meaningless.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def become_subreaper() -> None:
    """Make orphaned descendants of this process its own children (prctl(2)), so that it can find
    and kill them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def all_processes() -> dict[int, Process]:
    """Return pid → live process, without zombies."""
    processes = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {p.pid: p for p in processes if p is not None and p.state not in "ZX"}


def with_environment(marks: Iterable[str]) -> list[Process]:
    """Return the live processes of this user that were started with all settings ``NAME=value`` in
    their environment.
    """
    settings = [mark.encode() for mark in marks]
    return [p for p in all_processes().values() if _has(p.pid, settings)]


def working_below(directory: Path) -> list[Process]:
    """Return the live processes of this user whose working directory is inside ``directory``."""
    processes = []
    for process in all_processes().values():
        try:
            where = Path(os.readlink(f"/proc/{process.pid}/cwd"))
        except OSError:
            continue
        if directory in where.parents:
            processes.append(process)
    return processes


def of_lease(
    leader: int, marks: Iterable[str], processes: dict[int, Process] | None = None
) -> list[Process]:
    """Return the live processes of a lease.

    A process belongs to it if it is in the leader's session, or below the leader or another member
    in the process tree, or has the lease's settings in its environment. Each criterion alone misses
    some: a daemonised child leaves the session, an orphan leaves the tree, a program can start its
    children with a clean environment.

    Args:
        leader: process id of the first process, which may have ended.
        marks: environment variables of the lease, ``NAME=VALUE``.
        processes: all processes of this machine; None: read them.
    """
    table = all_processes() if processes is None else processes
    settings = [mark.encode() for mark in marks]
    members = {p.pid for p in table.values() if p.session == leader or p.pid == leader}
    own = {os.getpid(), os.getppid()}
    candidates = [p for p in table.values() if p.pid not in members and p.pid not in own]
    members |= {p.pid for p in candidates if _has(p.pid, settings)}
    grown = True
    while grown:
        below = {p.pid for p in candidates if p.parent in members and p.pid not in members}
        members |= below
        grown = bool(below)
    return [table[pid] for pid in members if pid in table]


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this process. Return False if it is gone; its start time is checked,
    because its pid may have been reused.
    """
    if not alive(process.pid, process.start):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def install(request_stop: Callable[[], None]) -> int:
    """Call ``request_stop`` at each request to stop. Wakes the loop at such a request and when a
    child ends. Return the descriptor to wait on.
    """
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def stop(number: int, frame: object) -> None:
        request_stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def drain(fd: int) -> None:
    """Empty ``fd`` before the next wait."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _has(pid: int, marks: list[bytes]) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(mark in environment for mark in marks)
