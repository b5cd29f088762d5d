"""Weighs the bids of a sweep's trials, which together count as one job. Pure.

Many trials on one node each process more than one job on as many nodes, so beside another job they
would get nearly every node. Decides the factor that corrects this: together the trials' bids are
worth what one job with their curve would bid for the nodes that they have together. The order among
the trials does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from malletrain.core.planning import Candidate

_ROUNDED = 4
"""Decimals of a factor."""


def as_one(
    candidates: Sequence[Candidate], sweeps: Mapping[str, str], nodes: int, exponent: float
) -> list[Candidate]:
    """The candidates, those of each sweep with a weight that makes one job of them.

    Args:
        candidates: of one plan.
        sweeps: job → its sweep; jobs of none are left as they are.
        nodes: how many nodes the plan has: more trials than can run at all count no further.
        exponent: a job whose scaling is not known speeds up as nodes**exponent.
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
    """What is left of each trial's weight: the mean of what a node brings each of them as one of so
    many of one job, against a node of its smallest size.
    """
    bids = []
    for c in trials:
        least = c.smallest or c.min_nodes
        count = max(1, min(len(trials), nodes // least))
        bids.append(_per_node(c, count * least, exponent) / _per_node(c, least, exponent))
    return round(min(1.0, sum(bids) / len(bids)), _ROUNDED)


def _per_node(c: Candidate, nodes: int, exponent: float) -> float:
    """Throughput a node, in any unit; beyond its largest size it goes on as an unknown curve."""
    if c.curve is None:
        return float(nodes ** (exponent - 1.0))
    most = max(c.max_nodes, 1)
    usable = min(nodes, most)
    rate = max(c.curve.at(usable), 1e-300) / usable
    return float(rate * (nodes / usable) ** (exponent - 1.0))
