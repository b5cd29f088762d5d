"""The faults of benchmarks/chaos.py to a site's processes, connections and disks, and their
frequencies. The caller decides when they occur.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.chaos_site import ChaosSite
from malletrain.protocol.fault_points import FaultPoint

SHORT, LONG = (0.02, 0.3), (0.2, 1.2)
"""Duration of the faults that stop something, as parts of the silence after which an agent is lost:
of what others wait for, and of what nobody needs at once.
"""


class Faults:
    """Name → function and relative frequency of each fault."""

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
        "hang a worker": 2,
        "disk full at the daemon": 2,
    }

    OF_TRAININGS = (
        *("kill fork server", "stop fork server"),
        *("disk full at a worker", "hang a worker"),
    )
    """Faults that do not apply to services."""

    def __init__(self, site: ChaosSite, dice: random.Random, trainings: bool) -> None:
        self._site, self._dice = site, dice
        self._weights = {
            kind: weight
            for kind, weight in self.WEIGHTS.items()
            if trainings or kind not in self.OF_TRAININGS
        }

    def strike(self) -> str:
        """Inject a fault. Return its name; empty if there was nothing to inject it into."""
        kind = self._dice.choices(list(self._weights), list(self._weights.values()))[0]
        verb, _, role = kind.partition(" ")
        site, dice = self._site, self._dice
        if verb in ("kill", "stop"):
            victims = site.processes_of(role)
            if not victims:
                return ""
            self._signal(dice.choice(victims), verb, role)
        elif kind == "preemption with notice":
            agents = site.processes_of("agent")
            if not agents:
                return ""
            with contextlib.suppress(psutil.Error):
                dice.choice(agents).send_signal(signal.SIGTERM)
        elif kind == "connections cut":
            site.way.cut()
        elif kind == "connections delayed":
            site.way.delay(dice.uniform(0.05, 1.0))
            self._later(LONG, lambda: site.way.delay(0.0))
        elif kind == "connections half-open":
            site.way.half_open(True)
            self._later(LONG, lambda: site.way.half_open(False))
        elif kind == "scheduler outage":
            cluster = psutil.Process(site.cluster.pid)
            cluster.suspend()
            self._later(LONG, cluster.resume)
        elif kind == "disk full at a worker":
            site.arm(FaultPoint.WORKER_WRITTEN, "raise")
        elif kind == "hang a worker":
            return kind if self._hang() else ""
        else:
            self._fill_disk()
        return kind

    def _signal(self, process: psutil.Process, verb: str, role: str) -> None:
        with contextlib.suppress(psutil.Error):
            if verb == "kill":
                process.kill()
                return
            process.suspend()
            self._later(SHORT if role == "worker" else LONG, process.resume)

    def _hang(self) -> bool:
        """Let a worker of some training wait for ever in its next step, in Python or in a system
        call. Return whether there is a training.
        """
        folders = set()
        for process in self._site.processes_of("worker"):
            with contextlib.suppress(psutil.Error):
                folders.add(process.cwd())
        trainings = sorted(folder for folder in folders if not folder.endswith("-service"))
        if trainings:
            new = Path(self._dice.choice(trainings)) / "hang"
            new.write_text(self._dice.choice(["", "on disk"]))
        return bool(trainings)

    def _fill_disk(self) -> None:
        """Prevent the daemon from writing more than the first bytes of any file, until it ends or
        for some seconds.
        """
        assert self._site.daemon is not None
        pid, none = self._site.daemon.pid, resource.RLIM_INFINITY
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, none))
            self._later(SHORT, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (none, none)))

    def _later(self, within: tuple[float, float], call: Callable[[], object]) -> None:
        self._site.end_fault_in(self._dice.uniform(*within) * self._site.silence_s, call)

    def end(self) -> None:
        """End all processes of a role."""
        self._site.end_due_faults()
        (self._site.faults / FaultPoint.WORKER_WRITTEN.name).unlink(missing_ok=True)
