"""The files through which the embedded cluster and its clients exchange requests and state.

All files are below one directory. Writers replace each JSON file atomically (temporary name, then
rename), so readers never see a partial file.

* ``cluster.json``: state of the cluster, written by the cluster at every change and once a second.
* ``spool/``: one JSON file per request. The cluster reads them in the order of their names.
* ``answers/``: one JSON file per request, with the same name. The client deletes it after reading.
* ``history.csv``: one appended line per change of a node's state.
* ``leases/ID/``: working directory of a lease. ``output.log`` holds stdout and stderr of its
  command.
* ``cluster.log``: output of the cluster process.
* ``cluster.lock``: lock of the running cluster, one cluster per directory.
* ``hold``: while this file exists, the trace does not start.
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

FORMAT_VERSION = 1
LEASE_LOG = "output.log"
_serial = itertools.count()


@dataclass(frozen=True)
class Layout:
    """Paths below a cluster's directory."""

    root: Path
    """Directory of the cluster."""

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

    def lease_directory(self, lease_id: str) -> Path:
        """Return the working directory of a lease."""
        return self.leases / lease_id

    def create(self) -> None:
        """Create the directories with mode 0700, because requests contain the agents' environment,
        including keys.
        """
        for path in (self.root, self.spool, self.answers, self.leases):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of a cluster's nodes."""
    return tuple(f"n{k}" for k in range(1, count + 1))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON, readable by this user only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as out:
        json.dump(value, out)
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Return the JSON value in ``path``; None if there is no such file. Raises ValueError if the
    content is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def request_name() -> str:
    """Return a file name that sorts by time and is unique among requests."""
    return f"{time.time_ns():020d}-{os.getpid()}-{next(_serial):06d}.json"


def pending_requests(folder: Path) -> list[Path]:
    """Return the complete request files, oldest first."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(e.path) for e in entries if e.name.endswith(".json") and not e.name.startswith(".")
        )


def cluster_alive(state: Any) -> bool:
    """Return whether the process that wrote this ``cluster.json`` still runs on this machine."""
    return (
        isinstance(state, dict)
        and state.get("state") != "stopped"
        and state.get("boot_id") == processes.boot_id()
        and processes.alive(int(state.get("pid", 0)), int(state.get("pid_start", -1)))
    )
