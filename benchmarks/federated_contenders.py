"""How the contenders of ``benchmarks/federated.py`` choose clients and store samples."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from fedcase.clients import ClientRecord
from fedcase.node_cache import ReadAccount


class Chooser(Protocol):
    """Chooses the clients of a round."""

    def choose(
        self, records: Sequence[ClientRecord], count: int, number: int, random: Random
    ) -> list[int]:
        """Return ``count`` clients for round ``number``."""


class Uniform:
    """FedAvg: any client with the same probability (McMahan et al., 2017, arXiv:1602.05629)."""

    def choose(
        self, records: Sequence[ClientRecord], count: int, number: int, random: Random
    ) -> list[int]:
        """See :class:`Chooser`."""
        return random.sample([record.client for record in records], count)


class Oort:
    """Oort (Lai et al., 2021, OSDI): the clients with the highest utility, and new ones.

    The utility is samples · loss, plus a bonus for a client that was not chosen for long, times a
    penalty for one that is slower than the preferred duration. Where Oort takes the root of the
    mean squared loss of the samples, this takes their mean loss, which the clients report. The
    preferred duration is the 80th percentile of the durations and is not adapted.
    """

    def __init__(self, explore: float = 0.9, decay: float = 0.98, least: float = 0.2) -> None:
        self._explore, self._decay, self._least = explore, decay, least

    def choose(
        self, records: Sequence[ClientRecord], count: int, number: int, random: Random
    ) -> list[int]:
        """See :class:`Chooser`."""
        explored = [record for record in records if record.experienced]
        new = [record.client for record in records if not record.experienced]
        fresh = min(len(new), max(round(count * self._explore), count - len(explored)))
        self._explore = max(self._least, self._explore * self._decay)
        utilities = self.utilities(explored, number)
        # Oort draws from those within 95 % of the utility of the last one that would be chosen.
        order = sorted(explored, key=lambda record: utilities[record.client], reverse=True)
        exploited = count - fresh
        if exploited:
            cut = 0.95 * utilities[order[exploited - 1].client]
            order = [record for record in order if utilities[record.client] >= cut]
        weights = [utilities[record.client] + 1e-9 for record in order]
        keys = [random.random() ** (1.0 / weight) for weight in weights]
        best = sorted(range(len(order)), key=keys.__getitem__, reverse=True)[:exploited]
        return [order[place].client for place in best] + random.sample(new, fresh)

    @staticmethod
    def utilities(records: Sequence[ClientRecord], number: int) -> dict[int, float]:
        """Return the utility of each client before round ``number``, relative to the greatest."""
        if not records:
            return {}
        seconds = {r.client: r.samples / max(r.samples_per_s, 1e-9) for r in records}
        preferred = sorted(seconds.values())[int(0.8 * (len(seconds) - 1))]
        greatest = max(r.samples * r.loss for r in records) or 1.0
        utilities = {}
        for record in records:
            gain = record.samples * record.loss / greatest
            gain += math.sqrt(0.1 * math.log(max(number, 1)) / max(record.last_round, 1))
            slow = seconds[record.client] > preferred > 0
            penalty = (preferred / seconds[record.client]) ** 2 if slow else 1.0
            utilities[record.client] = gain * penalty
        return utilities


class SampleMemory:
    """Single samples in the memory of a node: LRU, or never evicted.

    Args:
        capacity: number of samples.
        evict: whether the least recently used sample is evicted for a new one; if not, further
            samples are read each time.
    """

    def __init__(self, capacity: int, evict: bool) -> None:
        self._capacity, self._evict = capacity, evict
        self._samples: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def client(self, client: int, dataset: Any) -> _ClientSamples:
        """Return the samples of a client."""
        return _ClientSamples(self, client, dataset)

    def read(self, key: tuple[int, int], dataset: Any, account: ReadAccount) -> Any:
        """Return a sample from memory or from the data set."""
        if key in self._samples:
            account.hits += 1
            if self._evict:
                self._samples.move_to_end(key)
            return self._samples[key]
        account.source_reads += 1
        value = dataset[key[1]]
        if len(self._samples) >= self._capacity and self._evict and self._samples:
            self._samples.popitem(last=False)
        if len(self._samples) < self._capacity:
            self._samples[key] = value
        return value


class _ClientSamples:
    """The samples of one client; none of them is hot."""

    def __init__(self, memory: SampleMemory, client: int, dataset: Any) -> None:
        self._memory, self._client, self._dataset = memory, client, dataset
        self.hot: list[int] = []
        self.account = ReadAccount()

    def read(self, samples: Sequence[int]) -> list[Any]:
        return [self._memory.read((self._client, s), self._dataset, self.account) for s in samples]

    def keep_hottest(
        self, samples: Sequence[int], values: Sequence[Any], losses: Sequence[float]
    ) -> None:
        pass

    def close(self) -> None:
        pass
