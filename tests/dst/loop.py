"""An event loop whose clock is virtual, and the processes on it.

Time passes only when nothing is ready: then the clock stands at the next timer. A process is
what runs in one context; one that was killed takes no further step, and nothing of it is unwound,
as after SIGKILL. Calls for a worker thread are made within the loop, after a time that is drawn.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import selectors
from collections.abc import Callable
from random import Random
from typing import Any

STARTED = 1000.0
"""Time of the clock at the start, seconds."""
EPOCH = 1.7e9
"""Difference between the wall clock and this clock, seconds."""
CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Killed(BaseException):
    """The process that makes this call was killed in it."""


class Stuck(AssertionError):
    """Nothing is ready and nothing is due, so the world stands still."""


class Process:
    """One process of the world: a name, whether it lives, what its signals do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.signals: dict[int, Callable[[], None]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Make the call, if the process lives."""
        if self.alive:
            callback(*args)

    def kill(self) -> None:
        """SIGKILL: it takes no further step."""
        self.alive = False

    def check(self) -> None:
        """Raise if the process is to be killed at this point. Called where the world can kill
        it.
        """
        if not self.alive:
            raise Killed(self.name)


class _NoFiles(selectors.BaseSelector):
    """A selector without files: where the loop would sleep, the clock is advanced."""

    def __init__(self) -> None:
        self.now = STARTED
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and nothing is due")
        if timeout > 0:
            self.now += timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, int(fileobj), events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """``rng``: draws the duration of calls in worker threads. ``failed`` is called with exceptions
    that nobody awaits.
    """

    def __init__(self, rng: Random, failed: Callable[[str], None]) -> None:
        self._clock = _NoFiles()
        super().__init__(self._clock)
        self._rng, self._failed = rng, failed
        self.thread_s: Callable[[], float] = lambda: rng.expovariate(1 / 0.01)
        """How long a call in a worker thread takes."""
        self.set_by_s = 0.0
        """Total change of the wall clock since the start, seconds."""
        self.processes: list[Process] = []
        self.ending = False
        self.set_exception_handler(self._unhandled)

    def time(self) -> float:
        return self._clock.now

    def wall(self) -> float:
        """Return the time of the wall clock, seconds."""
        return self._clock.now + EPOCH + self.set_by_s

    # --- processes ---

    def spawn(self, name: str, main: Callable[[], Any], ended: Callable[[Any], None]) -> Process:
        """Start the process ``main``; ``ended`` gets its task when it is over, unless it was
        killed.
        """
        process = Process(name)
        self.processes.append(process)

        def begin() -> None:
            task = self.create_task(main())
            task.add_done_callback(ended)

        process.context.run(begin)
        return process

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        process = CURRENT.get()
        if process is not None:
            process.tasks.append(task)  # what was killed must not be unwound by the collector
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(process.call, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        process = CURRENT.get() if context is None else context.get(CURRENT)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, process.call, callback, *args, context=context)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        process = CURRENT.get()
        assert process is not None
        process.signals[sig] = lambda: process.context.copy().run(self.call_soon, callback, *args)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal that the process handles."""
        if process.alive and number in process.signals:
            process.signals[number]()

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        if hasattr(fd, "on_ready"):
            context = contextvars.copy_context()
            fd.on_ready = lambda: self.call_soon(callback, *args, context=context.copy())
        else:
            super().add_reader(fd, callback, *args)

    def remove_reader(self, fd: Any) -> bool:
        if hasattr(fd, "on_ready"):
            fd.on_ready = None
            return True
        return super().remove_reader(fd)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run the call at one instant within its duration."""
        future = self.create_future()
        whole = self.thread_s()
        first = whole * self._rng.random()

        def complete(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def do() -> None:
            result, error = None, None
            try:
                result = func(*args)
            except Exception as raised:
                error = raised
            self.call_later(whole - first, complete, result, error)

        self.call_later(first, do)
        return future

    # --- the end ---

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.ending or isinstance(error, Killed):
            return
        self._failed(f"{context.get('message')}: {error!r}")

    def finish(self) -> None:
        """Unwind the remaining tasks, so that the collector has nothing to do."""
        self.ending = True
        pending = [task for process in self.processes for task in process.tasks if not task.done()]
        tasks = [task for task in pending if not _never_begun(task.get_coro())]
        for process in self.processes:
            process.alive = True
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=60.0))
        self.close()


def _never_begun(coro: Any) -> bool:
    """Whether a process was killed before this coroutine took its first step. If so it is closed,
    with the coroutines that it was to await. Python would warn of each of them otherwise.
    """
    if not inspect.iscoroutine(coro) or inspect.getcoroutinestate(coro) != inspect.CORO_CREATED:
        return False
    for value in inspect.getcoroutinelocals(coro).values():
        _never_begun(value)
    coro.close()
    return True
