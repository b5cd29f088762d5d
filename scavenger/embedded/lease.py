"""One lease of the embedded cluster: its process, and its way from start to a clean end.

::

    running ── asked to leave (SIGTERM) ── grace over: SIGKILL to all ──┐
       │ ╲                └── exits by itself ──┐                       │
       │  └─ killed without notice ─────────────┤                       │
       └── exits by itself ─────────────────────┴─ sweeping ── nothing left: clean

A lease has *ended* when its first process is gone; its node is free again only when it is *clean*.
What is still alive ``sweep_s`` after the end was left behind by the command: it is killed and
counted as orphans. This module decides when to signal what; when a lease has to go is the cluster's
decision.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scavenger.embedded import processes
from scavenger.embedded.layout import LEASE_LOG

SUPERVISOR = Path(__file__).with_name("supervisor.py")
SCAN_INTERVAL_S = 0.1
"""Minimum time between two scans of /proc, seconds. A scan costs about a millisecond per hundred
processes.
"""


@dataclass
class LeaseProcess:
    """A lease and its process. Times named ``*_at`` are epoch seconds. Deadlines are on the
    monotonic clock.
    """

    id: str
    """Name of the lease."""
    node: str
    """Virtual node of the lease."""
    marks: tuple[str, ...]
    """Settings ``NAME=value`` in the environment of all its processes."""
    pid: int
    """Id of the first process."""
    started_at: float
    """Start time."""
    ends_by: float | None
    """End by the time limit, on the monotonic clock; None: no limit."""
    process: subprocess.Popen[bytes]
    """The first process."""
    state: str = "running"
    """``running`` or ``ended``."""
    reason: str = ""
    """Why it is leaving or has ended."""
    gone_at: float | None = None
    """Epoch seconds at which it is killed unless it has left by then; None if it was not asked to
    leave.
    """
    ended_at: float | None = None
    """Time at which the first process ended; None before."""
    exit_status: int | None = None
    """Exit status as in subprocess: negative for a signal."""
    notice: bool | None = None
    """For a preempted lease: whether it was asked to leave before it was killed."""
    killed_after_grace: int = 0
    """Number of processes killed after the grace time."""
    orphans: int = 0
    """Number of processes killed after the end of the first process."""
    clean: bool = False
    """Whether no process of the lease is left."""
    _kill_at: float | None = None
    _sweep_by: float | None = None
    _killing: bool = False
    _scan_at: float = 0.0
    _killed: set[tuple[int, int]] = field(default_factory=set)

    def leave(self, now: float, wall: float, grace_s: float, reason: str) -> None:
        """Ask the first process to leave (SIGTERM) and set the deadline. A lease that is already
        leaving keeps the earlier deadline.

        Args:
            now: time on the monotonic clock, seconds.
            wall: epoch seconds.
            grace_s: time until the lease is killed, seconds.
            reason: why it has to leave.
        """
        if self.state != "running":
            return
        if self._kill_at is None or now + grace_s < self._kill_at:
            self._kill_at = now + grace_s
            self.gone_at = wall + grace_s
        if not self.reason:
            self.reason = reason
            self._signal(signal.SIGTERM)

    def kill(self, reason: str) -> None:
        """Kill the first process without notice. The processes that it leaves behind are killed
        later.
        """
        if self.state == "running":
            self.reason = reason
            self._signal(signal.SIGKILL)

    def exited(self, status: int, now: float, wall: float, sweep_s: float) -> None:
        """Note that the first process has ended.

        Args:
            status: exit status as waitpid returns it.
            now: time on the monotonic clock, seconds.
            wall: epoch seconds.
            sweep_s: time until the remaining processes are killed, seconds.
        """
        self.exit_status = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.state = "ended"
        self.ended_at = wall
        self._sweep_by = now + sweep_s
        self._scan_at = now
        if not self.reason:
            self.reason = (
                "its command ended"
                if self.exit_status == 0
                else f"its command failed with {describe_exit(self.exit_status)}; see "
                f"leases/{self.id}/{LEASE_LOG}"
            )

    def tick(self, now: float) -> None:
        """Do what is due: kill after the grace time, sweep after the end."""
        if self.clean or now < self._scan_at:
            return
        if self.state == "running":
            if self._kill_at is not None and now >= self._kill_at:
                self._killing = True
                self._scan_at = now + SCAN_INTERVAL_S
                self._kill_all()
                self.killed_after_grace = len(self._killed)
        elif self._killing:
            # Repeat until no process is left, because a process can fork while the others are being
            # killed.
            self._scan_at = now + SCAN_INTERVAL_S
            self.clean = self._kill_all() == 0
        else:
            assert self._sweep_by is not None
            self._scan_at = now + SCAN_INTERVAL_S
            remaining = processes.of_lease(self.pid, self.marks)
            if not remaining:
                self.clean = True
            elif now >= self._sweep_by:
                self._killing = True
                self.orphans = len(remaining)
                self._kill_all()

    def kill_all_now(self) -> None:
        """Kill all processes of the lease at once, for a cluster that must end now."""
        self._kill_all()
        self._killing = True
        self._scan_at = 0.0

    def record(self) -> dict[str, Any]:
        """Return the lease's entry in cluster.json."""
        return {
            "node": self.node,
            "state": self.state,
            "pid": self.pid,
            "started": self.started_at,
            "ended": self.ended_at,
            "exit_status": self.exit_status,
            "reason": self.reason,
            "gone_at": self.gone_at,
            "notice": self.notice,
            "killed_after_grace": self.killed_after_grace,
            "orphans": self.orphans,
            "clean": self.clean,
        }

    def _signal(self, number: signal.Signals) -> None:
        # The pid cannot belong to another process, because a child keeps its pid until it is
        # reaped.
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def _kill_all(self) -> int:
        """Kill the living processes of the lease and return their number. A killed process may
        still exist for a moment.
        """
        remaining = processes.of_lease(self.pid, self.marks)
        self._killed |= {(p.pid, p.start) for p in remaining if processes.send(p, signal.SIGKILL)}
        return len(remaining)


def start(
    lease_id: str,
    node: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    folder: Path,
    cluster: str,
    wall: float,
    ends_by: float | None,
    umask: int = -1,
) -> LeaseProcess:
    """Start the command of a lease in its own session, so that it ends with this process.

    The command gets this process's environment, ``env``, and MALLETRAIN_NODE, MALLETRAIN_LEASE and
    MALLETRAIN_CLUSTER. Its working directory is ``folder``, its output goes to a file there.

    Args:
        lease_id: id of the lease.
        node: name of its node.
        argv: the command.
        env: additional environment variables.
        folder: working directory.
        cluster: id of the cluster.
        wall: present time, epoch seconds.
        ends_by: end by the time limit, on the monotonic clock, seconds; None: no limit.
        umask: its file mode creation mask; -1: that of this process.

    Raises:
        OSError: the command cannot be started.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    marks = {"MALLETRAIN_CLUSTER": cluster, "MALLETRAIN_LEASE": lease_id}
    with open(folder / LEASE_LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(SUPERVISOR), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **env, **marks, "MALLETRAIN_NODE": node},
            start_new_session=True,
            umask=umask,
        )
    return LeaseProcess(
        lease_id,
        node,
        tuple(f"{k}={v}" for k, v in marks.items()),
        process.pid,
        wall,
        ends_by,
        process,
    )


def notice_given(count: int, fraction: float, seed: int) -> bool:
    """Return whether preemption number ``count`` (from 0) is announced. Announcements are evenly
    spread, so that each sequence of preemptions has the requested fraction.

    Args:
        count: number of the preemption.
        fraction: fraction of preemptions that are announced.
        seed: seed of the choice.
    """
    phase = random.Random(seed).random()
    return math.floor((count + 1) * fraction + phase) > math.floor(count * fraction + phase)


def describe_exit(status: int) -> str:
    """Return 'exit status 3' or 'signal SIGKILL'."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
