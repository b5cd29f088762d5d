"""The bid: what every size of a job is worth, on each class of nodes it could use.

Decides what a well-formed bid is. How the values come about is :mod:`allocator.valuation`; which
size a job gets is :mod:`allocator.milp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Sizes = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Seat = tuple[str, int]
"""(node class, number of nodes)"""
NO_SEAT: Seat = ("", 0)
"""What a job has that gets no node."""


class BidError(ValueError):
    """A bid, a capacity or a job's limits that make no sense; the message says which and why."""


class SizeValues:
    """The sizes a job accepts on one class of nodes and what each is worth.

    Args:
        sizes: nodes, strictly increasing, 1 or more; any sequence of integers. May be empty (the
            job cannot use this class).
        values: one finite number a size, in the objective's unit (for the bids of
            :mod:`allocator.valuation`: samples, or single-node seconds). May be negative: such a
            size loses against running nothing.

    Both are kept as read-only arrays.

    Raises:
        BidError: on lengths that differ, sizes below 1 or not increasing, values that are NaN or
            infinite.
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
                f"There are {len(self.sizes)} sizes but {len(array)} values; give one value a size."
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
        """The same of arrays that are known to be sound and are not written to any more, for plans
        that make hundreds.
        """
        made = object.__new__(cls)
        made.sizes, made.values, made._hash = sizes, values, 0
        return made

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
        return (
            SizeValues,
            (self.sizes, self.values),
        )  # without the hash, which is of this process only

    def value(self, size: int) -> float | None:
        """The value of ``size``, or None where it is not offered."""
        at = int(np.searchsorted(self.sizes, size))
        if at < len(self.sizes) and self.sizes[at] == size:
            return float(self.values[at])
        return None


def _frozen_sizes(sizes: Sequence[int] | Sizes) -> Sizes:
    if (
        isinstance(sizes, np.ndarray)
        and sizes.dtype == np.int64
        and sizes.ndim == 1
        and not sizes.flags.writeable
    ):
        array = sizes  # already ours: one array serves every job with the same limits
    else:
        given = np.asarray(sizes if len(sizes) else np.zeros(0, np.int64))
        if not np.issubdtype(given.dtype, np.integer):
            raise BidError(f"Sizes must be whole numbers of nodes, not {given.dtype}.")
        array = given.astype(np.int64).reshape(-1)
        array.flags.writeable = False
    if len(array):
        if array[0] < 1:
            raise BidError(
                f"Size {array[0]} is offered; sizes start at 1 (nothing is worth the bid's "
                "idle_value)."
            )
        if len(array) > 1 and not (array[1:] > array[:-1]).all():
            raise BidError("Sizes must be strictly increasing; sort them and name each once.")
    return array


@dataclass(frozen=True)
class Bid:
    """What one job would give for nodes.

    Raises:
        BidError: on an idle value that is NaN or +inf.
    """

    job: str
    """The job's name, unique among the bids solved together."""
    options: Mapping[str, SizeValues]
    """Node class -> sizes and values. The job runs on one class at a time."""
    idle_value: float = 0.0
    """What it is worth that the job gets no node. ``-inf``: the job must run. As many such jobs as
    possible are placed before anything else counts (see :func:`allocator.milp.solve`).
    """
    held: Seat = NO_SEAT
    """The class and number of the nodes that the job has now. It says who goes on where two bids
    are worth the same; what a change costs is in the values.
    """
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Sentences about how the values came about that somebody should be told, such as a curve read
    beyond its last point.
    """

    def __post_init__(self) -> None:
        if not self.idle_value < np.inf:
            raise BidError(
                f"The bid of job {self.job} values no nodes at {self.idle_value}; give a finite "
                "number, or -inf for a job that must run."
            )

    @property
    def must_run(self) -> bool:
        """Whether the job is to be placed before anything else counts."""
        return self.idle_value == -np.inf

    def value(self, node_class: str, size: int) -> float | None:
        """The value of ``size`` nodes of ``node_class`` (0: the idle value), or None where the bid
        does not offer it.
        """
        if size == 0:
            return self.idle_value
        options = self.options.get(node_class)
        return None if options is None else options.value(size)


def check(bids: Iterable[Bid], capacity: Mapping[str, int]) -> None:
    """Refuse two bids of one job and capacities that are no counts.

    Raises:
        BidError: with the job or the class.
    """
    seen: set[str] = set()
    for bid in bids:
        if bid.job in seen:
            raise BidError(
                f"Job {bid.job} bids twice; give one bid a job, with all its classes in it."
            )
        seen.add(bid.job)
    for name, nodes in capacity.items():
        if isinstance(nodes, bool) or not isinstance(nodes, (int, np.integer)) or nodes < 0:
            raise BidError(
                f"Class {name} is said to have {nodes!r} nodes; give a whole number, 0 or more."
            )
