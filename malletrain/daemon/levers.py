"""What people may change of what runs: the limits of a job's scale.

Decides who may, and that it is written down before anything follows from it. What follows is the
controller's decision.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from malletrain.core.events import JobState, LimitsChanged
from malletrain.daemon.admission import RequestRefused, problem_of, text, whole
from malletrain.daemon.core import Core
from malletrain.protocol.bounds import MAX_NODES
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.schema import JobRow

Operation = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class Levers:
    """The operations. ``find``: the job that a user means; ``step``: a step of the core, as the
    API takes it.
    """

    def __init__(
        self,
        core: Core,
        find: Callable[[str, str], JobRow],
        step: Callable[[], AbstractContextManager[float]],
    ) -> None:
        self._core, self._find, self._step = core, find, step
        self.operations: dict[str, Operation] = {"scale": self._scale}

    async def _scale(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Other limits of a job's scale."""
        core, row = self._core, self._find(text(params, "job"), user)
        if not core.accounts.may_manage(user, row.owner):
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner or an operator can change "
                "its limits."
            )
        run = core.runs.get(row.id)
        if run is None or JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if row.state == JobState.PROFILING.value:
            raise RequestRefused(
                f"Job {row.id} is being profiled; its limits can be changed when that is over."
            )
        low, high = (whole(params, n, 0, 0, MAX_NODES + 1) for n in ("min_nodes", "max_nodes"))
        sizes = run.spec.profile_sizes
        if sizes is not None:
            sizes = tuple(k for k in sizes if low <= k <= high) or None
        spec = msgspec.structs.replace(run.spec, min_nodes=low, max_nodes=high, profile_sizes=sizes)
        if problem := problem_of(spec, files=False):
            raise RequestRefused(problem, "usage")
        before = f"{run.spec.min_nodes}:{run.spec.max_nodes}"
        sentence = f"Job {row.id} ({row.name}) may use {low}:{high} nodes, not {before}."
        with self._step():
            core.repository.save(run, spec=msgspec.json.encode(spec).decode())
            run.spec, run.rounds.min_nodes = spec, low
            core.audit.record(
                EventKind.JOB_LIMITED, sentence, job=row.id, min_nodes=low, max_nodes=high, by=user
            )
            core.feed(LimitsChanged(row.id, low, high))
        return {"job": row.id, "sentence": sentence}
