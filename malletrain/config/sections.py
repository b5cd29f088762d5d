"""The sections of a configuration that are the same at every site: the daemon, jobs, allocation and
profiling.

Decides which keys they have, in which unit, and what a valid value is. The defaults of what the
decision core is told are the core's own (:mod:`malletrain.core.defaults`).
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Location, MaybeLocation, Section, Size, Words
from malletrain.config.base import key as _key
from malletrain.config.units import format_duration
from malletrain.core import defaults


class DaemonSection(Section):
    """The daemon process: where its state lies, how it is reached, what it tells."""

    state_dir: Location = _key(
        "~/.local/state/malletrain",
        description="Directory of the database, keys, logs and lock. One daemon at a time. Where "
        "it is left out, MALLETRAIN_STATE_DIR counts before the default. "
        "Compute nodes need it only to keep what leases "
        "print (keep_output).",
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
    metrics_listen: str = _key(
        "127.0.0.1:9464",
        description="HOST:PORT of the Prometheus metrics; empty: none. Where this is not set and "
        "the port is in use, the daemon runs without metrics and says so.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _key(
        "info", description="Least severe messages that are logged."
    )
    log_format: Literal["text", "json"] = _key(
        "text", description="Log lines for people (text) or for a log collector (json)."
    )
    log_file: MaybeLocation = _key(
        None,
        description="File that the log goes to instead of standard error, where no journald keeps "
        "it.",
    )
    log_file_limit: Size = _key(
        "64 MiB",
        gt=0,
        description="Size at which log_file becomes log_file.1, and that log_file.2; four are "
        "kept.",
    )
    heartbeat: Duration = _key("1 s", gt=0, description="How often an agent says that it is alive.")
    agent_timeout: Duration = _key(
        "5 s", gt=0, description="An agent silent for this long is lost, and its node with it."
    )
    adopt_wait: Duration = _key(
        "5 s",
        description="After a restart, how long to wait at most for agents to report before the "
        "first plan is made.",
    )
    users: MaybeLocation = _key(
        None,
        description="List of the users who may submit jobs, a line NAME KEY for each, as "
        "`malletrain key` prints it; read again when it "
        "changes. Not given: the user who runs the daemon, and whom MUNGE vouches for. Needs "
        "submit_as.",
    )
    munge: bool = _key(
        False,
        description="Accept every user of the machine, whom its MUNGE service vouches for. "
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
        description="Requests a second of one user; who asks for more waits for the answers. Not "
        "for the user who runs the daemon, and for operators.",
    )
    operators: Words = _key(
        [], description="Users who may also cancel the jobs of others and read their logs."
    )

    @property
    def several_users(self) -> bool:
        """Whether others than the user who runs the daemon may be its users."""
        return self.munge or self.users is not None

    @property
    def metrics_required(self) -> bool:
        """Whether somebody set ``metrics_listen``, so that it must be had."""
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
    def _two_beats(cls, value: float, info: ValidationInfo) -> float:
        beat = info.data.get("heartbeat")
        if beat is not None and value < 2 * beat:
            raise PydanticCustomError(
                "agent_timeout",
                "{value} is less than two heartbeats of {beat}, so that one late message would "
                "lose a node; accepted is {least} or more",
                {
                    "value": format_duration(value),
                    "beat": format_duration(beat),
                    "least": format_duration(2 * beat),
                },
            )
        return value


class JobsSection(Section):
    """Limits and patience, the same for every job."""

    max_running: int = _key(
        defaults.MAX_RUNNING,
        ge=1,
        description="Jobs that may run at the same time, a sweep counted as one and limited to so "
        "many trials; the others wait: users in rotation, each user's jobs in order of submission.",
    )
    max_tries: int = _key(
        defaults.MAX_TRIES,
        ge=1,
        description="Starts that may end in a failure of the script before the job is failed.",
    )
    retry_window: Duration = _key(
        format_duration(defaults.RETRY_WINDOW_S),
        gt=0,
        description="Failures further apart than this do not add up to max_tries.",
    )
    drain_timeout: Duration = _key(
        "10 s",
        description="Drain wait: how long a rescale waits for the job's snapshot at a step "
        "boundary before it goes on without.",
    )
    join_timeout: Duration = _key(
        "60 s", gt=0, description="Time in which all members of a round must have joined it."
    )
    warmup_timeout: Duration = _key(
        "5 min",
        gt=0,
        description="Time in which new workers must have processed their first sample before "
        "they count as stuck.",
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
        defaults.TURNS_APART,
        ge=1,
        description="A job that had nodes before is starving after so many times starvation. Fewer "
        "make waits shorter and cost samples: turns serve who brings little. Who lost its nodes in "
        "its turn waits less, by what was left of it.",
    )
    hang_after: Duration = _key(
        "2 min",
        gt=0,
        description="A worker that has reported before counts as hung when it has been silent for "
        "this long and for five times the job's longest pause so far: its owner is told where it "
        "stands, and --on-hang restart has the workers started again.",
    )
    no_progress_warning: Duration = _key(
        "5 min",
        gt=0,
        description="A running job that reports no progress for this long is named in its notices.",
    )
    log_limit: Size = _key(
        "64 MiB",
        gt=0,
        description="Size at which a log of one rank is cut; its end then says how much later "
        "output of that rank was dropped.",
    )
    snapshot_memory: float = _key(
        0.25,
        ge=0,
        le=0.9,
        description="Part of a node's memory (of that of the lease, where it is confined) in which "
        "jobs whose scripts ask for it keep their newest snapshots; 0: none.",
    )
    log_wait: Duration = _key(
        "60 s",
        gt=0,
        description="How long a node that no job needs is kept until what was printed there has "
        "arrived. A node that the main scheduler wants back is never kept for that.",
    )


class AllocationSection(Section):
    """How nodes are given to jobs, and what a change of scale is taken to cost until it was
    measured.
    """

    objective: Literal["throughput", "efficiency"] = _key(
        "throughput",
        description="What the plan maximises for jobs that do not say: samples per second, or "
        "samples per second relative to one node.",
    )
    t_fwd: Duration = _key(
        format_duration(defaults.T_FWD_S),
        gt=0,
        description="Forward-looking time: a rescale is made when it pays within this time. "
        "About a typical idle gap.",
    )
    debounce: Duration = _key(
        format_duration(defaults.DEBOUNCE_S),
        description="Debounce time: node events this close together are handled as one, with one "
        "plan.",
    )
    min_interval: Duration = _key(
        format_duration(defaults.MIN_INTERVAL_S),
        description="Least time between two rescales of a job that nothing forces (growing, "
        "moving nodes between jobs).",
    )
    rescale_up: Duration = _key(
        format_duration(defaults.RESCALE_UP_S),
        description="Cost of growing a job until it was measured: time without samples.",
    )
    rescale_down: Duration = _key(
        format_duration(defaults.RESCALE_DOWN_S),
        description="Cost of shrinking a job until it was measured: time without samples.",
    )
    start: Duration = _key(
        format_duration(defaults.START_S),
        description="Cost of starting a job from no node until it was measured: time without "
        "samples.",
    )
    time_limit: Duration = _key(
        format_duration(defaults.TIME_LIMIT_S),
        gt=0,
        description="Longest time to search for a better plan; the best one found is used.",
    )
    release_after: Duration = _key(
        format_duration(defaults.RELEASE_AFTER_S),
        description="A leased node that no job uses for this long is given back.",
    )
    heed_lifetimes: bool = _key(
        False,
        description="With [gaps] lifetimes: bids are made from how long the nodes are expected to "
        "last. Fewer rescales, no fewer preemptions, and somewhat fewer samples.",
    )
    min_horizon: Duration = _key(
        format_duration(defaults.MIN_HORIZON_S),
        description="Gaps expected to last less than this are not taken.",
    )
    reclaim_every: Duration = _key(
        format_duration(defaults.RECLAIM_EVERY_S),
        gt=0,
        description="Nodes are reclaimed from the jobs of one user for those of another no more "
        "often than this.",
    )
    lease_wait: Duration = _key(
        format_duration(defaults.LEASE_WAIT_S),
        gt=0,
        description="A lease asked for that has not come up by then is forgotten; one that runs "
        "and whose agent has not reported by then is cancelled.",
    )
    rejected_for: Duration = _key(
        format_duration(defaults.REJECTED_S),
        gt=0,
        description="A node on which a job's processes do not come up, or from whose lease no "
        "agent reports, is left alone for so long. Where a lease was refused or did not start, the "
        "node is asked for again at the next poll, then after 4 s, then after twice as long each "
        "time, so long at most. Other users may still use it.",
    )
    deadline_weight: float = _key(
        defaults.DEADLINE_WEIGHT,
        ge=0,
        description="A node that a deadline needs counts at most so many times what it would bring "
        "the job that could make most of it; less while there is slack. 0: deadlines are watched "
        "and change no plan.",
    )
    deadline_ahead: float = _key(
        defaults.DEADLINE_AHEAD,
        ge=0,
        le=1,
        description="What samples beyond those a deadline needs count, beside those of other jobs "
        "(0: a job with a deadline takes no more nodes than it needs).",
    )
    prior_exponent: float = _key(
        defaults.PRIOR_EXPONENT,
        gt=0,
        le=1,
        description="Assumed throughput of k nodes before it was measured: that of one node "
        "times k to this power (1: perfect scaling).",
    )
    policy: Literal["malletrain", "freetrain"] = _key(
        "malletrain",
        description="malletrain: jobs are measured while they train; freetrain, to compare with: "
        "plans from the curves that owners state, no profiles, starts taken to be free, and nobody "
        "is served for having waited.",
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
