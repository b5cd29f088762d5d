"""Fetches samples from the other nodes of the job, many in one request, and sends each node samples
that it owns.

Decides when a node is not asked: for a time after it did not answer, which doubles with each
failure. The samples of a lost node count as absent; that raises no error.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from malletrain.datacache.serving import MAX_BATCH_BYTES, PROTOCOL
from malletrain.datacache.store import DataSetIdentity, check_sum
from malletrain.streams.connection import CallFailed, ConnectionLost, PeerConnections
from malletrain.waits import time_limit

ANSWER_S = 5.0
"""Time in which a node must answer, seconds."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Time for which a node is not asked after a first failure, and its maximum after further failures,
seconds.
"""


@dataclass
class _NodeHealth:
    """The newest observations of another node."""

    pause_s: float = 0.0
    """Length of the newest pause, seconds; 0 after an answer."""
    retry_at: float = -math.inf
    """Time from which it is asked again (monotonic, seconds)."""
    full: bool = False
    """Whether its store takes no more samples."""

    def failed(self, now: float) -> None:
        """Note a request without an answer. Several that were sent together count as one."""
        self.full = False
        if now >= self.retry_at:
            self.pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * self.pause_s))
            self.retry_at = now + self.pause_s

    def answered(self, now: float) -> None:
        """Note an answer. One of a request that was sent before a failure changes nothing."""
        if now >= self.retry_at:
            self.pause_s = 0.0


class SamplePeers:
    """Connections of one thread to the other nodes. A forked process makes connections of its own.

    Args:
        key: key of the job's data caches.
        data: the data set.
    """

    def __init__(self, key: bytes, data: DataSetIdentity) -> None:
        self._key, self._data = key, data
        self._health: dict[str, _NodeHealth] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: PeerConnections | None = None
        self._process = 0
        self._abandoned: Any = None
        """Loop and connections of the parent, which a forked process must not close."""

    def fetch(self, samples_of: Mapping[str, Sequence[int]]) -> dict[int, Any]:
        """Return the samples that other nodes have, packed, by number. All nodes are asked at the
        same time.

        Args:
            samples_of: address of a node → numbers of samples.
        """
        requests = [
            self._fetch(address, samples)
            for address, samples in samples_of.items()
            if self._may_ask(address)
        ]
        packed: dict[int, Any] = {}
        for samples in self._run(requests):
            packed.update(samples)
        return packed

    def offer(self, samples: Mapping[str, Mapping[int, Any]]) -> None:
        """Send samples to the nodes that own them, unless their stores are full.

        Args:
            samples: address of a node → number of a sample → its packed bytes.
        """
        self._run(
            [
                self._offer(address, list(owned.items()))
                for address, owned in samples.items()
                if self._may_ask(address) and not self._health_of(address).full
            ]
        )

    def takes(self, address: str) -> bool:
        """Return whether the node at ``address`` would take samples."""
        return self._may_ask(address) and not self._health_of(address).full

    def close(self) -> None:
        """Close the connections."""
        if self._loop is not None and self._process == os.getpid():
            if self._peers is not None:
                self._peers.close()
            self._loop.close()
        self._loop = self._peers = None

    # --- inside ---

    def _health_of(self, address: str) -> _NodeHealth:
        return self._health.setdefault(address, _NodeHealth())

    def _may_ask(self, address: str) -> bool:
        return bool(address) and time.monotonic() >= self._health_of(address).retry_at

    def _run(self, requests: list[Any]) -> list[Any]:
        if not requests:
            return []
        if self._loop is None or self._process != os.getpid():
            # A forked process leaves its parent's loop and sockets as they are.
            self._abandoned = (self._loop, self._peers, self._abandoned)
            self._loop, self._process = asyncio.new_event_loop(), os.getpid()
            self._peers = PeerConnections(self._key, PROTOCOL)

        async def together() -> list[Any]:
            return await asyncio.gather(*requests)

        return self._loop.run_until_complete(together())

    async def _call(self, address: str, op: str, body: Iterable[Any] = (), **arguments: Any) -> Any:
        """Call a node. Return None if it does not answer."""
        data, health = self._data, self._health_of(address)
        assert self._peers is not None
        try:
            async with time_limit(ANSWER_S):
                answer = await self._peers.at(address).call(
                    op,
                    list(body),
                    name=data.name,
                    length=data.length,
                    first=data.first,
                    **arguments,
                )
        except (ConnectionLost, CallFailed, OSError, asyncio.TimeoutError):
            health.failed(time.monotonic())
            return None
        health.answered(time.monotonic())
        return answer

    async def _fetch(self, address: str, samples: Sequence[int]) -> dict[int, Any]:
        packed: dict[int, Any] = {}
        remaining = list(samples)
        while remaining:
            answer = await self._call(address, "get", samples=remaining)
            if answer is None:
                break
            head, body = answer
            try:
                self._health_of(address).full = bool(head["full"])
                sent = intact_samples(head, body)
                last = head["samples"][-1] if head["samples"] else None
                more = bool(head["more"])
            except (KeyError, TypeError, ValueError):
                break
            packed.update(sent)
            if not more or last not in remaining:
                break
            remaining = remaining[remaining.index(last) + 1 :]
        return packed

    async def _offer(self, address: str, owned: list[tuple[int, Any]]) -> None:
        while owned:
            batch, size = 0, 0
            while batch < len(owned) and (
                not batch or size + len(owned[batch][1]) < MAX_BATCH_BYTES
            ):
                size += len(owned[batch][1])
                batch += 1
            part, owned = owned[:batch], owned[batch:]
            answer = await self._call(
                address,
                "put",
                [data for _, data in part],
                samples=[sample for sample, _ in part],
                sizes=[len(data) for _, data in part],
                sums=[check_sum(sample, data) for sample, data in part],
            )
            if answer is None:
                return
            self._health_of(address).full = bool(answer[0].get("full"))
            if self._health_of(address).full:
                return


def intact_samples(head: Mapping[str, Any], body: Any) -> dict[int, Any]:
    """Return the samples of an answer whose check sums are correct.

    Args:
        head: their numbers, sizes and check sums.
        body: their bytes, one after another.
    """
    view, at = memoryview(body), 0
    intact: dict[int, Any] = {}
    for sample, size, total in zip(head["samples"], head["sizes"], head["sums"], strict=True):
        data = view[at : at + size]
        at += size
        if len(data) == size and check_sum(sample, data) == total:
            intact[sample] = data
    return intact
