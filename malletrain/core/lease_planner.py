"""The controller's half of leasing: which leases to take, as whom, which to give back, which to
recall for another owner.

A part of :class:`malletrain.core.controller.Controller` in a file of its own; nobody else makes
one. The answer follows from an imagined plan: one that has every gap there is, and in which every
node may become anybody's.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from malletrain.core.events import Command, NodeLeaving, ReclaimNodes, ReleaseLeases, TakeLeases
from malletrain.core.planning import Plan
from malletrain.core.pools import by_class, class_of, owner_of, pool

if TYPE_CHECKING:
    from malletrain.core.controller import Controller


class LeasePlanner:
    """Leases of one controller's nodes."""

    def __init__(self, controller: Controller) -> None:
        self._of = controller
        self._recall_at = -math.inf

    def review(self, now: float) -> list[Command]:
        """Give back what is of no use any more, ask for as many gaps as a plan that had them all
        would use, recall what others need.
        """
        c = self._of
        due = sorted(
            name for name in c._idle if now >= c.nodes[name].review_at and c._plan_at is None
        )
        if not due and not c._leases_due:
            return []
        c._leases_due = False
        offers, coming = c._gaps.open(c.nodes, c._line.owners, now), c._gaps.coming(c.nodes)
        may_recall = len(c._line.owners) > 1 and now >= self._recall_at
        if not due and not offers and not may_recall:
            return []
        # With one owner the pools are the classes, and nothing need be looked up node by node.
        mine = (
            c._usable
            if c._line.owners.keys() <= {""}
            else {name: c.nodes[name].info for name in c._usable}
        )
        everything = {**mine, **{name: info for name, (info, _) in coming.items()}, **offers}
        favoured = {*by_class(c._usable_by_pool), *(info.node_class for info, _ in coming.values())}
        imagined = c._planner(
            c._candidates(everything, now, imagined=True), everything, c.settings.planning, favoured
        )
        used: Counter[str] = Counter()
        for job, nodes in imagined.nodes.items():
            if nodes:  # all of one class
                used[pool(everything[nodes[0]].node_class, c.jobs[job].submitted.owner)] += len(
                    nodes
                )
        spare = c._usable_by_pool - used
        wanted = (
            used
            - c._usable_by_pool
            - Counter(pool(info.node_class, owner) for info, owner in coming.values())
        )
        back = []
        for name in due:
            node = c.nodes[name]
            if spare[node.pool] > 0:
                spare[node.pool] -= 1
                back.append(name)
                c._forget(name, now)
            else:
                node.review_at = now + max(1.0, c.settings.give_back_after_s)
        commands: list[Command] = [ReleaseLeases(tuple(back))] if back else []
        for owner, names in c._gaps.ask(wanted, offers, now).items():
            commands.append(TakeLeases(names, owner))
            wanted -= Counter(pool(offers[name].node_class, owner) for name in names)
        return commands + (self._recall(wanted, spare, imagined, now) if may_recall else [])

    def _recall(
        self, lacking: Counter[str], spare: Counter[str], imagined: Plan, now: float
    ) -> list[Command]:
        """Take nodes from owners whose jobs have less use for them; ``lacking`` and ``spare``: pool
        → how many.

        A node that is recalled goes back to the main scheduler. The lease of its next owner is one
        like any other.
        """
        c, settings = self._of, self._of.settings
        recalled = []
        for name in sorted(c._usable, key=lambda n: (c.nodes[n].job is not None, n)):
            node, job = c.nodes[name], c.jobs.get(c.nodes[name].job or "")
            needy = next(
                (p for p in lacking if lacking[p] > 0 and class_of(p) == node.info.node_class), None
            )
            if needy is None or spare[node.pool] <= 0:
                continue
            if job and (
                job.turn_until > now
                or c._stays(job, now)
                or name in imagined.nodes.get(job.submitted.job, ())
            ):
                continue
            lacking[needy] -= 1
            spare[node.pool] -= 1
            recalled.append(name)
            c._gaps.promise(
                name, node.info, owner_of(needy), now + settings.recall_s + settings.lease_wait_s
            )
        if not recalled:
            return []
        for name in recalled:
            c._node_leaving(NodeLeaving(name, settings.recall_s), now)
        self._recall_at = now + settings.recall_every_s
        return [ReclaimNodes(tuple(recalled), settings.recall_s)]
