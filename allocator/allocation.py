"""The result of every solver: a size for each job, its value, and how close to optimal it is.

Decides how a plan is valued and checked against the bids. It does not choose sizes. All solvers
(:mod:`allocator.milp`, :mod:`allocator.baselines`, the oracles of the tests) return the same type,
so that their plans can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allocator.bids import UNASSIGNED, Assignment, Bid


@dataclass(frozen=True)
class Allocation:
    """Node class and number of nodes of each job."""

    sizes: Mapping[str, Assignment]
    """Job -> (node class, size). A job without nodes is absent."""
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
        return self.sizes.get(job, UNASSIGNED)[1]


def plan_value(
    sizes: Mapping[str, Assignment], bids: Sequence[Bid]
) -> tuple[float, tuple[str, ...]]:
    """Value a plan.

    The sum is exactly rounded (:func:`math.fsum`): two solvers that agree on the sizes agree on the
    last bit.

    Args:
        sizes: job -> (node class, size); a job without nodes is absent.
        bids: the bids of all jobs.

    Returns:
        (the objective of ``sizes``, the must-run jobs that it drops).

    Raises:
        ValueError: if a bid does not offer its size.
    """
    values: list[float] = []
    dropped: list[str] = []
    for bid in bids:
        node_class, size = sizes.get(bid.job, UNASSIGNED)
        value = bid.value(node_class, size)
        if value is None:
            raise ValueError(
                f"The plan gives job {bid.job} {size} nodes of class {node_class}, which its bid "
                "does not offer."
            )
        if value == -math.inf:
            dropped.append(bid.job)
        else:
            values.append(value)
    return math.fsum(values), tuple(dropped)


def relative_gap(objective: float, bound: float) -> float:
    """Return ``(bound - objective) / max(1, |objective|)``, never negative."""
    return max(0.0, bound - objective) / max(1.0, abs(objective))


def nodes_in_use(sizes: Mapping[str, Assignment]) -> dict[str, int]:
    """Return node class -> nodes that ``sizes`` uses."""
    total: dict[str, int] = {}
    for node_class, size in sizes.values():
        total[node_class] = total.get(node_class, 0) + size
    return total
