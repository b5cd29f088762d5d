"""Ties a process to its parent, so that no process outlives an agent or a launcher that was killed.
Run by its path, standard library only:

    python -I -S supervisor.py [--keep [--remove DIR]] [--parent PID] [--nice N] [--chdir DIR]
    [--log FILE | --per-rank-log DIR] -- COMMAND [ARGS]...

Without ``--keep`` the process becomes COMMAND (exec) after asking the kernel to be killed when its
parent dies (PR_SET_PDEATHSIG, prctl(2)); the setting survives exec and is not inherited by
children. It also fires when only the *thread* that started the process ends, so start tied
processes from the main thread. ``--parent`` is the expected parent, or ``env`` for the one in
MALLETRAIN_LAUNCHER_PID.

With ``--keep`` it stays as COMMAND's supervisor (PR_SET_CHILD_SUBREAPER): orphans of the whole tree
become its children. When COMMAND ends or the supervisor's parent dies, it kills every remaining
process, including double-forked ones. It does the same if its parent has been stopped (SIGSTOP) for
SUSPENDED_S seconds, because a lease that the main scheduler suspends must free the node and its
memory. It forwards a SIGTERM to COMMAND only if its parent sent it, because Slurm's scancel sends
SIGTERM to every process of a lease. ``--remove``: a directory to remove if the parent did not stay.
Exits with COMMAND's code, or 128 + signal. ``--nice``: added to the niceness of COMMAND and of the
supervisor.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Container

if __package__:
    from malletrain.protocol import env
    from malletrain.protocol.fault_points import FaultPoint, reached
    from malletrain.protocol.job_files import rank_log_name
else:  # run by its path: only the standard library, and modules imported from their directory
    _PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.path.join(_PACKAGE, "protocol"))
    import env  # type: ignore[import-not-found,no-redef]
    from fault_points import FaultPoint, reached  # type: ignore[import-not-found,no-redef]
    from job_files import rank_log_name  # type: ignore[import-not-found,no-redef]

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
_WATCHED_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SUSPENDED_S = 6.0
"""Time after which a stopped parent counts as suspended, seconds. By then the daemon has declared
its node lost (agent_timeout).
"""
POLL_S = 1.0
GUARDING, STOPPING = "mt-guarding", "mt-stopping"
"""Process names of a supervisor with a parent. They tell COMMAND whether a SIGTERM is for it."""


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_name(name: str) -> None:
    """Name this process for ``ps`` and ``top`` (its first 15 bytes). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NAME, ctypes.c_char_p(os.fsencode(name)), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NAME")


def is_meant(supervisor: int) -> bool:
    """Return whether a SIGTERM that this process received is meant for it, not for the whole
    lease. True if ``supervisor``, the pid of its parent, is not a supervisor.
    """
    try:
        with open(f"/proc/{supervisor}/comm") as file:
            return file.read().strip() != GUARDING
    except OSError:
        return True


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send ``signum`` to this process when its parent dies. Exits now if ``parent``
    has already died. Raises OSError.
    """
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the setting took effect
        sys.exit(f"Process {parent}, which started this one, is gone; nothing is started.")


def process_table() -> dict[int, tuple[int, str]]:
    """Return (parent, state letter) of all processes by pid, from /proc (proc_pid_stat(5))."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            table[int(name)] = (int(fields[1]), fields[0].decode())
    return table


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def descendants(root: int, table: dict[int, tuple[int, str]] | None = None) -> list[int]:
    """Return the living descendants of ``root``. Zombies are not listed, but their descendants
    are. ``table``: a process table; None to read it.
    """
    table = process_table() if table is None else table
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    pids, queue = [], [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            queue.append(pid)
            if table[pid][1] not in "ZX":
                pids.append(pid)
    return pids


def kill_descendants(
    limit_s: float = 10.0, spared: Callable[[], Container[int]] = tuple
) -> list[int]:
    """Kill all descendants of this process, until none is left or the time limit has passed. Does
    not reap. Double-forked processes are descendants only if this process is a subreaper.

    Args:
        limit_s: time limit, seconds.
        spared: returns the pids that are not killed.

    Returns:
        The remaining descendants. (A process in uninterruptible sleep cannot be killed, and one
        that has become another user, as under sudo, may not be.)
    """
    deadline = time.monotonic() + limit_s
    while True:
        spared_pids = spared()
        remaining = [pid for pid in descendants(os.getpid()) if pid not in spared_pids]
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.005)


def _append_to(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _exec(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"The command cannot be run: {command[0]}: {error.strerror}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _supervise(command: list[str], parent: int | None, remove: str = "") -> int:
    """Run ``command`` as a child, and kill all remaining processes when it ends (see the module's
    docstring).

    Args:
        command: the command.
        parent: pid of the expected parent; None for any.
        remove: directory that is removed if the parent dies; empty for none.

    Returns:
        The exit code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED_SIGNALS)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if parent is not None:
        die_with_parent(parent, signal.SIGHUP)
        set_name(GUARDING)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED_SIGNALS)
        die_with_parent(own)
        _exec(command)
    reached(FaultPoint.SUPERVISOR_FORKED)
    status: int | None = None
    stopped_since: float | None = None
    while status is None:
        caught = signal.sigtimedwait(_WATCHED_SIGNALS, POLL_S)
        stopped_since = (
            (stopped_since or time.monotonic())
            if parent is not None and is_stopped(parent)
            else None
        )
        if stopped_since is not None and time.monotonic() - stopped_since >= SUSPENDED_S:
            break
        if caught is None:
            continue
        signum = caught.si_signo
        if signum == signal.SIGHUP:
            break
        if signum != signal.SIGCHLD:
            if parent is None or caught.si_pid == parent:
                set_name(STOPPING)
                os.kill(child, signum)
            continue
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    status = reaped[1]
        except ChildProcessError:
            pass
    reached(FaultPoint.SUPERVISOR_SWEEPS)
    kill_descendants()
    if status is None:
        if remove:
            import shutil

            shutil.rmtree(remove, ignore_errors=True)
            try:
                os.rmdir(os.path.dirname(remove))  # the agent's directory, if it is empty
            except OSError:
                pass
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def lower_priority(by: int) -> None:
    """Add ``by`` to the niceness of this process and of those that it will start. If it leads a
    session, the niceness of the session changes, too: the kernel may share the processors between
    sessions and not between processes (sched(7), autogroups).
    """
    niceness = os.nice(by)
    if os.getsid(0) == os.getpid():
        try:
            with open("/proc/self/autogroup", "w") as file:
                file.write(str(niceness))
        except OSError:
            pass  # a kernel without autogroups, or one that changes too many just now


def main(argv: list[str]) -> int:
    """Become the command, or supervise it. Prints a sentence if that fails."""
    try:
        return _main(argv)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        print(f"The process cannot be started: {error!s}.", file=sys.stderr, flush=True)
        return 126


def _main(argv: list[str]) -> int:
    if "--" not in argv or argv[-1] == "--":
        print(
            "Usage: supervisor.py [--keep [--remove DIR]] [--parent PID] [--nice N] [--chdir DIR] "
            "[--log FILE | --per-rank-log DIR] -- COMMAND...",
            file=sys.stderr,
        )
        return 2
    cut = argv.index("--")
    words, command = iter(argv[:cut]), argv[cut + 1 :]
    parent: int | None = None
    keep, remove = False, ""
    for word in words:
        if word == "--keep":
            keep = True
            continue
        value = next(words)
        if word == "--parent":
            parent = int(os.environ[env.LAUNCHER_PID] if value == "env" else value)
        elif word == "--remove":
            remove = value
        elif word == "--nice":
            lower_priority(int(value))
        elif word == "--chdir":
            os.chdir(value)
        elif word == "--log":
            _append_to(value)
        elif word == "--per-rank-log":
            generation = os.environ.get(env.GENERATION, "0")
            _append_to(os.path.join(value, rank_log_name(generation, os.environ.get("RANK", "0"))))
        else:
            print(f"Unknown option {word}.", file=sys.stderr)
            return 2
    if keep:
        return _supervise(command, parent, remove)
    if parent is not None:
        die_with_parent(parent)
    _exec(command)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
