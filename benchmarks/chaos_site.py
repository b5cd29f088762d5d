"""The site of benchmarks/chaos.py: an embedded cluster, a daemon that is started again whenever it
ends, as a service manager does it, and everything that can be done to their processes.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.chaos_network import Way
from malletrain.protocol.fault_points import FaultPoint
from tests.integration.faults import FaultySite
from tests.ports import free_ports

CONFIG = """
give_back_after = "0 s"
rejected_for = "5 s"
"""
OUTER, INNER = "127.0.0.2", "127.0.0.1"
SHORT_S, LONG_S = (0.2, 3.0), (2.0, 12.0)
"""How long something stands still that others wait for, and that nobody needs at once."""


class ChaosSite(FaultySite):
    """``nodes`` virtual nodes; agents and clients reach the daemon by a way that can be cut."""

    def __init__(self, root: Path, nodes: int, running: int) -> None:
        self.port, self._reserved = free_ports(1)
        super().__init__(root, nodes, grace_s=10.0, config=CONFIG)
        text = self.config.read_text()
        text = text.replace('agent_timeout = "60 s"', 'agent_timeout = "10 s"')
        text = text.replace('adopt_wait = "60 s"', 'adopt_wait = "10 s"')
        text = text.replace('drain_timeout = "1 h"', 'drain_timeout = "20 s"')
        limits = f'max_running = {running}\nstarvation = "20 s"\nturns_apart = 1.0\n'
        text = text.replace("max_tries = 10000\n", "max_tries = 10000\n" + limits)
        text = text.replace(
            'metrics_listen = ""',
            f'metrics_listen = ""\nlisten = "tcp://{INNER}:{self.port}"\nadvertise = "{OUTER}"',
        )
        self.config.write_text(text)
        self.way = Way(OUTER, INNER, self.port)
        self.starts = 0

    def look_after_daemon(self) -> None:
        """Start the daemon again if it has ended."""
        if self.daemon is None or self.daemon.poll() is not None:
            self.starts += 1
            self.launch_daemon()

    def close(self) -> None:
        """End everything; AssertionError when a process is left."""
        try:
            self.stop()
        finally:
            self.way.close()
            self._reserved.close()

    # --- who there is ---

    def below_agents(self, depth: int) -> Iterator[psutil.Process]:
        """The processes so many generations below the agents."""
        found = list(self.agents().values())
        for _ in range(depth):
            below: list[psutil.Process] = []
            for process in found:
                with contextlib.suppress(psutil.Error):
                    below += process.children()
            found = below
        yield from found

    def of_role(self, role: str) -> list[psutil.Process]:
        """The processes of a role: daemon, agent, supervisor, fork server, launcher or worker."""
        if role == "daemon":
            with contextlib.suppress(psutil.Error):
                return [psutil.Process(self.daemon.pid)] if self.daemon else []
            return []
        if role == "agent":
            return list(self.agents().values())
        found = []
        for depth in range(1, 6):
            for process in self.below_agents(depth):
                with contextlib.suppress(psutil.Error):
                    if _role(process, depth) == role:
                        found.append(process)
        return found


def _role(process: psutil.Process, depth: int) -> str:
    words = " ".join(process.cmdline())
    if process.name().startswith("job.py") or "job.py" in words:
        return "worker"
    if depth == 1:
        return "supervisor"
    if depth == 2 and " warm " in words:
        return "fork server"
    return "launcher"


class Faults:
    """What can be done to the site, each by its name and how often beside the others."""

    WEIGHTS = {  # noqa: RUF012
        "kill worker": 10,
        "kill launcher": 3,
        "kill fork server": 1,
        "kill supervisor": 1,
        "kill agent": 2,
        "kill daemon": 6,
        "stop worker": 6,
        "stop launcher": 3,
        "stop fork server": 1,
        "stop supervisor": 1,
        "stop agent": 3,
        "stop daemon": 4,
        "connections cut": 5,
        "connections delayed": 3,
        "connections half-open": 3,
        "preemption with notice": 3,
        "scheduler outage": 3,
        "disk full at a worker": 3,
        "disk full at the daemon": 2,
    }

    def __init__(self, site: ChaosSite, dice: random.Random) -> None:
        self._site, self._dice = site, dice
        self._due: list[tuple[float, Callable[[], object]]] = []

    def strike(self) -> str:
        """Do one of them; says which, "" when there was nobody to do it to."""
        kind = self._dice.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))[0]
        verb, _, role = kind.partition(" ")
        site, dice = self._site, self._dice
        if verb in ("kill", "stop"):
            victims = site.of_role(role)
            if not victims:
                return ""
            self._signal(dice.choice(victims), verb, role)
        elif kind == "preemption with notice":
            agents = site.of_role("agent")
            if not agents:
                return ""
            with contextlib.suppress(psutil.Error):
                dice.choice(agents).send_signal(signal.SIGTERM)
        elif kind == "connections cut":
            site.way.cut()
        elif kind == "connections delayed":
            site.way.delay(dice.uniform(0.05, 1.0))
            self._later(LONG_S, lambda: site.way.delay(0.0))
        elif kind == "connections half-open":
            site.way.half_open(True)
            self._later(LONG_S, lambda: site.way.half_open(False))
        elif kind == "scheduler outage":
            cluster = psutil.Process(site.cluster.pid)
            cluster.suspend()
            self._later(LONG_S, cluster.resume)
        elif kind == "disk full at a worker":
            site.arm(FaultPoint.WORKER_WRITTEN, "raise")
        else:
            self._fill_disk()
        return kind

    def _signal(self, process: psutil.Process, verb: str, role: str) -> None:
        with contextlib.suppress(psutil.Error):
            if verb == "kill":
                process.kill()
                return
            process.suspend()
            self._later(SHORT_S if role == "worker" else LONG_S, process.resume)

    def _fill_disk(self) -> None:
        """The daemon can write to no file beyond its first bytes, until it ends of it or for some
        seconds.
        """
        assert self._site.daemon is not None
        pid, none = self._site.daemon.pid, resource.RLIM_INFINITY
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, none))
            self._later(SHORT_S, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (none, none)))

    def _later(self, within: tuple[float, float], call: Callable[[], object]) -> None:
        self._due.append((time.monotonic() + self._dice.uniform(*within), call))

    def look(self) -> bool:
        """End what is over; whether something lasts still."""
        now = time.monotonic()
        over = [call for at, call in self._due if at <= now]
        self._due = [(at, call) for at, call in self._due if at > now]
        for call in over:
            with contextlib.suppress(psutil.Error, OSError):
                call()
        return bool(self._due)

    def end(self) -> None:
        """End all of them."""
        self._due = [(0.0, call) for _, call in self._due]
        self.look()
        (self._site.faults / FaultPoint.WORKER_WRITTEN.name).unlink(missing_ok=True)
