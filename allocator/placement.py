"""Which nodes each job gets, once the sizes are decided.

Decides identities only: a shrinking job keeps a subset of its nodes, a growing one keeps all and adds free ones; nobody migrates within a
class. Where there is a choice, nodes with similar horizons and of one topology group end up in the same job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeInfo:
    """What placement knows of a node: its class, how long its gap is expected to last still (seconds, None: unknown), and its topology
    group (None: unknown)."""

    node_class: str = "default"
    horizon_s: float | None = None
    group: str | None = None


class PlacementError(ValueError):
    """Sizes that the nodes present cannot give."""


def place(
    sizes: Mapping[str, tuple[str, int]],
    current: Mapping[str, Sequence[str]],
    nodes: Mapping[str, NodeInfo],
) -> dict[str, tuple[str, ...]]:
    """Nodes by job, for the jobs of ``sizes`` with a size above 0.

    Args:
        sizes: job -> (node class, size).
        current: job -> its nodes now, in rank order. Nodes that are gone or of another class than the job's new one are not kept.
        nodes: every node that can be used now.

    Kept nodes come first and keep their order, so that ranks stay stable.

    Raises:
        PlacementError: when a class has fewer nodes than its jobs are given, or two jobs hold one node.
    """
    kept: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for job, (node_class, size) in sizes.items():
        mine = [n for n in current.get(job, ()) if n in nodes and nodes[n].node_class == node_class][:size]
        for n in mine:
            if n in taken:
                raise PlacementError(f"Node {n} belongs to both {taken[n]} and {job}; a node runs one job.")
            taken[n] = job
        kept[job] = mine
    free: dict[str, list[str]] = {}
    for name in sorted(nodes):
        if name not in taken:
            free.setdefault(nodes[name].node_class, []).append(name)
    plan: dict[str, tuple[str, ...]] = {}
    for job, (node_class, size) in sizes.items():
        if size == 0:
            continue
        more = size - len(kept[job])
        pool = free.get(node_class, [])
        if more > len(pool):
            raise PlacementError(
                f"Job {job} is given {size} nodes of class {node_class} but only {len(pool)} are free beside the {len(kept[job])} it keeps."
            )
        plan[job] = (*kept[job], *pool[:more])
        del pool[:more]
    return plan
