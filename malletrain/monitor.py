"""What a job's progress records say: samples so far, throughput by scale, the cost of each rescale. Pure: times come with the data.

Workers report cumulative counts, so a record lost or sent twice changes nothing. The total of a job is what was counted before its present
round plus the counts of the workers since; both survive a restart of the daemon. This module decides what was measured, not what follows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median, quantiles

from malletrain import wire

WINDOW_S = 8.0
"""Length of the window for the throughput shown, seconds."""
WARMUP_S = 2.0
"""Time after the first sample of a round that is not measured: caches and allocators fill."""
SLICE_S = 1.0
"""Throughput by scale is the median over slices of this length: one stall spoils one slice."""
LEAST_SLICES = 3
MOST_SLICES = 600


@dataclass(frozen=True)
class Observation:
    """Throughput at one scale: ``rate`` ± ``spread`` samples/s (95 % of the median) from ``samples`` in ``seconds``; global ``batch``."""

    nodes: int
    batch: float
    rate: float
    spread: float
    samples: float
    seconds: float


@dataclass(frozen=True)
class RescaleRecord:
    """One rescale, over. ``cost_s``: last sample before → first sample after (for ``start``: decision → first sample).

    ``phases`` in seconds, in order: ``warm`` (joiners come up; the others train), ``drain`` (snapshot), ``rendezvous``, ``start``
    (processes), ``import``, ``build`` (model), ``state`` (load), ``first`` (to the first sample reported).
    """

    generation: int
    kind: str
    from_nodes: int
    to_nodes: int
    began: float
    ended: float
    cost_s: float
    phases: dict[str, float]


@dataclass
class _Pending:
    began: float
    from_nodes: int
    kind: str
    last_sample: float | None
    drain: float | None = None
    forming: float | None = None
    formed: float | None = None
    generation: int = 0
    to_nodes: int = 0
    marks: dict[str, float] = field(default_factory=dict)


class JobMonitor:
    """Progress of one job.

    Args:
        total: samples counted when this monitor was made (from the store).
        before: samples counted before round ``generation``, likewise.
        generation: the round that the counts of the workers belong to.
    """

    def __init__(self, total: float = 0.0, before: float = 0.0, generation: int = 0) -> None:
        self._floor = total
        self.before = before
        self.generation = generation
        self.last_sample: float | None = None
        self.first_sample: float | None = None
        self.nodes = 0
        self._counts: dict[tuple[int, int, int], wire.Progress] = {}
        self._recent: deque[tuple[float, float]] = deque()
        self._slices: dict[int, float] = {}
        self._pending: _Pending | None = None
        self._finished: list[RescaleRecord] = []

    # --- totals and rates ---

    @property
    def total(self) -> float:
        """Samples processed by all workers of all rounds; never falls."""
        return max(self._floor, self.before + sum(p.samples for p in self._counts.values()))

    @property
    def batch(self) -> float:
        """Samples of the last step of all ranks together: the global batch size."""
        return sum(p.batch for key, p in self._counts.items() if key[0] == self.generation)

    def rate(self, now: float) -> float:
        """Samples/s over the last WINDOW_S seconds, or since the round's first sample if that is later; 0 before it."""
        if self.first_sample is None:
            return 0.0
        begin = max(now - WINDOW_S, self.first_sample)
        seconds = now - begin
        if seconds < 0.5:
            return 0.0
        return sum(samples for time, samples in self._recent if time > begin) / seconds

    def progress(self, record: wire.Progress) -> None:
        """Take one worker's cumulative counts; late, repeated and overtaken records are harmless."""
        if record.generation < self.generation and (record.generation, record.rank, record.pid) not in self._counts:
            return
        key = (record.generation, record.rank, record.pid)
        known = self._counts.get(key)
        gained = record.samples - (known.samples if known else 0.0)
        if gained <= 0:
            return
        self._counts[key] = record
        if record.generation != self.generation:
            return
        self.last_sample = max(self.last_sample or record.last, record.last)
        if self.first_sample is None or record.first < self.first_sample:
            self.first_sample = record.first
        self._recent.append((record.last, gained))
        while self._recent and self._recent[0][0] < self.last_sample - 2 * WINDOW_S:
            self._recent.popleft()
        self._slice(known.last if known else record.first, record.last, gained)
        if self._pending is not None and self._pending.generation == record.generation:
            self._finish(self._pending, self.first_sample)

    def _slice(self, begin: float, end: float, gained: float) -> None:
        """Share ``gained`` out over the slices that [begin, end] covers."""
        assert self.first_sample is not None
        zero = self.first_sample + WARMUP_S
        length = max(end - begin, 1e-9)
        for index in range(max(0, math.floor((begin - zero) / SLICE_S)), math.floor((end - zero) / SLICE_S) + 1):
            low, high = zero + index * SLICE_S, zero + (index + 1) * SLICE_S
            share = max(0.0, min(end, high) - max(begin, low)) / length
            self._slices[index] = self._slices.get(index, 0.0) + gained * share
        while len(self._slices) > MOST_SLICES:
            del self._slices[min(self._slices)]

    def observation(self) -> Observation | None:
        """Throughput at the present scale, ``None`` before it has been seen for a few slices after the warm-up."""
        if not self._slices or not self.nodes:
            return None
        newest = max(self._slices)
        # The newest slices are still filling: ranks report at different moments.
        whole = [self._slices.get(i, 0.0) / SLICE_S for i in range(min(self._slices), newest - 1)]
        if len(whole) < LEAST_SLICES:
            return None
        low, _, high = quantiles(whole, n=4)
        # Notches of a box plot: 1.57 IQR / sqrt(n) is the half width of a 95 % interval of the median (McGill et al. 1978).
        spread = 1.57 * (high - low) / math.sqrt(len(whole))
        return Observation(self.nodes, self.batch, median(whole), spread, sum(whole) * SLICE_S, len(whole) * SLICE_S)

    def silent_for(self, now: float) -> float:
        """Seconds since anything was heard: the last sample, or the moment all workers ran."""
        formed = self._pending.formed if self._pending else None
        heard = [t for t in (self.last_sample, formed) if t is not None]
        return now - max(heard) if heard else 0.0

    # --- rescales ---

    def rescale_began(self, members: tuple[str, ...], nodes: tuple[str, ...], now: float, *, lost: bool = False) -> None:
        """The job on ``members`` is to go to ``nodes``. ``lost``: because a member is gone."""
        kind = "loss" if lost else "start" if not members else _kind(len(members), len(nodes))
        if self._pending is None or self._pending.formed is not None:
            self._pending = _Pending(now, len(members), kind, self.last_sample)
        elif lost:
            self._pending.kind = kind
        if not nodes:
            self._pending = None

    def draining(self, now: float) -> None:
        """The snapshot is being taken."""
        if self._pending is not None:
            self._pending.drain = now

    def forming(self, generation: int, members: tuple[str, ...], now: float) -> None:
        """Round ``generation`` of ``members`` is on its way: counting starts anew."""
        if self._pending is None or self._pending.forming is not None:
            self._pending = _Pending(now, self.nodes, _kind(self.nodes, len(members)), self.last_sample)
        self.before, self._floor = self.total, self.total
        self._counts = {}
        self.generation, self.nodes, self.first_sample = generation, len(members), None
        self._recent.clear()
        self._slices.clear()
        pending = self._pending
        pending.forming, pending.generation, pending.to_nodes, pending.last_sample = now, generation, len(members), self.last_sample

    def adopted(self, nodes: int) -> None:
        """After a restart of the daemon: the present round goes on with this many nodes."""
        self.nodes = nodes

    def formed(self, generation: int, now: float) -> None:
        """Every member's workers have been started."""
        if self._pending is not None and self._pending.generation == generation:
            self._pending.formed = now

    def mark(self, mark: wire.Mark) -> None:
        """A worker has come so far; the slowest rank counts."""
        pending = self._pending
        if pending is not None and mark.generation == pending.generation:
            pending.marks[mark.name] = max(mark.time, pending.marks.get(mark.name, mark.time))

    def finished_rescales(self) -> list[RescaleRecord]:
        """The rescales that were completed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, pending: _Pending, first: float) -> None:
        self._pending = None
        assert pending.forming is not None
        stops = [
            ("warm", pending.drain or pending.forming),
            ("drain", pending.forming if pending.drain else None),
            ("rendezvous", pending.formed),
            ("start", pending.marks.get("start")),
            ("import", pending.marks.get("import")),
            ("build", pending.marks.get("restoring")),
            ("state", pending.marks.get("restored")),
            ("first", first),
        ]
        phases, at = {}, pending.began
        for name, end in stops:
            if end is not None:
                phases[name] = max(0.0, end - at)
                at = max(at, end)
        since = pending.began if pending.kind == "start" or pending.last_sample is None else pending.last_sample
        cost = max(0.0, first - since)
        record = RescaleRecord(
            pending.generation, pending.kind, pending.from_nodes, pending.to_nodes, pending.began, first, cost, phases
        )
        self._finished.append(record)


def _kind(before: int, after: int) -> str:
    return "start" if not before else "up" if after > before else "down" if after < before else "same"
