"""One authenticated connection: messages with large bodies over a TCP socket, without copies on
either side.

A message is ``IC1\\0``, the length of its head (u32), the length of its body (u64, little endian),
the head (msgpack) and the body. Bodies are received straight into the buffer that the receiver
names for them, and sent straight from the memory they lie in. Requests carry a number and are
answered in any order; a cancelled answer that has not begun is never sent.

Whoever connects must prove that it has the key, and so must whoever answers (HMAC-SHA256 of the
protocol's name and fresh nonces, both ways). What follows is not encrypted: the key keeps other
users of shared nodes out, not listeners on the wire.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from malletrain.waits import time_limit

Buffer = bytes | bytearray | memoryview
_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"IC1\0"
MAX_HEAD = 64 << 20
_MAX_HEAD_UNKNOWN = 256
_BURST = 8
CONNECT_S = 5.0

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


class ConnectionLost(ConnectionError):
    """The other end is gone, or is not one of ours; the message says which and why."""


class KeyRefused(ConnectionLost):
    """One of both ends does not have the other's key: trying again is of no use."""


class StreamError(RuntimeError):
    """These connections cannot be used; the message says why."""


class CallFailed(RuntimeError):
    """The other end refused a request; ``code`` names why."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


class StreamConnection:
    """A socket in the running loop. ``on_message(connection, head, body)`` is called in order;
    ``allocate(head, length)`` names the memory for a body; ``on_close(connection)`` is called once.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        protocol: str,
        *,
        serves: bool,
        on_message: Callable[[StreamConnection, dict[str, Any], Any], None],
        allocate: Callable[[dict[str, Any], int], Buffer],
        on_close: Callable[[StreamConnection], None],
        peer_name: str = "a client",
    ) -> None:
        self._peer_name = peer_name
        self._protocol = protocol
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._key, self._serves = sock, key, serves
        self._on_message, self._allocate, self._on_close = on_message, allocate, on_close
        self._loop = asyncio.get_running_loop()
        self._out: deque[tuple[int, list[memoryview]]] = deque()
        self._begun = False
        self._writing = False
        self.closed = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._nonce = os.urandom(32)
        self._head = memoryview(bytearray(_HEAD.size))
        self._meta: dict[str, Any] | None = None
        self._body: Buffer = b""
        self._body_bytes = 0
        self._stage, self._want, self._filling = 0, self._head, self._head
        self._loop.add_reader(sock.fileno(), self._readable)
        if serves:
            self.send({"nonce": self._nonce})

    # --- sending ---

    def send(self, head: dict[str, Any], body: Sequence[Buffer] = (), number: int = 0) -> None:
        """Queue a message and send what goes out at once. ``number``: what :meth:`withdraw` calls
        it.
        """
        if self.closed:
            return
        meta = encode(head)
        views = [memoryview(b).cast("B") for b in body if len(b)]
        prefix = _HEAD.pack(_MAGIC, len(meta), sum(map(len, views))) + meta
        self._out.append((number, [memoryview(prefix), *views]))
        if not self._writing:
            self._flush()

    def withdraw(self, number: int) -> bool:
        """Do not send message ``number`` if it has not begun to go out. Return whether it was
        there.
        """
        for index, (queued, _) in enumerate(self._out):
            if queued == number and number and not (index == 0 and self._begun):
                del self._out[index]
                return True
        return False

    def _flush(self) -> None:
        try:
            while self._out:
                views = self._out[0][1]
                sent = self._sock.sendmsg(views)
                self._begun = True
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if views:
                    views[0] = views[0][sent:]
                else:
                    self._out.popleft()
                    self._begun = False
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError as error:
            self.close(f"the connection broke ({error.strerror})")
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    # --- receiving ---

    def _readable(self) -> None:
        try:
            for _ in range(_BURST):
                room = len(self._want)
                got = self._sock.recv_into(self._want)
                if got == 0:
                    self.close("the other end closed the connection")
                    return
                if got < room:
                    self._want = self._want[got:]
                    return
                self._filled()
                if self.closed:
                    return
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(f"the connection broke ({error.strerror})")
        except (ValueError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            self.close(f"what came is not of this protocol ({error})")

    def _filled(self) -> None:
        """What was waited for is there: go on to what follows it."""
        if self._stage == 0:
            magic, meta, self._body_bytes = _HEAD.unpack(self._head)
            authenticated = self.ready.done()
            if (
                magic != _MAGIC
                or not 0 < meta <= (MAX_HEAD if authenticated else _MAX_HEAD_UNKNOWN)
                or (not authenticated and self._body_bytes)
            ):
                raise ValueError("a wrong beginning")
            self._expect(1, memoryview(bytearray(meta)))
        elif self._stage == 1:
            self._meta = decode(self._filling)
            if self._body_bytes:
                self._body = self._allocate(self._meta, self._body_bytes)
                view = memoryview(self._body)
                if len(view) != self._body_bytes:
                    raise ValueError("a body of unexpected length")
                self._expect(2, view)
            else:
                self._body = b""
                self._whole()
        else:
            self._whole()

    def _expect(self, stage: int, buffer: memoryview) -> None:
        self._stage, self._want, self._filling = stage, buffer, buffer

    def redirect(self, buffer: Buffer | None) -> None:
        """Do not write into ``buffer`` any more: what is still to come of the body it was named for
        is thrown away.
        """
        if self._stage == 2 and buffer is not None and self._body is buffer:
            self._body = b""
            self._want = self._filling = memoryview(bytearray(len(self._want)))

    def _whole(self) -> None:
        meta, body = self._meta, self._body
        self._meta, self._body = None, b""
        self._expect(0, self._head)
        assert meta is not None
        if self.ready.done():
            self._on_message(self, meta, body)
        else:
            self._shake_hands(meta)

    # --- who is there ---

    def _proof(self, role: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._key, self._protocol.encode() + b" " + role + nonce, "sha256")

    def _shake_hands(self, message: dict[str, Any]) -> None:
        if message.get("refused") == "key":
            self.close("it does not accept this client's key", refused=True)
            return
        if not self._serves and "nonce" in message:
            self.send({"proof": self._proof(b"client", message["nonce"]), "mine": self._nonce})
            return
        role, nonce = (b"client", self._nonce) if self._serves else (b"server", self._nonce)
        if not hmac.compare_digest(message["proof"], self._proof(role, nonce)):
            if self._serves:
                self.send({"refused": "key"})
            self.close("it does not have the key", refused=True)
            return
        if self._serves:
            self.send({"proof": self._proof(b"server", message["mine"])})
        self.ready.set_result(None)

    def close(self, why: str = "closed here", *, refused: bool = False) -> None:
        """Close; everything queued is lost. ``refused``: because of a key."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._out.clear()
        if not self.ready.done():
            kind = KeyRefused if refused else ConnectionLost
            self.ready.set_exception(kind(f"No connection to {self._peer_name}: {why}."))
            self.ready.exception()  # nobody may wait for it
        self._on_close(self)


class PeerConnection:
    """A client's end: requests to one address, any number at a time, over one connection that is
    made when needed.
    """

    def __init__(self, address: str, key: bytes, protocol: str) -> None:
        self.address = address
        self._key, self._protocol = key, protocol
        self._connection: StreamConnection | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._number = 0
        self._waiting: dict[
            int, tuple[asyncio.Future[tuple[dict[str, Any], Any]], Buffer | None]
        ] = {}

    async def call(
        self, op: str, body: Sequence[Buffer] = (), into: Buffer | None = None, /, **arguments: Any
    ) -> tuple[dict[str, Any], Any]:
        """Send a request and wait for its answer: head and body. ``into``: memory for the body,
        used where its length fits.

        Cancelling the call withdraws the request. Raises ConnectionLost, and CallFailed when the
        other end refuses.
        """
        connection = self._connection
        if connection is None or connection.closed:
            connection = await self._connect()
        self._number += 1
        number = self._number
        future: asyncio.Future[tuple[dict[str, Any], Any]] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[number] = (future, into)
        connection.send({"op": op, "id": number, **arguments}, body)
        try:
            head, answer = await future
        except asyncio.CancelledError:
            if number in self._waiting and not connection.closed:
                connection.redirect(into)
                connection.send({"op": "cancel", "id": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in head:
            raise CallFailed(head["error"], head.get("code", "refused"))
        return head, answer

    async def _connect(self) -> StreamConnection:
        async with self._connecting:
            if self._connection is not None and not self._connection.closed:
                return self._connection
            host, _, port = self.address.rpartition(":")
            host = host.strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                async with time_limit(CONNECT_S):
                    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                sock.close()
                raise ConnectionLost(
                    f"Nothing answers at {self.address} ({error or 'no answer in time'})."
                ) from None
            except asyncio.CancelledError:
                sock.close()
                raise
            connection = StreamConnection(
                sock,
                self._key,
                self._protocol,
                serves=False,
                on_message=self._answered,
                allocate=self._memory,
                on_close=self._closed,
                peer_name=self.address,
            )
            try:
                async with time_limit(CONNECT_S):
                    await asyncio.shield(connection.ready)
            except asyncio.TimeoutError:
                connection.close("no handshake in time")
                raise ConnectionLost(
                    f"{self.address} does not answer as {self._protocol} does."
                ) from None
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.closed:  # between the handshake and now
                raise ConnectionLost(f"The connection to {self.address} was lost.")
            self._connection = connection
            return connection

    def _memory(self, head: dict[str, Any], length: int) -> Buffer:
        pending = self._waiting.get(head["id"])
        if pending is not None and pending[1] is not None and len(pending[1]) == length:
            return pending[1]
        return bytearray(length)

    def _answered(self, connection: StreamConnection, head: dict[str, Any], body: Any) -> None:
        pending = self._waiting.get(head["id"])
        if pending is not None and not pending[0].done():
            pending[0].set_result((head, body))

    def _closed(self, connection: StreamConnection) -> None:
        if self._connection is connection:
            self._connection = None
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"The connection to {self.address} was lost."))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()


class PeerConnections:
    """One :class:`PeerConnection` an address, for the running loop of this process.

    A forked process has the sockets and the numbers of requests of its parent: both would read each
    other's answers. So it makes connections of its own. It leaves those of its parent alone,
    because the loop that watches them is the parent's, too.
    """

    error: type[RuntimeError] = StreamError
    """Exception for connections that cannot be used."""
    owner = "client"
    """Noun of what these connections belong to, for messages."""

    def __init__(self, key: bytes, protocol: str) -> None:
        self._key, self._protocol = key, protocol
        self._peers: dict[str, PeerConnection] = {}
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._abandoned: list[dict[str, PeerConnection]] = []
        self._closed = False

    def at(self, address: str) -> PeerConnection:
        """The peer at ``address``.

        Raises:
            StreamError: these connections are closed, or belong to another loop that still runs.
        """
        if self._closed:
            raise self.error(f"This {self.owner} is closed; make another one.")
        loop = asyncio.get_running_loop()
        if os.getpid() != self._process or (self._loop is not loop and self._is_over()):
            self._abandoned.append(self._peers)  # else their sockets would be closed one by one
            self._peers, self._process, self._loop = {}, os.getpid(), loop
        elif self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise self.error(
                f"This {self.owner} is in use by another event loop; make one in each loop or "
                "thread."
            )
        if address not in self._peers:
            self._peers[address] = PeerConnection(address, self._key, self._protocol)
        return self._peers[address]

    def _is_over(self) -> bool:
        """Whether the loop of these connections has ended."""
        return self._loop is not None and self._loop.is_closed()

    def forget(self, keep: set[str]) -> None:
        """Close the connections to all addresses but ``keep``."""
        if os.getpid() != self._process or self._is_over():
            return
        for address in [a for a in self._peers if a not in keep]:
            self._peers.pop(address).close()

    def close(self) -> None:
        """Close all, and make no more."""
        self.forget(set())
        self._closed = True
