"""Computes from a job's progress records: samples so far, throughput by scale, the cost of each
rescale. Pure: times come with the data.

Workers report cumulative counts, so a record that is lost or sent twice changes nothing. The total
of a job is the count before its current round plus the counts of that round's workers. Both survive
a restart of the daemon. This module decides what was measured, not what follows.

A job's throughput has two answers here, which differ while it stalls. :meth:`JobMonitor.rate` is
what it processes at this moment, stalls included: for ``status``, ``top`` and the metrics.
:meth:`JobMonitor.observation` is what it processes on so many nodes when nothing disturbs it: for
the records of each scale. The latter is the estimate of profiles too (:mod:`jpa.measure`). Both
come from the same slices of time.

Ranks report at different times, so the sum of their newest counts would jump whenever a late rank
reports. :class:`SampleCount` interpolates each rank's count linearly between two of its reports, at
the newest moment up to which every rank has reported. Within a round the sum never falls.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from jpa.measure import Measurement, steady_throughput
from malletrain.protocol import messages
from malletrain.store.records import RescaleRow

REPORTS_PER_RANK = 64
"""Number of reports that are kept of each rank."""
_MIN_REPORT_TIMEOUT_S = 2.0
"""Minimum time without a report after which the sum no longer waits for a rank, seconds."""
_INITIAL_REPORT_TIMEOUT_S = 120.0
"""The same time for a rank with fewer than two reports, seconds."""


class SampleCount:
    """Samples of the newest round, summed over its ranks."""

    def __init__(self) -> None:
        self.generation = 0
        self.time = 0.0
        self.samples = 0.0
        self._reports_by_rank: dict[tuple[int, int], deque[tuple[float, float]]] = {}

    def add_report(self, record: messages.Progress) -> None:
        """Add one rank's report. Late and repeated reports are ignored."""
        if record.generation > self.generation:
            self.generation, self.time, self.samples = record.generation, 0.0, 0.0
            self._reports_by_rank.clear()
        if record.generation == self.generation:
            reports = self._reports_by_rank.setdefault(
                (record.rank, record.pid), deque(maxlen=REPORTS_PER_RANK)
            )
            if not reports or (record.last > reports[-1][0] and record.samples >= reports[-1][1]):
                reports.append((record.last, record.samples))

    def advance(self) -> bool:
        """Move ``time`` to the newest common common_time and ``samples`` to the sum at that moment,
        since the round began. Return whether ``time`` changed.
        """
        all_reports = self._reports_by_rank.values()
        newest = max((t[-1][0] for t in all_reports), default=0.0)
        common_time = min(
            (t[-1][0] for t in all_reports if newest - t[-1][0] <= _report_timeout_s(t)),
            default=0.0,
        )
        if common_time <= self.time:
            return False
        if self.time:
            self.samples += sum(
                _count_at(t, common_time) - _count_at(t, self.time) for t in all_reports
            )
        self.time = common_time
        return True


def _report_timeout_s(reports: deque[tuple[float, float]]) -> float:
    """Return the seconds without a report after which the sum no longer waits for a rank."""
    if len(reports) < 2:
        return _INITIAL_REPORT_TIMEOUT_S
    return max(_MIN_REPORT_TIMEOUT_S, 4 * (reports[-1][0] - reports[-2][0]))


def _count_at(reports: deque[tuple[float, float]], moment: float) -> float:
    """Return the rank's count at ``moment``. Before its first report and after its last, return the
    count of that report.
    """
    after = bisect_right(reports, moment, key=lambda report: report[0])
    if after == 0:
        return reports[0][1]
    if after == len(reports):
        return reports[-1][1]
    (t0, s0), (t1, s1) = islice(reports, after - 1, after + 1)
    return s0 + (s1 - s0) * (moment - t0) / (t1 - t0)


WINDOW_S = 8.0
"""Length of the window for the displayed throughput, seconds."""
WARMUP_SLICES = 2
"""Number of slices after the first sample of a round that are not measured, because caches and
allocators fill.
"""
SLICE_S = 1.0
"""Length of a slice, seconds."""
MAX_BATCHES = 120
"""Maximum number of batches of the throughput by scale; each has a whole number of slices. A stall
affects few batches, and few are quick to compute with whenever progress is stored.
"""
MIN_SLICES = 3
"""Minimum number of slices of a measurement."""
MAX_SLICES = 600
"""Number of slices that are kept."""
KEPT_ROUNDS = 3
"""Number of rounds whose counts are kept for late reports."""
MAX_PROCESSES = 200_000
"""Maximum number of processes whose counts are kept. Further ones are not counted."""
REPORT_DELAY_S = 1.0
"""Upper limit of the time between a sample and the arrival of its report, seconds."""
MARKS = frozenset({"start", "import", "restoring", "restored"})
"""Points of a start-up that divide a rescale into its phases."""


@dataclass
class PendingRescale:
    """An unfinished rescale. Its times in order: it begins, may drain, its newest round is formed,
    all workers run.
    """

    began: float
    """Begin of the rescale, seconds: a plan gave the job other nodes (event ``job-started``,
    ``job-rescaled`` or ``layout-changed``), and a further plan before its workers run does not
    change it. Without a plan: the first of snapshot and round."""
    from_nodes: int
    """Number of nodes before it."""
    kind: str
    """``start``, ``up``, ``down``, ``loss`` or ``same``; empty if not known yet."""
    last_sample: float | None
    """Time of the last sample before it, seconds; None if there was none."""
    drain: float | None = None
    """Start of the snapshot, seconds; None if there is none."""
    forming: float | None = None
    """Time at which its newest round was formed, seconds: its number and members were stored (event
    ``round-formed``), and its members are to join it. None before."""
    running: float | None = None
    """Time at which all workers of that round ran, seconds; None before."""
    generation: int = 0
    """Number of its newest round."""
    to_nodes: int = 0
    """Number of nodes of its newest round."""
    marks: dict[str, float] = field(default_factory=dict)
    """Point of a start-up → time at which the slowest rank reached it, seconds."""


class JobMonitor:
    """Progress of one job.

    Args:
        job: its id, for the rows of its rescales.
        total: samples counted before this monitor was created (from the store).
        before: samples counted before round ``generation`` (from the store).
        generation: the round that the counts of the workers belong to.
    """

    def __init__(
        self, job: str, total: float = 0.0, before: float = 0.0, generation: int = 0
    ) -> None:
        self._job = job
        self._floor = total
        self._since = generation
        self.before = before
        """Samples counted before the current round."""
        self.generation = generation
        """Number of the current round."""
        self.last_sample: float | None = None
        """Time of the newest sample, seconds; None before the first."""
        self.first_sample: float | None = None
        """Time of the current round's first sample, seconds; None before it."""
        self.nodes = 0
        """Number of nodes of the current round."""
        self._adopted_at: float | None = None
        self._arrived_at = math.inf
        """Arrival of the newest counts, seconds of the daemon's clock; infinite before the first.
        """
        self._counts: dict[tuple[int, int, int], messages.Progress] = {}
        self._round_samples = 0.0
        self._mean_report_interval_s = 0.0
        self.slices: dict[int, float] = {}
        self.pending: PendingRescale | None = None
        self._finished: list[RescaleRow] = []

    # --- totals and rates ---

    @property
    def total(self) -> float:
        """Samples processed by all workers of all rounds; never falls."""
        return max(self._floor, self.before + self._round_samples)

    def total_at(self, generation: int, rank: int, own: float) -> float:
        """Estimate the samples of all workers at the time of a worker's report. The ratio of the
        others' counts to its own is assumed to be the same as now.

        Args:
            generation: number of the round.
            rank: rank of the worker.
            own: samples that it had processed in the round at that time.

        """
        if generation != self.generation:
            return self.total
        own_counts = [
            r.samples for (g, k, _), r in self._counts.items() if (g, k) == (generation, rank)
        ]
        counted = sum(own_counts)
        share = self._round_samples / counted if counted > 0 else 1.0
        return max(self._floor, self.before + own * share)

    def by_rank(self) -> dict[int, float]:
        """Return rank → samples of the worker in the current round."""
        return {rank: r.samples for (g, rank, _), r in self._counts.items() if g == self.generation}

    def mean_pause(self, steps: int) -> float | None:
        """Return the mean seconds between two steps, from the workers' own counts: the maximum over
        the workers of the current round. None if no worker has finished ``steps`` steps.
        """
        records = [r for (g, _, _), r in self._counts.items() if g == self.generation]
        means = [(r.last - r.first) / (r.steps - 1) for r in records if r.steps >= max(2, steps)]
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
        """Return the throughput over the last WINDOW_S seconds, or since the round's first sample
        if that is later, samples/s; 0 before it.

        The window ends at the last report, or at ``now`` if reports are overdue. So the rate falls
        during a stall, but not during a step of many seconds.
        """
        if self.first_sample is None or self.last_sample is None:
            return 0.0
        end = (
            now
            if now - self.last_sample > max(1.0, 2 * self._mean_report_interval_s)
            else self.last_sample
        )
        begin = max(end - WINDOW_S, self.first_sample)
        if end - begin < 0.5:
            return 0.0
        first = math.floor((begin - self.first_sample) / SLICE_S)
        covered = 1 - ((begin - self.first_sample) / SLICE_S - first)
        samples = sum(
            self.slices.get(i, 0.0) for i in range(first + 1, max(self.slices, default=0) + 1)
        )
        return (samples + covered * self.slices.get(first, 0.0)) / (end - begin)

    def progress(self, record: messages.Progress, now: float = math.inf) -> None:
        """Add one worker's cumulative counts. Late, repeated, overtaken and invalid records do no
        harm.

        Args:
            record: counts, with times of the clock of the worker's node.
            now: arrival, seconds of the daemon's clock; infinite if it is not known. A rescale
                lasts no longer than between two arrivals, whatever the clocks of nodes say.
        """
        if not sensible(record):
            return
        key = (record.generation, record.rank, record.pid)
        count = self._counts.get(key)
        late = record.generation < self.generation
        if record.generation > self.generation:
            return  # a round that does not exist
        if (
            count is None
            and late
            and record.generation <= max(self._since, self.generation - KEPT_ROUNDS)
        ):
            return  # the total may include these already
        gained = record.samples - (count.samples if count else 0.0)
        if gained <= 0 or (count is None and len(self._counts) >= MAX_PROCESSES):
            return
        self._counts[key] = record
        previous_arrival, self._arrived_at = self._arrived_at, now
        self.last_sample = max(self.last_sample or record.last, record.last)
        if late:
            self.before += gained
            if self.pending is not None and self.pending.forming is not None:
                self.pending.last_sample = self.last_sample
            return
        self._round_samples += gained
        if self.first_sample is None:
            self.first_sample = record.first
        if count is None:  # the first report ends the first step, whose duration is unknown
            gained *= max(0, record.steps - 1) / max(1, record.steps)
        self._distribute(
            self.first_sample, count.last if count else record.first, record.last, gained
        )
        pending = self.pending
        if (
            pending is not None
            and pending.forming is not None
            and pending.generation == record.generation
        ):
            self._finish(pending, pending.forming, self.first_sample, previous_arrival, now)

    def _distribute(self, origin: float, begin: float, end: float, gained: float) -> None:
        """Distribute samples over the slices that an interval covers.

        Args:
            origin: start of the first slice, seconds.
            begin: start of the interval, seconds.
            end: end of the interval, seconds.
            gained: number of samples.

        """
        interval_start = max(begin, origin, end - MAX_SLICES * SLICE_S)
        if end <= interval_start:
            return
        interval_s = end - interval_start
        mean_s = self._mean_report_interval_s
        self._mean_report_interval_s += (interval_s - mean_s) * (0.1 if mean_s else 1.0)
        low, high = (interval_start - origin) / SLICE_S, (end - origin) / SLICE_S
        per_slice = gained * SLICE_S / (end - begin)
        for index in range(math.floor(low), math.floor(high) + 1):
            self.slices[index] = self.slices.get(index, 0.0) + per_slice * (
                min(high, index + 1) - max(low, index)
            )
        newest = max(self.slices)
        # After a jump of the clock there is a hole of any width.
        if newest - min(self.slices) >= MAX_SLICES:
            self.slices = {
                i: samples for i, samples in self.slices.items() if i > newest - MAX_SLICES
            }

    def observation(self) -> Measurement | None:
        """Return the throughput at the current scale, without the warm-up and stalls; None before
        ``MIN_SLICES`` slices after the warm-up. Its ``stable`` has no meaning here.
        """
        if not self.slices or not self.nodes:
            return None
        newest = max(self.slices)
        # The newest slices are incomplete: ranks report at different times.
        complete = [
            self.slices.get(i, 0.0) for i in range(max(WARMUP_SLICES, min(self.slices)), newest - 1)
        ]
        if len(complete) < MIN_SLICES:
            return None
        width = math.ceil(len(complete) / MAX_BATCHES)
        return steady_throughput(
            self.nodes,
            [
                (sum(complete[i : i + width]), width * SLICE_S)
                for i in range(len(complete) % width, len(complete), width)
            ],
        )

    def silent_for(self, now: float) -> float:
        """Return the seconds since the last sign of life: the last sample, the start of all
        workers, or the adoption.
        """
        running = self.pending.running if self.pending else None
        heard = [t for t in (self.last_sample, running, self._adopted_at) if t is not None]
        return max(0.0, now - max(heard)) if heard else 0.0

    # --- rescales ---

    def rescale_began(
        self, members: tuple[str, ...], nodes: tuple[str, ...], now: float, *, lost: bool = False
    ) -> None:
        """Record the begin of a rescale.

        Args:
            members: nodes of the current round.
            nodes: nodes of the next round; empty to suspend the job.
            now: time, seconds.
            lost: whether a member has been lost.
        """
        kind = "loss" if lost else "start" if not members else _kind(len(members), len(nodes))
        # If there are no members, the pending rescale led to a suspension.
        resumed = not members and self.pending is not None and self.pending.kind != "start"
        if self.pending is None or self.pending.running is not None or resumed:
            self.pending = PendingRescale(now, len(members), kind, self.last_sample)
        elif lost and self.pending.kind != "start":
            self.pending.kind = kind
        if not nodes:
            self.pending = None

    def draining(self, now: float) -> None:
        """Record the start of the snapshot."""
        self.pending = self.pending or PendingRescale(now, self.nodes, "", self.last_sample)
        self.pending.drain = now

    def forming(self, generation: int, members: tuple[str, ...], now: float) -> None:
        """Record that a round is formed, and start to count its samples.

        Args:
            generation: number of the round.
            members: its nodes.
            now: time, seconds.
        """
        self.before = self._floor = self.total
        self._round_samples = 0.0
        self._counts = {
            key: record for key, record in self._counts.items() if key[0] > generation - KEPT_ROUNDS
        }
        pending = self.pending or PendingRescale(now, self.nodes, "", self.last_sample)
        if pending.forming is not None:  # the previous round failed: this one replaces it
            pending.drain, pending.running, pending.marks = None, None, {}
        if pending.kind not in ("start", "loss"):
            pending.kind = _kind(pending.from_nodes, len(members))
        pending.forming, pending.generation, pending.to_nodes, pending.last_sample = (
            now,
            generation,
            len(members),
            self.last_sample,
        )
        self.pending = pending
        self.generation, self.nodes, self.first_sample, self._mean_report_interval_s = (
            generation,
            len(members),
            None,
            0.0,
        )
        self.slices.clear()

    def adopted(self, nodes: int, now: float | None = None) -> None:
        """Continue the current round with this number of nodes after a restart of the daemon."""
        self.nodes, self._adopted_at = nodes, now

    def workers_running(self, generation: int, now: float) -> None:
        """Record that the workers of all members run. If the event names the current round while a
        rescale waits, no new round was needed, and the rescale is dropped.
        """
        if self.pending is None:
            return
        if self.pending.generation == generation:
            self.pending.running = now
        elif self.pending.forming is None and generation == self.generation:
            self.pending = None

    def mark(self, mark: messages.Mark) -> None:
        """Record a point of a worker's start-up. The slowest rank counts."""
        pending = self.pending
        if (
            pending is not None
            and mark.generation == pending.generation
            and mark.name in MARKS
            and math.isfinite(mark.time)
        ):
            pending.marks[mark.name] = max(mark.time, pending.marks.get(mark.name, mark.time))

    def finished_rescales(self) -> list[RescaleRow]:
        """Return the rescales that finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(
        self,
        pending: PendingRescale,
        forming: float,
        first: float,
        previous_arrival: float,
        now: float,
    ) -> None:
        """End a rescale.

        The clock of a node may be wrong, or be set within the rescale. A cost of hours would keep
        the job from all nodes, because no start pays that costs more than it yields.

        Args:
            pending: the rescale.
            forming: time at which its round was decided, seconds.
            first: time of that round's first sample, seconds of the node's clock.
            previous_arrival: arrival of the counts before, seconds; infinite if there were none.
            now: arrival of the counts of that sample, seconds.
        """
        self.pending = None
        start = pending.kind == "start" or pending.last_sample is None
        before = pending.began if start else min(previous_arrival, pending.began)
        latest = now + REPORT_DELAY_S
        since = pending.began if start or pending.last_sample is None else pending.last_sample
        stops = [
            ("detect", pending.began if pending.kind == "loss" and since < pending.began else None),
            ("warm", pending.drain or forming),
            ("drain", forming if pending.drain else None),
            ("rendezvous", pending.running),
            ("start", pending.marks.get("start")),
            ("import", pending.marks.get("import")),
            ("build", pending.marks.get("restoring")),
            ("state", pending.marks.get("restored")),
            ("first", first),
        ]
        phases, at = {}, min(since, pending.began) if pending.kind == "loss" else pending.began
        for name, end in stops:
            if end is not None:
                end = min(end, latest)
                phases[name] = max(0.0, end - at)
                at = max(at, end)
        self._finished.append(
            RescaleRow(
                self._job,
                pending.generation,
                pending.kind,
                pending.from_nodes,
                pending.to_nodes,
                pending.began,
                min(first, latest),
                min(max(0.0, first - since), latest - before),
                phases,
            )
        )


def sensible(record: messages.Progress) -> bool:
    """Whether a worker's counts are finite and not negative."""
    numbers = (record.samples, record.batch, record.first, record.last)
    return all(math.isfinite(x) and x >= 0 for x in numbers)


def _kind(before: int, after: int) -> str:
    return (
        "start" if not before else "up" if after > before else "down" if after < before else "same"
    )
