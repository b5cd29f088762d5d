"""Bids as flat arrays, the input of the exact solver, and plans over them.

Decides which jobs are identical to the solver: jobs with equal bids become one group with a count,
which removes the symmetry from the search (a sweep is hundreds of jobs with one curve). Options
that do not fit the capacity are left out. It does not decide which of the others matter
(:mod:`allocator.prices`, :mod:`allocator.search`).

A *plan* here is an array with a number for each row of the table: how many members of the row's
group take that option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator.bids import Assignment, Bid, PoolT, SizeValues

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

IDLE = -1
"""Resource index of an option without nodes."""


@dataclass(frozen=True)
class BidTable:
    """The options of all groups, one row for each option. Rows of one group are adjacent; within a
    group, rows of one resource are ordered by size.
    """

    members: tuple[tuple[int, ...], ...]
    """The indices of the (equal) bids of each group, ascending."""
    count: Floats
    """Members of each group."""
    group: Ints
    """Group of each row."""
    resource: Ints
    """Resource of each row: an index into ``capacity``, or IDLE (``size`` 0)."""
    size: Ints
    """Units of the resource that each row uses."""
    value: Floats
    """Value of each row, from the bid."""
    starts: Ints
    """The first row of each group; each group has at least one row."""
    capacity: Floats
    """Units of each resource: the nodes of each pool in ``pools``, and, if must-run jobs have to be
    dropped, one more resource: the number of drops.
    """
    pools: tuple[Any, ...]
    """The pools of the bids, by resource. The solvers use no more than their number."""

    @cached_property
    def nodes(self) -> Floats:
        """``size`` as floats."""
        return self.size.astype(np.float64)

    def node_cost(self, prices: Floats) -> Floats:
        """Return the price of each row's nodes."""
        if len(prices) == 1:
            return float(prices[0]) * self.nodes  # an idle row has no nodes
        return np.append(prices, 0.0)[self.resource] * self.nodes

    @cached_property
    def ends(self) -> Ints:
        """One past the last row of each group."""
        return np.append(self.starts[1:], len(self.size))

    def select(self, mask: Mask) -> BidTable:
        """Return the table with only the rows of ``mask``, which must contain a row of every
        group.
        """
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

    def usage(self, plan: Ints) -> Floats:
        """Return units of each resource that ``plan`` uses."""
        in_use = np.flatnonzero(plan)
        in_use = in_use[self.resource[in_use] != IDLE]
        amount = plan[in_use] * self.size[in_use]
        return np.bincount(
            self.resource[in_use], weights=amount, minlength=len(self.capacity)
        ).astype(np.float64)

    def fits(self, plan: Ints) -> bool:
        """Return whether ``plan`` places every member once and stays within the capacity."""
        placed = np.add.reduceat(plan, self.starts) if len(self.starts) else np.zeros(0)
        return bool((placed == self.count).all() and (self.usage(plan) <= self.capacity).all())


def build(bids: Sequence[Bid[PoolT]], capacity: Mapping[PoolT, int], drops: int = 0) -> BidTable:
    """Return the table of ``bids``.

    Args:
        bids: of all jobs.
        capacity: pool -> nodes.
        drops: number of must-run jobs to drop. With 0 their groups have no idle row; otherwise
            a drop uses one unit of an additional resource and has value 0. A must-run job
            that fits at none of its sizes gets an idle row and does not count in ``drops``.
    """
    pools = tuple(pool for pool, nodes in capacity.items() if nodes > 0)
    index = {pool: r for r, pool in enumerate(pools)}
    groups: dict[tuple[float, tuple[tuple[int, SizeValues], ...]], list[int]] = {}
    for i, bid in enumerate(bids):
        usable = [
            (index[pool], options)
            for pool, options in bid.options.items()
            if pool in index and len(options.sizes) and options.sizes[0] <= capacity[pool]
        ]
        usable.sort(key=lambda pair: pair[0])
        groups.setdefault((bid.idle_value, tuple(usable)), []).append(i)
    sizes: list[Ints] = []
    values: list[Floats] = []
    lengths: list[int] = []
    resources: list[int] = []
    first: list[int] = []
    rows = 0
    size_zero, size_one = np.zeros(1, np.int64), np.ones(1, np.int64)

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
                size_zero,
                np.array([max(idle_value, 0.0) if idle_value == -np.inf else idle_value]),
            )
        elif drops:
            add(len(pools), size_one, np.zeros(1))
        for r, options in usable_by:
            fitting = len(options.sizes)
            if options.sizes[-1] > capacity[pools[r]]:
                fitting = int(np.searchsorted(options.sizes, capacity[pools[r]], side="right"))
            add(r, options.sizes[:fitting], options.values[:fitting])
    limits = [float(capacity[pool]) for pool in pools] + ([float(drops)] if drops else [])
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
        pools=pools,
    )


def undominated(table: BidTable, mask: Mask) -> Mask:
    """Return ``mask`` without its dominated rows: a row is dominated by one of the same group and
    pool with no more nodes and no less value.
    """
    rows = np.flatnonzero(mask)
    segment = table.group[rows] * (len(table.capacity) + 1) + table.resource[rows]
    best = table.value[rows]
    dominated = np.zeros(len(rows), np.bool_)
    step = 1  # running maximum within each segment, by doubling the step
    while step < len(rows):
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        best[step:] = np.where(same, np.maximum(best[step:], best[:-step]), best[step:])
        step *= 2
    dominated[1:] = (segment[1:] == segment[:-1]) & (best[:-1] >= table.value[rows[1:]])
    remaining = np.zeros(len(mask), np.bool_)
    remaining[rows[~dominated]] = True
    return remaining


def idle_plan(table: BidTable) -> Ints:
    """Return the plan in which every job takes its first row: no nodes, if the job may idle."""
    plan = np.zeros(len(table.size), np.int64)
    plan[table.starts] = table.count.astype(np.int64)
    return plan


def to_plan(
    table: BidTable, jobs: Sequence[str], sizes: Mapping[str, Assignment[PoolT]]
) -> Ints | None:
    """Return the plan that gives each job its size in ``sizes``.

    Args:
        table: the table of the bids.
        jobs: names, in the order of the bids.
        sizes: job -> (pool, size), each offered by the job's bid; a job without nodes is
            absent.

    Returns:
        Members by row; None if a must-run job is absent and has no row for that.
    """
    plan = np.zeros(len(table.size), np.int64)
    for g, members in enumerate(table.members):
        first, end = int(table.starts[g]), int(table.ends[g])
        may_idle = int(table.resource[first]) in (IDLE, len(table.pools))
        for member in members:
            if (assignment := sizes.get(jobs[member])) is not None:
                pool, size = assignment
                in_pool = table.resource[first:end] == table.pools.index(pool)
                plan[first + np.flatnonzero(in_pool & (table.size[first:end] == size))] += 1
            elif may_idle:
                plan[first] += 1
            else:
                return None
    return plan


def to_sizes(
    table: BidTable, plan: Ints, bids: Sequence[Bid[PoolT]]
) -> dict[str, Assignment[PoolT]]:
    """Return the size of each job in ``plan``.

    Within a group, a job keeps its current assignment if the plan contains it. The others follow in
    the order of ``bids``, running jobs before waiting ones; the most valuable assignment is given
    first.

    Args:
        table: the table of ``bids``.
        plan: members by row.
        bids: of all jobs, in the order of arrival.

    Returns:
        Job -> (pool, size); a job without nodes is absent.
    """
    sizes: dict[str, Assignment[PoolT]] = {}
    rows = np.flatnonzero(plan)
    rows = rows[np.lexsort((-table.value[rows], table.group[rows]))]
    columns = (table.group, table.resource, table.size, plan)
    assignments_of: dict[int, Counter[Assignment[PoolT]]] = {}
    for g, r, size, count in zip(*(column[rows].tolist() for column in columns), strict=True):
        if 0 <= r < len(table.pools):
            assignments_of.setdefault(g, Counter())[table.pools[r], size] += count
    for g, assignments in assignments_of.items():
        others: list[Bid[PoolT]] = []
        for bid in (bids[member] for member in table.members[g]):
            if bid.current is not None and assignments[bid.current] > 0:
                assignments[bid.current] -= 1
                sizes[bid.job] = bid.current
            else:
                others.append(bid)
        if others:
            others.sort(key=lambda bid: bid.current is None)
            sizes.update(zip((bid.job for bid in others), assignments.elements(), strict=False))
    return sizes
