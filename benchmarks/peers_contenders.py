"""The contenders of benchmarks/peers.py: each trains the same model on virtual nodes of this
machine, gets another node, loses one with notice, and loses one without notice.

MalleTrain runs as the whole product on an embedded cluster (daemon, agents, leases). The others run
their own programs: one launcher, replica or raylet for each virtual node. The first node never
leaves, because the rendezvous, the lighthouse or the head is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import psutil

from benchmarks import switched_cluster
from benchmarks.peers_environments import cache, python_of
from benchmarks.rescale_modes import C10d, Restart, until
from malletrain.client import Connection
from scavenger.embedded.cluster_process import ClusterProcess
from scavenger.embedded.layout import node_names

HERE = Path(__file__).parent


class Peer(Protocol):
    """A framework that trains elastically."""

    def begin(self, nodes: int) -> None:
        """Start to train on ``nodes`` nodes; return at once."""

    def join(self) -> None:
        """Add a node."""

    def leave(self) -> None:
        """Remove its last node with notice."""

    def lose(self) -> None:
        """Kill everything on its last node (SIGKILL)."""

    def last_words(self) -> str:
        """Return the ends of its logs."""

    def stop(self) -> None:
        """End everything."""


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and everything below it."""
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in [*top.children(recursive=True), top]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class PeerRestart(Restart):
    """MalleTrain in restart mode. The main scheduler is a cluster that the benchmark controls."""

    script = HERE / "train_peers.py"
    local = f'grace = "{switched_cluster.GRACE_S:g} s"'

    def _cluster(self) -> ClusterProcess:
        return switched_cluster.start(self.state / "cluster", self.nodes)

    def _switch(self, node: str, state: str) -> None:
        switched_cluster.switch(self.state / "cluster", node, state)

    def begin(self, nodes: int) -> None:
        for node in node_names(nodes):
            self._switch(node, "idle")
        self.start()

    def _nodes(self) -> list[str]:
        with Connection.of(self.state) as client:
            return list(client.job(self.job).job.nodes)

    def join(self) -> None:
        mine = self._nodes()
        self._switch(next(n for n in node_names(self.nodes) if n not in mine), "idle")

    def leave(self) -> None:
        self._switch(self._nodes()[-1], "busy")

    def lose(self) -> None:
        node = self._nodes()[-1]
        state = ClusterProcess.attach(self.state / "cluster").scavenger().state()
        kill_tree(int(state["leases"][state["nodes"][node]["lease"]]["pid"]))
        self._switch(node, "busy")


class PeerLive(PeerRestart):
    """MalleTrain in live mode."""

    mode = "live"
    script = HERE / "train_peers_live.py"


class PeerTorchrun(C10d):
    """Plain torchrun with a checkpoint file and its default timeouts."""

    script = HERE / "train_peers.py"

    def begin(self, nodes: int) -> None:
        self._one()
        until(self._listens, "the first torchrun serves the rendezvous")
        for _ in range(nodes - 1):
            self._one()

    def join(self) -> None:
        self.grow(1)

    def leave(self) -> None:
        self.shrink(1)


class PeerTorchrunShort(PeerTorchrun):
    """Plain torchrun with short timeouts."""

    options: ClassVar[tuple[str, ...]] = (
        "--monitor-interval=0.1",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
    )


class Undisturbed(PeerTorchrun):
    """Plain torchrun on a fixed number of nodes: the undisturbed training, for comparison."""

    def begin(self, nodes: int) -> None:
        self.nodes = nodes
        self.options = (f"--nnodes={nodes}:{nodes}",)
        super().begin(nodes)


class _Processes(ABC):
    """A framework with one process for each node, and common processes that all of them need."""

    name = ""

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        self.root, self.nodes, self.arguments = root, nodes, arguments
        self.python = python_of(self.name, cache())
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.common: list[subprocess.Popen[bytes]] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def _popen(self, argv: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.root / log).open("ab") as file:
            return subprocess.Popen(argv, env=self.environment, stdout=file, stderr=file)

    @abstractmethod
    def _node(self) -> None:
        """Start the process of one more node."""

    def join(self) -> None:
        self._node()

    def leave(self) -> None:
        self.running.pop().send_signal(signal.SIGTERM)

    def lose(self) -> None:
        kill_tree(self.running.pop().pid)

    def last_words(self) -> str:
        logs = sorted(self.root.glob("*.log"))
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs
        )

    def stop(self) -> None:
        for process in [*self.running, *self.common]:
            kill_tree(process.pid)
            process.wait()


class Torchft(_Processes):
    """torchft: a lighthouse, and a replica group of one process for each node. Its timeouts are
    short: a replica counts as dead after half a second without heartbeats (sent every 0.1 s), and a
    quorum waits 1 s for stragglers (with 0.1 s a quorum on a busy machine never had all three).
    """

    name = "torchft"

    def begin(self, nodes: int) -> None:
        port = free_port()
        lighthouse = [str(self.python.parent / "torchft_lighthouse"), "--min_replicas=1"]
        lighthouse += [f"--bind=[::]:{port}", "--heartbeat_timeout_ms=500"]
        lighthouse += ["--join_timeout_ms=1000", "--quorum_tick_ms=50"]
        self.common.append(self._popen(lighthouse, "lighthouse.log"))
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        until(lambda: listens(port), "the lighthouse listens")
        for _ in range(nodes):
            self._node()

    def _node(self) -> None:
        argv = [str(self.python), str(HERE / "train_peers_torchft.py"), *self.arguments]
        self.running.append(self._popen(argv, f"replica-{len(self.running)}.log"))


def listens(port: int) -> bool:
    """Whether a process accepts connections at this port."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


class Ray(_Processes):
    """Ray Train's elastic mode: a head, and a raylet for each node. It checks for changes every
    second and for failures every half second (with shorter timeouts it declared living nodes dead
    on a busy machine). A node that leaves is drained with a deadline of 5 s, and killed then.
    """

    name = "ray"
    script = HERE / "train_peers_ray.py"
    NOTICE_S = 5

    def __init__(self, root: Path, nodes: int, arguments: list[str]) -> None:
        super().__init__(root, nodes, arguments)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        # A short path, because the names of sockets in it have a maximum length.
        self.temporary = Path("/tmp") / f"ray-{os.getpid()}-{self.port}"
        self.environment |= {
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": self.address,
        }
        self.names: list[str] = []
        self.leaving: list[subprocess.Popen[bytes]] = []
        self.made = 0

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        argv = [str(self.python.parent / "ray"), "start", "--block", "--num-cpus=1"]
        argv += ["--disable-usage-stats", f"--temp-dir={self.temporary}", *options]
        return self._popen(argv, "raylets.log")

    def begin(self, nodes: int) -> None:
        self.common.append(
            self._start(
                "--head",
                f"--port={self.port}",
                "--include-dashboard=false",
                "--node-ip-address=127.0.0.1",
            )
        )
        until(lambda: listens(self.port), "Ray's head listens")
        until(lambda: self._ask("print(1)"), "Ray's head knows itself")
        for number in range(nodes):
            self._node()
            until(partial(self._at_least, number + 1), f"{number + 1} nodes of Ray are there")
        argv = [str(self.python), str(self.script), *self.arguments]
        self.common.insert(0, self._popen(argv, "driver.log"))

    def _node(self) -> None:
        # A label by which leave() finds the node's id.
        self.made += 1
        name = f"peer{self.made}"
        self.names.append(name)
        self.running.append(
            self._start(
                f"--address={self.address}",
                f'--resources={{"slot": 1, "{name}": 1}}',
                "--node-ip-address=127.0.0.1",
            )
        )

    def _ask(self, script: str) -> list[str]:
        code = f"import ray; ray.init(log_to_driver=False)\nfor n in ray.nodes(): {script}"
        argv = [str(self.python), "-c", code]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.split()

    def _at_least(self, nodes: int) -> bool:
        alive = self._ask("print(n['NodeID']) if n['Alive'] and 'slot' in n['Resources'] else 0")
        return len(alive) >= nodes

    def leave(self) -> None:
        name = self.names.pop()
        (node,) = self._ask(f"print(n['NodeID']) if '{name}' in n['Resources'] else 0")
        argv = [str(self.python.parent / "ray"), "drain-node", f"--node-id={node}"]
        argv += [f"--address={self.address}", "--reason=DRAIN_NODE_REASON_PREEMPTION"]
        argv += ["--reason-message=notice", f"--deadline-remaining-seconds={self.NOTICE_S}"]
        subprocess.run(argv, env=self.environment, check=True, capture_output=True)
        leaver = self.running.pop()
        self.leaving.append(leaver)
        # What the main scheduler does: it ends the node at the deadline.
        killer = f"sleep {self.NOTICE_S}; kill -TERM {leaver.pid}"
        self.leaving.append(subprocess.Popen(["sh", "-c", killer]))

    def lose(self) -> None:
        self.names.pop()
        super().lose()

    def stop(self) -> None:
        super().stop()
        for process in self.leaving:
            kill_tree(process.pid)
            process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)


class RayTorchft(Ray):
    """Ray Train with torchft's replica groups, as many as the nodes at the beginning."""

    name = "ray-torchft"
    script = HERE / "train_peers_ray_torchft.py"

    def begin(self, nodes: int) -> None:
        if nodes < self.nodes:
            raise RuntimeError(
                f"The number of Ray's replica groups is fixed: {self.nodes} nodes of this trace "
                f"need --nodes {self.nodes}."
            )
        super().begin(nodes)


PEERS: dict[str, type[Peer]] = {
    "live": PeerLive,
    "restart": PeerRestart,
    "torchft": Torchft,
    "torchrun": PeerTorchrun,
    "torchrun-short": PeerTorchrunShort,
    "ray": Ray,
    "ray-torchft": RayTorchft,
}
