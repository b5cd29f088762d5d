"""Bids as flat arrays, with everything left out that cannot matter.

Decides which jobs are the same to the solver (identical bids become one group with a count, which also takes the symmetry out of the
search) and which options can be dropped before any search: sizes above the capacity, and dominated sizes (as many or more nodes for no
more value). Must-run jobs for which there is no room are handled here too: they become users of one more resource, the right to be
dropped, of which there is exactly as much as needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allocator.bids import Bid, Options

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

IDLE = -1
"""Class index of 'no node at all'."""


@dataclass(frozen=True)
class Table:
    """The options of all groups, one row an option, rows of one group adjacent.

    Args:
        members: for each group, the indices of its bids (all alike), ascending.
        count: members per group, as floats.
        group, resource, size, value: per row. ``resource`` is an index into ``capacity``, or IDLE (then ``size`` is 0).
        starts: the first row of each group; each group has at least one row.
        capacity: units of each resource: the node classes in the order of ``classes``, and one more for drops where jobs must be dropped.
        classes: names of the node classes.
    """

    members: tuple[tuple[int, ...], ...]
    count: Floats
    group: Ints
    resource: Ints
    size: Ints
    value: Floats
    starts: Ints
    capacity: Floats
    classes: tuple[str, ...]

    def keep(self, mask: Mask) -> Table:
        """The table with only the rows of ``mask``; every group must keep one."""
        group = self.group[mask]
        starts = np.searchsorted(group, np.arange(len(self.members)))
        return Table(
            self.members, self.count, group, self.resource[mask], self.size[mask], self.value[mask], starts, self.capacity, self.classes
        )

    @property
    def rows_per_group(self) -> Ints:
        """Number of options of each group."""
        return np.diff(np.append(self.starts, len(self.group)))


def build(bids: Sequence[Bid], capacity: Mapping[str, int]) -> Table:
    """The table of ``bids``; must-run bids lose their idle row (see :func:`insist`)."""
    classes = tuple(name for name, nodes in capacity.items() if nodes > 0)
    index = {name: c for c, name in enumerate(classes)}
    groups: dict[tuple[float, tuple[tuple[int, Options], ...]], list[int]] = {}
    for i, bid in enumerate(bids):
        usable = tuple((index[name], options) for name, options in bid.options.items() if name in index and len(options.sizes))
        groups.setdefault((bid.idle_value, usable if len(usable) < 2 else tuple(sorted(usable, key=lambda o: o[0]))), []).append(i)
    sizes: list[Ints] = []
    values: list[Floats] = []
    lengths: list[int] = []
    resources: list[int] = []
    owners: list[int] = []
    nothing = np.zeros(1, np.int64)
    for g, (idle_value, usable) in enumerate(groups):
        if idle_value > -np.inf:
            sizes.append(nothing)
            values.append(np.array([idle_value]))
            lengths.append(1)
            resources.append(IDLE)
            owners.append(g)
        for c, options in usable:
            sizes.append(options.sizes)
            values.append(options.values)
            lengths.append(len(options.sizes))
            resources.append(c)
            owners.append(g)
    empty = not sizes
    size = np.zeros(0, np.int64) if empty else np.concatenate(sizes)
    value = np.zeros(0) if empty else np.concatenate(values)
    segment_length = np.array(lengths, np.int64)
    segment = np.repeat(np.arange(len(lengths)), segment_length)
    resource = np.repeat(np.array(resources, np.int64), segment_length)
    group = np.repeat(np.array(owners, np.int64), segment_length)
    limits = np.array([capacity[name] for name in classes], dtype=np.float64)
    fits = np.ones(len(size), np.bool_) if not len(limits) else (resource == IDLE) | (size <= limits[resource])
    idle = np.array([idle_value for idle_value, _ in groups])
    keep = fits & _undominated(value, segment, idle[group], resource == IDLE)
    members = tuple(tuple(m) for m in groups.values())
    starts = np.searchsorted(group[keep], np.arange(len(members)))
    count = np.array([len(m) for m in members], dtype=np.float64)
    return Table(members, count, group[keep], resource[keep], size[keep], value[keep], starts, limits, classes)


def _undominated(value: Floats, segment: Ints, idle: Floats, is_idle: Mask) -> Mask:
    """Rows worth more than the idle value and than every smaller size of the same job and class."""
    best = running_maximum(value, segment)
    keep = value > idle
    keep[1:] &= (segment[1:] != segment[:-1]) | (value[1:] > best[:-1])
    return keep | is_idle


def running_maximum(value: Floats, segment: Ints) -> Floats:
    """The maximum so far within each run of equal ``segment``, by doubling: log2(longest run) passes over the whole array."""
    best = value.copy()
    step = 1
    while step < len(best):
        same = segment[step:] == segment[:-step]
        if not same.any():
            break
        best[step:] = np.where(same, np.maximum(best[step:], best[:-step]), best[step:])
        step *= 2
    return best
