"""The client of the cache for asyncio: ``put``, ``get``, ``delete``, ``stat``, and streams of
objects that do not fit into memory twice.

Coding happens at the client: :mod:`infinicache.stripes` reads. A chunk that cannot be had is as
good as lost, and reported to the proxy, which has it made anew. Values are immutable: a put under a
known key replaces the object, and from its beginning on the old one is not read any more.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
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
from infinicache.proxies import Proxies
from infinicache.stripes import StripeLost, StripeReader
from malletrain.waits import time_limit

ATTEMPTS = 3
CALL_S = 30.0
log = logging.getLogger("infinicache")


def _about(key: str, head: dict[str, Any]) -> dict[str, Any]:
    """Return the answer ``head`` of a proxy. Raises CacheError if it is about another key."""
    if head.get("key") != key:
        raise CacheError(
            f"A proxy answered about another key than {key!r}; use one version of infinicache "
            "everywhere."
        )
    return head


_PICKLE = "cache.put(key, pickle.dumps(value)), and pickle.loads of what get returns"


def as_bytes(value: Buffer) -> memoryview:
    """Return the bytes of ``value``: anything with the buffer protocol, such as bytes or a NumPy
    array. They are copied only if they do not lie in the order of C already. What has no bytes of
    its own is refused: the memory of an array of Python objects is a list of addresses.

    Raises:
        TypeError: ``value`` has no bytes of its own.
    """
    name = type(value).__name__
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(value, str):
            advice = "encode it: value.encode()"
        elif hasattr(value, "detach") and hasattr(value, "numpy"):
            advice = "give cache.put(key, value.detach().cpu().numpy())"
        elif hasattr(value, "__array_interface__"):
            advice = f"its type {getattr(value, 'dtype', '')} has none; give value.view('i8')"
        else:
            advice = f"pickle it: {_PICKLE}"
        raise TypeError(
            f"A {name} has no bytes that could be stored ({error}); {advice}."
        ) from None
    if hasattr(value, "filled") and hasattr(value, "mask"):
        raise TypeError(
            f"The mask of a {name} would be lost; give cache.put(key, value.filled()), or pickle "
            f"it: {_PICKLE}."
        )
    if "O" in re.sub(":[^:]*:", "", view.format):  # without the names of fields
        raise TypeError(
            f"This {name} holds Python objects, so that its memory is a list of addresses. Pickle "
            f"it: {_PICKLE}."
        )
    if not view.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def checked_key(key: str) -> str:
    """Return ``key``.

    Raises:
        TypeError: it is no text.
        ValueError: it cannot be encoded.
    """
    if not isinstance(key, str):
        raise TypeError(
            f"A key is text, and {key!r:.80} is of type {type(key).__name__}; give "
            f"{'key.decode()' if isinstance(key, bytes) else 'str(key)'}."
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"The key {key!r:.80} has half of a character (a surrogate) in it, as file names that "
            "are not UTF-8 have; use another."
        ) from None
    return key


@dataclass
class NearObject:
    """One object that is here."""

    version: int
    """Of the object in the cache."""
    value: bytearray
    """What it is; never changed: views of it are given away."""
    checked_at: float
    """When the cache last said that this is its newest version."""


class NearCache:
    """What the client read last, in its own memory: at most ``capacity`` bytes; larger objects are
    not kept. The least recently used goes first. Whether what is here is still the newest is the
    caller's to find out, by its version.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._objects: OrderedDict[str, NearObject] = OrderedDict()
        self._reads: dict[str, set[object]] = {}
        """Those under way since the key was changed last."""

    def get(self, key: str) -> NearObject | None:
        """What is here under ``key``, which is used now."""
        if (entry := self._objects.get(key)) is not None:
            self._objects.move_to_end(key)
        return entry

    def reads(self, key: str) -> object:
        """A read of ``key`` begins; what is returned names it."""
        read = object()
        self._reads.setdefault(key, set()).add(read)
        return read

    def done(self, key: str, read: object) -> bool:
        """A read has ended; whether ``key`` was left as it was meanwhile by this process."""
        under_way = self._reads.get(key, set())
        same = read in under_way
        under_way.discard(read)
        if not under_way:
            self._reads.pop(key, None)
        return same

    def changed(self, key: str) -> None:
        """This process changes the object: neither what is here nor what is being read counts."""
        self.drop(key)
        self._reads.pop(key, None)

    def put(self, key: str, version: int, value: bytearray, now: float) -> None:
        """Keep what was read at ``now``, which nobody changes from now on."""
        self.drop(key)
        if len(value) > self.capacity:
            return
        self._objects[key] = NearObject(version, value, now)
        self.used += len(value)
        while self.used > self.capacity:
            self.drop(next(iter(self._objects)))

    def drop(self, key: str) -> None:
        """Forget it."""
        if (entry := self._objects.pop(key, None)) is not None:
            self.used -= len(entry.value)


Loader = Callable[[str], Buffer | Awaitable[Buffer]]


class AsyncCache:
    """The cache that has a process at each of ``addresses`` (any of them will do; the others are
    learned).

    Args:
        addresses: ``host:port`` of at least one member.
        key: the cache's secret.
        code: (d, p) for every object; None: by size.
        hedge_s: how long a get waits for its first d chunks before it asks for the others too; 0:
            asks for all at once; None: twice as long as chunks of that size have been taking.
        timeout_s: after which a chunk that does not come counts as lost.
        near_bytes: of objects that were read, kept in this process's memory. Each get asks the
            proxy whether that is the newest version, and transfers nothing if it is.
        near_s: for so long after it was asked a get does not ask again: it may return what was
            replaced or deleted by another client in that time.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        key: bytes = b"",
        *,
        code: tuple[int, int] | None = None,
        hedge_s: float | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        timeout_s: float = CALL_S,
        near_bytes: int = 0,
        near_s: float = 0.0,
    ) -> None:
        if not addresses:
            raise ValueError("A cache has at least one address; give those of its members.")
        self._peers = Peers(key)
        self._process, self._is_closed = os.getpid(), False
        self._code = Code(*code) if code else None
        self._stripe_bytes = stripe_bytes
        self._timeout_s = timeout_s
        self._proxies = Proxies(addresses, self._peers, timeout_s)
        self._loading: dict[str, asyncio.Future[memoryview]] = {}
        self._near = NearCache(near_bytes)
        self._near_s = near_s
        self.counts = {"gets": 0, "near": 0, "misses": 0, "degraded": 0, "hedged": 0}
        self._stripes = StripeReader(self._peers, self.counts, hedge_s, timeout_s)

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. The cache cannot be used any more."""
        self._is_closed = True
        self._peers.close()

    def _enter(self, key: str = "") -> None:
        """Begin a call. A forked process does not wait for the loads of its parent."""
        checked_key(key)
        if self._is_closed:
            raise CacheError("This cache is closed; make another one.")
        if os.getpid() != self._process:
            self._process, self._loading = os.getpid(), {}

    # --- the four ---

    async def put(self, key: str, value: Buffer, *, code: tuple[int, int] | None = None) -> Receipt:
        """Store the bytes of ``value`` under ``key``, in place of what was there. An array gives
        its bytes in the order of C; its shape and type are not stored.

        Raises TypeError when the key is no text or the value has no bytes (an array of objects, a
        tensor), TooLarge when it does not fit, Unavailable when the cache cannot be reached,
        CacheError when another put or delete overtook this one. After an error the key is a miss or
        holds ``value``, never what was there before.
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
        """As :meth:`put`, for ``size`` bytes that come in pieces: no more than one stripe is held
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
        """The object under ``key``, None on a miss. With a ``loader``, a miss calls it, puts what
        it returns and returns that; calls for one key at one time share one load. What was put or
        deleted while it was loaded is left as it is.
        """
        return await self._get_or_load(key, loader, own=True)

    async def get_view(self, key: str, loader: Loader | None = None) -> memoryview | None:
        """As :meth:`get`, to be read only: what is near is not copied. As long as the view is held
        its memory is, whether or not the near cache still counts it.
        """
        value = await self._get_or_load(key, loader, own=False)
        return None if value is None else memoryview(value).toreadonly()

    async def _get_or_load(self, key: str, loader: Loader | None, own: bool) -> bytearray | None:
        self._enter(key)
        began = time.monotonic()
        value = await self._get(key, own)
        if value is not None or loader is None:
            return value
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(self._load(key, loader, began))
            loading.add_done_callback(
                lambda done: (self._loading.pop(key, None), done.cancelled() or done.exception())
            )
        return bytearray(await asyncio.shield(loading))  # each get may change its own

    async def get_stream(self, key: str) -> AsyncIterator[bytearray]:
        """The object stripe by stripe; nothing on a miss. Raises CacheError when it is lost or
        replaced on the way.
        """
        self._enter(key)
        place = await self._find(key)
        if place is None:
            return
        of, lengths = place.of, place.shape.stripes
        for stripe, length in enumerate(lengths):
            for attempt in range(ATTEMPTS):
                part = bytearray(length)
                try:
                    await self._read(key, place, stripe, part)
                except StripeLost as lost:
                    await self._report(key, place, lost.bad)
                    again = await self._find(key)
                    if again is None or again.of != of or attempt == ATTEMPTS - 1:
                        raise CacheError(
                            f"{key!r} was lost or replaced while it was read."
                        ) from None
                    place = again
                else:
                    break
            yield part

    async def delete(self, key: str) -> bool:
        """Forget ``key``. Return whether it was there."""
        self._enter(key)
        self._near.changed(key)
        try:
            return bool((await self._proxies.ask(key, "delete", key=key))["exists"])
        finally:
            self._near.changed(key)

    async def stat(self, key: str) -> Stat | None:
        """What the cache knows of ``key`` without reading it; None on a miss."""
        self._enter(key)
        head = _about(key, await self._proxies.ask(key, "find", key=key))
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
        """What each proxy says of its pool: nodes, objects, bytes, degraded and lost objects, bytes
        moved.
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

    async def _find(self, key: str) -> ObjectPlace | None:
        head = _about(key, await self._proxies.ask(key, "find", key=key, spread=True))
        return msgspec.convert(head, ObjectPlace) if head["exists"] else None

    async def _report(self, key: str, place: ObjectPlace, bad: dict[int, str]) -> None:
        if bad:
            try:
                await self._proxies.ask(
                    key, "report", key=place.name, version=place.version, bad=bad
                )
            except CacheError:  # the proxy is gone; its follower looks for itself
                pass

    # --- writing ---

    async def _copy(self, key: str, name: str, value: Buffer, stripe_bytes: int) -> None:
        """Put a further copy of a hot object, for whoever reads it next."""
        try:
            await self._write(
                key, len(value), self._parts(memoryview(value), stripe_bytes), None, name
            )
        except CacheError as error:  # it was replaced meanwhile, or there is no room
            log.info("no further copy of %r was made: %s", key, error)

    async def _put(
        self,
        key: str,
        size: int,
        parts: AsyncIterable[Buffer],
        code: tuple[int, int] | None,
        loaded_s: float | None = None,
    ) -> Receipt:
        self._near.changed(key)
        try:
            return await self._write(key, size, parts, code, loaded_s=loaded_s)
        finally:
            self._near.changed(key)

    async def _write(
        self,
        key: str,
        size: int,
        parts: AsyncIterable[Buffer],
        code: tuple[int, int] | None,
        copy: str = "",
        loaded_s: float | None = None,
    ) -> Receipt:
        target = Code(*code) if code else self._code or code_for(size)
        begun = await self._proxies.ask(
            key,
            "begin",
            key=key,
            size=size,
            code=[target.d, target.p],
            stripe_bytes=self._stripe_bytes,
            copy=copy,
            loaded_s=loaded_s,
        )
        name = copy or key
        _about(name, begun)
        shape, version = msgspec.convert(begun["shape"], Shape), begun["version"]
        missing: set[int] = set()
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
        answer = await self._proxies.ask(
            key, "commit", key=name, version=version, missing=sorted(missing)
        )
        return Receipt(key, version, size, shape.code, answer["protection"], target.p)

    async def _store(
        self, address: str, chunk: Buffer, index: int, arguments: dict[str, Any]
    ) -> bool:
        try:
            call = self._peers.at(address).call(
                "put", [chunk], index=index, crc=isal.crc64(chunk), **arguments
            )
            async with time_limit(self._timeout_s):
                await call
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            return False
        return True

    async def _load(self, key: str, loader: Loader, began: float) -> memoryview:
        """Load and store a value; ``began``: when it was missed (time.monotonic)."""
        made = loader(key)
        value: Buffer = await made if inspect.isawaitable(made) else made
        view = as_bytes(value)
        self._enter(key)
        loaded_s = time.monotonic() - began
        try:
            await self._put(key, len(view), self._parts(view), None, loaded_s)
        except CacheError:  # the value is good, whether it could be kept or not
            pass
        return view

    # --- reading ---

    async def _get(self, key: str, own: bool) -> bytearray | None:
        """The object; ``own``: for the caller to change, else perhaps what the near cache holds."""
        self.counts["gets"] += 1
        near = self._near.get(key)
        if near is not None and time.monotonic() - near.checked_at < self._near_s:
            self.counts["near"] += 1
            return bytearray(near.value) if own else near.value
        read = self._near.reads(key)
        try:
            return await self._get_far(key, near, read, own)
        finally:
            self._near.done(key, read)

    async def _get_far(
        self, key: str, near: NearObject | None, read: object, own: bool
    ) -> bytearray | None:
        for _ in range(ATTEMPTS):
            sent_at = time.monotonic()
            place = await self._find(key)
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
        about = (place.name, place.version, place.shape, place.at)
        bad = await self._stripes.read(*about, stripe, out)
        await self._report(key, place, bad)
