"""Traces with amounts: how much of each node is idle when, for machines whose nodes are shared.

The file is a trace (:mod:`scavenger.trace.files`) with one more column, ``amount``: how many units
of the node, such as GPUs, become idle or busy. A row of ``busy`` at time 0 says how many are in use
at the start. A node has as many units as are idle and in use at time 0, or more if more are idle
later.

:meth:`AmountTrace.slots` divides the nodes into slots of some units each and returns a trace of the
slots, which everything that reads traces can use. Of several idle slots of a node the one with the
highest number becomes busy first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scavenger.interface import slot_name
from scavenger.trace import files
from scavenger.trace.checks import MAX_PROBLEMS, TraceError, numbers, order_problems
from scavenger.trace.trace import Trace

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
