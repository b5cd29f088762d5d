"""What nodes are worth to a service: its values by number of nodes, and changes of them. Pure.

The values of a service are its scaling curve in plans. Decides how a value of the next nodes
becomes a curve.
"""

from __future__ import annotations

from collections.abc import Mapping

from allocator import ScalingCurve


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
