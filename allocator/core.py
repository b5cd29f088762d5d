"""The core: the few options that are still open once the prices have spoken, and two exact ways to
decide them.

Both ways look for the plan with the least **waste** (what it falls short of the price bound, see
:mod:`allocator.prices`). Wastes are small differences, so solving for them instead of for values
keeps full precision whatever the unit of the values is.

* :func:`by_counting` - a dynamic program over node counts, pruned at the waste of the best known
  plan. For one class of nodes; fast while few states survive, and it gives up when they do not.
* :func:`by_milp` - HiGHS, for any number of classes, with one integer variable an option: how many
  jobs of a group take it.

Decides which rows stay open is :mod:`allocator.search`'s work.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from allocator.highs import LinearProgram, SolverError, maximise
from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints, Mask

log = logging.getLogger(__name__)

_MOST_STATES = 20_000_000
"""States kept for reading the plan back (8 bytes each)."""


@dataclass(frozen=True)
class OpenCore:
    """The open part of a table."""

    rows: Ints
    """Table rows that are open, by group, ascending."""
    group: Ints
    """Per open row, the open group it belongs to (0, 1, …)."""
    count: Ints
    """Members of each open group."""
    fixed: Ints
    """Plan (members by table row) of the groups with one row left."""
    room: Floats
    """Units of each resource that ``fixed`` leaves."""
    sunk: float
    """Loss of ``fixed``."""


@dataclass(frozen=True)
class Outcome:
    """The least wasteful plan of a core."""

    plan: Ints | None
    """None when nothing below the ceiling was found."""
    complete: bool
    """Whether it is proven that no plan of the core wastes less (or, without a plan, less than the
    ceiling).
    """
    floor: float = 0.0
    """When not complete, a proven limit: every plan of the core wastes at least this."""


def open_rows(table: BidTable, dual: Dual, keep: Mask) -> OpenCore:
    """The core with only the rows of ``keep``, of which every group has at least one."""
    rows = np.flatnonzero(keep)
    group = table.group[rows]
    per_group = np.bincount(group, minlength=len(table.starts))
    closed = per_group[group] == 1
    fixed = np.zeros(len(table.size), np.int64)
    fixed[rows[closed]] = table.count[group[closed]].astype(np.int64)
    is_open = per_group > 1
    renumber = np.cumsum(is_open) - 1
    rows, group = rows[~closed], renumber[group[~closed]]
    room = table.capacity - table.use(fixed)
    taken = np.flatnonzero(fixed)
    count = table.count[is_open].astype(np.int64)
    return OpenCore(rows, group, count, fixed, room, float(fixed[taken] @ dual.loss[taken]))


def by_counting(
    table: BidTable, dual: Dual, core: OpenCore, ceiling: float, work: float, resource: int = 0
) -> Outcome | None:
    """The least wasteful plan of a core whose open rows use only ``resource``, if one wastes less
    than ``ceiling``.

    States are the nodes used beyond the smallest open size of each job. A state is dropped when its
    losses reach the ceiling, or when so few nodes could still be used that those left over would.

    Returns:
        None when more than ``work`` state updates, or too much memory, would be needed.
    """
    starts = np.searchsorted(core.group, np.arange(len(core.count) + 1))
    sizes, loss = table.size[core.rows], dual.loss[core.rows]
    least = np.minimum.reduceat(sizes, starts[:-1]) if len(core.count) else np.zeros(0, np.int64)
    spans = (np.maximum.reduceat(sizes, starts[:-1]) - least) if len(core.count) else least
    room = round(float(core.room[resource] - core.count @ least))
    price = float(dual.prices[resource])
    sunk = core.sunk + float(np.delete(dual.prices, resource) @ np.delete(core.room, resource))
    if room < 0:
        return Outcome(None, True)
    stages = np.repeat(np.arange(len(core.count)), core.count)
    stages = stages[np.argsort(spans[stages], kind="stable")]
    ahead = np.concatenate([np.cumsum(spans[stages][::-1])[::-1], [0]])
    reach = (
        int(ceiling / price) if price > 0 and ceiling / price < room else room
    )  # nodes that may stay unused
    history: list[tuple[int, Floats, int]] = []
    offset, best = 0, np.array([sunk])
    spent, kept = 0.0, 0
    for turn, g in enumerate(stages.tolist()):
        history.append((offset, best, g))
        these = range(int(starts[g]), int(starts[g + 1]))
        floor_at = max(offset, room - reach - int(ahead[turn + 1]))
        width = min(room, offset + len(best) - 1 + int(spans[g])) - floor_at + 1
        if width <= 0:
            return Outcome(None, True)
        spent += (width + 500.0) * len(these)
        kept += width
        if spent > work or kept > _MOST_STATES:
            return None
        after = np.full(width, np.inf)
        for row in these:
            shift = offset + int(sizes[row] - least[g]) - floor_at
            begin, end = max(0, shift), min(width, shift + len(best))
            if begin < end:
                np.minimum(
                    after[begin:end],
                    best[begin - shift : end - shift] + loss[row],
                    out=after[begin:end],
                )
        alive = after < ceiling
        first = int(np.argmax(alive))
        if not alive[first]:
            return Outcome(None, True)
        last = width - int(np.argmax(alive[::-1]))
        offset, best = floor_at + first, after[first:last]
    left = room - (offset + np.arange(len(best)))
    total = best + price * left
    at = int(np.argmin(total))
    if not total[at] < ceiling:
        return Outcome(None, True)
    plan = core.fixed.copy()
    nodes, lost = offset + at, best[at]
    for offset, best, g in reversed(history):
        for row in range(int(starts[g]), int(starts[g + 1])):
            before = nodes - int(sizes[row] - least[g]) - offset
            if 0 <= before < len(best) and best[before] + loss[row] == lost:
                plan[core.rows[row]] += 1
                nodes, lost = before + offset, best[before]
                break
    return Outcome(plan, True)


def by_milp(
    table: BidTable,
    dual: Dual,
    core: OpenCore,
    ceiling: float,
    *,
    time_limit_s: float,
    accept: float,
    start: Ints | None,
) -> Outcome:
    """The least wasteful plan of a core, in HiGHS, with the best one found when time is up.

    Minimise ``(loss·n + prices·unused) / ceiling`` over members by row n and unused nodes, so that
    the waste of the best known plan is 1 and HiGHS' tolerances (1e-9 of it) are far below anything
    that matters.

    Args:
        accept: stop when the waste is proven to be within this of the least.
        start: the best known plan, whose rows are all in the core.
    """
    n, groups, resources = len(core.rows), len(core.count), len(core.room)
    size = table.size[core.rows].astype(np.float64)
    resource = table.resource[core.rows]
    counted = resource != IDLE
    entries = 1 + counted.astype(np.int64)
    begins = np.concatenate(
        [[0], np.cumsum(entries), np.cumsum(entries)[-1:] + np.arange(1, resources + 1)]
    )
    total = int(begins[-1])
    index, coefficient = np.zeros(total, np.int64), np.ones(total)
    index[begins[:n]] = core.group
    index[begins[:n][counted] + 1] = groups + resource[counted]
    coefficient[begins[:n][counted] + 1] = size[counted]
    index[begins[n : n + resources]] = groups + np.arange(resources)
    limits = np.concatenate([core.count.astype(np.float64), core.room])
    model = LinearProgram(
        cost=-np.concatenate([dual.loss[core.rows], dual.prices]) / ceiling,
        lower=np.zeros(n + resources),
        upper=np.concatenate(
            [core.count[core.group].astype(np.float64), np.full(resources, np.inf)]
        ),
        integral=np.concatenate([np.ones(n, np.bool_), np.zeros(resources, np.bool_)]),
        starts=begins,
        rows=index,
        coefficients=coefficient,
        row_lower=limits,
        row_upper=limits,
    )
    guess = None
    if start is not None:
        guess = np.concatenate(
            [start[core.rows].astype(np.float64), table.capacity - table.use(start)]
        )
    try:
        answer = maximise(
            model, time_limit_s=time_limit_s, absolute_gap=accept / ceiling, start=guess
        )
    except SolverError as error:  # costs the proof, not the plan
        log.warning("The allocation goes on without an optimality proof. %s", error)
        return Outcome(None, False)
    floor = max(0.0, core.sunk - answer.bound * ceiling) if np.isfinite(answer.bound) else 0.0
    plan = None
    if answer.x is not None:
        plan = core.fixed.copy()
        plan[core.rows] = np.rint(answer.x[:n]).astype(np.int64)
    if plan is None or not table.fits(plan):
        return Outcome(None, False, floor)
    return Outcome(plan, answer.optimal and accept <= dual.noise, floor)
