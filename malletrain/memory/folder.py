"""A node's folder for snapshots in shared memory: file names, sizes, the limit, and the removal of
folders of dead agents. Standard library only.

A folder on ``/dev/shm`` outlives the workers, and ``torch.distributed.checkpoint`` can write to it;
only its user can access it. Anonymous memory (memfd) would be freed with its last holder, but
cannot hold a folder of shards. So the folder must be removed: by the agent when the job leaves, by
the launcher's supervisor if the agent was killed, or by the next agent of the user on the node if
both were killed (:func:`sweep`).

:func:`lock_folder` and :func:`is_locked` show whether the process that created a folder still runs,
if its process id cannot show it. Agents in containers of one node share ``/tmp`` or ``/dev/shm``
and do not see each other's processes. So each holds a lock on its folders (flock(2)), which the
kernel releases when the process ends. If a file system has no such locks, nothing is locked, and
only the process id is used.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from malletrain.protocol.sizes import shown

LOCK_TRIES = 100
LOCK_PAUSE_S = 0.01


def lock_folder(folder: Path) -> None:
    """Lock ``folder``, which this process has created, until this process ends.

    Another process that asks :func:`is_locked` holds the lock for a moment. Without a further try
    the folder would stay unlocked, and would be removed while it is used.

    Raises:
        OSError: the folder cannot be opened.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # never closed
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        except OSError:  # no locks here
            break
    os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a running process, such as this one, has locked ``folder``."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


SHARED_MEMORY = Path("/dev/shm")
PREFIX = "malletrain-mem"
DATA_FOLDER = "data"
"""Name of the folder of data caches in an agent's folder. It outlives the jobs of the agent."""
_MIN_FREE_FRACTION = 0.05
"""Fraction of the node's memory that snapshots always leave free."""
_NAME = re.compile(r"[0-9a-f]{16}/[0-9-]+(\.pt|/(\.metadata|__\d+_\d+\.distcp))")
VIEW = ".view-"
"""Prefix, followed by a process id, of the name of a folder in which a worker collects the files
that it reads.
"""
_BEGUN = re.compile(r"\.(?:arriving|view)-(\d+)-")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class NoRoomError(OSError):
    """The node's memory does not suffice; the message is for the user."""


@dataclass(frozen=True)
class MemoryFolder:
    """The folder of one job on one node."""

    path: Path
    """Path of the folder, which only its user can access."""
    limit: int
    """Maximum size of its files together, bytes."""

    def file(self, name: str) -> Path:
        """Return the path of the file ``name``.

        Raises:
            ValueError: ``name`` is not the name of a snapshot's file.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no file of a snapshot in memory.")
        return self.path / name

    def used(self) -> int:
        """Return the bytes of memory that its files take."""
        return bytes_below(self.path)

    def claim(self, needed: int) -> None:
        """Check that ``needed`` more bytes fit.

        Raises:
            NoRoomError: they do not fit.
            OSError: the folder does not exist.
        """
        used = self.used()
        if used + needed > self.limit:
            raise NoRoomError(
                f"A snapshot of {shown(needed)} does not fit into the memory set apart for them on "
                f"this node ({shown(self.limit)}, of which {shown(used)} are taken). Raise "
                "[jobs] snapshot_memory."
            )
        stats = os.statvfs(self.path)
        free = min(stats.f_bavail * stats.f_frsize, available())
        if needed > free:
            raise NoRoomError(
                f"A snapshot of {shown(needed)} does not fit into the memory that is free on this "
                f"node ({shown(free)})."
            )

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of dead processes."""
        for path in (*self.path.glob("*/.arriving-*"), *self.path.glob(f"{VIEW}*")):
            match = _BEGUN.match(path.name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                remove(path)


def unfinished(final: Path) -> Path:
    """Return the temporary path at which this process writes the file ``final``."""
    return final.with_name(f".arriving-{os.getpid()}-{final.name}")


def bytes_below(path: Path | None) -> int:
    """Return the bytes of memory that the files below ``path`` take; ignores files that disappear
    meanwhile.
    """
    total = 0
    for folder, _, names in os.walk(path) if path is not None else ():
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink()
    except OSError:
        pass


def private_folder(node: str, base: Path = SHARED_MEMORY) -> Path | None:
    """Create a folder that only this user can access, for the agent on ``node``. Removes the
    folders of dead agents of the same user and node.

    Args:
        node: name of the node.
        base: folder in shared memory.

    Returns:
        The new folder; None if the node has no shared memory.
    """
    stem = f"{PREFIX}-{os.geteuid()}-{re.sub(r'[^A-Za-z0-9_.-]', '_', node)[:24]}"
    sweep(stem, base)
    prefix = f"{stem}-{os.getpid()}-{_start_ticks(os.getpid())}-"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock_folder(folder)
    except OSError:
        return None
    return folder


def folder_for_job(home: Path | None, name: str) -> Path | None:
    """Create the folder ``name`` in an agent's folder ``home``. Return None if it cannot be
    created (for example, /dev/shm is full); the job then runs without it.
    """
    if home is None:
        return None
    try:
        (home / name).mkdir(mode=0o700, parents=True)
    except OSError:
        return None
    return home / name


def sweep(stem: str, base: Path) -> None:
    """Remove the folders in ``base`` of this user's dead agents. ``stem``: start of their names."""
    name_pattern = re.compile(re.escape(stem) + r"-(\d+)-(\d+)-[^-]+")
    for old in base.glob(f"{stem}-*"):
        match = name_pattern.fullmatch(old.name)
        dead = match and _start_ticks(int(match[1])) != int(match[2]) and _is_ours(old)
        if dead and not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)


def _start_ticks(pid: int) -> int:
    """Return the start time of a process, ticks since boot (process ids are reused); 0 if it is
    dead.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def bound(share: float, most: int | None = None) -> int:
    """Return the fraction ``share`` of the memory that this process can use, bytes: the node's
    memory, or the lease's if the main scheduler limits it.

    Args:
        share: the fraction.
        most: memory of the lease's slot, bytes; None for a whole node.
    """
    limits = (_meminfo("MemTotal"), memory_limit(), most)
    return int(min(limit for limit in limits if limit is not None) * share)


def memory_limit() -> int | None:
    """Return the memory to which the control groups of this process limit it, bytes; None if they
    do not.
    """
    limits = [_meminfo("MemTotal")]
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, cgroup_path = rest.partition(":")
        top, file = _CGROUP, "memory.max"
        if number != "0":  # cgroup version 1
            if "memory" not in controllers.split(","):
                continue
            top, file = _CGROUP / "memory", "memory.limit_in_bytes"
        folder = top / cgroup_path.lstrip("/")
        while folder != top.parent:
            try:
                limits.append(int((folder / file).read_text()))
            except (OSError, ValueError):  # ValueError: "max"
                pass
            folder = folder.parent
    smallest = min(limits)
    return smallest if smallest < limits[0] else None


def available() -> int:
    """Return the memory of this host that is free to use, less a reserve, bytes."""
    return max(0, _meminfo("MemAvailable") - int(_MIN_FREE_FRACTION * _meminfo("MemTotal")))


def _meminfo(field: str) -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
