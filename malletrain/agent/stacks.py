"""Requests stack traces from the workers on this node, by a signal.

Decides which processes get the signal: those that have their own stack file open and have a handler
for the signal. So no process dies of it, and no process of another user gets it. The daemon decides
what follows from the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from malletrain.protocol.job_files import STACKS_FILE, STACKS_SIGNAL
from malletrain.protocol.messages import (
    MAX_STACK_BYTES,
    MAX_STACK_WORKERS,
    Message,
    ShowStacks,
    Stacks,
)

RESPONSE_TIMEOUT_S = 2.0
"""Maximum time for a worker to write its stacks, seconds. A worker in an uninterruptible system
call never does.
"""
_POLL_S = 0.05
_STATES = {
    "D": "in a system call that cannot be interrupted, of a file system perhaps",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
"""Descriptions of the states of a process that does not run (proc_pid_status(5))."""


class StackReader:
    """Reads stacks for one agent. ``send``: sends a message to the daemon."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, message: ShowStacks, directory: Path, ranks: Mapping[int, int]) -> None:
        """Start to read the stacks of workers, and send them to the daemon.

        Args:
            message: the request of the daemon.
            directory: directory of the workers' stack files.
            ranks: rank of each worker by its process id in its own namespace.
        """
        task = asyncio.create_task(self._answer(message, directory, ranks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, message: ShowStacks, directory: Path, ranks: Mapping[int, int]) -> None:
        workers = await asyncio.to_thread(stack_file_holders, directory)
        sizes = {path: _size(path) for path in workers}
        for pid in workers.values():
            if handles_signal(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACKS_SIGNAL)
        loop = asyncio.get_running_loop()
        deadline, settled = loop.time() + RESPONSE_TIMEOUT_S, False
        while not settled and loop.time() < deadline:
            before = {path: _size(path) for path in workers}
            await asyncio.sleep(_POLL_S)
            settled = all(sizes[p] < before[p] == _size(p) for p in workers)
        for path, pid in sorted(workers.items())[:MAX_STACK_WORKERS]:
            own = _process(path.name)
            text = _since(path, sizes[path])
            rank = ranks.get(own, -1)
            state = "" if text else state_of(pid)
            self._send(Stacks(message.job, message.generation, rank, own, state, text))


def stack_file_holders(directory: Path) -> dict[Path, int]:
    """Return the process that has each stack file open, by file. The process id is that of this
    process's namespace, which may differ from the one in the file's name.
    """
    path_by_inode = {}
    for path in directory.glob(f"{STACKS_FILE}*"):
        if _process(path.name) >= 0:
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    path_by_inode[status.st_dev, status.st_ino] = path
    pid_by_path: dict[Path, int] = {}
    for entry in os.listdir("/proc") if path_by_inode else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            for file in os.scandir(f"/proc/{entry}/fd"):
                with contextlib.suppress(OSError):
                    # Check the name first: a stat of another file could hang on its file system.
                    if _process(os.path.basename(os.readlink(file.path))) < 0:
                        continue
                    status = os.stat(file.path)
                    stack_file = path_by_inode.get((status.st_dev, status.st_ino))
                    if stack_file is not None:
                        pid_by_path[stack_file] = int(entry)
    return pid_by_path


def handles_signal(pid: int) -> bool:
    """Return whether a process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def state_of(pid: int) -> str:
    """Return a description of the kernel's state of a process that wrote no stacks."""
    with contextlib.suppress(OSError):
        word = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        at = f" (in {place} of the kernel)" if place else ""
        return f"{_STATES.get(word, 'alive, and gives no stacks')}{at}"
    return "gone"


def _process(name: str) -> int:
    """Return the process id in the name of a stack file; -1 if it is no stack file."""
    number = name.removeprefix(STACKS_FILE)
    if number == name or not (number.isascii() and number.isdecimal()):
        return -1
    return int(number)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _since(path: Path, offset: int) -> str:
    """Return the text that was written after ``offset``. If it is too long, its beginning, which
    has the newest thread.
    """
    # The job can write to the directory, so the file may be a symbolic link or a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), os.fdopen(os.open(path, flags), "rb") as file:
        file.seek(offset)
        text = file.read(MAX_STACK_BYTES).decode("utf-8", "replace")
        return text.encode()[:MAX_STACK_BYTES].decode("utf-8", "ignore").strip()
    return ""
