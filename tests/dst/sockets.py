"""The part of pyzmq that the agent calls, over the virtual network and, to launchers, on the node.

It takes the place of the module ``zmq`` in :mod:`malletrain.agent.session` and
:mod:`malletrain.agent.link`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import zmq

from tests.dst.loop import CURRENT
from tests.dst.network import Connection, Network

CLOSING_S = 0.001
"""For which a socket may still take, and lose, what is sent after its connection has ended."""


class _Waitable:
    """Something that a poller waits for."""

    def __init__(self) -> None:
        self.agent_handlers: deque[list[bytes]] = deque()
        self.wake: Callable[[], None] | None = None
        self.closed = False

    def push(self, frames: list[bytes]) -> None:
        if not self.closed:
            self.agent_handlers.append(frames)
            if self.wake is not None:
                self.wake()

    async def recv_multipart(self) -> list[bytes]:
        while not self.agent_handlers:
            await self._arrival()
        return self.agent_handlers.popleft()

    def _arrival(self) -> asyncio.Future[None]:
        arrived = asyncio.get_running_loop().create_future()
        self.wake = lambda: arrived.done() or arrived.set_result(None)
        return arrived


class Monitor(_Waitable):
    """Monitor of a socket: gets one message for each end of a connection."""

    def close(self, linger: int = 0) -> None:
        self.closed = True


class DealerSocket(_Waitable):
    """A DEALER with ``immediate``: nothing is queued while there is no connection."""

    linger = immediate = reconnect_ivl = reconnect_ivl_max = 0
    ipv6 = False
    curve_secretkey = curve_publickey = curve_serverkey = b""

    def __init__(self, network: Network, rng: Random, place: str) -> None:
        super().__init__()
        self._network, self._rng, self.place = network, rng, place
        self._process = CURRENT.get()
        self._connection: Connection | None = None
        self._monitor: Monitor | None = None

    @property
    def key(self) -> bytes:
        return self.curve_publickey

    def get_monitor_socket(self, events: int) -> Monitor:
        self._monitor = Monitor()
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def connect(self, endpoint: str) -> None:
        self._network.dial(self)

    @property
    def _alive(self) -> bool:
        return not self.closed and (self._process is None or self._process.alive)

    def connected(self, connection: Connection) -> None:
        if self._alive:
            self._connection = connection
        else:
            connection.end_server(0.0)

    def refused(self) -> None:
        if self._alive:
            self._network.later(self._rng.uniform(0.1, 1.0), self._again)

    def _again(self) -> None:
        if self._alive:
            self._network.dial(self)

    def arrived(self, connection: Connection, frames: list[bytes]) -> None:
        if self._alive:
            self.push(frames)

    def broken(self, connection: Connection) -> None:
        if self._alive and connection is self._connection:
            if self._rng.random() < 0.5:
                self._connection = None
            else:  # ZeroMQ tells the monitor a moment before it takes no more for the connection
                self._network.later(CLOSING_S, self._closed_off, connection)
            if self._monitor is not None:
                self._monitor.push([b"disconnected"])
            self._network.later(self._rng.uniform(0.1, 0.2), self._again)

    def _closed_off(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None

    def put(self, frames: list[bytes]) -> bool:
        """Send; False where there is no connection."""
        if not self._alive or self._connection is None:
            return False
        self._connection.up.put(frames)
        return True

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> Any:
        future = asyncio.get_running_loop().create_future()
        if self.put(frames):
            future.set_result(None)
        else:
            future.set_exception(zmq.Again())
        return future

    def close(self, linger: int | None = None) -> None:
        """Close the socket: sent messages arrive first, then the end of the connection."""
        if self.closed:
            return
        self.closed = True
        self.hang_up(self._rng.random() < 0.5 and bool(linger))

    def hang_up(self, orderly: bool) -> None:
        """Handle the end of its process: the server notices it, unless the host is lost."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.here = connection.down.open = False
            delay_s = self._network.delay_s(self.place)
            connection.end_server(delay_s + (0.5 if orderly else 0.0))


class RouterSocket(_Waitable):
    """The agent's socket for launchers on its own node: fast, and without loss."""

    linger = 0

    def __init__(self, network: Network, rng: Random) -> None:
        super().__init__()
        self._network, self._rng = network, rng
        self._process = CURRENT.get()
        self._peers: dict[bytes, tuple[Callable[[list[bytes]], None], list[float]]] = {}

    def bind(self, endpoint: str) -> None:
        """Launchers find it by the agent that has it."""

    def join(self, identity: bytes, take: Callable[[list[bytes]], None]) -> None:
        """A launcher has connected."""
        self._peers[identity] = take, [0.0, 0.0]

    @property
    def alive(self) -> bool:
        """Whether somebody receives what is sent to it."""
        return not self.closed and (self._process is None or self._process.alive)

    def hear(self, identity: bytes, frames: list[bytes]) -> None:
        """A launcher says something."""
        _, last = self._peers[identity]
        self._in_order(last, 0, lambda: self.alive and self.push([identity, *frames]))

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        if frames[0] in self._peers:
            take, last = self._peers[frames[0]]
            self._in_order(last, 1, lambda: take(frames[1:]))
        return future

    def _in_order(self, last: list[float], way: int, call: Callable[[], Any]) -> None:
        loop = self._network.loop
        last[way] = max(last[way], loop.time() + self._rng.expovariate(1 / 0.001))
        loop.call_at(last[way], call, context=self._network.context)

    def close(self, linger: int | None = None) -> None:
        self.closed = True


class Poller:
    """Waits for several sockets."""

    def __init__(self) -> None:
        self._sockets: list[_Waitable] = []

    def register(self, socket: _Waitable, events: int) -> None:
        self._sockets.append(socket)

    async def poll(self, timeout_ms: int) -> list[tuple[_Waitable, int]]:
        if not any(socket.agent_handlers for socket in self._sockets):
            loop = asyncio.get_running_loop()
            ready = loop.create_future()

            def wake() -> None:
                if not ready.done():
                    ready.set_result(None)

            for socket in self._sockets:
                socket.wake = wake
            timer = loop.call_later(timeout_ms / 1000, wake)
            try:
                await ready
            finally:
                timer.cancel()
                for socket in self._sockets:
                    socket.wake = None
        else:
            await asyncio.sleep(0)
        return [(socket, zmq.POLLIN) for socket in self._sockets if socket.agent_handlers]


def virtual_zmq(make: Callable[[int], Any]) -> SimpleNamespace:
    """The module ``zmq`` as the agent sees it. ``make``: a socket of this type."""
    context = SimpleNamespace(socket=make, term=lambda: None)
    constants = {name: getattr(zmq, name) for name in dir(zmq) if name.isupper()}
    names = SimpleNamespace(
        Context=SimpleNamespace(instance=lambda: context), Poller=Poller, Socket=object
    )
    return SimpleNamespace(**constants, Again=zmq.Again, ZMQError=zmq.ZMQError, asyncio=names)
