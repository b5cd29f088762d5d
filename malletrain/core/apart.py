"""One plan for each trainer. Pure.

Decides which nodes each plan is made of. A node that one trainer's jobs may use is in that
trainer's plan. Those that several may use are divided first, pool by pool: in the proportion of
their parts, none gets more than the jobs that are at home there could use
(:mod:`malletrain.core.homes`), and what one leaves the others have. A job that may not be moved
keeps its nodes, and a minimum that is guaranteed has room. Then each plan is made by itself, and
nodes that it leaves are offered to the others. What the plans achieve is in different units and is
never added up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import chain

from allocator import NodeInfo
from malletrain.core.homes import homes
from malletrain.core.parts import Wish, shares_of, wish_of
from malletrain.core.planning import Candidate, Plan, Planner
from malletrain.core.settings import PlanningSettings


class ApartPlanner:
    """Makes each trainer's plan with ``planner``, and one plan of them all."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __call__(
        self,
        candidates: Sequence[Candidate],
        nodes: Mapping[str, NodeInfo],
        settings: PlanningSettings,
        favoured: Collection[str] = (),
        /,
    ) -> Plan:
        """As :func:`malletrain.core.planning.make_plan`; the objective of several plans is no
        number.
        """
        groups: dict[str, list[Candidate]] = {}
        for c in candidates:
            groups.setdefault(c.trainer.name if c.trainer else "", []).append(c)
        if len(groups) < 2:
            return self._planner(candidates, nodes, settings, favoured)
        parts = divided(groups, nodes)
        plans = {
            name: self._planner(group, parts[name], settings, favoured)
            for name, group in groups.items()
        }
        spent = sum(plan.solve_s for plan in plans.values())
        left = nodes.keys() - {n for plan in plans.values() for n in _taken(plan)}
        for name, group in groups.items():
            wanted = _wanted(group, plans[name], left, nodes)
            if wanted <= parts[name].keys():
                continue
            own = wanted.union(_taken(plans[name]))
            plan = self._planner(
                group, {n: info for n, info in nodes.items() if n in own}, settings, favoured
            )
            spent += plan.solve_s
            left = left.union(_taken(plans[name])).difference(_taken(plan))
            plans[name] = plan
        chosen = {job: taken for plan in plans.values() for job, taken in plan.nodes.items()}
        return Plan(
            {c.job: chosen[c.job] for c in candidates},
            math.nan,
            max(plan.gap for plan in plans.values()),
            spent,
        )


def _taken(plan: Plan) -> Iterator[str]:
    return chain.from_iterable(plan.nodes.values())


def _wanted(
    group: Sequence[Candidate], plan: Plan, left: Set[str], nodes: Mapping[str, NodeInfo]
) -> set[str]:
    """Those of the nodes that are left that one trainer's jobs could use beside what they have."""
    found: set[str] = set()
    if not left:
        return found
    for c in group:
        if not c.fixed and len(plan.nodes[c.job]) < c.max_nodes:
            found |= {n for n in left - found if c.may_use(nodes[n].node_class)}
    return found


def divided(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, dict[str, NodeInfo]]:
    """Trainer → the nodes its plan is made of. ``groups``: trainer → its candidates."""
    pools: dict[str, list[str]] = {}
    for node, info in nodes.items():
        pools.setdefault(info.node_class, []).append(node)
    found: dict[str, dict[str, NodeInfo]] = {name: {} for name in groups}
    home = homes(groups, nodes)
    for pool, mine in pools.items():
        wishes = {
            name: wish_of([c for c in group if home.get(c.job) == pool], pool, nodes)
            for name, group in groups.items()
        }
        wishes = {name: wish for name, wish in wishes.items() if wish.most}
        for name, taken in _dealt(wishes, mine).items():
            found[name].update((node, nodes[node]) for node in taken)
    return found


def _dealt(wishes: Mapping[str, Wish], nodes: Sequence[str]) -> dict[str, list[str]]:
    if len(wishes) < 2:
        return {name: list(nodes) for name in wishes}
    counts = shares_of(wishes, len(nodes))
    taken = {name: wish.held[: counts[name]] for name, wish in wishes.items()}
    kept = {node for mine in taken.values() for node in mine}
    free = iter(sorted(node for node in nodes if node not in kept))
    for name, mine in taken.items():
        for node in free:
            if len(mine) >= counts[name]:
                free = iter([node, *free])
                break
            mine.append(node)
    return taken
