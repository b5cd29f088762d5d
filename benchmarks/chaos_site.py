"""The site of benchmarks/chaos.py: an embedded cluster, a daemon that is started again whenever it
ends, as by a service manager, and the faults of their processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.chaos_network import Way
from tests.integration.embedded import gone
from tests.integration.faults import FaultySite
from tests.ports import free_ports

CONFIG = """
release_after = "0 s"
rejected_for = "{rejected_for} s"
"""
OUTER, INNER = "127.0.0.2", "127.0.0.1"
LOOK_EVERY_S = 0.02


class ChaosSite(FaultySite):
    """A site with ``nodes`` virtual nodes. Agents and clients reach the daemon through a proxy.

    A thread acts as the service manager: it starts the daemon again whenever it has ended, and
    resumes stopped processes when that is due, also while other threads wait for the daemon.

    Args:
        silence_s: silence after which an agent is lost, seconds.
    """

    def __init__(self, root: Path, nodes: int, running: int, silence_s: float) -> None:
        self.port, self._reserved = free_ports(1)
        self.silence_s = silence_s
        config = CONFIG.format(rejected_for=silence_s / 2)
        super().__init__(root, nodes, grace_s=silence_s, config=config)
        text = self.config.read_text()
        text = text.replace('agent_timeout = "60 s"', f'agent_timeout = "{silence_s} s"')
        text = text.replace('adopt_wait = "60 s"', f'adopt_wait = "{silence_s} s"')
        text = text.replace('drain_timeout = "120 s"', f'drain_timeout = "{2 * silence_s} s"')
        limits = f'max_running = {running}\nstarvation = "{2 * silence_s} s"\nturns_apart = 1.0\n'
        limits += f'hang_after = "{silence_s} s"\njoin_timeout = "{1.5 * silence_s} s"\n'
        text = text.replace("max_tries = 10000\n", "max_tries = 10000\n" + limits)
        text = text.replace(
            'metrics_listen = ""',
            f'metrics_listen = ""\nlisten = "tcp://{INNER}:{self.port}"\nadvertise = "{OUTER}"',
        )
        self.config.write_text(text)
        self.way = Way(OUTER, INNER, self.port)
        self.starts = 0
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._manager = threading.Thread(target=self._manage)

    def begin_to_manage(self) -> None:
        """Start the daemon, now and whenever it ends."""
        self._manager.start()

    def _manage(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.end_due_faults(time.monotonic())
            if self.daemon is None or self.daemon.poll() is not None:
                self.starts += 1
                self.launch_daemon()

    def close(self) -> None:
        """End everything. Raises AssertionError if a process is left."""
        self._over.set()
        if self._manager.ident is not None:
            self._manager.join()
        self.end_due_faults()
        try:
            self.stop()
        finally:
            self.way.close()
            self._reserved.close()

    # --- faults with a duration ---

    def end_fault_in(self, delay_s: float, call: Callable[[], object]) -> None:
        """Call ``call``, which ends a fault, after ``delay_s`` seconds."""
        with self._lock:
            self._due.append((time.monotonic() + delay_s, call))

    def end_due_faults(self, until: float = float("inf")) -> None:
        """End the faults that are due by ``until`` (monotonic clock)."""
        with self._lock:
            over = [call for at, call in self._due if at <= until]
            for call in over:
                with contextlib.suppress(psutil.Error, OSError):
                    call()
            self._due = [(at, call) for at, call in self._due if at > until]

    def has_lasting_fault(self) -> bool:
        """Return whether any fault lasts."""
        with self._lock:
            return bool(self._due)

    # --- processes ---

    def worker_pids(self, folder: Path) -> list[int]:
        """Return the pids of the workers of the job in ``folder``, sorted."""
        processes = [p for p in self.workers(folder / "job.py") if not gone(p)]
        return sorted(p.pid for p in processes if p.cwd() == str(folder))

    def processes_of(self, role: str) -> list[psutil.Process]:
        """Return the processes of a role: daemon, agent, supervisor, fork server, launcher or
        worker.
        """
        if role == "daemon":
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(self.daemon.pid) if self.daemon else None
                return [] if process is None or gone(process) else [process]
            return []
        descendants, above = [], list(self.agents().values())
        if role == "agent":
            return above
        below: dict[int, list[psutil.Process]] = {}
        for process in psutil.Process(self.cluster.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                below.setdefault(process.ppid(), []).append(process)
        for depth in range(1, 6):
            above = [one for process in above for one in below.get(process.pid, [])]
            for process in above:
                with contextlib.suppress(psutil.Error):
                    if _role(process, depth) == role:
                        descendants.append(process)
        return descendants


def _role(process: psutil.Process, depth: int) -> str:
    words = " ".join(process.cmdline())
    if process.name().startswith("job.py") or "job.py" in words:
        return "worker"
    if depth == 1:
        return "supervisor"
    if depth == 2 and " warm " in words:
        return "fork server"
    return "launcher"
