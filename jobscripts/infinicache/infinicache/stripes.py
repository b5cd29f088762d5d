"""Reads one stripe of an object from the nodes that have its chunks.

Requests d chunks at once, and another one whenever one fails or takes longer than usual. Checks
every chunk (CRC-64 and length). The caller reports bad chunks.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from infinicache import isal
from infinicache.codec import chunk_bytes, rebuild
from infinicache.connection import CallFailed, ConnectionLost, Peers
from infinicache.isal import Buffer
from infinicache.objects import Shape

HEDGE_FACTOR, HEDGE_LEAST_S, HEDGE_FIRST_S = 2.0, 0.002, 0.05


class StripeLost(Exception):
    """The object cannot be read with the known places. ``bad``: chunk → node that did not return
    it.
    """

    def __init__(self, bad: dict[int, str]) -> None:
        super().__init__()
        self.bad = bad


def is_chunk(
    head: dict[str, Any], body: Buffer, chunk: tuple[str, int, int, int], size: int
) -> bool:
    """Return whether an answer is the requested chunk, undamaged.

    Args:
        head: head of the answer.
        body: its content.
        chunk: (key, version, stripe, index) that was requested.
        size: expected size, bytes.
    """
    return (
        tuple(head.get("of", ())) == chunk and len(body) == size and isal.crc64(body) == head["crc"]
    )


class StripeReader:
    """Reads stripes, and records how long chunks of each size usually take.

    Args:
        peers: connections to the nodes.
        counts: counters, of which ``degraded`` and ``hedged`` are increased.
        hedge_s, timeout_s: see :class:`infinicache.client.AsyncCache`.
    """

    def __init__(
        self, peers: Peers, counts: dict[str, int], hedge_s: float | None, timeout_s: float
    ) -> None:
        self._peers = peers
        self._counts = counts
        self._hedge_s = hedge_s
        self._timeout_s = timeout_s
        self._usual: dict[int, float] = {}

    async def read(
        self, key: str, version: int, shape: Shape, at: dict[int, str], stripe: int, out: Buffer
    ) -> dict[int, str]:
        """Read one stripe into ``out``. Return chunk → node of the chunks that could not be read.

        Args:
            key, version, shape: the object.
            at: index of a chunk → address of its node.
            stripe: number of the stripe.
            out: buffer of the stripe's size.

        Raises:
            StripeLost: fewer than d chunks could be read.
        """
        if not len(out):
            return {}
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
                        raise StripeLost(bad)
                    begin(d - len(good))
                now = time.perf_counter()
                if now > deadline:
                    raise StripeLost({**bad, **{i: at[i] for i in tasks.values()}})
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
                    self._counts["hedged"] += 1
                    begin(len(ask))
        finally:
            late = list(tasks)
            for task in late:
                task.cancel()
            if late:
                await asyncio.gather(
                    *late, return_exceptions=True
                )  # no late chunk may write into the caller's buffer
        self._learn_usual(size, time.perf_counter() - began)
        self._assemble(good, own, view, size, shape)
        if bad:
            self._counts["degraded"] += 1
        return bad

    def _assemble(
        self,
        good: dict[int, Buffer],
        own: dict[int, Buffer],
        view: memoryview,
        size: int,
        shape: Shape,
    ) -> None:
        """Copy the chunks to their places in ``out``. Most of them are there already."""
        for i in [i for i in good if i < shape.d]:
            if good[i] is not own.get(i):
                view[i * size : (i + 1) * size] = memoryview(good[i])[
                    : max(0, len(view) - i * size)
                ]
        missing = [i for i in range(shape.d) if i not in good and i * size < len(view)]
        buffers = [own[i] if i in own else bytearray(size) for i in missing]
        rebuild(good, missing, buffers, shape.code)
        for i, chunk in zip(missing, buffers, strict=True):
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
        """Return one chunk after checking it; None if it cannot be read."""
        peer = self._peers.at(address)
        try:
            head, body = await peer.call(
                "get", (), into, key=key, version=version, stripe=stripe, index=index
            )
        except (ConnectionLost, CallFailed):
            return None
        return body if is_chunk(head, body, (key, version, stripe, index), size) else None

    def _usual_s(self, size: int) -> float:
        usual = self._usual.get(size.bit_length())
        return HEDGE_FIRST_S if usual is None else max(HEDGE_LEAST_S, HEDGE_FACTOR * usual)

    def _learn_usual(self, size: int, took: float) -> None:
        """Update the running median of the times, which a single straggler does not change."""
        band = size.bit_length()
        usual = self._usual.get(band, took)
        self._usual[band] = usual * (1.1 if took > usual else 0.95)
