"""The account of the idle node-seconds: offered, harvested, lost.

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
Pure: histories in, numbers out.

Sets of time as sorted, disjoint, half-open intervals ``(start, end)``. Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from malletrain.render.timeline import (
    IDLE_SPAN,
    JOB_SPAN,
    LEASED_SPAN,
    PAUSE_SPAN,
    PreemptionMark,
    Span,
)

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]


def normal(pieces: Iterable[Interval]) -> Intervals:
    """Returns the union of ``pieces`` in any order; empty ones are removed, adjacent ones
    merged."""
    union: list[Interval] = []
    for start, end in sorted(p for p in pieces if p[1] > p[0]):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return tuple(union)


def both(a: Intervals, b: Intervals) -> Intervals:
    """Returns the times in ``a`` and in ``b``."""
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
    """Returns the times in ``a`` and not in ``b``."""
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
    """Returns the total time in ``a``."""
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
    """Returns the history of the embedded cluster (rows of its ``history.csv``: time, node, event,
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
    """Returns the account; the module docstring defines each number."""
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
        """Returns (cause, seconds) of the pieces of ``[start, end)``, split at the beginnings of
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
