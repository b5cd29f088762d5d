"""Decides which clients train in a round, and on which node each does. Pure: the same generator
gives the same clients.

The ratio rule (:mod:`fedcase.ratio`) chooses the share of experienced clients. They are drawn by
score, without replacement; every one has a positive probability, so that none is excluded for good.
Novices are drawn at random, those whose data a node has in memory first.

A client trains on a node that has its data in memory, as long as that node does not get much more
than an equal part of the round; otherwise on the node with the least work (:func:`place`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random

from fedcase.clients import ClientRecord, scores

SCORE_FLOOR = 0.1
"""Added to each score, so that the client with the lowest score is also drawn sometimes."""
CACHED_BONUS = 0.3
"""Added to the score of a client whose data a present node has in memory: it need not read them."""


def experienced_count(
    round_size: int, share: float, filled: float, available: int, novices: int
) -> int:
    """Return how many clients of a round are experienced ones.

    Their share is at most ``filled``, whatever the rule chose: while the caches of the nodes are
    not full, the other clients are novices, whose samples fill them. If there are too few clients
    of one kind, the round gets more of the other kind.

    Args:
        round_size: number of clients of the round.
        share: share of experienced clients that the ratio rule has chosen, 0 to 1.
        filled: how full the caches of the nodes are, 0 to 1.
        available: number of experienced clients.
        novices: number of novices.
    """
    round_size = min(round_size, available + novices)
    count = round(round_size * min(max(0.0, share), max(0.0, filled), 1.0))
    return min(available, max(count, round_size - novices))


def select(
    clients: Sequence[ClientRecord],
    round_size: int,
    share: float,
    filled: float,
    cached: Collection[int],
    random: Random,
) -> list[int]:
    """Return the clients of a round, at most ``round_size``, experienced ones first.

    Args:
        clients: all clients that may be chosen.
        round_size: number of clients of the round.
        share: share of experienced clients, 0 to 1.
        filled: how full the caches of the nodes are, 0 to 1.
        cached: clients whose data a present node has in memory.
        random: generator of the draw.
    """
    experienced = [client for client in clients if client.experienced]
    novices = [client for client in clients if not client.experienced]
    count = experienced_count(round_size, share, filled, len(experienced), len(novices))
    weights = [
        SCORE_FLOOR + score + (CACHED_BONUS if client.client in cached else 0.0)
        for client, score in zip(experienced, scores(experienced), strict=True)
    ]
    chosen = _draw([client.client for client in experienced], weights, count, random)
    random.shuffle(novices)
    novices.sort(key=lambda client: client.client not in cached)
    rest = max(0, min(round_size, len(clients)) - len(chosen))
    return chosen + [client.client for client in novices[:rest]]


def _draw(items: list[int], weights: list[float], count: int, random: Random) -> list[int]:
    """Draw without replacement: the ``count`` greatest of u^(1/w) (Efraimidis and Spirakis, 2006,
    "Weighted random sampling with a reservoir", Information Processing Letters 97(5)).
    """
    keys = [random.random() ** (1.0 / weight) for weight in weights]
    order = sorted(range(len(items)), key=keys.__getitem__, reverse=True)
    return [items[position] for position in order[:count]]


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
