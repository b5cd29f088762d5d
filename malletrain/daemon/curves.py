"""The daemon's memory of how jobs scale: which curve a new job starts with, and what is kept of
each for the next of its kind.

Decides under which key a curve is stored and whose curve a job inherits. What is measured is the
controller's and the advisor's decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from allocator import CurveError
from jpa import MeasuredCurve, ModelSize, RescaleCosts, Stored, inherited, prior_from, profile_key
from jpa.curve import DEFAULT_PHASE
from malletrain.core.controller import Controller
from malletrain.core.scaling_model import ScalingModel
from malletrain.daemon.clock import Clock
from malletrain.protocol import messages
from malletrain.store.schema import CurveRow, ProfileRow
from malletrain.store.store import Store

log = structlog.get_logger(__name__)

KEPT_INTERRUPTIONS = 100
LARGEST_SCRIPT = 16 * 1024 * 1024


class Curves:
    """Curves in the store, for one daemon. ``costs``: the site's configured cost of rescaling."""

    def __init__(
        self, store: Store, clock: Clock, controller: Controller, costs: RescaleCosts
    ) -> None:
        self._store = store
        self._clock = clock
        self._controller = controller
        self._costs = costs

    # --- a job begins ---

    def begin(self, job: str, spec: messages.JobSpec) -> ScalingModel | None:
        """What the job starts with: its own from before a restart, else that of its kind; None for
        nothing.
        """
        row = self._store.profile(job)
        if row is not None and row.learned:
            return self._read(row.learned, f"job {job}")
        if row is None:
            node_class = self._usual_class()
            row = self._store.put_profile(ProfileRow(job, self._key(spec, node_class), node_class))
        kept = self._store.curve(row.key)
        found = self._read(kept.learned, f"jobs like {kept.job}") if kept else None
        if kept is None or found is None:
            return None
        curve, _ = found.curve.with_phase(DEFAULT_PHASE)
        model = ScalingModel(costs=found.costs)
        if not spec.profile_key:
            return replace(model, curve=inherited(curve))
        # Jobs that only their owner says are alike may differ in level.
        prior = prior_from(
            [Stored(row.key, curve, ModelSize(kept.parameters, kept.flops), kept.job)], row.key
        )
        return replace(model, curve=MeasuredCurve.from_prior(prior)) if prior else model

    def kind(self, job: str, spec: messages.JobSpec) -> str:
        """Jobs of one kind scale alike; empty where only its owner says which are (those may differ
        in level), or nothing is profiled.
        """
        row = self._store.profile(job)
        return row.key if row is not None and not spec.profile_key else ""

    # --- a job goes on ---

    def keep(self, job: str, spec: messages.JobSpec, model: ScalingModel) -> None:
        """Store what is known now, for this job and for the next of its kind."""
        row = self._store.put_profile(
            replace(self._on_its_class(job, spec), learned=model.to_dict(), waits="")
        )
        measured = any(p.rate > 0 for p in model.curve.current.points)
        if row.key and measured and (model.profiled or model.result):
            self._store.put_curve(
                CurveRow(
                    row.key,
                    row.node_class,
                    spec.nproc_per_node,
                    row.learned,
                    job,
                    self._clock.now(),
                    row.parameters,
                    row.flops,
                )
            )

    def waits(self, job: str, reason: str) -> None:
        """Why its profile does not begin."""
        self._store.put_profile(replace(self._row(job), waits=reason))

    def interrupted(self, job: str, data: dict[str, Any]) -> None:
        """It gave nodes to a profile."""
        row = self._row(job)
        kept = (*row.interruptions, {"time": self._clock.now(), **data})[-KEPT_INTERRUPTIONS:]
        self._store.put_profile(replace(row, interruptions=kept))

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
        stored = []
        for kept in self._store.curves(row.node_class, spec.nproc_per_node):
            found = (
                self._read(kept.learned, f"jobs like {kept.job}") if kept.key != row.key else None
            )
            if found is not None:
                curve, _ = found.curve.with_phase(DEFAULT_PHASE)
                stored.append(
                    Stored(kept.key, curve, ModelSize(kept.parameters, kept.flops), kept.job)
                )
        prior = prior_from(stored, row.key, size)
        return (
            ScalingModel(curve=MeasuredCurve.from_prior(prior), costs=self._costs)
            if prior
            else None
        )

    def read(self, row: ProfileRow) -> ScalingModel:
        """What a row says is known; nothing where it cannot be read."""
        return self._read(row.learned, f"job {row.job}") or ScalingModel(costs=self._costs)

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

    def _read(self, data: Any, whose: str) -> ScalingModel | None:
        if not data:
            return None
        try:
            return ScalingModel.from_dict(data, self._costs)
        except (CurveError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("A stored scaling curve is not used", of=whose, reason=str(error))
            return None

    def _usual_class(self) -> str:
        """The class that most nodes are of."""
        held = Counter(node.info.node_class for node in self._controller.nodes.values())
        return max(held, key=lambda c: (held[c], c), default="default")

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
        return profile_key(script, spec.args, node_class, spec.nproc_per_node, user_key=user_key)


def _positive(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < 1e300 else None
