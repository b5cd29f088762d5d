"""Decides which idle node is a gap: one table of rules for all batch schedulers, and the sentence
that each rule reports about a node.

A backend supplies the facts about a node (:class:`NodeFacts`) and the site's settings
(:class:`GapRules`). The table decides. ``malletrain nodes --explain`` prints the results. Nothing
here asks a scheduler or takes a lease.

:class:`Hours` of the week in which leases may be taken are ``"mon-fri 19:00-07:00"``, ``"sat"`` or
``"22:00-06:00"``, in local time of this machine. They decide only whether a time is inside them and
when they end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from scavenger.interface import Explanation, host_of

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = "|".join(DAYS)
_FORM = re.compile(rf"(?:({_DAY})(?:-({_DAY}))?)?\s*(?:(\d{{1,2}}):(\d\d)-(\d{{1,2}}):(\d\d))?")
HOURS_HELP = (
    '"mon-fri 19:00-07:00", "sat" or "22:00-06:00" (days, hours or both; a span over '
    "midnight belongs to the day it begins on)"
)
_WEEK_MIN = 7 * 24 * 60


class HoursError(ValueError):
    """The text does not describe hours of the week."""


@dataclass(frozen=True)
class Hours:
    """Minutes of the week (from Monday 00:00) in which leases may be taken, as sorted, disjoint
    spans; empty: always.
    """

    spans: tuple[tuple[int, int], ...] = ()
    """(start, end) of each span, minutes of the week."""

    def remaining_s(self, now: float) -> float | None:
        """Return the remaining seconds of the present hours; 0 outside of them, None if they have
        no end. ``now``: epoch seconds.
        """
        if not self.spans:
            return None
        local_time = time.localtime(now)
        minute = (
            (local_time.tm_wday * 24 + local_time.tm_hour) * 60
            + local_time.tm_min
            + local_time.tm_sec / 60.0
        )
        for begin, end in self.spans:
            if begin <= minute < end:
                if end == _WEEK_MIN and self.spans[0][0] == 0:  # the span continues on Monday
                    end += self.spans[0][1]
                if end - begin >= _WEEK_MIN:
                    return None
                # The night of a change to or from daylight saving time has another length.
                end_today = end - local_time.tm_wday * 1440
                date = (local_time.tm_year, local_time.tm_mon, local_time.tm_mday)
                return max(0.0, time.mktime((*date, 0, end_today, 0, 0, 0, -1)) - now)
        return 0.0


def parse_hours(texts: Sequence[str]) -> Hours:
    """Return the union of the spans in ``texts``. Raises HoursError with a description of the valid
    form.
    """
    minutes = bytearray(_WEEK_MIN)
    for text in texts:
        for begin, end in _spans(text):
            for minute in range(begin, end):
                minutes[minute % _WEEK_MIN] = 1
    spans: list[tuple[int, int]] = []
    for minute, inside in enumerate(minutes):
        if inside and spans and spans[-1][1] == minute:
            spans[-1] = (spans[-1][0], minute + 1)
        elif inside:
            spans.append((minute, minute + 1))
    return Hours(tuple(spans))


def _spans(text: str) -> list[tuple[int, int]]:
    match = _FORM.fullmatch(text.strip().lower())
    if match is None or not match[0]:
        raise HoursError(f'"{text}" names no hours; accepted is {HOURS_HELP}.')
    first, last, *clock = match.groups()
    days = range(7)
    if first is not None:
        a, b = DAYS.index(first), DAYS.index(last or first)
        days = range(a, b + 1 if b >= a else b + 8)
    if clock[0] is None:
        return [(day * 1440, (day + 1) * 1440) for day in days]
    h1, m1, h2, m2 = map(int, clock)
    begin, end = h1 * 60 + m1, h2 * 60 + m2
    if m1 > 59 or m2 > 59 or begin >= 1440 or end > 1440:
        raise HoursError(f'"{text}" names no hours; accepted is {HOURS_HELP}.')
    if end <= begin:
        end += 1440
    return [(day * 1440 + begin, day * 1440 + end) for day in days]


USABLE = "usable"
"""The rule that says what is wrong with a node."""
RESERVE, AT_ONCE, HOST = "reserve", "at once", "host"


class NodeFacts(NamedTuple):
    """The main scheduler's report about one node at one poll. Times are in epoch seconds."""

    name: str
    """Name of the node."""
    state: str
    """The scheduler's name of the state."""
    idle: bool
    """Whether no job runs on it."""
    trouble: str = ""
    """Why it may not be used although it is idle (draining, down, not responding, powered down)."""
    reserved: str = ""
    """The current reservation or maintenance."""
    reserved_from: float | None = None
    """Start time of the next reservation."""
    planned: bool = False
    """Whether it is held for a waiting job, which is expected to start at ``planned_at``."""
    planned_at: float | None = None
    """Expected start time of that job; None if not known."""
    partitions: Sequence[str] = ()
    """Partitions or queues of the node."""
    features: Sequence[str] = ()
    """Features of the node, as the site's configuration names them."""
    idle_since: float | None = None
    """Time since which all polls have seen it idle."""
    lease: str = ""
    """Our running or waiting lease on it."""
    drained: str = ""
    """Why running jobs have to leave, if an administrator takes the node out of service."""
    kind: str = ""
    """Kind of the slot; empty: a whole node."""
    unit: str = ""
    """Host, if its slots are leased together; empty: it is leased alone."""
    beside: str = ""
    """Why no slot of this kind may be beside the jobs on the host."""
    memory: str = ""
    """Why the memory of the slot does not count as free, although no job has requested it."""

    @property
    def free_until(self) -> float | None:
        """Time at which the main scheduler plans to use the node next; None if it reports none."""
        use_times = [t for t in (self.reserved_from, self.planned_at) if t is not None]
        return min(use_times) if use_times else None


@dataclass(frozen=True)
class GapRules:
    """The site's settings for gaps."""

    partitions: frozenset[str] = frozenset()
    """Partitions in which leases run; a node must be in one of them (empty: any)."""
    features: frozenset[str] = frozenset()
    """Features that a node must have, all of them."""
    nodes: frozenset[str] = frozenset()
    """Names of the nodes that can be gaps (expanded; empty: all)."""
    exclude: frozenset[str] = frozenset()
    """Names of nodes that are never gaps (expanded)."""
    reserve: int = 0
    """Number of idle nodes that are left to the main scheduler."""
    hours: Hours = field(default_factory=Hours)
    """Hours of the week in which leases may run."""
    idle_for_s: float = 30.0
    """Minimum idle time of a node, seconds, so that the main scheduler can use it first."""
    use_planned: bool = False
    """Whether to use nodes that are held for a waiting job, with leases that end before it
    starts.
    """
    min_free_s: float = 0.0
    """Minimum time until the next known use, seconds."""
    max_at_once: int = 200
    """Maximum number of gaps in one poll."""
    hold: str = ""
    """Why no node may be taken now."""
    node_holds: Mapping[str, str] = field(default_factory=dict)
    """Node → why it may not be taken."""


Answer = tuple[bool, str]
Rule = Callable[[NodeFacts, GapRules, float], Answer]


def _idle(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    if node.lease:
        return False, f"MalleTrain has it or has requested it with lease {node.lease}"
    return node.idle, f"the main scheduler says it is {node.state}"


def _usable(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    return not node.trouble, node.trouble or "it is up and takes jobs"


def _beside(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    if not node.kind:
        return True, "a lease has the whole node"
    return not node.beside, node.beside or "it may be beside the jobs on its host"


def _memory(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    if not node.kind:
        return True, "a lease has the whole node"
    return not node.memory, node.memory or "nothing is known to use its memory"


def _reservation(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    if node.reserved:
        return False, node.reserved
    if node.reserved_from is None:
        return True, "no reservation"
    free_s = node.reserved_from - now
    return (
        free_s >= rules.min_free_s,
        f"a reservation begins in {span(free_s)}{_needed(free_s, rules)}",
    )


def _planned(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    if not node.planned and node.planned_at is None:
        return True, "no waiting job is planned on it"
    free_s = None if node.planned_at is None else node.planned_at - now
    when = "" if free_s is None else f", which is expected to start in {span(free_s)}"
    if not rules.use_planned:
        return False, f"it is held for a waiting job{when}"
    if free_s is None:
        return False, "it is held for a waiting job and the main scheduler does not say until when"
    return free_s >= rules.min_free_s, f"it is held for a waiting job{when}{_needed(free_s, rules)}"


def _partition(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    names = ", ".join(sorted(rules.partitions))
    if not rules.partitions:
        return True, "leases may run in any partition"
    if rules.partitions.isdisjoint(node.partitions):
        return (
            False,
            f"it is not in {names}, or that is not up (it is in "
            f"{', '.join(node.partitions) or 'none that is up'})",
        )
    return True, f"it is in {names}"


def _listed(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    host = host_of(node.name)
    if host in rules.exclude:
        return False, "the configuration excludes it"
    if rules.nodes and host not in rules.nodes:
        return False, "it is not among the nodes of the configuration"
    return True, "the configuration allows it"


def _features(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    missing = rules.features.difference(node.features)
    return (
        not missing,
        f"it lacks {', '.join(sorted(missing))}" if missing else "it has the features wanted",
    )


def _hours(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    remaining_s = rules.hours.remaining_s(now)
    return remaining_s is None or remaining_s > 0, hours_sentence(remaining_s)


def _turn(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    since = 0.0 if node.idle_since is None else now - node.idle_since
    passed = since >= rules.idle_for_s
    turn = "" if passed else f"; the main scheduler has its turn for {span(rules.idle_for_s)}"
    return passed, f"it has been idle for {span(since)}{turn}"


def _hold(node: NodeFacts, rules: GapRules, now: float) -> Answer:
    reason = rules.hold or rules.node_holds.get(node.name, "")
    return not reason, reason or "the main scheduler does not need it just now"


RULES: tuple[tuple[str, Rule], ...] = (
    ("idle", _idle),
    (USABLE, _usable),
    ("beside", _beside),
    ("memory", _memory),
    ("reservation", _reservation),
    ("planned", _planned),
    ("partition", _partition),
    ("listed", _listed),
    ("features", _features),
    ("hours", _hours),
    ("turn", _turn),
    ("hold", _hold),
)
"""The rules that look at a single node, in the order in which they are applied and shown. The rules
about all nodes together are in :func:`choose`.
"""


@dataclass(frozen=True)
class Choice:
    """The gaps of one poll."""

    gaps: tuple[NodeFacts, ...]
    """The nodes that are gaps, those with the longest remaining time first."""
    exclusions: Mapping[str, tuple[str, str]]
    """Node → (the rule about all nodes together that excludes it, why)."""


def passes(node: NodeFacts, rules: GapRules, now: float) -> bool:
    """Return whether the node passes all rules about single nodes.

    Args:
        node: its facts.
        rules: the rules.
        now: epoch seconds.
    """
    return all(test(node, rules, now)[0] for _, test in RULES)


def choose(
    nodes: Collection[NodeFacts],
    rules: GapRules,
    now: float,
    horizon: Callable[[NodeFacts], float | None],
    limit: tuple[int, str] | None = None,
) -> Choice:
    """Return the gaps among ``nodes``: those that pass all rules, minus the reserve and those above
    a limit. Slots that are leased together count as one node, and are chosen together.

    Args:
        nodes: facts about all nodes.
        rules: the site's settings.
        now: epoch seconds.
        horizon: returns the expected remaining length of a node's gap, seconds. If there are too
            many gaps, those with the largest horizon are chosen.
        limit: (maximum number of further leases, why); None: no limit.
    """
    gaps = [node for node in nodes if node.idle and passes(node, rules, now)]
    left_alone = {
        node.unit for node in nodes if node.unit and node.idle and not passes(node, rules, now)
    }
    usable = (
        len(
            {
                node.unit or node.name
                for node in nodes
                if node.idle and not node.lease and not node.trouble and not node.reserved
            }
        )
        if rules.reserve
        else 0
    )
    gaps.sort(key=lambda node: -_or_endless(horizon(node)))
    exclusions: dict[str, tuple[str, str]] = {}
    units: dict[str, list[NodeFacts]] = {}
    for node in gaps:
        if node.unit in left_alone:
            exclusions[node.name] = (HOST, "another slot of its host is left alone")
        else:
            units.setdefault(node.unit or node.name, []).append(node)
    chosen = list(units.values())
    bounds = []
    if rules.reserve:
        reserved = "1 idle node is" if rules.reserve == 1 else f"{rules.reserve} idle nodes are"
        are = "is" if usable == 1 else "are"
        sentence = f"{reserved} left to the main scheduler, and {usable} {are} idle"
        bounds.append((max(0, usable - rules.reserve), False, RESERVE, sentence))
    if limit is not None:
        bounds.append((max(0, limit[0]), True, AT_ONCE, limit[1]))
    requested = "1 node is" if rules.max_at_once == 1 else f"{rules.max_at_once} nodes are"
    at_once = f"{requested} requested at once; the next poll continues"
    bounds.append((rules.max_at_once, False, AT_ONCE, at_once))
    for room, counts_leases, rule, sentence in bounds:
        candidates, chosen = chosen, []
        for unit in candidates:
            size = len(unit) if counts_leases else 1
            if size <= room:
                chosen.append(unit)
                room -= size
            else:
                exclusions.update((node.name, (rule, sentence)) for node in unit)
    return Choice(tuple(node for unit in chosen for node in unit), exclusions)


def why_not(node: NodeFacts, rules: GapRules, choice: Choice, now: float) -> str:
    """Return the first reason why the node is no gap; empty if it is one.

    Args:
        node: its facts.
        rules: the rules.
        choice: the gaps of the poll.
        now: time of the poll, epoch seconds.
    """
    for _, test in RULES:
        passed, sentence = test(node, rules, now)
        if not passed:
            return sentence
    return choice.exclusions[node.name][1] if node.name in choice.exclusions else ""


def explain(node: NodeFacts, rules: GapRules, choice: Choice, now: float) -> Explanation:
    """Return the result of each rule for one node.

    Args:
        node, rules, choice, now: see :func:`why_not`.
    """
    answers = [(name, *test(node, rules, now)) for name, test in RULES]
    if node.name in choice.exclusions:
        rule, sentence = choice.exclusions[node.name]
        answers.append((rule, False, sentence))
    return Explanation(
        node.name, node.state, all(passed for _, passed, _ in answers), tuple(answers)
    )


class Explanations(Sequence[Explanation]):
    """The explanations of all nodes, each computed when it is accessed, because a poll of 10,000
    nodes needs none of them.

    Args:
        nodes: the facts of all nodes.
        rules, choice, now: see :func:`why_not`.
    """

    def __init__(
        self, nodes: Collection[NodeFacts], rules: GapRules, choice: Choice, now: float
    ) -> None:
        self._nodes = tuple(nodes)
        self._context = (rules, choice, now)

    def __len__(self) -> int:
        return len(self._nodes)

    @overload
    def __getitem__(self, index: int) -> Explanation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Explanation]: ...
    def __getitem__(self, index: int | slice) -> Explanation | Sequence[Explanation]:
        if isinstance(index, slice):
            return tuple(explain(node, *self._context) for node in self._nodes[index])
        return explain(self._nodes[index], *self._context)

    def __iter__(self) -> Iterator[Explanation]:
        return (explain(node, *self._context) for node in self._nodes)


def _or_endless(horizon: float | None) -> float:
    return float("inf") if horizon is None else horizon


def _needed(free_s: float, rules: GapRules) -> str:
    return "" if free_s >= rules.min_free_s else f", and a lease needs {span(rules.min_free_s)}"


def hours_sentence(remaining_s: float | None) -> str:
    """Return a sentence that says whether leases may run now. ``remaining_s``: for how long,
    seconds; None: no end.
    """
    if remaining_s is None:
        return "leases are allowed at any hour"
    if remaining_s > 0:
        return f"leases are allowed for {span(remaining_s)} from now"
    return "no leases are allowed at this hour"


def span(seconds: float) -> str:
    """``12 s``, ``3 min``, ``4.5 h``."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
