"""The account of the idle node-seconds of a demo: offered, harvested, lost. Pure: histories in,
numbers out, and the result as one object for JSON and one table for users.

Definitions, for one node and one instant between the begin and the end of the account:

* **offered**: the main scheduler does not use the node, according to its own history. The grace
  time of a preemption is not offered.
* **held** by a job: the current plan assigns the node to the job, and the node is available.
* **training**: the node is a member of a round of a job, and the instant lies between the first
  sample of that round and its last one.
* **harvested**: offered and training.
* **lost to preemption**: offered, held, not training, and the next round to process a sample of
  this job (or, if there is none, the suspension) lost a node that the main scheduler took.
* **lost to rescaling**: offered, held, not training, for any other reason: the first start,
  growing, shrinking, moving, ending; also the time in which a node warms up for a job that
  meanwhile trains without it.
* **not used**: the rest of what was offered, ``leased`` (the agent is there or coming up, no job
  has the node) or ``not leased``.

So offered = harvested + lost to rescaling + lost to preemption + leased and not used + not leased.

:func:`assignments_of` and :func:`rounds_of` convert the daemon's events and job details to the
assignments and rounds that :func:`account` adds up. A set of times is a sorted tuple of disjoint,
half-open intervals ``(start, end)``; :func:`normal`, :func:`both`, :func:`without` and
:func:`length` compute with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, JobDetail
from malletrain.render.columns import Column, FittedTable
from malletrain.render.tables import state
from malletrain.render.text import count, plain
from malletrain.render.timeline import (
    IDLE_SPAN,
    JOB_SPAN,
    LEASED_SPAN,
    PAUSE_SPAN,
    PreemptionMark,
    Span,
    ThroughputSeries,
)

GAVE = (EventKind.JOB_STARTED, EventKind.JOB_RESCALED)
TOOK = (
    EventKind.JOB_SUSPENDED,
    EventKind.JOB_COMPLETED,
    EventKind.JOB_FAILED,
    EventKind.JOB_CANCELLED,
)
LOST = EventKind.NODE_LOST
FORMED = EventKind.ROUND_FORMED
LATE_S = 1.0


def assignments_of(
    events: Iterable[EventView], end: float, names: Mapping[str, str]
) -> list[AssignmentSpan]:
    """Return which job had which node by the plan, until ``end``. ``names``: job id → name."""
    since: dict[str, dict[str, float]] = {}
    spans: list[AssignmentSpan] = []

    def change(job: str, nodes: set[str], moment: float) -> None:
        now = since.setdefault(job, {})
        for node in now.keys() - nodes:
            spans.append(AssignmentSpan(node, names.get(job, job), (now.pop(node), moment)))
        for node in nodes - now.keys():
            now[node] = moment

    for e in events:
        if e.kind in GAVE:
            change(e.job, set(e.data.get("nodes", ())), e.time)
        elif e.kind in TOOK:
            change(e.job, set(), e.time)
        elif e.kind == LOST:
            for job, nodes in since.items():
                if e.node in nodes:
                    change(job, nodes.keys() - {e.node}, e.time)
    for job in list(since):
        change(job, set(), end)
    return spans


def throughput(
    job: str,
    counts: Sequence[tuple[float, float]],
    unknown: Sequence[tuple[float, float]] = (),
    window_s: float = 2.0,
) -> ThroughputSeries:
    """Return the samples/s of one job from (time, samples) observations: from each observation on,
    the slope to the next one, over at least ``window_s`` seconds. Observations within ``unknown``
    (begin, end) are ignored, because a restarted daemon does not know the newest samples yet.
    """
    looks: list[tuple[float, float]] = []
    for moment, samples in counts:
        if not any(begin <= moment <= end for begin, end in unknown):
            looks.append((moment, max(samples, looks[-1][1] if looks else 0.0)))
    rates, start = [], 0
    for k in range(len(looks) - 1):
        moment, samples = looks[k + 1]
        while start < k and looks[start][0] < moment - window_s:
            start += 1
        elapsed = moment - looks[start][0]
        rates.append((samples - looks[start][1]) / elapsed if elapsed > 0 else 0.0)
    return ThroughputSeries(
        job, tuple(moment for moment, _ in looks), (*rates, 0.0) if looks else ()
    )


def rounds_of(
    events: Sequence[EventView],
    details: Sequence[JobDetail],
    counts: Mapping[str, Sequence[tuple[float, float]]],
    end: float,
) -> list[RoundSpan]:
    """Return every round that processed samples, with its first and last sample.

    The first sample of a round is the end of its rescale; the last sample of the previous round is
    ``cost_s`` earlier. The last round of a job lasts until the job stops, or until ``end``. A round
    whose first sample came while the daemon was down has no measured rescale: it begins when
    ``counts`` (job name → (time, samples) observations) first shows more samples than before.
    """
    formed: dict[str, list[tuple[float, int, tuple[str, ...]]]] = {}
    stops: dict[str, list[float]] = {}
    for e in events:
        if e.kind == FORMED:
            formed.setdefault(e.job, []).append(
                (e.time, int(e.data["generation"]), tuple(e.data["members"]))
            )
        elif e.kind in TOOK:
            stops.setdefault(e.job, []).append(e.time)
    spans = []
    for detail in details:
        job, name = detail.job.id, detail.job.name
        measured = {
            s.generation: (s.ended, s.cost_s or 0.0) for s in detail.rescales if s.ended is not None
        }
        formations = formed.get(job, [])
        begun: list[tuple[float, float, int, tuple[str, ...]]] = []
        formings = [moment for moment, _, _ in formations]
        for k, (moment, generation, members) in enumerate(formations):
            limit = formations[k + 1][0] if k + 1 < len(formations) else end
            if generation in measured:
                begun.append((*measured[generation], generation, members))
            elif (seen := _grew(counts.get(name, ()), moment, limit)) is not None:
                begun.append((seen, seen - moment, generation, members))
        for k, (first, _, generation, members) in enumerate(begun):
            # When a new round is formed, the previous one is over in any case.
            limits = [t for t in (*stops.get(job, ()), *formings) if t > first] + [end]
            if k + 1 < len(begun):
                limits.append(begun[k + 1][0] - begun[k + 1][1])
            spans.append(RoundSpan(name, generation, members, first, max(first, min(limits))))
    return spans


def _grew(counts: Sequence[tuple[float, float]], since: float, until: float) -> float | None:
    """Return the time of the first observation with more samples than shortly after ``since``,
    because the last samples of the previous round arrive late.
    """
    before = max((samples for moment, samples in counts if moment <= since + LATE_S), default=0.0)
    return next(
        (moment for moment, samples in counts if since < moment < until and samples > before), None
    )


Interval = tuple[float, float]
Intervals = tuple[Interval, ...]


def normal(pieces: Iterable[Interval]) -> Intervals:
    """Return the union of ``pieces`` in any order; empty ones are removed, adjacent ones
    merged."""
    union: list[Interval] = []
    for start, end in sorted(p for p in pieces if p[1] > p[0]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return tuple(union)


def both(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in ``a`` and in ``b``."""
    common, i, k = [], 0, 0
    while i < len(a) and k < len(b):
        start, end = max(a[i][0], b[k][0]), min(a[i][1], b[k][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[k][1]:
            i += 1
        else:
            k += 1
    return tuple(common)


def without(a: Intervals, b: Intervals) -> Intervals:
    """Return the times in ``a`` and not in ``b``."""
    rest = []
    for start, end in a:
        for s, e in b:
            if e <= start or s >= end:
                continue
            if s > start:
                rest.append((start, s))
            start = max(start, e)
        if start < end:
            rest.append((start, end))
    return tuple(rest)


def length(a: Intervals) -> float:
    """Return the total time in ``a``."""
    return sum(end - start for start, end in a)


@dataclass(frozen=True)
class DemoMachine:
    """History of the main scheduler: for each node the times at which it was offered and leased,
    and the preemptions of leases.
    """

    offered: Mapping[str, Intervals]
    leased: Mapping[str, Intervals]
    preemptions: tuple[PreemptionMark, ...]


@dataclass(frozen=True)
class RoundSpan:
    """One membership of one job that processed samples from ``first`` to ``last`` (epoch
    seconds).
    """

    job: str
    generation: int
    members: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True)
class AssignmentSpan:
    """The plan assigns ``node`` to ``job`` in ``interval``."""

    node: str
    job: str
    interval: Interval


@dataclass(frozen=True)
class Account:
    """Node-seconds; see the module. ``spans``: the same data for the timeline."""

    offered: float
    harvested: float
    lost_to_rescaling: float
    lost_to_preemption: float
    leased_unused: float
    not_leased: float
    spans: tuple[Span, ...] = field(default=(), repr=False)


def machine_of(rows: Iterable[Mapping[str, str]], begin: float, end: float) -> DemoMachine:
    """Return the history of the embedded cluster (rows of its ``history.csv``: time, node, event,
    lease, reason) between ``begin`` and ``end``.

    From ``idle`` and ``leased`` on, the node is offered; from ``preempted`` and ``busy`` on, it is
    not.
    """
    idle_since: dict[str, float] = {}
    leases: dict[str, tuple[str, float]] = {}
    offered: dict[str, list[Interval]] = {}
    leased: dict[str, list[Interval]] = {}
    marks: list[PreemptionMark] = []
    for row in rows:
        moment, node, event = float(row["time"]), row["node"], row["event"]
        if moment >= end:
            break
        if not node:
            continue
        offered.setdefault(node, [])
        leased.setdefault(node, [])
        if event in ("idle", "leased"):
            idle_since.setdefault(node, moment)
        elif event in ("preempted", "busy") and node in idle_since:
            offered[node].append((max(begin, idle_since.pop(node)), moment))
        if event == "preempted" and moment >= begin:
            marks.append(PreemptionMark(node, moment, notice="without" not in row["reason"]))
        if event == "leased":
            leases[row["lease"]] = (node, moment)
        elif event == "ended" and row["lease"] in leases:
            _, since = leases.pop(row["lease"])
            leased[node].append((max(begin, since), moment))
    for node, since in idle_since.items():
        offered[node].append((max(begin, since), end))
    for node, since in leases.values():
        leased[node].append((max(begin, since), end))
    return DemoMachine(
        {node: normal(pieces) for node, pieces in offered.items()},
        {node: normal(pieces) for node, pieces in leased.items()},
        tuple(marks),
    )


def account(
    machine: DemoMachine, rounds: Sequence[RoundSpan], assignments: Sequence[AssignmentSpan]
) -> Account:
    """Return the account; the module docstring defines each number."""
    causes = _Causes(machine, rounds)
    nodes = sorted(machine.offered)
    spans: list[Span] = []
    sums = dict.fromkeys(
        (
            "offered",
            "harvested",
            "lost_to_rescaling",
            "lost_to_preemption",
            "leased_unused",
            "not_leased",
        ),
        0.0,
    )
    for node in nodes:
        offered, leased = machine.offered[node], machine.leased.get(node, ())
        spans += [Span(node, *piece, IDLE_SPAN) for piece in offered]
        spans += [Span(node, *piece, LEASED_SPAN) for piece in leased]
        training: Intervals = ()
        for job in sorted({r.job for r in rounds if node in r.members}):
            # A preempted node trains until the end of its lease and not until the end of its round.
            mine = both(
                normal((r.first, r.last) for r in rounds if r.job == job and node in r.members),
                leased,
            )
            spans += [Span(node, *piece, JOB_SPAN, job) for piece in mine]
            training = normal((*training, *mine))
        pauses: Intervals = ()
        for job in sorted({h.job for h in assignments if h.node == node}):
            mine = without(
                both(
                    normal(h.interval for h in assignments if h.node == node and h.job == job),
                    leased,
                ),
                normal((*training, *pauses)),
            )
            pauses = normal((*pauses, *mine))
            spans += [Span(node, *piece, PAUSE_SPAN, job) for piece in mine]
            for start, end in both(mine, offered):
                for cause, seconds in causes.split(job, start, end):
                    sums[cause] += seconds
        unused = without(offered, normal((*training, *pauses)))
        sums["offered"] += length(offered)
        sums["harvested"] += length(both(offered, training))
        sums["leased_unused"] += length(both(unused, leased))
        sums["not_leased"] += length(without(unused, leased))
    return Account(**sums, spans=tuple(spans))


class _Causes:
    """The reasons why a job that held nodes did not train."""

    def __init__(self, machine: DemoMachine, rounds: Sequence[RoundSpan]) -> None:
        self._taken = [(m.time, m.node) for m in machine.preemptions]
        self._rounds: dict[str, list[RoundSpan]] = {}
        for r in sorted(rounds, key=lambda r: (r.first, r.generation)):
            self._rounds.setdefault(r.job, []).append(r)

    def split(self, job: str, start: float, end: float) -> list[tuple[str, float]]:
        """Return (cause, seconds) of the pieces of ``[start, end)``, split at the beginnings of
        rounds."""
        rounds = self._rounds.get(job, [])
        cuts = [start, *(r.first for r in rounds if start < r.first < end), end]
        return [(self._cause(rounds, a), b - a) for a, b in pairwise(cuts)]

    def _cause(self, rounds: list[RoundSpan], moment: float) -> str:
        following = bisect_right([r.first for r in rounds], moment)
        if following == 0:
            return "lost_to_rescaling"
        before = rounds[following - 1]
        until = rounds[following].first if following < len(rounds) else moment
        # The members of the previous round count from its first sample on: a node taken since then
        # is the reason for the next round.
        taken = any(
            before.first <= t <= until and node in before.members for t, node in self._taken
        )
        return "lost_to_preemption" if taken else "lost_to_rescaling"


TOLERANCE = 0.01
"""Maximum difference of the accuracy from the undisturbed run (1 percentage point)."""


@dataclass(frozen=True)
class JobResult:
    """One job of the demo; accuracies are None if not known."""

    name: str
    state: str
    samples: float
    rescales: int
    accuracy: float | None
    undisturbed_accuracy: float | None

    @property
    def as_good(self) -> bool:
        """Whether the accuracy is within the tolerance of the undisturbed run."""
        if self.accuracy is None or self.undisturbed_accuracy is None:
            return False
        return abs(self.accuracy - self.undisturbed_accuracy) <= TOLERANCE + 1e-9


@dataclass(frozen=True)
class DemoResult:
    """The result of the whole demo. ``notes``: sentences for the reader."""

    jobs: tuple[JobResult, ...]
    rescales: int
    preemptions: int
    samples: float
    wall_s: float
    account: Account
    notes: tuple[str, ...] = ()

    @property
    def completed(self) -> bool:
        """Whether all jobs completed."""
        return bool(self.jobs) and all(j.state == "completed" for j in self.jobs)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "jobs": [asdict(j) for j in self.jobs],
            "rescales": self.rescales,
            "preemptions": self.preemptions,
            "node_seconds_offered": round(self.account.offered, 1),
            "node_seconds_harvested": round(self.account.harvested, 1),
            "samples": round(self.samples),
            "wall_s": round(self.wall_s, 1),
        }


def render(result: DemoResult, files: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Return the tables at the end of a demo. ``files``: (description, path)."""
    a = result.account
    whole = a.offered or 1.0
    sums = FittedTable(
        Column("NODE-SECONDS"),
        Column("", right=True),
        Column("SHARE", right=True),
        Column("", drop=1),
    )
    rows = (
        ("offered by the main scheduler", a.offered, ""),
        ("harvested: training", a.harvested, "green"),
        ("lost to rescaling", a.lost_to_rescaling, "yellow"),
        ("lost to preemption", a.lost_to_preemption, "red"),
        ("leased, no job on it", a.leased_unused, "dim"),
        ("not leased", a.not_leased, "dim"),
    )
    for label, value, style in rows:
        sums.add_row(
            Text(label, style),
            f"{value:,.0f}",
            f"{100 * value / whole:.0f} %",
            Text("█" * round(30 * value / whole), style),
        )
    jobs = FittedTable(
        Column("JOB", least=10, middle=True),
        Column("STATE", drop=1),
        Column("SAMPLES", right=True, drop=2),
        Column("RESCALES", right=True, drop=3),
        Column("ACCURACY", right=True),
        Column("UNDISTURBED", right=True),
        Column(""),
    )
    for j in result.jobs:
        verdict = (
            Text("as good", "green")
            if j.as_good
            else Text("differs" if j.accuracy and j.undisturbed_accuracy else "unknown", "red")
        )
        accuracies = (_percent(j.accuracy), _percent(j.undisturbed_accuracy))
        jobs.add_row(
            Text(plain(j.name)),
            state(j.state),
            count(j.samples),
            str(j.rescales),
            *accuracies,
            verdict,
        )
    line = Text(
        f"{counted(result.rescales, 'rescale')} and "
        f"{counted(result.preemptions, 'preemption')} survived; "
        f"{count(result.samples)} samples processed in {result.wall_s:.0f} s.", "bold",
    )  # fmt: skip
    parts: list[RenderableType] = [Text(), sums, Text(), jobs, Text(), line]
    parts += [Text(note, "yellow") for note in result.notes]
    if files:
        places = Table.grid(padding=(0, 2))
        for what, where in files:
            places.add_row(Text(what, "bold"), Text(where))
        parts += [Text(), places]
    return Group(*parts)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.2f} %"
