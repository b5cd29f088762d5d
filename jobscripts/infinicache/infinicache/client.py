"""The client of the cache for asyncio: ``put``, ``get``, ``delete``, ``stat``, and streams of
objects of which memory cannot hold two copies.

The client encodes and decodes objects; :mod:`infinicache.stripes` reads them. The client reports
chunks that it cannot read to the proxy, which has those rebuilt that are bad. Values are immutable:
a put under an existing key replaces the object. Once that put has begun, the old object is not
read.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from infinicache import isal
from infinicache.codec import STRIPE_BYTES, Code, code_for, encode
from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.isal import Buffer
from infinicache.objects import CacheError, ObjectPlace, Receipt, Shape, Stat, Unavailable
from infinicache.proxies import Lookup, Proxies
from infinicache.stripes import StripeLost, StripeReader
from infinicache.values import as_bytes, checked_key
from malletrain.waits import time_limit

MAX_ATTEMPTS = 3
CALL_TIMEOUT_S = 30.0
log = logging.getLogger("infinicache")


def _checked_answer(key: str, head: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a proxy. Raises CacheError if it is about another key."""
    if head.get("key") != key:
        raise CacheError(
            f"A proxy answered about another key than {key!r}; use one version of infinicache "
            "everywhere."
        )
    return head


@dataclass
class NearObject:
    """An object in the near cache."""

    version: int
    """Version of the object in the cache."""
    value: bytearray
    """Its bytes. They are never changed, because readers have views of them."""
    checked_at: float
    """Time at which the cache last confirmed that this is the newest version, monotonic seconds."""


class NearCache:
    """The objects that the client read last, in its own memory: at most ``capacity`` bytes. An
    object larger than that is not kept. The least recently used object is dropped first. The caller
    checks by the version whether an object is still the newest.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._objects: OrderedDict[str, NearObject] = OrderedDict()
        self._reads: dict[str, set[object]] = {}
        """Key → reads in progress that began after the key was last changed."""

    def get(self, key: str) -> NearObject | None:
        """Return the object under ``key`` and mark it as used; None if it is not here."""
        if (entry := self._objects.get(key)) is not None:
            self._objects.move_to_end(key)
        return entry

    def reads(self, key: str) -> object:
        """Record the start of a read of ``key``. Return a token for :meth:`done`."""
        read = object()
        self._reads.setdefault(key, set()).add(read)
        return read

    def done(self, key: str, read: object) -> bool:
        """Record the end of a read. Return whether this process has not changed ``key``
        meanwhile.
        """
        under_way = self._reads.get(key, set())
        same = read in under_way
        under_way.discard(read)
        if not under_way:
            self._reads.pop(key, None)
        return same

    def changed(self, key: str) -> None:
        """Record that this process changes the object: drop it, and invalidate its reads in
        progress.
        """
        self.drop(key)
        self._reads.pop(key, None)

    def put(self, key: str, version: int, value: bytearray, now: float) -> None:
        """Keep a value that was read at ``now``. The caller does not change it afterwards."""
        self.drop(key)
        if len(value) > self.capacity:
            return
        self._objects[key] = NearObject(version, value, now)
        self.used += len(value)
        while self.used > self.capacity:
            self.drop(next(iter(self._objects)))

    def drop(self, key: str) -> None:
        """Drop the object under ``key``."""
        if (entry := self._objects.pop(key, None)) is not None:
            self.used -= len(entry.value)


Loader = Callable[[str], Buffer | Awaitable[Buffer]]


@dataclass
class Miss:
    """A get that may miss and load. What it loads may be older than a put or a delete since."""

    began: float
    """When the get began, monotonic seconds."""
    moment: Any = None
    """The same by the clock of the proxy, as its answer names it; None: it has named none."""


class AsyncCache:
    """A client of the cache.

    Args:
        addresses: ``host:port`` of at least one member; the client learns the others.
        key: the cache's secret.
        code: (d, p) for every object; None: chosen by the object's size.
        hedge_s: time that a get waits for its first d chunks before it requests the others,
            seconds; 0: it requests all at once; None: twice the usual time of chunks of that size.
        stripe_bytes: size of a stripe, bytes.
        timeout_s: time after which a missing chunk counts as lost, seconds.
        near_bytes: maximum size of the objects that this process keeps in its own memory after
            reading them, bytes. Each get asks the proxy whether the kept version is the newest, and
            transfers nothing if it is.
        near_s: time after such a question for which a get does not ask again, seconds. Within it a
            get may return an object that another client has replaced or deleted.
        members: function that returns the addresses of the present members, or the members, such
            as from :meth:`malletrain.Client.members`. It is called, in a thread, if none of the
            members that the client knows answers: all of them may have been replaced.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: bytes = b"",
        *,
        code: tuple[int, int] | None = None,
        hedge_s: float | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        timeout_s: float = CALL_TIMEOUT_S,
        near_bytes: int = 0,
        near_s: float = 0.0,
        members: Lookup | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("A cache has at least one address; give those of its members.")
        self._peers = Peers(key)
        self._process, self._is_closed = os.getpid(), False
        self._code = Code(*code) if code else None
        self._stripe_bytes = stripe_bytes
        self._timeout_s = timeout_s
        self._proxies = Proxies(addresses, self._peers, timeout_s, members)
        self._loading: dict[str, asyncio.Future[memoryview]] = {}
        self._near = NearCache(near_bytes)
        self._near_s = near_s
        self.counts = {"gets": 0, "near": 0, "misses": 0, "degraded": 0, "hedged": 0}
        self._stripes = StripeReader(self._peers, self.counts, hedge_s, timeout_s)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def known_addresses(self) -> list[str]:
        """Return the addresses of the members that this client knows, the newest ones first."""
        return list(self._proxies.contacts)

    def close(self) -> None:
        """Close all connections. The cache cannot be used afterwards."""
        self._is_closed = True
        self._peers.close()

    def _enter(self, key: str = "") -> None:
        """Check the key and this client's state at the beginning of a call. A forked process does
        not wait for the loads of its parent.
        """
        checked_key(key)
        if self._is_closed:
            raise CacheError("This cache is closed; make a new one.")
        if os.getpid() != self._process:
            self._process, self._loading = os.getpid(), {}

    # --- the four ---

    async def put(self, key: str, value: Buffer, *, code: tuple[int, int] | None = None) -> Receipt:
        """Store the bytes of ``value`` under ``key``, and replace an existing object. The bytes of
        an array are stored in the order of C, without its shape and type. After an error, a get of
        the key returns ``value`` or a miss, never the replaced object.

        Raises:
            TypeError: the key is no text, or the value has no bytes of its own (an array of
                objects, one with masked values, a tensor).
            TooLarge: the value does not fit.
            Unavailable: the cache cannot be reached.
            CacheError: another put or delete overtook this one.
        """
        self._enter(key)
        view = as_bytes(value)
        return await self._put(key, len(view), self._parts(view), code)

    async def _parts(self, view: memoryview, stripe_bytes: int = 0) -> AsyncIterator[Buffer]:
        step = stripe_bytes or self._stripe_bytes
        for start in range(0, max(1, len(view)), step):
            yield view[start : start + step]

    async def put_stream(
        self,
        key: str,
        size: int,
        pieces: AsyncIterable[Buffer],
        *,
        code: tuple[int, int] | None = None,
    ) -> Receipt:
        """As :meth:`put`, for ``size`` bytes that come in pieces. At most one stripe is in memory
        at a time.
        """
        self._enter(key)

        async def parts() -> AsyncIterator[Buffer]:
            remaining, buffer = size, bytearray()
            async for piece in pieces:
                buffer += as_bytes(piece)
                while len(buffer) >= self._stripe_bytes or (buffer and len(buffer) >= remaining):
                    part = buffer[: min(self._stripe_bytes, remaining)]
                    del buffer[: len(part)]
                    remaining -= len(part)
                    if buffer and not remaining:
                        raise CacheError(
                            f"The stream for {key!r} has more than the {size} bytes it was "
                            "announced with."
                        )
                    yield part
            if remaining:
                raise CacheError(
                    f"The stream for {key!r} ended {remaining - len(buffer)} bytes before the "
                    f"{size} it was announced with."
                )
            if not size:
                yield b""

        return await self._put(key, size, parts(), code)

    async def get(self, key: str, loader: Loader | None = None) -> bytearray | None:
        """Return the object under ``key``; None on a miss.

        Args:
            key: name of the object.
            loader: called on a miss. Its result is put into the cache and returned. Simultaneous
                calls for one key share one load. What was put or deleted while it loaded is left as
                it is.
        """
        return await self._get_or_load(key, loader, own=True)

    async def get_view(self, key: str, loader: Loader | None = None) -> memoryview | None:
        """As :meth:`get`, but read-only: an object in the near cache is not copied. The memory is
        in use as long as the view exists, even if the near cache has dropped the object.
        """
        value = await self._get_or_load(key, loader, own=False)
        return None if value is None else memoryview(value).toreadonly()

    async def _get_or_load(self, key: str, loader: Loader | None, own: bool) -> bytearray | None:
        self._enter(key)
        miss = Miss(time.monotonic())
        value = await self._get(key, own, miss)
        if value is not None or loader is None:
            return value
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(self._load(key, loader, miss))
            loading.add_done_callback(
                lambda done: (self._loading.pop(key, None), done.cancelled() or done.exception())
            )
        return bytearray(await asyncio.shield(loading))  # each get may change its own

    async def get_stream(self, key: str) -> AsyncIterator[bytearray]:
        """Yield the object stripe by stripe; nothing on a miss. Raises CacheError if the object is
        lost or replaced while it is read.
        """
        self._enter(key)
        place = await self._find(key)
        if place is None:
            return
        of, lengths = place.of, place.shape.stripes
        for stripe, length in enumerate(lengths):
            for attempt in range(MAX_ATTEMPTS):
                part = bytearray(length)
                try:
                    await self._read(key, place, stripe, part)
                except StripeLost as lost:
                    await self._report(key, place, lost.bad)
                    again = await self._find(key)
                    if again is None or again.of != of or attempt == MAX_ATTEMPTS - 1:
                        raise CacheError(
                            f"{key!r} was lost or replaced while it was read."
                        ) from None
                    place = again
                else:
                    break
            yield part

    async def delete(self, key: str) -> bool:
        """Delete ``key``. Return whether it existed."""
        self._enter(key)
        self._near.changed(key)
        try:
            return bool((await self._proxies.ask(key, "delete", key=key))["exists"])
        finally:
            self._near.changed(key)

    async def stat(self, key: str) -> Stat | None:
        """Return the cache's description of ``key`` without reading the object; None on a miss."""
        self._enter(key)
        head = _checked_answer(key, await self._proxies.ask(key, "find", key=key))
        if not head["exists"]:
            return None
        shape = msgspec.convert(head["shape"], Shape)
        return Stat(
            key,
            head["version"],
            shape.size,
            shape.code,
            head["protection"],
            shape.target_p,
            head["at"],
        )

    async def summary(self) -> list[dict[str, Any]]:
        """Return the summary of each proxy's pool: nodes, objects, bytes, degraded and lost
        objects, moved bytes.
        """
        self._enter()
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._proxies.addresses:
                    await self._proxies.learn()
                return [
                    (await self._proxies.call(address, "summary"))[0]
                    for address in dict.fromkeys(self._proxies.addresses)
                ]
            except (ConnectionLost, CallFailed, Unavailable) as error:
                self._proxies.addresses = []
                if time.monotonic() > deadline:
                    raise Unavailable(str(error)) from None
            await asyncio.sleep(0.05)

    async def _find(self, key: str, miss: Miss | None = None) -> ObjectPlace | None:
        head = _checked_answer(key, await self._proxies.ask(key, "find", key=key, spread=True))
        if miss is not None:
            miss.moment = head.get("miss")
        return msgspec.convert(head, ObjectPlace) if head["exists"] else None

    async def _report(self, key: str, place: ObjectPlace, bad: dict[int, str]) -> None:
        if bad:
            try:
                await self._proxies.ask(
                    key, "report", key=place.name, version=place.version, bad=bad
                )
            except CacheError:  # the proxy is gone; its successor detects the loss itself
                pass

    # --- writing ---

    async def _copy(self, key: str, name: str, value: Buffer, stripe_bytes: int) -> None:
        """Put another copy of a hot object, for later readers."""
        try:
            await self._write(
                key, len(value), self._parts(memoryview(value), stripe_bytes), None, name
            )
        except CacheError as error:  # the object was replaced meanwhile, or there is no room
            log.info("no further copy of %r was made: %s", key, error)

    async def _put(
        self,
        key: str,
        size: int,
        parts: AsyncIterable[Buffer],
        code: tuple[int, int] | None,
        miss: Miss | None = None,
    ) -> Receipt:
        self._near.changed(key)
        try:
            return await self._write(key, size, parts, code, miss=miss)
        finally:
            self._near.changed(key)

    async def _write(
        self,
        key: str,
        size: int,
        parts: AsyncIterable[Buffer],
        code: tuple[int, int] | None,
        copy: str = "",
        miss: Miss | None = None,
    ) -> Receipt:
        target = Code(*code) if code else self._code or code_for(size)
        request: dict[str, Any] = {
            "key": key,
            "size": size,
            "code": [target.d, target.p],
            "stripe_bytes": self._stripe_bytes,
            "copy": copy,
        }
        loaded = {} if miss is None or miss.moment is None else {"miss": miss.moment}
        missed_at = None if miss is None else miss.began
        try:
            begun = await self._proxies.ask(key, "begin", missed_at=missed_at, **request, **loaded)
        except CacheError as error:
            if missed_at is None or "unexpected keyword argument" not in str(error):
                raise
            # A proxy of an older version has no such arguments.
            begun = await self._proxies.ask(key, "begin", **request)
        name = copy or key
        _checked_answer(name, begun)
        shape, version = msgspec.convert(begun["shape"], Shape), begun["version"]
        # A node may have been lost while the proxy evicted for this object.
        missing = {i for i in range(shape.code.n) if i not in begun["at"]}
        stripe = 0
        async for part in parts:
            chunks = encode(part, shape.code)
            todo = [i for i in range(shape.code.n) if i not in missing]
            arguments = {"key": name, "version": version, "shape": begun["shape"], "stripe": stripe}
            done = await asyncio.gather(
                *(self._store(begun["at"][i], chunks[i], i, arguments) for i in todo)
            )
            missing |= {i for i, ok in zip(todo, done, strict=True) if not ok}
            stripe += 1
            if len(missing) > shape.p:
                break
        await self._check_proxy(key, begun)
        answer = await self._proxies.ask(
            key, "commit", key=name, version=version, missing=sorted(missing)
        )
        return Receipt(key, version, size, shape.code, answer["protection"], target.p)

    async def _check_proxy(self, key: str, begun: dict[str, Any]) -> None:
        """Raise Unavailable if another process is the proxy of ``key`` than when the put began, as
        the nodes know: one that was cut off from MalleTrain may not know it itself.
        """
        await self._proxies.refresh(wait=True)
        is_newer = self._proxies.number > begun.get("number", 0)
        if is_newer and self._proxies.address_of(key) not in ("", begun["proxy"]):
            raise Unavailable(
                f"{key!r} was not put: the proxy at {begun['proxy']} was replaced meanwhile; put "
                "it again."
            )

    async def _store(
        self, address: str, chunk: Buffer, index: int, arguments: dict[str, Any]
    ) -> bool:
        try:
            call = self._peers.at(address).call(
                "put", [chunk], index=index, crc=isal.crc64(chunk), **arguments
            )
            async with time_limit(self._timeout_s):
                head, _ = await call
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            return False
        self._proxies.note(head, address)
        return True

    async def _load(self, key: str, loader: Loader, miss: Miss) -> memoryview:
        """Load and store a value that was missed."""
        loaded = loader(key)
        value: Buffer = await loaded if inspect.isawaitable(loaded) else loaded
        view = as_bytes(value)
        try:
            self._enter(key)
            await self._put(key, len(view), self._parts(view), None, miss)
        except CacheError:  # the value is valid even if it is not stored (as by a closed cache)
            pass
        return view

    # --- reading ---

    async def _get(self, key: str, own: bool, miss: Miss) -> bytearray | None:
        """Return the object; None on a miss, which ``miss`` describes. ``own``: whether the caller
        may change it; if not, it may be the near cache's object.
        """
        self.counts["gets"] += 1
        near = self._near.get(key)
        if near is not None and time.monotonic() - near.checked_at < self._near_s:
            self.counts["near"] += 1
            return bytearray(near.value) if own else near.value
        read = self._near.reads(key)
        try:
            return await self._get_far(key, near, read, own, miss)
        finally:
            self._near.done(key, read)

    async def _get_far(
        self, key: str, near: NearObject | None, read: object, own: bool, miss: Miss
    ) -> bytearray | None:
        for _ in range(MAX_ATTEMPTS):
            sent_at = time.monotonic()
            place = await self._find(key, miss)
            if place is None:
                self._near.drop(key)
                break
            version, shape = place.of, place.shape
            if near is not None and near.version == version:
                near.checked_at = sent_at
                self.counts["near"] += 1
                return bytearray(near.value) if own else near.value
            value = bytearray(shape.size)
            view = memoryview(value)
            start, good = 0, True
            for stripe, length in enumerate(shape.stripes):
                try:
                    await self._read(key, place, stripe, view[start : start + length])
                except StripeLost as lost:
                    await self._report(key, place, lost.bad)
                    good = False
                    break
                start += length
            if good:
                view.release()
                if self._near.capacity and self._near.done(key, read):
                    self._near.put(key, version, bytearray(value) if own else value, sent_at)
                if place.copy:
                    await self._copy(key, place.copy, value, shape.stripe_bytes)
                return value
        self.counts["misses"] += 1
        return None

    async def _read(self, key: str, place: ObjectPlace, stripe: int, out: Buffer) -> None:
        """Read one stripe into ``out``. Raises StripeLost."""
        identity = (place.name, place.version, place.shape, place.at)
        bad = await self._stripes.read(*identity, stripe, out)
        await self._report(key, place, bad)
