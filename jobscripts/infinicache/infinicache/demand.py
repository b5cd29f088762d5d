"""The benefit of memory: hits and bytes served per second as a function of the memory. Pure: the
caller passes the time.

In a cache that drops the least recently used object, a read is a hit if the memory holds all
objects used since the last use of this one, and this one (the stack distance: Mattson et al.,
1970). Distances are recorded for a sample of the keys, those whose hash is below a threshold, and
scaled by the share of the sample. The threshold falls when the sample grows too large (SHARDS with
a fixed size: Waldspurger et al., FAST 2015). If the sample has too few or too many of the hottest
keys, the smallest distance is corrected (SHARDS-adj). Old reads count less.

:func:`worth` converts the benefit of memory to the worth of nodes.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

MAX_SAMPLED_KEYS = 8192
"""Maximum number of sampled keys."""
HALF_LIFE_S = 1800.0
MAX_IDLE_HALF_LIVES = 8
"""Number of half-lives without a use after which a key leaves the sample."""
CLASSES_PER_DOUBLING = 16
"""Number of classes of distances per power of two: a class is 4 % wide."""
MAX_NODES = 4096
_SPACE = 1 << 64


@dataclass
class _SampledKey:
    slot: int
    bytes: int
    size: int
    used: float
    hash: int


@dataclass(frozen=True)
class DemandCurve:
    """The benefit of memory for reads of keys that were read or written before."""

    bytes: tuple[float, ...] = ()
    """Sizes of the memory, ascending, bytes."""
    hits_s: tuple[float, ...] = ()
    """Hits per second with that memory."""
    bytes_s: tuple[float, ...] = ()
    """Bytes served per second with that memory."""

    def at(self, memory: float) -> tuple[float, float]:
        """Return the hits and the bytes per second of a memory of ``memory`` bytes."""
        i = bisect_right(self.bytes, memory)
        return (self.hits_s[i - 1], self.bytes_s[i - 1]) if i else (0.0, 0.0)


class KeyDemand:
    """The reads of one proxy's keys.

    Args:
        sample: maximum number of sampled keys.
        half_life_s: age at which a read counts half, seconds; infinite: all reads count the same.
    """

    def __init__(self, sample: int = MAX_SAMPLED_KEYS, half_life_s: float = HALF_LIFE_S) -> None:
        self._most = sample
        self._half_life_s = half_life_s
        self._threshold = _SPACE
        self._keys: dict[str, _SampledKey] = {}
        self._by_hash: list[tuple[int, str]] = []
        self._tree = _Sums(4 * sample)
        self._next = 0
        self._rereads: dict[int, tuple[float, float]] = {}
        """Class of the distance → (reads, bytes), decayed to ``_now``."""
        self._reads = self._sampled = 0.0
        self._bytes = self._sampled_bytes = 0.0
        self._since: float | None = None
        self._now = 0.0

    @property
    def share(self) -> float:
        """The share of all keys that is in the sample."""
        return self._threshold / _SPACE

    def observed_s(self, now: float) -> float:
        """Return the seconds since the first read or write."""
        return 0.0 if self._since is None else now - self._since

    def read(self, key: str, now: float, size: int = 0) -> float | None:
        """Record a get. ``size``: size of the object, bytes; 0 on a miss. Return the stack distance
        in bytes; None if it is not known.
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
        step = math.ceil(CLASSES_PER_DOUBLING * math.log2(max(1.0, distance)))
        reads, served = self._rereads.get(step, (0.0, 0.0))
        self._rereads[step] = (reads + weight, served + weight * sample.size)
        self._use(sample, now)
        return distance

    def write(self, key: str, size: int, taken: int, now: float) -> None:
        """Record a put of ``size`` bytes, which occupy ``taken`` bytes of memory."""
        self._pass(now)
        hashed = _hash(key)
        if hashed >= self._threshold:
            return
        self.forget(key)
        sample = self._keys[key] = _SampledKey(-1, taken, size, now, hashed)
        heapq.heappush(self._by_hash, (-hashed, key))
        self._use(sample, now)
        while len(self._keys) > self._most:
            self._threshold = -self._by_hash[0][0]
            while self._by_hash and -self._by_hash[0][0] >= self._threshold:
                self._leave_sample(heapq.heappop(self._by_hash))

    def forget(self, key: str) -> None:
        """Record the deletion of ``key``: the next read is a miss."""
        sample = self._keys.pop(key, None)
        if sample is not None:
            self._tree.add(sample.slot, -sample.bytes)

    def curve(self, now: float) -> DemandCurve:
        """Return the current estimate."""
        self._pass(now)
        span = self._span_s(now)
        if not span or not self._rereads:
            return DemandCurve()
        steps = sorted(self._rereads)
        hits = sum(reads for reads, _ in self._rereads.values())
        size = sum(size for _, size in self._rereads.values())
        # of the hottest keys, of which a sample may have too few or too many
        more = self._reads - self._sampled
        at = [2.0 ** (step / CLASSES_PER_DOUBLING) for step in steps]
        rates: list[tuple[float, float]] = []
        # A few large objects make up most bytes, and the sample may have too many or none of them.
        of_all = self._bytes / self._sampled_bytes if self._sampled_bytes else 1.0
        reads_sum, bytes_sum = more, of_all * more * size / hits
        for step in steps:
            reads_sum += self._rereads[step][0]
            bytes_sum += of_all * self._rereads[step][1]
            before = rates[-1] if rates else (0.0, 0.0)
            rates.append((max(before[0], reads_sum / span), max(before[1], bytes_sum / span)))
        return DemandCurve(tuple(at), tuple(h for h, _ in rates), tuple(b for _, b in rates))

    # --- inside ---

    def _span_s(self, now: float) -> float:
        """Return the time to which the decayed counts correspond, seconds."""
        lasted = self.observed_s(now)
        if math.isinf(self._half_life_s):
            return lasted
        mean = self._half_life_s / math.log(2)
        return mean * -math.expm1(-lasted / mean)

    def _pass(self, now: float) -> None:
        """Advance the time to ``now``, and decay the counts."""
        if self._since is None:
            self._since = self._now = now
        if now <= self._now or math.isinf(self._half_life_s):
            return
        keep = 0.5 ** ((now - self._now) / self._half_life_s)
        if keep > 0.99:  # decay only now and then, not at every read
            return
        self._now = now
        self._reads *= keep
        self._sampled *= keep
        self._bytes *= keep
        self._sampled_bytes *= keep
        self._rereads = {
            step: (reads * keep, size * keep) for step, (reads, size) in self._rereads.items()
        }

    def _use(self, sample: _SampledKey, now: float) -> None:
        if sample.slot >= 0:
            self._tree.add(sample.slot, -sample.bytes)
        if self._next == self._tree.size:
            self._compact(now)
        sample.slot, sample.used = self._next, now
        self._next += 1
        self._tree.add(sample.slot, sample.bytes)

    def _compact(self, now: float) -> None:
        """Renumber the keys, and drop those that were not used for a long time."""
        old = now - MAX_IDLE_HALF_LIVES * self._half_life_s
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
            # Keys that enter the sample again count as new at their first read, so that the counts
            # are too low for a while.
            self._threshold = min(_SPACE, 2 * self._threshold)

    def _leave_sample(self, entry: tuple[int, str]) -> None:
        """Drop a key from the sample. The heap may list keys that have left the sample already."""
        sample = self._keys.get(entry[1])
        if sample is not None and sample.hash == -entry[0]:
            self.forget(entry[1])


class _Sums:
    """Sums over ranges of slots, with updates (a Fenwick tree)."""

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
        """Return the sum over all slots after this one."""
        total, i = 0, slot + 1
        while i > 0:
            total += self._tree[i]
            i -= i & -i
        return self._all - total


def _hash(key: str) -> int:
    data = key.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"demand").digest(), "big")


def worth(curves: Mapping[int, DemandCurve], per_gb: float, node_bytes: float) -> dict[int, float]:
    """Return the worth of each number of nodes, samples/s.

    Args:
        curves: slot of a proxy → its demand curve. Each proxy has the same part of the nodes.
        per_gb: worth of a gigabyte served from memory, samples.
        node_bytes: memory of one node for objects, bytes.
    """
    proxies = max(1, len(curves))
    furthest = max((c.bytes[-1] for c in curves.values() if c.bytes), default=0.0)
    last = min(MAX_NODES, max(1, math.ceil(furthest * proxies / max(1.0, node_bytes))))
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
