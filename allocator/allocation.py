"""The answer of every solver: a size for each job, and what is known about how good that is.

Decides how a plan is valued and checked against the bids. All of the solvers
(:mod:`allocator.milp`, :mod:`allocator.dp`, :mod:`allocator.nodewise`, :mod:`allocator.baselines`)
answer with the same type, so that they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allocator.bids import Bid


@dataclass(frozen=True)
class Allocation:
    """How many nodes of which class each job gets.

    Args:
        sizes: job -> (node class, size). A job that gets nothing is absent.
        objective: sum of the values of all bids at these sizes, idle values included (that of a
            dropped job counts as 0).
        bound: no plan that drops as few must-run jobs is worth more than this, as far as was
            proven.
        gap: ``(bound - objective) / max(1, |objective|)``, 0 when proven optimal.
        status: ``optimal`` (proven within the gap asked for), ``time_limit`` (the best plan found
            when time was up, or when too little was left for what remained), or ``heuristic`` (of a
            policy that proves nothing).
        solve_s: wall time, seconds.
        dropped: must-run jobs for which there was no room.
        prices: node class -> Lagrange price of one node, in values per node; a start for the next
            solve.
        proof: what closed the gap: ``bound``, ``dp`` or ``highs`` (empty for other solvers).
        core: ``(jobs, options)`` left undecided after reduction.
    """

    sizes: Mapping[str, tuple[str, int]]
    objective: float
    bound: float
    gap: float
    status: str
    solve_s: float
    dropped: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    proof: str = ""
    core: tuple[int, int] = (0, 0)

    def size(self, job: str) -> int:
        """Nodes of ``job``, 0 when it gets none."""
        return self.sizes.get(job, ("", 0))[1]


def worth(
    sizes: Mapping[str, tuple[str, int]], bids: Sequence[Bid]
) -> tuple[float, tuple[str, ...]]:
    """The objective of ``sizes`` and the must-run jobs it drops.

    The sum is exactly rounded (:func:`math.fsum`), so that two solvers that agree on the sizes
    agree on the last bit.

    Raises:
        ValueError: when a size is given that its bid does not offer.
    """
    values: list[float] = []
    dropped: list[str] = []
    for bid in bids:
        node_class, size = sizes.get(bid.job, ("", 0))
        value = bid.value(node_class, size)
        if value is None:
            raise ValueError(
                f"Job {bid.job} was given {size} nodes of class {node_class}, which its bid "
                "does not offer."
            )
        if value == -math.inf:
            dropped.append(bid.job)
        else:
            values.append(value)
    return math.fsum(values), tuple(dropped)


def relative_gap(objective: float, bound: float) -> float:
    """``(bound - objective) / max(1, |objective|)``, never negative."""
    return max(0.0, bound - objective) / max(1.0, abs(objective))


def used(sizes: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Nodes in use by class."""
    total: dict[str, int] = {}
    for node_class, size in sizes.values():
        total[node_class] = total.get(node_class, 0) + size
    return total
