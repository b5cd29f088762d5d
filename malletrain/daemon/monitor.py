"""Computes from a job's progress records: samples so far, throughput by scale, the cost of each
rescale. Pure: times come with the data.

Workers report cumulative counts, so a record that is lost or sent twice changes nothing. The total
of a job is what was counted before its present round plus the counts of the workers since; both
survive a restart of the daemon. This module decides what was measured, not what follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median, quantiles

from malletrain.protocol import messages

WINDOW_S = 8.0
"""Length of the window for the throughput shown, seconds."""
WARMUP_SLICES = 2
"""Slices after the first sample of a round that are not measured: caches and allocators fill."""
SLICE_S = 1.0
"""Throughput by scale is the median over slices of this length: one stall spoils one slice."""
LEAST_SLICES = 3
MOST_SLICES = 600
KEPT_ROUNDS = 3
"""So many rounds back, late counts still find their place."""
MOST_WORKERS = 200_000
"""Processes of the rounds kept whose counts are remembered; those of more are not counted."""
MARKS = frozenset({"start", "import", "restoring", "restored"})
"""The points of a start-up that split a rescale into its phases."""


@dataclass(frozen=True)
class RateObservation:
    """Throughput at one scale: ``rate`` ± ``spread`` samples/s (95 % of the median) from
    ``samples`` in ``seconds``; global ``batch``.
    """

    nodes: int
    batch: float
    rate: float
    spread: float
    samples: float
    seconds: float


@dataclass(frozen=True)
class RescaleRecord:
    """One rescale, over. ``cost_s``: last sample before → first sample after (for ``start``:
    decision → first sample).

    ``phases`` in seconds, in order: ``detect`` (a loss is noticed and planned for), ``warm``
    (joiners come up; the others train), ``drain`` (snapshot), ``rendezvous``, ``start``
    (processes), ``import``, ``build`` (model), ``state`` (load), ``first`` (to the first sample).
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
class PendingRescale:
    """A rescale under way. ``forming`` is when its newest round was decided, ``formed`` when all
    its workers ran.
    """

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
        self._since = generation
        self.before = before
        self.generation = generation
        self.last_sample: float | None = None
        self.first_sample: float | None = None
        self.nodes = 0
        self._heard: float | None = None
        self._counts: dict[tuple[int, int, int], messages.Progress] = {}
        self._now_counted = 0.0
        self._gap = 0.0
        self.slices: dict[int, float] = {}
        self.pending: PendingRescale | None = None
        self._finished: list[RescaleRecord] = []

    # --- totals and rates ---

    @property
    def total(self) -> float:
        """Samples processed by all workers of all rounds; never falls."""
        return max(self._floor, self.before + self._now_counted)

    def total_at(self, generation: int, rank: int, own: float) -> float:
        """Samples processed by all workers when that of ``rank`` had processed ``own`` in its
        round: the others are taken to have been as far as their counts now stand to its own.
        """
        if generation != self.generation:
            return self.total
        mine = [r.samples for (g, k, _), r in self._counts.items() if (g, k) == (generation, rank)]
        counted = sum(mine)
        share = self._now_counted / counted if counted > 0 else 1.0
        return max(self._floor, self.before + own * share)

    def by_rank(self) -> dict[int, float]:
        """Samples of each worker of the present round."""
        return {rank: r.samples for (g, rank, _), r in self._counts.items() if g == self.generation}

    def mean_pause(self, steps: int) -> float | None:
        """Seconds between two steps of a worker of the present round, by its own counts; None where
        none of them has made so many.
        """
        own = [r for (g, _, _), r in self._counts.items() if g == self.generation]
        means = [(r.last - r.first) / (r.steps - 1) for r in own if r.steps >= max(2, steps)]
        return max(means, default=None)

    @property
    def batch(self) -> float:
        """Samples of the last step of all ranks together: the global batch size."""
        newest: dict[int, messages.Progress] = {}
        for (generation, rank, _), record in self._counts.items():
            if generation == self.generation and (
                rank not in newest or record.last > newest[rank].last
            ):
                newest[rank] = record
        return sum(record.batch for record in newest.values())

    def rate(self, now: float) -> float:
        """Samples/s over the last WINDOW_S seconds, or since the round's first sample if that is
        later; 0 before it.

        Up to the last report while reports come as usual, up to ``now`` when they are overdue: so a
        stall shows as a falling rate, and steps of many seconds do not.
        """
        if self.first_sample is None or self.last_sample is None:
            return 0.0
        end = now if now - self.last_sample > max(1.0, 2 * self._gap) else self.last_sample
        begin = max(end - WINDOW_S, self.first_sample)
        if end - begin < 0.5:
            return 0.0
        first = math.floor((begin - self.first_sample) / SLICE_S)
        covered = 1 - ((begin - self.first_sample) / SLICE_S - first)
        samples = sum(
            self.slices.get(i, 0.0) for i in range(first + 1, max(self.slices, default=0) + 1)
        )
        return (samples + covered * self.slices.get(first, 0.0)) / (end - begin)

    def progress(self, record: messages.Progress) -> None:
        """Take one worker's cumulative counts; late, repeated, overtaken and senseless records are
        harmless.
        """
        if not sensible(record):
            return
        key = (record.generation, record.rank, record.pid)
        count = self._counts.get(key)
        late = record.generation < self.generation
        if record.generation > self.generation:
            return  # a round that nobody formed
        if (
            count is None
            and late
            and record.generation <= max(self._since, self.generation - KEPT_ROUNDS)
        ):
            return  # whether the total has these already nobody knows
        gained = record.samples - (count.samples if count else 0.0)
        if gained <= 0 or (count is None and len(self._counts) >= MOST_WORKERS):
            return
        self._counts[key] = record
        self.last_sample = max(self.last_sample or record.last, record.last)
        if late:
            self.before += gained
            if self.pending is not None and self.pending.forming is not None:
                self.pending.last_sample = self.last_sample
            return
        self._now_counted += gained
        if self.first_sample is None:
            self.first_sample = record.first
        if count is None:  # the first report ends the first step: what it took is not known
            gained *= max(0, record.steps - 1) / max(1, record.steps)
        self._spread_out(
            self.first_sample, count.last if count else record.first, record.last, gained
        )
        pending = self.pending
        if (
            pending is not None
            and pending.forming is not None
            and pending.generation == record.generation
        ):
            self._finish(pending, pending.forming, self.first_sample)

    def _spread_out(self, origin: float, begin: float, end: float, gained: float) -> None:
        """Share ``gained`` out over the slices, counted from ``origin``, that [begin, end]
        covers.
        """
        seen = max(begin, origin, end - MOST_SLICES * SLICE_S)
        if end <= seen:
            return
        self._gap += ((end - seen) - self._gap) * (0.1 if self._gap else 1.0)
        low, high = (seen - origin) / SLICE_S, (end - origin) / SLICE_S
        per_slice = gained * SLICE_S / (end - begin)
        for index in range(math.floor(low), math.floor(high) + 1):
            self.slices[index] = self.slices.get(index, 0.0) + per_slice * (
                min(high, index + 1) - max(low, index)
            )
        newest = max(self.slices)
        if (
            newest - min(self.slices) >= MOST_SLICES
        ):  # a clock that jumped leaves a hole of any width
            self.slices = {
                i: samples for i, samples in self.slices.items() if i > newest - MOST_SLICES
            }

    def observation(self) -> RateObservation | None:
        """Throughput at the present scale, ``None`` before it has been seen for a few slices after
        the warm-up.
        """
        if not self.slices or not self.nodes:
            return None
        newest = max(self.slices)
        # The newest slices are still filling: ranks report at different moments.
        whole = [
            self.slices.get(i, 0.0) / SLICE_S
            for i in range(max(WARMUP_SLICES, min(self.slices)), newest - 1)
        ]
        if len(whole) < LEAST_SLICES:
            return None
        low, _, high = quantiles(whole, n=4)
        # Notches of a box plot: 1.57 IQR / sqrt(n) is the half width of a 95 % interval of the
        # median (McGill et al. 1978).
        spread = 1.57 * (high - low) / math.sqrt(len(whole))
        return RateObservation(
            self.nodes,
            self.batch,
            median(whole),
            spread,
            sum(whole) * SLICE_S,
            len(whole) * SLICE_S,
        )

    def silent_for(self, now: float) -> float:
        """Seconds since anything was heard: the last sample, the moment all workers ran, or the
        adoption.
        """
        formed = self.pending.formed if self.pending else None
        heard = [t for t in (self.last_sample, formed, self._heard) if t is not None]
        return max(0.0, now - max(heard)) if heard else 0.0

    # --- rescales ---

    def rescale_began(
        self, members: tuple[str, ...], nodes: tuple[str, ...], now: float, *, lost: bool = False
    ) -> None:
        """The job on ``members`` is to go to ``nodes``. ``lost``: because a member is gone."""
        kind = "loss" if lost else "start" if not members else _kind(len(members), len(nodes))
        resumed = (
            not members and self.pending is not None and self.pending.kind != "start"
        )  # what is pending led to a suspension
        if self.pending is None or self.pending.formed is not None or resumed:
            self.pending = PendingRescale(now, len(members), kind, self.last_sample)
        elif lost and self.pending.kind != "start":
            self.pending.kind = kind
        if not nodes:
            self.pending = None

    def draining(self, now: float) -> None:
        """The snapshot is being taken."""
        self.pending = self.pending or PendingRescale(now, self.nodes, "", self.last_sample)
        self.pending.drain = now

    def forming(self, generation: int, members: tuple[str, ...], now: float) -> None:
        """Round ``generation`` of ``members`` is on its way: counting starts anew."""
        self.before = self._floor = self.total
        self._now_counted = 0.0
        self._counts = {
            key: record for key, record in self._counts.items() if key[0] > generation - KEPT_ROUNDS
        }
        pending = self.pending or PendingRescale(now, self.nodes, "", self.last_sample)
        if pending.forming is not None:  # a round that came to nothing: this one takes its place
            pending.drain, pending.formed, pending.marks = None, None, {}
        if pending.kind not in ("start", "loss"):
            pending.kind = _kind(pending.from_nodes, len(members))
        pending.forming, pending.generation, pending.to_nodes, pending.last_sample = (
            now,
            generation,
            len(members),
            self.last_sample,
        )
        self.pending = pending
        self.generation, self.nodes, self.first_sample, self._gap = (
            generation,
            len(members),
            None,
            0.0,
        )
        self.slices.clear()

    def adopted(self, nodes: int, now: float | None = None) -> None:
        """After a restart of the daemon: the present round goes on with this many nodes."""
        self.nodes, self._heard = nodes, now

    def formed(self, generation: int, now: float) -> None:
        """Every member's workers have been started; or, told again of the present round, no new one
        was needed after all.
        """
        if self.pending is None:
            return
        if self.pending.generation == generation:
            self.pending.formed = now
        elif self.pending.forming is None and generation == self.generation:
            self.pending = None

    def mark(self, mark: messages.Mark) -> None:
        """A worker has come so far; the slowest rank counts."""
        pending = self.pending
        if (
            pending is not None
            and mark.generation == pending.generation
            and mark.name in MARKS
            and math.isfinite(mark.time)
        ):
            pending.marks[mark.name] = max(mark.time, pending.marks.get(mark.name, mark.time))

    def finished_rescales(self) -> list[RescaleRecord]:
        """The rescales that were completed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, pending: PendingRescale, forming: float, first: float) -> None:
        self.pending = None
        start = pending.kind == "start" or pending.last_sample is None
        since = pending.began if start or pending.last_sample is None else pending.last_sample
        stops = [
            ("detect", pending.began if pending.kind == "loss" and since < pending.began else None),
            ("warm", pending.drain or forming),
            ("drain", forming if pending.drain else None),
            ("rendezvous", pending.formed),
            ("start", pending.marks.get("start")),
            ("import", pending.marks.get("import")),
            ("build", pending.marks.get("restoring")),
            ("state", pending.marks.get("restored")),
            ("first", first),
        ]
        phases, at = {}, min(since, pending.began) if pending.kind == "loss" else pending.began
        for name, end in stops:
            if end is not None:
                phases[name] = max(0.0, end - at)
                at = max(at, end)
        self._finished.append(
            RescaleRecord(
                pending.generation,
                pending.kind,
                pending.from_nodes,
                pending.to_nodes,
                pending.began,
                first,
                max(0.0, first - since),
                phases,
            )
        )


def sensible(record: messages.Progress) -> bool:
    """Whether a worker's counts can be counts at all."""
    numbers = (record.samples, record.batch, record.first, record.last)
    return all(math.isfinite(x) and x >= 0 for x in numbers)


def _kind(before: int, after: int) -> str:
    return (
        "start" if not before else "up" if after > before else "down" if after < before else "same"
    )
