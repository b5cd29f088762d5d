"""The cache without asyncio.

A :class:`Cache` has an event loop of its own, in the calling thread; use one per thread. A forked
process, such as a worker of a DataLoader, may use the cache of its parent: at its first call it
gets a loop and connections of its own.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from infinicache.client import AsyncCache, Loader
from infinicache.isal import Buffer
from infinicache.objects import CacheError, Receipt, Stat

T = TypeVar("T")


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Cache:
    """As :class:`infinicache.AsyncCache`, with blocking methods."""

    def __init__(self, addresses: Sequence[str], key: bytes = b"", **options: Any) -> None:
        self._made_of = (list(addresses), key, options)
        self._begin()

    def _begin(self) -> None:
        """Create the loop and the client of this process."""
        self._process = os.getpid()
        self._selector = selectors.EpollSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        addresses, key, options = self._made_of
        self._cache = AsyncCache(addresses, key, **options)
        self.counts = self._cache.counts
        """Counts of the gets of this process by their outcome."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it is made of, its secret too: a process that unpickles it, such as a worker
        that is started with ``spawn``, gets connections of its own.
        """
        _, key, options = self._made_of
        return partial(type(self), **options), (self._cache.known_addresses(), key)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. The cache cannot be used afterwards."""
        if self._loop.is_closed():
            return
        if os.getpid() != self._process:
            self._leave_parent()
        self._cache.close()
        self._loop.close()

    def _leave_parent(self) -> None:
        """Close the parent's event loop in this process. A fork shares the kernel's list of watched
        sockets (epoll(7)) with its parent. It is replaced by an empty one first, so that the
        parent's sockets are not removed from it.
        """
        with select.epoll() as own:
            os.dup2(own.fileno(), self._selector.fileno(), inheritable=False)
        self._cache.close()
        if not self._loop.is_running():  # otherwise a loader forked this process
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run one call.

        Raises:
            CacheError: this cache is closed, or cannot wait here.
        """
        try:
            if self._loop.is_closed():
                raise CacheError("This cache is closed; make a new one.")
            if self._loop.is_running():
                raise CacheError("This cache is in use by another thread; make one in each thread.")
            if _is_in_loop():
                raise CacheError("A Cache cannot wait within asyncio; use AsyncCache there.")
            return self._loop.run_until_complete(work)
        finally:
            work.close()

    def _own(self) -> AsyncCache:
        """Return the client of this process."""
        if os.getpid() != self._process and not self._loop.is_closed():
            self._leave_parent()
            _, key, options = self._made_of
            self._made_of = self._cache.known_addresses(), key, options
            self._begin()
        return self._cache

    def put(self, key: str, value: Buffer, *, code: tuple[int, int] | None = None) -> Receipt:
        """See :meth:`AsyncCache.put`."""
        return self._run(self._own().put(key, value, code=code))

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Buffer], *, code: tuple[int, int] | None = None
    ) -> Receipt:
        """See :meth:`AsyncCache.put_stream`."""

        async def feed() -> Any:
            for piece in pieces:
                yield piece

        return self._run(self._own().put_stream(key, size, feed(), code=code))

    def get(self, key: str, loader: Loader | None = None) -> bytearray | None:
        """See :meth:`AsyncCache.get`."""
        return self._run(self._own().get(key, loader))

    def get_view(self, key: str, loader: Loader | None = None) -> memoryview | None:
        """See :meth:`AsyncCache.get_view`."""
        return self._run(self._own().get_view(key, loader))

    def get_stream(self, key: str) -> Iterator[bytearray]:
        """See :meth:`AsyncCache.get_stream`. The stream must be read in the process in which it was
        begun.
        """
        stream, process = self._own().get_stream(key), os.getpid()

        async def following() -> bytearray | None:
            return await anext(stream, None)

        while True:
            if os.getpid() != process:
                raise CacheError("This stream was begun before a fork; begin another.")
            part = self._run(following())
            if part is None:
                return
            yield part

    def delete(self, key: str) -> bool:
        """See :meth:`AsyncCache.delete`."""
        return self._run(self._own().delete(key))

    def stat(self, key: str) -> Stat | None:
        """See :meth:`AsyncCache.stat`."""
        return self._run(self._own().stat(key))

    def summary(self) -> list[dict[str, Any]]:
        """See :meth:`AsyncCache.summary`."""
        return self._run(self._own().summary())
