"""The agents: :class:`malletrain.agent.session.NodeAgent` as it is, one for each lease, and what
takes the place of sockets, processes and the node's own clock under it.

The one place that replaces names in the product's modules, and puts them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import structlog
import zmq

from malletrain.agent import jobrun, link, session
from malletrain.agent.config import AgentConfig
from malletrain.config.model import Config
from malletrain.core.settings import ControllerSettings
from malletrain.daemon import compose
from malletrain.daemon import main as daemon_main
from malletrain.daemon.api.notices import Notices
from malletrain.daemon.site.settings import controller_settings
from malletrain.identity.keys import user_name
from malletrain.protocol import env
from malletrain.protocol import worker_channel as local
from tests.dst.head import GRACE_S
from tests.dst.launcher import VirtualFlags, VirtualLauncher
from tests.dst.live import LiveNodeLauncher
from tests.dst.loop import CURRENT, Process, VirtualLoop
from tests.dst.machine import Machine, MachineLease, Node
from tests.dst.network import Network
from tests.dst.restart import RestartLauncher
from tests.dst.service import ServiceNodeLauncher
from tests.dst.sockets import DealerSocket, RouterSocket, virtual_zmq
from tests.dst.training import Trainings
from tests.waiting import NEVER_S

WATCH_EVERY_S, STEP_S = 1.0, 0.2
"""The rhythm of the daemon and of agents that only look whether something is due: half the usual,
for twice the seeds.
"""
REJECTED_S = 15.0
LAUNCHERS: dict[str, type[VirtualLauncher]] = {
    "restart": RestartLauncher,
    "live": LiveNodeLauncher,
    "service": ServiceNodeLauncher,
}


async def _nobody_told(notices: Notices) -> None:
    """No job's owner wishes to be told of anything; to look whether costs a fifth of a day."""
    await asyncio.Event().wait()


def _impatient(config: Config) -> ControllerSettings:
    """A node that a job has rejected is tried again sooner than at a site; the solver's time limit
    is real time, and may not decide.
    """
    settings = controller_settings(config)
    planning = replace(settings.planning, time_limit_s=NEVER_S)
    return replace(settings, planning=planning, rejected_s=REJECTED_S)


class VirtualWorkers:
    """Replaces the agent's :class:`malletrain.agent.reports.WorkerSocket`."""

    on_ready: Callable[[], None] | None = None

    def __init__(self, path: str) -> None:
        self.path = path
        self._waiting: list[local.Datagram] = []

    def take(self, datagram: local.Datagram) -> None:
        self._waiting.append(datagram)
        if self.on_ready is not None:
            self.on_ready()

    def receive(self) -> list[local.Datagram]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def close(self) -> None:
        self.on_ready = None


class NoForkServers:
    """Replaces :class:`malletrain.agent.fork_servers.NodeForkServers` for an agent without warm
    servers, and kills the remaining processes of its node.
    """

    def __init__(self, *args: Any) -> None:
        self._process = CURRENT.get()
        self._agent = VirtualAgent.of(self._process)

    def settled(self) -> tuple[str, ...]:
        return ()

    def memory_bytes(self) -> int:
        return 0

    def warm_up(self, message: Any) -> None:
        """Do nothing: no server is kept warm."""

    def step(self, busy: bool) -> None:
        """Do nothing: there is no server."""

    leave = reap = lambda self: None

    def sweep(self, limit_s: float) -> None:
        for launcher in list(self._agent.node.launchers):
            launcher.kill()

    def has_job_processes(self) -> bool:
        return bool(self._agent.node.launchers)


class NoProber:
    """Trials of the network come to nothing here."""

    def __init__(self, send: Any) -> None:
        pass

    def begin(self, message: Any) -> None:
        """Nobody answers."""

    def close(self) -> None:
        """Do nothing: there is no server."""


class VirtualAgent:
    """The agent of one lease."""

    _of: dict[int, VirtualAgent] = {}  # noqa: RUF012

    def __init__(self, site: Site, lease: MachineLease, node: Node) -> None:
        self.lease, self.node, self._site = lease, node, site
        self.directory = site.folder / lease.request.id
        self.workers: VirtualWorkers | None = None
        self.router: RouterSocket | None = None
        self.flags: dict[str, VirtualFlags] = {}
        self.sockets: list[DealerSocket] = []
        request = lease.request
        config = AgentConfig(
            endpoint="tcp://127.0.0.1:7443",
            lease=request.id,
            node=node.name,
            host=node.name,
            run_dir=None,
            server_key=request.argv[request.argv.index("--server-key") + 1],
            secret_key=request.env[env.LEASE_KEY],
            grace_s=GRACE_S,
        )

        async def main() -> int:
            assert CURRENT.get() is not None
            VirtualAgent._of[id(CURRENT.get())] = self
            return await session.NodeAgent(config).run()

        self.process: Process = site.loop.spawn(f"agent {request.id}", main, self._ended)

    @classmethod
    def of(cls, process: Process | None) -> VirtualAgent:
        return cls._of[id(process)]

    def _ended(self, task: Any) -> None:
        VirtualAgent._of.pop(id(self.process), None)
        if self._site.loop.ending:
            return
        if task.cancelled() or task.exception() is not None:
            error = None if task.cancelled() else task.exception()
            self._site.failed(f"the agent of {self.lease.request.id} ended: {error!r}")
        self.process.kill()
        self._site.say(f"agent {self.lease.request.id}", "ends")
        self._site.machine.agent_ended(self.lease)

    def kill(self) -> None:
        """SIGKILL to the agent."""
        if self.process.alive:
            self.process.kill()
            for socket in self.sockets:
                socket.hang_up(orderly=False)
            self._site.machine.agent_ended(self.lease)


class Site:
    """The agents of a world."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        network: Network,
        folder: Path,
        say: Callable[[str, str], None],
        failed: Callable[[str], None],
    ) -> None:
        self.loop, self._rng, self.network = loop, rng, network
        self.folder, self.say, self.failed = folder, say, failed
        self.machine: Machine
        self.trainings: Trainings
        self._launchers = 0

    def start_agent(self, lease: MachineLease, node: Node) -> VirtualAgent:
        """The lease begins on its node."""
        return VirtualAgent(self, lease, node)

    # --- what takes the place of I/O under the agent ---

    def _socket(self, kind: int) -> Any:
        agent = VirtualAgent.of(CURRENT.get())
        if kind == zmq.ROUTER:
            agent.router = RouterSocket(self.network, self._rng)
            return agent.router
        socket = DealerSocket(self.network, self._rng, agent.node.name)
        agent.sockets.append(socket)
        return socket

    def _workers(self, path: str) -> VirtualWorkers:
        agent = VirtualAgent.of(CURRENT.get())
        agent.workers = VirtualWorkers(path)
        return agent.workers

    def _directory(self, *_: Any) -> Path:
        directory = VirtualAgent.of(CURRENT.get()).directory
        directory.mkdir()
        return directory

    def _flags(self, path: str) -> VirtualFlags:
        flags = VirtualAgent.of(CURRENT.get()).flags[path] = VirtualFlags(path)
        return flags

    def _launcher(
        self, assign: Any, place: Any, servers: Any, flags: str, log_dir: Path, log: Path
    ) -> VirtualLauncher:
        agent = VirtualAgent.of(CURRENT.get())
        assert agent.router is not None
        workers = agent.workers
        assert workers is not None
        owner = agent.lease.request.owner or user_name()
        if assign.spec.owner != owner:
            self.failed(f"a lease of {owner} runs {assign.job}, which is {assign.spec.owner}'s")
        process = agent.process
        self._launchers += 1
        log.write_text(f"launcher {self._launchers}\n")

        def take(datagram: local.Datagram) -> None:
            if process.alive:
                workers.take(datagram)

        return LAUNCHERS[assign.spec.mode](
            assign,
            agent.node,
            self.trainings,
            agent.router,
            take,
            agent.flags[flags],
            self._launchers,
        )

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While the world runs."""
        nothing: Any = lambda *args, **kwargs: None  # noqa: E731
        zmq_here = virtual_zmq(self._socket)
        names: list[tuple[Any, str, Any]] = [
            (session, "zmq", zmq_here),
            (link, "zmq", zmq_here),
            (session, "private_directory", self._directory),
            (session, "private_folder", nothing),
            (session, "socket_directory", lambda directory: directory),
            (session, "WorkerSocket", self._workers),
            (session, "NodeForkServers", NoForkServers),
            (session, "Prober", NoProber),
            (session, "become_subreaper", nothing),
            (session, "sweep", lambda: NoForkServers().sweep(0.0)),
            (session, "networks", tuple),
            (session, "allowed_cores", lambda environment: 4),
            (session, "interface_of", lambda *args: ""),
            (jobrun, "FlagsWriter", self._flags),
            (jobrun, "start_launcher", self._launcher),
            (link, "resident_bytes", lambda: 0),
            (link, "why_no_answer", lambda endpoint: "it is not there"),
            (link, "random", SimpleNamespace(random=self._rng.random)),
            # The memory is that of the tests.
            (daemon_main, "freeze_objects", nothing),
            (
                daemon_main,
                "MemoryTrim",
                lambda: SimpleNamespace(swollen=lambda accounted: False, update=nothing),
            ),
            (daemon_main, "WATCH_EVERY_S", WATCH_EVERY_S),
            (Notices, "run", _nobody_told),
            (compose, "controller_settings", _impatient),
            (session, "STEP_S", STEP_S),
            *clocks(self.loop),
        ]
        before = [(module, name, getattr(module, name)) for module, name, _ in names]
        config = structlog.get_config()
        agents = logging.getLogger("malletrain.agent")
        handler = _Complaints(self.failed)
        level, propagate = agents.level, agents.propagate
        try:
            for module, name, value in names:
                setattr(module, name, value)
            structlog.configure(processors=[self._logged])
            agents.addHandler(handler)
            agents.setLevel(logging.ERROR)
            agents.propagate = False
            yield
        finally:
            agents.removeHandler(handler)
            agents.setLevel(level)
            agents.propagate = propagate
            structlog.configure(**config)
            for module, name, value in before:
                setattr(module, name, value)

    def _logged(self, logger: Any, method: str, event: dict[str, Any]) -> Any:
        if method in ("error", "critical") and not self.loop.ending:
            self.failed(f"the daemon logs: {event}")
        raise structlog.DropEvent


class _Complaints(logging.Handler):
    """Turns errors that an agent logs into failures of the test."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._failed(f"an agent logs: {record.getMessage()} {error!r}")


def clocks(loop: VirtualLoop) -> Iterator[tuple[ModuleType, str, Any]]:
    """Every name in the daemon's and the agent's modules that tells the time."""
    here = SimpleNamespace(
        monotonic=loop.time, time=loop.wall, perf_counter=loop.time, thread_time=lambda: 0.0
    )
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(("malletrain.", "scavenger.", "allocator", "jpa")):
            continue
        for attribute, real in (
            ("time", time),
            ("monotonic", time.monotonic),
            ("perf_counter", time.perf_counter),
            ("thread_time", time.thread_time),
        ):
            if getattr(module, attribute, None) is real:
                value = here if attribute == "time" else getattr(here, attribute)
                yield module, attribute, value
