"""Lagrange prices of nodes: an upper bound on every plan, and what each option loses against it.

With a price for one node of each class, every job can choose alone, and ``L(prices) = prices·capacity + sum over jobs of
max(value - price·size)`` is an upper bound on the value of every plan (Lagrangian relaxation; for one class its minimum is
the LP bound of the multiple-choice knapsack problem, Kellerer, Pferschy, Pisinger, *Knapsack Problems*, section 11.2).
The difference between the bound and a plan is the sum of the **losses** of the options it uses,
``loss = best of the job - (value - price·size) >= 0``, plus price times every unused node. So an option whose loss alone
exceeds what the best known plan loses is in no better plan.

Decides prices; the bound and the losses hold for any prices of 0 or more, so rounding here can cost speed, never exactness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allocator.table import Floats, Ints, Table

_PROBES = 80


@dataclass(frozen=True)
class Dual:
    """Prices by resource, the bound they prove, and the loss of every row of the table.

    ``noise``: losses smaller than this are rounding (double precision sums of values this large).
    """

    prices: Floats
    bound: float
    loss: Floats
    noise: float

    def waste(self, table: Table, plan: Ints) -> float:
        """What ``plan`` falls short of the bound: its losses and the price of what it leaves unused."""
        taken = np.flatnonzero(plan)
        return float(plan[taken] @ self.loss[taken] + self.prices @ (table.capacity - table.use(plan)))


def at(table: Table, prices: Floats) -> Dual:
    """The bound and the losses at ``prices``."""
    reduced = table.value - np.append(prices, 0.0)[table.resource] * table.size
    best = np.maximum.reduceat(reduced, table.starts)
    bound = float(table.count @ best + prices @ table.capacity)
    scale = float(table.count @ np.abs(best) + prices @ table.capacity)
    return Dual(prices, bound, best[table.group] - reduced, 1e-13 * scale * max(1.0, np.sqrt(len(best))))


def choices(table: Table, prices: Floats) -> Ints:
    """The plan in which every job takes what is best for it at ``prices``, the smallest of equals; it may exceed the capacity."""
    reduced = table.value - np.append(prices, 0.0)[table.resource] * table.size
    plan = np.zeros(len(table.size), np.int64)
    plan[_first_best(reduced, table.group, table.starts)] = table.count.astype(np.int64)
    return plan


def _first_best(reduced: Floats, group: Ints, starts: Ints) -> Ints:
    """The first row of each group with the group's largest value."""
    best = np.maximum.reduceat(reduced, starts)
    hits = np.flatnonzero(reduced >= best[group])
    chosen = np.empty(len(starts), np.int64)
    chosen[group[hits][::-1]] = hits[::-1]
    return chosen


def minimise(table: Table, guess: Floats | None = None) -> Dual:
    """Prices that make the bound small: minimal for one resource; for several, each in turn once
    (:mod:`allocator.relax` goes on from there).

    Args:
        guess: prices to begin with, for instance those of the last plan.
    """
    prices = np.zeros(len(table.capacity)) if guess is None else np.maximum(guess, 0.0)
    if len(prices) == 1:
        view = View(table.size, table.value, table.group, table.starts, table.count, table.capacity[0])
        return at(table, np.array([view.best_price(float(prices[0]))]))
    for c in range(len(prices)):
        prices[c] = _view(table, prices, c).best_price(float(prices[c]))
    return at(table, prices)


@dataclass(frozen=True)
class View:
    """One resource, the other prices fixed: rows by group, ascending in size; what does not use the resource has size 0."""

    size: Ints
    value: Floats
    group: Ints
    starts: Ints
    count: Floats
    limit: float

    def probe(self, price: float) -> tuple[float, float, Ints]:
        """The bound (without constants), the units used, and the chosen row of each group (smallest of equals)."""
        reduced = self.value - price * self.size
        best = np.maximum.reduceat(reduced, self.starts)
        hits = np.flatnonzero(reduced >= best[self.group])
        chosen = np.empty(len(self.starts), np.int64)
        chosen[self.group[hits][::-1]] = hits[::-1]
        return float(self.count @ best + price * self.limit), float(self.count @ self.size[chosen]), chosen

    def between(self, few: Ints, many: Ints) -> tuple[View, Ints, Ints]:
        """Only the sizes from rows ``few`` to rows ``many``: a price in between chooses among them."""
        keep = (self.size >= self.size[few][self.group]) & (self.size <= self.size[many][self.group])
        place = np.cumsum(keep) - 1
        group = self.group[keep]
        starts = np.searchsorted(group, np.arange(len(self.starts)))
        narrowed = View(self.size[keep], self.value[keep], group, starts, self.count, self.limit)
        return narrowed, place[few], place[many]

    def best_price(self, guess: float) -> float:
        """The price with the least bound: where two tangents meet on the curve, bisecting where that is slow.

        The bound is convex and piecewise linear in the price with slope ``limit - used``, so the search ends at a kink.
        """
        bound, used, chosen = self.probe(0.0)
        if used <= self.limit or not len(self.size):
            return 0.0
        low, low_bound, low_used, low_rows = 0.0, bound, used, chosen
        spread = float(np.ptp(self.value)) / max(1.0, self.limit)
        high = guess if guess > 0 else max(spread, 1e-300)
        while True:
            bound, used, chosen = self.probe(high)
            if used <= self.limit:
                break
            low, low_bound, low_used, low_rows = high, bound, used, chosen
            high *= 4.0
        high_bound, high_used, high_rows = bound, used, chosen
        view = self
        for turn in range(1, _PROBES):
            if len(view.size) > max(5000, 8 * len(view.starts)):
                view, high_rows, low_rows = view.between(high_rows, low_rows)
            high_line = high_bound - (self.limit - high_used) * high
            low_line = low_bound - (self.limit - low_used) * low
            meeting = (high_line - low_line) / (high_used - low_used)
            price = 0.5 * (low + high) if turn % 4 == 0 else meeting
            if not low < price < high:
                break
            bound, used, chosen = view.probe(price)
            predicted = low_bound + (self.limit - low_used) * (price - low)
            if turn % 4 and bound <= predicted + 1e-14 * abs(predicted):
                return price
            if used > self.limit:
                low, low_bound, low_used, low_rows = price, bound, used, chosen
            else:
                high, high_bound, high_used, high_rows = price, bound, used, chosen
        return high


def _view(table: Table, prices: Floats, c: int) -> View:
    """The rows of resource ``c``, and for each group one row of size 0 worth the best of everything else."""
    reduced = table.value - np.append(prices, 0.0)[table.resource] * table.size
    mine = table.resource == c
    other = np.maximum.reduceat(np.where(mine, -np.inf, reduced), table.starts)
    has_other = np.flatnonzero(other > -np.inf)
    rows = np.flatnonzero(mine)
    group = np.concatenate([has_other, table.group[rows]])
    order = np.argsort(group, kind="stable")
    group = group[order]
    size = np.concatenate([np.zeros(len(has_other), np.int64), table.size[rows]])[order]
    value = np.concatenate([other[has_other], table.value[rows]])[order]
    starts = np.searchsorted(group, np.arange(len(table.starts)))
    return View(size, value, group, starts, table.count, float(table.capacity[c]))



