"""From a first plan to the best one: which options stay open, and when the best is proven.

Decides, round by round, which rows of the table may still be part of a better plan (those whose loss is below the waste of the
best known plan), and hands them to one of the solvers in :mod:`allocator.core`. While they are many, the cheapest few of
them are solved first: the better plan this gives usually closes most of the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from allocator import core as cores
from allocator.prices import Dual
from allocator.table import IDLE, Ints, Mask, Table

_FIRST_POOL = 300
"""Rows solved first when more than three times as many are open."""
_CHEAP_WORK = 4e6
"""State updates (about 10 ms) that the dynamic program may spend on a core before HiGHS gets it."""
_PATIENT_WORK = 4e8
"""The same for a core that HiGHS would take long for."""
_LARGE_CORE = 3000


@dataclass(frozen=True)
class Found:
    """The best plan, its waste, the least waste any plan can have (proven), how close is close enough, and what proved it."""

    plan: Ints
    waste: float
    floor: float
    accept: float
    proof: str
    core: tuple[int, int]


def fill(table: Table, dual: Dual, plan: Ints, rows: Ints, moves: int = 100) -> Ints:
    """``plan`` improved while there is room, by moves to one of ``rows`` that gain most for the price of the nodes they take.

    A move takes as many alike jobs along as fit.
    """
    plan = plan.copy()
    free = table.capacity - table.use(plan)
    size, resource, group, value = table.size[rows], table.resource[rows], table.group[rows], table.value[rows]
    prices = np.append(dual.prices, 0.0)
    charge = prices[table.resource] * table.size
    source = np.empty(len(table.starts), np.int64)  # of each group, the row in use that loses most
    taken = np.flatnonzero(plan)
    if len(taken) > len(source):
        taken = taken[np.argsort(dual.loss[taken], kind="stable")]
    source[table.group[taken]] = taken
    for _ in range(moves if len(rows) else 0):
        origin = source[group]
        more = size - np.where(table.resource[origin] == resource, table.size[origin], 0)
        gain = value - table.value[origin]
        cost = np.maximum(charge[rows] - charge[origin], 1e-9 * np.abs(gain) + 1e-300)
        yields = np.where((more <= np.append(free, np.inf)[resource]) & (gain > dual.noise), gain / cost, 0.0)
        best = int(np.argmax(yields))
        if not yields[best] > 0:
            break
        start, end, g = int(origin[best]), int(rows[best]), int(group[best])
        number = int(plan[start])
        if more[best] > 0 and resource[best] != IDLE:
            number = min(number, int(free[resource[best]] // more[best]))
        plan[start] -= number
        plan[end] += number
        free = table.capacity - table.use(plan)
        first = int(table.starts[g])
        mine = first + np.flatnonzero(plan[first : table.ends[g]])
        source[g] = mine[np.argmax(dual.loss[mine])]
    return plan


def first_plan(table: Table, dual: Dual, seats: Ints) -> Ints:
    """A feasible plan: what jobs choose at prices just high enough, filled up; ``seats`` (feasible) where no price will do."""
    plan = seats
    low, high, factor = 1.0, np.inf, 1.0 + 1e-9
    base = np.where(dual.prices > 0, dual.prices, 1e-9 * max(1e-300, float(dual.prices.max(initial=0.0))))
    for _ in range(40):
        reduced = table.value - np.append(base * factor, 0.0)[table.resource] * table.size
        best = np.maximum.reduceat(reduced, table.starts)
        hits = np.flatnonzero(reduced >= best[table.group])
        chosen = np.empty(len(table.starts), np.int64)
        chosen[table.group[hits][::-1]] = hits[::-1]
        candidate = np.zeros(len(table.size), np.int64)
        candidate[chosen] = table.count.astype(np.int64)
        if table.fits(candidate):
            plan, high = candidate, factor
        else:
            low = factor
        if high - low <= 1e-3 * low:
            break
        factor = low + 2.0 * max(low - 1.0, 1e-6) if high == np.inf else 0.5 * (low + high)
        if factor > 1e12:
            break
    return plan


def improve(
    table: Table, dual: Dual, plan: Ints, *, deadline: float, gap: float, counting: bool
) -> Found:
    """The least wasteful plan, or the best one found by ``deadline`` (a value of :func:`time.perf_counter`).

    Args:
        gap: relative gap at which to stop.
        counting: whether the dynamic program may be used where it applies.
    """
    waste = dual.waste(table, plan)
    accept = max(dual.noise, gap * abs(dual.bound - waste))
    floor, proof, shape = 0.0, "bound", (0, 0)
    pool_size, filled = _FIRST_POOL, False
    one_class = len(table.capacity) == 1 and counting
    copies = table.count[table.group] if one_class else np.ones(len(table.group))
    while waste > floor + accept:
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        better = dual.loss < waste - dual.noise
        if not filled:
            plan, filled = fill(table, dual, plan, np.flatnonzero(better)), True
            waste = dual.waste(table, plan)
            continue
        effort = float(copies[better].sum())
        exact = effort <= 3 * pool_size + float(copies[table.starts].sum())
        pool = (better if exact else _cheapest(table, dual, better, pool_size)) | (plan > 0)
        left_out = dual.loss[better & ~pool]
        exact, outside = not len(left_out), float(left_out.min(initial=np.inf))
        core = cores.open_rows(table, dual, pool)
        shape, ceiling = (len(core.count), len(core.rows)), waste
        outcome = None
        if one_class:
            work = _PATIENT_WORK if len(core.rows) > _LARGE_CORE else _CHEAP_WORK
            outcome = cores.by_counting(table, dual, core, waste - dual.noise, work)
            proof = "dp"
        if outcome is None:
            proof = "highs"
            share = left if exact else 0.3 * left
            outcome = cores.by_milp(table, dual, core, waste, time_limit_s=share, accept=accept, start=plan)
        if outcome.plan is not None:
            found = dual.waste(table, outcome.plan)
            if found < waste - dual.noise:
                plan, waste = outcome.plan, found
        coarse = proof == "highs" and waste < 1e-3 * ceiling  # HiGHS is exact to 1e-9 of the ceiling: ask again with a lower one
        least = waste if outcome.complete and not coarse else min(outcome.floor, waste - 1e-9 * ceiling)
        floor = max(floor, min(least, outside))
        if exact and not coarse:
            break
        if not exact:
            pool_size *= 4
    return Found(plan, waste, min(floor, waste), accept, proof, shape)


def _cheapest(table: Table, dual: Dual, better: Mask, number: int) -> Mask:
    """About ``number`` rows of ``better`` with small losses: half of them whatever their group, half at most six a group."""
    rows = np.flatnonzero(better)
    loss = dual.loss[rows]
    if len(rows) > 12 * number:
        near = np.argpartition(loss, 12 * number)[: 12 * number]
        near.sort()
        rows, loss = rows[near], loss[near]
    pool = np.zeros(len(better), np.bool_)
    pool[rows[np.argsort(loss, kind="stable")[:number]]] = True
    order = np.lexsort((loss, table.group[rows]))
    rows, loss = rows[order], loss[order]
    group = table.group[rows]
    rank = np.arange(len(rows)) - np.searchsorted(group, group)
    few = rank < 6
    rows, loss = rows[few], loss[few]
    pool[rows[np.argsort(loss, kind="stable")[:number]]] = True
    pool[np.flatnonzero(dual.loss <= 0.0)] = True
    return pool

