"""The daemon's one socket: a ZeroMQ ROUTER under CURVE, on the event loop.

Decides which connections are admitted (known keys), what a message is
(:mod:`malletrain.protocol.messages`), and what happens to an invalid one: its sender gets an error,
it is counted, nothing else. :mod:`malletrain.daemon.receive_queue` decides how much of a connection
may wait. The transport does not know what messages mean.
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
from zmq.utils.monitor import recv_monitor_message

from malletrain.daemon.receive_queue import ReceiveQueue, max_message_bytes, sender_of
from malletrain.daemon.unread import Unread, end_connection
from malletrain.daemon.zap_authenticator import ZapAuthenticator
from malletrain.identity.keys import KeyPair
from malletrain.protocol import messages, wire
from malletrain.protocol.fault_points import FaultPoint, reached

HARD_LIMIT_BYTES = 4 * wire.MAX_MESSAGE_BYTES
"""A peer that sends a larger frame is cut off by ZeroMQ before the frame is in memory."""

IO_THREADS = 3
"""Threads of ZeroMQ, which do the work of the keys: of one, thousands of agents that come at once
take all (0.8 ms each), and those that are there are not heard meanwhile.
"""

BACKLOG = 4096
"""Connections that may wait to be taken; the system may allow fewer (net.core.somaxconn). After a
restart all agents come within a second, and whom the system turns away tries again ever later.
"""

TURN_S = 0.01
"""How long messages are handled before others of the loop's work have their turn: who sends very
much does not keep those waiting whose messages are here already.
"""
CROWDED_TURN_S = 0.2 * TURN_S
"""The same while somebody sends more than is handled: to be answered takes others two turns."""
LEAST_TAKE_IN_S, MOST_TAKE_IN_S = 0.2 * TURN_S, TURN_S
"""How long messages are taken in after a turn that was not long enough: as long as all else has
taken since, within these bounds. To take one in is quicker than to handle it, and what is left in
the socket has no bound in bytes.
"""
CONNECTION_BYTES = 64 * 1024
"""What libzmq and the daemon keep of a connection over which little is said: queues and buffers."""
UNREAD_EVERY_S = 60.0
"""Time between two looks at what came over each connection while memory does not fill."""
FRAMES = 3
"""Of a message: its sender's identity, the protocol's tag, the body."""

_AT_ONCE, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
"""As plain numbers: to put flags together costs as much as to send."""

log = structlog.get_logger(__name__)


class Came(NamedTuple):
    """A message as it came in."""

    key: str
    """Of its sender, z85; empty where it has none."""
    frames: list[Any]
    """The first FRAMES of it."""
    number: int
    """Of all of its frames."""
    size: int
    """Bytes of what is kept."""


class Receiver(Protocol):
    """Who hears what comes in. Called from the loop."""

    def batch(self) -> AbstractContextManager[None]:
        """Around the messages that are taken in at one go."""

    def message(self, peer: bytes, who: str, message: Any, size: int, key: str) -> None:
        """A valid message, of so many bytes; ``peer`` addresses the answer, ``who`` is what its key
        (z85) says.
        """

    def invalid(self, sentence: str) -> None:
        """Something came that is no message; the sentence says why."""

    def withdrawn(self, peer: bytes) -> None:
        """A peer speaks whose key is not valid any more, although it was when it connected."""

    def dropped(self, who: str, number: int) -> None:
        """So many messages were let go unread: too much of ``who`` waits."""

    def disconnected(self, peer: bytes) -> None:
        """The connection of a peer that has spoken ended."""


class Transport:
    """Receives and sends messages of known peers.

    Args:
        lookup: z85 public key → who that is (``lease:<id>``, ``client:<user>``), ``None`` for a
            client that is unknown. Not called before :meth:`serve`.
    """

    def __init__(self, keys: KeyPair, lookup: Callable[[str], str | None]) -> None:
        self._lookup = lookup
        self._receiver: Receiver | None = None
        self._due = False
        self._context = zmq.Context(io_threads=IO_THREADS)
        # On the loop, not in a thread of its own: while the loop is busy such a thread is let in
        # every 5 ms, several times for each agent, and thousands of agents come at once.
        self._door = ZapAuthenticator(self._context, lookup)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_server = True
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 10_000
        self._socket.backlog = BACKLOG
        self._socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # each costs 20 µs of each connection
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received: ReceiveQueue[Came] = ReceiveQueue()
        self._behind = False
        """The last turn was not long enough."""
        self._took_in = 0.0
        """When messages were last taken in."""
        self._of_connection: dict[int, bytes] = {}
        """Descriptor of a connection → the peer that was heard over it."""
        self._unread, self._unread_due = Unread(), 0.0

    def bind(self, listen: str) -> str:
        """Bind to ``listen`` (port 0: any); returns the address bound. Who comes waits until
        :meth:`serve`: ZeroMQ does not try again where it was refused once, and the keys of the
        leases may not be known yet. Raises OSError with a sentence.
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
        return str(self._socket.get_string(zmq.LAST_ENDPOINT))

    def serve(self, receiver: Receiver) -> None:
        """Begin to receive."""
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._soon)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._loop.add_reader(self._door.socket.fileno(), self._admit)
        # ZeroMQ's descriptors are edge-triggered: what came before is not told of again.
        self._loop.call_soon(self._receive)
        self._loop.call_soon(self._watch)
        self._loop.call_soon(self._admit)

    def hold(self) -> None:
        """Receive nothing for now; who and what comes in waits until :meth:`serve`."""
        self._look_away()
        self._receiver = None

    def _look_away(self) -> None:
        if self._loop:
            for socket in (self._socket, self._monitor, self._door.socket):
                self._loop.remove_reader(socket.fileno())

    def stop(self) -> None:
        """Close everything; messages not yet sent are lost (agents and clients ask again)."""
        self._look_away()
        self._receiver = None
        # ZeroMQ's thread waits for room when nobody reads the ends of connections, and holds the
        # lock meanwhile that disable_monitor wants.
        self._watch()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._door.close()
        self._context.term()

    def send(self, peer: bytes, message: messages.Message) -> bool:
        """Send to ``peer``; False when it is not connected (or does not read), or this end is
        closed: then it hears nothing. An answer that is none of the protocol (it is too large, say)
        is sent as an error.
        """
        if self._socket.closed:  # connections that end with it are still told of
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
            self._socket.send(peer, _MORE)
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE)
            self._socket.send(frames[-1], _AT_ONCE)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            # ZeroMQ's descriptor is edge-triggered: sending may have swallowed the edge of a
            # message that came in meanwhile.
            self._soon()
        return True

    def _soon(self) -> None:
        """Receive in the loop's next turn; once, however often it is asked for."""
        if self._loop and not self._due:
            self._due = True
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        self._due = False
        if self._receiver is None:
            return
        # The monitor wakes its reader once, whatever comes after: a wakeup lost would leave ends
        # unread, and ZeroMQ's thread stops for good when there is no room for more of them.
        self._watch()
        with self._receiver.batch():
            more = self._read_batch(self._receiver)
        if more:
            self._soon()

    def _read_batch(self, receiver: Receiver) -> bool:
        """Handle what is there, for a while; whether there may be more. What was too much for the
        turn before waits here meanwhile, and its senders take turns.
        """
        if self._behind:
            self._take_in(receiver)
        until = time.monotonic() + (CROWDED_TURN_S if self._received.crowded else TURN_S)
        while time.monotonic() < until:
            came = self._received.take() if self._received else self._came(receiver)
            if came is None:
                self._behind = False
                return False
            self._one(came, receiver)
            if self._receiver is None:
                return False
        self._behind = True
        return True

    def _take_in(self, receiver: Receiver) -> None:
        """Let messages wait here, and not in the socket."""
        now = time.monotonic()
        until = now + min(max(now - self._took_in, LEAST_TAKE_IN_S), MOST_TAKE_IN_S)
        let_go: Counter[str] = Counter()
        while time.monotonic() < until and (came := self._came(receiver)) is not None:
            who = self._lookup(came.key)
            if not self._received.put(sender_of(came.key, who), came, came.size):
                let_go[who or ""] += 1
        for sender, number in let_go.items():
            receiver.dropped(sender, number)
        self._took_in = time.monotonic()

    def _came(self, receiver: Receiver) -> Came | None:
        """A message; None: none is there, or the socket is closed."""
        try:
            frames, number, size = self._frames()
        except zmq.ZMQError:
            return None
        peer = frames[0].bytes
        descriptor = frames[-1].get(zmq.SRCFD)
        self._unread.read(descriptor, size, number - 1)
        before = self._of_connection.get(descriptor, peer)
        self._of_connection[descriptor] = peer
        if before != peer:  # its connection ended, and another has the descriptor already
            receiver.disconnected(before)
        key = str(frames[-1].get("User-Id")) if number > 1 else ""
        return Came(key, frames, number, sum(map(len, frames)))

    def _frames(self) -> tuple[list[Any], int, int]:
        """Those of one message, FRAMES at most; how many it has, and of how many bytes. What has
        more is none of ours, and the others are let go as they come. Raises ZMQError where there
        is none.
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

    def _one(self, came: Came, receiver: Receiver) -> None:
        peer, who = came.frames[0].bytes, self._lookup(came.key) if came.key else None
        if who is None:
            receiver.withdrawn(peer)
            return
        try:
            frames = [frame.bytes for frame in came.frames[1:]]
            message = wire.decode(frames, came.number - 1, max_message_bytes(who))
        except wire.WireError as e:
            receiver.invalid(f"{who}: {e}")
            self.send(peer, messages.Error(str(e)))
            return
        receiver.message(peer, who, message, came.size, came.key)

    @property
    def connection_bytes(self) -> int:
        """What all connections take for being there whose peers have spoken: it is no message that
        waits. Those of nobody, whom no key lets in, do not make room for more.
        """
        return CONNECTION_BYTES * self._unread.heard

    def end_unreadable(self, filling: bool) -> None:
        """End connections over which very much came of messages whose end does not. To be called
        twice a second; ``filling``: memory does, so that each is looked at now and not once a
        minute.
        """
        now = time.monotonic()
        if self._receiver is None or not (filling or now >= self._unread_due):
            return
        self._unread_due = now + UNREAD_EVERY_S
        self._watch()
        for descriptor in self._unread.too_much(now):
            peer = self._of_connection.get(descriptor)
            self._unread.ended(descriptor)
            with contextlib.suppress(OSError):
                end_connection(descriptor)
            heard = "which had spoken before" if peer else "over which nothing else came"
            self._receiver.invalid(
                f"A message without an end filled memory; its connection, {heard}, was ended."
            )

    def _admit(self) -> None:
        """Let those in who ask, if their keys are known."""
        if self._receiver is not None and self._door.admit(TURN_S) and self._loop:
            self._loop.call_soon(self._admit)

    def _watch(self) -> None:
        while not self._monitor.closed and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unread.began(descriptor, time.monotonic())
                continue
            self._unread.ended(descriptor)
            peer = self._of_connection.pop(descriptor, None)
            if peer is not None and self._receiver is not None:
                self._receiver.disconnected(peer)
