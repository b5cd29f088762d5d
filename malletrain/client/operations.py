"""The operations of a daemon: the parameters of each and the type of its answer.

Sends nothing: :class:`malletrain.client.connection.Connection` sends requests and blocks,
:class:`malletrain.client.aio.AsyncConnection` does not block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from malletrain.client.errors import ClientError
from malletrain.protocol import messages
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    MembersView,
    NewsView,
    NodeForecastView,
    NodeView,
    SeriesView,
    StatusView,
    TaskHistoryView,
    TasksView,
    UsageView,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Operation(Generic[T]):
    """One request and the conversion of its answer."""

    op: str
    kind: Any
    """The type of the answer, or of its ``part``."""
    params: Mapping[str, Any] = field(default_factory=dict)
    wait_s: float = 0.0
    """Time that the daemon is asked to wait, seconds."""
    changes: bool = False
    """Whether it changes something: if the answer is lost, it may have been carried out or not."""
    part: str = ""
    """Key of the value in the answer; empty: the whole answer."""

    def read(self, data: Any, endpoint: str) -> T:
        """Return the answer, converted to its type. Raises ClientError if it does not fit, such as
        from a daemon of another version.
        """
        if self.part:
            data = data.get(self.part) if isinstance(data, dict) else None
        try:
            read: T = msgspec.convert(data, self.kind)
        except msgspec.ValidationError as error:
            raise ClientError(
                f"The daemon at {endpoint} answered with data this version does not know "
                f"({error}); use one version.",
                "internal",
            ) from None
        return read


def submit(spec: messages.JobSpec) -> Operation[JobView]:
    """Submit a new job."""
    params = {"spec": msgspec.to_builtins(spec)}
    return Operation("submit", JobView, params, changes=True, part="job")


def cancel(jobs: Sequence[str], why: str = "") -> Operation[list[dict[str, Any]]]:
    """Cancel jobs by id or name. The answer has one ``{"job", "ok", "sentence"}`` for each.
    ``why``: the reason that is reported, such as "its trial was pruned".
    """
    params: dict[str, Any] = {"jobs": list(jobs)} | ({"why": why} if why else {})
    return Operation("cancel", list[dict[str, Any]], params, changes=True, part="results")


def weigh(job: str, weight: float) -> Operation[JobView]:
    """Change the weight of an unfinished job."""
    return Operation("weigh", JobView, {"job": job, "weight": weight}, changes=True)


def extend(job: str, **changes: float | None) -> Operation[JobView]:
    """Change the goals of a job: ``deadline`` (seconds since the epoch), ``budget_nh`` or
    ``more_nh`` (node-hours), ``work`` (samples); None removes one.
    """
    params = {"job": job, "changes": changes}
    return Operation("extend", JobView, params, changes=True, part="job")


def scale(job: str, min_nodes: int, max_nodes: int) -> Operation[str]:
    """Change the minimum and maximum number of nodes of a job. The answer is a sentence."""
    params = {"job": job, "min_nodes": min_nodes, "max_nodes": max_nodes}
    return Operation("scale", str, params, changes=True, part="sentence")


def link(job: str, name: str, url: str) -> Operation[str]:
    """Give a job a link to a page of its own; an empty ``url`` removes the link of this name. The
    answer is a sentence.
    """
    params = {"job": job, "name": name, "url": url}
    return Operation("link", str, params, changes=True, part="sentence")


def jobs(**which: Any) -> Operation[list[JobView]]:
    """Unfinished jobs and the newest ended ones, the oldest first. ``ended``: maximum number of
    ended jobs.
    """
    return Operation("jobs", list[JobView], which)


def job(job: str) -> Operation[JobDetail]:
    """One job by id or name (the newest of several with the same name)."""
    return Operation("job", JobDetail, {"job": job})


def metrics(
    job: str, *, names: Sequence[str] = (), since: float = 0.0, most: int = 0
) -> Operation[list[SeriesView]]:
    """The metrics of a job over time: those of these ``names`` (empty: all), their points later
    than ``since``, at most ``most`` of each (0: all that are stored).
    """
    params = {"job": job, "names": list(names), "since": since, "most": most}
    return Operation("metrics", list[SeriesView], params)


def news(jobs: Sequence[str], *, cursor: str = "", wait_s: float = 0.0) -> Operation[NewsView]:
    """Those of these jobs (ids) that have reported a value of a metric or have ended since
    ``cursor``; if there are none, waits up to ``wait_s`` for one. Without a cursor of this daemon,
    returns all jobs that may have.
    """
    params = {"jobs": list(jobs), "cursor": cursor, "wait_s": wait_s}
    return Operation("news", NewsView, params, wait_s)


def members(job: str, *, since: str = "", wait_s: float = 0.0) -> Operation[MembersView]:
    """The members of a service. If its version is still ``since``, waits up to ``wait_s`` (a minute
    at most) for a change of the members or of what nodes are worth.
    """
    params = {"job": job, "since": since, "wait_s": wait_s}
    return Operation("members", MembersView, params, wait_s)


def worth(
    job: str,
    values: Mapping[int, float] | None = None,
    *,
    next_each: float | None = None,
    next_count: int = 1,
    expires_s: float | None = None,
) -> Operation[str]:
    """Set what numbers of nodes are worth to a service: ``values`` (number of nodes → value), or
    ``next_each``, the value that each of the ``next_count`` next nodes adds. ``expires_s``: time
    after which they lapse, seconds; None: never. The answer is a sentence.
    """
    params: dict[str, Any] = {"job": job, "expires_s": expires_s}
    if values is not None:
        params["values"] = dict(values)
    if next_each is not None:
        params |= {"next_each": next_each, "next_count": next_count}
    return Operation("worth", str, params, changes=True, part="sentence")


def add_tasks(job: str, first: int, rows: Sequence[Sequence[str]]) -> Operation[int]:
    """Add tasks to a farm: the values of the tasks ``first``, ``first`` + 1, …; at most 10,000 at
    once. They can be sent again. The answer is the number of tasks that have been added so far.
    """
    params = {"job": job, "first": first, "rows": [list(row) for row in rows]}
    return Operation("add_tasks", int, params, changes=True, part="present")


def tasks(job: str, *, state: str = "", after: int = -1, limit: int = 1000) -> Operation[TasksView]:
    """The tasks of a farm in this state (empty: any) with numbers above ``after``, at most
    ``limit``; and the counts of all. ``limit`` 0: only the counts.
    """
    params = {"job": job, "state": state, "after": after, "limit": limit}
    return Operation("tasks", TasksView, params)


def task_history(job: str) -> Operation[TaskHistoryView]:
    """The tasks of a farm over time: how many were done, had failed and ran."""
    return Operation("task_history", TaskHistoryView, {"job": job})


def retry(job: str, *, numbers: Sequence[int] = (), state: str = "") -> Operation[int]:
    """Put failed tasks of an unfinished farm back into its queue: these ``numbers``, or with
    ``state`` "failed" all that failed. The answer is the number of tasks put back.
    """
    params = {"job": job, "numbers": list(numbers), "state": state}
    return Operation("retry", int, params, changes=True, part="retried")


def nodes(*, explain: bool = False) -> Operation[list[NodeView]]:
    """Idle and leased nodes; with ``explain`` all nodes with the rules they passed or failed."""
    return Operation("nodes", list[NodeView], {"explain": explain})


def forecast() -> Operation[list[NodeForecastView]]:
    """Number of nodes of each class in the last day, and the forecast for the next day."""
    return Operation("forecast", list[NodeForecastView])


def events(
    *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
) -> Operation[list[EventView]]:
    """Events with ``seq > since``, oldest first; when there are none, waits up to ``wait_s`` for
    one.
    """
    params = {"since": since, "limit": limit, "job": job, "wait_s": wait_s}
    return Operation("events", list[EventView], params, wait_s)


def logs(
    job: str,
    *,
    stream: str = "rank0",
    cursor: str = "",
    limit: int = 65536,
    wait_s: float = 0.0,
) -> Operation[LogView]:
    """A piece of a log from ``cursor`` on; when there is none, waits up to ``wait_s`` for one."""
    params = {"job": job, "stream": stream, "cursor": cursor, "limit": limit, "wait_s": wait_s}
    return Operation("logs", LogView, params, wait_s)


def status() -> Operation[StatusView]:
    """A summary of the daemon and the machine."""
    return Operation("status", StatusView)


def usage(**between: float) -> Operation[list[UsageView]]:
    """The usage of leased nodes; ``since`` and ``until`` in seconds since the epoch."""
    return Operation("usage", list[UsageView], between)
