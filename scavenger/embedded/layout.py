"""The files through which the embedded cluster and its clients talk.

Everything is below one directory. A file is always replaced whole (temporary name, then rename), so
a reader never sees half of one.

=================
=======================================================================================================
``cluster.json``   the cluster's state, written at every change and once a second; only the cluster
writes it ``spool/``         one JSON file per request; the cluster consumes them in the order of
their names ``answers/``       one JSON file per request of the same name; the client removes what
it has read ``history.csv``    every change of a node's state, appended ``leases/ID/``     working
directory of a lease, with ``output.log`` (standard output and error of its command) ``cluster.log``
what the cluster process itself prints ``cluster.lock``   held while a cluster runs: there is one
per directory ``hold``           while this file is there, the trace stands still at its first
second =================
=======================================================================================================
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.embedded import processes

FORMAT = 1
LEASE_LOG = "output.log"
_serial = itertools.count()


@dataclass(frozen=True)
class Layout:
    """Paths below a cluster's directory."""

    root: Path

    @property
    def state(self) -> Path:
        return self.root / "cluster.json"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def answers(self) -> Path:
        return self.root / "answers"

    @property
    def history(self) -> Path:
        return self.root / "history.csv"

    @property
    def lock(self) -> Path:
        return self.root / "cluster.lock"

    @property
    def hold(self) -> Path:
        return self.root / "hold"

    @property
    def log(self) -> Path:
        return self.root / "cluster.log"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    def lease(self, lease_id: str) -> Path:
        """Working directory of a lease."""
        return self.leases / lease_id

    def create(self) -> None:
        """Make the directories, closed to other users: requests carry the environment of agents,
        keys included.
        """
        for path in (self.root, self.spool, self.answers, self.leases):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


def node_names(count: int) -> tuple[str, ...]:
    """The names of a cluster's nodes."""
    return tuple(f"n{k}" for k in range(1, count + 1))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON, readable by this user only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as out:
        json.dump(value, out)
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; None when there is no such file. Raises ValueError when it is not
    JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def request_name() -> str:
    """A file name that sorts by time and is used by no other request."""
    return f"{time.time_ns():020d}-{os.getpid()}-{next(_serial):06d}.json"


def waiting(folder: Path) -> list[Path]:
    """Finished request files, oldest first."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(e.path) for e in entries if e.name.endswith(".json") and not e.name.startswith(".")
        )


def cluster_alive(state: Any) -> bool:
    """Whether the process that wrote this ``cluster.json`` still runs on this machine."""
    return (
        isinstance(state, dict)
        and state.get("state") != "stopped"
        and state.get("boot_id") == processes.boot_id()
        and processes.alive(int(state.get("pid", 0)), int(state.get("pid_start", -1)))
    )
