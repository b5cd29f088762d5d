"""One real daemon with simulated agents, for :mod:`benchmarks.load`.

The daemon is a process of its own, started as an operator starts it. Its main scheduler is a
stand-in that uses the files of the embedded cluster (:mod:`scavenger.embedded.layout`): a lease is
not a process but an agent of a fleet (:mod:`benchmarks.load_fleet`).
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.load_fleet import Lease, Seen, fleet_process
from malletrain.client import Connection
from malletrain.identity.keys import user_name
from malletrain.protocol import env, messages
from malletrain.store.records import JobRow
from malletrain.store.store import Store
from scavenger.embedded import processes
from scavenger.embedded.layout import (
    FORMAT_VERSION,
    Layout,
    node_names,
    pending_requests,
    read_json,
    write_json,
)

WRITE_S = 1.0
"""Interval at which the stand-in writes its state without a request, seconds."""
KEEP_ENDED = 256


@dataclass
class StandInNode:
    """One node of the stand-in."""

    idle_since: float | None
    lease: str = ""


class StandIn:
    """The main scheduler. ``begin``: starts the agents of leases."""

    def __init__(
        self, folder: Path, nodes: int, offered: int, begin: Callable[[list[Lease]], None]
    ) -> None:
        self.layout = Layout(folder)
        self.layout.create()
        names = node_names(nodes)
        now = time.time()
        self.nodes = {
            name: StandInNode(now - 60.0 if k < offered else None) for k, name in enumerate(names)
        }
        self.leases: dict[str, dict[str, Any]] = {}
        self._ended: deque[str] = deque()
        self._begin = begin
        self._written = 0.0
        own = processes.read(os.getpid())
        self._head = {
            "format": FORMAT_VERSION,
            "state": "running",
            "pid": os.getpid(),
            "pid_start": own.start if own else -1,
            "boot_id": processes.boot_id(),
            "grace_s": 30.0,
        }
        self.write()

    def idle(self, nodes: Iterable[str], idle: bool) -> None:
        """Set whether the main scheduler uses these nodes."""
        for name in nodes:
            self.nodes[name].idle_since = time.time() - 60.0 if idle else None
        self.write()

    def ended(self, leases: Iterable[str], reason: str = "it ended") -> None:
        """Record that the agents of these leases are gone."""
        for lease in leases:
            record = self.leases.get(lease)
            if record is None or record["state"] == "ended":
                continue
            self.nodes[record["node"]].lease = ""
            self.leases[lease] = {**record, "state": "ended", "reason": reason}
            self._ended.append(lease)
        while len(self._ended) > KEEP_ENDED:
            del self.leases[self._ended.popleft()]

    def look(self) -> None:
        """Answer the requests."""
        for path in pending_requests(self.layout.spool):
            request = read_json(path)
            begun: list[Lease] = []
            if request is None:  # withdrawn
                continue
            answer: dict[str, Any] = {"ok": True}
            if request["kind"] == "take":
                answer["leases"] = [self._take(entry, begun) for entry in request["requests"]]
            else:
                self.ended(request["leases"], "given back")
            self.write()
            write_json(self.layout.answers / path.name, answer)
            path.unlink(missing_ok=True)
            self._begin(begun)
        if time.monotonic() - self._written > WRITE_S:
            self.write()

    def _take(self, entry: dict[str, Any], begun: list[Lease]) -> dict[str, Any]:
        node, lease = self.nodes[entry["node"]], entry["id"]
        record = {"node": entry["node"], "reason": "", "pid": 1, "gone_at": None}
        if lease not in self.leases:
            if node.idle_since is None or node.lease:
                return {**record, "id": lease, "state": "ended", "reason": "not idle"}
            argv = entry["argv"]
            options = dict(itertools.pairwise(argv))
            begun.append(
                Lease(
                    lease,
                    entry["node"],
                    options["--endpoint"],
                    options["--server-key"],
                    entry["env"][env.LEASE_KEY],
                )
            )
            node.lease, self.leases[lease] = lease, {**record, "state": "running"}
        return {"id": lease, **self.leases[lease]}

    def write(self) -> None:
        """Write the state for polls."""
        self._written = time.monotonic()
        nodes = {
            name: {
                "state": "leased" if n.lease else "busy" if n.idle_since is None else "idle",
                "idle_since": n.idle_since,
                "lease": n.lease or None,
            }
            for name, n in self.nodes.items()
        }
        value = {**self._head, "time": time.time(), "nodes": nodes, "leases": self.leases}
        write_json(self.layout.state, {**value, "totals": {}})


class Site:
    """A daemon, its main scheduler and ``fleets`` processes of agents.

    Args:
        nodes: number of nodes.
        offered: number of nodes that are idle at first.
        agent_timeout_s: silence after which an agent is lost, seconds; 6 heartbeats by default.
        patience_s: limit of every wait, seconds.
        config: additional configuration.
    """

    def __init__(
        self,
        root: Path,
        nodes: int,
        offered: int,
        *,
        fleets: int = 2,
        heartbeat_s: float = 10.0,
        agent_timeout_s: float | None = None,
        patience_s: float = 900.0,
        debounce_s: float = 0.0,
        running: int = 1000,
        config: str = "",
    ) -> None:
        self.root, self.state, self._patience_s = root, root / "state", patience_s
        self._asked_at = -1
        self.state.mkdir(parents=True, mode=0o700)
        self.seen: list[Seen] = []
        self.welcome = [0] * fleets
        self.sent: list[dict[str, int]] = [{} for _ in range(fleets)]
        self._pipes, self._fleets = [], []
        start = multiprocessing.get_context("spawn")
        for seed in range(fleets):
            here, there = start.Pipe()
            fleet = start.Process(target=fleet_process, args=(there, seed), daemon=True)
            fleet.start()
            there.close()
            self._pipes.append(here)
            self._fleets.append(fleet)
        self.cluster = StandIn(self.state / "cluster", nodes, offered, self._begin)
        self._config = root / "site.toml"
        self._config.write_text(
            f"""
            [daemon]
            state_dir = "{self.state}"
            metrics_listen = ""
            heartbeat = "{heartbeat_s:g} s"
            agent_timeout = "{agent_timeout_s or 6 * heartbeat_s:g} s"
            adopt_wait = "60 s"
            [scheduler]
            kind = "local"
            [scheduler.local]
            nodes = {min(4096, nodes)}
            autostart = false
            [jobs]
            max_running = {running}
            [allocation]
            debounce = "{debounce_s:g} s"
            t_fwd = "600 s"
            {config}
            """
        )
        self.daemon: subprocess.Popen[bytes] | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        self._turns = threading.Thread(target=self._serve, daemon=True)
        self._turns.start()

    # --- the daemon ---

    def start_daemon(self) -> float:
        """Start the daemon, and wait until it answers a client. Return how long that took,
        seconds.
        """
        began = time.monotonic()
        log = (self.root / "daemon.log").open("ab")
        argv = [sys.executable, "-m", "malletrain", "daemon", "--config", str(self._config)]
        self.daemon = subprocess.Popen(argv, stdout=log, stderr=log)
        log.close()
        self.until(self.answers, "the daemon answers")
        return time.monotonic() - began

    def answers(self) -> bool:
        """Whether the newest daemon answers."""
        assert self.daemon is not None
        assert self.daemon.poll() is None, self.log()
        info = self.state / "daemon.json"
        if f'"pid": {self.daemon.pid},' not in (info.read_text() if info.exists() else ""):
            return False
        with contextlib.suppress(RuntimeError), Connection.of(self.state) as client:
            return client.status().pid == self.daemon.pid
        return False

    def end_daemon(self, number: int = signal.SIGTERM) -> None:
        """End the daemon if it runs."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(number)
            self.daemon.wait()

    def log(self) -> str:
        """Return the end of the daemon's output."""
        path = self.root / "daemon.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def usage(self) -> tuple[float, float]:
        """Return the processor time of the daemon so far, seconds, and its resident memory,
        bytes.
        """
        assert self.daemon is not None
        process = psutil.Process(self.daemon.pid)
        times = process.cpu_times()
        return float(times.user + times.system), float(process.memory_info().rss)

    # --- its agents ---

    def _begin(self, leases: list[Lease]) -> None:
        for number, pipe in enumerate(self._pipes):
            if mine := [one for one in leases if self._fleet_of(one.node) == number]:
                pipe.send(("start", mine))

    def _fleet_of(self, node: str) -> int:
        return int(node[1:]) % len(self._pipes)

    def tell(self, *order: Any) -> None:
        """Send a message to every fleet; of a list of nodes each uses its own."""
        with self._lock:
            for pipe in self._pipes:
                pipe.send(order)

    def offer(self, nodes: Iterable[str], idle: bool = True) -> None:
        """Set whether the main scheduler uses these nodes."""
        with self._lock:
            self.cluster.idle(nodes, idle)

    def _serve(self) -> None:
        """Run the main scheduler and the fleets in a thread, because callers may wait for the
        daemon meanwhile.
        """
        while not self._over.is_set():
            ready = multiprocessing.connection.wait(self._pipes, 0.02)
            with self._lock:
                for number, pipe in enumerate(self._pipes):
                    while pipe in ready and pipe.poll():
                        self._heard(number, *pipe.recv())
                self.cluster.look()

    def _heard(
        self, number: int, welcome: int, ended: list[str], seen: list[Seen], sent: dict[str, int]
    ) -> None:
        self.welcome[number], self.sent[number] = welcome, sent
        self.cluster.ended(ended)
        self.seen += seen

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        pause_s: float = 0.1,
    ) -> None:
        """Wait for a condition, polling every ``pause_s`` seconds."""
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"Not within {self._patience_s:g} s: {what}.\n{self.log()}")
            time.sleep(pause_s)

    def is_quiet(self) -> bool:
        """Whether nothing was observed since the last call: the rounds of the start are over."""
        before, self._asked_at = self._asked_at, len(self.seen)
        return before == self._asked_at

    def at_work(self) -> dict[str, list[str]]:
        """Return job → its members in rank order, as the daemon reports them."""
        with Connection.of(self.state) as client:
            return {job.id: list(job.nodes) for job in client.jobs() if job.nodes}

    def close(self) -> None:
        """End everything."""
        self.end_daemon(signal.SIGKILL)
        self._over.set()
        self._turns.join()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("stop",))
            pipe.close()
        for fleet in self._fleets:
            fleet.join(20)
            if fleet.is_alive():
                fleet.kill()
                fleet.join()


def add_jobs(state: Path, count: int, sizes: tuple[int, int]) -> list[str]:
    """Store queued jobs, as if they had been submitted. Each can use its maximum number of
    nodes.
    """
    least, most = sizes
    curve = {str(k): 100.0 * k for k in sorted({1, 2, 4, most // 2, most} - {0})}
    made = []
    with Store.open(f"sqlite:///{state / 'malletrain.db'}") as store, store.transaction():
        for number in range(count):
            spec = messages.JobSpec(
                f"load-{number}",
                user_name(),
                "/nowhere/train.py",
                "/nowhere",
                sys.executable,
                min_nodes=least,
                max_nodes=most,
                profile=False,
                goal="throughput",
                curve=curve,
                env={"MALLETRAIN_PRELOAD": "0"},
            )
            text = msgspec.json.encode(spec).decode()
            row = JobRow(
                store.new_job_id(), spec.name, spec.owner, text, "queued", submitted=time.time()
            )
            made.append(store.add_job(row).id)
    return made


def quantile_ms(seconds: Sequence[float], part: float) -> float:
    """Return a quantile of the values, milliseconds; NaN without values."""
    ordered = sorted(seconds)
    if not ordered:
        return float("nan")
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]
