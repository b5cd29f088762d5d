"""Stores what is known of a job: its row, its progress, its measurements, the costs of its
rescales.

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
from malletrain.daemon.aligned import AlignedCounts
from malletrain.daemon.audit_log import AuditLog
from malletrain.daemon.clock import Clock
from malletrain.daemon.metric_series import GrowingSeries
from malletrain.daemon.metrics import Metrics
from malletrain.daemon.monitor import JobMonitor, RescaleRecord
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.rounds.interface import Rounds
from malletrain.store.records import JobRow, ObservationRow, RescaleRow
from malletrain.store.store import Store

KEPT_NOTICES = 20


@dataclass
class ActiveJob:
    """An unfinished job in the daemon's hands."""

    row: JobRow
    spec: messages.JobSpec
    rounds: Rounds
    monitor: JobMonitor
    starting_until: float | None = None
    """Until when the first sample of the newest round is waited for."""
    checkpointed_at: float = 0.0
    fabric: Fabric | None = None
    """The network of the newest round, where one is chosen."""
    bereft: dict[str, int] = field(default_factory=dict)
    """Node → the newest round in which its workers died, or gave up, because of a lost peer."""
    crashed: int = 0
    """The newest round in which workers died by themselves: their peers speak of them."""
    barred: int = 0
    """The newest round in which workers found no way to a peer."""
    launcher_tail: str = ""
    """The last words of a launcher that ended."""
    unfit: list[str] = field(default_factory=list)
    """Nodes on which its software could not be had, while it has come up on none; a node that was
    tried again as often."""
    counts: AlignedCounts = field(default_factory=AlignedCounts)
    series: dict[str, GrowingSeries] = field(default_factory=dict)
    """Its metrics over time, by name."""
    progress_at: float = 0.0
    """When the controller last heard of its progress."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it runs on, in rank order; none while it is suspended."""
        return () if self.row.state == JobState.SUSPENDED.value else self.rounds.members

    def rate(self, now: float) -> float:
        """Samples/s now; 0 while it has no node."""
        return self.monitor.rate(now) if self.nodes else 0.0


class JobRepository:
    """The jobs' rows in the store, with the audit log and the metrics that go with them."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics, audit: AuditLog) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._audit = audit

    def save(self, run: ActiveJob, **changes: Any) -> None:
        """Write fields of the job, and with them how far it has come: late reports add to what
        was counted before the present round.
        """
        counted = {"samples": run.monitor.total, "samples_before": run.monitor.before}
        run.row = self._store.change_job(run.row, **counted, **changes)

    def checkpoint(self, run: ActiveJob, now: float) -> None:
        """Write how far the job has come and what was measured of it since the last time."""
        run.checkpointed_at = now
        self.save(run, last_progress=run.monitor.last_sample)
        if (seen := run.monitor.observation()) is not None:
            row = ObservationRow(
                run.row.id,
                seen.nodes,
                seen.batch,
                seen.rate,
                seen.spread,
                seen.seconds,
                seen.samples,
                now,
            )
            self._store.put_observation(row)

    def rescale(self, run: ActiveJob, r: RescaleRecord) -> None:
        """Write a rescale that is over, with what it cost."""
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
        """A sentence for the job's owner; saying it again does nothing."""
        if sentence not in run.row.notices:
            self.save(run, notices=(*run.row.notices, sentence)[-KEPT_NOTICES:])
            self._audit.record(EventKind.JOB_NOTICE, sentence, job=run.row.id)


def _rescale_sentence(r: RescaleRecord) -> str:
    nodes = f"{r.to_nodes} node{'s' if r.to_nodes != 1 else ''}"
    if r.kind == "start":
        return f"Started on {nodes}; the first sample came {r.cost_s:.2f} s after the decision."
    why = ", because a node was lost" if r.kind == "loss" else ""
    return f"From {r.from_nodes} to {nodes}{why}; no sample was processed for {r.cost_s:.2f} s."


def decode_spec(text: str) -> messages.JobSpec:
    """The job as it was submitted, from the store."""
    return msgspec.convert(json.loads(text), messages.JobSpec)


def not_completed(store: Store, jobs: Iterable[str]) -> list[JobRow]:
    """Those of these jobs that have not completed, whether they still may or not."""
    ids = list(jobs)
    rows = store.many.jobs(ids)
    selected = [rows[job] for job in ids if job in rows]
    return [row for row in selected if row.state != JobState.COMPLETED.value]


def submitted_before(store: Store, spec: messages.JobSpec) -> JobRow | None:
    """The job that the owner of ``spec`` has submitted under its key."""
    for row in store.find_jobs(spec.name):
        named = row.owner == spec.owner and row.name == spec.name
        if named and decode_spec(row.spec).key == spec.key:
            return row
    return None
