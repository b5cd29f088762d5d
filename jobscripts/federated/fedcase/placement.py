"""Decides on which node each client of a round trains. Pure.

A client trains on a node that has its data in memory, as long as that node does not get much more
than an equal part of the round; otherwise on the node with the least work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

SLACK = 1.25
"""Maximum work of a node that gets clients because it has their data, relative to an equal part of
the samples.
"""


def place(
    samples: Mapping[int, int],
    nodes: Sequence[int],
    cached: Mapping[int, Collection[int]],
    load: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Return the node of each client.

    Args:
        samples: client → number of its samples.
        nodes: the present nodes.
        cached: node → clients whose data it has in memory.
        load: node → number of samples that it is already training on in this round.

    Raises:
        ValueError: there are clients and no nodes.
    """
    if samples and not nodes:
        raise ValueError("Clients cannot be placed: there is no node.")
    if not samples:
        return {}
    work = {node: (load or {}).get(node, 0) for node in nodes}
    equal = (sum(samples.values()) + sum(work.values())) / len(work)
    most = max(equal * SLACK, max(samples.values()))
    node_of: dict[int, int] = {}
    # The largest clients first: the small ones then even out the work.
    for client in sorted(samples, key=lambda client: (-samples[client], client)):
        holders = [
            node
            for node in work
            if client in cached.get(node, ()) and work[node] + samples[client] <= most
        ]
        node = min(holders or work, key=lambda node: (work[node], node))
        node_of[client] = node
        work[node] += samples[client]
    return node_of
