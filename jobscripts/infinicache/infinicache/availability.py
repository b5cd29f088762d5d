"""The probability that an object is lost. Pure.

If r of N nodes are lost at once, and an object has its n chunks on n random distinct nodes, the
number of lost chunks is hypergeometric. The object is lost if that number exceeds p (the model of
InfiniCache, Wang et al., FAST 2020, here for any code). :func:`monte_carlo` follows single objects
over a trace, in which losses follow each other and repair takes time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, expm1, log1p


def loss_probability(nodes: int, chunks: int, spare: int, lost_nodes: int) -> float:
    """Return the probability that more than ``spare`` of an object's chunks are on lost nodes.

    Args:
        nodes: number of nodes in the pool.
        chunks: number of chunks of the object, each on a node of its own.
        spare: number of chunks that the object can lose.
        lost_nodes: number of nodes that are lost at once.

    Raises:
        ValueError: there are more chunks than nodes.
    """
    if not 0 <= chunks <= nodes or not 0 <= lost_nodes <= nodes:
        raise ValueError(
            f"{chunks} chunks on distinct nodes, or {lost_nodes} lost nodes, "
            f"do not fit {nodes} nodes."
        )
    ways = sum(
        comb(chunks, k) * comb(nodes - chunks, lost_nodes - k)
        for k in range(spare + 1, min(chunks, lost_nodes) + 1)
    )
    return ways / comb(nodes, lost_nodes)


def loss_with_copies(nodes: int, chunks: int, spare: int, lost_nodes: int, copied: float) -> float:
    """As :func:`loss_probability`, but each chunk has a copy at another random node with
    probability ``copied``. A chunk is lost if its node is lost, and its copy too or there is no
    copy. The nodes of the copies are assumed to be independent of each other.

    Args:
        nodes, chunks, spare, lost_nodes: see :func:`loss_probability`.
        copied: probability that a chunk has a copy.
    """
    ways, lost = comb(nodes, lost_nodes), 0.0
    if not lost_nodes:
        return 0.0
    stays = copied * (1.0 - (lost_nodes - 1) / (nodes - 1)) if nodes > 1 else 0.0
    for k in range(spare + 1, min(chunks, lost_nodes) + 1):
        hit = comb(chunks, k) * comb(nodes - chunks, lost_nodes - k) / ways
        lost += hit * sum(
            comb(k, j) * (1.0 - stays) ** j * stays ** (k - j) for j in range(spare + 1, k + 1)
        )
    return lost


def lost_within(
    losses: Iterable[tuple[int, int]], share: float, chunks: int, spare: int, copied: float = 0.0
) -> float:
    """Return the probability that an object is lost within a part of the time in which losses were
    observed. A pool with fewer nodes than chunks counts as a pool with as many nodes as chunks.

    Args:
        losses: (nodes in the pool, nodes lost at once) of each observed loss.
        share: the object's lifetime divided by the observed time. The object is complete again
            before each loss.
        chunks, spare: see :func:`loss_probability`.
        copied: probability that a chunk has a copy when its node is lost.
    """
    safe = 0.0
    for nodes, lost_nodes in losses:
        size = max(nodes, chunks)
        safe += log1p(-min(1.0 - 1e-12, loss_with_copies(size, chunks, spare, lost_nodes, copied)))
    return -expm1(share * safe)


@dataclass(frozen=True)
class PoolChange:
    """A change of the pool at ``time``, seconds: nodes that join, and nodes that are lost without
    notice.
    """

    time: float
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def monte_carlo(
    changes: Sequence[PoolChange],
    chunks: int,
    spare: int,
    *,
    life_s: float,
    repair_s: float,
    trials: int,
    rng: random.Random,
) -> tuple[float, float]:
    """Return the share of objects that are lost within ``life_s`` after a put at a random time, and
    the standard error of that share. Times at which the pool has too few nodes are not drawn.

    Args:
        changes: changes of the pool, in order of time.
        chunks, spare: see :func:`loss_probability`.
        life_s: lifetime of an object, seconds.
        repair_s: time after which a lost chunk is rebuilt on a random other node, seconds.
        trials: number of objects to follow.
        rng: source of the random draws.
    """
    pools: list[frozenset[str]] = []
    pool: frozenset[str] = frozenset()
    for change in changes:
        pool = (pool | set(change.joined)) - set(change.lost)
        pools.append(pool)
    usable = [i for i, members in enumerate(pools[:-1]) if len(members) >= chunks]
    if not usable:
        return float("nan"), float("nan")
    spans = [changes[i + 1].time - changes[i].time for i in usable]
    lost = 0
    for start in rng.choices(usable, weights=spans if sum(spans) > 0 else None, k=trials):
        lost += _is_lost(changes, pools, start, chunks, spare, life_s, repair_s, rng)
    share = lost / trials
    return share, (share * (1 - share) / trials) ** 0.5


def _is_lost(
    changes: Sequence[PoolChange],
    pools: Sequence[frozenset[str]],
    start: int,
    chunks: int,
    spare: int,
    life_s: float,
    repair_s: float,
    rng: random.Random,
) -> bool:
    born = rng.uniform(changes[start].time, changes[start + 1].time)
    at = set(rng.sample(sorted(pools[start]), chunks))
    repairs: list[float] = []
    for i in range(start + 1, len(changes)):
        change = changes[i]
        if change.time > born + life_s:
            return False
        while repairs and repairs[0] <= change.time:
            room = sorted(pools[i - 1] - at)
            if not room:
                break
            repairs.pop(0)
            at.add(rng.choice(room))
        lost_nodes = at.intersection(change.lost)
        at -= lost_nodes
        repairs += [change.time + repair_s] * len(lost_nodes)
        if len(at) < chunks - spare:
            return True
    return False


def expected_losses(objects: Iterable[tuple[int, int]], nodes: int, lost_nodes: int) -> float:
    """Return the expected number of lost objects.

    Args:
        objects: (number of chunks, number of chunks that it can lose) of each object.
        nodes: number of nodes in the pool.
        lost_nodes: number of nodes that are lost at once.
    """
    probabilities: dict[tuple[int, int], float] = {}
    total = 0.0
    for chunks, spare in objects:
        if (chunks, spare) not in probabilities:
            probabilities[chunks, spare] = loss_probability(nodes, chunks, spare, lost_nodes)
        total += probabilities[chunks, spare]
    return total
