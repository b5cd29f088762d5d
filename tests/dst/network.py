"""ZeroMQ between the nodes and the head, as far as the product relies on it.

What it promises here is what ZeroMQ over TCP promises: the messages of one connection come in the
order in which they were sent, each once or never; those of different connections come in any order.
A connection that breaks loses the messages under way. Both ends notice, each at its own time; then
the socket connects again, under a new identity. A way that is cut (no packet passes) delays
everything and reports nothing, until it is mended or one of the ends gives up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from tests.dst.loop import VirtualLoop

GIVEN_UP_S = 10.0
"""The daemon's socket drops a peer that it has not heard for so long (its HEARTBEAT_TIMEOUT)."""


class Server(Protocol):
    """The end that listens."""

    def admits(self, key: bytes) -> bool:
        """Whether the owner of this public key may connect."""

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        """A message."""

    def broken(self, connection: Connection) -> None:
        """A connection has ended."""


class Caller(Protocol):
    """The end that connects."""

    place: str
    """The host it is on."""
    key: bytes

    def connected(self, connection: Connection) -> None:
        """Report that there is a connection."""

    def refused(self) -> None:
        """Report that there is no connection; another attempt is possible."""

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        """A message."""

    def broken(self, connection: Connection) -> None:
        """The connection has ended."""


class _Lane:
    """One direction of a connection."""

    def __init__(self, network: Network, place: str, deliver: Callable[[Any], None]) -> None:
        self._network, self._place, self._deliver = network, place, deliver
        self._last = 0.0
        self._waiting: deque[Any] = deque()
        self.open = True

    def put(self, what: Any) -> None:
        """Send ``what``; it arrives after everything that was sent before."""
        loop = self._network.loop
        self._last = max(self._last, loop.time() + self._network.delay_s(self._place))
        self._waiting.append(what)
        loop.call_at(self._last, self._due, context=self._network.context)

    def _due(self) -> None:
        if self.open and self._waiting and not self._network.cut(self._place):
            self._deliver(self._waiting.popleft())

    def flow(self) -> None:
        """The way is mended: what was held up comes at once."""
        self._last = max(self._last, self._network.loop.time())
        for _ in range(len(self._waiting)):
            self._due()


class Connection:
    """One connection of a caller to the server."""

    def __init__(self, network: Network, number: int, caller: Caller, server: Server) -> None:
        self.peer = number.to_bytes(5, "big")
        self.caller, self.server = caller, server
        self.network = network
        self.here = self.there = True
        """Whether the caller, and the server, take it to be up."""
        self.up = _Lane(network, caller.place, lambda frames: server.arrived(self, frames))
        self.down = _Lane(network, caller.place, lambda frames: caller.arrived(self, frames))

    def end_caller(self, in_s: float) -> None:
        """The caller's end notices that the connection is over."""
        self.network.later(in_s, self._caller_over)

    def _caller_over(self) -> None:
        self.down.open = False
        if self.network.cut(self.caller.place):  # no packet says so
            self.network.on_mend(self.caller.place, self._caller_over)
        elif self.here:
            self.here = False
            self.caller.broken(self)

    def end_server(self, in_s: float) -> None:
        """The server's end notices that the connection is over."""
        self.network.later(in_s, self._server_over)

    def _server_over(self) -> None:
        if self.network.cut(self.caller.place) and self.there:
            self.network.later(GIVEN_UP_S, self._server_gives_up)
            return
        self._server_gives_up()

    def _server_gives_up(self) -> None:
        self.up.open = False
        if self.there:
            self.there = False
            self.network.parted[self.caller.place] = self.network.loop.time()
            self.network.connections.pop(self.peer, None)
            self.server.broken(self)

    def reset(self) -> None:
        """Break the connection. Messages on the way are lost."""
        self.up.open = self.down.open = False
        delay_s = self.network.delay_s
        self.end_caller(delay_s(self.caller.place))
        self.end_server(delay_s(self.caller.place))


class Network:
    """All connections. ``say`` takes lines for the trace."""

    def __init__(self, loop: VirtualLoop, rng: Random, say: Callable[[str, str], None]) -> None:
        self.loop, self._rng, self.say = loop, rng, say
        self.server: Server | None = None
        self.connections: dict[bytes, Connection] = {}
        self.parted: dict[str, float] = {}
        """Host → when the head heard last that a connection of its has ended."""
        self.context = _nobody()
        self.usual_s = rng.choice((0.0005, 0.002, 0.02))
        """Average time of a message on its way, seconds."""
        self.slow: dict[str, float] = {}
        """Hosts whose messages take so much longer now, seconds on average."""
        self._cut: set[str] = set()
        self._mended: dict[str, list[Callable[[], None]]] = {}
        self._count = 0

    def later(self, in_s: float, call: Callable[..., None], *args: Any) -> Any:
        """Make the call of the world's own accord, of no process's."""
        return self.loop.call_later(in_s, call, *args, context=self.context)

    def delay_s(self, place: str) -> float:
        """How long the next message from or to this host takes."""
        return self._rng.expovariate(1 / (self.usual_s + self.slow.get(place, 0.0)))

    # --- ways that are cut ---

    def cut(self, place: str) -> bool:
        """Whether no packet passes between this host and the head."""
        return place in self._cut

    def cut_off(self, place: str) -> None:
        """No packet passes from now on. An end that receives nothing for long gives up."""
        self._cut.add(place)
        for connection in list(self.connections.values()):
            if connection.caller.place == place:
                self.later(GIVEN_UP_S, self._silent, connection)

    def _silent(self, connection: Connection) -> None:
        if connection.there and self.cut(connection.caller.place):
            connection.up.open = connection.down.open = False
            connection.end_server(0.0)
            connection.end_caller(0.0)

    def mend(self, place: str) -> None:
        """Packets pass again."""
        if place not in self._cut:
            return
        self._cut.discard(place)
        for connection in list(self.connections.values()):
            if connection.caller.place == place:
                connection.up.flow()
                connection.down.flow()
        for call in self._mended.pop(place, []):
            call()

    def on_mend(self, place: str, call: Callable[[], None]) -> None:
        """Once packets pass again."""
        self._mended.setdefault(place, []).append(call)

    # --- connections ---

    def dial(self, caller: Caller) -> None:
        """Try to connect, once."""
        self.later(2 * self.delay_s(caller.place), self._dialled, caller)

    def _dialled(self, caller: Caller) -> None:
        server = self.server
        if server is None or self.cut(caller.place) or not server.admits(caller.key):
            caller.refused()
            return
        self._count += 1
        connection = Connection(self, self._count, caller, server)
        self.connections[connection.peer] = connection
        caller.connected(connection)

    def listens(self, server: Server) -> None:
        """The head takes calls."""
        self.server = server

    def head_gone(self) -> None:
        """The process that listened has ended."""
        self.server = None
        for connection in list(self.connections.values()):
            connection.there = connection.up.open = False
            connection.end_caller(self.delay_s(connection.caller.place))
        self.connections.clear()


def _nobody() -> Any:
    import contextvars

    from tests.dst.loop import CURRENT

    context = contextvars.copy_context()
    context.run(CURRENT.set, None)
    return context
