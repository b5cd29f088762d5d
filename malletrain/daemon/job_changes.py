"""Changes to a job after submission, and relations of a new job to others.

Decides who may change what. :mod:`malletrain.core` decides what a change does to the plan.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from malletrain.core.events import JobState
from malletrain.daemon.admission import RequestRefused, text, weighed
from malletrain.daemon.core import Core
from malletrain.daemon.extension import extend, extended
from malletrain.daemon.job_dependencies import outcome
from malletrain.daemon.job_repository import decode_spec, not_completed
from malletrain.daemon.job_views import JobViews
from malletrain.protocol import env
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import JobView
from malletrain.store.records import JobRow


class JobChanges:
    """Operations on one unfinished job.

    Args:
        core: the daemon's core.
        views: creates the answers.
        find: returns the job that a user means by a name or id; arguments: name, user. Raises
            RequestRefused.
        transaction: opens a transaction of the core as the API does.
    """

    def __init__(
        self,
        core: Core,
        views: JobViews,
        find: Callable[[str, str], JobRow],
        transaction: Callable[[], AbstractContextManager[float]],
    ) -> None:
        self._core = core
        self._views = views
        self._find = find
        self._transaction = transaction
        self.operations: dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]] = {
            "weigh": self._weigh,
            "extend": self._extend,
        }

    async def _weigh(self, user: str, params: Mapping[str, Any]) -> JobView:
        """Change the weight of an unfinished job."""
        row = self._find_managed(user, params, "weigh")
        if row.id not in self._core.runs:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        spec = weighed(decode_spec(row.spec), params.get("weight"))
        with self._transaction():
            self._core.reweigh(row.id, spec)
        return self._views.view(user, self._core.store.get_job(row.id) or row, spec)

    async def _extend(self, user: str, params: Mapping[str, Any]) -> dict[str, JobView]:
        row = self._find_managed(user, params, "extend")
        if JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        changes = msgspec.convert(params["changes"], dict[str, float | None])
        new_goals, stated = extended(self._core, row, changes)
        with self._transaction():
            extend(self._core, row, new_goals, stated)
        return {"job": self._views.view(user, self._core.store.get_job(row.id) or row)}

    def _find_managed(self, user: str, params: Mapping[str, Any], operation: str) -> JobRow:
        row = self._find(text(params, "job"), user)
        if not self._core.accounts.may_manage(user, row.owner):
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner or an operator can "
                f"{operation} it."
            )
        return row


def arrays_of(jobs: Iterable[tuple[str, JobSpec]]) -> dict[tuple[str, int], list[str]]:
    """Return (prefix of the job names, number of digits of the index) → ids of the jobs, for each
    array.
    """
    arrays: dict[tuple[str, int], list[str]] = {}
    for job, spec in jobs:
        index = spec.env.get(env.ARRAY_INDEX, "")
        if index and spec.name.endswith(f"-{index}"):
            arrays.setdefault((spec.name[: -len(index) - 1], len(index)), []).append(job)
    return arrays


def jobs_of_array(arrays: Mapping[tuple[str, int], list[str]], name: str) -> list[str]:
    """Return the ids of the jobs of the array that was submitted as ``name``."""
    digits = sorted({count for _, count in arrays})
    return [job for n in digits for job in arrays.get((name[: 63 - n], n), ())]


def dependencies(core: Core, predecessors: Sequence[JobRow]) -> tuple[str, ...]:
    """Return the ids of the jobs that a new job waits for. Raises RequestRefused."""
    for row in not_completed(core.store, [row.id for row in predecessors]):
        if JobState(row.state).ended:
            raise RequestRefused(
                f"Job {row.id} ({row.name}) {outcome(row)}, so a job after it would never start."
            )
    return tuple(dict.fromkeys(row.id for row in predecessors))
