"""Stores scaling curves: provides the curve with which a new job starts, and stores that of each
job for later ones.

Decides under which key a curve is stored. :mod:`malletrain.core.siblings` decides whose curve a job
inherits; the controller and the JPA decide what is measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from allocator import CurveError
from jpa import ModelSize, RescaleCosts, profile_key
from malletrain.core import siblings
from malletrain.core.controller import Controller
from malletrain.core.events import PriorSuggested
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.siblings import Sibling, SizedJob, suggestions
from malletrain.daemon.jobs.user_files import read_script
from malletrain.daemon.site.clock import Clock
from malletrain.protocol import messages
from malletrain.store.records import CurveRow, ProfileRow
from malletrain.store.store import Store

log = structlog.get_logger(__name__)

MAX_INTERRUPTIONS = 100
"""Number of a job's last donations to profiles that are stored."""
NEWS_EVERY_S = 1.0
"""Minimum interval between updates of waiting jobs, seconds. With hundreds of running jobs, curves
change all the time.
"""


@dataclass(frozen=True)
class _Stored:
    """A :class:`malletrain.core.siblings.SiblingStorage` over the store: the curves for one class
    of nodes and one number of processes per node.
    """

    store: Store
    """The database."""
    costs: RescaleCosts
    """Configured cost of rescaling."""
    node_class: str
    """Class of the nodes."""
    processes: int
    """Number of processes per node."""
    now: float
    """Time at which curves are stored, seconds."""
    rows_by_key: Mapping[str, CurveRow] | None = None
    """Newest curve of each key; None if they are not read yet."""
    every: tuple[Sibling, ...] | None = None
    """Newest curves of all keys; None if they are not read yet."""

    def put(self, sibling: Sibling) -> None:
        """Store the curve of a job."""
        size, data = sibling.size, sibling.scaling.to_dict()
        fields = (sibling.key, self.node_class, self.processes, data, sibling.job, self.now)
        self.store.put_curve(CurveRow(*fields, size.parameters, size.flops))

    def of_key(self, key: str) -> Sibling | None:
        """Return the newest curve of this key; None if there is none or it cannot be decoded."""
        row = self.store.curve(key) if self.rows_by_key is None else self.rows_by_key.get(key)
        return self._sibling(row) if row else None

    def others(self, key: str) -> list[Sibling]:
        """Return the curves of other keys that can be decoded, the newest first."""
        every = self.read().every or ()
        return [sibling for sibling in every if sibling.key != key]

    def read(self) -> _Stored:
        """Return a copy that has the curves of all keys in memory, for queries of several jobs."""
        if self.every is not None:
            return self
        rows = self.store.curves(self.node_class, self.processes)
        siblings_ = (self._sibling(row) for row in rows)
        return replace(self, every=tuple(each for each in siblings_ if each is not None))

    def _sibling(self, row: CurveRow) -> Sibling | None:
        scaling = _read(row.learned, f"jobs like {row.job}", self.costs)
        size = ModelSize(row.parameters, row.flops)
        return Sibling(row.key, row.job, scaling, size) if scaling else None


@dataclass(frozen=True)
class InitialCurve:
    """The curve with which a job starts."""

    scaling: ScalingModel | None
    """Its own curve from before a restart, else that of its profile key; None if there is neither.
    """
    kind: str
    """Its profile key, if jobs of that key share profiles. Empty if the levels of their curves may
    differ, or profiling is off.
    """


class Curves:
    """Curves in the store, for one daemon. ``costs``: the site's configured cost of rescaling."""

    def __init__(
        self, store: Store, clock: Clock, controller: Controller, costs: RescaleCosts
    ) -> None:
        self._store = store
        self._clock = clock
        self._controller = controller
        self._costs = costs
        self.news = False
        """Whether the curves or the set of waiting jobs have changed since the last update of
        waiting jobs.
        """
        self._news_at = -math.inf

    # --- start of a job ---

    def begin(
        self, jobs: Sequence[tuple[str, messages.JobSpec]], *, profiled: bool = True
    ) -> list[InitialCurve]:
        """Return the curve with which each of the jobs (id and specification) starts. They are read
        together. ``profiled``: whether profiling is on.
        """
        rows = self._store.many.profiles(job for job, _ in jobs)
        if profiled:
            for job, spec in jobs:
                if job not in rows:
                    node_class = self._most_frequent_class()
                    row = ProfileRow(job, self.key_of(spec, node_class), node_class)
                    rows[job] = self._store.put_profile(row)
        rows_by_key = self._store.many.curves(row.key for row in rows.values() if not row.learned)
        beginnings = []
        for job, spec in jobs:
            row, model = rows.get(job, ProfileRow(job)), None
            if profiled and row.learned:
                model = _read(row.learned, f"job {job}", self._costs)
            elif profiled:
                storage = replace(self._storage(row, spec), rows_by_key=rows_by_key)
                model = siblings.starts_with(storage, row.key, named=_may_differ(spec))
                if model is None and (spec.parameters or spec.flops):
                    size = ModelSize(_positive(spec.parameters), _positive(spec.flops))
                    model = siblings.suggested(storage, row.key, size, self._costs)
            beginnings.append(InitialCurve(model, "" if _may_differ(spec) else row.key))
        return beginnings

    # --- running jobs ---

    def keep(self, job: str, spec: messages.JobSpec, scaling: ScalingModel) -> None:
        """Store the scaling model of a job, for itself and for later jobs of its kind.

        Args:
            job: id of the job.
            spec: its specification.
            scaling: its scaling model.
        """
        row = self._store.put_profile(
            replace(self._on_its_class(job, spec), learned=scaling.to_dict(), waits="")
        )
        size = ModelSize(
            row.parameters or _positive(spec.parameters), row.flops or _positive(spec.flops)
        )
        stored = siblings.keep(self._storage(row, spec), Sibling(row.key, job, scaling, size))
        self.news = self.news or stored

    def tell_at(self) -> float | None:
        """Return when :meth:`for_waiting` is due; None if nothing has changed."""
        return self._news_at + NEWS_EVERY_S if self.news else None

    def for_waiting(self, specs: Callable[[str], messages.JobSpec | None]) -> list[PriorSuggested]:
        """Return the priors that waiting jobs get from jobs with other model sizes. ``specs``:
        returns the specification of a job.
        """
        read: dict[tuple[str, int], _Stored] = {}

        def sized(job: str) -> SizedJob | None:
            spec = specs(job)
            if spec is None or not (spec.parameters or spec.flops):
                return None
            row, size = self._row(job), ModelSize(_positive(spec.parameters), _positive(spec.flops))
            # at its submission there may have been no node
            node_class = self._most_frequent_class()
            if node_class != row.node_class:  # its script is read for that: once
                row = replace(row, key=self.key_of(spec, node_class), node_class=node_class)
                self._store.put_profile(row)
            class_and_processes = node_class, spec.nproc_per_node
            if class_and_processes not in read:
                read[class_and_processes] = self._storage(row, spec).read()
            return SizedJob(row.key, size, read[class_and_processes], self._costs)

        self.news, self._news_at = False, self._clock.now()
        max_running = self._controller.queue.max_running
        return suggestions(self._controller.state.unfinished.values(), max_running, sized)

    def waits(self, job: str, reason: str) -> None:
        """Store why the job's profile does not begin."""
        self._store.put_profile(replace(self._row(job), waits=reason))

    def interrupted(self, job: str, data: dict[str, Any]) -> None:
        """Store that the job gave nodes to a profile."""
        row = self._row(job)
        interruptions = (*row.interruptions, {"time": self._clock.now(), **data})[
            -MAX_INTERRUPTIONS:
        ]
        self._store.put_profile(replace(row, interruptions=interruptions))

    def described(
        self, job: str, spec: messages.JobSpec, facts: dict[str, Any]
    ) -> ScalingModel | None:
        """Store the model size that the job's script reports. Return the prior from the nearest
        sibling; None if there is none.

        Args:
            job: id of the job.
            spec: its specification.
            facts: ``parameters`` and ``flops_per_sample`` of its model.
        """
        size = ModelSize(
            _positive(facts.get("parameters")), _positive(facts.get("flops_per_sample"))
        )
        row = self._on_its_class(job, spec)
        if (row.parameters, row.flops) == (size.parameters, size.flops):
            return None
        row = self._store.put_profile(replace(row, parameters=size.parameters, flops=size.flops))
        return siblings.suggested(self._storage(row, spec), row.key, size, self._costs)

    def another_model(self, job: str, facts: dict[str, Any]) -> str:
        """Return the description of the model that the job's script reports, if it reported another
        one before; else empty. Call it before :meth:`described`.
        """
        row = self._row(job)
        pairs = (
            (row.parameters, _positive(facts.get("parameters"))),
            (row.flops, _positive(facts.get("flops_per_sample"))),
        )
        if all(None in pair or pair[0] == pair[1] for pair in pairs):
            return ""
        return " ".join(f"{now:.4g}" for _, now in pairs if now is not None)

    def read(self, row: ProfileRow) -> ScalingModel:
        """Return the scaling model in a row; an empty one if it cannot be decoded."""
        return _read(row.learned, f"job {row.job}", self._costs) or ScalingModel(costs=self._costs)

    # --- inside ---

    def _row(self, job: str) -> ProfileRow:
        return self._store.profile(job) or ProfileRow(job)

    def _on_its_class(self, job: str, spec: messages.JobSpec) -> ProfileRow:
        """Return the job's row for the class of nodes that it runs on. At its submission that class
        is only a guess.
        """
        row = self._row(job)
        record = self._controller.jobs.get(job)
        nodes = record.nodes if record is not None else ()
        node_class = next(
            (
                self._controller.nodes[n].pool.node_class
                for n in nodes
                if n in self._controller.nodes
            ),
            row.node_class,
        )
        if not row.key or node_class == row.node_class:
            return row
        return replace(row, key=self.key_of(spec, node_class), node_class=node_class)

    def _storage(self, row: ProfileRow, spec: messages.JobSpec) -> _Stored:
        now = self._clock.now()
        return _Stored(self._store, self._costs, row.node_class, spec.nproc_per_node, now)

    def _most_frequent_class(self) -> str:
        """Return the most frequent class of nodes."""
        nodes_by_class = Counter(node.pool.node_class for node in self._controller.nodes.values())
        return max(nodes_by_class, key=lambda c: (nodes_by_class[c], c), default="default")

    @staticmethod
    def key_of(spec: messages.JobSpec, node_class: str) -> str:
        """Return the profile key of a job on a class of nodes."""
        try:
            script = read_script(spec.script)
        except OSError:  # the daemon's user may not read what the job's owner may, or not now
            script = f"{spec.owner}:{Path(spec.script)}".encode("utf-8", "surrogateescape")
        # Other users may choose the same key for other jobs.
        user_key = f"{spec.owner}:{spec.profile_key}" if spec.profile_key else None
        return profile_key(
            script,
            spec.args,
            node_class,
            spec.nproc_per_node,
            user_key=user_key,
            software=(*_identity(spec.software), *_layout_identity(spec)),
        )


def _may_differ(spec: messages.JobSpec) -> bool:
    """Whether the level of the job's curve may differ from that of other jobs with its key: only
    the owner states that they scale alike. For trials of a sweep the owner's statement is trusted.
    """
    return bool(spec.profile_key) and not spec.sweep


def _read(data: Any, whose: str, costs: RescaleCosts) -> ScalingModel | None:
    if not data:
        return None
    try:
        return ScalingModel.from_dict(data, costs)
    except (CurveError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("A stored scaling curve is not used", of=whose, reason=str(error))
        return None


def _identity(software: messages.SoftwareEnvironment | None) -> tuple[str, ...]:
    """Return the parts of a software environment that distinguish two jobs of one script, because
    other libraries change the curve. The container runtime does not.
    """
    if software is None:
        return ()
    named = {
        "container": software.container or "",
        "conda": software.conda,
        "venv": software.venv,
        "modules": " ".join(software.modules),
    }
    return tuple(f"{kind}={value}" for kind, value in named.items() if value)


def _layout_identity(spec: messages.JobSpec) -> tuple[str, ...]:
    """Return the parts of the layout of a node that distinguish two jobs of one script."""
    return (
        *((f"threads={spec.threads}",) if spec.threads else ()),
        *((f"loader workers={spec.loader_workers}",) if spec.loader_workers else ()),
        *(f"{part}=auto" for part in sorted(spec.tuned)),
    )


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e300 else None
