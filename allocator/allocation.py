"""The result of every solver: a size for each job, its value, and how close to optimal it is.

Decides how a plan is valued and checked against the bids. It does not choose sizes. All solvers
(:mod:`allocator.milp`, :mod:`allocator.baselines`, the oracles of the tests) return the same type,
so that their plans can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from allocator.bids import Assignment, Bid, PoolT


@dataclass(frozen=True)
class Allocation(Generic[PoolT]):
    """Pool and number of nodes of each job."""

    sizes: Mapping[str, Assignment[PoolT]]
    """Job -> (pool, size). A job without nodes is absent."""
    objective: float
    """The sum of all bids' values at these sizes. A job without nodes counts with its idle value, a
    dropped job with 0.
    """
    bound: float
    """A proven upper bound on the objective of every plan that drops as few must-run jobs."""
    gap: float
    """``(bound - objective) / max(1, |objective|)``, 0 if the plan is proven optimal."""
    status: str
    """``optimal`` (proven within the requested gap), ``time_limit`` (the best plan when the time
    was up, or when too little time was left for the open part), or ``heuristic`` (from a policy
    that proves nothing).
    """
    solve_s: float = 0.0
    """Time taken on the caller's clock, seconds."""
    dropped: tuple[str, ...] = ()
    """Must-run jobs that do not fit."""
    proof: str = ""
    """The step that closed the gap: ``bound``, ``dp`` or ``highs`` (empty for other solvers)."""
    reduced_size: tuple[int, int] = (0, 0)
    """(groups of jobs, options) of the last reduced problem."""

    def size(self, job: str) -> int:
        """Return the number of nodes of ``job``, 0 if it has none."""
        return self.sizes[job][1] if job in self.sizes else 0


def plan_value(
    sizes: Mapping[str, Assignment[PoolT]], bids: Sequence[Bid[PoolT]]
) -> tuple[float, tuple[str, ...]]:
    """Value a plan.

    The sum is exactly rounded (:func:`math.fsum`): two solvers that agree on the sizes agree on the
    last bit.

    Args:
        sizes: job -> (pool, size); a job without nodes is absent.
        bids: the bids of all jobs.

    Returns:
        (the objective of ``sizes``, the must-run jobs that it drops).

    Raises:
        ValueError: if a bid does not offer its size.
    """
    values: list[float] = []
    dropped: list[str] = []
    for bid in bids:
        value = bid.value(sizes.get(bid.job))
        if value is None:
            pool, size = sizes[bid.job]
            raise ValueError(
                f"The plan gives job {bid.job} {size} nodes of pool {pool}, which its bid does "
                "not offer."
            )
        if value == -math.inf:
            dropped.append(bid.job)
        else:
            values.append(value)
    return math.fsum(values), tuple(dropped)


def relative_gap(objective: float, bound: float) -> float:
    """Return ``(bound - objective) / max(1, |objective|)``, never negative."""
    return max(0.0, bound - objective) / max(1.0, abs(objective))


def nodes_in_use(sizes: Mapping[str, Assignment[PoolT]]) -> dict[PoolT, int]:
    """Return pool -> nodes that ``sizes`` uses."""
    total: dict[PoolT, int] = {}
    for pool, size in sizes.values():
        total[pool] = total.get(pool, 0) + size
    return total
