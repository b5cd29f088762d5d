"""What has come in and was not handled yet: of each sender in its order, senders in turn. Pure.

Decides how much of one sender (one key, over however many connections; all strangers together) may
wait, by number and by bytes, and who is next. The daemon takes from its socket whatever is there
and puts it here, so that it is our bound that holds and not ZeroMQ's: that one counts messages
however large they are, and libzmq does not bear a connection that ends while its queue is full
(zeromq/libzmq#3937).

All share one room. A sender may have as much waiting as is left free of it: one alone half, of
seven each an eighth, and who comes new finds as much again (the dynamic thresholds of Choudhury and
Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from malletrain.daemon.in_turn import InTurn
from malletrain.protocol import wire

T = TypeVar("T")

MOST_MESSAGES = 2000
"""Of one sender: agents say some a second, and after a minute in which the daemon stood still it
finds all of them.
"""
ROOM_BYTES = 24 * 1024 * 1024
"""Of all together, except what is under LEAST_BYTES of each."""
LEAST_BYTES = 64 * 1024
"""Of one sender, however full the room is: who says little is heard while others flood."""
MESSAGE_BYTES = 1024
"""What a message takes beside what is in it."""
MANY, MANY_BYTES = 64, 1024 * 1024
"""Who has more of either waiting crowds the others."""


STRANGERS = "stranger"
"""The role of keys that have proved nothing yet, see :mod:`malletrain.identity.keys`."""
_MOST_BYTES = {"client": wire.MAX_REQUEST_BYTES, STRANGERS: wire.MAX_LOGIN_BYTES}


def sender_of(key: str, who: str | None) -> str:
    """As whose messages those of ``key`` wait, which belongs to ``who`` (``role:name``; None: to
    nobody any more). All strangers are one sender: a new key costs nothing.
    """
    return STRANGERS if who is None or who.partition(":")[0] == STRANGERS else key


def most_bytes(who: str) -> int:
    """How large a message of ``who`` (``role:name``) may be. What agents send are logs and counts,
    which are as large in memory; what others send are requests.
    """
    role = who.partition(":")[0]
    return _MOST_BYTES.get(role, wire.MAX_MESSAGE_BYTES)


@dataclass
class _Line:
    """What waits of one sender."""

    number: int = 0
    size: int = 0

    @property
    def crowds(self) -> bool:
        return self.number > MANY or self.size > MANY_BYTES


class Intake(Generic[T]):
    """Messages that wait: ``most`` of one sender, ``room`` bytes of all. See the module."""

    def __init__(
        self, most: int = MOST_MESSAGES, room: int = ROOM_BYTES, least: int = LEAST_BYTES
    ) -> None:
        self._most, self._free, self._least = most, room, least
        self._lines: dict[Hashable, _Line] = {}
        self._waiting: InTurn[Hashable, tuple[Hashable, T, int]] = InTurn()
        self._crowds = 0
        """Senders that do."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def crowded(self) -> bool:
        """Somebody sends more than is handled."""
        return self._crowds > 0

    def put(self, sender: Hashable, message: T, size: int) -> bool:
        """Keep it, of so many bytes; False where as much of its sender waits as may."""
        size += MESSAGE_BYTES
        line = self._lines.get(sender) or _Line()
        if line.number >= self._most or line.size + size > max(self._least, self._free - size):
            return False
        self._lines[sender] = line
        self._waiting.put(sender, (sender, message, size))
        self._changed(line, 1, size)
        return True

    def take(self) -> T:
        """The next one. Raises IndexError where nothing waits."""
        sender, message, size = self._waiting.take()
        line = self._lines[sender]
        self._changed(line, -1, -size)
        if not line.number:
            del self._lines[sender]
        return message

    def _changed(self, line: _Line, number: int, size: int) -> None:
        self._crowds -= line.crowds
        line.number += number
        line.size += size
        self._crowds += line.crowds
        self._free -= size
