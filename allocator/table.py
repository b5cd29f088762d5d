"""Bids as flat arrays: what the exact solver works on.

Decides which jobs are the same to the solver: identical bids become one group with a count, which
takes the symmetry out of the search (a sweep is hundreds of jobs with one curve). Options that can
never be used are left out. Which of the others matter is decided in :mod:`allocator.prices` and
:mod:`allocator.core`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from allocator.bids import NO_SEAT, Bid, Seat, SizeValues

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

IDLE = -1
"""Resource index of 'no node at all'."""


@dataclass(frozen=True)
class BidTable:
    """The options of all groups, one row an option, rows of one group adjacent. Within a group,
    rows of one resource are ordered by size.
    """

    members: tuple[tuple[int, ...], ...]
    """For each group, the indices of its bids (all alike), ascending."""
    count: Floats
    """Members per group."""
    group: Ints
    """Per row, its group."""
    resource: Ints
    """Per row, an index into ``capacity``, or IDLE (``size`` 0)."""
    size: Ints
    """Per row, units of its resource."""
    value: Floats
    """Per row, what its bid says."""
    starts: Ints
    """The first row of each group; each group has at least one row."""
    capacity: Floats
    """Units of each resource: the nodes of each class in ``classes``, and one resource more where
    must-run jobs have to be dropped: the right to be dropped.
    """
    classes: tuple[str, ...]
    """Names of the node classes."""

    @cached_property
    def nodes(self) -> Floats:
        """``size`` as floats."""
        return self.size.astype(np.float64)

    def charge(self, prices: Floats) -> Floats:
        """What each row pays for its nodes."""
        if len(prices) == 1:
            return float(prices[0]) * self.nodes  # an idle row has none
        return np.append(prices, 0.0)[self.resource] * self.nodes

    @cached_property
    def ends(self) -> Ints:
        """One past the last row of each group."""
        return np.append(self.starts[1:], len(self.size))

    def keep(self, mask: Mask) -> BidTable:
        """The table with only the rows of ``mask``, of which every group has at least one."""
        group = self.group[mask]
        starts = np.searchsorted(group, np.arange(len(self.members)))
        return replace(
            self,
            group=group,
            resource=self.resource[mask],
            size=self.size[mask],
            value=self.value[mask],
            starts=starts,
        )

    def use(self, plan: Ints) -> Floats:
        """Units of each resource that ``plan`` (members on each row) uses."""
        taken = np.flatnonzero(plan)
        taken = taken[self.resource[taken] != IDLE]
        amount = plan[taken] * self.size[taken]
        return np.bincount(
            self.resource[taken], weights=amount, minlength=len(self.capacity)
        ).astype(np.float64)

    def fits(self, plan: Ints) -> bool:
        """Whether ``plan`` places every member once and stays within the capacity."""
        placed = np.add.reduceat(plan, self.starts) if len(self.starts) else np.zeros(0)
        return bool((placed == self.count).all() and (self.use(plan) <= self.capacity).all())


def build(bids: Sequence[Bid], capacity: Mapping[str, int], drops: int = 0) -> BidTable:
    """The table of ``bids``.

    Args:
        drops: how many must-run jobs have to be dropped. With 0 their groups have no idle row;
            otherwise dropping one takes one unit of an additional resource and is worth 0. A
            must-run job none of whose sizes fits at all is idle for nothing (and not counted in
            ``drops``).
    """
    classes = tuple(name for name, nodes in capacity.items() if nodes > 0)
    index = {name: c for c, name in enumerate(classes)}
    groups: dict[tuple[float, tuple[tuple[int, SizeValues], ...]], list[int]] = {}
    for i, bid in enumerate(bids):
        usable = [
            (index[name], options)
            for name, options in bid.options.items()
            if name in index and len(options.sizes) and options.sizes[0] <= capacity[name]
        ]
        usable.sort(key=lambda pair: pair[0])
        groups.setdefault((bid.idle_value, tuple(usable)), []).append(i)
    sizes: list[Ints] = []
    values: list[Floats] = []
    lengths: list[int] = []
    resources: list[int] = []
    first: list[int] = []
    rows = 0
    nothing, one = np.zeros(1, np.int64), np.ones(1, np.int64)

    def add(resource: int, size: Ints, value: Floats) -> None:
        nonlocal rows
        sizes.append(size)
        values.append(value)
        lengths.append(len(size))
        resources.append(resource)
        rows += len(size)

    for idle_value, usable_by in groups:
        first.append(rows)
        if idle_value > -np.inf or not usable_by:
            add(
                IDLE,
                nothing,
                np.array([max(idle_value, 0.0) if idle_value == -np.inf else idle_value]),
            )
        elif drops:
            add(len(classes), one, np.zeros(1))
        for c, options in usable_by:
            fitting = len(options.sizes)
            if options.sizes[-1] > capacity[classes[c]]:
                fitting = int(np.searchsorted(options.sizes, capacity[classes[c]], side="right"))
            add(c, options.sizes[:fitting], options.values[:fitting])
    limits = [float(capacity[name]) for name in classes] + ([float(drops)] if drops else [])
    starts = np.array(first, dtype=np.int64)
    return BidTable(
        members=tuple(tuple(m) for m in groups.values()),
        count=np.array([len(m) for m in groups.values()], dtype=np.float64),
        group=np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows))),
        resource=np.repeat(np.array(resources, np.int64), np.array(lengths, np.int64)),
        size=np.concatenate(sizes) if sizes else np.zeros(0, np.int64),
        value=np.concatenate(values) if values else np.zeros(0),
        starts=starts,
        capacity=np.array(limits, dtype=np.float64),
        classes=classes,
    )


def undominated(table: BidTable, keep: Mask) -> Mask:
    """``keep`` without the rows that another of its rows beats with no more nodes of the same class
    and no less value.
    """
    rows = np.flatnonzero(keep)
    segment = table.group[rows] * (len(table.capacity) + 1) + table.resource[rows]
    best = table.value[rows]
    beaten = np.zeros(len(rows), np.bool_)
    step = 1  # running maximum within each segment, by doubling
    while step < len(rows):
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        best[step:] = np.where(same, np.maximum(best[step:], best[:-step]), best[step:])
        step *= 2
    beaten[1:] = (segment[1:] == segment[:-1]) & (best[:-1] >= table.value[rows[1:]])
    kept = np.zeros(len(keep), np.bool_)
    kept[rows[~beaten]] = True
    return kept


def idle(table: BidTable) -> Ints:
    """The plan in which every job takes the first of its rows, which is to have nothing where that
    is allowed.
    """
    plan = np.zeros(len(table.size), np.int64)
    plan[table.starts] = table.count.astype(np.int64)
    return plan


def rows_for(table: BidTable, jobs: Sequence[str], sizes: Mapping[str, Seat]) -> Ints | None:
    """Members by row that give each job its size in ``sizes``, or nothing where it has none.

    Args:
        jobs: names, in the order of the bids.
        sizes: job -> (node class, size), each offered by its bid.

    Returns:
        None when a must-run job would get nothing and has no row for that.
    """
    plan = np.zeros(len(table.size), np.int64)
    for g, members in enumerate(table.members):
        first, end = int(table.starts[g]), int(table.ends[g])
        may_idle = int(table.resource[first]) in (IDLE, len(table.classes))
        for member in members:
            node_class, size = sizes.get(jobs[member], NO_SEAT)
            if size:
                mine = table.resource[first:end] == table.classes.index(node_class)
                plan[first + np.flatnonzero(mine & (table.size[first:end] == size))] += 1
            elif may_idle:
                plan[first] += 1
            else:
                return None
    return plan


def assign(table: BidTable, plan: Ints, bids: Sequence[Bid]) -> dict[str, Seat]:
    """Sizes by job from members by row; a job that gets nothing is absent.

    Among alike jobs, one keeps the nodes it has where the plan has room for that. The others are
    served in the order of ``bids``, those that run before those that wait, and the best seat goes
    first.
    """
    sizes: dict[str, Seat] = {}
    rows_of: dict[int, list[int]] = {}
    for row in np.flatnonzero(plan).tolist():
        rows_of.setdefault(int(table.group[row]), []).append(row)
    for g, rows in rows_of.items():
        seats: Counter[Seat] = Counter()
        for row in sorted(rows, key=lambda row: -table.value[row]):
            c = int(table.resource[row])
            if 0 <= c < len(table.classes):
                seats[table.classes[c], int(table.size[row])] += int(plan[row])
        members = [bids[member] for member in table.members[g]]
        others: list[Bid] = []
        for bid in members:
            if seats[bid.held] > 0:
                seats[bid.held] -= 1
                sizes[bid.job] = bid.held
            else:
                others.append(bid)
        others.sort(key=lambda bid: not bid.held[1])
        sizes.update(zip((bid.job for bid in others), seats.elements(), strict=False))
    return sizes
