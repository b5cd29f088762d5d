"""Traces: which node was idle when.

A trace is a list of events "from now on this node is idle / busy", sorted by time, on a known list
of nodes. This module decides what a valid trace is, reads and writes it, cuts it (nodes, window,
speed) and counts what is in it. It does not decide which nodes a replay uses
(:mod:`scavenger.trace.replay`) nor invents traces (:mod:`scavenger.trace.synthesis`).

The file is CSV, gzip when its name ends in ``.gz``, with the header ``time_s,node,event``: seconds
from the start, a node name, ``idle`` or ``busy``. Rows at time 0 are the nodes idle at the start;
every other node is busy then. Events are held as three arrays, so that a week of a large machine
(10^5 to 10^6 events) costs megabytes and its events are read without an object each.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scavenger.trace.checks import (
    MAX_PROBLEMS,
    BoolArray,
    FloatArray,
    IntArray,
    TraceError,
    node_problems,
    numbers,
    order_problems,
)
from scavenger.trace.statistics import HISTOGRAM_EDGES_S, SHORT_GAP_S, Statistics, summary

__all__ = [
    "HEADER",
    "Batch",
    "BoolArray",
    "FloatArray",
    "Gaps",
    "IntArray",
    "Statistics",
    "Trace",
    "TraceError",
    "merge",
    "parse",
    "read",
    "read_names",
    "summary",
    "write",
]

HEADER = "time_s,node,event"


class Batch(NamedTuple):
    """Everything that happens at one instant: indices into ``Trace.names``."""

    time: float
    idle: IntArray
    busy: IntArray


@dataclass(frozen=True, eq=False)
class Gaps:
    """Idle intervals, one entry each: ``node`` (index), ``start`` and ``end`` in seconds.

    ``complete`` is False where the interval was already open when the trace began or still open
    when it ended: its true length is not known.
    """

    node: IntArray
    start: FloatArray
    end: FloatArray
    complete: BoolArray

    @property
    def length(self) -> FloatArray:
        """Lengths in seconds."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Trace:
    """Idle/busy events of nodes, valid by construction (see :meth:`validated`).

    ``time`` (E,) seconds from the start, not decreasing; ``node`` (E,) index into ``names``;
    ``idle`` (E,) True where the node becomes idle, False where it becomes busy; ``duration_s``:
    where the observation ends, at or after the last event. Nodes without events are busy
    throughout.
    """

    time: FloatArray
    node: IntArray
    idle: BoolArray
    names: tuple[str, ...]
    duration_s: float

    # -- making one
    # ----------------------------------------

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
        """Check the events and make a trace of them. Raises TraceError listing what is wrong, by
        event number + ``first_line``.
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
        """A trace from idle intervals ``[start, end)`` in seconds on node indices.

        Intervals of one node that touch or overlap are joined; what lies outside ``[0,
        duration_s)`` is cut off. No order is needed.
        """
        n = np.asarray(node, dtype=np.int32)
        s = np.clip(np.asarray(start, dtype=np.float64), 0.0, duration_s)
        e = np.clip(np.asarray(end, dtype=np.float64), 0.0, duration_s)
        keep = e > s
        n, s, e = n[keep], s[keep], e[keep]
        order = np.lexsort((s, n))
        n, s, e = n[order], s[order], e[order]
        if len(n):
            # Joining: within a node, an interval starts a new gap when it begins after everything
            # before it has ended. Offsetting each node by more than the duration lets one running
            # maximum serve all nodes.
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

    # -- reading it
    # ----------------------------------------

    def __len__(self) -> int:
        return len(self.time)

    def batch_edges(self) -> npt.NDArray[np.int64]:
        """Offsets (B+1,) into the event arrays: batch b is ``[edges[b], edges[b+1])`` and all its
        events have the same time.
        """
        if not len(self.time):
            return np.zeros(1, dtype=np.int64)
        change = np.flatnonzero(np.diff(self.time)) + 1
        return np.concatenate([[0], change, [len(self.time)]]).astype(np.int64)

    def batches(self) -> Iterator[Batch]:
        """The events in order, those of one instant together."""
        edges = self.batch_edges().tolist()
        for a, b in itertools.pairwise(edges):
            nodes, idle = self.node[a:b], self.idle[a:b]
            yield Batch(float(self.time[a]), nodes[idle], nodes[~idle])

    def idle_at(self, time_s: float) -> BoolArray:
        """(N,) True where the node is idle at ``time_s`` (events at that very time included)."""
        state = np.zeros(len(self.names), dtype=np.bool_)
        stop = int(np.searchsorted(self.time, time_s, side="right"))
        # Assignment by index keeps the last value written, which is the latest event.
        state[self.node[:stop]] = self.idle[:stop]
        return state

    def idle_count(self) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """Step function of the number of idle nodes: times (K,) starting at 0, and the count from
        each time on.
        """
        edges = self.batch_edges()
        if len(edges) == 1:
            return np.zeros(1), np.zeros(1, dtype=np.int64)
        steps = np.add.reduceat(np.where(self.idle, 1, -1), edges[:-1])
        times, counts = self.time[edges[:-1]], np.cumsum(steps)
        if times[0] > 0:
            times, counts = np.concatenate([[0.0], times]), np.concatenate([[0], counts])
        return times, counts.astype(np.int64)

    def gaps(self) -> Gaps:
        """All idle intervals, ordered by node, then time; those open at the end are closed at
        ``duration_s``.
        """
        order = np.argsort(self.node, kind="stable")
        n, t, i = self.node[order], self.time[order], self.idle[order]
        opens = np.flatnonzero(i)
        closes = opens + 1
        # The events of a node alternate, so the close of an opening is the next row if that belongs
        # to the same node.
        has_close = closes < len(n)
        has_close[has_close] = n[closes[has_close]] == n[opens[has_close]]
        end = np.full(len(opens), self.duration_s)
        end[has_close] = t[closes[has_close]]
        return Gaps(n[opens], t[opens], end, has_close & (t[opens] > 0))

    def statistics(self) -> Statistics:
        """Idle counts over time and lengths of the gaps."""
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

    # -- cutting it
    # ----------------------------------------

    def window(self, start_s: float, end_s: float) -> Trace:
        """The trace of ``[start_s, end_s)``, its time starting at 0 again; nodes idle at
        ``start_s`` are rows at time 0.
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
        """Only these nodes (indices), numbered in the order given and renamed to ``names`` where
        given.
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
        """``count`` nodes drawn at random, in the order of the original node list. Raises
        TraceError when there are fewer.
        """
        if not 0 < count <= len(self.names):
            raise TraceError(
                "sample", [f"Cannot draw {count} nodes: the trace has {len(self.names)}."]
            )
        drawn = np.random.default_rng(seed).choice(len(self.names), size=count, replace=False)
        return self.select(np.sort(drawn).tolist())

    def sped_up(self, factor: float) -> Trace:
        """The same events with all times divided by ``factor``."""
        if not (factor > 0 and math.isfinite(factor)):
            raise TraceError("speed", [f"The speed-up must be a positive number; got {factor!r}."])
        return Trace.validated(
            self.time / factor, self.node, self.idle, self.names, self.duration_s / factor
        )


def merge(traces: Iterable[Trace]) -> Trace:
    """Traces of different nodes side by side, as one machine. The longest duration counts; shorter
    ones keep their last state.

    Raises TraceError when a node name occurs in more than one.
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


# -- files
# ----------------------------------------


def read(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    duration_s: float | None = None,
) -> Trace:
    """Read a trace file (CSV, gzip when the content is gzip whatever the name).

    ``names``: the machine's nodes, when some of them may have no event; default: the nodes named in
    the file, in order of appearance. ``duration_s``: end of the observation; default the last
    event. Raises TraceError with the line number of every problem (the first 20), also when the
    file cannot be read.
    """
    where = str(path)
    try:
        raw = Path(path).read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise TraceError(where, ["There is no such file."]) from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(
            where, [f"The gzip file is damaged ({error}). Fetch or write it again."]
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(
            where, [f"Not a text file (byte {error.start} is not UTF-8). A trace is CSV: {HEADER}."]
        ) from None
    except OSError as error:
        raise TraceError(where, [f"The file cannot be read: {error.strerror or error}."]) from None
    return parse(text, names=names, duration_s=duration_s, where=where)


def parse(
    text: str,
    *,
    names: Sequence[str] | None = None,
    duration_s: float | None = None,
    where: str = "trace",
) -> Trace:
    """The trace in CSV ``text``; see :func:`read`."""
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise TraceError(
            where,
            [f"The file is empty. A trace is CSV with the header {HEADER} and a row per event."],
        )
    if lines[0].replace(" ", "") != HEADER:
        raise TraceError(where, [f"line 1: The header must be '{HEADER}'; got '{lines[0][:60]}'."])
    rows = [line.split(",") for line in lines[1:]]
    if not rows:
        raise TraceError(
            where, ["There is a header but no event below it. A trace has a row per event."]
        )
    problems: list[tuple[int, str]] = []
    good: list[list[str]] = []
    line_of: list[int] = []
    index: dict[str, int] = {name: k for k, name in enumerate(names or ())}
    for line_number, row in enumerate(rows, start=2):
        if len(row) != 3:
            problems.append(
                (line_number, f"A row has 3 columns ({HEADER}); this one has {len(row)}.")
            )
            continue
        good.append(row)
        line_of.append(line_number)
    time, bad_times = numbers([row[0] for row in good])
    problems += [
        (line_of[k], f"The time is not a number of seconds: '{good[k][0][:40]}'.")
        for k in bad_times
    ]
    node = np.zeros(len(good), dtype=np.int32)
    idle = np.zeros(len(good), dtype=np.bool_)
    for k, (_, raw_name, raw_event) in enumerate(good):
        name, event = raw_name.strip(), raw_event.strip()
        if event == "idle":
            idle[k] = True
        elif event != "busy":
            problems.append((line_of[k], f"The event must be idle or busy; got '{event[:40]}'."))
        if not name:
            problems.append((line_of[k], "The node name is missing."))
        number = index.get(name)
        if number is None:
            if names is not None and name:
                problems.append(
                    (line_of[k], f"Node {name[:60]} is not in the node list of {len(names)} nodes.")
                )
            number = index[name] = len(index)
        node[k] = number
    if not bad_times:
        lines_at = np.asarray(line_of)
        unsorted = order_problems(time)
        problems += [(int(lines_at[k]), s) for k, s in unsorted]
        # An unsorted file makes every later statement about a node's order worthless, so it is
        # checked only when sorted.
        if not unsorted and not problems:
            problems += [
                (int(lines_at[k]), s) for k, s in node_problems(time, node, idle, list(index))
            ]
    if problems:
        problems.sort()
        raise TraceError(
            where, [f"line {n}: {s}" for n, s in problems[:MAX_PROBLEMS]], len(problems)
        )
    return Trace.validated(time, node, idle, tuple(index), duration_s, where=where, first_line=2)


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as CSV, compressed when the name ends in ``.gz``. The file appears whole or
    not at all.
    """
    out = io.StringIO()
    out.write(HEADER + "\n")
    words = np.where(trace.idle, "idle", "busy").tolist()
    for t, n, word in zip(trace.time.tolist(), trace.node.tolist(), words, strict=True):
        out.write(f"{_short(t)},{trace.names[n]},{word}\n")
    data = out.getvalue().encode()
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    # mtime 0: the same trace gives the same bytes.
    temporary.write_bytes(gzip.compress(data, mtime=0) if target.name.endswith(".gz") else data)
    temporary.replace(target)


def read_names(path: str | os.PathLike[str]) -> list[str]:
    """Node names, one per line. Raises TraceError when the file cannot be read or holds none."""
    try:
        found = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(str(path), [f"The node list cannot be read: {error}."]) from None
    if not found:
        raise TraceError(str(path), ["The node list is empty; it has one node name per line."])
    return found


def _short(value: float) -> str:
    """Shortest text that reads back as the same number, without '.0'."""
    return str(int(value)) if value.is_integer() else repr(value)


if __name__ == "__main__":
    import sys

    from scavenger.trace.__main__ import main

    sys.exit(main())
