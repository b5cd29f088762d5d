"""Every message that crosses a socket between daemon, agents and clients.

Decides the shape of messages only. :mod:`malletrain.protocol.wire` encodes and checks them; their
handlers decide who may send which. Times are seconds since the epoch unless a name ends in ``_s``
(a duration in seconds).

A client sends :class:`Request` and gets :class:`Reply`. :class:`ExpectLoss` is a forecast of the
daemon for the agent of a job's first node, :class:`Worth` the value of nodes to a service, as its
process reports it at run time. All others concern the agents.

Messages name one start of the daemon by its boot name, ``DAEMON-NUMBER``. The daemon's part of it
is the id of its database, so it survives restarts and moves.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from malletrain.protocol.bounds import (
    MAX_ITEMS,
    MAX_PROCESSES,
    MAX_WORTH_SIZES,
    Amount,
    Count,
    Duration,
    EpochSeconds,
    Facts,
    Id,
    MetricValue,
    Name,
    Port,
    Rank,
    Sentence,
    Stream,
    Tail,
)
from malletrain.protocol.bounds import Message as Message
from malletrain.protocol.commands import CommandCredit as CommandCredit
from malletrain.protocol.commands import CommandEnded as CommandEnded
from malletrain.protocol.commands import CommandInput as CommandInput
from malletrain.protocol.commands import CommandInputRead as CommandInputRead
from malletrain.protocol.commands import CommandOutput as CommandOutput
from malletrain.protocol.commands import EndCommand as EndCommand
from malletrain.protocol.commands import ResizeTerminal as ResizeTerminal
from malletrain.protocol.commands import SignalCommand as SignalCommand
from malletrain.protocol.commands import StartCommand as StartCommand
from malletrain.protocol.farm import FarmSpec as FarmSpec
from malletrain.protocol.farm import HeldTask as HeldTask
from malletrain.protocol.farm import TaskAck as TaskAck
from malletrain.protocol.farm import TaskItem as TaskItem
from malletrain.protocol.farm import TaskItems as TaskItems
from malletrain.protocol.farm import TaskPull as TaskPull
from malletrain.protocol.farm import TaskQuery as TaskQuery
from malletrain.protocol.farm import TaskResult as TaskResult
from malletrain.protocol.farm import TaskResults as TaskResults
from malletrain.protocol.farm import TaskStop as TaskStop
from malletrain.protocol.interpreters import Warm as Warm
from malletrain.protocol.interpreters import WarmUp as WarmUp
from malletrain.protocol.payloads import Assignment as Assignment
from malletrain.protocol.payloads import Failure as Failure
from malletrain.protocol.payloads import JobSpec as JobSpec
from malletrain.protocol.payloads import MetricSample as MetricSample
from malletrain.protocol.payloads import NodeNetwork, ProbeResult, ProbeTarget
from malletrain.protocol.payloads import Notification as Notification
from malletrain.protocol.payloads import Peer as Peer
from malletrain.protocol.payloads import RoundLayout as RoundLayout
from malletrain.protocol.payloads import SoftwareEnvironment as SoftwareEnvironment

MAX_STACK_BYTES = 8192
MAX_STACK_WORKERS = 16
"""Maximum number of workers whose stacks one node sends, and one event keeps."""


class ExpectLoss(Message, frozen=True):
    """A node of the job is lost after ``in_s`` seconds on average; the job can adapt how often it
    saves. Infinite: no loss is expected.
    """

    job: str
    in_s: float


class AdviseBatch(Message, frozen=True):
    """The global batch that suits the job's nodes, samples per step. Its script may follow it."""

    job: str
    size: Count


class Worth(Message, frozen=True):
    """The value of each number of nodes to a service from now on, in samples/s."""

    job: Id
    nodes: Annotated[dict[Count, Amount], msgspec.Meta(min_length=1, max_length=MAX_WORTH_SIZES)]
    expires_s: Duration | None = None
    """Time after which the values lapse unless they are reported again, seconds; None: never."""


class Request(Message, frozen=True):
    """A client's call: ``op`` with ``params``; answered by Reply with the same ``id``. Created by
    :func:`malletrain.protocol.wire.request`.
    """

    id: Id
    op: Id
    params: msgspec.Raw = msgspec.Raw(b"\x80")
    """Parameters, still encoded as msgpack: requests wait in a queue, and decoded parameters can be
    sixty times as large.
    """

    def parameters(self) -> dict[str, Any]:
        """Return the decoded parameters by name. Raises ValueError if they are not a map."""
        try:
            return _parameters.decode(self.params)
        except RecursionError as error:
            raise ValueError(str(error)) from None


_parameters = msgspec.msgpack.Decoder(dict[str, Any])


class Reply(Message, frozen=True):
    """Answer to Request: ``data`` when ok, else ``error`` (a sentence) and ``code`` (``refused`` |
    ``usage`` | ``internal`` | ``unauthenticated``: log in first; ``data`` then says whether a
    ``login`` with a MUNGE credential is accepted).
    """

    id: str
    ok: bool
    data: Any = None
    error: str = ""
    code: str = ""


# --- agent -> daemon ---


class Hello(Message, frozen=True):
    """First message of an agent; sent again when the daemon has a new boot id or sends
    WhoAreYou.
    """

    node: Name
    lease: Id
    host: Name
    pid: Count
    gpus: Rank = 0
    node_class: Name = "default"
    gone_in_s: Duration | None = None
    assignment: Assignment | None = None
    shipping: tuple[Id, ...] = ()
    """Jobs whose logs may not be complete on the daemon."""
    networks: Annotated[tuple[NodeNetwork, ...], msgspec.Meta(max_length=64)] = ()
    sick: Sentence = ""
    """Why the node is not fit for jobs; empty: no problem is known."""
    warm: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] | None = None
    """Keys of interpreters, as in Warm; None: this agent warms up none."""
    again: bool = False
    """Whether it repeats the last Hello on this connection, because no answer has arrived."""
    cores: Rank = 0
    """Number of cores that the processes of a job may use on the node; 0: not known."""
    version: Name | None = None
    """Version of the agent's malletrain; None: an earlier version that does not report it."""


class Heartbeat(Message, frozen=True):
    """The agent is alive. ``boot``: the daemon's boot id as far as the agent knows;
    ``memory_bytes``: size of snapshots in memory."""

    boot: Id
    rss_bytes: Count = 0
    warm_bytes: Count = 0
    memory_bytes: Count = 0


class Phase(Message, frozen=True):
    """The state of the agent's assignment changed (see :class:`Assignment`)."""

    assignment: Assignment
    tail: Tail = ""


class StoreUp(Message, frozen=True):
    """The node of group rank 0 serves the round's TCPStore here."""

    job: Id
    generation: Count
    host: Name
    port: Port


class Drained(Message, frozen=True):
    """The drain is over on this node: the snapshot is saved, or there is none to save."""

    job: Id
    generation: Count
    saved: bool
    sentence: Sentence = ""
    number: Count = 0


class Released(Message, frozen=True):
    """No process of ``job`` is left on this node."""

    job: Id


class Leaving(Message, frozen=True):
    """The main scheduler wants the node back: the agent is gone within ``in_s`` seconds."""

    in_s: Duration
    reason: Sentence = ""
    """Earlier agents give one; not used."""


class Sick(Message, frozen=True):
    """The node is not fit for jobs. ``broken``: the workers on it have failed already."""

    sentence: Sentence
    broken: bool = False


class Doubt(Message, frozen=True):
    """Workers of ``job`` failed here; the agent checks whether the node is the cause. ``over``: the
    check found no fault of the node."""

    job: Id
    over: bool = False


class Progress(Message, frozen=True):
    """Counts of one worker process since it started; ``batch``: samples of its last step. ``busy``:
    cumulative time in which it worked instead of waiting for its peers, seconds since an arbitrary
    start; None if not known. ``data``, ``exchange``, ``snapshot``: cumulative time of its steps in
    which it waited for data, was in exchanges with other ranks, and took snapshots, in the same
    way.
    """

    job: Id
    generation: Count
    rank: Rank
    pid: Count
    samples: Amount
    steps: Count
    batch: Amount
    first: EpochSeconds
    last: EpochSeconds
    busy: Duration | None = None
    data: Duration | None = None
    exchange: Duration | None = None
    snapshot: Duration | None = None


class Mark(Message, frozen=True):
    """A point in a worker's start-up (``import``, ``restored``, ``first``, …)."""

    job: Id
    generation: Count
    rank: Rank
    name: Id
    time: EpochSeconds


class Metric(Message, frozen=True):
    """A named number of the script: its newest ``value``, and all ``points`` since the last message
    (some may be sent twice)."""

    job: Id
    rank: Rank
    name: Sentence
    value: MetricValue
    generation: Count = 0
    points: Annotated[tuple[MetricSample, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()


class Notice(Message, frozen=True):
    """A sentence for the job's owner (e.g. why a snapshot failed), or a fact about it."""

    job: Id
    rank: Rank
    kind: Id
    sentence: Sentence
    data: Facts = msgspec.field(default_factory=dict)


class LogChunk(Message, frozen=True):
    """Bytes of a log at ``offset``. Sent again until acknowledged: writing is idempotent."""

    job: Id
    generation: Count
    stream: Stream
    node: Name
    offset: Count
    data: bytes
    size: Count = 0
    """Current size of the log on the node, bytes."""


class LogEnd(Message, frozen=True):
    """The rest of this log (``size`` bytes) is not sent, although the daemon does not have all of
    it."""

    job: Id
    generation: Count
    stream: Stream
    node: Name
    size: Count


class ProbeUp(Message, frozen=True):
    """The node listens for a network probe."""

    number: Count
    port: Port


class Probed(Message, frozen=True):
    """The results of a network probe."""

    number: Count
    results: Annotated[tuple[ProbeResult, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Stacks(Message, frozen=True):
    """The stacks of one worker. ``state``: its state in the kernel, if it is neither running nor
    sleeping; ``text``: the stacks of its threads, the innermost frame first; empty: it reported
    none.
    """

    job: Id
    generation: Count
    rank: Annotated[int, msgspec.Meta(ge=-1, le=10_000_000)]
    """-1: not known, because it has not reported."""
    pid: Count
    state: Sentence = ""
    text: Annotated[str, msgspec.Meta(max_length=MAX_STACK_BYTES)] = ""


class LogsShipped(Message, frozen=True):
    """All logs of ``job`` on this node have been sent, and no more output will follow."""

    job: Id


# --- daemon -> agent ---


class Welcome(Message, frozen=True):
    """Answer to Hello: the daemon's boot id and the interval of heartbeats."""

    boot: Id
    heartbeat_s: Duration
    log_limit_bytes: Count = 0


class WhoAreYou(Message, frozen=True):
    """The daemon does not know this agent (the daemon restarted) or this connection (messages over
    the previous one may be lost): send Hello.
    """

    boot: Id


class Alive(Message, frozen=True):
    """Answer to Heartbeat."""

    boot: Id


class Assign(Message, frozen=True):
    """Start the launcher of this job (idempotent). ``key``: the secret of the job's nodes;
    ``host``: address of this node."""

    job: Id
    spec: JobSpec
    stop_grace_s: Duration = 5.0
    join_timeout_s: Duration = 60.0
    key: str = ""
    host: str = ""
    memory_share: Amount = 0.0
    hand_over_bytes: Amount = 0.0
    max_processes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROCESSES)] = 0
    """Maximum number of the job's processes on a node in any of its rounds; 0: the number in its
    specification."""


class Round(Message, frozen=True):
    """Membership of the job's next round: this node is ``group_rank`` of ``group_size``.

    The node of group rank 0 gets it without ``store_host`` and answers StoreUp; the others get it
    once the store is up. For a service a round only announces the ``members`` in rank order; there
    is no store. For other jobs ``members`` are the nodes that serve the samples of their data
    caches, each with that address.
    """

    job: Id
    generation: int
    group_rank: int
    group_size: int
    store_host: str = ""
    store_port: int = 0
    interface: str = ""
    address: str = ""
    members: tuple[Peer, ...] = ()
    layout: RoundLayout | None = None
    """How the job uses each of its nodes in this round; None: as its specification says."""


class Drain(Message, frozen=True):
    """Take a snapshot at the next step boundary and wait; ``number`` increases with each request, 0
    withdraws it. ``heirs``: keepers of the next round's nodes; if empty, the snapshot goes to disk.
    """

    job: Id
    generation: int
    number: int
    timeout_s: Duration
    heirs: tuple[str, ...] = ()


class Abort(Message, frozen=True):
    """A member of round ``generation`` is lost: workers in live mode abandon the current step and
    wait for the next round.
    """

    job: Id
    generation: int


class ProbeOpen(Message, frozen=True):
    """Listen at ``address`` for some seconds, for nodes that know the token; answer ProbeUp."""

    number: int
    address: str
    token: str


class ProbeTo(Message, frozen=True):
    """Connect to each target and send for ``seconds`` (0: only connect); answer Probed."""

    number: int
    token: str
    targets: tuple[ProbeTarget, ...]
    seconds: Duration = 0.0


class ShowStacks(Message, frozen=True):
    """Get the stacks of each live worker of this round, which hangs; answer Stacks for each."""

    job: str
    generation: int


class Release(Message, frozen=True):
    """Stop every process of ``job`` here: SIGTERM, after the grace SIGKILL; answer Released."""

    job: Id
    grace_s: Duration


class Goodbye(Message, frozen=True):
    """The lease is given back: stop everything, send the logs and exit 0."""

    reason: str = ""
    within_s: Duration = 0.0
    """Maximum time for all of this, seconds; 0: a short default."""


class LogAck(Message, frozen=True):
    """Everything of this log below ``offset`` is on the daemon's disk."""

    job: Id
    generation: int
    stream: str
    node: str
    offset: int


# --- clients ---


class Error(Message, frozen=True):
    """The message could not be used; nothing was changed."""

    sentence: str


AgentMessage = (
    Hello
    | Heartbeat
    | Warm
    | Phase
    | StoreUp
    | Drained
    | Worth
    | TaskPull
    | TaskResults
    | Released
    | Leaving
    | Sick
    | Doubt
    | Progress
    | Mark
    | Metric
    | Notice
    | LogChunk
    | LogEnd
    | LogsShipped
    | ProbeUp
    | Probed
    | Stacks
    | CommandOutput
    | CommandInputRead
    | CommandEnded
)
LauncherMessage = Phase | StoreUp | Drained | Worth | TaskPull | TaskResults
"""Messages of a launcher to its agent."""
DaemonMessage = (
    Welcome
    | WhoAreYou
    | Alive
    | WarmUp
    | Assign
    | Round
    | Drain
    | Abort
    | ExpectLoss
    | AdviseBatch
    | TaskItems
    | TaskAck
    | TaskStop
    | TaskQuery
    | ShowStacks
    | StartCommand
    | CommandInput
    | CommandCredit
    | ResizeTerminal
    | SignalCommand
    | EndCommand
    | ProbeOpen
    | ProbeTo
    | Release
    | Goodbye
    | LogAck
    | Reply
    | Error
)
AnyMessage = AgentMessage | DaemonMessage | Request


def boot_name(daemon: str, number: int) -> str:
    """Return the name of the daemon's ``number``-th start."""
    return f"{daemon[:8]}-{number}"


def daemon_of(boot: str) -> str:
    """Return the daemon's part of a boot name; empty if there is none."""
    return boot.rpartition("-")[0]
