"""Thousands of simulated agents in one process. Each uses the real protocol over a socket of its
own, as :mod:`malletrain.agent.link` does, and answers as the launcher of its job would.

This module decides how an agent answers; :mod:`benchmarks.load_site` decides when nodes come and
go. No process of a job is started. The agent of group rank 0 reports its job's progress once per
second.
"""

from __future__ import annotations

import heapq
import random
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import zmq
from msgspec.structs import replace

from malletrain import __version__
from malletrain.agent.link import hello_again_s
from malletrain.protocol import messages, wire
from malletrain.protocol.phases import AssignmentPhase

REPORT_S = 1.0
"""Interval of the reports of a job's progress, seconds."""
SAMPLES_A_S = 100.0
"""Throughput of one node, samples/s."""
CONNECT_MS = 5000
"""Time after which an agent without a connection tries again, seconds, as its link does."""
COMMANDS = (
    messages.Assign,
    messages.Round,
    messages.Drain,
    messages.Abort,
    messages.Release,
)
"""Messages of the daemon to an agent that follow from a decision."""


@dataclass(frozen=True)
class Lease:
    """Start options of an agent."""

    id: str
    node: str
    endpoint: str
    server_key: str
    secret: str


@dataclass(frozen=True)
class Seen:
    """A message that an agent sent or received. ``at``: monotonic clock, which all processes of
    this machine share, seconds.
    """

    at: float
    what: str
    node: str
    job: str = ""
    generation: int = 0


@dataclass(slots=True)
class SimulatedAgent:
    """One node."""

    lease: Lease
    socket: Any
    up: bool = False
    """Whether it is connected."""
    welcome: bool = False
    """Whether the daemon knows it."""
    boot: str = ""
    heartbeat_s: float = 1.0
    job: str = ""
    phase: AssignmentPhase = AssignmentPhase.STARTING
    generation: int = 0
    rank: int = -1
    size: int = 0
    steps: int = 0
    began: float = 0.0
    report_at: float = 0.0
    greeting: messages.Hello | None = None
    greetings: int = 0
    """Number of messages over this connection."""
    shipping: set[str] = field(default_factory=set)

    def assignment(self) -> messages.Assignment | None:
        """Return the content of its Hello."""
        return messages.Assignment(self.job, self.phase, self.generation) if self.job else None


class Fleet:
    """All agents of one process. ``pipe`` leads to the site."""

    def __init__(self, pipe: Connection, seed: int) -> None:
        self._pipe = pipe
        self._random = random.Random(seed)
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 20_000)
        self._epoll = select.epoll()
        self._epoll.register(pipe.fileno(), select.EPOLLIN)
        self._agents: dict[str, SimulatedAgent] = {}
        self._by_fd: dict[int, SimulatedAgent] = {}
        self._due: list[tuple[float, int, str, str, int]] = []
        self._count = 0
        self._seen: list[Seen] = []
        self._ended: list[str] = []
        self._sent = {"beats": 0, "reports": 0, "hellos": 0}
        self._tell_at = 0.0

    # --- the loop ---

    def run(self) -> None:
        """Run until the site sends stop, or is gone."""
        try:
            while self._turn():
                pass
        except (EOFError, ConnectionError, BrokenPipeError):
            pass
        finally:
            for agent in list(self._agents.values()):
                self._close(agent)
            self._context.term()
            self._epoll.close()

    def _turn(self) -> bool:
        now = time.monotonic()
        until = min(self._due[0][0] if self._due else now + 0.2, self._tell_at or now + 0.2)
        for fd, _ in self._epoll.poll(max(0.0, min(0.2, until - now))):
            if fd == self._pipe.fileno():
                while self._pipe.poll():
                    if not self._obey(self._pipe.recv()):
                        return False
            elif (agent := self._by_fd.get(fd)) is not None:
                self._look(agent)
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, kind, node, mark = heapq.heappop(self._due)
            agent = self._agents.get(node)
            if agent is not None and id(agent.socket) == mark:
                getattr(self, kind)(agent, now)
        if now >= self._tell_at:
            self._tell_at = now + 0.2
            welcome = sum(agent.welcome for agent in self._agents.values())
            self._pipe.send((welcome, self._ended, self._seen, dict(self._sent)))
            self._ended, self._seen = [], []
        return True

    def _later(self, at: float, kind: str, agent: SimulatedAgent) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, kind, agent.lease.node, id(agent.socket)))

    def _obey(self, order: tuple[Any, ...]) -> bool:
        match order:
            case ("start", leases):
                for lease in leases:
                    self._start(lease)
            case ("leave", nodes, in_s):
                for agent in self._of(nodes):
                    self._note("leaving", agent)
                    self._say(agent, messages.Leaving(in_s, "preempted"))
            case ("vanish", nodes):
                for agent in self._of(nodes):
                    self._close(agent)
            case ("finish", job):
                for agent in list(self._agents.values()):
                    if agent.job == job:
                        self._phase(agent, AssignmentPhase.SUCCEEDED)
            case _:
                return False
        return True

    def _of(self, nodes: Iterable[str]) -> list[SimulatedAgent]:
        return [self._agents[node] for node in nodes if node in self._agents]

    def _note(self, what: str, agent: SimulatedAgent, job: str = "", generation: int = 0) -> None:
        self._seen.append(
            Seen(time.monotonic(), what, agent.lease.node, job or agent.job, generation)
        )

    # --- one agent ---

    def _start(self, lease: Lease) -> None:
        if (before := self._agents.get(lease.node)) is not None:
            self._close(before)
        socket = self._context.socket(zmq.DEALER)
        socket.curve_secretkey = lease.secret.encode()
        socket.curve_publickey = zmq.curve_public(lease.secret.encode())
        socket.curve_serverkey = lease.server_key.encode()
        socket.linger, socket.immediate = 0, 1
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 1000
        socket.connect_timeout = CONNECT_MS
        agent = self._agents[lease.node] = SimulatedAgent(lease, socket)
        self._by_fd[socket.fileno()] = agent
        self._epoll.register(socket.fileno(), select.EPOLLIN | select.EPOLLET)
        socket.connect(lease.endpoint)
        self._look(agent)

    def _close(self, agent: SimulatedAgent) -> None:
        """End the agent, as if its process were gone."""
        fd = agent.socket.fileno()
        self._epoll.unregister(fd)
        del self._by_fd[fd], self._agents[agent.lease.node]
        agent.socket.close(200)
        self._ended.append(agent.lease.id)

    def _look(self, agent: SimulatedAgent) -> None:
        """Receive messages, and check the connection."""
        while not agent.socket.closed:
            events = agent.socket.getsockopt(zmq.EVENTS)
            up = bool(events & zmq.POLLOUT)
            if up != agent.up:
                agent.up, agent.welcome, agent.greeting = up, False, None
                agent.greetings = 0
                if up:
                    self._hello(agent, time.monotonic())
                    continue
            if not events & zmq.POLLIN:
                return
            self._take(agent, wire.decode(agent.socket.recv_multipart(zmq.DONTWAIT)))

    def _say(self, agent: SimulatedAgent, message: messages.Message) -> None:
        try:
            agent.socket.send_multipart(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            agent.up = agent.welcome = False

    def _hello(self, agent: SimulatedAgent, now: float) -> None:
        if agent.welcome or not agent.up:
            return
        self._sent["hellos"] += 1
        hello = messages.Hello(
            agent.lease.node,
            agent.lease.id,
            "127.0.0.1",
            1,
            assignment=agent.assignment(),
            shipping=tuple(sorted(agent.shipping)),
            version=__version__,
        )
        again, agent.greeting = hello == agent.greeting, hello
        self._say(agent, replace(hello, again=True) if again else hello)
        agent.greetings += 1
        self._later(now + hello_again_s(agent.greetings), "_hello", agent)
        self._look(agent)  # sending may have cleared the readiness of the socket

    def _beat(self, agent: SimulatedAgent, now: float) -> None:
        if agent.welcome:
            self._sent["beats"] += 1
            self._say(agent, messages.Heartbeat(agent.boot, 50_000_000))
            self._look(agent)
        self._later(now + agent.heartbeat_s, "_beat", agent)

    def _report(self, agent: SimulatedAgent, now: float) -> None:
        over = agent.rank != 0 or agent.phase is not AssignmentPhase.RUNNING
        if over or now < agent.report_at:  # a repeated message about an earlier round
            return
        agent.report_at = now + REPORT_S
        agent.steps += 1
        if agent.welcome:
            self._sent["reports"] += 1
            wall, batch = time.time(), SAMPLES_A_S * agent.size
            self._say(
                agent,
                messages.Progress(
                    agent.job,
                    agent.generation,
                    0,
                    1,
                    agent.steps * batch,
                    agent.steps,
                    batch,
                    agent.began,
                    wall,
                ),
            )
            self._look(agent)
        self._later(agent.report_at, "_report", agent)

    def _phase(self, agent: SimulatedAgent, phase: AssignmentPhase) -> None:
        agent.phase = phase
        if phase is AssignmentPhase.SUCCEEDED:
            self._note("succeeded", agent)
        self._say(agent, messages.Phase(messages.Assignment(agent.job, phase, agent.generation)))

    def _take(self, agent: SimulatedAgent, message: Any) -> None:
        """Answer a message of the daemon."""
        if isinstance(message, COMMANDS):
            self._note(
                type(message).__name__, agent, message.job, getattr(message, "generation", 0)
            )
        match message:
            case messages.Welcome():
                first = not agent.boot
                agent.boot, agent.heartbeat_s = message.boot, message.heartbeat_s
                agent.welcome, agent.greeting = True, None
                if first:
                    self._note("welcome", agent)
                    wait = self._random.random() * agent.heartbeat_s
                    self._later(time.monotonic() + wait, "_beat", agent)
            case messages.WhoAreYou():
                if agent.welcome:
                    agent.welcome, agent.greeting = False, None
                    self._hello(agent, time.monotonic())
            case messages.Assign():
                if agent.job != message.job:
                    agent.job, agent.generation, agent.rank = message.job, 0, -1
                    agent.shipping.add(message.job)
                    self._phase(agent, AssignmentPhase.READY)
            case messages.Round():
                self._joined(agent, message)
            case messages.Drain():
                if message.number and agent.job == message.job:
                    self._note("drained", agent)
                    self._say(
                        agent,
                        messages.Drained(
                            message.job, message.generation, True, number=message.number
                        ),
                    )
            case messages.Release():
                if agent.job == message.job:
                    agent.job, agent.rank, agent.generation = "", -1, 0
                self._say(agent, messages.Released(message.job))
                agent.shipping.discard(message.job)
                self._say(agent, messages.LogsShipped(message.job))
            case messages.Goodbye():
                self._close(agent)
            case _:
                pass

    def _joined(self, agent: SimulatedAgent, message: messages.Round) -> None:
        """Begin a round: the first member serves its store, and all run."""
        if agent.job != message.job:
            return
        agent.generation, agent.rank = message.generation, message.group_rank
        agent.size, agent.steps, agent.began = message.group_size, 0, time.time()
        if agent.rank == 0 and not message.store_host:
            self._note("store", agent, generation=message.generation)
            up = messages.StoreUp(message.job, message.generation, "127.0.0.1", 29500)
            self._say(agent, up)
        self._phase(agent, AssignmentPhase.RUNNING)
        if agent.rank == 0:
            agent.report_at = time.monotonic() + self._random.random() * REPORT_S
            self._later(agent.report_at, "_report", agent)


def fleet_process(pipe: Connection, seed: int) -> None:
    """Run a process of agents."""
    Fleet(pipe, seed).run()
