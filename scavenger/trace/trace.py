"""Traces: which nodes are idle at which time.

A trace is a list of events "this node is idle / busy from now on", sorted by time, on a known list
of nodes. This module decides which traces are valid, cuts them (nodes, window, speed) and computes
their statistics. It reads no files (:mod:`scavenger.trace.files`), chooses no nodes for a replay
(:mod:`scavenger.trace.replay`) and generates no traces (:mod:`scavenger.trace.synthesis`).

Events are stored in three arrays: a week of a large machine (10^5 to 10^6 events) costs megabytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_PROBLEMS = 20

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class TraceError(ValueError):
    """An invalid trace.

    Args:
        where: its file; empty if unknown.
        problems: sentences, each with the number of the line.
        total: number of problems, if ``problems`` has only the first ones.
    """

    def __init__(self, where: str, problems: Sequence[str], total: int | None = None) -> None:
        self.problems = tuple(problems)
        self.total = len(problems) if total is None else total
        lines = list(problems[:MAX_PROBLEMS])
        if self.total > len(lines):
            lines.append(f"... and {self.total - len(lines)} more.")
        text = lines[0] if len(lines) == 1 else f"{self.total} problems.\n  " + "\n  ".join(lines)
        super().__init__(f"{where}: {text}" if where else text)


def order_problems(time: FloatArray) -> list[tuple[int, str]]:
    """Return (event, sentence) for times that are invalid or earlier than the time before."""
    problems = [
        (int(k), f"The time must be 0 or more and finite; got {time[k]:g}.")
        for k in np.flatnonzero(~np.isfinite(time) | (time < 0))
    ]
    back = np.flatnonzero(np.diff(time) < 0) + 1
    problems += [
        (
            int(k),
            f"Time goes back from {time[k - 1]:g} s to {time[k]:g} s; sort the rows by time_s.",
        )
        for k in back
    ]
    return problems


def node_problems(
    time: FloatArray, node: IntArray, idle: BoolArray, names: Sequence[str]
) -> list[tuple[int, str]]:
    """Return (event, sentence) for each violation of a rule: the events of a node alternate, begin
    with idle, and have different times.

    Args:
        time: time of each event, seconds.
        node: index of its node.
        idle: whether the node becomes idle.
        names: names of the nodes.
    """
    order = np.argsort(node, kind="stable")
    n, i, t = node[order], idle[order], time[order]
    first = np.ones(len(n), dtype=np.bool_)
    first[1:] = n[1:] != n[:-1]
    previous = np.zeros(len(n), dtype=np.bool_)
    previous[1:] = i[:-1] & ~first[1:]
    problems: list[tuple[int, str]] = []
    for k in np.flatnonzero(i == previous).tolist():
        name, state = names[int(n[k])], "idle" if i[k] else "busy"
        since = "from the start" if first[k] else f"since {t[k - 1]:g} s"
        problems.append(
            (int(order[k]), f"Node {name} becomes {state} at {t[k]:g} s but is {state} {since}.")
        )
    same = np.flatnonzero(~first[1:] & (t[1:] == t[:-1]) & (i[1:] != i[:-1])) + 1
    for k in same.tolist():
        problems.append(
            (
                int(order[k]),
                f"Node {names[int(n[k])]} becomes idle and busy at the same time, {t[k]:g} s.",
            )
        )
    return problems


def numbers(words: list[str]) -> tuple[FloatArray, list[int]]:
    """Return the words as numbers, and the positions of invalid ones (with value 0)."""
    try:
        return np.array(words, dtype=np.float64), []
    except ValueError:
        values, bad = np.zeros(len(words)), []
        for k, word in enumerate(words):
            try:
                values[k] = float(word)
            except ValueError:
                bad.append(k)
        return values, bad


SHORT_GAP_S = 600.0
"""Length below which gaps count as short in the statistics, seconds (10 minutes, as in the
published Summit figures).
"""
HISTOGRAM_EDGES_S = (
    0.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1200.0,
    1800.0,
    3600.0,
    7200.0,
    14400.0,
    28800.0,
    math.inf,
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of a trace. Lengths are of complete gaps only. The idle count is averaged over
    time.
    """

    nodes: int
    """Number of nodes."""
    duration_s: float
    """Length of the trace, seconds."""
    events: int
    """Number of events."""
    idle_mean: float
    """Mean number of idle nodes over time."""
    idle_min: int
    """Minimum number of idle nodes."""
    idle_max: int
    """Maximum number of idle nodes."""
    idle_fraction: float
    """Idle fraction of node-time."""
    gaps: int
    """Number of complete gaps."""
    gap_median_s: float
    """Median length, seconds."""
    gap_mean_s: float
    """Mean length, seconds."""
    gap_short_fraction: float
    """Fraction of gaps shorter than :data:`SHORT_GAP_S`."""
    histogram: tuple[tuple[float, float, int], ...]
    """(from, to, gaps) by length in seconds; the last ``to`` is infinite"""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. An infinite bin edge and a statistic without data are
        None.
        """
        out: dict[str, Any] = {
            k: (None if isinstance(v, float) and not math.isfinite(v) else v)
            for k, v in self.__dict__.items()
            if k != "histogram"
        }
        out["histogram"] = [
            {"from_s": a, "to_s": b if math.isfinite(b) else None, "gaps": n}
            for a, b, n in self.histogram
        ]
        return out


def summary(statistics: Statistics) -> Mapping[str, str]:
    """Return the statistics as text for a terminal, label → text."""
    s = statistics
    return {
        "nodes": f"{s.nodes}",
        "duration": f"{s.duration_s:,.0f} s ({s.duration_s / 86400:.2f} days), {s.events:,} events",
        "idle nodes": f"{s.idle_mean:.1f} on average ({100 * s.idle_fraction:.1f} %), "
        f"{s.idle_min} to {s.idle_max}",
        "gaps": f"{s.gaps:,}; median {s.gap_median_s:,.0f} s, mean {s.gap_mean_s:,.0f} s, "
        f"{100 * s.gap_short_fraction:.0f} % shorter than {SHORT_GAP_S / 60:.0f} minutes",
    }


class Batch(NamedTuple):
    """All changes at one time: indices into ``Trace.names``."""

    time: float
    """Seconds from the start."""
    idle: IntArray
    """Nodes that become idle."""
    busy: IntArray
    """Nodes that become busy."""


@dataclass(frozen=True, eq=False)
class IdleIntervals:
    """Idle intervals, one entry each: ``node`` (index), ``start`` and ``end`` in seconds."""

    node: IntArray
    start: FloatArray
    end: FloatArray
    complete: BoolArray
    """False if the interval was already open when the trace began or still open when it ended,
    so that its true length is not known.
    """

    @property
    def length(self) -> FloatArray:
        """Lengths in seconds."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Trace:
    """Idle/busy events of nodes, valid by construction (see :meth:`validated`).

    ``time`` (E,): seconds from the start, not decreasing. ``node`` (E,): index into ``names``.
    ``idle`` (E,): True if the node becomes idle, False if it becomes busy.
    """

    time: FloatArray
    node: IntArray
    idle: BoolArray
    names: tuple[str, ...]
    duration_s: float
    """End of the observation, at or after the last event. Nodes without events are always busy."""

    # -- construction --

    @classmethod
    def validated(
        cls,
        time: npt.ArrayLike,
        node: npt.ArrayLike,
        idle: npt.ArrayLike,
        names: Sequence[str],
        duration_s: float | None = None,
        *,
        where: str = "trace",
        first_line: int = 1,
    ) -> Trace:
        """Check the events, and return a trace of them.

        Args:
            time: time of each event, seconds.
            node: index of its node in ``names``.
            idle: whether the node becomes idle.
            names: names of the nodes.
            duration_s: end of the observation, seconds; None: the last event.
            where: name of the trace in messages.
            first_line: line number of the first event in its file.

        Raises:
            TraceError: events are invalid; the text names them by event number + ``first_line``.
        """
        t = np.ascontiguousarray(time, dtype=np.float64)
        n = np.ascontiguousarray(node, dtype=np.int32)
        i = np.ascontiguousarray(idle, dtype=np.bool_)
        if not len(t) == len(n) == len(i):
            raise TraceError(
                where,
                [f"The columns differ in length: {len(t)} times, {len(n)} nodes, {len(i)} events."],
            )
        if len(set(names)) != len(names):
            twice = sorted({x for x in names if list(names).count(x) > 1})[:5]
            raise TraceError(where, [f"The node list names {', '.join(twice)} more than once."])
        if len(n) and (n.min() < 0 or n.max() >= len(names)):
            raise TraceError(
                where,
                [
                    f"An event is on node number {n.max() if n.max() >= len(names) else n.min()} "
                    f"but there are {len(names)} nodes."
                ],
            )
        end = float(t[-1]) if duration_s is None and len(t) else float(duration_s or 0.0)
        problems = [*order_problems(t), *node_problems(t, n, i, names)]
        if problems:
            problems.sort()
            sentences = [f"line {first_line + k}: {text}" for k, text in problems[:MAX_PROBLEMS]]
            raise TraceError(where, sentences, len(problems))
        if len(t) and end < t[-1]:
            raise TraceError(
                where, [f"The duration is {end:g} s but the last event is at {t[-1]:g} s."]
            )
        for array in (t, n, i):
            array.setflags(write=False)
        return cls(t, n, i, tuple(names), end)

    @classmethod
    def from_gaps(
        cls,
        node: npt.ArrayLike,
        start: npt.ArrayLike,
        end: npt.ArrayLike,
        names: Sequence[str],
        duration_s: float,
    ) -> Trace:
        """Return a trace from idle intervals ``[start, end)`` in seconds on node indices.

        Intervals of one node that touch or overlap are joined. Parts outside ``[0, duration_s)``
        are cut off. The intervals can have any order.

        Args:
            node: index of the node of each interval.
            start: start of each interval, seconds.
            end: end of each interval, seconds.
            names: names of the nodes.
            duration_s: length of the trace, seconds.
        """
        n = np.asarray(node, dtype=np.int32)
        s = np.clip(np.asarray(start, dtype=np.float64), 0.0, duration_s)
        e = np.clip(np.asarray(end, dtype=np.float64), 0.0, duration_s)
        keep = e > s
        n, s, e = n[keep], s[keep], e[keep]
        order = np.lexsort((s, n))
        n, s, e = n[order], s[order], e[order]
        if len(n):
            # Join intervals: within a node, an interval starts a new gap if it begins after all
            # earlier ones have ended. An offset of each node by more than the duration lets one
            # running maximum serve all nodes.
            offset = n.astype(np.float64) * (duration_s + 1.0)
            reach = np.maximum.accumulate(e + offset)
            new = np.ones(len(n), dtype=np.bool_)
            new[1:] = (n[1:] != n[:-1]) | (s[1:] + offset[1:] > reach[:-1])
            first = np.flatnonzero(new)
            e = np.maximum.reduceat(e, first)
            n, s = n[first], s[first]
        closed = e < duration_s
        time = np.concatenate([s, e[closed]])
        nodes = np.concatenate([n, n[closed]])
        idle = np.concatenate([np.ones(len(s), np.bool_), np.zeros(int(closed.sum()), np.bool_)])
        order = np.lexsort((nodes, ~idle, time))
        return cls.validated(time[order], nodes[order], idle[order], names, duration_s)

    # -- access --

    def __len__(self) -> int:
        return len(self.time)

    def batch_edges(self) -> npt.NDArray[np.int64]:
        """Return the offsets (B+1,) into the event arrays: batch b is ``[edges[b], edges[b+1])``
        and all its events have the same time.
        """
        if not len(self.time):
            return np.zeros(1, dtype=np.int64)
        change = np.flatnonzero(np.diff(self.time)) + 1
        return np.concatenate([[0], change, [len(self.time)]]).astype(np.int64)

    def batches(self) -> Iterator[Batch]:
        """Yield the events in order, those at the same time together."""
        edges = self.batch_edges().tolist()
        for a, b in itertools.pairwise(edges):
            nodes, idle = self.node[a:b], self.idle[a:b]
            yield Batch(float(self.time[a]), nodes[idle], nodes[~idle])

    def idle_at(self, time_s: float) -> BoolArray:
        """Return (N,) whether each node is idle at ``time_s``, including events at exactly that
        time.
        """
        state = np.zeros(len(self.names), dtype=np.bool_)
        stop = int(np.searchsorted(self.time, time_s, side="right"))
        # Assignment by index keeps the last value written, which is the latest event.
        state[self.node[:stop]] = self.idle[:stop]
        return state

    def idle_count(self) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """Return a step function of the number of idle nodes: times (K,) starting at 0, and the
        count from each time on.
        """
        edges = self.batch_edges()
        if len(edges) == 1:
            return np.zeros(1), np.zeros(1, dtype=np.int64)
        steps = np.add.reduceat(np.where(self.idle, 1, -1), edges[:-1])
        times, counts = self.time[edges[:-1]], np.cumsum(steps)
        if times[0] > 0:
            times, counts = np.concatenate([[0.0], times]), np.concatenate([[0], counts])
        return times, counts.astype(np.int64)

    def gaps(self) -> IdleIntervals:
        """Return all idle intervals, ordered by node, then time. Those open at the end are closed
        at ``duration_s``.
        """
        order = np.argsort(self.node, kind="stable")
        n, t, i = self.node[order], self.time[order], self.idle[order]
        opens = np.flatnonzero(i)
        closes = opens + 1
        # The events of a node alternate, so a gap is closed by the next row if that belongs to the
        # same node.
        has_close = closes < len(n)
        has_close[has_close] = n[closes[has_close]] == n[opens[has_close]]
        end = np.full(len(opens), self.duration_s)
        end[has_close] = t[closes[has_close]]
        return IdleIntervals(n[opens], t[opens], end, has_close & (t[opens] > 0))

    def statistics(self) -> Statistics:
        """Return statistics of the idle count over time and of the gap lengths."""
        times, counts = self.idle_count()
        widths = np.diff(np.append(times, self.duration_s))
        gaps = self.gaps()
        lengths = gaps.length[gaps.complete]
        seen = counts[widths > 0] if self.duration_s > 0 else counts
        mean = (
            float((counts * widths).sum() / self.duration_s)
            if self.duration_s > 0
            else float(counts[-1])
        )
        histogram, _ = np.histogram(lengths, bins=np.asarray(HISTOGRAM_EDGES_S))
        return Statistics(
            nodes=len(self.names),
            duration_s=self.duration_s,
            events=len(self),
            idle_mean=mean,
            idle_min=int(seen.min()),
            idle_max=int(seen.max()),
            idle_fraction=mean / len(self.names) if self.names else 0.0,
            gaps=len(lengths),
            gap_median_s=float(np.median(lengths)) if len(lengths) else math.nan,
            gap_mean_s=float(lengths.mean()) if len(lengths) else math.nan,
            gap_short_fraction=float((lengths < SHORT_GAP_S).mean()) if len(lengths) else math.nan,
            histogram=tuple(
                (a, b, int(c))
                for a, b, c in zip(
                    HISTOGRAM_EDGES_S[:-1], HISTOGRAM_EDGES_S[1:], histogram, strict=True
                )
            ),
        )

    # -- selection --

    def window(self, start_s: float, end_s: float) -> Trace:
        """Return the trace of ``[start_s, end_s)``, with its time starting at 0. Nodes that are
        idle at ``start_s`` become rows at time 0.
        """
        if not 0 <= start_s < end_s:
            raise TraceError(
                "window",
                [
                    f"It must begin at 0 s or later and end after its begin; got [{start_s:g}, "
                    f"{end_s:g})."
                ],
            )
        before = np.flatnonzero(self.idle_at(start_s)).astype(np.int32)
        a = int(np.searchsorted(self.time, start_s, side="right"))
        b = int(np.searchsorted(self.time, end_s, side="left"))
        return Trace.validated(
            np.concatenate([np.zeros(len(before)), self.time[a:b] - start_s]),
            np.concatenate([before, self.node[a:b]]),
            np.concatenate([np.ones(len(before), np.bool_), self.idle[a:b]]),
            self.names,
            end_s - start_s,
        )

    def select(self, nodes: Sequence[int], names: Sequence[str] | None = None) -> Trace:
        """Return the trace of these nodes (indices), numbered in the given order and renamed to
        ``names`` if given.
        """
        new_index = np.full(len(self.names), -1, dtype=np.int32)
        new_index[np.asarray(nodes, dtype=np.int64)] = np.arange(len(nodes), dtype=np.int32)
        mapped = new_index[self.node]
        keep = mapped >= 0
        chosen = tuple(self.names[k] for k in nodes) if names is None else tuple(names)
        return Trace.validated(
            self.time[keep], mapped[keep], self.idle[keep], chosen, self.duration_s
        )

    def sample(self, count: int, seed: int = 0) -> Trace:
        """Return the trace of ``count`` random nodes, in the order of the original node list.
        Raises TraceError if there are fewer.
        """
        if not 0 < count <= len(self.names):
            raise TraceError(
                "trace", [f"Cannot draw {count} nodes: the trace has {len(self.names)}."]
            )
        drawn = np.random.default_rng(seed).choice(len(self.names), size=count, replace=False)
        return self.select(np.sort(drawn).tolist())

    def sped_up(self, factor: float) -> Trace:
        """Return the same events with all times divided by ``factor``."""
        if not (factor > 0 and math.isfinite(factor)):
            raise TraceError("speed", [f"The speed-up must be a positive number; got {factor!r}."])
        return Trace.validated(
            self.time / factor, self.node, self.idle, self.names, self.duration_s / factor
        )


def merge(traces: Iterable[Trace]) -> Trace:
    """Return traces of different nodes combined as one machine. Its duration is the longest; nodes
    of shorter traces keep their last state.

    Raises TraceError if a node name occurs in several traces.
    """
    parts = list(traces)
    names = [name for part in parts for name in part.names]
    if not parts:
        raise TraceError("merge", ["There is no trace to merge."])
    if len(set(names)) != len(names):
        both = sorted({x for x in names if names.count(x) > 1})[:5]
        raise TraceError(
            "merge",
            [f"{', '.join(both)} occur in more than one of the traces; rename the nodes first."],
        )
    offsets = np.cumsum([0, *(len(part.names) for part in parts[:-1])])
    time = np.concatenate([part.time for part in parts])
    order = np.argsort(time, kind="stable")
    return Trace.validated(
        time[order],
        np.concatenate([part.node + offset for part, offset in zip(parts, offsets, strict=True)])[
            order
        ],
        np.concatenate([part.idle for part in parts])[order],
        names,
        max(part.duration_s for part in parts),
    )
