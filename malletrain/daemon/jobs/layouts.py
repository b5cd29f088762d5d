"""Finds the best layout of the nodes of jobs that ask for it, and stores it for later jobs.

Decides which layouts a job may have (what its script reports excludes some), when it gets another
one, and with which it begins. :mod:`jpa.layout` decides what is measured and which layout is the
best, the controller whether the workers can be restarted now.

A change of the layout is a round with the same members. So it is a planned rescale: the workers
save at the end of a step, and no sample is lost or processed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import structlog

from jpa.layout import (
    LayoutRequest,
    LayoutSearch,
    NodeLayout,
    SearchConfig,
    SearchOutcome,
    candidates,
)
from malletrain.core.events import Event, LayoutDue, LayoutFound
from malletrain.daemon.jobs.curves import Curves
from malletrain.daemon.jobs.layout_tuner import (
    LayoutTuner,
    layout_of,
    layout_record,
    node_layout,
)
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.daemon.site.clock import Clock
from malletrain.daemon.site.logs import AuditLog
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.messages import JobSpec, Progress, RoundLayout
from malletrain.rounds.interface import RoundStage
from malletrain.store.records import LayoutRow, LayoutSearchRow
from malletrain.store.store import Store

log = structlog.get_logger(__name__)

REQUEST_EVERY_S = 1.0
"""Minimum time between two requests for the same change of a layout, seconds. The controller
ignores a request while the job's nodes change.
"""
SILENCE_S = 120.0
"""Time without a report of the script after which the search ends, seconds."""
NO_SNAPSHOTS = (
    "The script takes no snapshots on request, so its processes cannot be started again without a "
    "loss. Add malletrain.Snapshot to it (docs/training-scripts.md)."
)
NO_REPORTS = (
    "The script does not report its steps, so nothing can be compared. Call malletrain.report()."
)
NO_OTHER = (
    "There is no other layout to try: a node with GPUs has one process for each of them, and a "
    "node with one core one process."
)
OWN_BATCHES = (
    "The number of processes stays as it is: another one would change the result, because the "
    "script does not state a batch over all processes. Give ElasticSampler or ElasticStream a "
    "global_batch_size."
)
SMALL_BATCH = (
    "Layouts with more than {most} processes on a node are left out: {nodes} nodes would have more "
    "processes than the global batch has samples ({batch})."
)
EXCLUDED = "would change the result"


class NodeShape(NamedTuple):
    """What a node has for the processes of a job."""

    cores: int = 1
    """Number of cores, at least 1."""
    gpus: int = 0
    """Number of GPUs."""
    node_class: str = "default"
    """Class of the node."""


def request_of(spec: JobSpec) -> LayoutRequest:
    """Return what a job's owner has fixed of the layout, and what is to be found."""
    return LayoutRequest(
        spec.nproc_per_node,
        spec.threads,
        spec.loader_workers,
        tunes_processes="processes" in spec.tuned,
        tunes_threads="threads" in spec.tuned,
        tunes_loaders="loader-workers" in spec.tuned,
    )


def most_processes(spec: JobSpec, facts: Mapping[str, Any]) -> int | None:
    """Return the maximum number of processes on a node for which each process has a sample of the
    global batch; None if the script does not state a global batch.
    """
    batch = facts.get("global_batch")
    if facts.get("own_batches") or not isinstance(batch, int):
        return None
    return max(1, batch // spec.largest)


class Layouts:
    """The searches of one daemon. All methods but :meth:`measure`, :meth:`is_silent` and
    :meth:`restore` run within a transaction.

    Args:
        store: the database.
        clock: the daemon's clock.
        audit: the audit log.
        shape_of: returns what a node has; None if it is not connected.
        curves: knows the profile keys of jobs.
        feed: passes an event to the controller.
        max_seconds: maximum duration of a search, seconds.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        audit: AuditLog,
        shape_of: Callable[[str], NodeShape | None],
        curves: Curves,
        feed: Callable[[Event], None],
        max_seconds: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._audit = audit
        self._shape_of = shape_of
        self._curves = curves
        self._feed = feed
        self.max_seconds = max_seconds

    # --- start of a job ---

    def restore(self, job: str, spec: JobSpec) -> LayoutTuner | None:
        """Return the search of a job from before a restart of the daemon; None if there is none."""
        row = self._store.layout_search(job) if spec.tuned else None
        return None if row is None else _tuner(row)

    def max_processes(self, run: ActiveJob, node: str) -> int:
        """Return the maximum number of processes on a node in any layout of the job; 0 if it is
        that of its specification. Begins its search with the first node that it gets.
        """
        if not run.spec.tuned:
            return 0
        if run.tuner is None:
            run.tuner = self._begin(run, node)
            if run.tuner.is_settled:  # by an earlier job
                self._announce(run, run.tuner)
                self._feed(LayoutFound(run.row.id))
        return run.tuner.row.max_processes

    def _begin(self, run: ActiveJob, node: str) -> LayoutTuner:
        cores, gpus, node_class = self._shape_of(node) or NodeShape()
        layouts = candidates(cores, gpus, request_of(run.spec))
        search = LayoutSearch.of(layouts, SearchConfig(max_seconds=self.max_seconds))
        source, facts = "", {}
        stored = self._store.layout(self._curves.key_of(run.spec, node_class))
        if stored is not None and stored.cores == cores:
            layout = NodeLayout(**stored.layout)
            most = most_processes(run.spec, stored.facts)
            fits = layout.processes == layouts[0].processes or layout.processes <= (most or 0)
            if layout in layouts and fits:
                reason = f"Job {stored.job}, of the same kind, found it."
                search = replace(search, outcome=SearchOutcome(layout, reason))
                source, facts = stored.job, dict(stored.facts)
        row = LayoutSearchRow(
            run.row.id,
            node_class,
            max(layout.processes for layout in layouts),
            search.to_dict(),
            layout_record(search.layout),
            facts,
            source,
        )
        return LayoutTuner(self._store.put_layout_search(row), search)

    # --- rounds ---

    def prepare_round(self, run: ActiveJob) -> None:
        """Give the round that is about to be formed the layout that the job should have."""
        tuner = run.tuner
        if tuner is not None and tuner.must_change:
            row = replace(tuner.record(), layout=layout_record(tuner.search.layout))
            tuner.row = self._store.put_layout_search(row)

    @staticmethod
    def of_round(run: ActiveJob) -> RoundLayout | None:
        """Return the layout of the newest round; None if it is that of the specification."""
        return None if run.tuner is None else node_layout(layout_of(run.tuner.row), run.spec)

    def with_layout(self, run: ActiveJob) -> JobSpec:
        """Return the specification of a job for a launcher. Live workers start before their first
        round, so theirs has the numbers of the newest round.
        """
        layout = self.of_round(run)
        if layout is None or run.spec.mode != "live":
            return run.spec
        return msgspec.structs.replace(
            run.spec,
            nproc_per_node=layout.processes,
            threads=layout.threads,
            loader_workers=layout.loader_workers,
        )

    def failed(self, run: ActiveJob, sentence: str) -> bool:
        """Handle a failure of the job's workers. Return whether the layout has caused it: then the
        next round has another one, and the failure does not count. ``sentence``: the failure.
        """
        tuner = run.tuner
        if tuner is None:
            return False
        layout, default = layout_of(tuner.row), tuner.search.default.layout
        works = tuner.search.outcome is not None and run.monitor.first_sample is not None
        if layout == default or (works and not tuner.must_change):
            return False
        run.rounds.outdate()
        if tuner.must_change:  # the next round has another layout anyway
            return True
        if tuner.search.outcome is None:
            tuner.search = tuner.search.failed()
        else:
            reason = f"The processes of the job failed in the layout {layout}."
            tuner.search = replace(tuner.search, outcome=SearchOutcome(default, reason))
        tuner.row = self._store.put_layout_search(tuner.record())
        self._audit.record(
            EventKind.LAYOUT_FAILED,
            f"The processes of the job failed in the layout {layout}, which is not tried again: "
            f"{sentence}",
            job=run.row.id,
            layout=layout_record(layout),
        )
        if tuner.search.outcome is not None and not tuner.is_announced:
            self._settle(run, tuner)
        return True

    # --- progress ---

    def measure(self, run: ActiveJob, record: Progress) -> bool:
        """Add the counts of one worker. Return whether :meth:`follow` is due."""
        tuner, rounds = run.tuner, run.rounds
        if tuner is None or tuner.is_settled:
            return False
        if rounds.stage is not RoundStage.RUNNING or set(rounds.target) != set(rounds.members):
            return False
        now = self._clock.now()
        rate = tuner.batch_rate(record, rounds.generation, lambda: run.monitor.mean_pause(2), now)
        if rate is not None:
            if not tuner.is_limited:
                tuner.search = self._limited(tuner, run.spec)
                tuner.is_limited = True
            if not tuner.must_change:
                tuner.search = tuner.search.measured(rate, len(rounds.members))
        if tuner.search.outcome is not None and not tuner.is_announced:
            return True
        return tuner.must_change and now - tuner.requested_at >= REQUEST_EVERY_S

    def is_silent(self, run: ActiveJob) -> bool:
        """Return whether the search cannot begin because the script reports nothing."""
        tuner = run.tuner
        if tuner is None or tuner.search.outcome is not None or run.monitor.last_sample is not None:
            return False
        running = run.rounds.stage is RoundStage.RUNNING
        return running and run.monitor.silent_for(self._clock.now()) > SILENCE_S

    def give_up(self, run: ActiveJob) -> None:
        """End the search of a job whose script reports nothing."""
        assert run.tuner is not None
        run.tuner.search = run.tuner.search.ended(NO_REPORTS)
        self.follow(run)

    def follow(self, run: ActiveJob) -> None:
        """Store the state of the search, announce its end, and request the layout that the job
        should have.
        """
        tuner = run.tuner
        assert tuner is not None
        tuner.row = self._store.put_layout_search(tuner.record())
        if tuner.search.outcome is not None and not tuner.is_announced:
            self._settle(run, tuner)
        if tuner.must_change:
            tuner.requested_at = self._clock.now()
            self._feed(LayoutDue(run.row.id))

    def learned(self, run: ActiveJob, facts: Mapping[str, Any]) -> None:
        """Take over facts that the script reports: whether it saves on request, and its batch."""
        tuner = run.tuner
        if tuner is None:
            return
        merged = dict(tuner.row.facts)
        if facts.get("saves") is True:
            merged["saves"] = True
        if "global_batch" in facts:
            batch, smallest = facts["global_batch"], merged.get("global_batch")
            if not isinstance(batch, int) or batch < 1:
                merged["own_batches"] = True
            else:
                merged["global_batch"] = min(batch, smallest) if smallest else batch
        if merged != tuner.row.facts:
            tuner.is_limited = False
            tuner.row = self._store.put_layout_search(replace(tuner.record(), facts=merged))

    # --- inside ---

    def _limited(self, tuner: LayoutTuner, spec: JobSpec) -> LayoutSearch:
        """Return the search without the layouts that the script's facts exclude."""
        search, facts = tuner.search, tuner.row.facts
        if len(search.arms) == 1:
            return search.ended(NO_OTHER)
        if not facts.get("saves"):
            return search.ended(NO_SNAPSHOTS)
        most = most_processes(spec, facts) or 0
        usual = search.default.layout.processes

        def excluded(layout: NodeLayout) -> bool:
            return layout.processes > most and layout.processes != usual

        if not any(excluded(arm.layout) for arm in search.arms if not arm.out):
            return search
        if "global_batch" in facts and not facts.get("own_batches"):
            batch, nodes = facts["global_batch"], spec.largest
            sentence = SMALL_BATCH.format(most=most, nodes=nodes, batch=batch)
        else:
            sentence = OWN_BATCHES
        if all(arm.out or excluded(arm.layout) for arm in search.arms[1:]):
            return search.excluding(excluded, EXCLUDED, "").ended(sentence)
        return search.excluding(excluded, EXCLUDED, sentence)

    def _settle(self, run: ActiveJob, tuner: LayoutTuner) -> None:
        """Announce the end of a search, and store its result for later jobs."""
        search, outcome = tuner.search, tuner.search.outcome
        assert outcome is not None
        tuner.is_announced = True
        job, default = run.row.id, search.default.layout
        changed = "" if outcome.layout == default else str(outcome.layout)
        self._announce(run, tuner)
        if search.is_conclusive:
            shapes = map(self._shape_of, run.rounds.members)
            if (shape := next(filter(None, shapes), None)) is not None:
                self._store.put_layout(
                    LayoutRow(
                        self._curves.key_of(run.spec, tuner.row.node_class),
                        tuner.row.node_class,
                        shape.cores,
                        layout_record(outcome.layout),
                        tuner.row.facts,
                        job,
                        self._clock.now(),
                    )
                )
        self._feed(LayoutFound(job, changed))

    def _announce(self, run: ActiveJob, tuner: LayoutTuner) -> None:
        """Record the layout that a search, or that of an earlier job, has found."""
        search, outcome = tuner.search, tuner.search.outcome
        assert outcome is not None
        sentence = f"The job uses each of its nodes as {outcome.layout}."
        self._audit.record(
            EventKind.LAYOUT_FOUND,
            " ".join(filter(None, (sentence, outcome.reason, search.limit))),
            job=run.row.id,
            layout=layout_record(outcome.layout),
            default=layout_record(search.default.layout),
            seconds=search.seconds,
            rates=[
                [*layout_record(arm.layout).values(), arm.mean] for arm in search.arms if arm.count
            ],
        )


def _tuner(row: LayoutSearchRow) -> LayoutTuner | None:
    try:
        return LayoutTuner(row, LayoutSearch.from_dict(row.search))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        log.warning("A stored search for a layout is not used", job=row.job, reason=str(error))
        return None
