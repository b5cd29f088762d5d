"""Every message that crosses a socket between daemon, agents and clients.

Decides the shape of messages only. How they are written and checked is
:mod:`malletrain.protocol.wire`; who may send which is decided where they are handled. Times are
seconds since the epoch unless a name ends in ``_s`` (a duration in seconds).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import (
    MOST_AT_ONCE,
    Amount,
    Count,
    Duration,
    Facts,
    Id,
    Measurement,
    Moment,
    Name,
    Port,
    Rank,
    Sentence,
    Stream,
    Tail,
)
from malletrain.protocol.foresight import ExpectLoss as ExpectLoss
from malletrain.protocol.interpreters import Warm as Warm
from malletrain.protocol.interpreters import WarmUp as WarmUp
from malletrain.protocol.message import Message as Message
from malletrain.protocol.payloads import Assignment as Assignment
from malletrain.protocol.payloads import Failure as Failure
from malletrain.protocol.payloads import JobSpec as JobSpec
from malletrain.protocol.payloads import MetricSample as MetricSample
from malletrain.protocol.payloads import NodeNetwork, ProbeResult, ProbeTarget
from malletrain.protocol.payloads import Notification as Notification
from malletrain.protocol.payloads import Peer as Peer
from malletrain.protocol.payloads import SoftwareEnvironment as SoftwareEnvironment
from malletrain.protocol.requests import Reply as Reply
from malletrain.protocol.requests import Request as Request
from malletrain.protocol.stacks import ShowStacks as ShowStacks
from malletrain.protocol.stacks import Stacks as Stacks
from malletrain.protocol.worth import Worth as Worth

# --- agent -> daemon ---


class Hello(Message, frozen=True):
    """First message of an agent; again when the daemon has a new boot id or asks who this is."""

    node: Name
    lease: Id
    host: Name
    pid: Count
    gpus: Rank = 0
    node_class: Name = "default"
    gone_in_s: Duration | None = None
    assignment: Assignment | None = None
    shipping: tuple[Id, ...] = ()
    """The jobs of whose logs the daemon may not have everything."""
    networks: Annotated[tuple[NodeNetwork, ...], msgspec.Meta(max_length=64)] = ()
    sick: Sentence = ""
    """Why the node is not fit for jobs; empty: it is, as far as is known."""
    warm: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] | None = None
    """Keys of interpreters, as in Warm; None: this agent warms none up."""
    again: bool = False
    """It is what was said last on this connection, because no answer has come."""
    version: Name | None = None
    """Of the agent's malletrain; None: an agent that does not say it, of an earlier version."""


class Heartbeat(Message, frozen=True):
    """The agent is alive. ``boot``: the daemon's, as believed; ``memory_bytes``: of snapshots."""

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
    """The drain is over on this node: the snapshot is safe, or there is none to take."""

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


class Sick(Message, frozen=True):
    """The node is not fit for jobs. ``broken``: the workers on it have failed already."""

    sentence: Sentence
    broken: bool = False


class Doubt(Message, frozen=True):
    """Workers of ``job`` failed here; it is looked whether by the node. ``over``: not, it seems."""

    job: Id
    over: bool = False


class Progress(Message, frozen=True):
    """Counts of one worker process since it started; ``batch``: samples of its last step. ``busy``:
    for how long it has worked itself, instead of waiting for its peers, seconds from a time of its
    own; None where that is not known.
    """

    job: Id
    generation: Count
    rank: Rank
    pid: Count
    samples: Amount
    steps: Count
    batch: Amount
    first: Moment
    last: Moment
    busy: Duration | None = None


class Mark(Message, frozen=True):
    """A point in a worker's start-up (``import``, ``restored``, ``first``, …)."""

    job: Id
    generation: Count
    rank: Rank
    name: Id
    time: Moment


class Metric(Message, frozen=True):
    """A named number of the script: its newest ``value``, and all ``points`` since (some twice)."""

    job: Id
    rank: Rank
    name: Sentence
    value: Measurement
    generation: Count = 0
    points: Annotated[tuple[MetricSample, ...], msgspec.Meta(max_length=MOST_AT_ONCE)] = ()


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
    """Bytes of the log on the node at this moment."""


class LogEnd(Message, frozen=True):
    """Nothing more of this log (``size`` bytes) is sent, though the daemon does not have it all."""

    job: Id
    generation: Count
    stream: Stream
    node: Name
    size: Count


class ProbeUp(Message, frozen=True):
    """The node listens for a trial of the network."""

    number: Count
    port: Port


class Probed(Message, frozen=True):
    """What came of a trial of the network."""

    number: Count
    results: Annotated[tuple[ProbeResult, ...], msgspec.Meta(max_length=MOST_AT_ONCE)]


class LogsShipped(Message, frozen=True):
    """No log of ``job`` is left on this node; none grows here any more."""

    job: Id


# --- daemon -> agent ---


class Welcome(Message, frozen=True):
    """Answer to Hello: the daemon's boot id and the rhythm of heartbeats."""

    boot: Id
    heartbeat_s: Duration
    log_limit_bytes: Count = 0


class WhoAreYou(Message, frozen=True):
    """The daemon does not know this agent (it restarted), or not this connection, and what it said
    over the one before may be lost: send Hello.
    """

    boot: Id


class Alive(Message, frozen=True):
    """Answer to Heartbeat."""

    boot: Id


class Assign(Message, frozen=True):
    """Start the launcher of this job (idempotent). ``key``: its nodes' secret; ``host``: itself."""

    job: Id
    spec: JobSpec
    stop_grace_s: Duration = 5.0
    join_timeout_s: Duration = 60.0
    key: str = ""
    host: str = ""
    memory_share: Amount = 0.0
    hand_over_bytes: Amount = 0.0


class Round(Message, frozen=True):
    """Membership of the job's next round: this node is ``group_rank`` of ``group_size``.

    The node of group rank 0 gets it without ``store_host`` and answers StoreUp; the others get it
    once the store is up. For a service a round is news only: ``members`` in rank order, and nobody
    serves a store.
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


class Drain(Message, frozen=True):
    """Take a snapshot at the next step boundary and wait; ``number`` grows, 0 takes it back.
    ``heirs``: keepers of the next round's nodes; with none it goes to disk.
    """

    job: Id
    generation: int
    number: int
    timeout_s: Duration
    heirs: tuple[str, ...] = ()


class Abort(Message, frozen=True):
    """A member of round ``generation`` is lost: workers in live mode give up the step they are in
    and wait for the next round.
    """

    job: Id
    generation: int


class ProbeOpen(Message, frozen=True):
    """Listen at ``address`` for some seconds, for those that know the token; answer ProbeUp."""

    number: int
    address: str
    token: str


class ProbeTo(Message, frozen=True):
    """Connect to each target and send for ``seconds`` (0: only connect); answer Probed."""

    number: int
    token: str
    targets: tuple[ProbeTarget, ...]
    seconds: Duration = 0.0


class Release(Message, frozen=True):
    """Stop every process of ``job`` here: SIGTERM, after the grace SIGKILL; answer Released."""

    job: Id
    grace_s: Duration


class Goodbye(Message, frozen=True):
    """The lease is given back: stop everything, send the logs and exit 0."""

    reason: str = ""
    within_s: Duration = 0.0
    """How long that may take in all; 0: a moment."""


class LogAck(Message, frozen=True):
    """Everything of this log below ``offset`` is on the daemon's disk."""

    job: Id
    generation: int
    stream: str
    node: str
    offset: int


# --- clients ---


class Error(Message, frozen=True):
    """Whatever was sent could not be used; nothing was changed."""

    sentence: str


AgentMessage = (
    Hello
    | Heartbeat
    | Warm
    | Phase
    | StoreUp
    | Drained
    | Worth
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
)
LauncherMessage = Phase | StoreUp | Drained | Worth
"""What a launcher tells its agent."""
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
    | ShowStacks
    | ProbeOpen
    | ProbeTo
    | Release
    | Goodbye
    | LogAck
    | Reply
    | Error
)
AnyMessage = AgentMessage | DaemonMessage | Request
