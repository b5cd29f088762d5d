"""What nodes are worth to farms and to services, whose scaling curves are not measured. Pure.

To a farm: tasks per second, from the state of its queue. The rate is linear until the tasks run
out, and flat beyond. At the end nodes without a task are worth nothing, so plans take them one by
one; nodes that have a task are worth as much as before.

To a service: what it states, by number of nodes. Decides how a value of the next nodes becomes a
curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from allocator import ScalingCurve

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


def with_next_nodes(
    values: Mapping[str, float] | None, present: int, each: float, count: int
) -> dict[int, float]:
    """Return the values of a service to which the next nodes have a certain value. Those that it
    has keep theirs, and nodes beyond the next ones are worth nothing more.

    Args:
        values: number of nodes, as text → value, as before; None for none.
        present: number of nodes that the service has.
        each: value that each of the next nodes adds.
        count: number of the next nodes, 1 at least.

    Returns:
        Number of nodes → value.
    """
    changed: dict[int, float] = {}
    base = 0.0
    if values and present:
        curve = ScalingCurve.of((int(nodes), value) for nodes, value in values.items())
        changed = {nodes: value for nodes, value in curve.points if nodes < present}
        base = changed[present] = curve.at(present)
    changed[present + count] = base + each * count
    return changed
