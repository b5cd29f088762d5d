"""The value of every size of a job, computed one at a time: the reference for
:mod:`allocator.valuation`, which values all sizes of a plan together.

The arithmetic follows the order of the formulas, so that the results are equal to the last bit.
"""

from __future__ import annotations

import itertools

from allocator import BidRequest, Goal, ScalingCurve


def values(request: BidRequest, pool: str) -> dict[int, float]:
    """Size → value, of the sizes that the job offers in one pool; none lies beyond the curve."""
    curve = request.curves[pool]
    current = request.current if pool == request.current_pool else 0
    unit = _single(curve) if request.bidder.goal is Goal.EFFICIENCY else 1.0
    before = curve.at(current) / unit
    cost = request.cost_in.get(pool, request.cost)
    largest = min(request.bidder.max_nodes, request.limits.get(pool, request.bidder.max_nodes))
    value_of = {}
    for size in range(request.bidder.min_nodes, largest + 1):
        if request.bidder.sizes is not None and size not in request.bidder.sizes:
            continue
        rate = read(curve, size) / unit
        processed = request.t_fwd_s * rate
        if current == 0:
            pause = cost.start_s * rate
        elif size > current:
            pause = before * cost.up_s + cost.join_s * max(0.0, rate - before)
        elif size < current or request.bidder.broken:
            pause = before * cost.down_s
        else:
            pause = 0.0
        value_of[size] = request.bidder.weight * (processed - pause)
    return value_of


def read(curve: ScalingCurve, size: float) -> float:
    """Return the throughput at a size, which may be fractional."""
    points = [(0, 0.0), *curve.points]
    for (low, below), (high, above) in itertools.pairwise(points):
        if size < high:
            return (above - below) / (high - low) * (size - low) + below
    return points[-1][1]


def _single(curve: ScalingCurve) -> float:
    one = curve.at(1)
    return one if one > 0 else next((rate / n for n, rate in curve.points if rate > 0), 1.0)
