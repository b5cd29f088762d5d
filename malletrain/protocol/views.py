"""Views, the data that the daemon shows to users: jobs, nodes, events and totals.

The daemon builds these, the command line renders them (``--json`` prints them as they are). Times
are seconds since the epoch, rates samples/s.
"""

from __future__ import annotations

from typing import Any

import msgspec


class View(msgspec.Struct, frozen=True, omit_defaults=False):
    """Base of all views."""


class RankTimesView(View, frozen=True):
    """The mean step of one rank, seconds: its duration, and of that waiting for data, in exchanges
    with other ranks, and in snapshots. None: not measured, or there was none. ``computing_s``: the
    rest; None from a daemon that does not say it.
    """

    rank: int
    node: str
    step_s: float
    data_s: float | None
    exchange_s: float | None
    snapshot_s: float | None
    computing_s: float | None = None


class StepTimesView(View, frozen=True):
    """Where the time of a job's steps goes. ``shares``: part of a step → its share, over all ranks;
    the parts are data, computing, others (waiting for other ranks), transfer and snapshot.
    ``advice``: a sentence or two. ``ranks``: at most 64, those that come last to exchanges;
    ``rank_count``: the number of all measured ranks, 0 from a daemon that does not say it.
    ``cause``: what delays the steps most, a value of
    :class:`malletrain.core.step_times.Bottleneck`; empty if the measurement is older than this
    field.
    """

    step_s: float
    shares: dict[str, float]
    advice: str
    ranks: tuple[RankTimesView, ...] = ()
    cause: str = ""
    rank_count: int = 0


class RateView(View, frozen=True):
    """Observed throughput at one scale. ``steps``: where the time of the steps went there; None if
    not measured.
    """

    nodes: int
    rate: float
    spread: float
    samples: float
    seconds: float
    steps: StepTimesView | None = None


class CurvePointView(View, frozen=True):
    """The estimate for one scale: ``rate`` ± ``spread`` (95 %) samples/s; ``measured`` there, or
    estimated from other scales.

    ``bid``: the value that the plan uses; 0 at a scale at which the script crashes.
    """

    nodes: int
    rate: float
    spread: float
    measured: bool
    bid: float


class InterruptionView(View, frozen=True):
    """The job gave nodes to the profile of the job ``by``."""

    time: float
    by: str
    before: int
    nodes: int


class ProfileView(View, frozen=True):
    """State of the job's profile. ``state``: off | waiting | profiling | measured | partial |
    unknown | gone | known (from other jobs, or observed); ``sentence`` says more. ``up_s``,
    ``down_s``, ``start_s``: assumed cost of a rescale or start, seconds.
    """

    state: str
    sentence: str = ""
    phase: str = ""
    up_s: float = 0.0
    down_s: float = 0.0
    start_s: float = 0.0
    points: tuple[CurvePointView, ...] = ()
    interruptions: tuple[InterruptionView, ...] = ()


class RescaleView(View, frozen=True):
    """One change of a job's nodes. ``cost_s``: last sample before → first sample after; ``phases``:
    its parts in seconds; ``ended``: the first sample after.
    """

    generation: int
    kind: str
    from_nodes: int
    to_nodes: int
    began: float
    cost_s: float | None
    phases: dict[str, float] = {}
    ended: float | None = None


class GoalView(View, frozen=True):
    """A job's deadline and budget, and its standing. ``standing``: on_track | at_risk | infeasible
    | met | missed, empty if not known; ``why`` then says why. ``ends``: the forecast of the job's
    end, with its 80 % interval, from the nodes of the last ``history_h`` hours; None if there is no
    forecast.
    """

    deadline: float | None = None
    budget_nh: float | None = None
    charged_nh: float = 0.0
    work: float | None = None
    standing: str = ""
    ends: float | None = None
    ends_low: float | None = None
    ends_high: float | None = None
    history_h: float = 0.0
    why: str = ""


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
    goal: GoalView | None = None
    step_shares: dict[str, float] = {}
    """Part of a step → its share lately, as in :class:`StepTimesView`; empty if not measured."""
    mode: str = ""
    """How it runs: live, restart, service, or farm, whose samples are tasks. Empty: a daemon of an
    earlier version."""
    counts: str = ""
    """What ``min_nodes`` and ``max_nodes`` count, ``slots`` or ``gpus``; empty: nodes."""


class MemberView(View, frozen=True):
    """One member of a service. ``gone_in_s``: seconds until it leaves, None if no end is known;
    ``loading``: it has joined and is not ready to serve yet; ``expected_remaining_s``: expected
    remaining time of its node, seconds, None if there is no forecast.
    """

    node: str
    host: str
    address: str
    gone_in_s: float | None = None
    loading: bool = False
    expected_remaining_s: float | None = None


class MembersView(View, frozen=True):
    """``malletrain members JOB``. ``number`` increases with every change; ``key``: the processes'
    secret, empty for users other than the owner. ``version``: changes with the members and with
    what nodes are worth; empty once the service has ended. ``values``: number of nodes → value;
    ``values_expire_in_s``: seconds until they lapse unless they are set again, None if they do not.
    """

    job: str
    number: int
    members: tuple[MemberView, ...]
    key: str = ""
    version: str = ""
    state: str = ""
    values: dict[int, float] = {}
    values_expire_in_s: float | None = None


class TaskView(View, frozen=True):
    """One task of a farm. ``state``: waiting | running | done | failed | cancelled; ``tries``:
    failures so far; ``exit_code``: of the last try, negative: the number of a signal; ``node``:
    where it runs or ran last; ``log``: path of its output; ``tail``: end of the output of a task
    that failed, or why it failed.
    """

    number: int
    values: tuple[str, ...]
    state: str
    tries: int = 0
    exit_code: int | None = None
    node: str = ""
    started: float | None = None
    ended: float | None = None
    log: str = ""
    tail: str = ""


class TasksView(View, frozen=True):
    """``malletrain tasks JOB``. ``counts``: state → number of tasks; ``tasks``: the requested ones
    in order; ``rate``: tasks/s completed lately; ``ends``: forecast of the end, None if there is
    none; ``slowest``: the tasks that run longest; ``failing``: why nodes get no tasks, a sentence
    each. ``columns``: names of the values. A task that its node has not begun waits.
    """

    job: str
    columns: tuple[str, ...]
    total: int
    counts: dict[str, int]
    tasks: tuple[TaskView, ...] = ()
    rate: float = 0.0
    ends: float | None = None
    slowest: tuple[TaskView, ...] = ()
    failing: tuple[str, ...] = ()


class TaskHistoryView(View, frozen=True):
    """The tasks of a farm over time. ``points``: (seconds since the epoch, number of done, failed
    and running tasks then), the oldest first; they count the last try of each task. ``slowest``:
    the done tasks that ran longest.
    """

    job: str
    points: tuple[tuple[float, int, int, int], ...]
    slowest: tuple[TaskView, ...] = ()


class ShareView(View, frozen=True):
    """Share of a party (a user, group or account) and its use; older service counts less
    (``half_life``).
    """

    party: str
    weight: float
    due_nh: float
    """Weighted node-hours that were due to it."""
    served_nh: float
    """Weighted node-hours that its jobs had."""
    factor: float
    """Factor on its bids."""
    sentence: str = ""
    """A sentence for users, if it got more or less than was due."""


class TriedLayoutView(View, frozen=True):
    """One layout of a node that is or was tried. ``rate``: samples/s with the half width of its
    99 % interval; None before it is measured, or if it was measured at another scale. ``result``:
    what became of it, as words.
    """

    processes: int
    threads: int
    loader_workers: int
    rate: float | None
    half_width: float | None
    result: str


class LayoutView(View, frozen=True):
    """How a job uses each of its nodes, and how that was found."""

    layout: str
    """The layout of its newest round, as words."""
    sentence: str
    """How it was found, or how far the search is."""
    searching: bool
    """Whether the best layout is still being looked for."""
    seconds: float
    """Duration of the search so far."""
    source: str
    """Job that found the layout with which it began; empty if it began with the default."""
    tried: tuple[TriedLayoutView, ...] = ()
    """The layouts, the default first."""


class DataCacheView(View, frozen=True):
    """The reads of a job of one data set through a data cache."""

    name: str
    node_hits: int = 0
    """Samples found in the memory of the node that needed them."""
    peer_hits: int = 0
    """Samples fetched from the memory of other nodes."""
    source_reads: int = 0
    """Samples read from the data set."""
    hit_bytes: int = 0
    """Bytes of the first two, which were not read from the data set."""
    source_bytes: int = 0
    """Bytes of the last."""
    unpacked: int = 0
    """Samples read from the data set that cannot be cached."""
    samples: int = 0
    """Length of the data set."""
    present: int = 0
    """Samples in the memory of the job's nodes."""
    data_bytes: int = 0
    """Estimated size of the data set."""
    memory_bytes: int = 0
    """Memory of the job's nodes for it."""
    node_bytes: int = 0
    """All memory of one node that the job can use."""
    coverage: float | None = None
    """Part of the samples that an epoch reads; None if unknown."""


class JobDetail(View, frozen=True):
    """``malletrain show JOB``."""

    job: JobView
    spec: dict[str, Any]
    rates: tuple[RateView, ...] = ()
    rescales: tuple[RescaleView, ...] = ()
    notices: tuple[str, ...] = ()
    failure: str = ""
    profile: ProfileView | None = None
    network: str = ""
    """Network that its rounds use and its bandwidth, if the site names one."""
    memory: str = ""
    """Size of its snapshots in its nodes' memory, and whether a leaver can hand them over."""
    share: ShareView | None = None
    """Share of its owner, if shares are counted."""
    stacks: dict[str, str] = {}
    """Stacks of its workers when they last hung, by rank and node."""
    slow: tuple[str, ...] = ()
    """A sentence for each of its nodes that holds up the others."""
    trainer: str = ""
    """Trainer in whose plan it is, as a phrase; empty if there is only one plan."""
    steps: StepTimesView | None = None
    """Where the time of its steps goes at its newest scale; None if not measured."""
    layout: LayoutView | None = None
    """Layout of its nodes; None if its owner has not asked for the best one."""
    data: tuple[DataCacheView, ...] = ()
    """Where the samples of its data caches came from, by data set."""


class SeriesView(View, frozen=True):
    """One metric of a job over time, column by column: the n-th entries belong together. Long
    series are thinned out evenly, but keep their first, last, smallest and largest values.
    """

    name: str
    values: tuple[float, ...]
    times: tuple[float, ...]
    """When the script reported it."""
    samples: tuple[float, ...]
    """Samples that the job had processed by then, all ranks together."""
    nodes: tuple[int, ...]
    """The job's scale at that time; 0 if not known."""
    steps: tuple[int | None, ...]
    """The script's own step count, if it gave one."""
    count: int = 0
    """Number of values reported in all, including thinned-out ones."""
    numbers: tuple[int, ...] = ()
    """Index of each value among all reported ones, from 0."""


class NodeView(View, frozen=True):
    """One line of ``malletrain nodes``. ``state``: idle | leasing | free | job | leaving | sick
    | slow (idle: a gap without a lease; sick: it failed a health check; slow: it held up the other
    nodes of a job, see ``rules``). ``owner``: the lease's user, if not the daemon's own user.
    """

    node: str
    state: str
    lease: str
    job: str
    since: float
    horizon_s: float | None = None
    gone_in_s: float | None = None
    node_class: str = "default"
    owner: str = ""
    rules: tuple[tuple[str, bool, str], ...] = ()
    warm_bytes: int = 0
    """Memory of its warm fork servers."""
    trainer: str = ""
    """Trainer of the node, if there are several plans; empty if it belongs to none."""
    mode: str = ""
    """Mode of the job on it, see JobView; empty if there is none."""


class NodeForecastView(View, frozen=True):
    """Nodes of one class that jobs could have: leased ones, and gaps that may be leased."""

    node_class: str
    now: float
    """Current number of such nodes."""
    span_s: float
    """Length of one interval of ``past`` and ``ahead``, seconds."""
    past: tuple[tuple[float, float], ...]
    """(time, nodes) of each interval of the last day, the oldest first."""
    ahead: tuple[tuple[float, float, float, float], ...]
    """(time, low, median, high) of each interval of the next day; low to high is the 80 % interval.
    """
    hours: float
    """Length of the history from which the forecast was made, hours."""


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


class NewsView(View, frozen=True):
    """Jobs that have reported a value of a metric, or have ended."""

    cursor: str
    """Position of this answer; pass it to get later news only."""
    jobs: tuple[str, ...]


class NetworkView(View, frozen=True):
    """Bandwidth of the jobs' network between two leased nodes of a class."""

    node_class: str
    sentence: str
    reached: bool
    """Whether a connection was possible."""
    mbit: float = 0.0
    """Bandwidth of one connection, Mbit/s; 0: no connection."""


class TrainerView(View, frozen=True):
    """A group of users with a plan of its own. ``node_classes``: empty for all that no other
    trainer names. ``rate``: samples/s of its jobs, not comparable between trainers of different
    objectives.
    """

    name: str
    objective: str
    node_classes: tuple[str, ...]
    jobs: int
    """Number of jobs with nodes."""
    waiting: int
    nodes: int
    rate: float
    sentence: str = ""


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
    networks: tuple[NetworkView, ...] = ()
    """Networks measured since the daemon's start."""
    shares: tuple[ShareView, ...] = ()
    """The share of the asking user; operators see all."""
    restrictions: str = msgspec.field(default="", name="restraint")
    """What operators have paused or excluded, as a sentence; empty: nothing. Other versions read it
    as ``restraint``.
    """
    handler_failures: str = ""
    """For operators: messages that could not be handled since the daemon's start, as a sentence;
    empty: all were handled.
    """
    trainers: tuple[TrainerView, ...] = ()
    """The trainers, if there are several plans."""
    late: dict[str, str] = {}
    """Jobs of the asking user (for operators: all jobs) of which a leaving node cannot hand over
    its part of the snapshot in time → a sentence.
    """
    users_problems: tuple[str, ...] = ()
    """For operators: problems of the list of users, a sentence each."""
    nodes_farming: int = 0
    """Number of the nodes with a job whose job is a farm; ``nodes_training`` has the others."""
    failed_starts: tuple[str, ...] = ()
    """For operators: leases from which no agent reports, and why, as sentences; one entry for each
    user with such leases.
    """


class UsageView(View, frozen=True):
    """Usage of one class of nodes by one user in one month, in node-hours: leased; of these with
    samples processed (``trained``), lost to starts, to rescales and to preemptions, with a job that
    never reported samples (``silent``), and without a job (``unused``). ``kwh`` is None if the
    power of the nodes is not known.
    """

    month: str
    user: str
    node_class: str
    leased_nh: float
    trained_nh: float
    starting_nh: float
    rescaling_nh: float
    preempted_nh: float
    unused_nh: float
    samples: float = 0.0
    kwh: float | None = None
    account: str = ""
    """The user's account; empty: not known."""
    silent_nh: float = 0.0
    charged_nh: float | None = None
    """Node-hours that the leased time counts: that of a slot times the price of its kind, all times
    charge_factor. None from a daemon that does not tell.
    """
    gpu_h: float | None = None
    """GPU-hours of the leased slots; None for whole nodes."""


class LogView(View, frozen=True):
    """A piece of a log. Pass ``cursor`` back to continue; ``more``: whether more is available
    now.
    """

    text: str
    cursor: str
    more: bool
    streams: tuple[str, ...]
    ended: bool
    """Whether the job has ended and its logs are complete."""
    arriving: bool = False
    """Whether the job has ended and nodes still send its output."""


class CommandPart(View, frozen=True):
    """A piece of the output of a command."""

    data: bytes
    error: bool
    """Whether it is of the standard error."""


class CommandView(View, frozen=True):
    """The output of a command since the cursor of the request, and its end."""

    parts: tuple[CommandPart, ...]
    cursor: int
    """Number of bytes of output up to the end of ``parts``; the cursor of the next request."""
    ended: bool
    """Whether the command has ended and no more output follows."""
    code: int | None = None
    """Exit code, as of a shell; None if there is none, because of ``sentence``."""
    sentence: str = ""
    """Why the command has no exit code."""


class CommandStarted(View, frozen=True):
    """A command that was started."""

    command: str
    """Its id."""
    job: str
    """Id of the job."""
    node: str
    """Name of the node."""
