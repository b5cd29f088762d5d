"""The nodes of a job and the addresses at which they serve samples: a file in the node's memory.

The launcher writes it in each round; the workers and their loader workers read it again when it has
changed. So a change of nodes reaches every process without a message, in restart mode and in live
mode. If the file is absent or damaged, the node uses no other nodes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path


def members_file(folder: Path, job: str) -> Path:
    """Return the path of the file of ``job`` in ``folder``."""
    return folder / f"members-{re.sub(r'[^A-Za-z0-9_.-]', '_', job)[:80]}.json"


def write_members(path: Path, addresses: Mapping[str, str]) -> None:
    """Write the file.

    Args:
        path: its path.
        addresses: node → address at which it serves samples, as ``host:port``.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(json.dumps({"addresses": dict(addresses)}))
    os.replace(temporary, path)


class Members:
    """The nodes of the job, as the file at ``path`` names them. ``node``: this node."""

    def __init__(self, path: Path | None, node: str) -> None:
        self._path, self.node = path, node
        self._seen: tuple[int, int] | None = None
        self._addresses: dict[str, str] = {node: ""}

    def addresses(self) -> Mapping[str, str]:
        """Return the address of each node by its name. This node is always among them."""
        if self._path is None:
            return self._addresses
        try:
            status = os.stat(self._path)
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                read = json.loads(self._path.read_text())["addresses"]
                self._addresses = {self.node: "", **{str(n): str(a) for n, a in read.items()}}
                self._seen = seen
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            self._addresses, self._seen = {self.node: ""}, None
        return self._addresses
