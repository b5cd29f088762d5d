"""Lagrange prices of nodes: an upper bound on every plan, and what each option loses against it.

With a price for one node of each class, every job can choose alone, and ``L(prices) =
prices·capacity + sum over jobs of max(value - price·size)`` is an upper bound on the value of every
plan (Lagrangian relaxation; for one class its minimum is the LP bound of the multiple-choice
knapsack problem, Kellerer, Pferschy, Pisinger, *Knapsack Problems*, section 11.2). The difference
between the bound and a plan is the sum of the **losses** of the options it uses, ``loss = best of
the job - (value - price·size) >= 0``, plus price times every unused node. So an option whose loss
alone exceeds what the best known plan loses is in no better plan.

Decides prices; the bound and the losses hold for any prices of 0 or more, so rounding here can cost
speed, never exactness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from allocator.table import BidTable, Floats, Ints, Mask

_PROBES = 80
_MANY_GROUPS = 100
"""Groups from which a first price is looked for among every eighth of them."""


@dataclass(frozen=True)
class Dual:
    """Prices, the bound that they prove, and what each row loses against it."""

    prices: Floats
    """By resource, value of one unit."""
    bound: float
    """No plan is worth more."""
    loss: Floats
    """Of every row of the table."""
    noise: float
    """Losses smaller than this are rounding (double precision sums of values this large)."""

    def waste(self, table: BidTable, plan: Ints) -> float:
        """What ``plan`` falls short of the bound: its losses and the price of what it leaves
        unused.
        """
        taken = np.flatnonzero(plan)
        return float(
            plan[taken] @ self.loss[taken] + self.prices @ (table.capacity - table.use(plan))
        )


def at(table: BidTable, prices: Floats) -> Dual:
    """The bound and the losses at ``prices``."""
    reduced = table.value - table.charge(prices)
    best = np.maximum.reduceat(reduced, table.starts)
    bound = float(table.count @ best + prices @ table.capacity)
    scale = float(table.count @ np.abs(best) + prices @ table.capacity)
    return Dual(
        prices, bound, best[table.group] - reduced, 1e-13 * scale * max(1.0, np.sqrt(len(best)))
    )


def choices(table: BidTable, dual: Dual) -> Ints:
    """The plan in which every job takes what loses nothing, the first such row; it may exceed the
    capacity.
    """
    hits = np.flatnonzero(dual.loss <= dual.noise)[::-1]
    chosen = np.empty(len(table.starts), np.int64)
    chosen[table.group[hits]] = hits
    plan = np.zeros(len(table.size), np.int64)
    plan[chosen] = table.count.astype(np.int64)
    return plan


def minimise(table: BidTable) -> Dual:
    """Prices that make the bound small: minimal for one resource; for several, each in turn once
    (:mod:`allocator.relax` goes on from there).
    """
    prices = np.zeros(len(table.capacity))
    if len(prices) == 1:
        view = OneResource(
            table.nodes, table.value, table.group, table.starts, table.count, table.capacity[0]
        )
        return at(table, np.array([view.best_price()]))
    for c in range(len(prices)):
        prices[c] = _view(table, prices, c).best_price()
    return at(table, prices)


@dataclass(frozen=True)
class OneResource:
    """One resource, the other prices fixed: rows by group, ascending in size; what does not use the
    resource has size 0.
    """

    size: Floats
    value: Floats
    group: Ints
    starts: Ints
    count: Floats
    limit: float

    @cached_property
    def _scratch(self) -> tuple[Floats, Floats, Mask]:
        """Room for a probe: a dozen probes of megabytes each would else spend their time asking for
        memory.
        """
        return (
            np.empty(len(self.size)),
            np.empty(len(self.size)),
            np.empty(len(self.size), np.bool_),
        )

    def probe(self, price: float) -> tuple[float, float, Ints]:
        """The bound (without constants), the units used, and the chosen row of each group (smallest
        of equals).
        """
        reduced, best_by_row, is_best = self._scratch
        np.multiply(self.size, -price, out=reduced)
        reduced += self.value
        best = np.maximum.reduceat(reduced, self.starts)
        np.take(best, self.group, out=best_by_row, mode="clip")
        np.greater_equal(reduced, best_by_row, out=is_best)
        hits = np.flatnonzero(is_best)[::-1]
        chosen = np.empty(len(self.starts), np.int64)
        chosen[self.group[hits]] = hits
        return (
            float(self.count @ best + price * self.limit),
            float(self.count @ self.size[chosen]),
            chosen,
        )

    def between(self, few: Ints, many: Ints) -> tuple[OneResource, Ints, Ints]:
        """Only the sizes from rows ``few`` to rows ``many``: a price in between chooses among
        them.
        """
        keep = (self.size >= self.size[few][self.group]) & (
            self.size <= self.size[many][self.group]
        )
        place = np.cumsum(keep) - 1
        group = self.group[keep]
        starts = np.searchsorted(group, np.arange(len(self.starts)))
        narrowed = OneResource(
            self.size[keep], self.value[keep], group, starts, self.count, self.limit
        )
        return narrowed, place[few], place[many]

    def sample(self, every: int) -> OneResource:
        """Every so many groups, and as much of the limit."""
        keep = self.group % every == 0
        group = self.group[keep] // every
        starts = np.searchsorted(group, np.arange(-(-len(self.starts) // every)))
        count = self.count[::every]
        return OneResource(
            self.size[keep],
            self.value[keep],
            group,
            starts,
            count,
            self.limit * float(count.sum() / self.count.sum()),
        )

    def best_price(self) -> float:
        """The price with the least bound: where two tangents meet on the curve, bisecting where
        that is slow.

        The bound is convex and piecewise linear in the price with slope ``limit - used``, so the
        search ends at a kink.
        """
        if not len(self.size):
            return 0.0
        guess = self.sample(8).best_price() if len(self.starts) >= _MANY_GROUPS else 0.0
        low, high = self._bracket(guess)
        if high is None:
            return 0.0
        view = self
        for turn in range(1, _PROBES):
            if len(view.size) > max(5000, 8 * len(view.starts)):
                view, few, many = view.between(high.rows, low.rows)
                low, high = replace(low, rows=many), replace(high, rows=few)
            meeting = (high.at_zero(self.limit) - low.at_zero(self.limit)) / (high.used - low.used)
            price = 0.5 * (low.price + high.price) if turn % 4 == 0 else meeting
            if not low.price < price < high.price:
                break
            bound, used, rows = view.probe(price)
            predicted = low.bound + (self.limit - low.used) * (price - low.price)
            if turn % 4 and bound <= predicted + 1e-14 * abs(predicted):
                return price
            if used > self.limit:
                low = _Probe(price, bound, used, rows)
            else:
                high = _Probe(price, bound, used, rows)
        return high.price

    def _bracket(self, guess: float) -> tuple[_Probe, _Probe | None]:
        """A price at which too many nodes are wanted, and one at which they suffice (None: there is
        no such pair).
        """
        price = guess if guess > 0 else 0.0
        probe = _Probe(price, *self.probe(price))
        step = 1.03
        if probe.used <= self.limit:
            high = probe
            while price > 0:
                price = price / step if step < 1e6 else 0.0
                step **= 4
                probe = _Probe(price, *self.probe(price))
                if probe.used > self.limit:
                    return probe, high
                high = probe
            return probe, None
        if price == 0:
            price, step = float(np.ptp(self.value)) / max(1.0, self.limit) or 1.0, 4.0
        else:
            price *= step
        for _ in range(_PROBES):
            low, probe = probe, _Probe(price, *self.probe(price))
            if probe.used <= self.limit:
                return low, probe
            price *= step
            step = min(step**4, 1e3)
        return (
            probe,
            None,
        )  # a sample of must-run jobs can be too large for its share of the limit at any price


@dataclass(frozen=True)
class _Probe:
    """What one price gave: the bound, the units used, and the row of each group."""

    price: float
    bound: float
    used: float
    rows: Ints

    def at_zero(self, limit: float) -> float:
        """The tangent at this price, read at price 0."""
        return self.bound - (limit - self.used) * self.price


def _view(table: BidTable, prices: Floats, c: int) -> OneResource:
    """The rows of resource ``c``, and for each group one row of size 0 worth the best of everything
    else.
    """
    reduced = table.value - table.charge(prices)
    mine = table.resource == c
    other = np.maximum.reduceat(np.where(mine, -np.inf, reduced), table.starts)
    has_other = np.flatnonzero(other > -np.inf)
    rows = np.flatnonzero(mine)
    group = np.concatenate([has_other, table.group[rows]])
    order = np.argsort(group, kind="stable")
    group = group[order]
    size = np.concatenate([np.zeros(len(has_other)), table.nodes[rows]])[order]
    value = np.concatenate([other[has_other], table.value[rows]])[order]
    starts = np.searchsorted(group, np.arange(len(table.starts)))
    return OneResource(size, value, group, starts, table.count, float(table.capacity[c]))
