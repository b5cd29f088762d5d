"""The process of an embedded cluster: starts one, finds a running one, stops it.

Decides when a cluster counts as started or gone. :mod:`scavenger.embedded.cluster` decides what it
does with its nodes.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scavenger.embedded import processes
from scavenger.embedded.hosts import Division
from scavenger.embedded.layout import Layout, read_json
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.interface import SchedulerError

START_TIMEOUT_S = 120.0
"""Time limit of the start, seconds. A busy machine can need this long to start a process. A process
that ends is noticed at once.
"""


@dataclass(frozen=True)
class ClusterProcess:
    """A running embedded cluster, started by this process or another."""

    directory: Path
    """Directory of the cluster."""
    pid: int
    """Its process id."""
    pid_start: int
    """Start time of the process, clock ticks since boot."""
    process: subprocess.Popen[bytes] | None = None
    """The process, if it is a child of this one."""

    @classmethod
    def attach(cls, directory: str | os.PathLike[str]) -> ClusterProcess:
        """Return the cluster that runs in ``directory``. Raises SchedulerError if none does."""
        scavenger = LocalScavenger(directory)
        state = scavenger.state()
        return cls(scavenger.layout.root, int(state["pid"]), int(state["pid_start"]))

    def scavenger(self) -> LocalScavenger:
        """Return a connection to the cluster."""
        return LocalScavenger(self.directory)

    def alive(self) -> bool:
        """Return whether it still runs."""
        if self.process is not None:
            self.process.poll()  # reaps it if it is our child
        return processes.alive(self.pid, self.pid_start)

    def go_on(self) -> None:
        """Start the trace of a cluster that was started with ``hold``. Does nothing if the trace
        has started.
        """
        Layout(self.directory).hold.unlink(missing_ok=True)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the cluster in order (leases get their grace time), after ``timeout_s`` by force.
        Return when it is gone.
        """
        for number, patience in (
            (signal.SIGTERM, timeout_s),
            (signal.SIGTERM, 5.0),
            (signal.SIGKILL, 5.0),
        ):
            if not self.alive():
                return
            os.kill(self.pid, number)
            deadline = time.monotonic() + patience
            while self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        if self.alive():
            raise SchedulerError(
                f"The cluster in {self.directory} (process {self.pid}) does not end, even when "
                "killed."
            )


def start_cluster(
    directory: str | os.PathLike[str],
    nodes: int,
    *,
    division: Division | None = None,
    trace: str | os.PathLike[str] | None = None,
    speedup: float = 1.0,
    start_s: float | None = None,
    duration_s: float | None = None,
    trace_end_s: float | None = None,
    at_end: str = "repeat",
    hold: bool = False,
    grace_s: float = 5.0,
    notice_fraction: float = 1.0,
    sweep_s: float = 1.0,
    seed: int = 0,
    lifetime_s: float | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> ClusterProcess:
    """Start a cluster as a process in its own session, which outlives this one, and wait until it
    is ready.

    Args:
        directory: directory of the cluster's files.
        nodes: number of virtual nodes.
        division: resources of the nodes, and kinds of slots; None: whole nodes.
        trace: CSV of idle and busy events; None: all nodes are always idle.
        speedup: divisor of the trace's times.
        start_s: second of the trace to begin at; None: where most happens.
        duration_s: real seconds of the trace to use; None: all.
        trace_end_s: second at which the trace's observation ends; None: its last event.
        at_end: what follows the trace: ``repeat``, ``idle``, ``busy`` or ``hold``.
        hold: whether the trace stays at its first second until :meth:`ClusterProcess.go_on`.
        grace_s: time from SIGTERM to SIGKILL of a preempted lease, seconds.
        notice_fraction: fraction of preemptions that SIGTERM announces; the others kill at once.
        sweep_s: time for the processes of an ended lease to end by themselves, seconds.
        seed: seed for the nodes of the trace and for preemptions without notice.
        lifetime_s: time after which the cluster stops by itself, seconds; None: never.
        timeout_s: time limit of the start, seconds.

    Raises:
        SchedulerError: it does not start; the text is the cluster's message.
    """
    layout = Layout(Path(directory).resolve())
    layout.create()
    layout.hold.touch() if hold else layout.hold.unlink(missing_ok=True)
    argv = [
        sys.executable,
        "-m",
        "scavenger.embedded",
        "--dir",
        str(layout.root),
        "--nodes",
        str(nodes),
        "--speedup",
        repr(speedup),
        "--at-end",
        at_end,
        "--grace",
        repr(grace_s),
        "--notice-fraction",
        repr(notice_fraction),
        "--sweep",
        repr(sweep_s),
        "--seed",
        str(seed),
    ]
    optional = {
        "--trace": None if trace is None else str(Path(trace).resolve()),
        "--trace-end": trace_end_s,
        "--start": start_s,
        "--duration": duration_s,
        "--slots": None if division is None else division.to_json(),
        "--lifetime": lifetime_s,
    }
    argv += [
        word
        for option, value in optional.items()
        if value is not None
        for word in (option, str(value))
    ]
    with open(layout.log, "ab") as log:
        log_offset = log.tell()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while True:
        state = read_json(layout.state)
        if (
            state is not None
            and state.get("pid") == process.pid
            and state.get("state") == "running"
        ):
            return ClusterProcess(layout.root, process.pid, int(state["pid_start"]), process)
        if process.poll() is not None:
            with open(layout.log, "rb") as log_again:
                log_again.seek(log_offset)
                words = log_again.read().decode(errors="replace").strip()
            raise SchedulerError(
                f"The embedded cluster did not start: {words or _silence(layout.log)} (see "
                f"{layout.log})"
            )
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise SchedulerError(
                f"The embedded cluster was not ready within {timeout_s:g} s; see {layout.log}."
            )
        time.sleep(0.02)


def _silence(log: Path) -> str:
    """Return why a cluster that has ended left no message in its log."""
    try:
        with open(log, "ab") as file:
            file.write(b"\n")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "; make room on its file system" if full else ""
        return f"its directory cannot be written: {error.strerror}{mend}"
    return "it said nothing"
