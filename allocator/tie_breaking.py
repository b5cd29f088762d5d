"""Tie-breaking between plans of equal value: running jobs first, then the order of arrival.

Decides which of several optimal plans to use. An exact solver returns any of them; here an
assignment goes to the earlier of two jobs to which it is equally valuable, and a plan that is no
better than the current one changes nothing. It never changes the value of a plan. Jobs with equal
bids are ordered before, in :func:`allocator.table.to_sizes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from allocator.allocation import nodes_in_use
from allocator.bids import UNASSIGNED, Assignment, Bid, SizeValues
from allocator.table import Floats, Ints, Mask

_EQUAL = 1e-12
"""Relative difference up to which two values are equal: rounding in double precision."""
_NEARLY_EQUAL = 1e-9
"""The same for values that accumulate the rounding of up to a thousand exchanges."""


def prefer_current(
    bids: Sequence[Bid], capacity: Mapping[str, int], sizes: Mapping[str, Assignment]
) -> dict[str, Assignment]:
    """Return the current plan if it is as valuable as ``sizes``.

    Args:
        bids: of all jobs.
        capacity: node class -> nodes.
        sizes: job -> (node class, size), a feasible plan.

    Returns:
        The current assignments of all jobs if they are feasible, drop no must-run job that
        ``sizes`` places, and have the same value; else ``sizes``.
    """
    current = {bid.job: bid.current for bid in bids if bid.current[1]}
    changed = [bid for bid in bids if bid.current != sizes.get(bid.job, UNASSIGNED)]
    values_before = [bid.value(*bid.current) for bid in changed]
    values_after = [bid.value(*sizes.get(bid.job, UNASSIGNED)) or 0.0 for bid in changed]
    finite_before = [value for value in values_before if value is not None and value > -math.inf]
    fits = all(nodes <= capacity.get(name, 0) for name, nodes in nodes_in_use(current).items())
    rounding = _EQUAL * sum(map(abs, values_after))
    if (
        fits
        and len(finite_before) == len(changed)
        and sum(finite_before) >= sum(values_after) - rounding
    ):
        return current
    return dict(sizes)


def prefer_earlier(bids: Sequence[Bid], sizes: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Give each new assignment to the first job to which it is equally valuable.

    Only assignments of jobs that do not run yet are exchanged. Jobs that ``sizes`` stops come
    before jobs that wait.

    Args:
        bids: of all jobs, in the order of arrival.
        sizes: job -> (node class, size).

    Returns:
        A plan of the same value, jobs in the order of ``bids``.
    """
    exchanged = dict(sizes)
    new = [index for index, bid in enumerate(bids) if bid.job in exchanged and not bid.current[1]]
    waiting = [
        (not bid.current[1], index) for index, bid in enumerate(bids) if bid.job not in exchanged
    ]
    if new and waiting:
        _exchange(bids, exchanged, np.array(new), sorted(waiting))
    return {bid.job: exchanged[bid.job] for bid in bids if bid.job in exchanged}


def _exchange(
    bids: Sequence[Bid],
    sizes: dict[str, Assignment],
    owner: Ints,
    waiting: list[tuple[bool, int]],
) -> None:
    """Pass assignments on to earlier jobs, in place; each time the last owner gives its own up.

    Args:
        bids: of all jobs.
        sizes: the plan to change.
        owner: indices in ``bids`` of the jobs whose assignments may be passed on.
        waiting: (whether the job does not run, index in ``bids``) of the jobs without nodes; a
            heap.
    """
    assignments = [sizes[bids[index].job] for index in owner]
    size = np.array([nodes for _, nodes in assignments])
    of_class = {name: np.array([name == c for c, _ in assignments]) for name in dict(assignments)}
    must_run = np.array([bids[index].must_run for index in owner])
    values = [
        bids[index].value(*assignment) or 0.0
        for index, assignment in zip(owner, assignments, strict=True)
    ]
    idle_values = np.array([bids[index].idle_value for index in owner])
    gain = np.array(values) - np.where(must_run, 0.0, idle_values)
    earlier = [job for job in waiting if job < (True, owner.max())]
    waiting = _candidates(bids, earlier, of_class, size, must_run, gain)
    rejected: set[tuple[float, tuple[tuple[str, SizeValues], ...]]] = set()
    while waiting and waiting[0] < (True, owner.max()):
        is_new, index = heappop(waiting)
        bid = bids[index]
        options = (bid.idle_value, tuple(bid.options.items()))
        if options in rejected:
            continue
        gains = _gains([bid], of_class, size)[0]
        equal = (owner >= 0) & (must_run == bid.must_run) & (gains >= gain - _EQUAL * np.abs(gain))
        column = int(np.argmax(np.where(equal, owner, -1)))
        last = int(owner[column])
        if not equal[column] or (is_new and last < index):
            rejected.add(options)  # later jobs with the same options find nothing either
            continue
        sizes[bid.job] = sizes.pop(bids[last].job)
        # A running job keeps what it got (-1): this assignment is not passed on again.
        owner[column], gain[column] = index if is_new else -1, gains[column]
        heappush(waiting, (True, last))


def _candidates(
    bids: Sequence[Bid],
    waiting: list[tuple[bool, int]],
    of_class: Mapping[str, Mask],
    size: Ints,
    must_run: Mask,
    gain: Floats,
) -> list[tuple[bool, int]]:
    """Return the jobs of ``waiting`` to which some assignment is as valuable as to its owner;
    usually none. The gain of an assignment changes only by rounding when it is passed on, so the
    other jobs need no second check.
    """
    rows = [bids[index] for _, index in waiting]
    same_kind = must_run == np.array([bid.must_run for bid in rows])[:, None]
    as_good = _gains(rows, of_class, size) >= gain - _NEARLY_EQUAL * np.abs(gain)
    is_candidate = (same_kind & as_good).any(axis=1)
    return [job for job, yes in zip(waiting, is_candidate, strict=True) if yes]


def _gains(bids: Sequence[Bid], of_class: Mapping[str, Mask], size: Ints) -> Floats:
    """Return the value that each job (row) gains over its idle value by each assignment (column);
    -inf where its bid does not offer it.

    Args:
        bids: of the jobs.
        of_class: node class -> which assignments are on it.
        size: nodes of each assignment.
    """
    gains = np.full((len(bids), len(size)), -np.inf)
    rows_of: dict[tuple[str, int], list[int]] = {}  # rows whose bids share an array of sizes
    for row, bid in enumerate(bids):
        for name, options in bid.options.items():
            if name in of_class and len(options.sizes):
                rows_of.setdefault((name, id(options.sizes)), []).append(row)
    for (name, _), rows in rows_of.items():
        sizes = bids[rows[0]].options[name].sizes
        index = np.minimum(np.searchsorted(sizes, size), len(sizes) - 1)
        offered = np.flatnonzero(of_class[name] & (sizes[index] == size))
        values = [bids[row].options[name].values[index[offered]] for row in rows]
        gains[np.array(rows)[:, None], offered] = values
    idle = np.array([0.0 if bid.must_run else bid.idle_value for bid in bids], np.float64)
    over_idle: NDArray[np.float64] = gains - idle[:, None]
    return over_idle
