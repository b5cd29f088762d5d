"""What the daemon shows to people: jobs, nodes, events and totals as data.

The daemon builds these, the command line renders them (``--json`` prints them as they are). Times
are seconds since the epoch, rates samples/s.
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


class CurvePointView(View, frozen=True):
    """What is believed of one scale: ``rate`` ± ``spread`` (95 %) samples/s; ``measured`` there, or
    estimated from other scales.

    ``bid``: what the plan takes it for; 0 at a scale at which the script crashes.
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
    """How the job's profile stands. ``state``: off | waiting | profiling | measured | partial |
    unknown | gone | known (from other jobs, or observed); ``sentence`` says more. ``up_s``,
    ``down_s``, ``start_s``: what a rescale is taken to cost.
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
    """What a job's owner wants beyond speed, and how it stands with that. ``standing``: on_track |
    at_risk | infeasible | met | missed, empty while it is not known; ``why`` says then why.
    ``ends``: the forecast, with its 80 % interval, from the nodes of the last ``history_h`` hours;
    None: there is none.
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


class MemberView(View, frozen=True):
    """One member of a service. ``gone_in_s``: seconds until it is gone, None while nothing is
    known of an end.
    """

    node: str
    host: str
    address: str
    gone_in_s: float | None = None


class MembersView(View, frozen=True):
    """``malletrain members JOB``. ``number`` grows with every change; ``key``: the processes'
    secret, empty for all but the owner.
    """

    job: str
    number: int
    members: tuple[MemberView, ...]
    key: str = ""


class ShareView(View, frozen=True):
    """How a party (a user, group or account) stands with its share, while what is long ago counts
    less and less (``half_life``).
    """

    party: str
    weight: float
    due_nh: float
    """Weighted node-hours that were due to it."""
    served_nh: float
    """Weighted node-hours that its jobs had."""
    factor: float
    """What its bids count."""
    sentence: str = ""
    """For people, where it got more or less than what was due."""


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
    """By which network its rounds go and how fast that is, where the site names one."""
    memory: str = ""
    """What its snapshots take of its nodes' memory, and whether a leaver can hand them over."""
    share: ShareView | None = None
    """How its owner's share stands, where shares are counted."""
    stacks: dict[str, str] = {}
    """Where its workers stood when they last hung, by rank and node."""
    slow: tuple[str, ...] = ()
    """A sentence for each of its nodes that holds up the others."""
    trainer: str = ""
    """In whose plan it is, as a phrase; empty where there is one plan."""


class SeriesView(View, frozen=True):
    """One metric of a job over time, column by column: the n-th entries belong together. Thinned
    out evenly where there are many; its first, last, smallest and largest values are always there.
    """

    name: str
    values: tuple[float, ...]
    times: tuple[float, ...]
    """When the script reported it."""
    samples: tuple[float, ...]
    """What the job had processed by then, all ranks together."""
    nodes: tuple[int, ...]
    """The job's scale then; 0 where it is not known."""
    steps: tuple[int | None, ...]
    """The script's own count, where it gave one."""
    count: int = 0
    """How many values were reported in all, those that were thinned out too."""
    numbers: tuple[int, ...] = ()
    """Which of all that were reported each is, from 0."""


class NodeView(View, frozen=True):
    """One line of ``malletrain nodes``. ``state``: idle | leasing | free | job | leaving | sick
    | slow (idle: a gap without a lease; sick: it failed a health check, slow: it held up the others
    of a job, see ``rules``). ``owner``: whose lease it is, where it is not the daemon's own user's.
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
    trainers: tuple[str, ...] = ()
    """Whose jobs may run there, where there are several plans."""


class NodeForecastView(View, frozen=True):
    """Nodes of one class that jobs could have: leased ones, and gaps that may be leased."""

    node_class: str
    now: float
    """How many there are."""
    span_s: float
    """Seconds of one span of what follows."""
    past: tuple[tuple[float, float], ...]
    """(time, nodes) of each span of the last day, the oldest first."""
    ahead: tuple[tuple[float, float, float, float], ...]
    """(time, low, median, high) of each span of the day to come: between low and high in eight of
    ten cases.
    """
    hours: float
    """Of the past that it was made from."""


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
    """Which jobs have reported a value of a metric, or have ended."""

    cursor: str
    """Names this moment: ask for what comes after it."""
    jobs: tuple[str, ...]


class NetworkView(View, frozen=True):
    """How fast the network of the jobs is between two leased nodes of a class."""

    node_class: str
    sentence: str
    reached: bool
    """Whether a connection came about at all."""
    mbit: float = 0.0
    """What one connection carries; 0: none came about."""


class TrainerView(View, frozen=True):
    """A part of the users with a plan of its own. ``node_classes``: empty for all that no other
    names. ``rate``: samples/s of its jobs, which say nothing beside those of another objective.
    """

    name: str
    objective: str
    node_classes: tuple[str, ...]
    part: float
    jobs: int
    """With nodes."""
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
    """Measured since the daemon's start."""
    shares: tuple[ShareView, ...] = ()
    """That of who asks; operators see all."""
    restraint: str = ""
    """What operators have told it to leave alone, as a sentence; empty: nothing."""
    handler_failures: str = ""
    """For operators: which messages could not be handled since the daemon's start, as a sentence;
    empty: it handled all.
    """
    trainers: tuple[TrainerView, ...] = ()
    """Where there is a plan for each."""
    late: dict[str, str] = {}
    """Jobs of who asks, operators' all, of which a node that leaves cannot hand over its part of
    the snapshot in time: a sentence each.
    """
    users_problems: tuple[str, ...] = ()
    """For operators: what is wrong with the list of users, a sentence each."""


class UsageView(View, frozen=True):
    """What one user used of one class of nodes in one month, in node-hours: leased; of these with
    samples processed (``trained``), lost to starts, to rescales and to preemptions, with a job that
    never told samples (``silent``), and without a job (``unused``). ``kwh`` is None where it is not
    known what the nodes draw.
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
    """Empty: none was known."""
    silent_nh: float = 0.0


class LogView(View, frozen=True):
    """A piece of a log. ``cursor`` is passed back to go on; ``more`` says that there is more right
    now.
    """

    text: str
    cursor: str
    more: bool
    streams: tuple[str, ...]
    ended: bool
    """The job has ended, and all that will ever be here of its logs is."""
    arriving: bool = False
    """The job has ended, and nodes still send what it printed."""
