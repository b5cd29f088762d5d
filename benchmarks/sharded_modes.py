"""The modes of benchmarks/sharded.py: each trains a sharded model on a number of nodes, one rank on
each node, and then changes to another number of nodes.

With MalleTrain: ``disk`` is restart mode, where each rank's shards are written to a file system and
read from it. ``disk-cold`` is the same with workers that are new Python processes instead of forks
of a warm one. ``memory`` is restart mode with the shards in the memory of the nodes. ``live`` is
live mode. A mode that this version of MalleTrain does not have is reported as missing.

Without MalleTrain, with a script that does not use it (train_sharded_torchrun.py): ``cold`` saves a
checkpoint and ends on request, and is started again with the other number of nodes as soon as it
has ended: a manual restart without delay. ``torchrun`` detects changes itself, with short timeouts.
"""

from __future__ import annotations

import inspect
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import malletrain
import malletrain.elastic as elastic
from benchmarks import switched_cluster
from benchmarks.peers_contenders import (
    HERE,
    PeerRestart,
    PeerTorchrun,
    Undisturbed,
    free_port,
)
from benchmarks.rescale_modes import until
from scavenger.embedded.cluster_process import ClusterProcess
from scavenger.embedded.layout import node_names

NOTICE_S = 120.0
"""Time from SIGTERM to SIGKILL of a node that leaves, seconds: long, because many ranks share a
core.
"""
PIECE_BYTES = 1 << 22


class Sharded(Protocol):
    """One way to train a sharded model on a number of nodes, and then on another."""

    def begin(self, nodes: int) -> None:
        """Start to train on ``nodes`` nodes; return at once."""

    def resize(self, nodes: int) -> None:
        """Change to ``nodes`` nodes."""

    def last_words(self) -> str:
        """Return the ends of its logs."""

    def stop(self) -> None:
        """End everything."""


class ShardedRestart(PeerRestart):
    """Restart mode with the snapshot on disk."""

    script = HERE / "train_sharded.py"
    local = f'grace = "{NOTICE_S:g} s"'
    jobs = f'drain_timeout = "{NOTICE_S:g} s"\njoin_timeout = "180 s"'
    # Ranks that share a machine's cores gain nothing from one more, so a plan with measured scaling
    # would not use it. This policy makes every requested change.
    allocation = 'policy = "freetrain"\nt_fwd = "1 h"'

    def _cluster(self) -> ClusterProcess:
        return switched_cluster.start(self.state / "cluster", self.nodes, NOTICE_S)

    def resize(self, nodes: int) -> None:
        """Let nodes leave (with notice) or join until there are ``nodes``."""
        mine = self._nodes()
        for node in mine[nodes:]:
            self._switch(node, "busy")
        for node in [n for n in node_names(self.nodes) if n not in mine][: nodes - len(mine)]:
            self._switch(node, "idle")


class ShardedRestartCold(ShardedRestart):
    """Restart mode with the snapshot on disk, and a new Python process for every worker."""

    env: ClassVar[dict[str, str]] = {"MALLETRAIN_PRELOAD": "0"}


class ShardedMemory(ShardedRestart):
    """Restart mode with the snapshot in the memory of the nodes."""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        super().__init__(root, nodes, [*arguments, "--memory"])


class ShardedLive(ShardedRestart):
    """Live mode."""

    mode = "live"
    script = HERE / "train_sharded_live.py"


class ShardedUndisturbed(Undisturbed):
    """Plain torchrun without changes of nodes."""

    script = HERE / "train_sharded.py"


class ShardedCold(Undisturbed):
    """Plain torchrun whose job saves and ends on request, and starts again on the other nodes."""

    script = HERE / "train_sharded_torchrun.py"

    def begin(self, nodes: int) -> None:
        # all start at once, and the first one serves the rendezvous, so that none waits for another
        self.port = free_port()
        self.options = (f"--nnodes={nodes}:{nodes}", "--monitor-interval=0.1")
        for _ in range(nodes):
            self._one()

    def resize(self, nodes: int) -> None:
        end = self.root / "snapshot.end"
        end.touch()
        until(lambda: all(t.poll() is not None for t in self.running), "all torchruns have ended")
        end.unlink()
        self.running.clear()
        self.begin(nodes)


class ShardedTorchrun(PeerTorchrun):
    """Plain torchrun that detects itself which nodes join and leave. It checks often and has a
    short last-call timeout. The keep-alive interval is the default: with a shorter one, joiners
    were not accepted.
    """

    script = HERE / "train_sharded_torchrun.py"
    options: ClassVar[tuple[str, ...]] = (
        "--monitor-interval=0.1",
        "--rdzv-conf=last_call_timeout=1",
    )

    def resize(self, nodes: int) -> None:
        by = nodes - len(self.running)
        if by > 0:
            self.grow(by)
        else:
            self.shrink(-by)


def disk_bandwidth(folder: Path, size: int) -> float:
    """Measure the bytes per second of writing ``size`` bytes, syncing and reading them."""
    path, block = folder / "bandwidth", bytes(PIECE_BYTES)
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(-(-size // PIECE_BYTES)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb", buffering=0) as file:
        while file.read(PIECE_BYTES):
            pass
    took = time.monotonic() - began
    path.unlink()
    return 2 * -(-size // PIECE_BYTES) * PIECE_BYTES / took


def network_bandwidth(folder: Path, size: int) -> float:
    """Measure bytes per second over one TCP connection of this machine."""
    server = socket.create_server(("127.0.0.1", 0))

    def sink() -> None:
        connection, _ = server.accept()
        buffer = bytearray(PIECE_BYTES)
        with connection:
            while connection.recv_into(buffer):
                pass

    thread = threading.Thread(target=sink)
    thread.start()
    block, count = bytes(PIECE_BYTES), -(-size // PIECE_BYTES)
    began = time.monotonic()
    with socket.create_connection(server.getsockname()) as client:
        for _ in range(count):
            client.sendall(block)
    thread.join()
    server.close()
    return count * PIECE_BYTES / (time.monotonic() - began)


@dataclass(frozen=True)
class Mode:
    """One way to move a sharded state."""

    kind: Callable[[Path, int, list[str]], Sharded]
    missing: str = ""
    """Why this version of MalleTrain does not have it; empty: it has it."""
    on_disk: bool = False
    """The state is written to a file system at every change."""
    counted: bool = True
    """Whether the workers report how many bytes reached them."""


def _has(callable_: Callable[..., object], name: str) -> bool:
    return name in inspect.signature(callable_).parameters


MODES: dict[str, Mode] = {
    "disk": Mode(ShardedRestart, on_disk=True),
    "disk-cold": Mode(ShardedRestartCold, on_disk=True),
    "cold": Mode(ShardedCold, on_disk=True),
    "torchrun": Mode(ShardedTorchrun, on_disk=True),
    "memory": Mode(
        ShardedMemory,
        "" if _has(malletrain.Snapshot, "memory") else "not built: Snapshot(memory=) is not there",
        # /proc/PID/io does not count reads of shared memory and of sockets
        counted=False,
    ),
    "live": Mode(
        ShardedLive,
        "" if _has(elastic.Run, "build") else "not built: elastic.Run(build=) is not there",
    ),
}
