"""The reads of jobs through data caches, from the cumulative counts that their workers report.
Pure.

Kept in memory only: unfinished jobs report again within seconds after a restart of the daemon.
Decides which counts are added up and which are replaced by newer ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from malletrain.core.reread_costs import reread_s
from malletrain.protocol.views import DataCacheView

MAX_JOBS = 1000
"""Number of jobs whose reads are kept, ended ones included."""
MAX_NAMES = 16
"""Number of data sets of one job that are counted."""
MAX_PROCESSES = 4096
"""Number of processes of one job that are told apart. The counts of those that have been silent for
longest are added up.
"""
_SHOWN = ("node_hits", "peer_hits", "source_reads", "hit_bytes", "source_bytes", "unpacked")
_COUNTS = (*_SHOWN, "source_us")
_FACTS = ("samples", "data_bytes", "node_bytes")


@dataclass
class _DataSet:
    """The reads of one data set by one job."""

    processes: OrderedDict[tuple[int, str], tuple[int, ...]] = field(default_factory=OrderedDict)
    """Rank and process → its newest counts, the process that reported last at the end."""
    ended: tuple[int, ...] = (0,) * len(_COUNTS)
    """Sum of the counts of processes that are no longer told apart."""
    stores: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Node → (samples in its memory, bytes of memory for them)."""
    facts: dict[str, int] = field(default_factory=dict)
    """Newest facts about the data set."""
    coverage: float | None = None
    """Part of the data that an epoch reads; None if unknown."""

    def add(self, rank: int, data: Mapping[str, Any]) -> None:
        """Add the counts of one process."""
        key = (rank, str(data.get("process", "")))
        self.processes[key] = tuple(_count(data.get(name)) for name in _COUNTS)
        self.processes.move_to_end(key)
        while len(self.processes) > MAX_PROCESSES:
            _, oldest = self.processes.popitem(last=False)
            self.ended = tuple(a + b for a, b in zip(self.ended, oldest, strict=True))
        self.facts = {name: _count(data.get(name)) for name in _FACTS}
        node = str(data.get("node", ""))
        self.stores[node] = (_count(data.get("present")), _count(data.get("memory_bytes")))
        coverage = data.get("coverage")
        self.coverage = coverage if isinstance(coverage, float) and 0 <= coverage <= 1 else None

    def _sums(self) -> dict[str, int]:
        """Return each count, summed over the processes."""
        sums = self.ended
        for counts in self.processes.values():
            sums = tuple(a + b for a, b in zip(sums, counts, strict=True))
        return dict(zip(_COUNTS, sums, strict=True))

    def reread_s(self, nodes: Collection[str], processes: int) -> dict[str, float]:
        """Return the time in which the data of each of ``nodes`` would be read again without it,
        seconds. ``processes``: ranks on a node, which read side by side.
        """
        sums = self._sums()
        if not sums["source_reads"]:
            return {}
        sample_s = sums["source_us"] * 1e-6 / sums["source_reads"] / max(1, processes)
        present = {node: self.stores.get(node, (0, 0))[0] for node in nodes}
        return reread_s(present, sample_s)

    def view(self, name: str, nodes: Collection[str]) -> DataCacheView:
        """Return the reads so far, and what the memory of ``nodes`` has."""
        sums = self._sums()
        stores = [store for node, store in self.stores.items() if node in nodes]
        return DataCacheView(
            name,
            **{count: sums[count] for count in _SHOWN},
            **self.facts,
            present=sum(present for present, _ in stores),
            memory_bytes=sum(memory for _, memory in stores),
            coverage=self.coverage,
        )


class DataReads:
    """The reads of all jobs."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, dict[str, _DataSet]] = OrderedDict()

    def add(self, job: str, rank: int, data: Mapping[str, Any]) -> None:
        """Add the counts that one process reports.

        Args:
            job: id of its job.
            rank: its rank.
            data: the fields of DataCacheFacts.
        """
        name = str(data.get("name", ""))
        sets = self._jobs.setdefault(job, {})
        self._jobs.move_to_end(job)
        while len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        if name and (name in sets or len(sets) < MAX_NAMES):
            sets.setdefault(name, _DataSet()).add(rank, data)

    def views(self, job: str, nodes: Collection[str]) -> tuple[DataCacheView, ...]:
        """Return the reads of one job, by data set. ``nodes``: the nodes that it has now."""
        sets = self._jobs.get(job, {})
        return tuple(sets[name].view(name, nodes) for name in sorted(sets))

    def reread_s(self, job: str, nodes: Collection[str], processes: int) -> dict[str, float]:
        """Return the time in which a job would read its training data again without each of its
        nodes, seconds; nodes without data are absent.

        Args:
            job: id of the job.
            nodes: the nodes that it has now.
            processes: number of its ranks on each.
        """
        total_s: dict[str, float] = {}
        for data in self._jobs.get(job, {}).values():
            for node, seconds in data.reread_s(nodes, processes).items():
                if seconds:
                    total_s[node] = total_s.get(node, 0.0) + seconds
        return total_s


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
