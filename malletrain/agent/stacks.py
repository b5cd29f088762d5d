"""Asks the workers on this node for their stacks.

Decides which processes get the signal: those that hold their own stack file open and have a handler
for it, so that no process dies of it and none of another user is signalled. The daemon decides what
follows from the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from malletrain.protocol.messages import Message, ShowStacks, Stacks
from malletrain.protocol.stacks import MOST_BYTES, MOST_WORKERS
from malletrain.protocol.stacks_file import STACKS_FILE, STACKS_SIGNAL

PATIENCE_S = 2.0
"""How long a worker may take to write; one in a system call that cannot be interrupted never
does.
"""
_LOOK_S = 0.05
_STATES = {
    "D": "in a system call that cannot be interrupted, of a file system perhaps",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
"""What the kernel calls a process that does not run (proc_pid_status(5))."""


class StackReader:
    """The questions of one agent. ``send`` reaches the daemon."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, message: ShowStacks, directory: Path, ranks: Mapping[int, int]) -> None:
        """The daemon asks for the workers whose files are in ``directory``. ``ranks``: process id,
        as the worker itself knows it → rank.
        """
        task = asyncio.create_task(self._answer(message, directory, ranks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _answer(self, message: ShowStacks, directory: Path, ranks: Mapping[int, int]) -> None:
        workers = await asyncio.to_thread(holders, directory)
        sizes = {path: _size(path) for path in workers}
        for pid in workers.values():
            if ready(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, STACKS_SIGNAL)
        loop = asyncio.get_running_loop()
        deadline, settled = loop.time() + PATIENCE_S, False
        while not settled and loop.time() < deadline:
            before = {path: _size(path) for path in workers}
            await asyncio.sleep(_LOOK_S)
            settled = all(sizes[p] < before[p] == _size(p) for p in workers)
        for path, pid in sorted(workers.items())[:MOST_WORKERS]:
            own = _process(path.name)
            text = _since(path, sizes[path])
            rank = ranks.get(own, -1)
            state = "" if text else state_of(pid)
            self._send(Stacks(message.job, message.generation, rank, own, state, text))


def holders(directory: Path) -> dict[Path, int]:
    """File of stacks → the process that holds it open, as this process sees it: another namespace
    of processes counts otherwise.
    """
    processes = {}
    for path in directory.glob(f"{STACKS_FILE}*"):
        if _process(path.name) >= 0:
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    processes[status.st_dev, status.st_ino] = path
    files: dict[Path, int] = {}
    for entry in os.listdir("/proc") if processes else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            for file in os.scandir(f"/proc/{entry}/fd"):
                with contextlib.suppress(OSError):
                    # What a file is on a file system that does not answer is not asked.
                    if _process(os.path.basename(os.readlink(file.path))) < 0:
                        continue
                    status = os.stat(file.path)
                    path_of = processes.get((status.st_dev, status.st_ino))
                    if path_of is not None:
                        files[path_of] = int(entry)
    return files


def ready(pid: int) -> bool:
    """Whether the process has a handler for the signal (proc_pid_status(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def state_of(pid: int) -> str:
    """What the kernel says of a process that wrote nothing."""
    with contextlib.suppress(OSError):
        word = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
        at = f" (in {place} of the kernel)" if place else ""
        return f"{_STATES.get(word, 'alive, and gives no stacks')}{at}"
    return "gone"


def _process(name: str) -> int:
    """The process id that a file of stacks is named by; -1: it is none."""
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
    """What was written behind ``offset``; of much the beginning, where the newest thread is."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # the directory is the job's
    with contextlib.suppress(OSError), os.fdopen(os.open(path, flags), "rb") as file:
        file.seek(offset)
        text = file.read(MOST_BYTES).decode("utf-8", "replace")
        return text.encode()[:MOST_BYTES].decode("utf-8", "ignore").strip()
    return ""
