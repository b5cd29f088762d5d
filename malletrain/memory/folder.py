"""A node's folder for snapshots in shared memory: names, sizes, its bound, and what dead agents
left.

A folder of files on ``/dev/shm`` outlives the workers, has names, and takes what
``torch.distributed.checkpoint`` writes; nobody but its user may enter it. Memory without a name
(memfd) would go with its last holder, but a folder of shards cannot be had of it. So it is removed
in three ways: by the agent when the job leaves, by the launcher's supervisor when the agent was
killed, by the next agent of the user on the node when both were. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from malletrain.memory.folder_lock import is_locked, lock_folder
from malletrain.protocol.sizes import shown

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "malletrain-mem"
_FREE_SHARE = 0.05
"""Of the node's memory: what a snapshot leaves alone, whatever its bound says."""
_NAME = re.compile(r"[0-9a-f]{16}/[0-9-]+(\.pt|/(\.metadata|__\d+_\d+\.distcp))")
VIEW = ".view-"
"""Begins the name of a folder in which a worker, whose number follows, lays together what it
reads.
"""
_BEGUN = re.compile(r"\.(?:arriving|view)-(\d+)-")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class NoRoomError(OSError):
    """The node's memory does not suffice; the message is a sentence."""


@dataclass(frozen=True)
class MemoryFolder:
    """The folder of one job on one node."""

    path: Path
    """Where it is; only its user may enter it."""
    limit: int
    """Bytes that may be in it."""

    def file(self, name: str) -> Path:
        """Where ``name`` lies.

        Raises:
            ValueError: it is no name of a file of a snapshot.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no file of a snapshot in memory.")
        return self.path / name

    def used(self) -> int:
        """Bytes of memory that its files take."""
        return bytes_below(self.path)

    def claim(self, needed: int) -> None:
        """Look whether ``needed`` bytes more fit.

        Raises:
            NoRoomError: they do not.
            OSError: the folder is gone.
        """
        used = self.used()
        if used + needed > self.limit:
            raise NoRoomError(
                f"A snapshot of {shown(needed)} does not fit into the memory set apart for them on "
                f"this node ({shown(self.limit)}, of which {shown(used)} are taken). Raise "
                "[jobs] snapshot_memory."
            )
        stats = os.statvfs(self.path)
        free = min(stats.f_bavail * stats.f_frsize, _available())
        if needed > free:
            raise NoRoomError(
                f"A snapshot of {shown(needed)} does not fit into the memory that is free on this "
                f"node ({shown(free)})."
            )

    def remove_unfinished(self) -> None:
        """Remove what dead processes had begun to write."""
        for path in (*self.path.glob("*/.arriving-*"), *self.path.glob(f"{VIEW}*")):
            match = _BEGUN.match(path.name)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                remove(path)


def unfinished(final: Path) -> Path:
    """Where this process writes what is to be ``final``."""
    return final.with_name(f".arriving-{os.getpid()}-{final.name}")


def bytes_below(path: Path | None) -> int:
    """Bytes of memory that the files below ``path`` take; what vanishes meanwhile takes none."""
    total = 0
    for folder, _, names in os.walk(path) if path is not None else ():
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink()
    except OSError:
        pass


def private_folder(node: str, base: Path = SHARED_MEMORY) -> Path | None:
    """A new folder that only this user may enter, for the agent on ``node``; None where the node
    has no shared memory. Those of dead agents of the same user and node are removed.
    """
    stem = f"{PREFIX}-{os.geteuid()}-{re.sub(r'[^A-Za-z0-9_.-]', '_', node)[:24]}"
    sweep(stem, base)
    prefix = f"{stem}-{os.getpid()}-{_born(os.getpid())}-"
    try:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock_folder(made)
    except OSError:
        return None
    return made


def folder_for_job(home: Path | None, name: str) -> Path | None:
    """A new folder of an agent's ``home``; None where it cannot be made (a full /dev/shm, say): the
    job runs without.
    """
    if home is None:
        return None
    try:
        (home / name).mkdir(mode=0o700, parents=True)
    except OSError:
        return None
    return home / name


def sweep(stem: str, base: Path) -> None:
    """Remove the folders of this user, named ``stem``, whose agents are dead."""
    made_by = re.compile(re.escape(stem) + r"-(\d+)-(\d+)-[^-]+")
    for old in base.glob(f"{stem}-*"):
        match = made_by.fullmatch(old.name)
        dead = match and _born(int(match[1])) != int(match[2]) and _is_ours(old)
        if dead and not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)


def _born(pid: int) -> int:
    """When a process began, in ticks since boot (its number alone is used again); 0: it is dead."""
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


def bound(share: float) -> int:
    """Bytes that are ``share`` of the memory this process may use: the node's, or that of the
    lease where the main scheduler confines it.
    """
    total = _meminfo("MemTotal")
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        top, file = _CGROUP, "memory.max"
        if number != "0":  # of version 1
            if "memory" not in controllers.split(","):
                continue
            top, file = _CGROUP / "memory", "memory.limit_in_bytes"
        folder = top / place.lstrip("/")
        while folder != top.parent:
            try:
                total = min(total, int((folder / file).read_text()))
            except (OSError, ValueError):  # ValueError: "max"
                pass
            folder = folder.parent
    return int(total * share)


def _available() -> int:
    return max(0, _meminfo("MemAvailable") - int(_FREE_SHARE * _meminfo("MemTotal")))


def _meminfo(field: str) -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
