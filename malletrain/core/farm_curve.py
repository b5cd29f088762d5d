"""What nodes are worth to a farm: its scaling curve, from the state of its queue. Pure.

The rate is linear until the tasks run out, and flat beyond. At the end nodes without a task are
worth nothing, so plans take them one by one; nodes that have a task are worth as much as before.
"""

from __future__ import annotations

import math

FILL_S = 10.0
"""Waiting work that is worth another node, seconds: a node that starts later has nothing to do."""
STEPS_PER_DOUBLING = 2
"""Resolution of the rate, so that not every result changes the bids."""


def nodes_filled(
    busy: int, waiting: int, slots: int, task_s: float | None, max_running: int = 0
) -> int:
    """Return how many nodes the remaining tasks fill, 1 at least.

    Args:
        busy: number of nodes that have a task.
        waiting: number of tasks on no node.
        slots: number of tasks that a node runs at a time; 0 if unknown.
        task_s: mean duration of a task, seconds; None if unknown.
        max_running: maximum number of tasks that run at a time on all nodes; 0 for no limit.
    """
    slots = max(1, slots)
    more = math.ceil(waiting / slots)
    if task_s is not None:
        more = min(more, math.ceil(waiting * task_s / (slots * FILL_S)))
    if max_running:
        more = min(more, max(0, math.ceil(max_running / slots) - busy))
    return max(1, busy + more)


def rate_of_node(slots: int, task_s: float | None) -> float:
    """Return the tasks/s of a node, rounded to a power of the resolution; 1 if unknown.

    Args:
        slots: number of tasks that a node runs at a time.
        task_s: mean duration of a task, seconds; None if unknown.
    """
    if task_s is None or slots < 1:
        return 1.0
    rate = slots / max(task_s, 1e-3)
    return float(2.0 ** (round(STEPS_PER_DOUBLING * math.log2(rate)) / STEPS_PER_DOUBLING))


def farm_curve(rate: float, filled: int, max_nodes: int) -> dict[str, float]:
    """Return the curve: number of nodes, as text, to tasks/s.

    Args:
        rate: tasks/s of a node.
        filled: number of nodes that the remaining tasks fill.
        max_nodes: maximum number of nodes of the job.
    """
    filled = min(filled, max_nodes)
    return {str(nodes): rate * min(nodes, filled) for nodes in sorted({1, filled, max_nodes})}
