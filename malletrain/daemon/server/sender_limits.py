"""Limits what one sender may use of the daemon. More messages are dropped, more requests wait.

Decision record 0020 (docs/adr) says why this is not left to the service manager.

Two queues serve their senders in rotation (:class:`FairQueue`):

* :class:`ReceiveQueue` holds messages that are received and not handled yet. Decides how many
  messages and bytes of one sender may wait, and which message is next. A sender is a key, over any
  number of connections; all unauthenticated peers are one sender. The daemon moves everything from
  its socket into this queue, so that this bound holds instead of ZeroMQ's, which counts messages of
  any size; and libzmq fails when a connection ends while its own queue is full
  (zeromq/libzmq#3937). All senders share a number of bytes. A sender may use as much as is free:
  one alone uses a half, each of seven an eighth, and a new sender finds as much again (the dynamic
  thresholds of Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
* :class:`RequestLimits` holds requests. Decides when a request of a user is due, and when too many
  wait, from requests per second and processor time. A client that waits for each answer, as
  ``malletrain`` does, is slowed down and never refused. The user who runs the daemon and its
  operators do not wait. Of the requests that are due, the answers that begin in one round of the
  event loop take ROUND_S together, and the loop does other work in between. Without this limit all
  requests that become due at one moment would be answered at once, and no message would be read
  meanwhile. A request does not wait if it is the only one.

:class:`LogLimits` bounds the lines that the log gets about messages that are not accepted.

:class:`Unread` detects connections that have sent data without the end of a message. libzmq
keeps an incomplete message of any length, because its limits count whole messages. Decides
which connection is closed for that. The kernel reports how many bytes a connection has received
(tcpi_bytes_received of Linux's TCP_INFO), the socket how many were read. Complete messages of all
connections are read soon, also after the daemon stood still. So a connection counts only if nothing
of it was read for STUCK_S.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Hashable
from dataclasses import dataclass
from time import thread_time
from typing import Any, Generic, TypeVar

from malletrain.protocol import wire
from scavenger.token_bucket import TokenBucket

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[S, T]):
    """Queue in which a sender with many items does not delay the next item of another sender."""

    def __init__(self) -> None:
        self._items: dict[S, deque[T]] = {}
        self._order: deque[S] = deque()

    def __bool__(self) -> bool:
        return bool(self._order)

    def put(self, sender: S, item: T) -> None:
        """Add an item behind those of its ``sender``."""
        items = self._items.get(sender)
        if items is None:
            items = self._items[sender] = deque()
            self._order.append(sender)
        items.append(item)

    def take(self) -> T:
        """Remove and return the next item. Raises IndexError if the queue is empty."""
        sender = self._order.popleft()
        items = self._items[sender]
        item = items.popleft()
        if items:
            self._order.append(sender)
        else:
            del self._items[sender]
        return item


MAX_MESSAGES = 2000
"""Maximum number of messages of one sender. Agents send a few per second, and those of a minute
wait after the daemon stood still.
"""
CAPACITY_BYTES = 24 * 1024 * 1024
"""Maximum size of the messages of all senders together, without the first GUARANTEED_BYTES of
each.
"""
GUARANTEED_BYTES = 64 * 1024
"""Size of the messages that every sender may have in the queue, even if the queue is full."""
MESSAGE_OVERHEAD_BYTES = 1024
"""Memory of a message in addition to its content."""
CROWDING_MESSAGES, CROWDING_BYTES = 64, 1024 * 1024
"""Number and size of waiting messages above either of which a sender crowds the others."""

UNAUTHENTICATED = "unauthenticated"
"""Role of keys that have not been authenticated, see :mod:`malletrain.identity.keys`."""
_MAX_BYTES = {"client": wire.MAX_REQUEST_BYTES, UNAUTHENTICATED: wire.MAX_LOGIN_BYTES}


def sender_of(key: str, who: str | None) -> str:
    """Return the sender to which messages are charged. All unauthenticated keys are one sender,
    because a new key costs nothing.

    Args:
        key: public key of the connection, z85.
        who: owner of the key, ``role:name``; None if it no longer has one.
    """
    if who is None or who.partition(":")[0] == UNAUTHENTICATED:
        return UNAUTHENTICATED
    return key


def max_message_bytes(who: str) -> int:
    """Return the maximum size of a message of ``who`` (``role:name``), bytes. Agents send logs and
    counts, which take no more memory than on the wire. The others send requests.
    """
    role = who.partition(":")[0]
    return _MAX_BYTES.get(role, wire.MAX_MESSAGE_BYTES)


@dataclass
class _Usage:
    """Number and size of the waiting messages of one sender."""

    number: int = 0
    """Number of messages."""
    size: int = 0
    """Size of the messages, bytes."""

    @property
    def crowds(self) -> bool:
        return self.number > CROWDING_MESSAGES or self.size > CROWDING_BYTES


class ReceiveQueue(Generic[T]):
    """The waiting messages of all senders.

    Args:
        max_messages: maximum number of messages of one sender.
        capacity: maximum size of the messages of all senders together, bytes.
        guaranteed: size of the messages that each sender may have in any case, bytes.
    """

    def __init__(
        self,
        max_messages: int = MAX_MESSAGES,
        capacity: int = CAPACITY_BYTES,
        guaranteed: int = GUARANTEED_BYTES,
    ) -> None:
        self._max_messages, self._free, self._guaranteed = max_messages, capacity, guaranteed
        self._usage: dict[Hashable, _Usage] = {}
        self._waiting: FairQueue[Hashable, tuple[Hashable, T, int]] = FairQueue()
        self._crowding_senders = 0
        """Number of senders that crowd the others."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def crowded(self) -> bool:
        """Whether a sender sends faster than its messages are handled."""
        return self._crowding_senders > 0

    def put(self, sender: Hashable, message: T, size: int) -> bool:
        """Add a message.

        Args:
            sender: sender to which it is charged.
            message: the message.
            size: its size, bytes.

        Returns:
            Whether it was added; False if too much of the sender waits.

        """
        size += MESSAGE_OVERHEAD_BYTES
        usage = self._usage.get(sender) or _Usage()
        limit = max(self._guaranteed, self._free - size)
        if usage.number >= self._max_messages or usage.size + size > limit:
            return False
        self._usage[sender] = usage
        self._waiting.put(sender, (sender, message, size))
        self._change(usage, 1, size)
        return True

    def take(self) -> T:
        """Remove and return the next message. Raises IndexError if the queue is empty."""
        sender, message, size = self._waiting.take()
        usage = self._usage[sender]
        self._change(usage, -1, -size)
        if not usage.number:
            del self._usage[sender]
        return message

    def _change(self, usage: _Usage, number: int, size: int) -> None:
        self._crowding_senders -= usage.crowds
        usage.number += number
        usage.size += size
        self._crowding_senders += usage.crowds
        self._free -= size


class TimedCall(Generic[T]):
    """Wraps a coroutine, to be awaited instead of it. ``seconds``: processor time of this thread
    that it has taken so far.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        error: BaseException | None = None
        while True:
            began = thread_time()
            try:
                waits_for = (
                    self._coroutine.send(None) if error is None else self._coroutine.throw(error)
                )
            except StopIteration as done:
                value: T = done.value
                return value
            finally:
                self.seconds += thread_time() - began
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as thrown:  # a cancel, which the coroutine has to receive
                error = thrown


ROUND_S = 0.005
"""Processor time for the answers that begin in one round of the loop, seconds."""
MIN_COST_S = 0.0005
"""Minimum processor time charged for an answer, seconds. Its cost is forecast from earlier
answers.
"""


MAX_WAITING = 200
"""Maximum number of waiting requests of one user; more are refused."""
MAX_WAIT_S = 30.0
"""Maximum wait of a request for the processor time of earlier ones, seconds. A request that would
wait longer is refused, else a flood of requests would be answered for hours after its end.
"""
MAX_WAITING_BYTES = 1024 * 1024
"""Maximum size of one user's waiting requests together, unless only one waits."""
BURST_S = 5.0
"""Length of the period whose turns a user can save up, seconds."""
MAX_PROCESSOR_FRACTION = 0.1
"""Maximum fraction of a processor for the answers to one user in the long run, unless single
answers take very long.
"""
MAX_DELAY_BY_ONE_S = 2.0
"""Maximum time by which one answer delays the next ones, seconds, however long it took. So a user
whose answers take longer than MAX_PROCESSOR_FRACTION of this time can exceed it.
"""
MAX_DEBT_S = 2.0 * MAX_PROCESSOR_FRACTION * MAX_WAIT_S
"""Maximum processor time that is charged to a user in advance, seconds. After a flood of expensive
requests a user is refused for half a minute, not for hours.
"""
MAX_EXPECTED_S = 0.05
"""Maximum processor time that is expected of a request, seconds."""
MAX_USERS = 10_000
"""Maximum number of users with an account."""


@dataclass
class _Account:
    """Use of the daemon by one user."""

    turns: TokenBucket
    """Requests that may be answered now; negative if requests wait."""
    processor_s: TokenBucket
    """Processor time that answers may take now, seconds; negative if requests wait."""
    waiting_bytes: int = 0
    """Size of the requests that are not answered yet."""
    usual_s: float = 0.005
    """Processor time that an answer usually takes, seconds: the forecast for waiting requests."""


@dataclass(frozen=True)
class Turn:
    """The turn of one request."""

    user: str
    """User of the request."""
    wait_s: float
    """Time until the request is due, seconds."""
    expected_s: float
    """Processor time that its answer usually takes, seconds, charged in advance. 0: the user does
    not wait.
    """
    size: int
    """Size of the request, bytes."""


class RequestLimits:
    """The turns of the requests of all users. Used from the daemon's loop.

    Args:
        rate: requests per second of one user.
        free: whether a user does not wait.
        now: returns the time, seconds.
    """

    def __init__(self, rate: float, free: Callable[[str], bool], now: Callable[[], float]) -> None:
        self._rate, self._free, self._now = rate, free, now
        self._accounts: dict[str, _Account] = {}
        self._due: FairQueue[str, tuple[asyncio.Future[None], float]] = FairQueue()
        self._remaining_s = ROUND_S
        """Processor time that remains in this round of the loop, seconds."""
        self._round_scheduled = False
        """Whether the next round is scheduled."""

    def accept(self, user: str, size: int = 0) -> Turn | None:
        """Return the turn of the next request of ``user``; None if too many wait already. ``size``:
        bytes of the request.
        """
        if self._free(user):
            return Turn(user, 0.0, 0.0, size)
        account = self._account(user)
        if account.turns.tokens <= 1.0 - MAX_WAITING:
            return None
        if account.processor_s.missing_s(account.usual_s) > MAX_WAIT_S:
            return None
        if account.waiting_bytes and account.waiting_bytes + size > MAX_WAITING_BYTES:
            return None
        account.waiting_bytes += size
        wait_s = max(account.turns.spend(), account.processor_s.spend(account.usual_s))
        return Turn(user, wait_s, account.usual_s, size)

    async def begin(self, turn: Turn) -> None:
        """Wait until the answer to a request may begin."""
        if turn.wait_s:
            await asyncio.sleep(turn.wait_s)
        if not turn.expected_s:
            return
        loop = asyncio.get_running_loop()
        if self._remaining_s > 0.0 and not self._due:
            self._spend(turn.expected_s, loop)
            return
        begins: asyncio.Future[None] = loop.create_future()
        self._due.put(turn.user, (begins, turn.expected_s))
        self._schedule_round(loop)
        await begins

    def end(self, turn: Turn, seconds: float) -> None:
        """Charge an answer. ``seconds``: its processor time."""
        account = self._account(turn.user)
        account.waiting_bytes = max(0, account.waiting_bytes - turn.size)
        if self._free(turn.user):
            return
        most_s = MAX_PROCESSOR_FRACTION * MAX_DELAY_BY_ONE_S + max(0.0, account.processor_s.tokens)
        account.processor_s.spend(min(seconds - turn.expected_s, most_s))
        usual = account.usual_s + (seconds - account.usual_s) / 5.0
        account.usual_s = min(usual, MAX_EXPECTED_S)

    def _spend(self, expected_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._remaining_s -= max(expected_s, MIN_COST_S)
        self._schedule_round(loop)

    def _schedule_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._round_scheduled:
            self._round_scheduled = True
            loop.call_soon(self._run_round, loop)

    def _run_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._round_scheduled, self._remaining_s = False, ROUND_S
        while self._due and self._remaining_s > 0.0:
            begins, expected_s = self._due.take()
            if not begins.done():  # else its client no longer waits
                self._spend(expected_s, loop)
                begins.set_result(None)

    def _account(self, user: str) -> _Account:
        account = self._accounts.pop(user, None) or _Account(
            TokenBucket(self._rate, max(1.0, self._rate * BURST_S), self._now, MAX_WAITING),
            TokenBucket(
                MAX_PROCESSOR_FRACTION, MAX_PROCESSOR_FRACTION * BURST_S, self._now, MAX_DEBT_S
            ),
        )
        self._accounts[user] = account
        if len(self._accounts) > MAX_USERS:
            self._accounts.pop(next(iter(self._accounts)))
        return account


LOG_LINES_PER_S = 0.1
"""Maximum number of log lines per second about one matter."""


class LogLimits:
    """Whether the log may have another line about a matter: one at once, then at most
    LOG_LINES_PER_S.

    Args:
        clock: returns the time, seconds, with any origin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def may_log(self, matter: str) -> bool:
        """Return whether a line may be logged now; if so, it counts. There are few matters, since
        each has a bucket for good.
        """
        bucket = self._buckets.get(matter)
        if bucket is None:
            bucket = self._buckets[matter] = TokenBucket(LOG_LINES_PER_S, 1.0, self._clock)
        return bucket.take()


MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""Maximum number of unread bytes of one such connection. The largest valid message is far
smaller.
"""
MAX_TOTAL_UNREAD_BYTES = 4 * MAX_UNREAD_BYTES
"""Maximum number of unread bytes of all of them together. The connection with the most is closed
first.
"""
STUCK_S = 2.0
"""Time without a complete message after which a connection counts, seconds."""
MAX_INTERVAL_S = 0.5
"""Maximum time between two checks that is counted, seconds. In a longer one the daemon stood
still.
"""

FRAME_BYTES = 42
"""Maximum overhead of CURVE and ZMTP per frame, bytes (RFC 26 and 23 of ZeroMQ): 33 and 9."""
GREETING_BYTES = 4096
"""Upper limit of the bytes of a handshake."""
BEATS_BYTES_PER_S = 100.0
"""Upper limit of the rate of libzmq's own heartbeats."""

_TCP_INFO, _BYTES_RECEIVED = 11, 128
"""linux/tcp.h: the option, and the offset of tcpi_bytes_received in it."""


def bytes_received(descriptor: int) -> int:
    """Return the number of bytes received over a connection so far. Raises OSError if it does not
    exist.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
    finally:
        connection.detach()
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    return int(received)


def end_connection(descriptor: int) -> None:
    """Shut a connection down, so that libzmq frees what it has received."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


@dataclass
class _Connection:
    """Traffic of one connection."""

    looked: float
    """Time of the last check, seconds."""
    received: int = 0
    """Bytes received until the last check."""
    read: int = 0
    """Bytes read since the last check."""
    unread: float = -GREETING_BYTES
    """Bytes unread at the last check, without the handshake."""
    stuck_s: float = 0.0
    """Time for which nothing was read although bytes wait, seconds."""


class Unread:
    """The unread bytes of all connections. ``received``: a function such as
    :func:`bytes_received`.
    """

    def __init__(self, received: Callable[[int], int] = bytes_received) -> None:
        self._received = received
        self._connections: dict[int, _Connection] = {}
        self._heard: set[int] = set()

    @property
    def heard(self) -> int:
        """Number of open connections over which messages were read."""
        return len(self._heard)

    def began(self, descriptor: int, now: float) -> None:
        """Add an accepted connection."""
        self._connections[descriptor] = _Connection(now)
        self._heard.discard(descriptor)

    def ended(self, descriptor: int) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(descriptor, None)
        self._heard.discard(descriptor)

    def read(self, descriptor: int, size: int, frames: int) -> None:
        """Count a message that was read.

        Args:
            descriptor: descriptor of the connection.
            size: size of the message, bytes.
            frames: number of its frames.
        """
        if (connection := self._connections.get(descriptor)) is not None:
            connection.read += size + frames * FRAME_BYTES
            self._heard.add(descriptor)

    def too_much(self, now: float) -> list[int]:
        """Return the descriptors of the connections to close. Takes about 3 µs for each
        connection.
        """
        stuck = []
        for descriptor, connection in self._connections.items():
            try:
                received = self._received(descriptor)
            except OSError:  # it has ended, which is reported soon
                continue
            elapsed_s = max(0.0, now - connection.looked)
            new_bytes = received - connection.received - BEATS_BYTES_PER_S * elapsed_s
            connection.unread += new_bytes - connection.read
            if connection.received or connection.unread > 0.0:  # else the handshake is not complete
                connection.unread = max(0.0, connection.unread)
            is_read = connection.read > 0 or not connection.unread
            connection.stuck_s = (
                0.0 if is_read else connection.stuck_s + min(elapsed_s, MAX_INTERVAL_S)
            )
            connection.looked, connection.received, connection.read = now, received, 0
            if connection.stuck_s >= STUCK_S:
                stuck.append((connection.unread, descriptor))
        stuck.sort(reverse=True)
        connections, all_bytes = [], sum(size for size, _ in stuck)
        for size, descriptor in stuck:
            if size <= MAX_UNREAD_BYTES and all_bytes <= MAX_TOTAL_UNREAD_BYTES:
                break
            connections.append(descriptor)
            all_bytes -= size
        return connections
