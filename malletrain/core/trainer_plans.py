"""Makes one plan for each trainer. Pure.

Decides which nodes each trainer's plan may use:

* A node that only one trainer's jobs may use belongs to that trainer's plan.
* Nodes that several trainers may use are divided pool by pool, in the proportion of the trainers'
  parts. No trainer gets more than its jobs in that pool could use
  (:mod:`malletrain.core.trainer_pools`); the others get the rest.
* A job that must not be moved keeps its nodes, and a guaranteed minimum has room.
* Each plan is then made by itself. Nodes that it leaves unused are offered to the other trainers.

Trainers have objectives in different units, which are never added up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import chain

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan, Planner
from malletrain.core.settings import PlanningSettings
from malletrain.core.trainer_pools import assign_pools
from malletrain.core.trainer_split import TrainerDemand, demand_of, split


class TrainerPlanner:
    """Makes a plan for each trainer with ``planner`` and joins them into one."""

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
        """See :func:`malletrain.core.planning.make_plan`. The objective is NaN if there are several
        trainers.
        """
        groups: dict[str, list[Candidate]] = {}
        for c in candidates:
            groups.setdefault(c.trainer.name if c.trainer else "", []).append(c)
        if len(groups) < 2:
            return self._planner(candidates, nodes, settings, favoured)
        division = divide(groups, nodes)
        plans = {
            name: self._planner(group, division[name], settings, favoured)
            for name, group in groups.items()
        }
        solve_s = sum(plan.solve_s for plan in plans.values())
        unused = nodes.keys() - {n for plan in plans.values() for n in _nodes_in_use(plan)}
        for name, group in groups.items():
            usable = _usable(group, plans[name], unused, nodes)
            if usable <= division[name].keys():
                continue
            own_nodes = usable.union(_nodes_in_use(plans[name]))
            plan = self._planner(
                group, {n: info for n, info in nodes.items() if n in own_nodes}, settings, favoured
            )
            solve_s += plan.solve_s
            unused = unused.union(_nodes_in_use(plans[name])).difference(_nodes_in_use(plan))
            plans[name] = plan
        nodes_of = {job: names for plan in plans.values() for job, names in plan.nodes.items()}
        return Plan(
            {c.job: nodes_of[c.job] for c in candidates},
            math.nan,
            max(plan.gap for plan in plans.values()),
            solve_s,
        )


def _nodes_in_use(plan: Plan) -> Iterator[str]:
    return chain.from_iterable(plan.nodes.values())


def _usable(
    group: Sequence[Candidate], plan: Plan, unused: Set[str], nodes: Mapping[str, NodeInfo]
) -> set[str]:
    """Return the unused nodes on which jobs of one trainer could grow."""
    usable: set[str] = set()
    if not unused:
        return usable
    for c in group:
        if not c.fixed and len(plan.nodes[c.job]) < c.max_nodes:
            usable |= {n for n in unused - usable if c.may_use(nodes[n].node_class)}
    return usable


def divide(
    groups: Mapping[str, Sequence[Candidate]], nodes: Mapping[str, NodeInfo]
) -> dict[str, dict[str, NodeInfo]]:
    """Divide the nodes among the trainers.

    Args:
        groups: trainer → its candidates.
        nodes: all nodes of the plan.

    Returns:
        Trainer → the nodes that its plan may use.
    """
    pools: dict[str, list[str]] = {}
    for node, info in nodes.items():
        pools.setdefault(info.node_class, []).append(node)
    division: dict[str, dict[str, NodeInfo]] = {name: {} for name in groups}
    pool_of = assign_pools(groups, nodes)
    for pool, names in pools.items():
        demands = {
            name: demand_of([c for c in group if pool_of.get(c.job) == pool], pool, nodes)
            for name, group in groups.items()
        }
        demands = {name: demand for name, demand in demands.items() if demand.most}
        for name, share in _deal(demands, names).items():
            division[name].update((node, nodes[node]) for node in share)
    return division


def _deal(demands: Mapping[str, TrainerDemand], nodes: Sequence[str]) -> dict[str, list[str]]:
    """Return trainer → nodes of one pool. Each trainer keeps as many of its current nodes as its
    share allows.
    """
    if len(demands) < 2:
        return {name: list(nodes) for name in demands}
    counts = split(demands, len(nodes))
    shares = {name: demand.nodes[: counts[name]] for name, demand in demands.items()}
    assigned = {node for share in shares.values() for node in share}
    free = iter(sorted(node for node in nodes if node not in assigned))
    for name, share in shares.items():
        for node in free:
            if len(share) >= counts[name]:
                free = iter([node, *free])
                break
            share.append(node)
    return shares
