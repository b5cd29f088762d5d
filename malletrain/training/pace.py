"""How often to save a job that may lose a node at any moment. Pure, standard library only.

Decides the time between two snapshots from what one costs and how soon a loss is expected: Young's
interval, √(2 · cost · time to the loss), at which as much is lost to saving as to work done again
(Young, *Communications of the ACM* 17, 1974).
"""

from __future__ import annotations

import math

LEAST_S = 1.0
"""Saving more often than this is of no use: a loss costs a restart anyway."""


def snapshot_every(cost_s: float, loss_in_s: float, most_s: float) -> float:
    """Seconds from one snapshot to the next.

    Args:
        cost_s: time for which training stands still while one is taken.
        loss_in_s: mean time until a node of the job is lost; infinite: none is expected.
        most_s: what the script says: it is never longer than that.
    """
    if not loss_in_s < math.inf:
        return most_s
    return min(most_s, max(LEAST_S, math.sqrt(2.0 * max(cost_s, 0.0) * max(loss_in_s, 0.0))))
