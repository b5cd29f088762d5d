"""Measures the processor time of one answer while the event loop does other things too. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import thread_time
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TimedCall(Generic[T]):
    """A coroutine, to be awaited in its place. ``seconds``: what it took of this thread so far."""

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
            except BaseException as thrown:  # a cancel, for the coroutine to hear
                error = thrown
