"""Objectives as bids: from a scaling curve and what a rescale costs to the value of every size.

Decides what a size is worth over the forward-looking time (section 7 of the design;
FreeTrain/BFTrainer, arXiv 2106.12091, section 3). It does not choose. A new objective is a new way
to make bids; the solvers know only values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

from allocator.bids import NO_SEAT, Bid, BidError, Sizes, SizeValues, Values
from allocator.curves import ScalingCurve
from allocator.outlook import Outlook


class Goal(str, Enum):
    """What is maximised."""

    THROUGHPUT = "throughput"
    """Samples: a job that processes more of them per second is worth more."""
    EFFICIENCY = "efficiency"
    """Single-node seconds: throughput over the job's own throughput on one node, so that light and
    heavy models count alike.
    """


class Beyond(str, Enum):
    """What to do with sizes beyond the last point of a curve."""

    HOLD = "hold"
    """Offer them at the last known throughput, with a note in the bid."""
    DROP = "drop"
    """Do not offer them, with a note in the bid."""
    ERROR = "error"
    """Refuse the bid."""


@dataclass(frozen=True)
class RescaleCost:
    """Seconds in which a job processes nothing, by kind of change. The defaults are what Summit
    showed (up 17-19 s, down 11-13 s).
    """

    up_s: float = 18.0
    """Growing, charged at the throughput before."""
    down_s: float = 12.0
    """Shrinking, charged at the throughput before."""
    start_s: float = 18.0
    """Starting from nothing, or on another class of nodes, charged at the throughput after."""

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s", "start_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BidError(f"The rescale cost {name} is {value}; give seconds, 0 or more.")


SUMMIT = RescaleCost()
"""The default costs."""


@lru_cache(maxsize=4096)
def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … up to ``largest``."""
    return tuple(1 << p for p in range(max(0, largest).bit_length()))


@lru_cache(maxsize=4096)
def multiples(of: int, largest: int) -> tuple[int, ...]:
    """``of``, ``2·of``, … up to ``largest``."""
    if of < 1:
        raise BidError(f"Sizes cannot be multiples of {of}; give 1 or more.")
    return tuple(range(of, largest + 1, of))


@lru_cache(maxsize=4096)
def _every_size(low: int, high: int) -> Sizes:
    sizes = np.arange(low, high + 1, dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


@lru_cache(maxsize=4096)
def _allowed_sizes(low: int, high: int, allowed: tuple[int, ...]) -> Sizes:
    sizes = np.array(sorted({int(k) for k in allowed if low <= k <= high}), dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


def make_bid(
    job: str,
    curve: ScalingCurve | Mapping[str, ScalingCurve],
    *,
    current: int = 0,
    current_class: str = "default",
    min_nodes: int = 1,
    max_nodes: int,
    allowed: Iterable[int] | None = None,
    weight: float = 1.0,
    goal: Goal = Goal.THROUGHPUT,
    t_fwd_s: float = 120.0,
    cost: RescaleCost = SUMMIT,
    must_run: bool = False,
    restarting: bool = False,
    beyond: Beyond = Beyond.HOLD,
    outlooks: Mapping[str, Outlook] | None = None,
) -> Bid:
    """The bid of one job.

    ``value(k) = weight · (t_fwd_s · O(k) − cost(current → k))`` with O the curve, and cost
    ``O(current) · up_s`` for k > current > 0, ``O(current) · down_s`` for k < current, ``O(k) ·
    start_s`` for current = 0 or on another class than ``current_class``, 0 for k = current
    (``O(current) · down_s`` when ``restarting``). Letting go of all nodes is a shrinkage like any
    other: were it free, two like jobs would take turns at every plan where starting is free.
    Without nodes, none are worth 0.

    Args:
        curve: one curve for class ``current_class``, or one curve a class the job can use.
        current: nodes the job runs on now, 0 when it does not run.
        min_nodes, max_nodes: inclusive limits, the same for every class.
        allowed: sizes the job accepts within the limits; None for all of them. See
            :func:`powers_of_two`, :func:`multiples`.
        weight: factor on the job's value, 0 or more.
        goal: THROUGHPUT values samples; EFFICIENCY divides the curve of each class by its
            throughput on one node, O(k)/O(1), so that values are single-node seconds (where O(1) is
            0, by the first throughput above 0 divided by its nodes).
        t_fwd_s: forward-looking time, seconds.
        must_run: whether the job is to be placed before anything else counts.
        restarting: whether its workers have to be restarted at whatever size (they broke, or a node
            of theirs is lost).
        beyond: sizes beyond the last point of the curve: held at the last throughput (default),
            dropped or refused. Whatever happens, the bid's notes say it.
        outlooks: what is to be expected of the nodes, for each class; None where nothing is. It
            takes the place of ``t_fwd_s``: ``t_fwd_s · O(k)`` becomes what is expected to be
            processed within the outlook's window, ``kept · O(k) + (window − kept) · O(left) − hit ·
            (work_s · O(k) + down_s · O(left))`` (see :meth:`allocator.outlook.Outlook.of`).

    Raises:
        BidError: on limits, weights, times or sizes that make no sense, with the job's name.
    """
    if min_nodes < 1 or max_nodes < min_nodes:
        raise BidError(f"Job {job} asks for {min_nodes}:{max_nodes} nodes; give 1 <= min <= max.")
    if current < 0:
        raise BidError(f"Job {job} is said to run on {current} nodes now; give 0 or more.")
    if not (math.isfinite(weight) and weight >= 0):
        raise BidError(f"Job {job} has weight {weight}; give a finite number, 0 or more.")
    if not (math.isfinite(t_fwd_s) and t_fwd_s > 0):
        raise BidError(f"The forward-looking time is {t_fwd_s} s; give a number above 0.")
    only = None if allowed is None else tuple(allowed)
    if only is None:
        sizes = _every_size(min_nodes, max_nodes)
    else:
        sizes = _allowed_sizes(min_nodes, max_nodes, only)
        if not len(sizes):
            raise BidError(
                f"None of the sizes job {job} accepts lies within {min_nodes}:{max_nodes}; "
                "widen the limits or the sizes."
            )
    curves = {current_class: curve} if isinstance(curve, ScalingCurve) else curve
    options: dict[str, SizeValues] = {}
    notes: list[str] = []
    nothing = 0.0
    for node_class, known in curves.items():
        until = int(sizes[-1])
        if until > known.largest:
            until = _within(sizes, known, beyond, job, notes)
        running_here = current if node_class == current_class else 0
        args = known, min_nodes, until, only, running_here, weight, goal, t_fwd_s, cost, restarting
        outlook = outlooks.get(node_class) if outlooks else None
        options[node_class], letting_go = (
            _kept_options(*args) if outlook is None else _options(*args, outlook)
        )
        nothing -= letting_go
    held = (current_class, current) if current else NO_SEAT
    return Bid(job, options, -math.inf if must_run else nothing, held, tuple(notes))


def _options(
    curve: ScalingCurve,
    low: int,
    high: int,
    allowed: tuple[int, ...] | None,
    current: int,
    weight: float,
    goal: Goal,
    t_fwd_s: float,
    cost: RescaleCost,
    restarting: bool,
    outlook: Outlook | None = None,
) -> tuple[SizeValues, float]:
    """The options on one class, and what letting go of all its nodes costs."""
    sizes = _every_size(low, high) if allowed is None else _allowed_sizes(low, high, allowed)
    unit = _single_node_rate(curve) if goal is Goal.EFFICIENCY else 1.0
    rates, before = curve.rates(sizes) / unit, curve.at(current) / unit
    if outlook is None:
        processed = t_fwd_s * rates
    else:
        kept, hit, left = outlook.of(sizes)
        after = np.where(left >= low, curve.rates(left) / unit, 0.0)
        processed = kept * rates + (outlook.window_s - kept) * after
        processed -= hit * (outlook.work_s * rates + cost.down_s * after)
    return SizeValues(
        sizes, weight * (processed - _pauses(sizes, rates, before, current, cost, restarting))
    ), weight * before * cost.down_s


_kept_options = lru_cache(maxsize=4096)(_options)
"""Most jobs are as they were at the last plan."""


def _pauses(
    sizes: Sizes, rates: Values, before: float, current: int, cost: RescaleCost, restarting: bool
) -> Values:
    if current == 0:
        return cost.start_s * rates
    stay = cost.down_s if restarting else 0.0
    pause = np.where(sizes > current, cost.up_s, np.where(sizes < current, cost.down_s, stay))
    return np.asarray(before * pause)


def _within(sizes: Sizes, curve: ScalingCurve, beyond: Beyond, job: str, notes: list[str]) -> int:
    """The largest size to offer when some lie beyond the curve."""
    outside = sizes[sizes > curve.largest]
    what = f"the curve of job {job} ends at {curve.largest} nodes"
    span = f"{outside[0]}" if len(outside) == 1 else f"{outside[0]} to {outside[-1]}"
    if beyond is Beyond.ERROR:
        raise BidError(
            f"{what[0].upper()}{what[1:]} but size {span} is asked for; measure it there or "
            "lower the job's maximum."
        )
    if beyond is Beyond.DROP:
        notes.append(f"{what}; size {span} is not offered.")
        return curve.largest
    notes.append(f"{what}; size {span} is valued at the throughput of {curve.largest} nodes.")
    return int(sizes[-1])


def _single_node_rate(curve: ScalingCurve) -> float:
    one = curve.at(1)
    if one > 0:
        return one
    return next((rate / nodes for nodes, rate in curve.points if rate > 0), 1.0)
