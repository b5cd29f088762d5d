"""The head node: the daemon as it is, its store in memory, and its end of the network.

Killed, the daemon leaves what it had committed. It may be killed between two steps, and within one:
when it is about to tell what it has just saved; and between two messages of one turn, when nothing
that follows from the first is saved.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.pool import StaticPool

from malletrain.config.model import Config, parse_config
from malletrain.daemon import main as daemon_main
from malletrain.daemon.site.backends import Backend
from malletrain.protocol import messages, wire
from malletrain.store.session import Session
from malletrain.store.store import Store
from scavenger.interface import Scavenger
from tests.dst.loop import Killed, Process, VirtualLoop
from tests.dst.network import Connection, Network

CONFIG = """
[daemon]
state_dir = "{folder}/state"
listen = "tcp://127.0.0.1:7443"
metrics_listen = ""
agent_timeout = "3 s"
adopt_wait = "3 s"
request_rate = 1000000.0
{users}
[scheduler]
kind = "slurm"
poll_interval = "{poll}"
{submit_as}
[jobs]
join_timeout = "6 s"
drain_timeout = "3 s"
warmup_timeout = "20 s"
stop_grace = "1 s"
log_wait = "3 s"
max_tries = 3
[allocation]
min_interval = "3 s"
release_after = "{give_back}"
lease_wait = "15 s"
[nodes]
keep_warm = "0 s"
[profiling]
enabled = {profiles}
when_worth = false
min_time = "1 s"
max_time = "3 s"
max_profile = "{max_profile:g} s"
rescale_timeout = "5 s"
silence = "4 s"
lease_patience = "1 s"
patience = "3 s"
donor_quiet = "2 s"
observe_every = "3 s"
"""
MAX_PROFILE_S = 15.0
SUBMIT_AS = """[scheduler.slurm]
submit_as = ["sudo", "-u", "{owner}"]"""
GRACE_S = 6.0
TURN_S = 0.02
"""Messages that arrive within this time are handled in one turn, seconds."""
_MEMORY = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
_ENGINE = create_engine("sqlite://", creator=lambda: _MEMORY, poolclass=StaticPool)
event.listen(_ENGINE, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
_EMPTY = sqlite3.connect(":memory:", check_same_thread=False)
"""One database and one engine for all worlds of a process: statements are compiled once."""


def empty_store() -> Store:
    """The store of a site that begins."""
    if not _EMPTY.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        _MEMORY.execute("PRAGMA foreign_keys=ON")
        Session(_ENGINE).migrate()
        _MEMORY.backup(_EMPTY)
    _EMPTY.backup(_MEMORY)
    return Store(Session(_ENGINE))


class VirtualTransport:
    """The daemon's :class:`malletrain.daemon.server.transport.Transport` over the virtual
    network.
    """

    def __init__(
        self, network: Network, process: Process, lookup: Callable[[str], str | None], head: Head
    ) -> None:
        self._network, self._process, self._lookup = network, process, lookup
        self._head = head
        self._receiver: Any = None
        self._due = False
        self._waiting: list[tuple[Connection, list[bytes]]] = []

    def bind(self, listen: str) -> str:
        self._network.listens(self)
        return listen

    def serve(self, receiver: Any) -> None:
        self._receiver = receiver
        self._head.listens = True
        self._soon()

    def hold(self) -> None:
        self._receiver = None
        self._head.listens = False

    connection_bytes = 0

    def end_unreadable(self, filling: bool) -> None:
        """Do nothing: in this network every message is complete."""

    def stop(self) -> None:
        if self._process.alive and self._network.server is self:
            self._network.head_gone()

    def send(self, peer: bytes, message: messages.Message) -> bool:
        self._process.check()
        self._head.about_to_send(message)
        if _MEMORY.in_transaction:
            self._head.failed(f"{short(message)} is told before it is saved")
        connection = self._network.connections.get(peer)
        if connection is None or not connection.there:
            return False
        connection.down.put(wire.encode(message))
        self._head.say("daemon", f"tells {connection.caller.place} {short(message)}")
        return True

    # --- the network's side ---

    def admits(self, key: bytes) -> bool:
        return self._process.alive and self._lookup(key.decode()) is not None

    def broken(self, connection: Connection) -> None:
        self._in_process(lambda: self._receiver and self._receiver.disconnected(connection.peer))

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        self._waiting.append((connection, frames))
        self._in_process(self._soon)

    def _in_process(self, call: Callable[[], object]) -> None:
        if self._process.alive:
            with contextlib.suppress(Killed):
                self._process.context.copy().run(call)

    def _soon(self) -> None:
        """Take in what waits, in a moment: more may come until then."""
        if not self._due and self._receiver is not None:
            self._due = True
            self._head.loop.call_later(self._head.turn_s(), self._turn)

    def _turn(self) -> None:
        self._due = False
        if self._receiver is None:
            return
        with contextlib.suppress(Killed), self._receiver.batch():
            for number in range(len(self._waiting)):
                self._head.about_to_hear(number)
                self._take(*self._waiting.pop(0))
                if self._receiver is None:
                    return

    def _take(self, connection: Connection, frames: list[bytes]) -> None:
        key = connection.caller.key.decode()
        who = self._lookup(key)
        if who is None:
            self._receiver.withdrawn(connection.peer)
            return
        message = wire.decode(frames)
        self._head.say("daemon", f"hears {connection.caller.place} {short(message)}")
        self._head.heard(message)
        self._receiver.message(connection.peer, who, message, 0, key)


def short(message: Any) -> str:
    """A message in the trace: nothing that differs between two runs of one seed."""
    assignment = getattr(message, "assignment", None)
    parts = [type(message).__name__]
    if assignment is not None:
        parts.append(f"{assignment.job} {assignment.phase} {assignment.generation}")
    for name in ("job", "op", "generation", "group_rank", "group_size", "number", "samples"):
        value = getattr(message, name, None)
        if value not in (None, "", ()):
            parts.append(f"{name}={value}")
    return " ".join(parts)


class Head:
    """The daemon, from start to start. ``profiles``: whether it profiles jobs; ``users``: the list
    of those whom it serves besides the one who runs it.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        network: Network,
        scheduler: Scavenger,
        folder: Path,
        say: Callable[[str, str], None],
        failed: Callable[[str], None],
        profiles: bool = False,
        users: Path | None = None,
    ) -> None:
        self.loop, self._rng, self.network = loop, rng, network
        self._scheduler, self.say, self.failed = scheduler, say, failed
        self.config: Config = parse_config(
            CONFIG.format(
                folder=folder,
                poll=rng.choice(("1 s", "2 s", "4 s")),
                give_back=rng.choice(("1 s", "3 s")),
                users=f'users = "{users}"' if users else "",
                submit_as=SUBMIT_AS if users else "",
                profiles=str(profiles).lower(),
                max_profile=MAX_PROFILE_S,
            )
        )
        self.store = empty_store()
        self.process: Process | None = None
        self.daemon: Any = None
        self.restarts = 0
        self.listens = False
        """The daemon started last takes messages: it has read what was before."""
        self.sends_left: int | None = None
        """Number of messages that it still sends before it is killed; None: it is not killed."""
        self.turns_left: int | None = None
        """Number of turns of several messages that it still handles before it is killed in one;
        None: it is not killed."""
        self.heard: Callable[[Any], None] = lambda message: None
        """Called with every message that it receives."""

    @property
    def components(self) -> Any:
        """The daemon's parts; None while there are none."""
        return self.daemon.components if self.alive and self.daemon is not None else None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def deaf(self) -> bool:
        """Whether it receives no messages: it is dead, or still starts."""
        return not (self.alive and self.listens)

    def start(self) -> None:
        """The service manager starts the daemon."""
        assert not self.alive
        self.restarts += 1
        self.listens = False
        self.sends_left = self.turns_left = None
        backend = Backend(
            lambda config: self._scheduler,
            lambda config: None,
            lambda config: iter(()),
            lambda config: GRACE_S,
            lambda config: iter(()),
        )
        self.store = Store(Session(_ENGINE))

        async def main() -> int:
            with self._transport():
                self.daemon = daemon_main.Daemon(self.config, self.store, backend)
            return await self.daemon.serve()

        self.say("head", "the daemon starts")
        self.daemon = None
        self.process = self.loop.spawn("daemon", main, self._ended)

    @contextlib.contextmanager
    def _transport(self) -> Iterator[None]:
        real = daemon_main.Transport
        process = self.process

        def make(keys: Any, lookup: Callable[[str], str | None]) -> Any:
            assert process is not None
            return VirtualTransport(self.network, process, lookup, self)

        daemon_main.Transport = make  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            daemon_main.Transport = real  # type: ignore[misc]

    def _ended(self, task: Any) -> None:
        if self.loop.ending:
            return
        if task.cancelled() or task.exception() is not None:
            self.failed(f"the daemon ended: {task.exception() if not task.cancelled() else ''!r}")
        self.process = None

    def about_to_send(self, message: messages.Message) -> None:
        """Kill it here, when that is wished for."""
        if self.sends_left is None or isinstance(message, messages.Alive):
            return
        if self.sends_left == 0:
            self.say("fault", f"the daemon is killed before it tells {short(message)}")
            self.kill()
            raise Killed("daemon")
        self.sends_left -= 1

    def turn_s(self) -> float:
        """How long messages are waited for that are of one turn with the first."""
        return self._rng.choice((0.0, 0.1, 1.0)) * TURN_S

    def about_to_hear(self, number: int) -> None:
        """Kill it here, between two messages of a turn, when that is wished for."""
        if number != 1 or self.turns_left is None:
            return
        if self.turns_left == 0:
            self.say("fault", "the daemon is killed between two messages of a turn")
            self.kill()
            raise Killed("daemon")
        self.turns_left -= 1

    def kill(self) -> None:
        """SIGKILL to the daemon: what it has committed is left."""
        if self.process is not None:
            self.process.kill()
        self.network.head_gone()
        self.daemon = None
