"""The configuration of a PBS, which changes rarely: version, server, queues, how its scheduler
preempts. Parses ``qstat -Bf``, ``qstat -Qf`` and ``qmgr -c 'print sched'``.

Text in, a :class:`PbsSite` out; :func:`ask_site` runs the commands. :mod:`scavenger.pbs.check`
decides whether the configuration is suitable for MalleTrain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from scavenger.batch.commands import CommandError, Commands, require_complete
from scavenger.interface import SchedulerError
from scavenger.pbs.parse import (
    RawNode,
    decode_joined,
    number_of,
    read_duration,
    text_of,
    truth_of,
    words_of,
)

KILL_DELAY_S = 10.0
"""Default of a queue's kill_delay: time from SIGTERM to SIGKILL, seconds (PBS Professional
Reference Guide, "Queue Attributes").
"""
PREEMPT_QUEUE_PRIO = 150
PREEMPT_METHODS = {"D": "deleted", "R": "requeued", "C": "checkpointed", "S": "suspended"}
"""Letter of preempt_order → what happens to a preempted job."""
PREEMPT_ORDER = "SCR"
"""Default of preempt_order: suspend, else checkpoint, else requeue (same guide, "Scheduler
Attributes").
"""
PREEMPT_PRIO = ("express_queue", "normal_jobs")
"""Default of preempt_prio: the levels of jobs, of which each preempts those behind it (same guide).
"""
PREEMPT_PRIORITY_STEP = 1000
"""Difference between two levels of preempt_prio (openpbs, config.h)."""
EXCEEDED = frozenset({"server_softlimits", "queue_softlimits", "fairshare"})
"""Levels of jobs that exceed a limit or their share."""
SCHEDULER_ITERATION_S = 600.0
SCHED_CYCLE_LENGTH_S = 1200.0
"""Default of sched_cycle_length: the longest that one scheduling cycle takes (same guide)."""
LIMITS = ("max_run", "max_queued")
"""Attributes that limit the number of a user's jobs."""
AMOUNTS = ("max_run_res", "max_queued_res")
"""Attributes that limit the amount of a resource that a user's jobs have."""
_LIMIT = re.compile(r"u:([^=\]]+?)\s*=\s*(\d+)\s*\]")
_SCHED = re.compile(r"^set sched(?: (\S+))? (\w+) = (.*?)\s*$", re.MULTILINE)
DEFAULT_SCHEDULER = "default"


@dataclass(frozen=True)
class PbsQueue:
    """One queue. Times are in seconds."""

    name: str
    """Name of the queue."""
    execution: bool
    """Whether it is an execution queue, not a routing queue."""
    enabled: bool
    """Whether it accepts jobs."""
    started: bool
    """Whether its jobs can start."""
    priority: int
    """Its priority."""
    chunk: Mapping[str, str] = field(default_factory=dict)
    """``default_chunk``, which every node of its jobs must match (sites use it to assign nodes to
    queues).
    """
    max_walltime_s: float | None = None
    """Maximum walltime of its jobs; None: no limit."""
    min_walltime_s: float | None = None
    """Minimum walltime of its jobs; None: no limit."""
    kill_delay_s: float = KILL_DELAY_S
    """Time from SIGTERM to SIGKILL."""
    from_route_only: bool = False
    """Whether it accepts jobs only from routing queues."""
    acl: Sequence[str] = ()
    """Users that may use it, as PBS prints them; empty: all users."""
    destinations: Sequence[str] = ()
    """Queues to which a routing queue routes."""
    partition: str = ""
    """Partition of its jobs and nodes, which has a scheduler of its own (multisched); empty: the
    default one.
    """
    preempt_targets: str = ""
    """``resources_default.preempt_targets``: the jobs that its jobs preempt; empty: all below."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """``max_run``, ``max_queued`` and, as ``max_run_res.ncpus``, amounts of resources, as PBS
    prints them.
    """


@dataclass(frozen=True)
class PbsSite:
    """The configuration of a PBS."""

    version: tuple[int, int]
    """Such as (23, 6)."""
    shown_version: str
    """Version as PBS prints it."""
    server: str
    """Name of the server."""
    scheduling: bool = True
    """Whether the server starts jobs."""
    iteration_s: float = SCHEDULER_ITERATION_S
    """Interval of the scheduling cycle, seconds."""
    preempt_queue_prio: int = PREEMPT_QUEUE_PRIO
    """Minimum priority of an express queue."""
    preempt_order: str = PREEMPT_ORDER
    """Letters for what can happen to a preempted job, in order (D delete, R requeue, C
    checkpoint, S suspend). They can depend on the percentage of its time that a job has left: ``SR
    80 D``.
    """
    preempt_known: bool = False
    """Whether preempt_order could be read; otherwise the default is used. Before PBS 20.0 it is in
    sched_config.
    """
    preempt_prio: Sequence[str] = PREEMPT_PRIO
    """Levels of jobs, the highest first."""
    estimates: bool = True
    """Whether the scheduler can forecast the starts of pending jobs (``backfill_depth`` above
    0).
    """
    estimates_every_s: float = math.inf
    """Time in which the scheduler replaces an expected start that has passed if it still plans the
    job, seconds: the rest of a cycle, scheduler_iteration, and the next cycle. inf: not known, or
    unlimited: with an attr_update_period it can keep forecasts to itself (openpbs,
    send_attr_updates).
    """
    preempt_targets: str | None = ""
    """Default of the jobs of all queues, as ``preempt_targets`` of a queue; None: not used."""
    sees_others: bool = True
    """Whether users see the jobs of others."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """As those of a queue."""
    queues: Mapping[str, PbsQueue] = field(default_factory=dict)
    """Name → queue."""

    @property
    def display_name(self) -> str:
        """Its release and its server, for sentences."""
        return f"{self.shown_version} (server {self.server})"

    @property
    def requeues(self) -> bool:
        """Whether a lease must be rerunnable to be preempted at any time. PBS cannot requeue a job
        that is not, and tries the next method. If none works, the job keeps its node.
        """
        return any("R" in part and not set("DS") & set(part) for part in self.preempt_order.split())

    @property
    def only_requeues(self) -> bool:
        """Whether a job that is not rerunnable is never preempted, however much of its time is
        left.
        """
        letters = set(self.preempt_methods)
        return "R" in letters and not set("DS") & letters

    def lease_methods(self, rerunnable: str) -> set[str]:
        """Return for all parts of a lease's time the letter of the method with which PBS preempts
        it; C: with no other. Checkpointing, tried in its turn, works only with a script of the site
        (checkpoint_abort of pbs_mom), and requeueing only a rerunnable job (openpbs,
        req_preemptjob.c).

        Args:
            rerunnable: whether leases are, as in the configuration: auto, yes or no.
        """
        requeued = self.requeues if rerunnable == "auto" else rerunnable == "yes"
        usable = "DSR" if requeued else "DS"
        parts = [part for part in self.preempt_order.split() if not part.isdigit()]
        methods = (next((c for c in part if c in usable), "C" * ("C" in part)) for part in parts)
        return set(filter(None, methods))

    @property
    def preempt_methods(self) -> str:
        """The letters of preempt_order, each once."""
        return "".join(dict.fromkeys(c for c in self.preempt_order if c in PREEMPT_METHODS))

    def ranks_above_normal(self, priority: int) -> bool | None:
        """Return whether jobs of an express queue with this Priority preempt normal ones; None:
        only those that exceed a soft limit or their fairshare. A level is 1000 above the next one,
        and the Priority counts besides. If preempt_prio does not list express queues, their jobs
        are normal ones (openpbs, fifo.cpp, parse_sched_obj; job_info.cpp, set_preempt_prio).
        """
        levels = list(self.preempt_prio)
        if "normal_jobs" not in levels:
            return "express_queue" in levels
        normal = levels.index("normal_jobs")
        express = levels.index("express_queue") if "express_queue" in levels else math.inf
        if priority > PREEMPT_PRIORITY_STEP * (express - normal):
            return True
        below = [set(level.split("+")) for level in levels[normal:]]
        is_left = any(level & EXCEEDED and "express_queue" not in level for level in below)
        return None if is_left else False

    def above(self, queue: str) -> list[str]:
        """Return the express queues (Priority of at least preempt_queue_prio) above ``queue``.
        Their jobs preempt those of ``queue`` if that is no express queue and they rank above normal
        ones.
        """
        own = self.queues.get(queue)
        if own is None:
            return []
        return sorted(
            q.name
            for q in self.queues.values()
            if q.execution
            and q.priority >= self.preempt_queue_prio
            and q.priority > own.priority
            and q.name != queue
            and q.partition == own.partition
        )

    def preempts(self, queue: PbsQueue, target: str) -> bool:
        """Return whether jobs of ``queue`` can preempt those of queue ``target``, by their default
        of preempt_targets (PBS Professional Administrator's Guide, "Preemption"): ``NONE``, or a
        list of ``queue=NAME`` and ``Resource_List.NAME=VALUE``.
        """
        targets = words_of(queue.preempt_targets or self.preempt_targets or "")
        if not targets or self.preempt_targets is None:
            return True
        return any(
            word.lower().startswith("resource_list.")
            or (word.lower().startswith("queue=") and word.partition("=")[2] == target)
            for word in targets
        )

    def reached_from(self, queue: str) -> frozenset[str]:
        """Return the queues in which a job submitted to ``queue`` can be: itself, and those to
        which it routes. Empty if ``queue`` is empty or routes to another server.
        """
        reached, remaining = set[str](), [queue]
        while remaining:
            name = remaining.pop()
            if not name or "@" in name:
                return frozenset()
            if name not in reached:
                reached.add(name)
                remaining += self.queues[name].destinations if name in self.queues else ()
        return frozenset(reached)

    def queues_of(self) -> Callable[[RawNode], Sequence[str]]:
        """Return a function from a vnode to the queues whose jobs may run on it."""
        plain = tuple(q for q in self.queues.values() if q.execution)
        keys = sorted({key for q in plain for key in q.chunk})
        divided = any(q.partition for q in plain)
        free = tuple(q.name for q in plain if not q.chunk)
        cache: dict[tuple[str, ...], tuple[str, ...]] = {}

        def find(node: RawNode) -> Sequence[str]:
            if node.queue:
                return (text_of(node.queue),)
            partition = text_of(node.partition)
            if not keys and not divided and not partition:
                return free
            has = node.resources_available
            resources = (partition, *(text_of(has.get(key)) for key in keys))
            names = cache.get(resources)
            if names is None:
                values = dict(zip(keys, resources[1:], strict=True))
                names = tuple(
                    q.name
                    for q in plain
                    if q.partition == partition
                    and all(value in words_of(values[key]) for key, value in q.chunk.items())
                )
                cache[resources] = names
            return names

        return find


class _Server(msgspec.Struct):
    Server: dict[str, dict[str, Any]]
    pbs_version: Any = ""


class _Queues(msgspec.Struct):
    timestamp: Any
    Queue: dict[str, dict[str, Any]] = {}


TORQUE = (
    "This is Torque {version}, which MalleTrain does not support: its qstat and pbsnodes print no "
    "JSON, and preemption there is Maui's or Moab's, which MalleTrain does not know. It works with "
    "OpenPBS and PBS Professional from 18.1 on, and with Slurm."
)
_TORQUE_VERSION = re.compile(r"^version:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
"""The output of Torque's commands for --version. Those of PBS print ``pbs_version = …``."""


def _torque_version(commands: Commands) -> str:
    """Return Torque's version; empty if the commands are not Torque's."""
    try:
        result = commands.run(["qstat", "--version"])
    except CommandError:
        return ""
    match = _TORQUE_VERSION.search(f"{result.stdout}\n{result.stderr}")
    return match[1] if match else ""


def ask_site(commands: Commands, queue: str = "") -> PbsSite:
    """Read the configuration of a running PBS. Raises SchedulerError, with a specific message if it
    is Torque. ``queue``: queue of the leases.
    """
    try:
        server = commands.ask(["qstat", "-Bf", "-F", "json"])
    except CommandError as error:
        if version := _torque_version(commands):
            raise SchedulerError(TORQUE.format(version=version)) from error
        raise
    queues = commands.ask(["qstat", "-Qf", "-F", "json"])
    try:
        sched = commands.ask(["qmgr", "-c", "print sched"])
    except CommandError:  # some sites restrict qmgr; the defaults are then used
        sched = ""
    return read_site(server, queues, sched, queue)


def read_site(server: str, queues: str, sched: str = "", queue: str = "") -> PbsSite:
    """Parse the output of the three commands. Raises SchedulerError.

    Args:
        server: output of ``qstat -Bf``.
        queues: output of ``qstat -Qf``.
        sched: output of ``qmgr -c 'print sched'``; empty if the site restricts it.
        queue: queue of the leases. If PBS has several schedulers, the settings are those of the
            one that starts the jobs of this queue.
    """
    answer = decode_joined(server, _Server, "qstat -Bf")
    if not answer.Server:
        raise SchedulerError("The answer of qstat -Bf cannot be understood: it names no server.")
    name, attributes = next(iter(answer.Server.items()))
    shown = text_of(attributes.get("pbs_version") or answer.pbs_version)
    table = {
        each: _queue(each, values)
        for each, values in decode_joined(queues, _Queues, "qstat -Qf").Queue.items()
    }
    partition = table[queue].partition if queue in table else ""
    settings = _scheduler_of(partition, require_complete(sched, "qmgr"))
    iteration_s = number_of(
        settings.get("scheduler_iteration") or attributes.get("scheduler_iteration"),
        SCHEDULER_ITERATION_S,
    )
    cycle_s = read_duration(settings.get("sched_cycle_length", ""))
    return PbsSite(
        version=read_version(shown),
        shown_version=shown,
        server=name,
        scheduling=truth_of(attributes.get("scheduling"), True),
        iteration_s=iteration_s,
        preempt_queue_prio=int(number_of(settings.get("preempt_queue_prio"), PREEMPT_QUEUE_PRIO)),
        preempt_order=_order(settings.get("preempt_order", "")),
        preempt_known="preempt_order" in settings,
        preempt_prio=words_of(settings.get("preempt_prio", "").strip('"')) or PREEMPT_PRIO,
        estimates=number_of(attributes.get("backfill_depth"), 1) > 0,
        estimates_every_s=iteration_s + 2 * (SCHED_CYCLE_LENGTH_S if cycle_s is None else cycle_s)
        if settings and settings.get("attr_update_period", "0") == "0"
        else math.inf,
        sees_others=truth_of(attributes.get("query_other_jobs"), False),
        limits=_limits(attributes),
        preempt_targets=_preempt_targets(attributes, settings),
        queues=table,
    )


def _scheduler_of(partition: str, printed: str) -> Mapping[str, str]:
    """Return the settings of the scheduler of a partition, from ``qmgr -c 'print sched'``."""
    schedulers: dict[str, dict[str, str]] = {}
    for name, key, value in _SCHED.findall(printed):
        schedulers.setdefault(name or DEFAULT_SCHEDULER, {})[key] = value
    if partition:
        of_partition = (s for s in schedulers.values() if s.get("partition") == partition)
        return next(of_partition, {})
    return schedulers.get(DEFAULT_SCHEDULER, {})


def _preempt_targets(attributes: Mapping[str, Any], settings: Mapping[str, str]) -> str | None:
    """Return the server's default of preempt_targets; None if its scheduler ignores them."""
    if not truth_of(settings.get("preempt_targets_enable"), True):
        return None
    defaults = attributes.get("resources_default")
    return text_of(defaults.get("preempt_targets")) if isinstance(defaults, dict) else ""


def read_version(text: str) -> tuple[int, int]:
    """Return (23, 6) for ``23.06.06``, (2022, 1) for ``2022.1.1.20220926110806``. Raises
    SchedulerError.
    """
    match = re.search(r"(\d{1,4})\.(\d{1,4})", text)
    if match is None:
        raise SchedulerError(
            f'The answer of qstat -Bf cannot be understood: "{text[:60]}" is no version of PBS.'
        )
    return int(match[1]), int(match[2])


def _queue(name: str, values: Mapping[str, Any]) -> PbsQueue:
    chunk, maximum, minimum, defaults = (
        values.get(key)
        for key in ("default_chunk", "resources_max", "resources_min", "resources_default")
    )
    delay = values.get("kill_delay")
    return PbsQueue(
        name=name,
        execution=text_of(values.get("queue_type")).lower().startswith("e"),
        enabled=truth_of(values.get("enabled"), False),
        started=truth_of(values.get("started"), False),
        priority=int(number_of(values.get("Priority"))),
        chunk={k: v for k, v in chunk.items() if isinstance(v, str) and not v[:1].isdigit()}
        if isinstance(chunk, dict)
        else {},
        max_walltime_s=read_duration(maximum.get("walltime"))
        if isinstance(maximum, dict) and "walltime" in maximum
        else None,
        min_walltime_s=read_duration(minimum.get("walltime"))
        if isinstance(minimum, dict) and "walltime" in minimum
        else None,
        kill_delay_s=KILL_DELAY_S if delay is None else number_of(delay, KILL_DELAY_S),
        from_route_only=truth_of(values.get("from_route_only"), False),
        acl=words_of(values.get("acl_users"))
        if truth_of(values.get("acl_user_enable"), False)
        else (),
        destinations=words_of(values.get("route_destinations")),
        partition=text_of(values.get("partition")),
        preempt_targets=text_of(defaults.get("preempt_targets"))
        if isinstance(defaults, dict)
        else "",
        limits=_limits(values),
    )


def _limits(values: Mapping[str, Any]) -> dict[str, str]:
    limits = {name: text_of(values[name]) for name in LIMITS if name in values}
    for name in AMOUNTS:
        if isinstance(amounts := values.get(name), dict):
            limits.update({f"{name}.{what}": text_of(text) for what, text in amounts.items()})
    return limits


def limit_of(text: str, user: str) -> int | None:
    """Return the value of a limit such as ``[u:PBS_GENERIC=5],[u:ann=9]`` for ``user`` (Reference
    Guide, "Format of Limit Attributes"); None if it does not limit single users, or has a unit.
    Among several limits for one user the smallest is returned, because qstat's JSON puts
    max_queued_res after max_run_res.
    """
    limits: dict[str, int] = {}
    for name, most in _LIMIT.findall(text):
        limits[name] = min(int(most), limits.get(name, int(most)))
    return limits.get(user, limits.get("PBS_GENERIC"))


def _order(text: str) -> str:
    """Return preempt_order as qmgr prints it, without quotes."""
    order = text.strip('"')
    return order if PREEMPT_METHODS.keys() & set(order) else PREEMPT_ORDER
