"""Stores the rows, progress, measurements, metrics and rescale costs of jobs, and deletes those
that are older than the site's retention time.

Everything here runs within a transaction, so it is saved together with the event that caused it.
Decides which values of a metric are new: values of one name come from one rank of a round, the
lowest that reports it, so they form a curve. :mod:`malletrain.store.measurement_tables` decides how
many are kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from malletrain.core.change_costs import (
    ASSUMED_START_S,
    StartCost,
    append_measured,
    expected_start_s,
)
from malletrain.core.events import JobState
from malletrain.core.fabric import Fabric
from malletrain.daemon.jobs.layout_tuner import LayoutTuner
from malletrain.daemon.jobs.logsink import delete_old_logs
from malletrain.daemon.jobs.monitor import JobMonitor, SampleCount
from malletrain.daemon.jobs.worker_counts import StepWindows, step_times_record
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.daemon.site.metrics import Metrics
from malletrain.protocol import messages
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.failures import without_repeats
from malletrain.protocol.views import SeriesView
from malletrain.rounds.interface import Rounds
from malletrain.store.measurement_tables import MAX_POINTS, SeriesTable, thinned, width
from malletrain.store.records import (
    JobRow,
    MetricRow,
    ObservationRow,
    RescaleRow,
    ServiceStartsRow,
)
from malletrain.store.store import Store

MAX_VALUES, MIN_VALUES_PER_METRIC = 50_000, 100
"""Maximum number of values in one answer, for all metrics together; minimum number of values of
each metric if there are many metrics.
"""


class Value(NamedTuple):
    """One reported value of a metric."""

    time: float
    """Time of the report, seconds since the epoch."""
    value: float
    """The value."""
    step: int | None
    """Step of the script; None if it states none."""
    samples: float
    """Samples that the job had processed."""
    nodes: int
    """Number of the job's nodes."""


class GrowingSeries:
    """One metric of an unfinished job. Use it within a transaction."""

    def __init__(self, table: SeriesTable, job: str, name: str) -> None:
        self._table, self._job, self._name = table, job, name
        newest = table.newest(job, name)
        self._count = newest.number + 1 if newest else 0
        stride = width(self._count)
        self._tail = table.tail(job, name, max(0, self._count - 1) // stride * stride)
        self._source: tuple[int, int] | None = None
        self._source_start = self._count
        """Number of values before the current source."""
        self._last = newest.time if newest else 0.0

    def add(self, generation: int, rank: int, values: Iterable[Value]) -> None:
        """Add the values that a rank reports. Repeated values, such as those that an agent sends
        again after a reconnection, are ignored.

        Args:
            generation: number of the round.
            rank: rank of the worker.
            values: values, the oldest first.

        """
        source = (generation, rank)
        if self._source is not None and source != self._source:
            late = generation < self._source[0]
            if late or (generation == self._source[0] and rank > self._source[1]):
                return
            self._last = 0.0  # another process, of another clock
            if generation == self._source[0]:
                self._remove_source()
        if source != self._source:
            self._source, self._source_start = source, self._count
        rows: list[MetricRow] = []
        for v in values:
            if v.time > self._last:
                self._last = v.time
                number = self._count + len(rows)
                rows.append(
                    MetricRow(
                        self._job, self._name, number, v.time, v.value, v.step, v.samples, v.nodes
                    )
                )
        if rows:
            self._append(rows)

    def _remove_source(self) -> None:
        """Remove the values of a higher rank in this round, because a lower rank reports, too."""
        self._table.replace(self._job, self._name, self._source_start, [])
        stride = width(self._source_start)
        self._count = self._source_start
        first = max(0, self._count - 1) // stride * stride
        self._tail = self._table.tail(self._job, self._name, first)

    def _append(self, rows: list[MetricRow]) -> None:
        count = self._count + len(rows)
        stride = width(count)
        if stride == width(self._count):
            base = self._tail
        else:
            base = self._table.rows(self._job, [self._name])
        selected = thinned([*base, *rows], count)
        self._table.replace(self._job, self._name, (base or rows)[0].number, selected)
        self._count = count
        self._tail = [row for row in selected if row.number >= (count - 1) // stride * stride]


def series_views(
    table: SeriesTable, job: JobRow, names: Collection[str], since: float, most: int
) -> list[SeriesView]:
    """Return the metrics of a job over time, thinned to the size of one answer.

    Args:
        table: table of the stored values.
        job: row of the job.
        names: names of the metrics; empty for all.
        since: time before the first returned value, seconds since the epoch.
        most: maximum number of values of each metric; 0 for all that are stored.
    """
    by_name: dict[str, list[MetricRow]] = {}
    for row in table.rows(job.id, names):
        by_name.setdefault(row.name, []).append(row)
    most = min(most or MAX_POINTS, max(MIN_VALUES_PER_METRIC, MAX_VALUES // max(1, len(by_name))))
    views = []
    for name, rows in by_name.items():
        count = rows[-1].number + 1
        shown = [row for row in thinned(rows, count, most) if row.time > since]
        views.append(
            SeriesView(
                name,
                tuple(row.value for row in shown),
                tuple(row.time for row in shown),
                tuple(row.samples for row in shown),
                tuple(row.nodes for row in shown),
                tuple(row.step for row in shown),
                count,
                tuple(row.number for row in shown),
            )
        )
    return views


INTERVAL_S = 3600.0
"""Interval between two checks, seconds."""
NEXT_BATCH_S = 5.0
"""Time to the next check if a check has deleted rows, seconds. One check deletes a limited
number.
"""


class Retention:
    """Deletes what is older than the site keeps it: rows of the store, and logs of ended jobs.

    Args:
        store: the database.
        logs: folder of the logs.
        keep_s: time for which rows are kept after their end, seconds; 0 to keep them for ever.
        keep_logs_s: time for which the logs of an ended job are kept after the last write, seconds;
            0 to keep them as long as its row.
    """

    def __init__(self, store: Store, logs: Path, keep_s: float, keep_logs_s: float) -> None:
        self._store = store
        self._logs = logs
        self.keep_s = keep_s
        self.keep_logs_s = keep_logs_s
        self._due = 0.0

    def delete_old(self, now: float) -> int:
        """Delete what is old if a check is due. Return the number of deleted rows, and of jobs
        whose logs were deleted.
        """
        # If the clock was set back, the next check is due at once.
        if self._due - INTERVAL_S <= now < self._due:
            return 0
        deleted = self._store.forget(now - self.keep_s) if self.keep_s else 0
        # Nobody can read the logs of a job that the store has forgotten.
        if keep_logs_s := min(filter(None, (self.keep_s, self.keep_logs_s)), default=0.0):
            states = [state.value for state in JobState if not state.ended]
            unfinished = {row.id for row in self._store.list_jobs(states)}
            deleted += delete_old_logs(self._logs, now - keep_logs_s, unfinished)
        self._due = now + (NEXT_BATCH_S if deleted else INTERVAL_S)
        return deleted


MAX_NOTICES = 20
"""Maximum number of notices that are stored of a job."""


@dataclass
class ActiveJob:
    """An unfinished job and its state in memory."""

    row: JobRow
    """Its row in the store."""
    spec: messages.JobSpec
    """Its specification."""
    rounds: Rounds
    """Decides its rounds."""
    monitor: JobMonitor
    """Measures its progress."""
    starting_until: float | None = None
    """Time until which the first sample of the newest round is awaited; None if it is not."""
    checkpointed_at: float = 0.0
    """Time at which its progress was last stored."""
    fabric: Fabric | None = None
    """Network of the newest round; None if none is chosen."""
    bereft: dict[str, int] = field(default_factory=dict)
    """Node → newest round in which its workers died or gave up because of a lost peer."""
    crashed: int = 0
    """Newest round in which workers died by themselves. Reports of lost peers mean these
    workers.
    """
    barred: int = 0
    """Newest round in which workers could not connect to a peer."""
    launcher_tail: str = ""
    """Last output of a launcher that ended; equal lines are one."""
    launcher_nodes: set[str] = field(default_factory=set)
    """Nodes whose launchers ended with this output."""
    unfit: list[str] = field(default_factory=list)
    """Nodes on which its software was not available, as long as it has started on none. A node
    appears once for each try.
    """
    counts: SampleCount = field(default_factory=SampleCount)
    """Samples of its newest round at a common time."""
    tuner: LayoutTuner | None = None
    """Search for the layout of its nodes; None if it has not begun or is not requested."""
    steps: StepWindows = field(default_factory=StepWindows)
    """Where the time of its steps goes."""
    series: dict[str, GrowingSeries] = field(default_factory=dict)
    """Name → metric over time."""
    progress_at: float = 0.0
    """Time at which the controller last received its progress."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes on which it runs, in rank order; none while it is suspended."""
        return () if self.row.state == JobState.SUSPENDED.value else self.rounds.members

    def launcher_ended(self, node: str, output: str) -> None:
        """Note the last output of a launcher on a node."""
        shown = without_repeats(output)
        if shown != self.launcher_tail:
            self.launcher_tail, self.launcher_nodes = shown, set()
        self.launcher_nodes.add(node)

    def rate(self, now: float) -> float:
        """Return its current throughput, samples/s; 0 while it has no node."""
        return self.monitor.rate(now) if self.nodes else 0.0

    def step_shares(self) -> dict[str, float]:
        """Return the share of each part of its newest steps; empty if they are not measured or it
        has no node.
        """
        recent = self.steps.recent(self.rounds.generation) if self.nodes else None
        return {} if recent is None else dict(recent.shares)


class JobRepository:
    """The jobs' rows in the store, with the audit log and the metrics that go with them."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics, audit: AuditLog) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._audit = audit

    def save(self, run: ActiveJob, **changes: Any) -> None:
        """Store fields of the job together with its progress. Late reports add to the count before
        the current round.
        """
        counted = {"samples": run.monitor.total, "samples_before": run.monitor.before}
        run.row = self._store.change_job(run.row, **counted, **changes)

    def checkpoint(self, run: ActiveJob, now: float) -> None:
        """Store the job's progress, and the throughput measured since the last call."""
        run.checkpointed_at = now
        self.save(run, last_progress=run.monitor.last_sample)
        if (seen := run.monitor.observation()) is not None:
            self._store.put_observation(
                ObservationRow(
                    run.row.id,
                    seen.nodes,
                    run.monitor.batch,
                    seen.rate,
                    seen.half_width,
                    seen.seconds,
                    seen.samples,
                    now,
                    step_times_record(run.steps.ranks(run.rounds.generation)),
                )
            )

    def rescale(self, r: RescaleRow) -> None:
        """Store a finished rescale and its cost."""
        self._store.put_rescale(r)
        self._metrics.rescale(r.kind, r.cost_s)
        self._audit.record(
            EventKind.RESCALE_FINISHED,
            _rescale_sentence(r),
            job=r.job,
            generation=r.generation,
            cost_s=r.cost_s,
            phases=r.phases,
        )

    def start_measured(self, run: ActiveJob, node: str, node_class: str, seconds: float) -> None:
        """Store how long a process of a service took until it was ready.

        Args:
            run: the service.
            node: node of the process.
            node_class: class of the node.
            seconds: time since its start.
        """
        durations = self._store.service_starts.of(run.row.id).get(node_class, ())
        self._store.service_starts.put(
            ServiceStartsRow(run.row.id, node_class, append_measured(durations, seconds))
        )
        self._audit.record(
            EventKind.MEMBER_READY,
            f"The process of the service is ready, {seconds:.1f} s after its start.",
            job=run.row.id,
            node=node,
            start_s=seconds,
        )

    def start_cost(self, job: str, spec: messages.JobSpec) -> StartCost | None:
        """Return the start cost of a service in plans; None if its owner asks for none.

        Args:
            job: id of the service.
            spec: its specification.
        """
        assumed_s = ASSUMED_START_S if spec.start_cost_s is None else spec.start_cost_s
        if spec.start_cost_measured:
            starts = self._store.service_starts.of(job).items()
            return StartCost(assumed_s, {name: expected_start_s(each) for name, each in starts})
        return None if spec.start_cost_s is None else StartCost(assumed_s)

    def notice(self, run: ActiveJob, sentence: str) -> None:
        """Add a notice for the job's owner. A repeated notice has no effect."""
        if sentence not in run.row.notices:
            self.save(run, notices=(*run.row.notices, sentence)[-MAX_NOTICES:])
            self._audit.record(EventKind.JOB_NOTICE, sentence, job=run.row.id)


def _rescale_sentence(r: RescaleRow) -> str:
    nodes = counted(r.to_nodes, "node")
    if r.kind == "start":
        return f"Started on {nodes}; the first sample came {r.cost_s:.2f} s after the decision."
    why = ", because a node or a worker was lost" if r.kind == "loss" else ""
    return f"From {r.from_nodes} to {nodes}{why}; no sample was processed for {r.cost_s:.2f} s."


def decode_spec(text: str) -> messages.JobSpec:
    """Decode a job specification from the store."""
    return msgspec.convert(json.loads(text), messages.JobSpec)


def not_completed(store: Store, jobs: Iterable[str]) -> list[JobRow]:
    """Return those of the jobs that have not completed, including failed and cancelled ones."""
    ids = list(jobs)
    rows = store.many.jobs(ids)
    selected = [rows[job] for job in ids if job in rows]
    return [row for row in selected if row.state != JobState.COMPLETED.value]


def is_arriving(store: Store, row: JobRow, spec: messages.JobSpec) -> bool:
    """Whether the job is a farm that has not started and whose tasks are still being added."""
    if spec.farm is None or row.started is not None:
        return False
    return store.tasks.count(row.id) < spec.farm.total


def submitted_before(store: Store, spec: messages.JobSpec) -> JobRow | None:
    """Return the job that the owner of ``spec`` has already submitted with the same key; None if
    there is none.
    """
    for row in store.find_jobs(spec.name):
        named = row.owner == spec.owner and row.name == spec.name
        if named and decode_spec(row.spec).key == spec.key:
            return row
    return None
