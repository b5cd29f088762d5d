"""What a profile of a job would be worth, and what it would cost. Pure functions.

Decides whether knowing a job's scaling better pays over the work that is left. The value is that of
perfect information (Raiffa and Schlaifer, *Applied Statistical Decision Theory*, 1961, chapter 4):
how much better the size would be chosen that brings most, less the nodes' price, if the curve were
known. What the running job shows of itself at the size it is on, a profile does not add; so the
throughput there counts as known, and what is not known is the shape of the curve from there on. Of
that, only what is possible counts: *m* times the nodes bring m^x times the throughput, with any x
from 0 to 1 where nothing says more, so that ln of it has the standard deviation ln(m)/√12 at most,
and no case is looked at in which they bring more than *m* times as much. The fitted law is much
less sure of itself where one size was measured, and what it cannot exclude would be worth a profile
of every job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jpa.curve import MeasuredCurve

_NODES = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
"""Gauss and Hermite's points for a normal distribution: (standard deviations, weight)."""


@dataclass(frozen=True)
class Circumstances:
    """What surrounds a job when it is asked whether it is worth a profile."""

    nodes: int
    """Where it runs; the size at which its throughput will be known anyway."""
    price: float
    """Samples/s that one node more would bring elsewhere, by this job's measure."""
    left_s: float
    """For how long the knowledge would be of use, seconds, expected; of all jobs that share it."""
    up_s: float
    """Pause of a growth, seconds."""
    down_s: float
    """Pause of a shrinkage, seconds."""
    visit_s: float
    """Time in which one size is measured, seconds."""
    visits: int
    """Sizes that a profile would visit."""
    doubt: float = 1.0
    """What was expected of other sizes turns out wrong by so many times as much as it claims."""
    neighbour: float = 0.0
    """Throughput of another job, by this job's measure: one gives up nodes for the profile, and
    gets nodes when it is over.
    """


def shape_std(curve: MeasuredCurve, size: int, nodes: int) -> float:
    """Relative standard deviation of the throughput at ``size`` where that at ``nodes`` is known:
    what both have in common is the level.
    """
    here, spread_here = curve.estimate(nodes)
    rate, spread = curve.estimate(size)
    if rate <= 0 or here <= 0:
        return 0.0
    return math.sqrt(max((spread / rate) ** 2 - (spread_here / here) ** 2, 0.0))


def knowledge(
    curve: MeasuredCurve, sizes: Sequence[int], nodes: int, price: float, doubt: float = 1.0
) -> float:
    """Samples/s by which the best size would be better on average if the shape were known.

    Args:
        curve: what is known now, with its standard deviations.
        sizes: those that the job may have.
        nodes: the size whose throughput is taken to be known.
        price: samples/s that each node would bring elsewhere.
        doubt: what the standard deviations of other sizes are multiplied with.
    """
    here = curve.estimate(nodes)[0]
    if not sizes or here <= 0:
        return 0.0
    rates = [curve.estimate(k)[0] for k in sizes]
    spreads = []
    for k in sizes:
        shape = doubt * shape_std(curve, k, nodes)
        possible = math.log(k / nodes) / math.sqrt(12.0)
        spreads.append(math.copysign(min(shape, abs(possible)), possible))
    expected = [0.0] * len(sizes)
    informed = 0.0
    for deviation, weight in _NODES:
        worth = [
            min(rate * math.exp(deviation * s - 0.5 * s * s), here * max(1.0, k / nodes))
            - price * k
            for k, rate, s in zip(sizes, rates, spreads, strict=True)
        ]
        informed += weight * max(0.0, *worth)
        expected = [e + weight * w for e, w in zip(expected, worth, strict=True)]
    return max(0.0, informed - max(0.0, *expected))


def cost(curve: MeasuredCurve, sizes: Sequence[int], around: Circumstances) -> float:
    """Samples that a profile costs: one rescale up, the rescales down, and the visits to sizes at
    which the job is slower than where it runs, and a neighbour's rescales down and up. What the
    nodes it lets go of bring elsewhere, at their price, is taken off.
    """
    here = curve.estimate(around.nodes)[0]
    lost = 0.0
    for k in sizes:
        rate = curve.estimate(k)[0]
        lost += max(0.0, (here - rate) - around.price * (around.nodes - k))
    lost *= around.visit_s * around.visits / max(1, len(sizes))
    lost += around.neighbour * (around.up_s + around.down_s)
    return lost + here * (around.up_s + around.down_s * max(0, around.visits - 1))


def pays(curve: MeasuredCurve, sizes: Sequence[int], around: Circumstances) -> bool:
    """Whether what a profile would tell is expected to be worth more than it costs."""
    known = knowledge(curve, sizes, around.nodes, around.price, around.doubt)
    return known * around.left_s > cost(curve, sizes, around)
