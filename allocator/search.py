"""From a first plan to the best one: which options stay open, and when the best is proven.

Decides, round by round, which rows of the table may still be part of a better plan (those whose
loss is below the waste of the best known plan), and hands them to one of the solvers in
:mod:`allocator.core`. While they are many, the cheapest few of them are solved first: the better
plan this gives usually closes most of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from allocator import core as cores
from allocator.moves import fill, repair
from allocator.prices import Dual
from allocator.table import IDLE, BidTable, Floats, Ints, Mask, undominated

_FIRST_POOL = 300
"""Rows solved first when more than three times as many are open."""
_FILL_ROWS = 4000
"""Rows considered when a plan is filled up."""
_CHEAP_WORK = 4e6
"""State updates (about 10 ms) that the dynamic program may spend on a core before HiGHS gets it."""
_PATIENT_WORK = 4e8
"""The same for a core that HiGHS would take long for."""
_LARGE_CORE = 3000
_WORK_A_SECOND = 3e8
_MOST_ROWS, _ROWS_A_SECOND = 10_000, 4_000
"""Largest core given to HiGHS, whose presolve does not look at the clock often enough on larger
ones, and how it shrinks with the time left.
"""


@dataclass(frozen=True)
class Found:
    """The best plan, and what is proven of it."""

    plan: Ints
    """Members by row."""
    waste: float
    """What it falls short of the price bound."""
    floor: float
    """The least waste that any plan can have, proven."""
    accept: float
    """How close is close enough."""
    proof: str
    """What proved it."""
    core: tuple[int, int]
    """(groups, rows) of the last core."""


def first_plan(table: BidTable, dual: Dual, wish: Ints, seats: Ints) -> Ints:
    """A feasible plan near ``wish``: nodes taken back where it has too many; ``seats`` (feasible)
    where that fails; then filled up.
    """
    if table.fits(wish):
        return wish
    near = _near(table, dual, seats)
    repaired = repair(table, dual, wish, near)
    return fill(table, dual, seats if repaired is None else repaired, near, 4 * len(table.starts))


def narrow(table: BidTable, dual: Dual, plan: Ints) -> tuple[BidTable, Dual, Ints]:
    """All three with only the rows that ``plan`` uses or that a better plan might."""
    mask = (dual.loss < dual.waste(table, plan) - dual.noise) | (plan > 0)
    return table.keep(mask), replace(dual, loss=dual.loss[mask]), plan[mask]


def _near(table: BidTable, dual: Dual, seats: Ints) -> Ints:
    """A few rows of each group: those that lose least, the smallest of each class, and the
    seats.
    """
    number = min(len(table.size), 8 * len(table.starts))
    near = seats > 0
    near[np.argpartition(dual.loss, number - 1)[:number]] = True
    near[table.starts] = True
    near[1:] |= (table.resource[1:] != table.resource[:-1]) | (table.group[1:] != table.group[:-1])
    return np.flatnonzero(near)


def polish(table: BidTable, dual: Dual, plan: Ints) -> Ints:
    """``plan`` with the jobs of each class in turn sized anew, together with the jobs that have
    nothing.
    """
    for c in range(len(table.capacity)):
        waste = dual.waste(table, plan)
        better = dual.loss < waste - dual.noise
        movable = np.zeros(len(table.starts), np.bool_)
        taken = np.flatnonzero(plan)
        movable[table.group[taken]] = True
        movable[
            table.group[taken[(table.resource[taken] != c) & (table.resource[taken] != IDLE)]]
        ] = False
        mine = better & movable[table.group] & ((table.resource == c) | (table.resource == IDLE))
        if not mine.any():
            continue
        pool = _cheapest(table, dual, mine, _FIRST_POOL) & mine | (plan > 0)
        outcome = cores.by_counting(
            table, dual, cores.open_rows(table, dual, pool), waste - dual.noise, _CHEAP_WORK, c
        )
        if outcome is not None and outcome.plan is not None and table.fits(outcome.plan):
            plan = outcome.plan
    return plan


def improve(
    table: BidTable,
    dual: Dual,
    plan: Ints,
    *,
    left_s: Callable[[], float],
    gap: float,
    counting: bool,
) -> Found:
    """The least wasteful plan, or the best one found while there is time.

    Args:
        left_s: seconds left.
        gap: relative gap at which to stop.
        counting: whether the dynamic program may be used where it applies.
    """
    waste = dual.waste(table, plan)
    accept = max(dual.noise, gap * abs(dual.bound - waste))
    floor, proof, shape = 0.0, "bound", (0, 0)
    pool_size, filled = _FIRST_POOL, False
    several = len(table.capacity) > 1
    one_class = counting and not several
    copies = table.count[table.group] if one_class else np.ones(len(table.group))
    while waste > floor + accept:
        better = dual.loss < waste - dual.noise
        if not filled:
            plan, filled = (
                fill(table, dual, plan, _least(np.flatnonzero(better), dual.loss, _FILL_ROWS)),
                True,
            )
            if several and counting:
                plan = polish(table, dual, plan)
            waste = dual.waste(table, plan)
            continue
        left = left_s()
        if left <= 0:
            break
        better = undominated(table, better)
        effort = float(copies[better].sum())
        most = min(_MOST_ROWS, max(500, int(_ROWS_A_SECOND * left)))
        exact = effort <= 3 * min(pool_size, most) + float(copies[table.starts].sum())
        pool_size = min(pool_size, most)
        pool = (better if exact else _cheapest(table, dual, better, pool_size)) | (plan > 0)
        left_out = dual.loss[better & ~pool]
        exact, outside = not len(left_out), float(left_out.min(initial=np.inf))
        core = cores.open_rows(table, dual, pool)
        shape, ceiling = (len(core.count), len(core.rows)), waste
        outcome = None
        if one_class:
            work = min(
                _PATIENT_WORK if len(core.rows) > _LARGE_CORE else _CHEAP_WORK,
                _WORK_A_SECOND * left,
            )
            outcome = cores.by_counting(table, dual, core, waste - dual.noise, work)
            proof = "dp"
        if outcome is None:
            proof = "highs"
            share = left if exact else 0.3 * left
            outcome = cores.by_milp(
                table, dual, core, waste, time_limit_s=share, accept=accept, start=plan
            )
        if outcome.plan is not None:
            found = dual.waste(table, outcome.plan)
            if found < waste - dual.noise:
                plan, waste = outcome.plan, found
        coarse = (
            proof == "highs" and waste < 1e-3 * ceiling
        )  # HiGHS is exact to 1e-9 of the ceiling: ask again with a lower one
        least = (
            waste if outcome.complete and not coarse else min(outcome.floor, waste - 1e-9 * ceiling)
        )
        floor = max(floor, min(least, outside))
        if exact and not coarse:
            break
        if not exact and pool_size >= most:
            break
        pool_size *= 4
    return Found(plan, waste, min(floor, waste), accept, proof, shape)


def _least(rows: Ints, loss: Floats, number: int) -> Ints:
    """The ``number`` rows that lose least."""
    return (
        rows if len(rows) <= number else np.sort(rows[np.argpartition(loss[rows], number)[:number]])
    )


def _cheapest(table: BidTable, dual: Dual, better: Mask, number: int) -> Mask:
    """The best row of each group, and about ``number`` others of ``better`` with small losses: half
    of them whatever their group, half at most three a group.
    """
    pool = better & (dual.loss <= dual.noise)
    rows = np.flatnonzero(better & ~pool)
    loss = dual.loss[rows]
    rows = _least(rows, dual.loss, 12 * number)
    loss = dual.loss[rows]
    pool[rows[np.argsort(loss, kind="stable")[: number // 2]]] = True
    order = np.lexsort((loss, table.group[rows]))
    rows, loss = rows[order], loss[order]
    group = table.group[rows]
    few = np.arange(len(rows)) - np.searchsorted(group, group) < 3
    rows, loss = rows[few], loss[few]
    pool[rows[np.argsort(loss, kind="stable")[: number // 2]]] = True
    return pool
