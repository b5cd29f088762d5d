"""The rows of the database as frozen dataclasses, one class per table, and their encoding.

Decides which columns are JSON, and how invalid text is stored. :mod:`malletrain.store.schema` has
the tables. (A class that SQLAlchemy maps cannot be frozen, and belongs to a session.)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from malletrain.protocol.messages import boot_name


@dataclass(frozen=True)
class JobRow:
    """One malleable job."""

    id: str
    """Id, such as ``j1``."""
    name: str
    """Name, chosen by the owner."""
    owner: str
    """User who submitted it."""
    spec: str
    """JSON text of the submitted specification."""
    state: str
    """A :class:`malletrain.core.events.JobState`."""
    reason: str = ""
    """Why it is in this state, as a sentence."""
    submitted: float = 0.0
    """Time of its submission."""
    started: float | None = None
    """Time at which it first had nodes; None before."""
    ended: float | None = None
    """Time of its end; None before."""
    generation: int = 0
    """Number of its last round."""
    planned_nodes: tuple[str, ...] = ()
    """Its nodes in the last plan."""
    members: tuple[str, ...] = ()
    """Nodes of its last round."""
    tries: int = 0
    """Number of failures of its workers that still count."""
    last_broke: float | None = None
    """Time of the last of these failures."""
    samples: float = 0.0
    """Samples processed so far, over all its restarts."""
    samples_before: float = 0.0
    """Samples processed before its last round."""
    last_progress: float | None = None
    """Time of its last reported sample; None before the first."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Name → last value of each reported metric."""
    notices: tuple[str, ...] = ()
    """Sentences for its owner, oldest first."""
    snapshot: Mapping[str, Any] = field(default_factory=dict)
    """Location of its last snapshot, and the number of samples at it."""
    failure: str = ""
    """Its last failure: a sentence, and the last lines of the rank that failed first."""
    account: str = ""
    """Account of its owner at its submission."""
    values_until: float | None = None
    """Time at which the values of nodes for a service lapse; None if they do not."""
    lasting_values: Mapping[str, float] = field(default_factory=dict)
    """Number of nodes → value that applies from then on; empty if they do not lapse."""


@dataclass(frozen=True)
class LeaseRow:
    """One lease of one node."""

    id: str
    """Id, such as ``l1``."""
    node: str
    """Name of the node."""
    state: str
    """A :class:`malletrain.protocol.event_kinds.LeaseStatus`."""
    scheduler_id: str = ""
    """Id of its job in the main scheduler."""
    public_key: str = ""
    """Public CURVE key of its agent, z85 text."""
    node_class: str = "default"
    """Class of the node."""
    owner: str = ""
    """User as whom it was submitted; empty for the daemon's own user."""
    requested: float = 0.0
    """Time of the request."""
    started: float | None = None
    """Time at which it started to run; None before."""
    ended: float | None = None
    """Time of its end; None before."""
    end_reason: str = ""
    """Why it ends or has ended; empty before."""
    account: str = ""
    """Account of its owner at its request."""


@dataclass(frozen=True)
class ServiceStartsRow:
    """Measured starts of the processes of a service on one class of nodes."""

    job: str
    """Id of the job."""
    node_class: str
    """Class of the nodes."""
    durations: tuple[float, ...]
    """Times from the start of a process until it was ready, oldest first, seconds."""


@dataclass(frozen=True)
class ServiceRow:
    """Service that a party has had of its share (:class:`malletrain.core.shares.PartyService`)."""

    party: str
    """Name of the party."""
    served: float
    """Weighted node-seconds that its jobs had."""
    due: float
    """Weighted node-seconds that were its share."""
    seconds: float
    """Time in which something was due to it."""
    updated: float
    """Time at which the row was written."""


@dataclass(frozen=True)
class EventRow:
    """One line of the audit log."""

    time: float
    """Time of the event."""
    kind: str
    """An :class:`malletrain.protocol.event_kinds.EventKind`."""
    job: str = ""
    """Id of the job; empty if it is not about a job."""
    node: str = ""
    """Name of the node; empty if it is not about a node."""
    lease: str = ""
    """Id of the lease; empty if it is not about a lease."""
    generation: int | None = None
    """Number of the round; None if it is not about a round."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Values for programs, and the sentence for users."""
    seq: int = 0
    """Number, assigned by the database (0 if not stored yet). Numbers increase and are never
    reused.
    """


@dataclass(frozen=True)
class ObservationRow:
    """Throughput of a job, observed at one scale."""

    job: str
    """Id of the job."""
    nodes: int
    """Number of nodes."""
    batch: float
    """Global batch size, samples."""
    rate: float
    """Samples/s."""
    spread: float
    """Half width of the interval around ``rate``, samples/s."""
    seconds: float
    """Duration of the measurement."""
    samples: float
    """Samples processed in ``seconds``."""
    time: float
    """Time of the measurement."""
    step_times: Mapping[str, Any] = field(default_factory=dict)
    """Where the time of its steps went: ``shares`` of a step by part, and ``ranks`` with the rank,
    the node and the seconds of each part of a step; empty if not measured.
    """


STARTED = "start"
"""Kind of a change from no nodes: a start, which views do not count as a rescale."""


@dataclass(frozen=True)
class RescaleRow:
    """One finished change of scale, as :mod:`malletrain.daemon.jobs.monitor` measures it."""

    job: str
    """Id of the job."""
    generation: int
    """Number of the round that it led to."""
    kind: str
    """``start``, ``up``, ``down``, ``loss`` or ``same``."""
    from_nodes: int
    """Number of nodes before it."""
    to_nodes: int
    """Number of nodes after it."""
    began: float
    """Time of the decision."""
    ended: float
    """Time of the first sample after it."""
    cost_s: float
    """Time from the last sample before it (for ``start``: from the decision) to the first sample
    after it, seconds.
    """
    phases: Mapping[str, float] = field(default_factory=dict)
    """Name of a phase → its duration, seconds, in order: ``detect`` (a loss is detected and a plan
    computed), ``warm`` (joiners start; the others train), ``drain`` (snapshot), ``rendezvous``,
    ``start`` (processes), ``import``, ``build`` (model), ``state`` (load), ``first`` (to the first
    sample).
    """


@dataclass(frozen=True)
class ProfileRow:
    """Scaling of one job."""

    job: str
    """Id of the job."""
    key: str = ""
    """Its profile key: jobs with the same key scale alike."""
    node_class: str = "default"
    """Class of the nodes for which the key is."""
    learned: Mapping[str, Any] = field(default_factory=dict)
    """A :class:`malletrain.core.scaling_model.ScalingModel` as a mapping; empty before the first
    measurement.
    """
    waits: str = ""
    """Why its profile does not begin."""
    interruptions: tuple[Mapping[str, Any], ...] = ()
    """Times at which it gave nodes to a profile, each ``{"time", "by", "before", "nodes"}``."""
    parameters: float | None = None
    """Number of parameters of its model, as reported by its script; None if unknown."""
    flops: float | None = None
    """FLOPs per sample, forward and backward, as reported by its script; None if unknown."""


@dataclass(frozen=True)
class MetricRow:
    """One stored value of a metric of a job."""

    job: str
    """Id of the job."""
    name: str
    """Name of the metric."""
    number: int
    """Number of values that were reported before it."""
    time: float
    """Time of the report."""
    value: float
    """The value."""
    step: int | None
    """Step of the script; None if it states none."""
    samples: float
    """Samples that the job had processed."""
    nodes: int
    """Number of the job's nodes at that time."""


@dataclass(frozen=True)
class TaskRow:
    """One task of a farm."""

    job: str
    """Id of the job."""
    number: int
    """Its number in the farm, from 0."""
    arguments: tuple[str, ...]
    """Its values, one for each column of the farm."""
    state: str
    """A :class:`malletrain.core.task_queue.TaskState`."""
    tries: int
    """Number of failures so far."""
    attempt: int
    """Number of times that it was handed out."""
    node: str
    """Where it runs or ran last; empty before its first attempt."""
    exit_code: int | None
    """Exit code of its last try; negative: the number of a signal. None before."""
    started: float | None
    """When its last attempt was handed out, or started."""
    ended: float | None
    """When its last try ended."""
    tail: str
    """End of the output of its last try, if that failed, or why it failed."""


@dataclass(frozen=True)
class CurveRow:
    """Newest curve of a kind of jobs, for later jobs of that kind."""

    key: str
    """Profile key of the kind of jobs."""
    node_class: str
    """Class of the nodes."""
    processes: int
    """Number of processes per node."""
    learned: Mapping[str, Any]
    """A :class:`malletrain.core.scaling_model.ScalingModel` as a mapping."""
    job: str
    """Job from which it is."""
    updated: float
    """Time at which the row was written."""
    parameters: float | None = None
    """Number of parameters of the job's model; None if unknown."""
    flops: float | None = None
    """FLOPs per sample of the job's model; None if unknown."""


@dataclass(frozen=True)
class LayoutSearchRow:
    """How one job looks for the best layout of its nodes."""

    job: str
    """Id of the job."""
    node_class: str
    """Class of the nodes."""
    max_processes: int
    """Maximum number of processes on a node in any of its layouts."""
    search: Mapping[str, Any]
    """A :class:`jpa.layout.LayoutSearch` as a mapping."""
    layout: Mapping[str, int]
    """Layout of its newest round: ``processes``, ``threads``, ``loader_workers``."""
    facts: Mapping[str, Any]
    """What its script has reported: ``saves``, ``global_batch``, ``own_batches``."""
    source: str = ""
    """Job that found the layout with which it began; empty if it began with the default."""


@dataclass(frozen=True)
class LayoutRow:
    """Best layout of a node for a kind of jobs, for later jobs of that kind."""

    key: str
    """Profile key of the kind of jobs."""
    node_class: str
    """Class of the nodes."""
    cores: int
    """Number of cores of a node for which it was found."""
    layout: Mapping[str, int]
    """The layout: ``processes``, ``threads``, ``loader_workers``."""
    facts: Mapping[str, Any]
    """What the script of the job has reported."""
    job: str
    """Job that found it."""
    updated: float
    """Time at which the row was written."""


@dataclass(frozen=True)
class GoalRow:
    """Deadline, budget and work of a job, and their standing."""

    job: str
    """Id of the job."""
    deadline: float | None = None
    """Time by which the job is to complete; None if there is none."""
    budget_s: float | None = None
    """Maximum charged node-seconds; None if there is no budget."""
    work: float | None = None
    """Total number of samples, as counted in the job's row; None if unknown."""
    stated: int = 0
    """1 if the owner stated the work; 0 if the sampler did, or it is unknown."""
    charged_s: float = 0.0
    """Node-seconds charged up to ``charged_at``."""
    charged_at: float | None = None
    """Time up to which ``charged_s`` counts; None before the first charge."""
    standing: str = ""
    """A :class:`malletrain.core.goals.GoalStanding`; empty if not known yet."""


@dataclass(frozen=True)
class NodeSpanRow:
    """Mean number of nodes of a class that were available for jobs in one span."""

    began: float
    """Start of the span."""
    node_class: str
    """Class of the nodes."""
    nodes: float
    """Mean number of nodes."""


@dataclass(frozen=True)
class Boot:
    """One start of the daemon. ``daemon_id``: id of the database. ``number``: number of the start,
    from 1.
    """

    daemon_id: str
    number: int

    def __str__(self) -> str:
        return boot_name(self.daemon_id, self.number)


@dataclass(frozen=True)
class Totals:
    """Counts and sums over everything stored."""

    jobs: Mapping[str, int]
    """State → number of jobs."""
    rescales: Mapping[str, int]
    """Kind → number of rescales."""
    events: Mapping[str, int]
    """Kind → number of events."""
    samples: float
    """Samples processed by all jobs."""


Row = TypeVar(
    "Row",
    JobRow,
    LeaseRow,
    EventRow,
    ObservationRow,
    RescaleRow,
    ProfileRow,
    CurveRow,
    LayoutSearchRow,
    LayoutRow,
    MetricRow,
    GoalRow,
    NodeSpanRow,
    ServiceRow,
    ServiceStartsRow,
    TaskRow,
)

Named = TypeVar("Named", JobRow, LeaseRow)
"""Rows with an id."""

_JSON = frozenset(
    {
        "planned_nodes",
        "members",
        "metrics",
        "notices",
        "snapshot",
        "data",
        "phases",
        "step_times",
        "learned",
        "interruptions",
        "arguments",
        "search",
        "layout",
        "facts",
        "lasting_values",
        "durations",
    }
)
NAN = -sys.float_info.max
"""Stored instead of NaN in the column of a metric's values, because SQLite would store NULL."""
_TUPLES = frozenset(
    {"planned_nodes", "members", "notices", "interruptions", "arguments", "durations"}
)


def is_json(column: str) -> bool:
    """Return whether a column has JSON, and not text that may look like it."""
    return column in _JSON or column == "spec"


def encode(row: Any) -> dict[str, Any]:
    """Return the columns of ``row``."""
    return encode_values({name: getattr(row, name) for name in field_names(type(row))})


def encode_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of some of a row's fields."""
    return {name: _encode_value(name, value) for name, value in values.items()}


def stored_text(text: str) -> str:
    """Return the text as it is stored. Columns may have output of jobs, so invalid characters are
    replaced; otherwise they would make the transaction fail.
    """
    clean = str(text).encode("utf-8", "replace").decode()
    return clean.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _encode_value(name: str, value: Any) -> Any:
    if name == "metrics":
        value = {key: v if math.isfinite(v) else str(v) for key, v in value.items()}
    if name == "value" and math.isnan(value):
        return NAN
    if name in _JSON:
        return json.dumps(list(value) if name in _TUPLES else dict(value), separators=(",", ":"))
    if isinstance(value, str):
        return stored_text(value)
    return value


def decode(kind: type[Row], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Row]:
    """Decode rows of the database.

    Args:
        kind: class of the rows.
        columns: names of the columns that were read; those without a field are ignored.
        rows: values of each row, in the order of the columns.

    """
    names = field_names(kind)
    positions = [(columns.index(name), _decoder(name)) for name in names]
    return [
        kind(
            *[
                row[index] if decoder is None else decoder(row[index])
                for index, decoder in positions
            ]
        )
        for row in rows
    ]


def field_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of a class's fields, in the order of its constructor."""
    return tuple(field.name for field in fields(kind))


def _decoder(name: str) -> Callable[[Any], Any] | None:
    """Return the function that decodes a column; None if its value is stored as it is."""
    if name == "metrics":
        return lambda text: {key: float(v) for key, v in json.loads(text).items()}
    if name == "value":
        return lambda value: math.nan if value == NAN else value
    if name in _TUPLES:
        return lambda text: tuple(json.loads(text))
    return json.loads if name in _JSON else None


def decode_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return some of a row's fields, decoded from their columns."""
    return {
        name: value if (read := _decoder(name)) is None else read(value)
        for name, value in columns.items()
    }
