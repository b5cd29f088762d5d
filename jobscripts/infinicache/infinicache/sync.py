"""The same cache without asyncio. A :class:`Cache` has an event loop of its own, in the calling
thread: use one per thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from infinicache.client import AsyncCache, Loader
from infinicache.isal import Buffer
from infinicache.objects import Receipt, Stat


class Cache:
    """As :class:`infinicache.AsyncCache`, with methods that wait."""

    def __init__(self, addresses: Sequence[str], key: bytes = b"", **options: Any) -> None:
        self._loop = asyncio.new_event_loop()

        async def make() -> AsyncCache:
            return AsyncCache(addresses, key, **options)

        self._cache = self._loop.run_until_complete(make())
        self.counts = self._cache.counts

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        if not self._loop.is_closed():
            self._cache.close()
            self._loop.close()

    def put(self, key: str, value: Buffer, *, code: tuple[int, int] | None = None) -> Receipt:
        """See :meth:`AsyncCache.put`."""
        return self._loop.run_until_complete(self._cache.put(key, value, code=code))

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Buffer], *, code: tuple[int, int] | None = None
    ) -> Receipt:
        """See :meth:`AsyncCache.put_stream`."""

        async def feed() -> Any:
            for piece in pieces:
                yield piece

        return self._loop.run_until_complete(self._cache.put_stream(key, size, feed(), code=code))

    def get(self, key: str, loader: Loader | None = None) -> bytearray | None:
        """See :meth:`AsyncCache.get`."""
        return self._loop.run_until_complete(self._cache.get(key, loader))

    def get_view(self, key: str, loader: Loader | None = None) -> memoryview | None:
        """See :meth:`AsyncCache.get_view`."""
        return self._loop.run_until_complete(self._cache.get_view(key, loader))

    def get_stream(self, key: str) -> Iterator[bytearray]:
        """See :meth:`AsyncCache.get_stream`."""
        stream = self._cache.get_stream(key)

        async def following() -> bytearray | None:
            return await anext(stream, None)

        while (part := self._loop.run_until_complete(following())) is not None:
            yield part

    def delete(self, key: str) -> bool:
        """See :meth:`AsyncCache.delete`."""
        return self._loop.run_until_complete(self._cache.delete(key))

    def stat(self, key: str) -> Stat | None:
        """See :meth:`AsyncCache.stat`."""
        return self._loop.run_until_complete(self._cache.stat(key))

    def summary(self) -> list[dict[str, Any]]:
        """See :meth:`AsyncCache.summary`."""
        return self._loop.run_until_complete(self._cache.summary())
