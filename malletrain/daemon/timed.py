"""Measures the processor time of one answer, without the other work of the event loop meanwhile.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import thread_time
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
