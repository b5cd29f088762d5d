"""Stores the rows, progress, measurements and rescale costs of jobs.

Decides nothing. Everything here runs within a transaction of the core, so it is saved together with
the event that caused it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from malletrain.core.events import JobState
from malletrain.core.fabric import Fabric
from malletrain.daemon.audit_log import AuditLog
from malletrain.daemon.clock import Clock
from malletrain.daemon.metric_series import GrowingSeries
from malletrain.daemon.metrics import Metrics
from malletrain.daemon.monitor import JobMonitor, RescaleRecord
from malletrain.daemon.sample_counts import SampleCount
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import Rounds
from malletrain.store.records import JobRow, ObservationRow, RescaleRow
from malletrain.store.store import Store

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
    """Last output of a launcher that ended."""
    unfit: list[str] = field(default_factory=list)
    """Nodes on which its software was not available, as long as it has started on none. A node
    appears once for each try.
    """
    counts: SampleCount = field(default_factory=SampleCount)
    """Samples of its newest round at a common time."""
    series: dict[str, GrowingSeries] = field(default_factory=dict)
    """Name → metric over time."""
    progress_at: float = 0.0
    """Time at which the controller last received its progress."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes on which it runs, in rank order; none while it is suspended."""
        return () if self.row.state == JobState.SUSPENDED.value else self.rounds.members

    def rate(self, now: float) -> float:
        """Return its current throughput, samples/s; 0 while it has no node."""
        return self.monitor.rate(now) if self.nodes else 0.0


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
        if (observation := run.monitor.observation()) is not None:
            row = ObservationRow(
                run.row.id,
                observation.nodes,
                observation.batch,
                observation.rate,
                observation.spread,
                observation.seconds,
                observation.samples,
                now,
            )
            self._store.put_observation(row)

    def rescale(self, run: ActiveJob, r: RescaleRecord) -> None:
        """Store a finished rescale and its cost."""
        self._store.put_rescale(
            RescaleRow(
                run.row.id,
                r.generation,
                r.kind,
                r.from_nodes,
                r.to_nodes,
                r.began,
                r.ended,
                r.cost_s,
                r.phases,
            )
        )
        self._metrics.rescale(r.kind, r.cost_s)
        self._audit.record(
            EventKind.RESCALE_FINISHED,
            _rescale_sentence(r),
            job=run.row.id,
            generation=r.generation,
            cost_s=r.cost_s,
            phases=r.phases,
        )

    def notice(self, run: ActiveJob, sentence: str) -> None:
        """Add a notice for the job's owner. A repeated notice has no effect."""
        if sentence not in run.row.notices:
            self.save(run, notices=(*run.row.notices, sentence)[-MAX_NOTICES:])
            self._audit.record(EventKind.JOB_NOTICE, sentence, job=run.row.id)


def _rescale_sentence(r: RescaleRecord) -> str:
    nodes = f"{r.to_nodes} node{'s' if r.to_nodes != 1 else ''}"
    if r.kind == "start":
        return f"Started on {nodes}; the first sample came {r.cost_s:.2f} s after the decision."
    why = ", because a node was lost" if r.kind == "loss" else ""
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


def submitted_before(store: Store, spec: messages.JobSpec) -> JobRow | None:
    """Return the job that the owner of ``spec`` has already submitted with the same key; None if
    there is none.
    """
    for row in store.find_jobs(spec.name):
        named = row.owner == spec.owner and row.name == spec.name
        if named and decode_spec(row.spec).key == spec.key:
            return row
    return None
