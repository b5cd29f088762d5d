"""Datagrams from a worker process to the agent on its node. The opposite direction is
:mod:`malletrain.protocol.flags`.

Decides the encoding and checks what arrives. It does not decide when anything is
sent (:mod:`malletrain.training.report`, :mod:`malletrain.training.snapshot`) nor what the agent
does with it. Standard library only, because training scripts import it.

Worker to agent: one Unix datagram socket per agent (path in ``MALLETRAIN_SOCKET``, under 108
bytes). Every datagram is one JSON object under 4 KiB with ``v`` (version), ``kind``, ``job``,
``generation`` (the round), ``rank``, ``pid`` and the fields of its kind. Datagrams may be lost if
the agent is slow or gone. Therefore counts are cumulative and every datagram is self-contained.

Times are seconds since the epoch (CLOCK_REALTIME); ``seconds`` is a duration.
"""

from __future__ import annotations

import errno
import json
import math
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

VERSION = 1
MAX_DATAGRAM_BYTES = 4096
MAX_BACKLOG = 1024
"""Maximum number of datagrams that wait for an agent; beyond it the oldest are dropped."""


@dataclass(frozen=True)
class Sender:
    """The worker process that sent a datagram. ``generation`` is the round it was started for, 0
    outside any.
    """

    job: str
    generation: int
    rank: int
    pid: int


@dataclass(frozen=True)
class WorkerProgress:
    """Cumulative counts of one process: samples and steps since it started, samples of its last
    step, and the times of its first and last report. ``unsent`` counts datagrams that did not reach
    the agent. ``busy``: cumulative time in which it worked instead of waiting for its peers,
    seconds since an arbitrary start; None if not known.

    ``data``, ``exchange``, ``snapshot``: cumulative time of its steps up to ``last`` in which it
    waited for data, was in exchanges with other ranks, and took snapshots, seconds since an
    arbitrary start; None if not measured. An agent that accepts them sets
    ``MALLETRAIN_STEP_TIMES``.
    """

    sender: Sender
    samples: float
    steps: int
    batch: float
    first: float
    last: float
    unsent: int = 0
    busy: float | None = None
    data: float | None = None
    exchange: float | None = None
    snapshot: float | None = None


StepPart = Literal["data", "exchange", "snapshot"]
MEASURED_PARTS: tuple[StepPart, ...] = ("data", "exchange", "snapshot")
"""Parts of a step that a process measures, fields of WorkerProgress: waiting for data, in exchanges
with other ranks (the wait for them and the transfer), and in snapshots.
"""


@dataclass(frozen=True)
class StartupMark:
    """A point in a worker's start-up, to split the cost of a rescale into phases: ``start``
    (process created), ``import`` (malletrain imported), ``restoring`` and ``restored``
    (Snapshot.restore), ``first`` (first report), and the script's own marks.
    """

    sender: Sender
    name: str
    time: float


@dataclass(frozen=True)
class SnapshotTaken:
    """A snapshot was saved, or could not be (``saved`` false and ``sentence`` says why; sent once
    per cause).

    ``samples`` and ``steps`` are the sender's cumulative counts at that moment: progress beyond
    them is lost if it fails now. ``nodes``: number of nodes over which the snapshot is distributed;
    ``replicated``: whether other nodes have copies.
    """

    sender: Sender
    saved: bool
    path: str
    bytes: int
    seconds: float
    samples: float = 0
    steps: int = 0
    sentence: str = ""
    nodes: int = 1
    replicated: bool = False


@dataclass(frozen=True)
class Capable:
    """This worker (rank 0) checks for a drain request after every step and can take a snapshot on
    demand.
    """

    sender: Sender


@dataclass(frozen=True)
class DrainDone:
    """Drain request ``number`` is served: the snapshot is on disk, or (``saved`` false) could not
    be written. Sent repeatedly.
    """

    sender: Sender
    number: int
    saved: bool
    sentence: str = ""


MetricValue = float
"""Any number, including NaN and infinity."""
NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class ScriptMetric:
    """A named number of the script, such as a test accuracy. ``samples``: the sender's cumulative
    count at that moment; ``step``: the script's own count. A value that is NaN or infinite is the
    text "nan", "inf" or "-inf" in the datagram, because JSON has no number for it.
    """

    sender: Sender
    name: str
    value: MetricValue
    time: float = 0.0
    samples: float = 0
    step: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model: number of parameters, floating point operations per sample (forward
    and backward). None: unknown.
    """

    sender: Sender
    parameters: int | None = None
    flops_per_sample: float | None = None


@dataclass(frozen=True)
class BatchFacts:
    """How the training's samples are shared by the ranks. ``global_batch``: samples per step over
    all ranks, the same at any number of ranks; None if each rank has a batch of its own.

    ``base_batch``: the script's global batch, to which ``global_batch`` is equal until it changes.
    ``most``: largest global batch if it follows the gradient noise; ``noise_scale``: the noise
    scale, samples. None: unknown.
    """

    sender: Sender
    global_batch: int | None = None
    base_batch: int | None = None
    most: int | None = None
    noise_scale: float | None = None


@dataclass(frozen=True)
class WorkLeft:
    """Number of samples until the end of the training, over all ranks, from the sampler."""

    sender: Sender
    samples: float


@dataclass(frozen=True)
class BetweenEpochs:
    """The worker is in the code that follows the steps of an epoch: a planned change of nodes waits
    for that. ``entered``: False when it has left it.
    """

    sender: Sender
    entered: bool


@dataclass(frozen=True)
class DataCacheFacts:
    """Cumulative counts of the reads of one process and its loader workers through a data cache.

    ``node_hits``, ``peer_hits``, ``source_reads``: samples found in this node's memory, in that of
    another node, and read from the data set; ``unpacked``: those of the last that cannot be cached.
    ``hit_bytes``, ``source_bytes``: their sizes, as they are packed. ``samples``: length of the
    data set; ``present``: number of them in this node's memory. ``data_bytes``: estimated size of
    the data set; ``memory_bytes``: this node's memory for it; ``node_bytes``: all memory of this
    node that the job can use. ``coverage``: part of the data that an epoch reads; None if unknown.
    ``source_us``: time in which the process and its loader workers, side by side, have read from
    the data set, microseconds.
    """

    sender: Sender
    name: str
    node: str
    node_hits: int
    peer_hits: int
    source_reads: int
    hit_bytes: int
    source_bytes: int
    unpacked: int
    samples: int
    present: int
    data_bytes: int
    memory_bytes: int
    node_bytes: int
    coverage: float | None = None
    source_us: int = 0


@dataclass(frozen=True)
class OwnerNotice:
    """A sentence for the job's owner."""

    sender: Sender
    sentence: str


Datagram = (
    WorkerProgress
    | StartupMark
    | SnapshotTaken
    | Capable
    | DrainDone
    | ScriptMetric
    | ModelFacts
    | BatchFacts
    | WorkLeft
    | BetweenEpochs
    | DataCacheFacts
    | OwnerNotice
)

KINDS: dict[str, type[Any]] = {
    "progress": WorkerProgress,
    "mark": StartupMark,
    "snapshot": SnapshotTaken,
    "capable": Capable,
    "drained": DrainDone,
    "metric": ScriptMetric,
    "profile": ModelFacts,
    "batch": BatchFacts,
    "work": WorkLeft,
    "epoch": BetweenEpochs,
    "data": DataCacheFacts,
    "notice": OwnerNotice,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    )  # neither infinite nor NaN


def _is_metric_value(value: object) -> bool:
    return _is_number(value) or value in NOT_FINITE


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


# Valid values of a field, by its annotation: (test, description of valid values).
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (_is_count, "a whole number from 0"),
    "float": (_is_number, "a finite number"),
    "MetricValue": (_is_metric_value, 'a number, or one of the texts "nan", "inf" and "-inf"'),
    "int | None": (
        lambda value: value is None or _is_count(value),
        "a whole number from 0, or null",
    ),
    "float | None": (lambda value: value is None or _is_number(value), "a finite number, or null"),
}
# A metric may be below zero (a log-likelihood); the counts, times and durations of the other kinds
# may not.
_MAY_BE_NEGATIVE = {(ScriptMetric, "value")}


def encode(message: Datagram) -> bytes:
    """Return one datagram. Texts that would make it longer than MAX_DATAGRAM_BYTES are shortened
    in the middle.
    """
    body: dict[str, Any] = {
        "v": VERSION,
        "kind": _KIND_OF[type(message)],
        **message.sender.__dict__,
    }
    body.update(
        (name, value)
        for name, value in message.__dict__.items()
        if name != "sender" and not (value is None and name in MEASURED_PARTS)
    )
    if isinstance(message, ScriptMetric) and not math.isfinite(message.value):
        body["value"] = str(float(message.value))
    limit = 1024
    while True:
        data = json.dumps(body, separators=(",", ":")).encode()
        if len(data) < MAX_DATAGRAM_BYTES:
            return data
        for name, value in body.items():
            if isinstance(value, str) and len(value) > limit:
                body[name] = value[: limit // 2] + "…" + value[-limit // 2 :]
        limit //= 2


def progress_encoder(sender: Sender) -> Callable[..., bytes]:
    """Return a function like :func:`encode` for WorkerProgress, several times faster, because it
    runs in the training loop."""
    head = (
        encode(WorkerProgress(sender, 0, 0, 0, 0, 0))
        .decode()
        .partition('"samples"')[0]
        .replace("%", "%%")
    )
    template = (
        head + '"samples":%r,"steps":%d,"batch":%r,"first":%r,"last":%r,"unsent":%d,"busy":%s'
    )

    def encode_progress(
        samples: float,
        steps: int,
        batch: float,
        first: float,
        last: float,
        unsent: int,
        busy: float | None = None,
        parts: Sequence[float | None] = (),
    ) -> bytes:
        worked = "null" if busy is None else repr(busy)
        measured = "".join(
            f',"{name}":{seconds!r}'
            for name, seconds in zip(MEASURED_PARTS, parts, strict=False)
            if seconds is not None
        )
        counts = template % (samples, steps, batch, first, last, unsent, worked)
        return f"{counts}{measured}}}".encode()

    return encode_progress


def decode_datagram(data: bytes) -> Datagram:
    """Check one datagram and return its dataclass.

    Raises:
        ValueError: the datagram is not of this protocol; the message says what is wrong and quotes
            only a short piece of the data.
    """
    if len(data) > MAX_DATAGRAM_BYTES:
        raise ValueError(
            f"A datagram of {len(data)} bytes; a worker sends at most {MAX_DATAGRAM_BYTES}."
        )
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"A datagram that is not JSON: {data[:60]!r}.") from None
    if not isinstance(body, dict):
        raise ValueError(f"A datagram that is not a JSON object: {data[:60]!r}.")
    version = body.pop("v", None)
    if version != VERSION:
        raise ValueError(
            f"A datagram of version {str(version)[:20]}, but this agent understands version "
            f"{VERSION}. "
            "Install the same release of malletrain for training scripts and agents."
        )
    kind = body.pop("kind", None)
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(
            f"A datagram of unknown kind {str(kind)[:40]!r}; known are {', '.join(KINDS)}."
        )
    sender = _checked(
        Sender,
        kind,
        {name: body.pop(name) for name in ("job", "generation", "rank", "pid") if name in body},
    )
    message: Datagram = _checked(cls, kind, body, sender)
    return message


def _shown(value: object) -> str:
    try:
        return repr(str(value)[:40])
    except ValueError:  # python refuses to print whole numbers of thousands of digits
        return "a huge number"


def _checked(cls: type[Any], kind: str, body: dict[str, Any], sender: Sender | None = None) -> Any:
    unknown = sorted(set(body) - {field.name for field in fields(cls) if field.name != "sender"})
    if unknown:
        raise ValueError(f"A {kind} datagram with the unknown field {unknown[0][:40]!r}.")
    for field in fields(cls):
        if field.name == "sender":
            continue
        if field.name not in body:
            if field.default is field.default_factory:  # both MISSING: the field has no default
                raise ValueError(f"A {kind} datagram without the field {field.name!r}.")
            continue
        value = body[field.name]
        test, expected = _CHECKS[str(field.type)]
        if not test(value):
            raise ValueError(
                f"A {kind} datagram whose {field.name} is {_shown(value)}; it must be {expected}."
            )
        if _is_number(value) and value < 0 and (cls, field.name) not in _MAY_BE_NEGATIVE:
            raise ValueError(
                f"A {kind} datagram whose {field.name} is {_shown(value)}; it must not be negative."
            )
        if field.type == "MetricValue":
            body[field.name] = float(value)
    return cls(**body) if sender is None else cls(sender, **body)


class Outbox:
    """The worker's end of the socket: sends without blocking and never raises.

    A datagram that the agent does not accept is dropped, or kept for the next attempt if no later
    datagram repeats its content. ``unsent`` counts the failed attempts.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.unsent = 0
        self._backlog: deque[bytes] = deque(maxlen=MAX_BACKLOG)
        self._socket: socket.socket | None = None

    def send(self, data: bytes, keep: bool = False) -> bool:
        """Send ``data``, after the kept datagrams. If that fails and ``keep`` is true, keep it for
        the next attempt. Return whether the agent's socket accepted it."""
        if (not self._backlog or self.retry()) and self._send_now(data):
            return True
        self.unsent += 1
        if keep:
            self._backlog.append(data)
        return False

    def retry(self) -> bool:
        """Send the kept datagrams, oldest first. Return whether none is left."""
        while self._backlog and self._send_now(self._backlog[0]):
            self._backlog.popleft()
        return not self._backlog

    def agent_is_slow(self) -> bool:
        """Return whether the last attempt failed only because the agent's queue is full, so that a
        short wait may help. Retries the kept datagrams first.
        """
        self.retry()
        return self._last_errno in (errno.EAGAIN, errno.ENOBUFS)

    _last_errno: int | None = None

    def _send_now(self, data: bytes) -> bool:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            self._socket.sendto(data, self.path)
        # no agent (ENOENT, ECONNREFUSED), a full queue (EAGAIN), a path too long for a socket
        except OSError as error:
            self._last_errno = error.errno
            return False
        self._last_errno = None
        return True

    def close(self) -> None:
        """Close the socket; a later send opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
