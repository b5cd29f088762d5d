"""What has come in and was not handled yet: of each sender in its order, senders in turn. Pure.

Decides how much of one sender (one key, over however many connections; all strangers together) may
wait, by number and by bytes, and who is next. The daemon takes from its socket whatever is there
and puts it here, so that it is our bound that holds and not ZeroMQ's: that one counts messages
however large they are, and libzmq does not bear a connection that ends while its queue is full
(zeromq/libzmq#3937).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_MESSAGES = 2000
"""Of one sender: agents say some a second, and after a minute in which the daemon stood still it
finds all of them.
"""
MOST_BYTES = 16 * 1024 * 1024
"""Of one sender: four of the largest messages there are."""


STRANGERS = "stranger"
"""The role of keys that have proved nothing yet, see :mod:`malletrain.identity.keys`."""


def sender_of(key: str, who: str | None) -> str:
    """As whose messages those of ``key`` wait, which belongs to ``who`` (``role:name``; None: to
    nobody any more). All strangers are one sender: a new key costs nothing.
    """
    return STRANGERS if who is None or who.partition(":")[0] == STRANGERS else key


@dataclass
class _Line(Generic[T]):
    """What waits of one sender."""

    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    size: int = 0


class Intake(Generic[T]):
    """Messages that wait, ``most`` of one sender and ``most_bytes`` of them at most."""

    def __init__(self, most: int = MOST_MESSAGES, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lines: dict[Hashable, _Line[T]] = {}
        self._turns: deque[Hashable] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def put(self, sender: Hashable, message: T, size: int) -> bool:
        """Keep it, of so many bytes; False where as much of its sender waits as may."""
        line = self._lines.get(sender)
        if line is None:
            line = self._lines[sender] = _Line()
            self._turns.append(sender)
        elif len(line.waiting) >= self._most or line.size + size > self._most_bytes:
            return False
        line.waiting.append((message, size))
        line.size += size
        return True

    def take(self) -> T:
        """The next one. Raises IndexError where nothing waits."""
        sender = self._turns.popleft()
        line = self._lines[sender]
        message, size = line.waiting.popleft()
        if line.waiting:
            line.size -= size
            self._turns.append(sender)
        else:
            del self._lines[sender]
        return message
