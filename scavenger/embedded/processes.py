"""Processes of this machine, read from /proc: who is alive, who belongs to a lease.

Decides only what belongs together; ending is left to the caller. Linux only, as the embedded
cluster is.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One process. ``start`` is its start time in clock ticks since boot: with the pid it names a
    process for good.
    """

    pid: int
    parent: int
    session: int
    state: str
    start: int


def read(pid: int) -> Process | None:
    """The process, or None when there is none (proc(5), stat)."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and brackets; the fields begin after the last one.
    fields = data[data.rfind(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def alive(pid: int, start: int | None = None) -> bool:
    """Whether the process runs (a zombie does not); with ``start``, whether it is still that same
    process.
    """
    process = read(pid)
    return (
        process is not None
        and process.state not in "ZX"
        and (start is None or process.start == start)
    )


def boot_id() -> str:
    """Changes with every boot of the machine: pids of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def become_subreaper() -> None:
    """Make orphans among this process's descendants its own children (prctl(2)), so that none gets
    out of sight.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def all_processes() -> dict[int, Process]:
    """Every live process by pid (zombies left out)."""
    processes = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {p.pid: p for p in processes if p is not None and p.state not in "ZX"}


def with_environment(marks: Iterable[str]) -> list[Process]:
    """Live processes of this user that were started with all of the settings ``NAME=value`` in
    their environment.
    """
    settings = [mark.encode() for mark in marks]
    return [p for p in all_processes().values() if _has(p.pid, settings)]


def working_below(directory: Path) -> list[Process]:
    """Live processes of this user whose working directory is inside ``directory``."""
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
    """Live processes that belong to a lease whose first process is (was) ``leader``.

    A process belongs to it when it is in the leader's session, or below the leader or another
    member in the process tree, or carries the lease's settings in its environment. Each alone
    misses some: a daemonised child leaves the session, an orphan leaves the tree, a program may
    start its children with a clean environment.
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
    """Send a signal to that very process; False when it is gone. (Checked again: its pid may have
    been given to another.)
    """
    if not alive(process.pid, process.start):
        return False
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _has(pid: int, marks: list[bytes]) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(mark in environment for mark in marks)
