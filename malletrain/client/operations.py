"""What a daemon can be asked: the parameters of each operation and the form of its answer.

Decides no way of asking: :class:`malletrain.client.connection.Connection` asks and waits,
:class:`malletrain.client.aio.AsyncConnection` does not stand still meanwhile.
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
    UsageView,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Operation(Generic[T]):
    """One request and how its answer is read."""

    op: str
    kind: Any
    """The type of the answer; of its ``part``."""
    params: Mapping[str, Any] = field(default_factory=dict)
    wait_s: float = 0.0
    """How long the daemon is asked to wait, seconds."""
    changes: bool = False
    """It changes something, so that a lost answer leaves open whether it was carried out."""
    part: str = ""
    """Which value of the answer is meant; empty: all of it."""

    def read(self, data: Any, endpoint: str) -> T:
        """The answer in its own type. Raises ClientError where a daemon of another version gave
        it.
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
    """A new job."""
    params = {"spec": msgspec.to_builtins(spec)}
    return Operation("submit", JobView, params, changes=True, part="job")


def cancel(jobs: Sequence[str], why: str = "") -> Operation[list[dict[str, Any]]]:
    """Jobs by id or name: one ``{"job", "ok", "sentence"}`` for each. ``why``: what is said of them
    after who cancelled them, such as "its trial was pruned".
    """
    params: dict[str, Any] = {"jobs": list(jobs)} | ({"why": why} if why else {})
    return Operation("cancel", list[dict[str, Any]], params, changes=True, part="results")


def weigh(job: str, weight: float) -> Operation[JobView]:
    """An unfinished job counts so much beside the others from now on."""
    return Operation("weigh", JobView, {"job": job, "weight": weight}, changes=True)


def extend(job: str, **changes: float | None) -> Operation[JobView]:
    """Other goals of a job: ``deadline`` (seconds since the epoch), ``budget_nh`` or ``more_nh``
    (node-hours), ``work`` (samples); None takes one away.
    """
    params = {"job": job, "changes": changes}
    return Operation("extend", JobView, params, changes=True, part="job")


def scale(job: str, min_nodes: int, max_nodes: int) -> Operation[str]:
    """Other limits of a job's scale. The answer is a sentence."""
    params = {"job": job, "min_nodes": min_nodes, "max_nodes": max_nodes}
    return Operation("scale", str, params, changes=True, part="sentence")


def jobs(**which: Any) -> Operation[list[JobView]]:
    """Unfinished jobs and the newest of the others, the oldest first. ``ended``: so many of the
    others.
    """
    return Operation("jobs", list[JobView], which)


def job(job: str) -> Operation[JobDetail]:
    """One job by id or name (of several of one name the newest)."""
    return Operation("job", JobDetail, {"job": job})


def metrics(
    job: str, *, names: Sequence[str] = (), since: float = 0.0, most: int = 0
) -> Operation[list[SeriesView]]:
    """The metrics of a job over time: those of these ``names`` (none: all), their points later
    than ``since``, at ``most`` so many of each (0: all that are kept).
    """
    params = {"job": job, "names": list(names), "since": since, "most": most}
    return Operation("metrics", list[SeriesView], params)


def news(jobs: Sequence[str], *, cursor: str = "", wait_s: float = 0.0) -> Operation[NewsView]:
    """Which of these jobs, named by id, have reported a value of a metric or have ended since
    ``cursor``; where none has, waits up to ``wait_s`` for one. Without a cursor of this daemon all
    of them may have.
    """
    params = {"jobs": list(jobs), "cursor": cursor, "wait_s": wait_s}
    return Operation("news", NewsView, params, wait_s)


def members(job: str) -> Operation[MembersView]:
    """Who is in a service."""
    return Operation("members", MembersView, {"job": job})


def nodes(*, explain: bool = False) -> Operation[list[NodeView]]:
    """Idle and leased nodes; with ``explain`` all nodes with the rules they passed or failed."""
    return Operation("nodes", list[NodeView], {"explain": explain})


def forecast() -> Operation[list[NodeForecastView]]:
    """How many nodes of each class there were in the last day, and will be in the next."""
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
    """The daemon and the machine at a glance."""
    return Operation("status", StatusView)


def usage(**between: float) -> Operation[list[UsageView]]:
    """What was leased and what for; ``since`` and ``until`` in seconds since the epoch."""
    return Operation("usage", list[UsageView], between)
