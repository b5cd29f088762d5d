"""The embedded cluster: a small main scheduler for one machine, with virtual nodes whose leases are
real processes.

It is a separate process, so that killing the daemon stops neither it nor the agents::

  python -m scavenger.embedded --dir DIR --nodes 6 [--trace FILE --speedup 30 --duration 120]
  [--grace 5] [--notice-fraction 0.75]

Without a trace all nodes are always idle. With one, the trace decides
(:mod:`scavenger.trace.replay`). Nodes can be divided into slots (:mod:`scavenger.embedded.hosts`).
When a leased node or slot becomes busy, :class:`EmbeddedCluster` preempts the lease: it sends
SIGTERM to the lease's process and, after the grace time, SIGKILL to all processes of the lease. For
the fraction without notice it sends SIGKILL to the process at once. It communicates with its
clients (:mod:`scavenger.embedded.scavenger`) only through files, see
:mod:`scavenger.embedded.layout`.

:class:`Record` writes these files: state, answers and history. A full disk does not stop it.
:func:`read_take` checks clients' requests; the cluster decides whether a node is free.

On SIGTERM the cluster preempts all leases and leaves no process behind. A second SIGTERM skips the
grace time.
"""

from __future__ import annotations

import contextlib
import csv
import math
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scavenger.embedded import processes
from scavenger.embedded.hosts import WHOLE_NODES, Division, VirtualHost
from scavenger.embedded.layout import (
    FORMAT_VERSION,
    Layout,
    pending_requests,
    read_json,
    write_json,
)
from scavenger.embedded.lease import LeaseProcess, notice_given
from scavenger.embedded.lease import start as start_lease
from scavenger.interface import host_of, kind_of

if TYPE_CHECKING:
    from scavenger.trace.replay import Changes

ANSWER_LIFETIME_S = 60.0
HISTORY_HEADER = ("time", "node", "event", "lease", "reason")


class Record:
    """The files of one cluster. Write errors are reported on standard error, once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._history: TextIO | None = None
        self._last_complaint = ""

    def open(self) -> None:
        """Create the history, or append to it. Raises OSError."""
        self._history = open(self.layout.history, "a", newline="")  # noqa: SIM115
        if self.layout.history.stat().st_size == 0:
            csv.writer(self._history).writerow(HISTORY_HEADER)

    def close(self) -> None:
        """Close the history."""
        if self._history is not None:
            with contextlib.suppress(OSError):  # its last lines do not fit on a full disk
                self._history.close()

    def log(self, node: str, event: str, lease: str = "", reason: str = "") -> None:
        """Append a line to the history.

        Args:
            node: name of the node.
            event: what happened.
            lease: id of the lease; empty: none.
            reason: reason as words; may be empty.
        """
        if self._history is None:
            return
        try:
            csv.writer(self._history).writerow((f"{time.time():.3f}", node, event, lease, reason))
            self._history.flush()
        except OSError as error:
            self._complain(f"The history could not be written: {error}.")

    def state(self, value: Mapping[str, Any]) -> bool:
        """Write cluster.json. Return False if that failed; the next iteration tries again."""
        try:
            write_json(self.layout.state, value)
            for path in pending_requests(self.layout.answers):
                with contextlib.suppress(FileNotFoundError):  # removed by the client
                    if time.time() - path.stat().st_mtime > ANSWER_LIFETIME_S:
                        path.unlink()
        except OSError as error:
            self._complain(f"The state could not be written: {error}.")
            return False
        return True

    def answer(self, request: Path, value: Mapping[str, Any]) -> None:
        """Answer a request, and delete it."""
        try:
            write_json(self.layout.answers / request.name, value)
            request.unlink()
        except OSError as error:
            self._complain(f"An answer could not be written: {error}.")

    def _complain(self, sentence: str) -> None:
        if sentence != self._last_complaint:
            self._last_complaint = sentence
            with contextlib.suppress(OSError):  # the log may be on the same full disk
                print(sentence, file=sys.stderr, flush=True)


_LEASE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class ClusterRefused(ValueError):
    """An invalid request. The message says why."""


@dataclass(frozen=True)
class TakeRequest:
    """A request for a lease."""

    id: str
    """Name of the lease."""
    node: str
    """Virtual node."""
    argv: list[str]
    """Command to run."""
    env: dict[str, str]
    """Environment variables to add."""
    duration_s: float | None
    """Time limit, seconds; None: no limit."""


def read_take(entry: Any) -> TakeRequest:
    """Return one checked entry of a request of kind ``take``. Raises ClusterRefused."""
    fields = entry if isinstance(entry, Mapping) else {}
    lease_id = str(fields.get("id", ""))
    if not _LEASE_ID.fullmatch(lease_id):
        raise ClusterRefused(
            f"The lease id {lease_id[:100]!r} is not made of 1-100 letters, digits, '.', "
            "'_' and '-'."
        )
    argv, env, duration = fields.get("argv"), fields.get("env", {}), fields.get("duration_s")
    if not (isinstance(argv, list) and argv and all(isinstance(a, str) for a in argv)):
        raise ClusterRefused("The command must be a list of at least one string.")
    if not (isinstance(env, dict) and all(isinstance(v, str) for v in env.values())):
        raise ClusterRefused("The environment must be an object of strings.")
    if not (duration is None or (isinstance(duration, int | float) and duration > 0)):
        raise ClusterRefused(
            f"The time limit must be a positive number of seconds; got {duration!r}."
        )
    return TakeRequest(lease_id, str(fields.get("node")), argv, env, duration)


POLL_S = 0.05
HEARTBEAT_S = 1.0
KEEP_ENDED = 256
"""Maximum number of ended leases in cluster.json; the oldest are dropped."""


@dataclass(frozen=True)
class Settings:
    """Settings of a cluster. Times are in seconds."""

    directory: Path
    """Directory of the cluster, see :mod:`scavenger.embedded.layout`."""
    nodes: tuple[str, ...]
    """Names of the virtual nodes."""
    division: Division = WHOLE_NODES
    """What each node has, and its kinds of slots; none: a lease has a whole node."""
    grace_s: float = 5.0
    """Time from SIGTERM to SIGKILL of a preempted lease."""
    notice_fraction: float = 1.0
    """Fraction of preemptions that are announced by SIGTERM; the others kill at once."""
    seed: int = 0
    """Seed of the choice of preemptions without notice."""
    sweep_s: float = 1.0
    """Time after the end of a lease in which its remaining processes can exit by themselves;
    then they are killed as orphans.
    """
    lifetime_s: float | None = None
    """The cluster stops by itself after this time."""
    trace: str | None = None
    """File of the trace; only reported to clients."""
    speedup: float = 1.0
    """Seconds of the trace per real second; only reported to clients."""
    umask: int = -1
    """File mode creation mask of leases; -1: that of this process, whose own files are private."""


@dataclass
class VirtualNode:
    """A virtual node, or a slot of one. ``idle_since`` (epoch seconds): start of the current gap,
    None while the main scheduler uses it.
    """

    name: str
    idle_since: float | None = None
    lease: LeaseProcess | None = None
    explanation: str = ""
    """For a slot: what of its host is idle, and why it may not be leased although it is idle."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs of the slot's lease."""

    @property
    def state(self) -> str:
        if self.lease is None:
            return "busy" if self.idle_since is None else "idle"
        # After the end of a lease the node is not available until all processes of the lease are
        # gone.
        return "leased" if self.lease.state == "running" else "busy"


class EmbeddedCluster:
    """The scheduler loop. It has a single thread, because the processes of leases end with the
    thread that starts them.
    """

    def __init__(self, settings: Settings, replay: Changes | None) -> None:
        self.settings = settings
        self.replay = replay
        self.layout = Layout(settings.directory.resolve())
        division = settings.division
        self.hosts = {
            name: VirtualHost(name, number, division) for number, name in enumerate(settings.nodes)
        }
        self.nodes = {
            name: VirtualNode(name) for host in settings.nodes for name in division.slots(host)
        }
        if replay is not None:
            units = Counter(host_of(name) for name in replay.names)
            for name, host in self.hosts.items():
                host.units = units[name] or 1
        self.leases: dict[str, LeaseProcess] = {}
        self.totals: dict[str, float] = {
            "offered_node_s": 0.0,
            "leased_node_s": 0.0,
            "grace_node_s": 0.0,
            "leases": 0,
            "preemptions_with_notice": 0,
            "preemptions_without_notice": 0,
            "killed_after_grace": 0,
            "orphans": 0,
            "refused_requests": 0,
        }
        self.stop_signals = 0
        self._stopping = False
        self._dirty = True
        self._written = -math.inf
        self._accounted = self._started = self._trace_began = time.monotonic()
        self._record = Record(self.layout)

    # -- the loop --

    def run(self) -> bool:
        """Run until asked to stop. The caller holds the directory's lock. Return False if the
        state could not be written at the start: nobody could use such a cluster. Later write errors
        do not end it.
        """
        self.layout.create()
        processes.become_subreaper()
        self._clear_leftovers()
        self._record.open()
        wake = processes.install(self._request_stop)
        self._started = self._accounted = self._trace_began = time.monotonic()
        self._record.log("", "start")
        try:
            self.step(time.monotonic(), time.time())
            if self._dirty:
                return False
            while not self._is_finished():
                self.step(time.monotonic(), time.time())
                select.select([wake], [], [], POLL_S)
                processes.drain(wake)
        finally:
            # Also after an error in this process: a main scheduler that ends takes its jobs with
            # it.
            for lease in self.leases.values():
                if not lease.clean:
                    lease.kill_all_now()
            self._record.log("", "stop")
            self._write("stopped")
            self._record.close()
        return True

    def step(self, now: float, wall: float) -> None:
        """Run one iteration: process ended children, the trace, the requests and the deadlines."""
        self._update_totals(now)
        self._reap(now, wall)
        self._follow_trace(now, wall)
        if self._should_stop(now):
            self._stop_all(now, wall)
        self._answer_requests(now, wall)
        for lease in list(self.leases.values()):
            if lease.clean:
                continue
            if lease.ends_by is not None and now >= lease.ends_by:
                lease.leave(now, wall, self.settings.grace_s, "its time limit was reached")
            before = (lease.clean, lease.killed_after_grace, lease.orphans)
            lease.tick(now)
            if (lease.clean, lease.killed_after_grace, lease.orphans) != before:
                self.totals["killed_after_grace"] += lease.killed_after_grace - before[1]
                self.totals["orphans"] += lease.orphans - before[2]
                self._dirty = True
            if lease.clean:
                self._free_node(self.nodes[lease.node], wall)
        self._reap(now, wall)
        if self._dirty or now - self._written >= HEARTBEAT_S:
            self._written = now
            self._dirty = not self._write("stopping" if self._stopping else "running")

    def _request_stop(self) -> None:
        self.stop_signals += 1

    def _is_finished(self) -> bool:
        return self._stopping and all(lease.clean for lease in self.leases.values())

    def _should_stop(self, now: float) -> bool:
        lifetime = self.settings.lifetime_s
        return self.stop_signals > 0 or (lifetime is not None and now - self._started >= lifetime)

    def _stop_all(self, now: float, wall: float) -> None:
        if not self._stopping:
            self._stopping = self._dirty = True
        for lease in self.leases.values():
            if self.stop_signals > 1 and not lease.clean:
                lease.kill_all_now()
            else:
                lease.leave(now, wall, self.settings.grace_s, "the cluster stops")

    # -- nodes --

    def _follow_trace(self, now: float, wall: float) -> None:
        if self.replay is None:
            for host in self.hosts.values():
                if not host.idle_units:
                    self._change(host, host.units, now, wall)
            return
        if self.replay.time <= 0 and self.layout.hold.exists():
            self._trace_began = now
        for change in self.replay.advance(now - self._trace_began):
            self._change(self.hosts[host_of(change.node)], 1 if change.idle else -1, now, wall)

    def _change(self, host: VirtualHost, units: int, now: float, wall: float) -> None:
        """Give so many units of the host to main jobs (negative), or take them from main jobs."""
        was_idle = host.idle_units == host.units
        host.idle_units += units
        if host.kinds:
            staying = [
                lease.node
                for lease in self.leases.values()  # in the order in which they began
                if host_of(lease.node) == host.name
                and lease.state == "running"
                and not lease.reason
            ]
            for name in host.preempted(staying):
                self.nodes[name].idle_since = None
                self._preempt(self.nodes[name], now, wall)
            self._share_out(host, wall)
            return
        node, is_idle = self.nodes[host.name], host.idle_units == host.units
        if is_idle == was_idle:
            return
        if is_idle:
            node.idle_since = wall
        else:
            node.idle_since = None
            self._preempt(node, now, wall)
        if node.lease is None:
            self._record_change(node)

    def _share_out(self, host: VirtualHost, wall: float) -> None:
        """Update which slots of a host are idle."""
        nodes = [self.nodes[name] for name in self.settings.division.slots(host.name)]
        leases = {node.name: node.lease.id for node in nodes if node.lease is not None}
        since = {node.name: node.idle_since for node in nodes if node.idle_since is not None}
        for facts in host.facts(leases, since, wall):
            node = self.nodes[facts.name]
            before, node.explanation = node.state, facts.beside or facts.state
            if node.lease is None:
                node.idle_since = None if facts.beside else facts.idle_since
            if node.state != before:
                self._record_change(node)
        self._dirty = True

    def _preempt(self, node: VirtualNode, now: float, wall: float) -> None:
        lease = node.lease
        if lease is None or lease.state != "running" or lease.notice is not None:
            return
        if lease.reason:  # already leaving: no new preemption, but its deadline can move forward
            lease.leave(now, wall, self.settings.grace_s, lease.reason)
            return
        count = int(
            self.totals["preemptions_with_notice"] + self.totals["preemptions_without_notice"]
        )
        lease.notice = notice_given(count, self.settings.notice_fraction, self.settings.seed)
        if lease.notice:
            self.totals["preemptions_with_notice"] += 1
            lease.leave(now, wall, self.settings.grace_s, "preempted with notice")
        else:
            self.totals["preemptions_without_notice"] += 1
            lease.kill("preempted without notice")
        self._record.log(node.name, "preempted", lease.id, lease.reason)
        self._dirty = True

    def _free_node(self, node: VirtualNode, wall: float) -> None:
        host = self.hosts[host_of(node.name)]
        node.lease, node.devices = None, ()
        before = node.state
        if host.kinds:
            self._share_out(host, wall)
        if node.state == before:
            self._record_change(node)

    def _record_change(self, node: VirtualNode) -> None:
        self._record.log(node.name, node.state)
        self._dirty = True

    # -- leases --

    def _reap(self, now: float, wall: float) -> None:
        by_pid = {lease.pid: lease for lease in self.leases.values() if lease.state == "running"}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            lease = by_pid.get(pid)  # others are orphans that this process adopted
            if lease is not None:
                lease.exited(status, now, wall, self.settings.sweep_s)
                self._record.log(lease.node, "ended", lease.id, lease.reason)
                self._dirty = True

    def _answer_requests(self, now: float, wall: float) -> None:
        for path in pending_requests(self.layout.spool):
            try:
                answer: dict[str, Any] = {"ok": True, **self._answer(read_json(path), now, wall)}
            except (ClusterRefused, ValueError, OSError) as error:
                self.totals["refused_requests"] += 1
                answer = {"ok": False, "error": str(error)}
            self._dirty = True
            # Write the state first, so that a client with the answer finds the lease in its next
            # poll.
            self._dirty = not self._write("stopping" if self._stopping else "running")
            self._record.answer(path, answer)

    def _answer(self, request: Any, now: float, wall: float) -> dict[str, Any]:
        if not isinstance(request, dict) or request.get("format") != FORMAT_VERSION:
            raise ClusterRefused(
                f"The request is not a JSON object of format {FORMAT_VERSION}; client and cluster "
                "are of different versions."
            )
        kind = request.get("kind")
        if kind == "take" and isinstance(request.get("requests"), list):
            return {"leases": [self._take(entry, now, wall) for entry in request["requests"]]}
        if kind == "release" and isinstance(request.get("leases"), list):
            for lease_id in request["leases"]:
                lease = self.leases.get(str(lease_id))
                if lease is not None:
                    lease.leave(now, wall, self.settings.grace_s, "given back")
            return {}
        raise ClusterRefused(
            f"The request is of an unknown kind or incomplete: {str(kind)[:40]!r}."
        )

    def _take(self, entry: Any, now: float, wall: float) -> dict[str, Any]:
        """Start a lease. A refused one is answered as ended at once, with the reason, like a
        cancelled job.
        """
        lease_id = str(entry.get("id", "")) if isinstance(entry, Mapping) else ""
        existing = self.leases.get(lease_id)
        if existing is not None:  # requested again after an answer got lost
            return {"id": lease_id, **existing.record()}
        try:
            lease = self._start(read_take(entry), now, wall)
        except (ClusterRefused, OSError) as error:
            return {"id": lease_id, "node": "", "state": "ended", "pid": 0, "reason": str(error)}
        return {"id": lease_id, **lease.record()}

    def _start(self, request: TakeRequest, now: float, wall: float) -> LeaseProcess:
        node = self.nodes.get(request.node)
        if node is None:
            raise ClusterRefused(f"There is no node {request.node[:100]!r} in this cluster.")
        if self._stopping:
            raise ClusterRefused("The cluster is stopping.")
        if node.state != "idle":
            raise ClusterRefused(f"Node {node.name} is {node.state}, not idle.")
        host = self.hosts[host_of(node.name)]
        env = request.env
        if host.kinds:
            node.devices = host.devices(
                node.name, {other.name: other.devices for other in self.nodes.values()}
            )
            env = {
                **env,
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, node.devices)),
                "MALLETRAIN_NODE_CLASS": kind_of(node.name),
                "MALLETRAIN_SLOT": node.name.removeprefix(f"{host.name}/"),
            }
        lease = start_lease(
            request.id,
            node.name,
            request.argv,
            env,
            folder=self.layout.lease_directory(request.id),
            cluster=str(self.layout.root),
            wall=wall,
            ends_by=None if request.duration_s is None else now + request.duration_s,
            umask=self.settings.umask,
        )
        self.leases[request.id] = node.lease = lease
        self.totals["leases"] += 1
        self._record.log(node.name, "leased", request.id)
        if host.kinds:
            self._share_out(host, wall)
        self._prune()
        return lease

    def _prune(self) -> None:
        ended = [lease_id for lease_id, lease in self.leases.items() if lease.clean]
        for lease_id in ended[:-KEEP_ENDED]:
            del self.leases[lease_id]

    # -- counters and files --

    def _update_totals(self, now: float) -> None:
        elapsed, self._accounted = now - self._accounted, now
        for node in self.nodes.values():
            leased = node.state == "leased"
            if node.idle_since is not None:
                self.totals["offered_node_s"] += elapsed
                self.totals["leased_node_s"] += elapsed if leased else 0.0
            elif leased:
                self.totals["grace_node_s"] += elapsed

    def _write(self, state: str) -> bool:
        """Write cluster.json. Return False if that failed; the next iteration tries again."""
        own = processes.read(os.getpid())
        value = {
            "format": FORMAT_VERSION,
            "state": state,
            "time": time.time(),
            "pid": os.getpid(),
            "pid_start": own.start if own else -1,
            "boot_id": processes.boot_id(),
            "grace_s": self.settings.grace_s,
            "options": {
                "nodes": len(self.settings.nodes),
                "trace": self.settings.trace,
                "speedup": self.settings.speedup,
                "grace": self.settings.grace_s,
                "notice_fraction": self.settings.notice_fraction,
                "seed": self.settings.seed,
                **(
                    {"slots": self.settings.division.to_json()}
                    if self.settings.division.kinds
                    else {}
                ),
            },
            "nodes": {
                n.name: {
                    "state": n.state,
                    "idle_since": n.idle_since,
                    "lease": n.lease.id if n.lease else None,
                    "explanation": n.explanation,
                }
                for n in self.nodes.values()
            },
            "leases": {lease_id: lease.record() for lease_id, lease in self.leases.items()},
            "totals": self.totals,
        }
        return self._record.state(value)

    def _clear_leftovers(self) -> None:
        """Remove requests and processes of an earlier cluster that was killed in this directory."""
        for folder in (self.layout.spool, self.layout.answers):
            for path in folder.iterdir():
                path.unlink()
        marked = processes.with_environment([f"MALLETRAIN_CLUSTER={self.layout.root}"])
        for process in [*marked, *processes.working_below(self.layout.leases)]:
            if process.pid not in (os.getpid(), os.getppid()):
                processes.send(process, signal.SIGKILL)
