"""Weighs the bids of a sweep's trials, which together count as one job. Pure.

Many trials on one node each process more samples than one job on as many nodes, so they would
outbid another job for nearly every node. Decides the factor that corrects this: the trials' bids
together equal the bid of one job with their curve for all their nodes. The order among the trials
does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from malletrain.core.planning import Candidate

_FACTOR_DECIMALS = 4
"""Number of decimals of a factor."""


def as_one(
    candidates: Sequence[Candidate], sweeps: Mapping[str, str], nodes: int, exponent: float
) -> list[Candidate]:
    """Return the candidates, with the trials of each sweep weighted so that together they bid like
    one job.

    Args:
        candidates: candidates of one plan.
        sweeps: job → its sweep. Other jobs stay unchanged.
        nodes: number of nodes of the plan. Trials beyond those that can run do not lower the
            factor.
        exponent: assumed scaling of unmeasured jobs, nodes**exponent.
    """
    groups: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.job in sweeps:
            groups.setdefault(sweeps[c.job], []).append(c)
    factors = {
        sweep: factor(group, nodes, exponent) for sweep, group in groups.items() if len(group) > 1
    }
    if not factors:
        return list(candidates)
    return [
        c.but(weight=c.weight * factors[sweeps[c.job]]) if sweeps.get(c.job) in factors else c
        for c in candidates
    ]


def factor(trials: Sequence[Candidate], nodes: int, exponent: float) -> float:
    """Return the factor on each trial's weight: the mean, over the trials, of the ratio of the
    throughput per node on all their nodes together to that at their smallest size.
    """
    bids = []
    for c in trials:
        smallest = c.smallest or c.min_nodes
        count = max(1, min(len(trials), nodes // smallest))
        bids.append(_per_node(c, count * smallest, exponent) / _per_node(c, smallest, exponent))
    return round(min(1.0, sum(bids) / len(bids)), _FACTOR_DECIMALS)


def _per_node(c: Candidate, nodes: int, exponent: float) -> float:
    """Return the throughput per node, in any unit. Beyond the largest size it is extrapolated as
    nodes**exponent.
    """
    if c.curve is None:
        return float(nodes ** (exponent - 1.0))
    max_nodes = max(c.max_nodes, 1)
    usable = min(nodes, max_nodes)
    rate = max(c.curve.at(usable), 1e-300) / usable
    return float(rate * (nodes / usable) ** (exponent - 1.0))
