"""The daemon's memory of scaling curves: with which curve a new job starts, and what is stored of
each job for later ones.

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
from malletrain.core.siblings import Sibling
from malletrain.core.sized_jobs import SizedJob, suggestions
from malletrain.daemon.clock import Clock
from malletrain.protocol import messages
from malletrain.store.records import CurveRow, ProfileRow
from malletrain.store.store import Store

log = structlog.get_logger(__name__)

KEPT_INTERRUPTIONS = 100
LARGEST_SCRIPT = 16 * 1024 * 1024
NEWS_EVERY_S = 1.0
"""Waiting jobs are told no more often: hundreds that run keep curves all the time."""


@dataclass(frozen=True)
class _Stored:
    """A :class:`malletrain.core.siblings.SiblingStorage` over the store: the curves on one class of
    nodes with so many processes on each.
    """

    store: Store
    costs: RescaleCosts
    node_class: str
    processes: int
    now: float
    rows_by_key: Mapping[str, CurveRow] | None = None
    """The newest curve of each key, where they have been read; None: they have not."""
    every: tuple[Sibling, ...] | None = None
    """The newest curves of all keys, where they have been read."""

    def put(self, sibling: Sibling) -> None:
        """Keep it."""
        size, data = sibling.size, sibling.scaling.to_dict()
        fields = (sibling.key, self.node_class, self.processes, data, sibling.job, self.now)
        self.store.put_curve(CurveRow(*fields, size.parameters, size.flops))

    def of_key(self, key: str) -> Sibling | None:
        """The newest of this key; None where it cannot be read."""
        row = self.store.curve(key) if self.rows_by_key is None else self.rows_by_key.get(key)
        return self._sibling(row) if row else None

    def others(self, key: str) -> list[Sibling]:
        """Those of other keys that can be read, the newest first."""
        every = self.read().every or ()
        return [sibling for sibling in every if sibling.key != key]

    def read(self) -> _Stored:
        """The same with the curves of all keys in memory: several jobs are asked for."""
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
    """The scaling curve with which a job starts."""

    scaling: ScalingModel | None
    """What it starts with: its own from before a restart, else that of its kind; None: nothing."""
    kind: str
    """Jobs of one kind scale alike; empty where they may differ in level, or nothing is
    profiled."""


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
        """What is known, or who waits, has changed since waiting jobs were last told."""
        self._news_at = -math.inf

    # --- a job begins ---

    def begin(
        self, jobs: Sequence[tuple[str, messages.JobSpec]], *, profiled: bool = True
    ) -> list[InitialCurve]:
        """How jobs (id and specification) begin, all read at once. ``profiled``: whether the site
        has jobs profiled.
        """
        rows = self._store.many.profiles(job for job, _ in jobs)
        if profiled:
            for job, spec in jobs:
                if job not in rows:
                    node_class = self._usual_class()
                    row = ProfileRow(job, self._key(spec, node_class), node_class)
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

    # --- a job goes on ---

    def keep(self, job: str, spec: messages.JobSpec, scaling: ScalingModel) -> None:
        """Store what is known now, for this job and for the next of its kind."""
        row = self._store.put_profile(
            replace(self._on_its_class(job, spec), learned=scaling.to_dict(), waits="")
        )
        size = ModelSize(
            row.parameters or _positive(spec.parameters), row.flops or _positive(spec.flops)
        )
        stored = siblings.keep(self._storage(row, spec), Sibling(row.key, job, scaling, size))
        self.news = self.news or stored

    def tell_at(self) -> float | None:
        """When :meth:`for_waiting` is due; None: nothing has changed."""
        return self._news_at + NEWS_EVERY_S if self.news else None

    def for_waiting(self, specs: Callable[[str], messages.JobSpec | None]) -> list[PriorSuggested]:
        """What waiting jobs are told of jobs of other sizes. ``specs``: how a job was submitted."""
        read: dict[tuple[str, int], _Stored] = {}

        def sized(job: str) -> SizedJob | None:
            spec = specs(job)
            if spec is None or not (spec.parameters or spec.flops):
                return None
            row, size = self._row(job), ModelSize(_positive(spec.parameters), _positive(spec.flops))
            node_class = self._usual_class()  # when it was submitted, there may have been no node
            if node_class != row.node_class:  # its script is read for that: once
                row = replace(row, key=self._key(spec, node_class), node_class=node_class)
                self._store.put_profile(row)
            where = node_class, spec.nproc_per_node
            if where not in read:
                read[where] = self._storage(row, spec).read()
            return SizedJob(row.key, size, read[where], self._costs)

        self.news, self._news_at = False, self._clock.now()
        most = self._controller.queue.max_running
        return suggestions(self._controller.state.unfinished.values(), most, sized)

    def waits(self, job: str, reason: str) -> None:
        """Why its profile does not begin."""
        self._store.put_profile(replace(self._row(job), waits=reason))

    def interrupted(self, job: str, data: dict[str, Any]) -> None:
        """It gave nodes to a profile."""
        row = self._row(job)
        interruptions = (*row.interruptions, {"time": self._clock.now(), **data})[
            -KEPT_INTERRUPTIONS:
        ]
        self._store.put_profile(replace(row, interruptions=interruptions))

    def described(
        self, job: str, spec: messages.JobSpec, facts: dict[str, Any]
    ) -> ScalingModel | None:
        """Its script says how large its model is; what the nearest sibling suggests, if there is
        one.
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
        """What the model that its script describes is called, where it described another one
        before; else nothing. Ask before :meth:`described`.
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
        """What a row says is known; nothing where it cannot be read."""
        return _read(row.learned, f"job {row.job}", self._costs) or ScalingModel(costs=self._costs)

    # --- inside ---

    def _row(self, job: str) -> ProfileRow:
        return self._store.profile(job) or ProfileRow(job)

    def _on_its_class(self, job: str, spec: messages.JobSpec) -> ProfileRow:
        """The job's row, of the class of nodes it runs on: which one that would be was a guess when
        it was submitted.
        """
        row = self._row(job)
        record = self._controller.jobs.get(job)
        nodes = record.nodes if record is not None else ()
        node_class = next(
            (
                self._controller.nodes[n].info.node_class
                for n in nodes
                if n in self._controller.nodes
            ),
            row.node_class,
        )
        if not row.key or node_class == row.node_class:
            return row
        return replace(row, key=self._key(spec, node_class), node_class=node_class)

    def _storage(self, row: ProfileRow, spec: messages.JobSpec) -> _Stored:
        now = self._clock.now()
        return _Stored(self._store, self._costs, row.node_class, spec.nproc_per_node, now)

    def _usual_class(self) -> str:
        """The class that most nodes are of."""
        nodes_by_class = Counter(node.info.node_class for node in self._controller.nodes.values())
        return max(nodes_by_class, key=lambda c: (nodes_by_class[c], c), default="default")

    @staticmethod
    def _key(spec: messages.JobSpec, node_class: str) -> str:
        try:
            with open(spec.script, "rb") as file:
                script = file.read(LARGEST_SCRIPT)
        except OSError:  # the daemon's user may not read what the job's owner may
            script = f"{spec.owner}:{Path(spec.script)}".encode("utf-8", "surrogateescape")
        user_key = (
            f"{spec.owner}:{spec.profile_key}" if spec.profile_key else None
        )  # others may choose the same name for something else
        return profile_key(
            script,
            spec.args,
            node_class,
            spec.nproc_per_node,
            user_key=user_key,
            software=_identity(spec.software),
        )


def _may_differ(spec: messages.JobSpec) -> bool:
    """Whether only its owner says with which jobs it scales alike: those may differ in level. The
    trials of a sweep that share a profile are taken at their owner's word.
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
    """What of a software environment tells two jobs of one script apart: other libraries, another
    curve. How an image is run makes no difference.
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


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e300 else None
