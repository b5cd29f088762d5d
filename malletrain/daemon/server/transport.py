"""The daemon's one socket: a ZeroMQ ROUTER under CURVE, on the event loop.

Decides which connections are admitted, which messages are valid
(:mod:`malletrain.protocol.messages`), and what happens to an invalid one: its sender gets an error,
and it is counted. :mod:`malletrain.daemon.server.sender_limits` decides how many messages of a
connection may wait. The transport does not interpret messages.

:class:`ZapAuthenticator` authenticates connections: ZeroMQ sends it the key of each (ZAP, ZeroMQ
RFC 27). A known key is admitted; each message then carries that key as its ``User-Id``. After a
restart thousands of agents connect at once, so it does no more than this; pyzmq's authenticator for
asyncio, which also looks up domains and logs each connection, takes twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from malletrain.daemon.server.sender_limits import (
    ReceiveQueue,
    Unread,
    end_connection,
    max_message_bytes,
    sender_of,
)
from malletrain.identity.keys import KeyPair
from malletrain.protocol import messages, wire
from malletrain.protocol.fault_points import FaultPoint, reached

ENDPOINT = "inproc://zeromq.zap.01"
VERSION, MECHANISM = b"1.0", b"CURVE"
KEY_BYTES = 32
ZAP_FRAMES = 7
"""Number of frames of a request: version, request id, domain, address, identity, mechanism, key."""

_AT_ONCE = int(zmq.DONTWAIT)
_MORE = int(zmq.SNDMORE)
"""Flags as plain integers, because combining flags takes as long as sending."""


class ZapAuthenticator:
    """Answers the authentication requests of one ZeroMQ context. Create it before the sockets of
    the context are bound.

    Args:
        context: the context whose connections are authenticated.
        lookup: returns the owner of a public key (z85); None for an unknown key.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], lookup: Callable[[str], str | None]
    ):
        self._lookup = lookup
        self.socket = context.socket(zmq.REP)
        """Becomes readable when a connection waits to be authenticated."""
        self.socket.linger = 0
        self.socket.bind(ENDPOINT)

    def admit(self, seconds: float) -> bool:
        """Authenticate waiting connections for ``seconds`` at most. Return whether more may
        wait.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                request = self._receive()
            except zmq.Again:
                return False
            *first, last = self._answer(request)
            for frame in first:
                self.socket.send(frame, _MORE)
            self.socket.send(last)
        return True

    def _receive(self) -> list[bytes]:
        """Read the frames of a request. Raises Again if there is none."""
        frame: Any = self.socket.recv(_AT_ONCE, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self.socket.recv(_AT_ONCE, copy=False)
            frames.append(frame.bytes)
        return frames

    def close(self) -> None:
        """Stop authenticating connections."""
        self.socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        valid = (
            len(request) == ZAP_FRAMES
            and (request[0], request[5]) == (VERSION, MECHANISM)
            and len(request[6]) == KEY_BYTES
        )
        key = z85.encode(request[6]) if valid else b""
        if valid and self._lookup(key.decode("ascii")) is not None:
            return [VERSION, request_id, b"200", b"OK", key, b""]
        return [VERSION, request_id, b"400", b"Unknown key", b"", b""]


HARD_LIMIT_BYTES = 4 * wire.MAX_MESSAGE_BYTES
"""Maximum size of a frame. ZeroMQ disconnects a peer that sends a larger one before the frame is in
memory.
"""

IO_THREADS = 3
"""Number of threads of ZeroMQ, which do the handshakes. Thousands of agents that connect at once
would occupy a single thread (0.8 ms each), and messages of connected agents would wait.
"""

BACKLOG = 4096
"""Maximum number of connections that wait to be accepted; the system may allow fewer
(net.core.somaxconn). After a restart all agents connect within a second, and an agent that the
system refuses retries with growing delays.
"""

TURN_S = 0.01
"""Time for which messages are handled before other work of the loop has its turn, seconds. So a
sender of many messages does not delay the messages that are already here.
"""
CROWDED_TURN_S = 0.2 * TURN_S
"""The same time while a sender sends faster than its messages are handled. Others need two turns to
get an answer.
"""
MIN_MOVE_S, MAX_MOVE_S = 0.2 * TURN_S, TURN_S
"""Minimum and maximum time for which messages are moved into the queue after a turn that was too
short, seconds. Within these bounds it is the time that all other work has taken since. Moving a
message is faster than handling it, and the socket's own queue has no limit in bytes.
"""
CONNECTION_BYTES = 64 * 1024
"""Memory of libzmq and the daemon for a connection with few messages: queues and buffers."""
UNREAD_EVERY_S = 60.0
"""Interval between two checks of the bytes received over each connection while memory does not
grow, seconds.
"""
FRAMES = 3
"""Number of frames of a message: its sender's identity, the protocol's tag, the body."""

_MORE_AT_ONCE = int(zmq.DONTWAIT | zmq.SNDMORE)
"""Both flags at once."""

log = structlog.get_logger(__name__)


class ReceivedMessage(NamedTuple):
    """A received message."""

    key: str
    """Public key of its sender, z85; empty if it has none."""
    frames: list[Any]
    """Its first FRAMES frames."""
    number: int
    """Number of all of its frames."""
    size: int
    """Size of ``frames``, bytes."""


class Receiver(Protocol):
    """Receives messages from the transport. Called from the loop."""

    def batch(self) -> AbstractContextManager[None]:
        """Return the context for messages that are read together."""

    def message(self, peer: bytes, who: str, message: Any, size: int, key: str) -> None:
        """Receive a valid message.

        Args:
            peer: address of the connection, for the answer.
            who: owner of the key, such as ``lease:<id>``.
            message: the decoded message.
            size: its size, bytes.
            key: public key of the sender, z85.

        """

    def invalid(self, sentence: str) -> None:
        """Receive the report of invalid bytes. ``sentence`` says why they are invalid."""

    def withdrawn(self, peer: bytes) -> None:
        """Receive the report of a message from a peer whose key has become invalid since it
        connected.
        """

    def dropped(self, who: str, number: int) -> None:
        """Receive the report of messages that were dropped unread, because too many of ``who``
        wait. ``number``: number of messages.
        """

    def disconnected(self, peer: bytes) -> None:
        """Receive the report that a connection ended over which a peer had sent messages."""


class Transport:
    """Receives and sends messages of known peers.

    Args:
        keys: keys of the daemon.
        lookup: returns the owner of a public key (z85): ``lease:<id>``, ``client:<user>``; None for
            an unknown key. Not called before :meth:`serve`.
    """

    def __init__(self, keys: KeyPair, lookup: Callable[[str], str | None]) -> None:
        self._lookup = lookup
        self._receiver: Receiver | None = None
        self._receive_scheduled = self._watch_scheduled = False
        self._endpoint = ""
        """The bound address; empty if there is none."""
        self._context = zmq.Context(io_threads=IO_THREADS)
        # On the loop, not in a thread of its own: while the loop is busy such a thread runs only
        # every 5 ms, but it is needed several times per agent, and thousands of agents connect at
        # once.
        self._authenticator = ZapAuthenticator(self._context, lookup)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_server = True
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 10_000
        self._socket.backlog = BACKLOG
        self._socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # each takes 20 µs per connection
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._monitor = self._open_monitor()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received: ReceiveQueue[ReceivedMessage] = ReceiveQueue()
        self._turn_was_short = False
        """Whether the last turn was too short."""
        self._moved_at = 0.0
        """Time at which messages were last moved into the queue."""
        self._peer_of_connection: dict[int, bytes] = {}
        """Descriptor of a connection → peer that has sent messages over it."""
        self._unread, self._unread_due = Unread(), 0.0

    def _open_monitor(self) -> zmq.Socket[bytes]:
        """Return a socket for the events of connections. Its queue has no limit: with one, ZeroMQ's
        thread would wait for space with a lock that ``disable_monitor`` needs, and a flood of
        connections would keep the daemon from ending.
        """
        address = "inproc://connections"
        self._socket.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 0
        monitor.connect(address)
        return monitor

    def bind(self, listen: str) -> str:
        """Bind to ``listen`` (port 0: any free port). Return the bound address. Connections wait
        until :meth:`serve`, because the keys of the leases may not be known yet, and ZeroMQ does
        not retry after it was refused. Raises OSError with a sentence.
        """
        address = listen[:-2] + ":*" if listen.endswith(":0") else listen
        # A socket on [::] takes connections of IPv4 too.
        self._socket.ipv6 = "[" in listen
        try:
            self._socket.bind(address)
        except zmq.ZMQError as e:
            raise OSError(
                f"The daemon cannot listen on {listen}: {e.strerror}. Choose another address in "
                "[daemon] listen."
            ) from None
        reached(FaultPoint.DAEMON_BOUND)
        self._endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        return self._endpoint

    def serve(self, receiver: Receiver) -> None:
        """Start to receive."""
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._schedule_receive)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._loop.add_reader(self._authenticator.socket.fileno(), self._admit)
        # ZeroMQ's descriptors are edge-triggered: there is no event for earlier messages.
        self._loop.call_soon(self._receive)
        self._loop.call_soon(self._watch)
        self._loop.call_soon(self._admit)

    def hold(self) -> None:
        """Stop receiving. Connections and messages wait until the next :meth:`serve`."""
        self._remove_readers()
        self._receiver = None

    def _remove_readers(self) -> None:
        if self._loop:
            for socket in (self._socket, self._monitor, self._authenticator.socket):
                self._loop.remove_reader(socket.fileno())

    def stop(self) -> None:
        """Close everything. Messages that are not sent yet are lost (agents and clients repeat
        their requests).
        """
        self._remove_readers()
        self._receiver = None
        if self._endpoint:  # strangers that connect all the time would keep the monitor's lock
            self._socket.unbind(self._endpoint)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._authenticator.close()
        self._context.term()

    def send(self, peer: bytes, message: messages.Message) -> bool:
        """Send a message to ``peer``. Return False if it was not sent: the peer is not connected
        or does not read, or this end is closed. An answer that cannot be encoded (for example
        because it is too large) is replaced by an error.
        """
        if self._socket.closed:  # the ends of its connections are still reported
            return False
        try:
            frames = wire.encode(message)
        except wire.WireError as e:
            log.error("message not sent", reason=str(e))
            if not (isinstance(message, messages.Reply) and message.ok):
                return False
            frames = wire.encode(
                messages.Reply(
                    message.id, False, error=f"The answer cannot be sent. {e}", code="internal"
                )
            )
        try:
            self._socket.send(peer, _MORE_AT_ONCE)
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE_AT_ONCE)
            self._socket.send(frames[-1], _AT_ONCE)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            # ZeroMQ's descriptor is edge-triggered: sending may have consumed the event of a
            # message that has arrived meanwhile.
            self._schedule_receive()
        return True

    def _schedule_watch(self) -> None:
        """Schedule one :meth:`_watch` in the loop's next round."""
        if self._loop and not self._watch_scheduled:
            self._watch_scheduled = True
            self._loop.call_soon(self._watch)

    def _schedule_receive(self) -> None:
        """Schedule one :meth:`_receive` in the loop's next round."""
        if self._loop and not self._receive_scheduled:
            self._receive_scheduled = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._receive_scheduled = False
        if self._receiver is None:
            return
        # The monitor wakes its reader only once. A lost wakeup would leave events unread, and
        # the memory of ended connections would count.
        self._watch()
        with self._receiver.batch():
            more = self._read_batch(self._receiver)
        if more:
            self._schedule_receive()

    def _read_batch(self, receiver: Receiver) -> bool:
        """Handle waiting messages for one turn. Return whether there may be more. Messages that
        were too many for the previous turn wait in the queue, which serves their senders in turn.
        """
        if self._turn_was_short:
            self._move_to_queue(receiver)
        until = time.monotonic() + (CROWDED_TURN_S if self._received.crowded else TURN_S)
        while time.monotonic() < until:
            received = self._received.take() if self._received else self._read_message(receiver)
            if received is None:
                self._turn_was_short = False
                return False
            self._handle(received, receiver)
            if self._receiver is None:
                return False
        self._turn_was_short = True
        return True

    def _move_to_queue(self, receiver: Receiver) -> None:
        """Move messages from the socket into the queue."""
        now = time.monotonic()
        until = now + min(max(now - self._moved_at, MIN_MOVE_S), MAX_MOVE_S)
        dropped: Counter[str] = Counter()
        while time.monotonic() < until and (received := self._read_message(receiver)) is not None:
            who = self._lookup(received.key)
            if not self._received.put(sender_of(received.key, who), received, received.size):
                dropped[who or ""] += 1
        for sender, number in dropped.items():
            receiver.dropped(sender, number)
        self._moved_at = time.monotonic()

    def _read_message(self, receiver: Receiver) -> ReceivedMessage | None:
        """Read a message from the socket; None if there is none or the socket is closed."""
        try:
            frames, number, size = self._frames()
        except zmq.ZMQError:
            return None
        peer = frames[0].bytes
        descriptor = frames[-1].get(zmq.SRCFD)
        self._unread.read(descriptor, size, number - 1)
        before = self._peer_of_connection.get(descriptor, peer)
        self._peer_of_connection[descriptor] = peer
        if before != peer:  # its connection ended, and another has the descriptor already
            receiver.disconnected(before)
        key = str(frames[-1].get("User-Id")) if number > 1 else ""
        return ReceivedMessage(key, frames, number, sum(map(len, frames)))

    def _frames(self) -> tuple[list[Any], int, int]:
        """Read one message. Return its first FRAMES frames, the number of all frames, and the size
        of the body in bytes. A message with more frames is invalid, and the others are dropped.
        Raises ZMQError if there is no message.
        """
        frame: Any = self._socket.recv(_AT_ONCE, copy=False)
        frames, number, size = [frame], 1, 0
        while frame.more:
            frame = self._socket.recv(_AT_ONCE, copy=False)
            number += 1
            size += len(frame)
            if number <= FRAMES:
                frames.append(frame)
        return frames, number, size

    def _handle(self, received: ReceivedMessage, receiver: Receiver) -> None:
        peer, who = received.frames[0].bytes, self._lookup(received.key) if received.key else None
        if who is None:
            receiver.withdrawn(peer)
            return
        try:
            frames = [frame.bytes for frame in received.frames[1:]]
            message = wire.decode(frames, received.number - 1, max_message_bytes(who))
        except wire.WireError as e:
            receiver.invalid(f"{who}: {e}")
            self.send(peer, messages.Error(str(e)))
            return
        receiver.message(peer, who, message, received.size, received.key)

    @property
    def connection_bytes(self) -> int:
        """Memory of the connections whose peers have sent messages, in addition to waiting
        messages. Connections without a valid key are not counted, so that they do not raise the
        limit of memory.
        """
        return CONNECTION_BYTES * self._unread.heard

    def end_unreadable(self, filling: bool) -> None:
        """End connections that have sent too much of incomplete messages. Call it twice a second.
        ``filling``: whether memory grows, so that connections are checked now and not once a
        minute.
        """
        now = time.monotonic()
        if self._receiver is None or not (filling or now >= self._unread_due):
            return
        self._unread_due = now + UNREAD_EVERY_S
        self._watch()
        for descriptor in self._unread.too_much(now):
            peer = self._peer_of_connection.get(descriptor)
            self._unread.ended(descriptor)
            with contextlib.suppress(OSError):
                end_connection(descriptor)
            history = "which had spoken before" if peer else "over which nothing else came"
            self._receiver.invalid(
                f"An incomplete message filled memory; its connection, {history}, was closed."
            )

    def _admit(self) -> None:
        """Authenticate waiting connections."""
        if self._receiver is not None and self._authenticator.admit(TURN_S) and self._loop:
            self._loop.call_soon(self._admit)

    def _watch(self) -> None:
        """Handle waiting events of the monitor, as many as one turn allows: strangers can connect
        faster than their connections are counted.
        """
        self._watch_scheduled = False
        until = time.monotonic() + TURN_S
        while not self._monitor.closed and self._monitor.poll(0):
            if time.monotonic() >= until:
                self._schedule_watch()
                return
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unread.began(descriptor, time.monotonic())
                continue
            self._unread.ended(descriptor)
            peer = self._peer_of_connection.pop(descriptor, None)
            if peer is not None and self._receiver is not None:
                self._receiver.disconnected(peer)
