"""An embedded cluster whose nodes a benchmark takes and returns.

    python -m benchmarks.switched_cluster DIR NODES [--grace 20]

It is :mod:`scavenger.embedded.cluster` with DIR/switches in place of a trace: lines ``NODE idle``
or ``NODE busy``, which can be appended at any time. A node that becomes busy is preempted with
notice (SIGTERM and ``--grace`` seconds). Nodes without a line are busy. :func:`start` starts it for
a benchmark.
"""

from __future__ import annotations

import argparse
import fcntl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scavenger.embedded.cluster import EmbeddedCluster, Settings
from scavenger.embedded.cluster_process import ClusterProcess
from scavenger.embedded.layout import Layout, node_names, read_json
from scavenger.trace.replay import NodeChange

GRACE_S = 20.0
START_S = 60.0


class Switches:
    """Replaces :class:`scavenger.trace.replay.Replay`: returns the lines appended to the file since
    the last call.
    """

    names: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = 1.0
        self._read = 0

    def advance(self, time: float) -> list[NodeChange]:
        """Return the changes since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        words = [line.split() for line in whole.decode().splitlines()]
        return [NodeChange(time, node, state == "idle") for node, state in words]


def switch(directory: Path, node: str, state: str) -> None:
    """Set ``node`` to ``idle`` or ``busy``."""
    with (directory / "switches").open("a") as file:
        file.write(f"{node} {state}\n")


def start(directory: Path, nodes: int, grace_s: float = GRACE_S) -> ClusterProcess:
    """Start a cluster and wait until it is ready. Raises RuntimeError if it does not start."""
    layout = Layout(directory.resolve())
    layout.create()
    with open(layout.log, "ab") as log:
        argv = [sys.executable, "-m", "benchmarks.switched_cluster", str(layout.root), str(nodes)]
        argv.append(f"--grace={grace_s:g}")
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + START_S
    while True:
        state = read_json(layout.state) or {}
        if state.get("pid") == process.pid and state.get("state") == "running":
            return ClusterProcess(layout.root, process.pid, int(state["pid_start"]), process)
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"The cluster did not start; see {layout.log}.")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("nodes", type=int)
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds from notice to kill")
    args = parser.parse_args()
    layout = Layout(args.directory.resolve())
    layout.create()
    with open(layout.lock, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        settings = Settings(layout.root, node_names(args.nodes), grace_s=args.grace)
        EmbeddedCluster(settings, Switches(layout.root / "switches")).run()


if __name__ == "__main__":
    main()
