"""Replay: a trace determines which nodes are idle at a given time.

This module decides which nodes of a trace represent the virtual ones, how its time is compressed,
and which changes are due at a time. It has no clock: the caller passes the time. The cluster
decides what to do about a change (start, preempt).

:func:`read_replay` converts a trace file into the states of an embedded cluster's nodes, also for
callers that want to know in advance whether a cluster would start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from scavenger.trace.amounts import has_amounts
from scavenger.trace.amounts import parse as parse_amounts
from scavenger.trace.files import parse, read_text
from scavenger.trace.trace import Trace, TraceError

AtEnd = Literal["repeat", "idle", "busy", "hold"]
AT_END: tuple[AtEnd, ...] = ("repeat", "idle", "busy", "hold")


@dataclass(frozen=True)
class NodeChange:
    """At ``time`` (seconds of replay) ``node`` becomes idle (True) or busy (False)."""

    time: float
    node: str
    idle: bool


class Changes(Protocol):
    """The changes of the nodes that a cluster goes through: a :class:`Replay`, or those that a
    benchmark makes."""

    time: float
    """Time of the last call of :meth:`advance`, seconds since the start; negative before it."""

    @property
    def names(self) -> Sequence[str]:
        """Names whose changes it returns, as in :attr:`Replay.names`; empty if not known."""

    def advance(self, time: float) -> list[NodeChange]:
        """Return the changes since the last call, in order."""


class Replay:
    """A cursor over a trace: :meth:`advance` returns the changes since the last call.

    ``at_end``: what happens after the trace: it begins again (``repeat``), all nodes stay ``idle``
    or ``busy``, or the last state stays (``hold``). Before the first call of :meth:`advance` all
    nodes are busy.
    """

    def __init__(self, trace: Trace, at_end: AtEnd = "repeat") -> None:
        if at_end not in AT_END:
            raise TraceError(
                "replay",
                [f"What happens at the end must be one of {', '.join(AT_END)}; got '{at_end}'."],
            )
        if at_end == "repeat" and not trace.duration_s > 0:
            raise TraceError(
                "replay",
                ["A trace that lasts 0 s cannot be repeated; use another end, such as 'hold'."],
            )
        self.trace = trace
        self.names = trace.names
        """Names of the nodes; a node with several GPUs that change separately has one for each."""
        self.at_end = at_end
        self.idle = np.zeros(len(trace.names), dtype=np.bool_)
        """(N,) Whether each node is idle at the last :meth:`advance`."""
        self.time = -1.0
        self._round = 0
        self._cursor = 0
        self._over = False

    def advance(self, time: float) -> list[NodeChange]:
        """Return the changes in ``(last time, time]``, in order. A node that changes twice is
        listed twice. ``time`` must not decrease.
        """
        if time < self.time:
            raise ValueError(f"Replay time goes back from {self.time:g} s to {time:g} s.")
        self.time = time
        out: list[NodeChange] = []
        while not self._over:
            offset = self._round * self.trace.duration_s
            stop = int(np.searchsorted(self.trace.time, time - offset, side="right"))
            for k in range(self._cursor, stop):
                self._set(
                    out,
                    float(self.trace.time[k]) + offset,
                    int(self.trace.node[k]),
                    bool(self.trace.idle[k]),
                )
            self._cursor = max(self._cursor, stop)
            if time - offset < self.trace.duration_s:
                break
            self._end_round(out, offset + self.trace.duration_s)
        return out

    def _end_round(self, out: list[NodeChange], now: float) -> None:
        if self.at_end == "repeat":
            self._round += 1
            self._cursor = int(np.searchsorted(self.trace.time, 0.0, side="right"))
            target = self.trace.idle_at(0.0)
        else:
            self._over = True
            target = {
                "hold": self.idle.copy(),
                "idle": np.ones_like(self.idle),
                "busy": np.zeros_like(self.idle),
            }[self.at_end]
        for k in range(len(target)):
            self._set(out, now, k, bool(target[k]))

    def _set(self, out: list[NodeChange], time: float, node: int, idle: bool) -> None:
        if bool(self.idle[node]) != idle:
            self.idle[node] = idle
            out.append(NodeChange(time, self.trace.names[node], idle))


USEFUL_GAP_S = 10.0
"""Length of a gap in real seconds below which a job can hardly grow and shrink again. Used only to
choose nodes and window; no gap is dropped.
"""


def fit(
    trace: Trace,
    names: Sequence[str],
    *,
    speedup: float = 1.0,
    duration_s: float | None = None,
    start_s: float | None = None,
    seed: int = 0,
    useful_gap_s: float = USEFUL_GAP_S,
) -> Trace:
    """Return a trace for virtual nodes, in real (sped-up) seconds.

    A trace that already has exactly these nodes keeps them. Otherwise the most active nodes are
    chosen (:func:`active_nodes`).

    Args:
        trace: the trace.
        names: names of the virtual nodes.
        speedup: divisor of the trace's times.
        duration_s: length of the window, real seconds; None: all of the trace.
        start_s: beginning of the window, seconds of the trace; None: where most useful gaps begin.
        seed: seed of the choice of the first node.
        useful_gap_s: minimum length of a useful gap, real seconds.

    Raises:
        TraceError: the trace has too few nodes, or no event.
    """
    if not (speedup > 0 and math.isfinite(speedup)):
        raise TraceError("replay", [f"The speed-up must be a positive number; got {speedup!r}."])
    if len(trace.names) < len(names):
        raise TraceError(
            "replay",
            [
                f"The trace has {len(trace.names)} nodes, fewer than the {len(names)} wanted; "
                "take fewer virtual nodes or another trace."
            ],
        )
    if not len(trace):
        raise TraceError(
            "replay",
            ["The trace holds no event, so no node would ever be idle; take another trace."],
        )
    useful_s = useful_gap_s * speedup
    if duration_s is not None and duration_s * speedup < trace.duration_s:
        begin = (
            busiest_start(trace, duration_s * speedup, useful_s=useful_s)
            if start_s is None
            else start_s
        )
        trace = trace.window(begin, min(begin + duration_s * speedup, trace.duration_s))
    elif start_s:
        trace = trace.window(start_s, trace.duration_s)
    if set(trace.names) == set(names):
        chosen = [trace.names.index(name) for name in names]
    else:
        chosen = active_nodes(trace, len(names), seed=seed, useful_s=useful_s)
    return trace.select(chosen, names).sped_up(speedup)


def busiest_start(trace: Trace, window_s: float, *, useful_s: float = 0.0) -> float:
    """Return the start (seconds) of the window of this length with the largest number of different
    times at which gaps of at least ``useful_s`` begin.

    Times are counted instead of gaps, because a whole machine that drains at once is one event.

    Args:
        trace: the trace.
        window_s: length of the window, seconds.
        useful_s: minimum length of a gap that counts, seconds.
    """
    gaps = trace.gaps()
    opened = np.unique(gaps.start[gaps.length >= useful_s])
    starts = opened[opened + window_s <= trace.duration_s]
    if not len(starts):
        return 0.0
    inside = np.searchsorted(opened, starts + window_s) - np.searchsorted(opened, starts)
    return float(starts[int(np.argmax(inside))])


def active_nodes(trace: Trace, count: int, *, seed: int = 0, useful_s: float = 0.0) -> list[int]:
    """Return the indices of ``count`` nodes that make an interesting replay.

    The score of a node is sqrt(g) · p(1-p), with g the number of gaps of at least ``useful_s``
    seconds and p the fraction of time idle in these. Nodes of one big job change state together. So
    nodes are chosen one after the other by the score times the smallest fraction of time in which
    the state differs from that of a node chosen earlier. The first is drawn from the best
    ``4·count`` with ``seed``.

    Args:
        trace: the trace.
        count: number of nodes to choose.
        seed: seed of the choice of the first node.
        useful_s: minimum length of a gap that counts, seconds.
    """
    gaps = trace.gaps()
    useful = gaps.length >= useful_s
    number = np.bincount(gaps.node[useful], minlength=len(trace.names))
    idle_s = np.bincount(gaps.node[useful], weights=gaps.length[useful], minlength=len(trace.names))
    p = np.clip(idle_s / max(trace.duration_s, 1e-9), 0.0, 1.0)
    score = np.sqrt(number) * p * (1.0 - p)
    pool = np.argsort(-score, kind="stable")[: 64 * count]
    grid = np.linspace(0.0, trace.duration_s, 240, endpoint=False)
    states = np.stack([trace.idle_at(float(t))[pool] for t in grid], axis=1)
    weight = score[pool] + 1e-12  # nodes without activity are chosen last
    active = max(int((score[pool] > 0).sum()), 1)
    first = int(np.random.default_rng(seed).integers(min(active, 4 * count)))
    chosen = [first]
    distance = np.ones(len(pool))
    while len(chosen) < count:
        distance = np.minimum(distance, (states != states[chosen[-1]]).mean(axis=1) + 1e-6)
        value = weight * distance
        value[chosen] = -1.0
        chosen.append(int(np.argmax(value)))
    return [int(pool[k]) for k in chosen]


def read_replay(
    path: Path,
    nodes: Sequence[str],
    *,
    speedup: float = 1.0,
    seed: int = 0,
    start_s: float | None = None,
    duration_s: float | None = None,
    trace_end_s: float | None = None,
    at_end: AtEnd = "repeat",
) -> Replay:
    """Return the states of ``nodes`` by the trace in ``path``. With amounts, they are those of the
    units of the nodes.

    Args:
        path: The trace.
        nodes: Names of the cluster's nodes.
        speedup: Seconds of the trace per real second.
        seed: Seed of the choice of the trace's nodes.
        start_s: Start in the trace, seconds; None: where most gaps begin.
        duration_s: Real seconds of the trace to use; None: all.
        trace_end_s: End of the trace's observation, seconds; None: its last event.
        at_end: What comes after the trace: repeat, idle, busy, hold.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a trace, or does not fit the options.
    """
    text = read_text(path)
    if has_amounts(text):
        amounts = parse_amounts(text, duration_s=trace_end_s, where=str(path)).for_nodes(nodes)
        units = amounts.slots()
        chosen = fit(
            units, units.names, speedup=speedup, duration_s=duration_s, start_s=start_s, seed=seed
        )
        return Replay(chosen, at_end)
    whole = parse(text, duration_s=trace_end_s, where=str(path))
    if set(whole.names) < set(nodes):  # nodes without an event are always busy
        whole = parse(text, names=nodes, duration_s=trace_end_s, where=str(path))
    cut = fit(
        whole, nodes, speedup=speedup, duration_s=duration_s, start_s=start_s, seed=seed
    )  # fmt: skip
    return Replay(cut, at_end)
