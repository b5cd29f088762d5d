"""What the daemon shows to people: jobs, nodes, events and totals as data.

The daemon builds these, the command line renders them (``--json`` prints them as they are). Times are seconds since the epoch,
rates samples/s.
"""

from __future__ import annotations

from typing import Any

import msgspec


class View(msgspec.Struct, frozen=True, omit_defaults=False):
    """Base of all views."""


class RateView(View, frozen=True):
    """Observed throughput at one scale."""

    nodes: int
    rate: float
    spread: float
    samples: float
    seconds: float


class RescaleView(View, frozen=True):
    """One change of a job's nodes. ``cost_s``: last sample before → first sample after; ``phases``: its parts in seconds; ``ended``: the
    first sample after."""

    generation: int
    kind: str
    from_nodes: int
    to_nodes: int
    began: float
    cost_s: float | None
    phases: dict[str, float] = {}
    ended: float | None = None


class JobView(View, frozen=True):
    """One line of ``malletrain status``."""

    id: str
    name: str
    owner: str
    state: str
    reason: str
    nodes: tuple[str, ...]
    min_nodes: int
    max_nodes: int
    rate: float
    samples: float
    rescales: int
    tries: int
    submitted: float
    started: float | None
    ended: float | None
    metrics: dict[str, float] = {}


class JobDetail(View, frozen=True):
    """``malletrain show JOB``."""

    job: JobView
    spec: dict[str, Any]
    rates: tuple[RateView, ...] = ()
    rescales: tuple[RescaleView, ...] = ()
    notices: tuple[str, ...] = ()
    failure: str = ""
    curve: dict[str, Any] = {}


class NodeView(View, frozen=True):
    """One line of ``malletrain nodes``. ``state``: idle | leasing | free | job | leaving (idle: a gap without a lease)."""

    node: str
    state: str
    lease: str
    job: str
    since: float
    horizon_s: float | None = None
    leaving_in_s: float | None = None
    node_class: str = "default"
    rules: tuple[tuple[str, bool, str], ...] = ()


class EventView(View, frozen=True):
    """One line of the audit trail."""

    seq: int
    time: float
    kind: str
    job: str
    node: str
    lease: str
    sentence: str
    data: dict[str, Any] = {}


class StatusView(View, frozen=True):
    """The daemon and the machine at a glance."""

    version: str
    pid: int
    boot: str
    started: float
    now: float
    scheduler: str
    nodes_idle: int
    nodes_leased: int
    nodes_training: int
    jobs: dict[str, int]
    samples: float
    rate: float
    rescales: int
    preemptions: int
    last_poll: float | None
    poll_error: str


class LogView(View, frozen=True):
    """A piece of a log. ``cursor`` is passed back to go on; ``more`` says that there is more right now."""

    text: str
    cursor: str
    more: bool
    streams: tuple[str, ...]
    ended: bool
