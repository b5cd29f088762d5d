"""The client of the cache for asyncio: ``put``, ``get``, ``delete``, ``stat``, and streams of
objects that do not fit into memory twice.

Coding happens here. A get asks for as many chunks as it needs at once; when one of them fails or is
later than usual, the others are asked for too, and the first d that come make the object; the rest
is cancelled. What came is checked (CRC-64 and version); a chunk that fails is as good as lost, and
reported to the proxy, which has it made anew. Values are immutable: a put under a known key
replaces the object, and from its beginning on the old one is not read any more.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from infinicache import isal
from infinicache.codec import STRIPE_BYTES, Code, chunk_bytes, code_for, encode, rebuild
from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.isal import Buffer
from infinicache.objects import CacheError, Receipt, Shape, Stat, TooLarge, Unavailable
from infinicache.ring import Ring

ATTEMPTS = 3
HEDGE_FACTOR, HEDGE_LEAST_S, HEDGE_FIRST_S = 2.0, 0.002, 0.05
CALL_S = 30.0
_RAISES = {"too large": TooLarge, "unavailable": Unavailable}

Loader = Callable[[str], Buffer | Awaitable[Buffer]]


class _Lost(Exception):
    """The object cannot be read as it was found; ``bad``: chunk → node that did not give it."""

    def __init__(self, bad: dict[int, str]) -> None:
        super().__init__()
        self.bad = bad


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
    ) -> None:
        if not addresses:
            raise ValueError("A cache has at least one address; give those of its members.")
        self._known = list(addresses)
        self._peers = Peers(key)
        self._code = Code(*code) if code else None
        self._hedge_s = hedge_s
        self._stripe_bytes = stripe_bytes
        self._timeout_s = timeout_s
        self._proxies: list[str] = []
        self._ring = Ring(1)
        self._usual: dict[int, float] = {}
        self._loading: dict[str, asyncio.Future[bytearray]] = {}
        self.counts = {"gets": 0, "misses": 0, "degraded": 0, "hedged": 0}

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._peers.close()

    # --- the four ---

    async def put(self, key: str, value: Buffer, *, code: tuple[int, int] | None = None) -> Receipt:
        """Store ``value`` under ``key``, in place of what was there.

        Raises TooLarge when it does not fit, Unavailable when the cache cannot be reached,
        CacheError when another put or delete overtook this one. After an error the key is a miss or
        holds ``value``, never what was there before.
        """
        view = memoryview(value).cast("B")

        async def parts() -> AsyncIterator[Buffer]:
            for start in range(0, max(1, len(view)), self._stripe_bytes):
                yield view[start : start + self._stripe_bytes]

        return await self._put(key, len(view), parts(), code)

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

        async def parts() -> AsyncIterator[Buffer]:
            left, have = size, bytearray()
            async for piece in pieces:
                have += piece
                while len(have) >= self._stripe_bytes or (have and len(have) >= left):
                    part = have[: min(self._stripe_bytes, left)]
                    del have[: len(part)]
                    left -= len(part)
                    if have and not left:
                        raise CacheError(
                            f"The stream for {key!r} has more than the {size} bytes it was "
                            "announced with."
                        )
                    yield part
            if left:
                raise CacheError(
                    f"The stream for {key!r} ended {left - len(have)} bytes before the {size} "
                    "it was announced with."
                )
            if not size:
                yield b""

        return await self._put(key, size, parts(), code)

    async def get(self, key: str, loader: Loader | None = None) -> bytearray | None:
        """The object under ``key``, None on a miss. With a ``loader``, a miss calls it, puts what
        it returns and returns that; calls for one key at one time share one load.
        """
        found = await self._get(key)
        if found is not None or loader is None:
            return found
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(self._load(key, loader))
            loading.add_done_callback(
                lambda done: (self._loading.pop(key, None), done.cancelled() or done.exception())
            )
        return await asyncio.shield(loading)

    async def get_stream(self, key: str) -> AsyncIterator[bytearray]:
        """The object stripe by stripe; nothing on a miss. Raises CacheError when it is lost or
        replaced on the way.
        """
        found = await self._find(key)
        if found is None:
            return
        version, shape, at = found
        for stripe in range(len(shape.stripes)):
            for attempt in range(ATTEMPTS):
                part = bytearray(shape.stripes[stripe])
                try:
                    await self._stripe(key, version, shape, at, stripe, part)
                except _Lost as lost:
                    await self._report(key, version, lost.bad)
                    again = await self._find(key)
                    if again is None or again[0] != version or attempt == ATTEMPTS - 1:
                        raise CacheError(
                            f"{key!r} was lost or replaced while it was read."
                        ) from None
                    at = again[2]
                else:
                    break
            yield part

    async def delete(self, key: str) -> bool:
        """Forget ``key``. Returns whether it was there."""
        return bool((await self._ask(key, "delete", key=key))["found"])

    async def stat(self, key: str) -> Stat | None:
        """What the cache knows of ``key`` without reading it; None on a miss."""
        head = await self._ask(key, "find", key=key)
        if not head["found"]:
            return None
        shape = msgspec.convert(head["shape"], Shape)
        return Stat(
            key,
            head["version"],
            shape.size,
            shape.code,
            head["protection"],
            shape.wanted_p,
            head["at"],
        )

    async def summary(self) -> list[dict[str, Any]]:
        """What each proxy says of its pool: nodes, objects, bytes, degraded and lost objects, bytes
        moved.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._proxies:
                    await self._learn()
                return [
                    (await self._call(address, "summary"))[0]
                    for address in dict.fromkeys(self._proxies)
                ]
            except (ConnectionLost, CallFailed, Unavailable) as error:
                self._proxies = []
                if time.monotonic() > deadline:
                    raise Unavailable(str(error)) from None
            await asyncio.sleep(0.05)

    # --- proxies ---

    async def _learn(self) -> None:
        """Ask whoever answers first who the proxies are."""
        failures = []
        for address in dict.fromkeys([*self._known, *self._proxies]):
            try:
                head, _ = await self._call(address, "topology")
            except (ConnectionLost, CallFailed, Unavailable) as error:
                failures.append(str(error))
                continue
            if head["proxies"]:
                if len(self._proxies) != len(head["proxies"]):
                    self._ring = Ring(len(head["proxies"]))
                self._proxies = head["proxies"]
                self._known = list(dict.fromkeys([*head["members"], *self._known]))[:64]
                return
        raise Unavailable(
            f"No member of the cache answers. {' '.join(dict.fromkeys(failures))[:300]}"
        )

    async def _call(self, address: str, op: str, /, **arguments: Any) -> tuple[dict[str, Any], Any]:
        try:
            return await asyncio.wait_for(
                self._peers.at(address).call(op, **arguments), self._timeout_s
            )
        except asyncio.TimeoutError:
            raise ConnectionLost(
                f"{address} did not answer within {self._timeout_s:g} s."
            ) from None

    async def _ask(self, key: str, op: str, /, **arguments: Any) -> dict[str, Any]:
        """A request to the proxy of ``key``, wherever it is now."""
        pause = 0.05
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if not self._proxies:
                    await self._learn()
                head, _ = await self._call(self._proxies[self._ring.slot(key)], op, **arguments)
                return head
            except CallFailed as error:
                if error.code != "unavailable" or op == "commit" or time.monotonic() > deadline:
                    raise _RAISES.get(error.code, CacheError)(str(error)) from None
                last: Exception = error
            except (ConnectionLost, Unavailable) as error:
                if op == "commit" or time.monotonic() > deadline:
                    raise Unavailable(str(error)) from None
                last = error
            if time.monotonic() + pause > deadline:
                raise Unavailable(str(last))
            await asyncio.sleep(pause)
            pause = min(1.0, 2 * pause)
            self._proxies = []

    async def _find(self, key: str) -> tuple[int, Shape, dict[int, str]] | None:
        head = await self._ask(key, "find", key=key)
        return (
            (head["version"], msgspec.convert(head["shape"], Shape), head["at"])
            if head["found"]
            else None
        )

    async def _report(self, key: str, version: int, bad: dict[int, str]) -> None:
        if bad:
            try:
                await self._ask(key, "report", key=key, version=version, bad=bad)
            except CacheError:  # the proxy is gone; its follower looks for itself
                pass

    # --- writing ---

    async def _put(
        self, key: str, size: int, parts: AsyncIterable[Buffer], code: tuple[int, int] | None
    ) -> Receipt:
        wanted = Code(*code) if code else self._code or code_for(size)
        begun = await self._ask(
            key,
            "begin",
            key=key,
            size=size,
            code=[wanted.d, wanted.p],
            stripe_bytes=self._stripe_bytes,
        )
        shape, version = msgspec.convert(begun["shape"], Shape), begun["version"]
        missing: set[int] = set()
        stripe = 0
        async for part in parts:
            chunks = encode(part, shape.code)
            todo = [i for i in range(shape.code.n) if i not in missing]
            arguments = {"key": key, "version": version, "shape": begun["shape"], "stripe": stripe}
            done = await asyncio.gather(
                *(self._store(begun["at"][i], chunks[i], i, arguments) for i in todo)
            )
            missing |= {i for i, ok in zip(todo, done, strict=True) if not ok}
            stripe += 1
            if len(missing) > shape.p:
                break
        answer = await self._ask(key, "commit", key=key, version=version, missing=sorted(missing))
        return Receipt(key, version, size, shape.code, answer["protection"], wanted.p)

    async def _store(
        self, address: str, chunk: Buffer, index: int, arguments: dict[str, Any]
    ) -> bool:
        try:
            call = self._peers.at(address).call(
                "put", [chunk], index=index, crc=isal.crc64(chunk), **arguments
            )
            await asyncio.wait_for(call, self._timeout_s)
        except (ConnectionLost, CallFailed, asyncio.TimeoutError):
            return False
        return True

    async def _load(self, key: str, loader: Loader) -> bytearray:
        made = loader(key)
        value: Buffer = await made if inspect.isawaitable(made) else made
        try:
            await self.put(key, value)
        except CacheError:  # the value is good, whether it could be kept or not
            pass
        return value if isinstance(value, bytearray) else bytearray(value)

    # --- reading ---

    async def _get(self, key: str) -> bytearray | None:
        self.counts["gets"] += 1
        for _ in range(ATTEMPTS):
            found = await self._find(key)
            if found is None:
                break
            version, shape, at = found
            value = bytearray(shape.size)
            view = memoryview(value)
            start, good = 0, True
            for stripe, length in enumerate(shape.stripes):
                try:
                    await self._stripe(
                        key, version, shape, at, stripe, view[start : start + length]
                    )
                except _Lost as lost:
                    await self._report(key, version, lost.bad)
                    good = False
                    break
                start += length
            if good:
                view.release()
                return value
        self.counts["misses"] += 1
        return None

    async def _stripe(
        self, key: str, version: int, shape: Shape, at: dict[int, str], stripe: int, out: Buffer
    ) -> None:
        """Read one stripe into ``out``. Raises _Lost when fewer than d chunks can be had."""
        if not len(out):
            return
        d, n = shape.d, shape.code.n
        size = chunk_bytes(len(out), d)
        view = memoryview(out).cast("B")
        own: dict[int, Buffer] = {
            i: view[i * size : (i + 1) * size] for i in range(d) if (i + 1) * size <= len(view)
        }
        ask = [i for i in range(n) if i in at]
        tasks: dict[asyncio.Task[Buffer | None], int] = {}
        good: dict[int, Buffer] = {}
        bad: dict[int, str] = {}
        began = time.perf_counter()

        def begin(count: int) -> None:
            for i in ask[:count]:
                tasks[
                    asyncio.ensure_future(
                        self._chunk(at[i], key, version, stripe, i, own.get(i), size)
                    )
                ] = i
            del ask[:count]

        eager = self._hedge_s == 0
        begin(n if eager else d)
        hedge_at = began + (self._usual_s(size) if self._hedge_s is None else self._hedge_s)
        deadline = began + self._timeout_s
        try:
            while len(good) < d:
                if not tasks:
                    if not ask:
                        raise _Lost(bad)
                    begin(d - len(good))
                now = time.perf_counter()
                if now > deadline:
                    raise _Lost({**bad, **{i: at[i] for i in tasks.values()}})
                wait = max(0.0, hedge_at - now) if ask else deadline - now
                done, _ = await asyncio.wait(
                    tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    i = tasks.pop(task)
                    chunk = task.result()
                    if chunk is None:
                        bad[i] = at[i]
                        begin(1)
                    elif len(good) < d:
                        good[i] = chunk
                if ask and not done and len(good) < d:
                    self.counts["hedged"] += 1
                    begin(len(ask))
        finally:
            late = list(tasks)
            for task in late:
                task.cancel()
            if late:
                await asyncio.gather(
                    *late, return_exceptions=True
                )  # nobody may write into our memory any more
        self._learn_usual(size, time.perf_counter() - began)
        self._assemble(good, own, view, size, shape)
        if bad:
            self.counts["degraded"] += 1
            await self._report(key, version, bad)

    def _assemble(
        self,
        good: dict[int, Buffer],
        own: dict[int, Buffer],
        view: memoryview,
        size: int,
        shape: Shape,
    ) -> None:
        """Put the chunks where they belong: most of them are there already."""
        for i in [i for i in good if i < shape.d]:
            if good[i] is not own.get(i):
                view[i * size : (i + 1) * size] = memoryview(good[i])[
                    : max(0, len(view) - i * size)
                ]
        missing = [i for i in range(shape.d) if i not in good and i * size < len(view)]
        made = [own[i] if i in own else bytearray(size) for i in missing]
        rebuild(good, missing, made, shape.code)
        for i, chunk in zip(missing, made, strict=True):
            if i not in own:
                view[i * size :] = memoryview(chunk)[: len(view) - i * size]

    async def _chunk(
        self,
        address: str,
        key: str,
        version: int,
        stripe: int,
        index: int,
        into: Buffer | None,
        size: int,
    ) -> Buffer | None:
        """One chunk, checked; None where it cannot be had."""
        peer = self._peers.at(address)
        try:
            head, body = await peer.call(
                "get", (), into, key=key, version=version, stripe=stripe, index=index
            )
        except (ConnectionLost, CallFailed):
            return None
        return body if len(body) == size and isal.crc64(body) == head["crc"] else None

    def _usual_s(self, size: int) -> float:
        usual = self._usual.get(size.bit_length())
        return HEDGE_FIRST_S if usual is None else max(HEDGE_LEAST_S, HEDGE_FACTOR * usual)

    def _learn_usual(self, size: int, took: float) -> None:
        """A running median of sorts: a straggler now and then does not move it."""
        band = size.bit_length()
        usual = self._usual.get(band, took)
        self._usual[band] = usual * (1.1 if took > usual else 0.95)
