"""Traces with amounts: how much of each node is idle when, for machines whose nodes are shared.

The file is a trace (:mod:`scavenger.trace.files`) with one more column, ``amount``: how many units
of the node, such as GPUs, become idle or busy. A row of ``busy`` at time 0 says how many are in use
at the start. A node has as many units as are idle and in use at time 0, or more if more are idle
later.

:meth:`AmountTrace.slots` divides the nodes into slots of some units each and returns a trace of the
slots, which everything that reads traces can use. Of several idle slots of a node the one with the
highest number becomes busy first.

Slots may be of several kinds: single GPUs on some hosts, whole nodes elsewhere. Decides which host
has slots of which kind: the first kind that covers the host and fits on it. A host that no kind
covers is one slot, of kind :data:`WHOLE`; one that is too small for the kinds that cover it has
none. A host has slots of one kind.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scavenger.hostlist import HostlistError, expand
from scavenger.interface import slot_name
from scavenger.trace import files
from scavenger.trace.trace import MAX_PROBLEMS, Trace, TraceError, numbers, order_problems

HEADER = f"{files.HEADER},amount"
UNIT = "unit"
"""Kind of the slots of one unit, in their names."""


@dataclass(frozen=True, eq=False)
class AmountTrace:
    """Changes of the idle amounts of nodes. A node without changes has no idle unit."""

    time: npt.NDArray[np.float64]
    """(E,) Seconds from the start, not decreasing. A node has one change at a time at most."""
    node: npt.NDArray[np.int32]
    """(E,) Index into ``names``."""
    change: npt.NDArray[np.int64]
    """(E,) Units that become idle; negative: that become busy."""
    names: tuple[str, ...]
    """Names of the nodes."""
    sizes: tuple[int, ...]
    """Units of each node."""
    duration_s: float
    """End of the observation, at or after the last change."""

    def slots(self, units: int = 1, kind: str = UNIT) -> Trace:
        """Return the trace of the slots ``NODE/KIND.0``, ``NODE/KIND.1``, … of so many units each.
        Raises TraceError if no node has so many.

        Args:
            units: units of a slot.
            kind: kind of the slots, for their names.
        """
        counts = [size // units for size in self.sizes]
        if not any(counts):
            raise TraceError(
                "trace",
                [f"No node has the {units} units of a slot; the largest has {max(self.sizes)}."],
            )
        first = np.concatenate([[0], np.cumsum(counts)]).tolist()
        names = [
            slot_name(name, kind, number)
            for name, count in zip(self.names, counts, strict=True)
            for number in range(count)
        ]
        return self.divided(names, [(first[k], units) for k in range(len(counts))])

    def whole_nodes(self) -> Trace:
        """Return the trace of the nodes, each idle while all of its units are."""
        return self.divided(self.names, list(enumerate(self.sizes)))

    @classmethod
    def of(cls, trace: Trace) -> AmountTrace:
        """Return the trace as one with amounts: each node has one unit."""
        return cls(
            trace.time,
            trace.node,
            np.where(trace.idle, 1, -1).astype(np.int64),
            trace.names,
            (1,) * len(trace.names),
            trace.duration_s,
        )

    def select(self, nodes: Sequence[int], names: Sequence[str]) -> AmountTrace:
        """Return the trace of these nodes (indices) under other names."""
        index = np.full(len(self.names), -1, dtype=np.int32)
        index[np.asarray(nodes, dtype=np.int64)] = np.arange(len(nodes), dtype=np.int32)
        keep = index[self.node] >= 0
        return AmountTrace(
            self.time[keep],
            index[self.node[keep]],
            self.change[keep],
            tuple(names),
            tuple(self.sizes[k] for k in nodes),
            self.duration_s,
        )

    def for_nodes(self, names: Sequence[str]) -> AmountTrace:
        """Return the trace for these nodes: those of the trace if it has all of them, else as many
        of it, the ones with the most changes. Raises TraceError if it has fewer.
        """
        if set(names) <= set(self.names):
            return self.select([self.names.index(name) for name in names], names)
        if len(names) > len(self.names):
            raise TraceError(
                "replay",
                [
                    f"The trace has {len(self.names)} nodes, fewer than the {len(names)} wanted; "
                    "take fewer virtual nodes or another trace."
                ],
            )
        changes = np.bincount(self.node, minlength=len(self.names))
        return self.select(np.argsort(-changes, kind="stable")[: len(names)].tolist(), names)

    def divided(self, names: Sequence[str], slots: Sequence[tuple[int, int]]) -> Trace:
        """Return the trace of slots. The slots of a node follow each other in ``names``.

        Args:
            names: names of the slots.
            slots: for each node the index of its first slot, and the units of a slot.
        """
        idle = [0] * len(self.names)
        time: list[float] = []
        slot: list[int] = []
        event: list[bool] = []
        changes = zip(self.time.tolist(), self.node.tolist(), self.change.tolist(), strict=True)
        for at, node, change in changes:
            first, units = slots[node]
            before, idle[node] = idle[node], idle[node] + change
            low, high = sorted((before // units, idle[node] // units))
            time += [at] * (high - low)
            slot += range(first + low, first + high)
            event += [change > 0] * (high - low)
        return Trace.validated(time, slot, event, names, self.duration_s)


def has_amounts(text: str) -> bool:
    """Return whether this text of a trace file has the column ``amount``."""
    return text.partition("\n")[0].replace(" ", "").strip() == HEADER


def parse(text: str, *, duration_s: float | None = None, where: str = "trace") -> AmountTrace:
    """Return the trace with amounts in the CSV ``text``. Raises TraceError with the line number of
    each problem (the first 20).

    Args:
        text: the content of the file.
        duration_s: end of the observation, seconds; None: the last event.
        where: name of the file, for messages.
    """
    rows = [line.split(",") for line in text.rstrip().splitlines()[1:]]
    if not rows:
        raise TraceError(
            where, ["There is a header but no event below it. A trace has a row per event."]
        )
    problems: list[tuple[int, str]] = []
    index: dict[str, int] = {}
    node, change = np.zeros(len(rows), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
    times, bad_times = numbers([row[0] for row in rows])
    problems += [
        (k, f"The time is not a number of seconds: '{rows[k][0][:40]}'.") for k in bad_times
    ]
    for k, row in enumerate(rows):
        if len(row) != 4:
            problems.append((k, f"A row has 4 columns ({HEADER}); this one has {len(row)}."))
            continue
        name, event, amount = (word.strip() for word in row[1:])
        if event not in ("idle", "busy"):
            problems.append((k, f"The event must be idle or busy; got '{event[:40]}'."))
        if not amount.isdecimal() or not 1 <= int(amount) <= 10**6:
            problems.append((k, f"The amount must be 1 to 1000000; got '{amount[:40]}'."))
            continue
        if not name:
            problems.append((k, "The node name is missing."))
        node[k] = index.setdefault(name, len(index))
        change[k] = int(amount) if event == "idle" else -int(amount)
    if not problems:
        problems = order_problems(times)
    if not problems:
        return _merged(times, node, change, tuple(index), duration_s, where)
    raise _errors(where, sorted(problems))


def _merged(
    time: npt.NDArray[np.float64],
    node: npt.NDArray[np.int32],
    change: npt.NDArray[np.int64],
    names: tuple[str, ...],
    duration_s: float | None,
    where: str,
) -> AmountTrace:
    """Return the trace of checked rows, with one change for each node and time."""
    end = float(time[-1]) if duration_s is None else duration_s
    if end < time[-1]:
        raise TraceError(
            where, [f"The duration is {end:g} s but the last event is at {time[-1]:g} s."]
        )
    in_use = [0] * len(names)
    merged: dict[tuple[float, int], int] = {}
    line: dict[tuple[float, int], int] = {}
    for k, (at, which, amount) in enumerate(
        zip(time.tolist(), node.tolist(), change.tolist(), strict=True)
    ):
        if at == 0 and amount < 0:
            in_use[which] -= amount
            continue
        merged[at, which] = merged.get((at, which), 0) + amount
        line[at, which] = k
    idle, sizes = [0] * len(names), list(in_use)
    problems = []
    for (at, which), amount in merged.items():
        if idle[which] + amount < 0:
            problems.append(
                (
                    line[at, which],
                    f"{-amount} units of node {names[which]} become busy at {at:g} s, but "
                    f"{idle[which]} are idle.",
                )
            )
            continue
        idle[which] += amount
        units = in_use[which] + idle[which] if at == 0 else idle[which]
        sizes[which] = max(sizes[which], units)
    if problems:
        raise _errors(where, problems)
    changes = [(at, which, amount) for (at, which), amount in merged.items() if amount]
    return AmountTrace(
        np.array([at for at, _, _ in changes], dtype=np.float64),
        np.array([which for _, which, _ in changes], dtype=np.int32),
        np.array([amount for _, _, amount in changes], dtype=np.int64),
        names,
        tuple(sizes),
        end,
    )


def _errors(where: str, problems: Sequence[tuple[int, str]]) -> TraceError:
    sentences = [f"line {row + 2}: {sentence}" for row, sentence in problems[:MAX_PROBLEMS]]
    return TraceError(where, sentences, len(problems))


WHOLE = "node"
"""Kind of the hosts that are one slot, and the word for such a slot."""
_SLOT = re.compile(r"(?:(?P<name>[A-Za-z][\w-]*)=)?(?P<units>node|[0-9]+)(?:@(?P<hosts>.+))?")


@dataclass(frozen=True)
class TraceKind:
    """A kind of slots."""

    name: str
    """Name of the kind."""
    units: int | None = 1
    """Units of a host that a slot has; None: all of them."""
    hosts: frozenset[str] | None = None
    """Hosts that have such slots; None: all hosts."""

    @classmethod
    def parse(cls, text: str) -> TraceKind:
        """Return the kind in ``[NAME=]N|node[@HOSTS]``, such as ``gpu=1@g[001-064]``. Default
        names are ``unit`` and ``node``.

        Raises:
            ValueError: the text has another form; the message says which one is needed.
        """
        match = _SLOT.fullmatch(text.strip())
        if match is None or match["units"].strip("0") == "":
            raise ValueError(
                f"{text}: give [KIND=]N or [KIND=]node and, if not all hosts have such slots, "
                "@HOSTS, such as gpu=1@g[001-064]; N is a number of units from 1."
            )
        units = None if match["units"] == WHOLE else int(match["units"])
        try:
            hosts = frozenset(expand(match["hosts"])) if match["hosts"] else None
        except HostlistError as error:
            raise ValueError(f"{text}: {error}") from None
        return cls(match["name"] or (WHOLE if units is None else UNIT), units, hosts)

    def covers(self, host: str) -> bool:
        """Return whether the host has such slots, if it is large enough."""
        return self.hosts is None or host in self.hosts


@dataclass(frozen=True)
class DividedTrace:
    """A trace of slots of several kinds."""

    trace: Trace
    """Idle slots over time."""
    kind_of: Mapping[str, str]
    """Slot → its kind."""
    parts: Mapping[str, float]
    """Kind → the part of a host that one of its slots is, by the hosts that hold most."""


def divide(trace: AmountTrace, kinds: Sequence[TraceKind], where: str = "trace") -> DividedTrace:
    """Return the trace of the slots of all hosts.

    Args:
        trace: idle amounts of the hosts.
        kinds: kinds of slots.
        where: name of the file, for messages.

    Raises:
        TraceError: two kinds have one name, or no host has a slot of a kind.
    """
    twice = [name for name, count in Counter(kind.name for kind in kinds).items() if count > 1]
    if twice:
        raise TraceError(where, [f"Two kinds of slots are named {', '.join(twice)}."])
    names: list[str] = []
    kind_of: dict[str, str] = {}
    slots: list[tuple[int, int]] = []
    most: Counter[str] = Counter()
    for host, size in zip(trace.names, trace.sizes, strict=True):
        covering = [kind for kind in kinds if kind.covers(host)] or [TraceKind(WHOLE, None)]
        kind = next((kind for kind in covering if (kind.units or 0) <= size), covering[0])
        slots.append((len(names), kind.units or size))
        own = [host]
        if kind.units is not None:
            own = [slot_name(host, kind.name, number) for number in range(size // kind.units)]
        names += own
        kind_of.update(dict.fromkeys(own, kind.name))
        most[kind.name] = max(most[kind.name], len(own))
    absent = [kind for kind in kinds if not most[kind.name]]
    if absent:
        raise TraceError(where, [_absence(kind, trace) for kind in absent])
    parts = {name: 1.0 / count for name, count in most.items()}
    return DividedTrace(trace.divided(names, slots), kind_of, parts)


def _absence(kind: TraceKind, trace: AmountTrace) -> str:
    sizes = [size for host, size in zip(trace.names, trace.sizes, strict=True) if kind.covers(host)]
    if not sizes:
        return f"No host of kind {kind.name} is in the trace."
    if (kind.units or 0) > max(sizes):
        return (
            f"No host has the {kind.units} units of a slot of kind {kind.name}; the largest of "
            f"its hosts has {max(sizes)}."
        )
    return f"No host is left for kind {kind.name}: kinds before it have them all."


def read_kinds(
    path: str | os.PathLike[str],
    kinds: Sequence[TraceKind],
    *,
    names: Sequence[str] | None = None,
) -> DividedTrace:
    """Read a trace with or without amounts, and divide its hosts. Without amounts every host is one
    slot.

    Args:
        path: the file.
        kinds: kinds of slots.
        names: the machine's nodes, if some may have no event; for traces without amounts.

    Raises:
        TraceError: the file is not valid, or :func:`divide` refuses the kinds.
    """
    text = files.read_text(path)
    if has_amounts(text):
        return divide(parse(text, where=str(path)), kinds, str(path))
    trace = files.parse(text, names=names, where=str(path))
    whole = [TraceKind(kind.name, None, kind.hosts) for kind in kinds]
    return divide(AmountTrace.of(trace), whole, str(path))
