"""The queue of messages that are received and not handled yet; senders are served in turn. Pure.

Decides how many messages and bytes of one sender may wait, and which message is next. A sender is a
key, over any number of connections; all unauthenticated peers are one sender. The daemon moves
everything from its socket into this queue, so that this bound holds instead of ZeroMQ's, which
counts messages of any size; and libzmq fails when a connection ends while its own queue is full
(zeromq/libzmq#3937).

All senders share a number of bytes. A sender may use as much as is free: one alone uses a half,
each of seven an eighth, and a new sender finds as much again (the dynamic thresholds of Choudhury
and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from malletrain.protocol import wire

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
