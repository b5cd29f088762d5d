"""What so much memory would be worth: hits and bytes served a second by bytes of memory. Pure: the
caller says what time it is.

A read hits in a cache of least recently used objects when the bytes of all objects used since the
object was used last, and its own, fit into the memory (its stack distance: Mattson et al., 1970).
Distances are followed for a sample of the keys, those whose hash is below a threshold, and scaled
by its share; the threshold falls when the sample grows too large (SHARDS with a fixed size:
Waldspurger et al., FAST 2015). What a sample that has too few or too many of the hottest keys gets
wrong is put right at the smallest distance (SHARDS-adj). What was seen long ago counts less.

It knows nothing of nodes; what a node is worth is :func:`worth`'s.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE = 8192
"""Keys that are followed at most."""
HALF_LIFE_S = 1800.0
FORGET = 8
"""A key that was not used for so many half-lives is not followed any more."""
STEPS = 16
"""Distances are told apart by a 16th of a power of two, 4 %."""
MOST_NODES = 4096
_SPACE = 1 << 64


@dataclass
class _Followed:
    slot: int
    bytes: int
    size: int
    used: float
    hash: int


@dataclass(frozen=True)
class DemandCurve:
    """What was read again, by what it takes to hit."""

    bytes: tuple[float, ...] = ()
    """Memory, growing."""
    hits_s: tuple[float, ...] = ()
    """Hits a second that so much memory has."""
    bytes_s: tuple[float, ...] = ()
    """Bytes a second that it serves."""

    def at(self, memory: float) -> tuple[float, float]:
        """Hits and bytes a second of ``memory`` bytes."""
        i = bisect_right(self.bytes, memory)
        return (self.hits_s[i - 1], self.bytes_s[i - 1]) if i else (0.0, 0.0)


class KeyDemand:
    """The reads of one proxy's keys.

    Args:
        sample: keys that are followed at most.
        half_life_s: after which what was read counts half; infinite: all counts the same.
    """

    def __init__(self, sample: int = SAMPLE, half_life_s: float = HALF_LIFE_S) -> None:
        self._most = sample
        self._half_life_s = half_life_s
        self._threshold = _SPACE
        self._keys: dict[str, _Followed] = {}
        self._by_hash: list[tuple[int, str]] = []
        self._tree = _Sums(4 * sample)
        self._next = 0
        self._again: dict[int, tuple[float, float]] = {}
        """Step of the distance → (reads, bytes), in units of the newest time."""
        self._reads = self._sampled = 0.0
        self._bytes = self._sampled_bytes = 0.0
        self._since: float | None = None
        self._now = 0.0

    @property
    def share(self) -> float:
        """The share of all keys that is followed."""
        return self._threshold / _SPACE

    def observed_s(self, now: float) -> float:
        """Seconds since the first read or write."""
        return 0.0 if self._since is None else now - self._since

    def read(self, key: str, now: float, size: int = 0) -> float | None:
        """A get; ``size``: of what it found, 0 where nothing. Return the stack distance in bytes,
        None where it is not known.
        """
        self._pass(now)
        self._reads += 1.0
        self._bytes += size
        hashed = _hash(key)
        if hashed >= self._threshold:
            return None
        weight = 1.0 / self.share
        self._sampled += weight
        self._sampled_bytes += weight * size
        sample = self._keys.get(key)
        if sample is None:
            return None
        distance = self._tree.beyond(sample.slot) * weight + sample.bytes
        step = math.ceil(STEPS * math.log2(max(1.0, distance)))
        reads, served = self._again.get(step, (0.0, 0.0))
        self._again[step] = (reads + weight, served + weight * sample.size)
        self._use(sample, now)
        return distance

    def wrote(self, key: str, size: int, taken: int, now: float) -> None:
        """A put of ``size`` bytes, which take ``taken`` bytes of memory."""
        self._pass(now)
        hashed = _hash(key)
        if hashed >= self._threshold:
            return
        self.forget(key)
        sample = self._keys[key] = _Followed(-1, taken, size, now, hashed)
        heapq.heappush(self._by_hash, (-hashed, key))
        self._use(sample, now)
        while len(self._keys) > self._most:
            self._threshold = -self._by_hash[0][0]
            while self._by_hash and -self._by_hash[0][0] >= self._threshold:
                self._lose(heapq.heappop(self._by_hash))

    def forget(self, key: str) -> None:
        """It was deleted: who reads it next finds nothing."""
        sample = self._keys.pop(key, None)
        if sample is not None:
            self._tree.add(sample.slot, -sample.bytes)

    def curve(self, now: float) -> DemandCurve:
        """What is known now."""
        self._pass(now)
        span = self._span_s(now)
        if not span or not self._again:
            return DemandCurve()
        steps = sorted(self._again)
        hits = sum(reads for reads, _ in self._again.values())
        size = sum(size for _, size in self._again.values())
        more = self._reads - self._sampled  # of the hottest keys, which a sample may have or not
        at = [2.0 ** (step / STEPS) for step in steps]
        rates: list[tuple[float, float]] = []
        # Few large objects are most bytes, and a sample may have too many of them, or none.
        of_all = self._bytes / self._sampled_bytes if self._sampled_bytes else 1.0
        reads_sum, bytes_sum = more, of_all * more * size / hits
        for step in steps:
            reads_sum += self._again[step][0]
            bytes_sum += of_all * self._again[step][1]
            before = rates[-1] if rates else (0.0, 0.0)
            rates.append((max(before[0], reads_sum / span), max(before[1], bytes_sum / span)))
        return DemandCurve(tuple(at), tuple(h for h, _ in rates), tuple(b for _, b in rates))

    # --- inside ---

    def _span_s(self, now: float) -> float:
        """Seconds that the fading counts stand for."""
        lasted = self.observed_s(now)
        if math.isinf(self._half_life_s):
            return lasted
        mean = self._half_life_s / math.log(2)
        return mean * -math.expm1(-lasted / mean)

    def _pass(self, now: float) -> None:
        """Time passes: what was counted fades."""
        if self._since is None:
            self._since = self._now = now
        if now <= self._now or math.isinf(self._half_life_s):
            return
        keep = 0.5 ** ((now - self._now) / self._half_life_s)
        if keep > 0.99:  # not at every read
            return
        self._now = now
        self._reads *= keep
        self._sampled *= keep
        self._bytes *= keep
        self._sampled_bytes *= keep
        self._again = {
            step: (reads * keep, size * keep) for step, (reads, size) in self._again.items()
        }

    def _use(self, sample: _Followed, now: float) -> None:
        if sample.slot >= 0:
            self._tree.add(sample.slot, -sample.bytes)
        if self._next == self._tree.size:
            self._compact(now)
        sample.slot, sample.used = self._next, now
        self._next += 1
        self._tree.add(sample.slot, sample.bytes)

    def _compact(self, now: float) -> None:
        """Number the keys anew, without those that were not used for long."""
        old = now - FORGET * self._half_life_s
        samples = sorted(
            ((k, f) for k, f in self._keys.items() if f.used >= old), key=lambda item: item[1].slot
        )
        self._keys = dict(samples)
        self._by_hash = [(-f.hash, key) for key, f in samples]
        heapq.heapify(self._by_hash)
        self._tree = _Sums(self._tree.size)
        self._next = 0
        for _, f in samples:
            f.slot = self._next
            self._tree.add(f.slot, f.bytes)
            self._next += 1
        if len(samples) < self._most // 4:
            # Keys that are let in again are new ones at their first read: too low for a while.
            self._threshold = min(_SPACE, 2 * self._threshold)

    def _lose(self, entry: tuple[int, str]) -> None:
        """Out of the sample; an entry of the heap may be of a key that is gone already."""
        sample = self._keys.get(entry[1])
        if sample is not None and sample.hash == -entry[0]:
            self.forget(entry[1])


class _Sums:
    """Sums over ranges of slots that change (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tree = [0] * (size + 1)
        self._all = 0

    def add(self, slot: int, amount: int) -> None:
        self._all += amount
        i = slot + 1
        while i <= self.size:
            self._tree[i] += amount
            i += i & -i

    def beyond(self, slot: int) -> int:
        """The sum over all slots after this one."""
        total, i = 0, slot + 1
        while i > 0:
            total += self._tree[i]
            i -= i & -i
        return self._all - total


def _hash(key: str) -> int:
    data = key.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"demand").digest(), "big")


def worth(curves: Mapping[int, DemandCurve], per_gb: float, node_bytes: float) -> dict[int, float]:
    """Nodes → what they are worth, samples/s.

    Args:
        curves: by the proxy's slot; each of them has the same part of every pool of nodes.
        per_gb: samples that a gigabyte served from memory is worth.
        node_bytes: memory of one node that holds objects.
    """
    proxies = max(1, len(curves))
    furthest = max((c.bytes[-1] for c in curves.values() if c.bytes), default=0.0)
    last = min(MOST_NODES, max(1, math.ceil(furthest * proxies / max(1.0, node_bytes))))
    sizes = sorted({math.ceil(2 ** (i / 2)) for i in range(2 * last.bit_length())} | {last})
    values = {
        k: float(
            f"{sum(c.at(k * node_bytes / proxies)[1] for c in curves.values()) * per_gb / 1e9:.3g}"
        )
        for k in sizes
        if k <= last
    }
    whole = values[last]
    enough = next(k for k in sorted(values) if values[k] >= whole)
    return {k: v for k, v in values.items() if k <= enough}
