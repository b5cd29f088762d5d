"""Makes bids from the jobs' requests.

Decides the value of every size of a job over the forward-looking time (section 7 of the design;
FreeTrain/BFTrainer, arXiv 2106.12091, section 3). It does not choose a size. A new objective is a
new way to make bids; the solvers know only values. The sizes of many jobs are valued together, so
that a plan of hundreds of jobs costs tens of array operations and not thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Protocol

import numpy as np

from allocator.bids import (
    SUMMIT_RESCALE_COST,
    Assignment,
    Bid,
    BidError,
    ExtrapolationPolicy,
    Goal,
    PoolT,
    RescaleCost,
    Sizes,
    SizeValues,
    Values,
)
from allocator.curves import CurveTable, ScalingCurve

_MAX_BLOCK_SIZES = 16384
"""Sizes that are valued together; the arrays of more would not fit into the processor's cache."""


class Bidder(Protocol):
    """A job that bids. The caller's own record of a job can be one, so that nothing is copied."""

    @property
    def job(self) -> str:
        """The job's name."""

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes that it accepts, in every pool."""

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes that it accepts, in every pool."""

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """Sizes that it accepts within the limits; None for all of them. See
        :func:`~allocator.bids.powers_of_two`, :func:`~allocator.bids.multiples`.
        """

    @property
    def weight(self) -> float:
        """Factor on its value, 0 or more."""

    @property
    def goal(self) -> Goal:
        """THROUGHPUT values samples. EFFICIENCY divides the curve of each pool by its throughput on
        one node, O(k)/O(1), so that values are single-node seconds; if O(1) is 0, the divisor is
        the first throughput above 0 divided by its nodes.
        """

    @property
    def must_run(self) -> bool:
        """Whether the plan has to place it before it maximises the value."""

    @property
    def broken(self) -> bool:
        """Whether its workers have to be restarted at any size: they failed, or a node was lost."""


@dataclass(frozen=True)
class JobTerms:
    """A bidder and nothing else; see :class:`Bidder`."""

    job: str
    min_nodes: int = 1
    max_nodes: int = 1
    sizes: tuple[int, ...] | None = None
    weight: float = 1.0
    goal: Goal = Goal.THROUGHPUT
    must_run: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class BidRequest(Generic[PoolT]):
    """The input of one job's bid: the job, and what a plan knows of it."""

    bidder: Bidder
    """The job."""
    curves: Mapping[PoolT, ScalingCurve]
    """Pool -> scaling curve, for each pool that the job can use."""
    current: int = 0
    """Nodes that the job runs on now, 0 if it does not run."""
    current_pool: PoolT | None = None
    """The pool of these nodes; None if it does not run."""
    t_fwd_s: float = 120.0
    """Forward-looking time, seconds."""
    cost: RescaleCost = SUMMIT_RESCALE_COST
    """Pauses of its rescales."""
    extrapolation: ExtrapolationPolicy = ExtrapolationPolicy.CONSTANT
    """Treatment of sizes beyond the last point of the curve. The bid's notes mention it."""
    cost_in: Mapping[PoolT, RescaleCost] = field(default_factory=dict)
    """Pool -> pauses on nodes of that pool, where they differ from ``cost``."""
    limits: Mapping[PoolT, int] = field(default_factory=dict)
    """Pool -> maximum number of nodes of that pool, where it is below the bidder's. A pool whose
    limit is below every size is not offered.
    """


def make_bid(
    job: str,
    curve: ScalingCurve | Mapping[Any, ScalingCurve],
    *,
    max_nodes: int,
    allowed: Iterable[int] | None = None,
    **fields: Any,
) -> Bid[Any]:
    """Return the bid of one job, see :func:`make_bids`.

    Args:
        job: the job's name.
        curve: one for each pool that the job can use; a single curve is for ``current_pool``, or
            for the pool "default".
        max_nodes: maximum number of nodes that the job accepts.
        allowed: sizes that it accepts; None for all of them.
        fields: other fields of :class:`JobTerms` and :class:`BidRequest`.

    Raises:
        BidError: as :func:`make_bids`.
    """
    if isinstance(curve, ScalingCurve):
        curve = {fields.setdefault("current_pool", "default"): curve}
    sizes = None if allowed is None else tuple(allowed)
    own = {name: fields.pop(name) for name in JobTerms.__dataclass_fields__ if name in fields}
    terms = JobTerms(job, max_nodes=max_nodes, sizes=sizes, **own)
    return make_bids([BidRequest(terms, curve, **fields)])[0]


def make_bids(requests: Sequence[BidRequest[PoolT]]) -> list[Bid[PoolT]]:
    """Return the bids of all these jobs.

    ``value(k) = weight · (t_fwd_s · O(k) − cost(current → k))``, where O is the curve and the cost
    is

    * ``O(current) · up_s + max(0, O(k) − O(current)) · join_s`` for k > current > 0,
    * ``O(current) · down_s`` for k < current,
    * ``O(k) · start_s`` for current = 0, or in another pool than ``current_pool``,
    * 0 for k = current (``O(current) · down_s`` if ``broken``).

    The idle value of a running job is the cost of shrinking to 0, with a minus sign. If releasing
    all nodes cost nothing, two equal jobs would alternate at every plan where starting costs
    nothing.

    Raises:
        BidError: if the limits, weight, times or sizes of a request are invalid.
    """
    return [bid for block in _blocks(requests) for bid in _bids(block)]


def _blocks(
    requests: Sequence[BidRequest[PoolT]],
) -> Iterator[Sequence[BidRequest[PoolT]]]:
    """Yield ``requests`` in blocks of at most about ``_MAX_BLOCK_SIZES`` sizes."""
    begin, sizes = 0, 0
    for index, request in enumerate(requests):
        bidder = request.bidder
        added = len(request.curves) * max(0, bidder.max_nodes - bidder.min_nodes + 1)
        if index > begin and sizes + added > _MAX_BLOCK_SIZES:
            yield requests[begin:index]
            begin, sizes = index, 0
        sizes += added
    if begin < len(requests):
        yield requests[begin:]


@dataclass(slots=True)
class _PoolOptions(Generic[PoolT]):
    """The sizes of one job in one pool of nodes, before they are valued."""

    number: int
    """Position of its request."""
    request: BidRequest[PoolT]
    pool: PoolT
    curve: ScalingCurve
    cost: RescaleCost
    sizes: Sizes
    current: int
    """Nodes of this pool that the job has."""
    unit: float
    """The throughput that counts 1, samples/s."""
    current_rate: float
    """Throughput on the current nodes, in units."""


def _bids(requests: Sequence[BidRequest[PoolT]]) -> list[Bid[PoolT]]:
    notes_of = [list[str]() for _ in requests]
    pool_options = [
        _pool_options(number, request, pool, curve, sizes, notes_of[number])
        for number, request in enumerate(requests)
        for every_size in [_sizes(request)]
        for pool, curve in request.curves.items()
        if len(sizes := _limited(every_size, request.limits.get(pool)))
    ]
    options_of: list[dict[PoolT, SizeValues]] = [{} for _ in requests]
    release_values = [0.0 for _ in requests]
    for in_pool, values in zip(pool_options, _size_values(pool_options), strict=True):
        options_of[in_pool.number][in_pool.pool] = values
        release_cost = in_pool.current_rate * in_pool.cost.down_s
        release_values[in_pool.number] -= in_pool.request.bidder.weight * release_cost
    bids: list[Bid[PoolT]] = []
    for request, notes, options, release_value in zip(
        requests, notes_of, options_of, release_values, strict=True
    ):
        current: Assignment[PoolT] | None = None
        if request.current and request.current_pool is not None:
            current = (request.current_pool, request.current)
        idle_value = -math.inf if request.bidder.must_run else release_value
        bids.append(Bid(request.bidder.job, options, idle_value, current, tuple(notes)))
    return bids


def _sizes(request: BidRequest[PoolT]) -> Sizes:
    """Check a request and return its sizes."""
    bidder = request.bidder
    job, low, high = bidder.job, bidder.min_nodes, bidder.max_nodes
    if low < 1 or high < low:
        raise BidError(f"Job {job} asks for {low}:{high} nodes; give 1 <= min <= max.")
    if request.current < 0:
        raise BidError(f"Job {job} has {request.current} current nodes; give 0 or more.")
    if request.current and request.current_pool is None:
        raise BidError(f"Job {job} has {request.current} current nodes; give their pool.")
    if not (math.isfinite(bidder.weight) and bidder.weight >= 0):
        raise BidError(f"Job {job} has weight {bidder.weight}; give a finite number, 0 or more.")
    if not (math.isfinite(request.t_fwd_s) and request.t_fwd_s > 0):
        raise BidError(f"The forward-looking time is {request.t_fwd_s} s; give a number above 0.")
    sizes = _within(low, high, bidder.sizes)
    if not len(sizes):
        raise BidError(
            f"None of the sizes that job {job} accepts lies within {low}:{high}; "
            "widen the limits or add sizes."
        )
    return sizes


def _limited(sizes: Sizes, limit: int | None) -> Sizes:
    """Return the sizes up to ``limit``; all of them if it is None."""
    return sizes if limit is None or sizes[-1] <= limit else sizes[sizes <= limit]


@lru_cache(maxsize=4096)
def _within(low: int, high: int, allowed: tuple[int, ...] | None) -> Sizes:
    if allowed is None:
        sizes = np.arange(low, high + 1, dtype=np.int64)
    else:
        sizes = np.array(sorted({int(k) for k in allowed if low <= k <= high}), dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


def _pool_options(
    number: int,
    request: BidRequest[PoolT],
    pool: PoolT,
    curve: ScalingCurve,
    sizes: Sizes,
    notes: list[str],
) -> _PoolOptions[PoolT]:
    """Return the options of ``request`` in ``pool``; ``notes`` receives its warnings."""
    if sizes[-1] > curve.largest:
        sizes = _extrapolated(request, curve, sizes, notes)
    current = request.current if pool == request.current_pool else 0
    unit = _single_node_rate(curve) if request.bidder.goal is Goal.EFFICIENCY else 1.0
    cost = request.cost_in.get(pool, request.cost)
    current_rate = curve.at(current) / unit
    return _PoolOptions(number, request, pool, curve, cost, sizes, current, unit, current_rate)


def _extrapolated(
    request: BidRequest[PoolT], curve: ScalingCurve, sizes: Sizes, notes: list[str]
) -> Sizes:
    """Return the sizes to offer if some lie beyond the curve; ``notes`` receives a warning."""
    outside = sizes[sizes > curve.largest]
    fact = f"the curve of job {request.bidder.job} ends at {curve.largest} nodes"
    span = f"{outside[0]}" if len(outside) == 1 else f"{outside[0]} to {outside[-1]}"
    if request.extrapolation is ExtrapolationPolicy.ERROR:
        raise BidError(
            f"{fact[0].upper()}{fact[1:]} but size {span} is asked for; measure it there or "
            "lower the job's maximum."
        )
    if request.extrapolation is ExtrapolationPolicy.DROP:
        notes.append(f"{fact}; size {span} is not offered.")
        return _within(request.bidder.min_nodes, curve.largest, request.bidder.sizes)
    notes.append(f"{fact}; size {span} is valued at the throughput of {curve.largest} nodes.")
    return sizes


def _single_node_rate(curve: ScalingCurve) -> float:
    rate_of_one = curve.at(1)
    if rate_of_one > 0:
        return rate_of_one
    return next((rate / nodes for nodes, rate in curve.points if rate > 0), 1.0)


def _size_values(pool_options: Sequence[_PoolOptions[PoolT]]) -> Iterator[SizeValues]:
    """Yield the sizes and values of each of ``pool_options``."""
    if not pool_options:
        return
    lengths = np.array([len(options.sizes) for options in pool_options], dtype=np.int64)
    values = _values(pool_options, lengths)
    values.flags.writeable = False
    # The checked constructor raises the error for values that are not finite.
    new = SizeValues.from_arrays if bool(np.isfinite(values).all()) else SizeValues
    begin = 0
    for options, length in zip(pool_options, lengths.tolist(), strict=True):
        yield new(options.sizes, values[begin : begin + length])
        begin += length


def _values(pool_options: Sequence[_PoolOptions[PoolT]], lengths: Sizes) -> Values:
    """Return the values of all sizes, concatenated. ``lengths``: sizes in each of
    ``pool_options``.
    """
    index = np.arange(len(pool_options)).repeat(lengths)
    sizes = np.concatenate([options.sizes for options in pool_options])
    curves = CurveTable([options.curve for options in pool_options])
    requests = [options.request for options in pool_options]
    costs = [options.cost for options in pool_options]

    def per_size(numbers: Iterable[float]) -> Values:
        return np.array(list(numbers))[index]

    unit = per_size(options.unit for options in pool_options)
    rates = curves.rates(index, sizes.astype(np.float64)) / unit
    processed = per_size(request.t_fwd_s for request in requests) * rates
    down_s = per_size(cost.down_s for cost in costs)
    current = per_size(options.current for options in pool_options)
    up_s = per_size(cost.up_s for cost in costs)
    restart_s = per_size(
        options.cost.down_s if options.request.bidder.broken else 0.0 for options in pool_options
    )
    pause_s = np.where(sizes > current, up_s, np.where(sizes < current, down_s, restart_s))
    start_cost = per_size(cost.start_s for cost in costs) * rates
    current_rate = per_size(options.current_rate for options in pool_options)
    change_cost = current_rate * pause_s
    if any(cost.join_s for cost in costs):
        added = np.where(sizes > current, np.maximum(0.0, rates - current_rate), 0.0)
        change_cost += per_size(cost.join_s for cost in costs) * added
    rescale_cost = np.where(current == 0, start_cost, change_cost)
    weighted: Values = per_size(request.bidder.weight for request in requests) * (
        processed - rescale_cost
    )
    return weighted
