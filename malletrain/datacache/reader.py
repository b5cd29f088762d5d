"""Reads samples for one process: from this node's memory, from other nodes, from the data set.

Decides the order of these places, and which node stores a sample that was read from the data set:
its owner, which may be this node. Nothing is evicted, so a sample for which its owner has no memory
is read from the data set each time.

:class:`SamplePeers` fetches samples from the other nodes of the job, many in one request, and sends
each node samples that it owns. Decides when a node is not asked: for a time after it did not
answer, which doubles with each failure. The samples of a lost node count as absent; that raises no
error.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from malletrain.datacache.counts import ReadCounts
from malletrain.datacache.members import Members
from malletrain.datacache.packing import CannotPackError, ClassNotImportedError, pack, unpack
from malletrain.datacache.serving import MAX_BATCH_BYTES, PROTOCOL
from malletrain.datacache.store import DataSetIdentity, NodeStore, check_sum
from malletrain.streams.connection import CallFailed, ConnectionLost, PeerConnections
from malletrain.waits import time_limit

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def owners(samples: Sequence[int], nodes: Sequence[str]) -> list[str]:
    """Return the node that owns each of ``samples``: rendezvous hashing.

    Every process of a job computes the same owner from the names of the nodes, without a table and
    without a message. If a node leaves, only its samples get another owner, spread evenly over the
    others; if one joins, it becomes the owner of an equal share, taken evenly from all.

    The scheme is that of Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
    IEEE/ACM Transactions on Networking 6(1), 1998.

    Args:
        samples: indices of samples, each from 0.
        nodes: names of the nodes of the job, at least one, in any order.

    Raises:
        ValueError: there are no nodes.
    """
    if not nodes:
        raise ValueError("A sample has no owner in a job without nodes.")
    names = sorted(set(nodes))
    if len(names) == 1:
        return [names[0]] * len(samples)
    indices = np.asarray(samples, dtype=np.uint64)
    best = np.zeros(len(indices), dtype=np.int64)
    highest = _weights(indices, names[0])
    for number, name in enumerate(names[1:], 1):
        weights = _weights(indices, name)
        higher = weights > highest
        best[higher] = number
        np.maximum(highest, weights, out=highest)
    return [names[number] for number in best.tolist()]


def _weights(indices: Any, node: str) -> Any:
    """Return the weight of each sample on a node: splitmix64 of the sample, seeded by the node."""
    seed = int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")
    value = (indices + np.uint64(1)) * _GOLDEN ^ np.uint64(seed)
    value = (value ^ (value >> _SHIFTS[0])) * _MULTIPLIERS[0]
    value = (value ^ (value >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return value ^ (value >> _SHIFTS[2])


class SampleReader:
    """The reads of one process.

    Args:
        dataset: the data set.
        store: the samples in this node's memory.
        members: the nodes of the job.
        peers: connections to them; None if this job has no secret.
        tell: tells the user a sentence, once for each key: (sentence, key).
    """

    def __init__(
        self,
        dataset: Any,
        store: NodeStore,
        members: Members,
        peers: SamplePeers | None,
        tell: Callable[[str, str], object],
    ) -> None:
        self._dataset, self._store, self._members = dataset, store, members
        self._peers, self._tell = peers, tell

    def read(
        self, samples: Sequence[int], staged: Mapping[int, Any] | None = None
    ) -> tuple[list[Any], ReadCounts]:
        """Return samples in the given order, and the counts of where they were found.

        Args:
            samples: their numbers.
            staged: packed samples that were fetched in advance.
        """
        packed: dict[int, Any] = dict(staged or {})
        peer_hits = len(packed)
        local: dict[int, Any] = {}
        missing: list[int] = []
        for sample in dict.fromkeys(samples):
            if sample in packed:
                continue
            data = self._store.get(sample)
            if data is None:
                missing.append(sample)
            else:
                local[sample] = data
        owner_of: dict[int, str] = {}
        if missing:
            addresses = self._members.addresses()
            owner_of = dict(zip(missing, owners(missing, list(addresses)), strict=True))
            fetched = self.fetch(missing, owner_of, addresses)
            peer_hits += len(fetched)
            packed.update(fetched)
        packed.update(local)
        hit_bytes = sum(len(data) for data in packed.values())
        from_source = [sample for sample in missing if sample not in packed]
        read, source_bytes, unpacked, source_s = self._read_source(from_source, owner_of)
        values = self._values(samples, packed, read)
        counts = ReadCounts(
            len(local),
            peer_hits,
            len(from_source),
            hit_bytes,
            source_bytes,
            unpacked,
            round(source_s * 1e6),
        )
        return values, counts

    def fetch(
        self,
        samples: Sequence[int],
        owner_of: Mapping[int, str] | None = None,
        addresses: Mapping[str, str] | None = None,
    ) -> dict[int, Any]:
        """Return the samples that other nodes own and have, packed.

        Args:
            samples: numbers of samples.
            owner_of: sample → node that owns it; None to compute it.
            addresses: node → its address; None for the present ones.
        """
        if self._peers is None:
            return {}
        if addresses is None:
            addresses = self._members.addresses()
        if owner_of is None:
            owner_of = dict(zip(samples, owners(samples, list(addresses)), strict=True))
        samples_of: dict[str, list[int]] = {}
        for sample in samples:
            address = addresses.get(owner_of[sample], "")
            if owner_of[sample] != self._members.node and address:
                samples_of.setdefault(address, []).append(sample)
        return self._peers.fetch(samples_of) if samples_of else {}

    def not_here(self, samples: Sequence[int]) -> list[int]:
        """Return those of ``samples`` that are not in this node's memory."""
        return [sample for sample in samples if sample not in self._store]

    # --- inside ---

    def _read_source(
        self, samples: list[int], owner_of: Mapping[int, str]
    ) -> tuple[dict[int, Any], int, int, float]:
        """Read samples from the data set and store each at its owner. Return the samples, the
        bytes of those that can be packed, the number of those that cannot, and the time of reading,
        seconds.
        """
        if not samples:
            return {}, 0, 0, 0.0
        began = time.perf_counter()
        many = getattr(self._dataset, "__getitems__", None)
        values = many(samples) if callable(many) else [self._dataset[s] for s in samples]
        source_s = time.perf_counter() - began
        addresses = self._members.addresses()
        offered: dict[str, dict[int, Any]] = {}
        size = unpacked = 0
        for sample, value in zip(samples, values, strict=True):
            try:
                data = pack(value)
            except CannotPackError as error:
                self._report_unpackable(sample, error)
                unpacked += 1
                continue
            size += len(data)
            owner = owner_of[sample]
            if owner == self._members.node:
                self._store.put(sample, data)
            elif self._peers is not None and self._peers.takes(addresses.get(owner, "")):
                offered.setdefault(addresses[owner], {})[sample] = data
        if offered and self._peers is not None:
            self._peers.offer(offered)
        return dict(zip(samples, values, strict=True)), size, unpacked, source_s

    def _report_unpackable(self, sample: int, error: CannotPackError) -> None:
        self._tell(
            f"Sample {sample} and others like it are not cached: {error}. Samples are tensors, "
            "arrays, images of PIL, numbers, texts and bytes, in tuples, named tuples, lists and "
            "dicts. Let the data set return these, and make other objects in "
            "DataCache(transform=...).",
            f"data cache packs not {error}",
        )

    def _values(
        self, samples: Sequence[int], packed: Mapping[int, Any], read: Mapping[int, Any]
    ) -> list[Any]:
        values: list[Any] = []
        repeated: set[int] = set()
        for sample in samples:
            # Two occurrences in one batch are two objects: a transform may change one of them.
            if sample in read:
                values.append(self._dataset[sample] if sample in repeated else read[sample])
            else:
                data = packed[sample]
                own = bytearray(data) if sample in repeated else data
                values.append(self._unpack_or_read(sample, own))
            repeated.add(sample)
        return values

    def _unpack_or_read(self, sample: int, data: Any) -> Any:
        """Return a sample from its packed bytes. If this process has not imported a class of it,
        read it from the data set instead, which also imports the class.
        """
        try:
            return unpack(data)
        except ClassNotImportedError as error:
            self._tell(
                f"Sample {sample} and others like it are read from the data set although they are "
                f"in memory: {error}",
                f"data cache unpacks not {error}",
            )
            return self._dataset[sample]


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
