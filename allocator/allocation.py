"""The answer of every solver: a size for each job, and what is known about how good that is.

Decides how a plan is valued and checked against the bids. All solvers (:mod:`allocator.milp`,
:mod:`allocator.baselines`, the oracles of the tests) answer with the same type, so that they can be
compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allocator.bids import NO_SEAT, Bid, Seat


@dataclass(frozen=True)
class Allocation:
    """How many nodes of which class each job gets."""

    sizes: Mapping[str, Seat]
    """Job -> (node class, size). A job that gets nothing is absent."""
    objective: float
    """Sum of the values of all bids at these sizes, idle values included (that of a dropped job
    counts as 0).
    """
    bound: float
    """No plan that drops as few must-run jobs is worth more than this, as far as was proven."""
    gap: float
    """``(bound - objective) / max(1, |objective|)``, 0 when proven optimal."""
    status: str
    """``optimal`` (proven within the gap asked for), ``time_limit`` (the best plan found when time
    was up, or when too little was left for what remained), or ``heuristic`` (of a policy that
    proves nothing).
    """
    solve_s: float = 0.0
    """Time it took on the caller's clock, seconds."""
    dropped: tuple[str, ...] = ()
    """Must-run jobs for which there was no room."""
    proof: str = ""
    """What closed the gap: ``bound``, ``dp`` or ``highs`` (empty for other solvers)."""
    core: tuple[int, int] = (0, 0)
    """(jobs, options) left undecided after reduction."""

    def size(self, job: str) -> int:
        """Nodes of ``job``, 0 when it gets none."""
        return self.sizes.get(job, NO_SEAT)[1]


def worth(sizes: Mapping[str, Seat], bids: Sequence[Bid]) -> tuple[float, tuple[str, ...]]:
    """The objective of ``sizes`` and the must-run jobs it drops.

    The sum is exactly rounded (:func:`math.fsum`), so that two solvers that agree on the sizes
    agree on the last bit.

    Raises:
        ValueError: when a size is given that its bid does not offer.
    """
    values: list[float] = []
    dropped: list[str] = []
    for bid in bids:
        node_class, size = sizes.get(bid.job, NO_SEAT)
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


def used(sizes: Mapping[str, Seat]) -> dict[str, int]:
    """Nodes in use by class."""
    total: dict[str, int] = {}
    for node_class, size in sizes.values():
        total[node_class] = total.get(node_class, 0) + size
    return total
