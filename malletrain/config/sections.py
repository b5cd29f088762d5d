"""The sections of a configuration that do not depend on the kind of main scheduler: the daemon,
jobs, allocation, gaps, accounting and notices.

Decides which keys they have, in which unit, and what a valid value is. The defaults of the decision
core's parameters are in :mod:`malletrain.core.settings`.

:class:`AccountingSection`: the costs of leases, charged time and energy.
:mod:`malletrain.core.lease_planner` takes the minimum charge into account;
:mod:`malletrain.daemon.api.usage` adds up the costs.

:class:`GapsSection`: which idle nodes of a batch scheduler may be leased. :mod:`scavenger.batch`
applies its keys.

:class:`NotifySection`: notices to job owners outside of the command line.
:mod:`malletrain.daemon.api.notices` decides what is sent.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import (
    Duration,
    FractionOrOff,
    Location,
    MaybeDuration,
    MaybeLocation,
    Section,
    Size,
    TextOrOff,
    Words,
    key,
)
from malletrain.config.base import key as _key
from malletrain.config.units import format_duration
from malletrain.core import defaults
from malletrain.core.settings import ControllerSettings, PlanningSettings
from scavenger.batch.rules import HoursError, parse_hours
from scavenger.hostlist import HostlistError, expand

_WATTS = re.compile(r"\s*(\S+)\s*[:=\s]\s*(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s*")


class Watts(NamedTuple):
    """Power of a node, in watts."""

    idle: float
    """While it is leased and no job runs on it."""
    busy: float
    """While a job runs on it."""


class AccountingSection(Section):
    """Costs of leases. `malletrain usage` adds them up."""

    min_charge: Duration = key(
        "0 s",
        description="Minimum time that the site charges for a job, however short it was, such as "
        '"1 h". Gaps expected to be shorter are not leased. A lease is not given '
        "back earlier while its user has work for it.",
    )
    charge_factor: float = key(
        1.0,
        gt=0,
        description="Node-hours that the site charges for one hour of a leased node; budgets of "
        "jobs are counted in these.",
    )
    keep: Duration = key(
        "0 s",
        description="How long `malletrain usage` and `malletrain show` keep leases and ended "
        'jobs, such as "730 d"; 0 s: forever. The audit log is always kept.',
    )
    watts: Words = key(
        [],
        description="Power of a node of each class, idle and with a job, in watts, such as "
        '["default 120 350", "a100 300 1600"]; for kWh in `malletrain usage` and the '
        "metrics.",
    )

    @field_validator("watts")
    @classmethod
    def _watts(cls, value: Words) -> Words:
        classes = set()
        for text in value:
            match = _WATTS.fullmatch(text)
            if match is None or float(match[2]) > float(match[3]) or match[1] in classes:
                raise PydanticCustomError(
                    "watts",
                    '"{value}" does not say what a class of nodes draws; write each class once: '
                    'its name, watts idle, watts with a job, such as "a100 300 1600"',
                    {"value": text},
                )
            classes.add(match[1])
        return value

    @property
    def watts_by_class(self) -> dict[str, Watts]:
        """Node class → power of one of its nodes."""
        matches = (_WATTS.fullmatch(text) for text in self.watts)
        return {m[1]: Watts(float(m[2]), float(m[3])) for m in matches if m}


class GapsSection(Section):
    """Which idle nodes of a batch scheduler are gaps, that is, may be leased. `malletrain nodes
    --explain` shows the result of each rule.
    """

    partitions: Words = key(
        [],
        description="A node must be in one of these partitions or queues; empty: in the "
        "partition or queue of the leases.",
    )
    features: Words = key([], description="A node must have all of these features or resources.")
    nodes: Words = key([], description='Only these nodes, such as "n[001-128]"; empty: all.')
    exclude: Words = key([], description='Never these nodes, such as "login[1-2]".')
    classes: Words = key(
        [],
        description="Features that distinguish node classes, such as a GPU's name; a job's nodes "
        "are of one class.",
    )
    reserve: int = key(
        0, ge=0, description="Number of idle nodes that are left to the main scheduler."
    )
    hours: Words = key(
        [],
        description='When leases may run, local time, such as "mon-fri 19:00-07:00" or '
        '"sat-sun"; empty: always.',
    )
    idle_for: MaybeDuration = key(
        None,
        description="How long an idle node is left to the main scheduler before it is a gap; not "
        "given: one backfill cycle.",
    )
    hold: MaybeDuration = key(
        None,
        description="How long to request no lease after the main scheduler preempted one for a "
        "job that it does not show, because that job may count on idle nodes too; "
        "not given: one backfill cycle, at least 3 s and at most 15 s.",
    )
    use_planned: bool = key(
        False,
        description="Also use nodes that are held for a waiting job, with leases that end before "
        "its expected start.",
    )
    max_at_once: int = key(
        200, ge=1, description="Maximum number of gaps that are taken at one poll."
    )
    expected_length: Duration = key(
        "20 min",
        gt=0,
        description="Expected length of a gap until the site's own gaps have been observed.",
    )

    @field_validator("hours")
    @classmethod
    def _hours(cls, value: Words) -> Words:
        try:
            parse_hours(value)
        except HoursError as error:
            raise PydanticCustomError(
                "hours", "{sentence}", {"sentence": str(error).rstrip(".")}
            ) from None
        return value

    @field_validator("nodes", "exclude")
    @classmethod
    def _nodes(cls, value: Words) -> Words:
        try:
            for text in value:
                expand(text)
        except HostlistError as error:
            raise PydanticCustomError(
                "nodes", "{sentence}", {"sentence": str(error).rstrip(".")}
            ) from None
        return value


class DaemonSection(Section):
    """The daemon process: its state directory, its addresses, its log and its users."""

    state_dir: Location = _key(
        "~/.local/state/malletrain",
        description="Directory of the database, keys, logs and lock. One daemon at a time. If "
        "not given, MALLETRAIN_STATE_DIR takes precedence over the default. Compute "
        "nodes need it only to keep the output of leases (keep_output).",
    )
    listen: str = _key(
        "tcp://127.0.0.1:0",
        description="Address on which agents and clients reach the daemon; port 0 takes any "
        "free port.",
    )
    advertise: str = _key(
        "",
        description="Host name or address that agents use to reach the daemon; empty: the host "
        "in listen, or the "
        "address from which this host reaches its nodes when listen names all interfaces.",
    )
    database: str = _key(
        "",
        description="SQLAlchemy URL of the database, such as "
        "postgresql+psycopg://user@host/malletrain; empty: SQLite under state_dir.",
    )
    metrics_listen: TextOrOff = _key(
        "127.0.0.1:9464",
        description="HOST:PORT of the Prometheus metrics; off: none. If this is not set and "
        "the port is in use, the daemon logs that and runs without metrics.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", description="Minimum severity of messages that are logged."
    )
    log_format: Literal["text", "json"] = _key(
        "text", description="Log lines for people (text) or for a log collector (json)."
    )
    log_file: MaybeLocation = _key(
        None,
        description="File to which the log is written instead of standard error, for hosts "
        "without journald.",
    )
    log_file_limit: Size = _key(
        "64 MiB",
        gt=0,
        description="Size at which log_file is renamed log_file.1, and that log_file.2; four are "
        "kept.",
    )
    heartbeat: Duration = _key(
        "1 s", gt=0, description="Interval at which an agent reports that it is alive."
    )
    agent_timeout: Duration = _key(
        "5 s",
        gt=0,
        description="An agent that sends nothing for this long is lost, and its node with it.",
    )
    adopt_wait: Duration = _key(
        "5 s",
        description="Maximum time after a restart to wait for agents to report before the first "
        "plan is made.",
    )
    users: MaybeLocation = _key(
        None,
        description="List of the users who may submit jobs, a line NAME KEY for each, as "
        "`malletrain key` prints it; read again when it changes. Not given: the user "
        "who runs the daemon, and users authenticated by MUNGE. Needs submit_as.",
    )
    munge: bool = _key(
        False,
        description="Accept every user of the machine whom its MUNGE service authenticates. "
        "Needs submit_as.",
    )
    munge_socket: str = _key("", description="Socket of the MUNGE service; empty: MUNGE's default.")
    announce: MaybeLocation = _key(
        None,
        description="File, readable by everybody, that tells the clients of other users how to "
        "reach the daemon, such as "
        "/etc/malletrain/daemon.json; login nodes must see it. Not given: no such file.",
    )
    request_rate: float = _key(
        200.0,
        gt=0,
        description="Maximum number of requests per second of one user; further requests wait. "
        "Does not apply to the user who runs the daemon and to operators.",
    )
    operators: Words = _key(
        [],
        description="Users who see, change and cancel the jobs of all users, and who may pause, "
        "drain, exclude, resume and reload.",
    )

    @property
    def several_users(self) -> bool:
        """Whether users other than the one who runs the daemon may use it."""
        return self.munge or self.users is not None

    @property
    def metrics_required(self) -> bool:
        """Whether ``metrics_listen`` is set in the file, so that the daemon must not run without
        it."""
        return "metrics_listen" in self.model_fields_set

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        _host_and_port(value, "tcp://", "tcp://127.0.0.1:0")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen(cls, value: str) -> str:
        if value:
            _host_and_port(value, "", "127.0.0.1:9464")
        return value

    @field_validator("database")
    @classmethod
    def _database(cls, value: str) -> str:
        if value and not re.match(r"[a-z][a-z0-9_]*(\+[a-z0-9_]+)?://", value):
            raise PydanticCustomError(
                "url",
                "it must be an SQLAlchemy URL such as "
                "sqlite:////var/lib/malletrain/malletrain.db, or empty for SQLite in state_dir",
            )
        return value

    @field_validator("agent_timeout")
    @classmethod
    def _check_agent_timeout(cls, value: float, info: ValidationInfo) -> float:
        heartbeat_s = info.data.get("heartbeat")
        if heartbeat_s is not None and value < 2 * heartbeat_s:
            raise PydanticCustomError(
                "agent_timeout",
                "{value} is less than two heartbeats of {beat}, so that one late message would "
                "lose a node; accepted is {least} or more",
                {
                    "value": format_duration(value),
                    "beat": format_duration(heartbeat_s),
                    "least": format_duration(2 * heartbeat_s),
                },
            )
        return value


class JobsSection(Section):
    """Limits and timeouts, the same for every job."""

    max_running: int = _key(
        defaults.MAX_RUNNING,
        ge=1,
        description="Maximum number of jobs that run at the same time. A sweep counts as one job "
        "and is limited to this many trials. The others wait: users in rotation, "
        "each user's jobs in order of submission.",
    )
    max_tries: int = _key(
        ControllerSettings.max_tries,
        ge=1,
        description="Number of starts that may end in a failure of the script before the job is "
        "failed.",
    )
    retry_window: Duration = _key(
        format_duration(ControllerSettings.retry_window_s),
        gt=0,
        description="Only failures within this time of each other count towards max_tries.",
    )
    drain_timeout: Duration = _key(
        "10 s",
        description="Drain wait: maximum time that a rescale waits for the job's snapshot at a "
        "step boundary before it continues without one.",
    )
    join_timeout: Duration = _key(
        "60 s", gt=0, description="Time in which all members of a round must have joined it."
    )
    warmup_timeout: Duration = _key(
        "5 min",
        gt=0,
        description="Expected maximum time until new workers have processed their first sample. "
        "After it the network between the job's nodes is tested. If that works, the "
        "workers are restarted if they are silent for three times their longest pause; "
        "the owner of a job that has never reported gets a notice only.",
    )
    stop_grace: Duration = _key(
        "5 s", description="Time between SIGTERM and SIGKILL when workers are stopped."
    )
    starvation: Duration = _key(
        format_duration(defaults.STARVATION_S),
        gt=0,
        description="A job that waits for its first nodes for this long is starving: in order of "
        "waiting it gets its minimum of nodes, guaranteed for as long again (its turn).",
    )
    turns_apart: float = _key(
        ControllerSettings.turns_apart,
        ge=1,
        description="Multiple of starvation after which a job that had nodes before is starving "
        "again. Smaller values shorten waits and cost samples, because turns give "
        "nodes to jobs that gain little from them. A job that lost its nodes in its "
        "turn waits less, by the rest of that turn.",
    )
    hang_after: Duration = _key(
        "2 min",
        gt=0,
        description="A worker that has reported before counts as hung when it reports nothing "
        "for this long and for five times the job's longest pause so far. Its owner "
        "is notified of where it hangs, and with --on-hang restart the workers are "
        "restarted.",
    )
    no_progress_warning: Duration = _key(
        "5 min",
        gt=0,
        description="A running job that reports no progress for this long is named in its notices.",
    )
    log_limit: Size = _key(
        "64 MiB",
        gt=0,
        description="Size at which a log of one rank is cut; its end then states how much later "
        "output of that rank was dropped.",
    )
    keep_logs: Duration = _key(
        "90 d",
        description="How long the logs of an ended job are kept after the last write, at most as "
        "long as the job itself (accounting.keep); 0 s: as long as the job.",
    )
    snapshot_memory: FractionOrOff = _key(
        0.25,
        ge=0,
        le=0.9,
        description="Fraction of a node's memory (or of the lease's, if it is confined) in which "
        "jobs whose scripts ask for it keep their newest snapshots; off: none.",
    )
    log_wait: Duration = _key(
        "60 s",
        gt=0,
        description="Maximum time that a node that no job needs is kept until the output printed "
        "there has arrived. A node that the main scheduler wants back is never kept "
        "for this.",
    )


class AllocationSection(Section):
    """How nodes are allocated to jobs, and the assumed cost of a rescale until it was measured."""

    objective: Literal["throughput", "efficiency"] = _key(
        "throughput",
        description="What the plan maximises for jobs that are submitted without --goal: samples "
        "per second, or samples per second relative to one node.",
    )
    t_fwd: Duration = _key(
        format_duration(defaults.T_FWD_S),
        gt=0,
        description="Forward-looking time: a rescale is made when it pays within this time. "
        "About a typical idle gap.",
    )
    debounce: Duration = _key(
        format_duration(ControllerSettings.debounce_s),
        description="Debounce time: node events within this time are handled together, with one "
        "plan.",
    )
    min_interval: Duration = _key(
        format_duration(ControllerSettings.min_interval_s),
        description="Minimum time between two unforced rescales of a job (growing, moving nodes "
        "between jobs).",
    )
    rescale_up: Duration = _key(
        format_duration(defaults.RESCALE_UP_S),
        description="Assumed cost of growing a job until it was measured: time without samples.",
    )
    rescale_down: Duration = _key(
        format_duration(defaults.RESCALE_DOWN_S),
        description="Assumed cost of shrinking a job until it was measured: time without samples.",
    )
    start: Duration = _key(
        format_duration(defaults.START_S),
        description="Assumed cost of starting a job without nodes until it was measured: time "
        "without samples.",
    )
    time_limit: Duration = _key(
        format_duration(PlanningSettings.time_limit_s),
        gt=0,
        description="Maximum time to search for a better plan; the best one found is used.",
    )
    release_after: Duration = _key(
        format_duration(ControllerSettings.release_after_s),
        description="A leased node that no job uses for this long is given back.",
    )
    min_horizon: Duration = _key(
        format_duration(ControllerSettings.min_horizon_s),
        description="Gaps expected to be shorter than this are not leased.",
    )
    reclaim_every: Duration = _key(
        format_duration(ControllerSettings.reclaim_every_s),
        gt=0,
        description="Minimum time between two occasions on which nodes are reclaimed from one "
        "user's jobs for another's.",
    )
    lease_wait: Duration = _key(
        format_duration(ControllerSettings.lease_wait_s),
        gt=0,
        description="A lease that runs and whose agent has not reported within this time is "
        "cancelled. A request for which the main scheduler shows no lease by then is "
        "forgotten. A lease that waits in the queue is withdrawn after start_within of the "
        "scheduler.",
    )
    rejected_for: Duration = _key(
        format_duration(ControllerSettings.rejected_s),
        gt=0,
        description="How long a node is not used on which a job's processes do not start, or "
        "from whose lease no agent reports. If a lease was refused or did not start, "
        "the node is requested again at the next poll, then after 4 s, then after "
        "twice as long each time, up to this time. Other users may still use it. If no "
        "agent reports from three leases in a row of a user, on two nodes or more, no "
        "lease of this user is requested for 20 s, then for twice as long after each "
        "further one, up to this time.",
    )
    deadline_weight: float = _key(
        ControllerSettings.deadline_weight,
        ge=0,
        description="Maximum weight of a node that a deadline needs, as a multiple of what the "
        "node would bring to the job that gains most from it; less while there is "
        "slack. 0: deadlines are watched and change no plan.",
    )
    deadline_ahead: float = _key(
        ControllerSettings.deadline_ahead,
        ge=0,
        le=1,
        description="Weight of samples beyond those that a deadline needs, relative to those of "
        "other jobs (0: a job with a deadline takes no more nodes than it needs).",
    )
    prior_exponent: float = _key(
        PlanningSettings.prior_exponent,
        gt=0,
        le=1,
        description="Assumed throughput of k nodes before it was measured: that of one node "
        "times k to this power (1: perfect scaling).",
    )
    policy: Literal["malletrain", "freetrain"] = _key(
        "malletrain",
        description="malletrain: jobs are measured while they train. freetrain, for comparison: "
        "plans from the curves that owners state, no profiles, starts assumed to be "
        "free, and waiting jobs get no turns.",
    )


def _host_and_port(value: str, scheme: str, example: str) -> None:
    match = re.fullmatch(re.escape(scheme) + r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", value)
    if match is None or int(match[2]) > 65535:
        raise PydanticCustomError(
            "address",
            '"{value}" is not an address; accepted is {scheme}HOST:PORT with a port of 0 to '
            '65535, such as "{example}"',
            {"value": value, "scheme": scheme, "example": example},
        )


class NotifySection(Section):
    """How owners are notified of their jobs (`malletrain submit --notify`)."""

    sendmail: str = key(
        "/usr/sbin/sendmail",
        description="The program that takes mail with `-t -i`. If it does not exist, --notify "
        "with a mail address is refused.",
    )
    webhooks: bool = key(
        False,
        description="Let every user name web hooks, which the daemon's host then calls. If "
        "false, only the daemon's own user may, who can also have commands run on "
        "that host.",
    )
