"""The bid, the input of every solver, and the plan, its result.

A bid has the value of every size of a job, in each pool of nodes that it can use. Its inputs
besides the scaling curve are the goal, the cost of a rescale and the sizes. Decides what a
well-formed bid is, and what its inputs mean. It does not compute values
(:mod:`allocator.valuation`).

An :class:`Allocation` has a size for each job, its value, and how close to optimal it is. Decides
how a plan is valued and checked against the bids. All solvers (:mod:`allocator.milp`,
:mod:`allocator.baselines`, the oracles of the tests) return the same type, so that their plans can
be compared. Nothing here chooses sizes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt


class Goal(str, Enum):
    """Objective of the plan."""

    THROUGHPUT = "throughput"
    """Samples: a job that processes more of them per second has a higher value."""
    EFFICIENCY = "efficiency"
    """Single-node seconds: throughput divided by the job's own throughput on one node, so that
    light and heavy models count equally.
    """


class ExtrapolationPolicy(str, Enum):
    """Treatment of sizes beyond the last point of a curve."""

    CONSTANT = "hold"
    """Offer them at the throughput of the last point, with a note in the bid."""
    DROP = "drop"
    """Do not offer them, with a note in the bid."""
    ERROR = "error"
    """Refuse the bid."""


@dataclass(frozen=True)
class RescaleCost:
    """Pauses of a job, seconds, by kind of change. The defaults were measured on Summit (up
    17-19 s, down 11-13 s).

    Raises:
        BidError: if a pause is negative or not finite.
    """

    up_s: float = 18.0
    """Pause of growing, charged at the throughput before."""
    down_s: float = 12.0
    """Pause of shrinking, charged at the throughput before."""
    start_s: float = 18.0
    """Pause of a start, or of a move to another pool of nodes, charged at the throughput after."""
    join_s: float = 0.0
    """Time until the nodes that join a running job contribute, while the others continue. Charged
    at the throughput that they add.
    """

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s", "start_s", "join_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise BidError(f"The rescale cost {name} is {value}; give seconds, 0 or more.")


SUMMIT_RESCALE_COST = RescaleCost()
"""The default costs."""


@lru_cache(maxsize=4096)
def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to ``largest``."""
    return tuple(1 << p for p in range(max(0, largest).bit_length()))


@lru_cache(maxsize=4096)
def multiples(of: int, largest: int) -> tuple[int, ...]:
    """Return ``of``, ``2·of``, … up to ``largest``."""
    if of < 1:
        raise BidError(f"Sizes cannot be multiples of {of}; give 1 or more.")
    return tuple(range(of, largest + 1, of))


Sizes = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
PoolT = TypeVar("PoolT", bound=Hashable)
"""What identifies a pool of nodes, for example a string."""
Assignment = tuple[PoolT, int]
"""(pool, number of nodes) of one job."""


class BidError(ValueError):
    """A bid, a capacity or a job's limits are invalid; the message says which and why."""


class SizeValues:
    """The sizes that a job accepts in one pool of nodes, and the value of each.

    Args:
        sizes: numbers of nodes, strictly increasing, 1 or more; any sequence of integers. An empty
            sequence means that the job cannot use this pool.
        values: one finite number for each size, in the objective's unit (for the bids of
            :mod:`allocator.valuation`: samples, or single-node seconds). A negative value makes
            the size worse than no nodes.

    Both are stored as read-only arrays.

    Raises:
        BidError: if the lengths differ, if a size is below 1 or not larger than the one before, or
            if a value is NaN or infinite.
    """

    __slots__ = ("_hash", "sizes", "values")
    sizes: Sizes
    values: Values
    _hash: int

    def __init__(self, sizes: Sequence[int] | Sizes, values: Sequence[float] | Values) -> None:
        self.sizes = _frozen_sizes(sizes)
        array = np.array(values, dtype=np.float64).reshape(-1)
        if len(array) != len(self.sizes):
            raise BidError(
                f"There are {len(self.sizes)} sizes but {len(array)} values; give one value each."
            )
        if not np.isfinite(array).all():
            bad = int(np.flatnonzero(~np.isfinite(array))[0])
            raise BidError(
                f"The value at {self.sizes[bad]} nodes is {array[bad]}; values must be finite "
                "numbers. Leave a size out to forbid it."
            )
        array.flags.writeable = False
        self.values = array
        self._hash = 0

    @classmethod
    def from_arrays(cls, sizes: Sizes, values: Values) -> SizeValues:
        """Wrap arrays without a check or a copy. It is for plans that make hundreds of bids.

        Args:
            sizes: valid sizes; the array must not be written afterwards.
            values: their values, all finite; the array must not be written afterwards.
        """
        options = object.__new__(cls)
        options.sizes, options.values, options._hash = sizes, values, 0
        return options

    def __repr__(self) -> str:
        return f"SizeValues({self.sizes.tolist()}, {self.values.tolist()})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SizeValues):
            return NotImplemented
        same_sizes = self.sizes is other.sizes or np.array_equal(self.sizes, other.sizes)
        return self is other or (same_sizes and np.array_equal(self.values, other.values))

    def __hash__(self) -> int:
        if not self._hash:
            self._hash = hash((len(self.sizes), self.values.tobytes()))
        return self._hash

    def __reduce__(self) -> tuple[type[SizeValues], tuple[Sizes, Values]]:
        # Without the hash, which is valid in this process only.
        return (SizeValues, (self.sizes, self.values))

    def value(self, size: int) -> float | None:
        """Return the value of ``size`` nodes, or None if the job does not accept that size."""
        index = int(self.sizes.searchsorted(size))
        if index < len(self.sizes) and self.sizes.item(index) == size:
            return self.values.item(index)
        return None


def _frozen_sizes(sizes: Sequence[int] | Sizes) -> Sizes:
    if (
        isinstance(sizes, np.ndarray)
        and sizes.dtype == np.int64
        and sizes.ndim == 1
        and not sizes.flags.writeable
    ):
        array = sizes  # already read-only: all jobs with the same limits share one array
    else:
        unchecked = np.asarray(sizes if len(sizes) else np.zeros(0, np.int64))
        if not np.issubdtype(unchecked.dtype, np.integer):
            raise BidError(f"Sizes must be whole numbers of nodes, not {unchecked.dtype}.")
        array = unchecked.astype(np.int64).reshape(-1)
        array.flags.writeable = False
    if len(array):
        if array[0] < 1:
            raise BidError(
                f"Size {array[0]} is offered; sizes start at 1 (the value of no nodes is the bid's "
                "idle_value)."
            )
        if len(array) > 1 and not (array[1:] > array[:-1]).all():
            raise BidError("Sizes must be strictly increasing; sort them and list each once.")
    return array


@dataclass(frozen=True)
class Bid(Generic[PoolT]):
    """The values of all sizes of one job.

    Raises:
        BidError: if the idle value is NaN or +inf.
    """

    job: str
    """The job's name, unique among the bids of one problem."""
    options: Mapping[PoolT, SizeValues]
    """Pool -> sizes and values. The job runs in one pool at a time."""
    idle_value: float = 0.0
    """The value of no nodes. ``-inf``: the job must run. The plan places as many such jobs as
    possible before it maximises the value (see :func:`allocator.milp.solve`).
    """
    current: Assignment[PoolT] | None = None
    """The pool and number of the nodes that the job has now; None if it has none. It breaks ties
    between plans of the same value. It does not change the values, which already contain the cost
    of a change.
    """
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about the values, as sentences for the user: for example that a curve is
    extrapolated beyond its last point.
    """

    def __post_init__(self) -> None:
        if not self.idle_value < np.inf:
            raise BidError(
                f"The bid of job {self.job} values no nodes at {self.idle_value}; give a finite "
                "number, or -inf for a job that must run."
            )

    @property
    def must_run(self) -> bool:
        """Whether the plan has to place the job before it maximises the value."""
        return self.idle_value == -np.inf

    def value(self, assignment: Assignment[PoolT] | None) -> float | None:
        """Return the value of an assignment.

        Returns:
            The idle value for None or size 0; None if the bid does not offer the size.
        """
        if assignment is None or not assignment[1]:
            return self.idle_value
        pool, size = assignment
        options = self.options.get(pool)
        return None if options is None else options.value(size)


def check(bids: Iterable[Bid[PoolT]], capacity: Mapping[PoolT, int]) -> None:
    """Check that each job has one bid and each capacity is a count.

    Args:
        bids: the bids of one problem.
        capacity: pool -> nodes.

    Raises:
        BidError: if a job bids twice or a capacity is not a whole number of 0 or more.
    """
    jobs: set[str] = set()
    for bid in bids:
        if bid.job in jobs:
            raise BidError(
                f"Job {bid.job} bids twice; give one bid for each job, with all its pools in it."
            )
        jobs.add(bid.job)
    for pool, nodes in capacity.items():
        if isinstance(nodes, bool) or not isinstance(nodes, (int, np.integer)) or nodes < 0:
            raise BidError(
                f"Pool {pool} has a capacity of {nodes!r} nodes; give a whole number, 0 or more."
            )


@dataclass(frozen=True)
class Allocation(Generic[PoolT]):
    """Pool and number of nodes of each job."""

    sizes: Mapping[str, Assignment[PoolT]]
    """Job -> (pool, size). A job without nodes is absent."""
    objective: float
    """The sum of all bids' values at these sizes. A job without nodes counts with its idle value, a
    dropped job with 0.
    """
    bound: float
    """A proven upper bound on the objective of every plan that drops as few must-run jobs."""
    gap: float
    """``(bound - objective) / max(1, |objective|)``, 0 if the plan is proven optimal."""
    status: str
    """``optimal`` (proven within the requested gap), ``time_limit`` (the best plan when the time
    was up, or when too little time was left for the open part), or ``heuristic`` (from a policy
    that proves nothing).
    """
    solve_s: float = 0.0
    """Time taken on the caller's clock, seconds."""
    dropped: tuple[str, ...] = ()
    """Must-run jobs that do not fit."""
    proof: str = ""
    """The step that closed the gap: ``bound``, ``dp`` or ``highs`` (empty for other solvers)."""
    reduced_size: tuple[int, int] = (0, 0)
    """(groups of jobs, options) of the last reduced problem."""

    def size(self, job: str) -> int:
        """Return the number of nodes of ``job``, 0 if it has none."""
        return self.sizes[job][1] if job in self.sizes else 0


def plan_value(
    sizes: Mapping[str, Assignment[PoolT]], bids: Sequence[Bid[PoolT]]
) -> tuple[float, tuple[str, ...]]:
    """Value a plan.

    The sum is exactly rounded (:func:`math.fsum`): two solvers that agree on the sizes agree on the
    last bit.

    Args:
        sizes: job -> (pool, size); a job without nodes is absent.
        bids: the bids of all jobs.

    Returns:
        (the objective of ``sizes``, the must-run jobs that it drops).

    Raises:
        ValueError: if a bid does not offer its size.
    """
    values: list[float] = []
    dropped: list[str] = []
    for bid in bids:
        value = bid.value(sizes.get(bid.job))
        if value is None:
            pool, size = sizes[bid.job]
            raise ValueError(
                f"The plan gives job {bid.job} {size} nodes of pool {pool}, which its bid does "
                "not offer."
            )
        if value == -math.inf:
            dropped.append(bid.job)
        else:
            values.append(value)
    return math.fsum(values), tuple(dropped)


def relative_gap(objective: float, bound: float) -> float:
    """Return ``(bound - objective) / max(1, |objective|)``, never negative."""
    return max(0.0, bound - objective) / max(1.0, abs(objective))


def nodes_in_use(sizes: Mapping[str, Assignment[PoolT]]) -> dict[PoolT, int]:
    """Return pool -> nodes that ``sizes`` uses."""
    total: dict[PoolT, int] = {}
    for pool, size in sizes.values():
        total[pool] = total.get(pool, 0) + size
    return total
