"""The Lagrangian dual: prices of nodes, an upper bound on every plan, reduced costs of options.

With a price for one node of each pool every job can be decided alone, and ``L(prices) =
prices·capacity + sum over jobs of max(value - price·size)`` is an upper bound on the value of every
plan (Lagrangian relaxation; for one pool its minimum is the LP bound of the multiple-choice
knapsack problem: Kellerer, Pferschy, Pisinger, *Knapsack Problems*, section 11.2). The **reduced
cost** of an option is ``best of the job - (value - price·size) >= 0``. The **duality gap** of a
plan, the bound minus its value, is the sum of the reduced costs of its options plus the price of
every unused node. Therefore an option whose reduced cost exceeds the duality gap of the incumbent
is in no better plan.

Decides prices. It does not choose a plan. The bound and the reduced costs are valid at any prices
of 0 or more: rounding costs speed, never exactness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from allocator.table import BidTable, Floats, Ints, Mask

_MAX_EVALUATIONS = 80
"""Evaluations of the dual function in one bracketing or one search."""
_SAMPLE_FROM_GROUPS = 100
"""From this number of groups on, the first price comes from a sample of every eighth group."""


@dataclass(frozen=True)
class Dual:
    """Prices, the bound that they prove, and the reduced costs at them."""

    prices: Floats
    """The value of one unit of each resource."""
    bound: float
    """An upper bound on the value of every plan."""
    reduced_cost: Floats
    """Of each row of the table, 0 or more."""
    noise: float
    """Reduced costs below this are rounding errors of sums in double precision."""

    def duality_gap(self, table: BidTable, plan: Ints) -> float:
        """Return the bound minus the value of ``plan``: its reduced costs plus the price of its
        unused capacity.
        """
        in_use = np.flatnonzero(plan)
        return float(
            plan[in_use] @ self.reduced_cost[in_use]
            + self.prices @ (table.capacity - table.usage(plan))
        )


def dual_at(table: BidTable, prices: Floats) -> Dual:
    """Return the bound and the reduced costs at ``prices``."""
    net_value = table.value - table.node_cost(prices)
    best = np.maximum.reduceat(net_value, table.starts)
    bound = float(table.count @ best + prices @ table.capacity)
    scale = float(table.count @ np.abs(best) + prices @ table.capacity)
    return Dual(
        prices, bound, best[table.group] - net_value, 1e-13 * scale * max(1.0, np.sqrt(len(best)))
    )


def relaxed_plan(table: BidTable, dual: Dual) -> Ints:
    """Return the solution of the relaxation: every job takes its first row with reduced cost 0. The
    plan may exceed the capacity.
    """
    candidates = np.flatnonzero(dual.reduced_cost <= dual.noise)[::-1]
    chosen = np.empty(len(table.starts), np.int64)
    chosen[table.group[candidates]] = candidates
    plan = np.zeros(len(table.size), np.int64)
    plan[chosen] = table.count.astype(np.int64)
    return plan


def minimise_dual(table: BidTable) -> Dual:
    """Minimise the bound over the prices.

    The result is the minimum for one resource. For several it is one pass of coordinate descent,
    which :mod:`allocator.milp` improves.
    """
    prices = np.zeros(len(table.capacity))
    if len(prices) == 1:
        single = SingleResource(
            table.nodes, table.value, table.group, table.starts, table.count, table.capacity[0]
        )
        return dual_at(table, np.array([single.best_price()]))
    for c in range(len(prices)):
        prices[c] = _single_resource(table, prices, c).best_price()
    return dual_at(table, prices)


@dataclass(frozen=True)
class SingleResource:
    """The problem for one resource at fixed prices of the others. Rows of one group are adjacent
    and ascending in size; rows that do not use the resource have size 0.
    """

    size: Floats
    """Units of the resource, by row."""
    value: Floats
    """Value net of the other resources' prices, by row."""
    group: Ints
    """Group of each row."""
    starts: Ints
    """First row of each group."""
    count: Floats
    """Members of each group."""
    limit: float
    """Units of the resource."""

    @cached_property
    def _buffers(self) -> tuple[Floats, Floats, Mask]:
        """Arrays that all evaluations reuse. Without them allocating the memory takes most of the
        time: an evaluation needs megabytes.
        """
        return (
            np.empty(len(self.size)),
            np.empty(len(self.size)),
            np.empty(len(self.size), np.bool_),
        )

    def evaluate(self, price: float) -> _Evaluation:
        """Return the dual function at ``price``. Among equally good rows of a group the smallest
        wins.
        """
        net_value, best_by_row, is_best = self._buffers
        np.multiply(self.size, -price, out=net_value)
        net_value += self.value
        best = np.maximum.reduceat(net_value, self.starts)
        np.take(best, self.group, out=best_by_row, mode="clip")
        np.greater_equal(net_value, best_by_row, out=is_best)
        best_rows = np.flatnonzero(is_best)[::-1]
        chosen = np.empty(len(self.starts), np.int64)
        chosen[self.group[best_rows]] = best_rows
        return _Evaluation(
            price,
            float(self.count @ best + price * self.limit),
            float(self.count @ self.size[chosen]),
            chosen,
        )

    def restricted(self, smallest: Ints, largest: Ints) -> tuple[SingleResource, Ints, Ints]:
        """Return the problem with only the sizes that prices between two evaluated ones can choose.

        Args:
            smallest: the row of each group at the higher price.
            largest: the row of each group at the lower price.

        Returns:
            The smaller problem, and ``smallest`` and ``largest`` as rows of it.
        """
        keep = (self.size >= self.size[smallest][self.group]) & (
            self.size <= self.size[largest][self.group]
        )
        new_row = np.cumsum(keep) - 1
        group = self.group[keep]
        starts = np.searchsorted(group, np.arange(len(self.starts)))
        restricted = SingleResource(
            self.size[keep], self.value[keep], group, starts, self.count, self.limit
        )
        return restricted, new_row[smallest], new_row[largest]

    def sample(self, every: int) -> SingleResource:
        """Return the problem with one of ``every`` groups and the same share of the limit."""
        keep = self.group % every == 0
        group = self.group[keep] // every
        starts = np.searchsorted(group, np.arange(-(-len(self.starts) // every)))
        count = self.count[::every]
        return SingleResource(
            self.size[keep],
            self.value[keep],
            group,
            starts,
            count,
            self.limit * float(count.sum() / self.count.sum()),
        )

    def best_price(self) -> float:
        """Return the price at which the dual function is least.

        The function is convex and piecewise linear with slope ``limit - used``. Each iteration goes
        to the intersection of two tangents, every fourth one bisects. The search ends at a kink.
        """
        if not len(self.size):
            return 0.0
        guess = self.sample(8).best_price() if len(self.starts) >= _SAMPLE_FROM_GROUPS else 0.0
        low, high = self._bracket(guess)
        if high is None:
            return 0.0
        problem = self
        for iteration in range(1, _MAX_EVALUATIONS):
            if len(problem.size) > max(5000, 8 * len(problem.starts)):
                problem, smallest, largest = problem.restricted(high.rows, low.rows)
                low, high = replace(low, rows=largest), replace(high, rows=smallest)
            intersection = (high.tangent_at_zero(self.limit) - low.tangent_at_zero(self.limit)) / (
                high.used - low.used
            )
            bisect = iteration % 4 == 0
            price = 0.5 * (low.price + high.price) if bisect else intersection
            if not low.price < price < high.price:
                break
            middle = problem.evaluate(price)
            predicted = low.bound + (self.limit - low.used) * (price - low.price)
            if not bisect and middle.bound <= predicted + 1e-14 * abs(predicted):
                return price
            if middle.used > self.limit:
                low = middle
            else:
                high = middle
        return high.price

    def _bracket(self, guess: float) -> tuple[_Evaluation, _Evaluation | None]:
        """Return (a price at which jobs choose more than the limit, a price at which they do not).
        The second is None if there is no such pair.
        """
        price = guess if guess > 0 else 0.0
        point = self.evaluate(price)
        step = 1.03
        if point.used <= self.limit:
            high = point
            while price > 0:
                price = price / step if step < 1e6 else 0.0
                step **= 4
                point = self.evaluate(price)
                if point.used > self.limit:
                    return point, high
                high = point
            return point, None
        if price == 0:
            price, step = float(np.ptp(self.value)) / max(1.0, self.limit) or 1.0, 4.0
        else:
            price *= step
        for _ in range(_MAX_EVALUATIONS):
            low, point = point, self.evaluate(price)
            if point.used <= self.limit:
                return low, point
            price *= step
            step = min(step**4, 1e3)
        # A sample of must-run jobs can exceed its share of the limit at any price.
        return point, None


@dataclass(frozen=True)
class _Evaluation:
    """The dual function at one price."""

    price: float
    """Value of one unit."""
    bound: float
    """The function's value, without the constant of the other resources."""
    used: float
    """Units that the chosen rows use."""
    rows: Ints
    """The chosen row of each group."""

    def tangent_at_zero(self, limit: float) -> float:
        """Return the value at price 0 of the tangent at this price."""
        return self.bound - (limit - self.used) * self.price


def _single_resource(table: BidTable, prices: Floats, c: int) -> SingleResource:
    """Return the rows of resource ``c``, and for each group one row of size 0 with the best net
    value of its other rows.
    """
    net_value = table.value - table.node_cost(prices)
    uses_resource = table.resource == c
    other = np.maximum.reduceat(np.where(uses_resource, -np.inf, net_value), table.starts)
    has_other = np.flatnonzero(other > -np.inf)
    rows = np.flatnonzero(uses_resource)
    group = np.concatenate([has_other, table.group[rows]])
    order = np.argsort(group, kind="stable")
    group = group[order]
    size = np.concatenate([np.zeros(len(has_other)), table.nodes[rows]])[order]
    value = np.concatenate([other[has_other], table.value[rows]])[order]
    starts = np.searchsorted(group, np.arange(len(table.starts)))
    return SingleResource(size, value, group, starts, table.count, float(table.capacity[c]))
