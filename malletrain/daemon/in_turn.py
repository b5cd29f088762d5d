"""Things that wait, of several senders: of each in its order, senders in turn. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")


class InTurn(Generic[S, T]):
    """Who has much waiting does not keep others from being next."""

    def __init__(self) -> None:
        self._of: dict[S, deque[T]] = {}
        self._turns: deque[S] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def put(self, sender: S, thing: T) -> None:
        """It waits, behind what waits of its ``sender`` already."""
        waiting = self._of.get(sender)
        if waiting is None:
            waiting = self._of[sender] = deque()
            self._turns.append(sender)
        waiting.append(thing)

    def take(self) -> T:
        """The next one. Raises IndexError where nothing waits."""
        sender = self._turns.popleft()
        waiting = self._of[sender]
        thing = waiting.popleft()
        if waiting:
            self._turns.append(sender)
        else:
            del self._of[sender]
        return thing
