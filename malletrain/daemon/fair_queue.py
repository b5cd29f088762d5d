"""A queue that serves several senders in turn: first in, first out for each. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

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
