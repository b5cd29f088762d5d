"""From what jobs ask for to their bids: what every size of each is worth.

Decides what a size is worth over the forward-looking time (section 7 of the design;
FreeTrain/BFTrainer, arXiv 2106.12091, section 3). It does not choose. A new objective is a new way
to make bids; the solvers know only values. The sizes of many jobs are valued in one go, so that a
plan of hundreds of jobs costs tens of array operations and not thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from allocator.bids import NO_SEAT, Bid, BidError, Sizes, SizeValues, Values
from allocator.curves import CurveTable, ScalingCurve
from allocator.objectives import SUMMIT, Beyond, Goal, RescaleCost
from allocator.outlook import Outlook, expectations

_AT_ONCE = 16384
"""Sizes that are valued in one go: more would leave the processor's cache."""


class BidRequest(NamedTuple):
    """What one job asks for, and what its bid is made from."""

    job: str
    curves: Mapping[str, ScalingCurve]
    """One for each class of nodes that the job can use."""
    current: int = 0
    """Nodes the job runs on now, 0 when it does not run."""
    current_class: str = "default"
    min_nodes: int = 1
    max_nodes: int = 1
    """Inclusive limits, the same for every class."""
    allowed: tuple[int, ...] | None = None
    """Sizes the job accepts within the limits; None for all of them. See
    :func:`~allocator.objectives.powers_of_two`, :func:`~allocator.objectives.multiples`.
    """
    weight: float = 1.0
    """Factor on the job's value, 0 or more."""
    goal: Goal = Goal.THROUGHPUT
    """THROUGHPUT values samples; EFFICIENCY divides the curve of each class by its throughput on
    one node, O(k)/O(1), so that values are single-node seconds (where O(1) is 0, by the first
    throughput above 0 divided by its nodes).
    """
    t_fwd_s: float = 120.0
    """Forward-looking time, seconds."""
    cost: RescaleCost = SUMMIT
    must_run: bool = False
    """Whether the job is to be placed before anything else counts."""
    restarting: bool = False
    """Whether its workers have to be restarted at whatever size (they broke, or a node of theirs is
    lost).
    """
    beyond: Beyond = Beyond.HOLD
    """Sizes beyond the last point of the curve: held at the last throughput, dropped or refused.
    Whatever happens, the bid's notes say it.
    """
    outlooks: Mapping[str, Outlook] | None = None
    """What is to be expected of the nodes, for each class; None where nothing is. It takes the
    place of ``t_fwd_s``: ``t_fwd_s · O(k)`` becomes what is expected to be processed within the
    outlook's window, ``kept · O(k) + (window − kept) · O(left) − hit · (work_s · O(k) + down_s ·
    O(left))`` (see :meth:`allocator.outlook.Outlook.of`).
    """


def make_bid(
    job: str,
    curve: ScalingCurve | Mapping[str, ScalingCurve],
    *,
    max_nodes: int,
    allowed: Iterable[int] | None = None,
    **asked: Any,
) -> Bid:
    """The bid of one job, see :func:`make_bids`.

    Args:
        curve: one for the class ``current_class``, or one a class the job can use.
        max_nodes, allowed, asked: as the fields of :class:`BidRequest`.

    Raises:
        BidError: as :func:`make_bids`.
    """
    home = asked.get("current_class", "default")
    curves = {home: curve} if isinstance(curve, ScalingCurve) else curve
    only = None if allowed is None else tuple(allowed)
    return make_bids([BidRequest(job, curves, max_nodes=max_nodes, allowed=only, **asked)])[0]


def make_bids(requests: Sequence[BidRequest]) -> list[Bid]:
    """The bids of all these jobs.

    ``value(k) = weight · (t_fwd_s · O(k) − cost(current → k))`` with O the curve, and cost
    ``O(current) · up_s`` for k > current > 0, ``O(current) · down_s`` for k < current, ``O(k) ·
    start_s`` for current = 0 or on another class than ``current_class``, 0 for k = current
    (``O(current) · down_s`` when ``restarting``). Letting go of all nodes is a shrinkage like any
    other: were it free, two like jobs would take turns at every plan where starting is free.
    Without nodes, none are worth 0.

    Raises:
        BidError: on limits, weights, times or sizes that make no sense, with the job's name.
    """
    return [bid for some in _in_blocks(requests) for bid in _bids(some)]


def _in_blocks(requests: Sequence[BidRequest]) -> Iterator[Sequence[BidRequest]]:
    begin, sizes = 0, 0
    for at, request in enumerate(requests):
        more = len(request.curves) * max(0, request.max_nodes - request.min_nodes + 1)
        if at > begin and sizes + more > _AT_ONCE:
            yield requests[begin:at]
            begin, sizes = at, 0
        sizes += more
    if begin < len(requests):
        yield requests[begin:]


class _Offer(NamedTuple):
    """What one job could have of one class."""

    request: BidRequest
    curve: ScalingCurve
    sizes: Sizes
    current: int
    """Nodes of this class that it has."""
    unit: float
    """A throughput that counts 1."""
    before: float
    """Throughput now, in units."""
    outlook: Outlook | None


def _bids(requests: Sequence[BidRequest]) -> list[Bid]:
    notes = [list[str]() for _ in requests]
    offers = [
        _offer(request, node_class, curve, sizes, mine)
        for request, mine in zip(requests, notes, strict=True)
        for sizes in [_sizes(request)]
        for node_class, curve in request.curves.items()
    ]
    options = iter(zip(offers, _options(offers), strict=True))
    bids = []
    for request, mine in zip(requests, notes, strict=True):
        nothing, found = 0.0, {}
        for node_class in request.curves:
            offer, found[node_class] = next(options)
            nothing -= request.weight * offer.before * request.cost.down_s
        held = (request.current_class, request.current) if request.current else NO_SEAT
        idle = -math.inf if request.must_run else nothing
        bids.append(Bid(request.job, found, idle, held, tuple(mine)))
    return bids


def _sizes(request: BidRequest) -> Sizes:
    """The sizes that it asks for, checked like all the rest of it."""
    job, low, high = request.job, request.min_nodes, request.max_nodes
    if low < 1 or high < low:
        raise BidError(f"Job {job} asks for {low}:{high} nodes; give 1 <= min <= max.")
    if request.current < 0:
        raise BidError(f"Job {job} is said to run on {request.current} nodes now; give 0 or more.")
    if not (math.isfinite(request.weight) and request.weight >= 0):
        raise BidError(f"Job {job} has weight {request.weight}; give a finite number, 0 or more.")
    if not (math.isfinite(request.t_fwd_s) and request.t_fwd_s > 0):
        raise BidError(f"The forward-looking time is {request.t_fwd_s} s; give a number above 0.")
    sizes = _within(low, high, request.allowed)
    if not len(sizes):
        raise BidError(
            f"None of the sizes job {job} accepts lies within {low}:{high}; "
            "widen the limits or the sizes."
        )
    return sizes


@lru_cache(maxsize=4096)
def _within(low: int, high: int, allowed: tuple[int, ...] | None) -> Sizes:
    if allowed is None:
        sizes = np.arange(low, high + 1, dtype=np.int64)
    else:
        sizes = np.array(sorted({int(k) for k in allowed if low <= k <= high}), dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


def _offer(
    request: BidRequest, node_class: str, curve: ScalingCurve, sizes: Sizes, notes: list[str]
) -> _Offer:
    if sizes[-1] > curve.largest:
        sizes = _beyond(request, curve, sizes, notes)
    current = request.current if node_class == request.current_class else 0
    unit = _single_node_rate(curve) if request.goal is Goal.EFFICIENCY else 1.0
    outlook = request.outlooks.get(node_class) if request.outlooks else None
    return _Offer(request, curve, sizes, current, unit, curve.at(current) / unit, outlook)


def _beyond(request: BidRequest, curve: ScalingCurve, sizes: Sizes, notes: list[str]) -> Sizes:
    """The sizes to offer when some lie beyond the curve."""
    outside = sizes[sizes > curve.largest]
    what = f"the curve of job {request.job} ends at {curve.largest} nodes"
    span = f"{outside[0]}" if len(outside) == 1 else f"{outside[0]} to {outside[-1]}"
    if request.beyond is Beyond.ERROR:
        raise BidError(
            f"{what[0].upper()}{what[1:]} but size {span} is asked for; measure it there or "
            "lower the job's maximum."
        )
    if request.beyond is Beyond.DROP:
        notes.append(f"{what}; size {span} is not offered.")
        return _within(request.min_nodes, curve.largest, request.allowed)
    notes.append(f"{what}; size {span} is valued at the throughput of {curve.largest} nodes.")
    return sizes


def _single_node_rate(curve: ScalingCurve) -> float:
    one = curve.at(1)
    if one > 0:
        return one
    return next((rate / nodes for nodes, rate in curve.points if rate > 0), 1.0)


def _options(offers: Sequence[_Offer]) -> Iterator[SizeValues]:
    """The options of each offer."""
    if not offers:
        return
    lengths = np.array([len(offer.sizes) for offer in offers], dtype=np.int64)
    values = _values(offers, lengths)
    values.flags.writeable = False
    sound = bool(np.isfinite(values).all())
    begin = 0
    for offer, length in zip(offers, lengths.tolist(), strict=True):
        mine = values[begin : begin + length]
        # Where they are not sound it says which, and why.
        yield (SizeValues.from_arrays if sound else SizeValues)(offer.sizes, mine)
        begin += length


def _values(offers: Sequence[_Offer], lengths: Sizes) -> Values:
    """What each size of each offer is worth, one offer after the other."""
    which = np.arange(len(offers)).repeat(lengths)
    sizes = np.concatenate([offer.sizes for offer in offers])
    curves = CurveTable([offer.curve for offer in offers])

    def each(of: Iterable[float]) -> Values:
        return np.array(list(of))[which]

    unit = each(offer.unit for offer in offers)
    rates = curves.rates(which, sizes.astype(np.float64)) / unit
    processed = each(offer.request.t_fwd_s for offer in offers) * rates
    down_s = each(offer.request.cost.down_s for offer in offers)
    outlooks = [offer.outlook or _UNKNOWN for offer in offers]
    if any(offer.outlook is not None for offer in offers):
        kept, hit, left = expectations(outlooks, which, sizes)
        least = each(offer.request.min_nodes for offer in offers)
        after = np.where(left >= least, curves.rates(which, left) / unit, 0.0)
        window_s = each(outlook.window_s for outlook in outlooks)
        expected = kept * rates + (window_s - kept) * after
        work_s = each(outlook.work_s for outlook in outlooks)
        expected -= hit * (work_s * rates + down_s * after)
        foretold = np.array([offer.outlook is not None for offer in offers])
        processed = expected if foretold.all() else np.where(foretold[which], expected, processed)
    current = each(offer.current for offer in offers)
    up_s = each(offer.request.cost.up_s for offer in offers)
    stay_s = each(
        offer.request.cost.down_s if offer.request.restarting else 0.0 for offer in offers
    )
    pause_s = np.where(sizes > current, up_s, np.where(sizes < current, down_s, stay_s))
    starting = each(offer.request.cost.start_s for offer in offers) * rates
    pauses = np.where(current == 0, starting, each(o.before for o in offers) * pause_s)
    weighted: Values = each(offer.request.weight for offer in offers) * (processed - pauses)
    return weighted


_UNKNOWN = Outlook([], 1.0, 0.0)
