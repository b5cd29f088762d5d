"""How many nodes to take from one owner for another owner's jobs. Pure.

While a node goes from lease to lease nobody has it: the old lease ends, the main scheduler finds
the node idle and gets its turn, the new lease starts. Two rules follow:

* That time is subtracted from what a node brings within the forward-looking time, and no node is
  taken for which nothing remains. The rule does not apply to an owner without a node: its first one
  costs that time whenever it comes.
* Of a job that has not been measured only a general assumption is known. For it only its smallest
  size is taken, and afterwards at most twice the largest size that it has run on.

:mod:`malletrain.core.lease_planner` decides which nodes are taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan
from malletrain.core.pools import owner_of, pool

REMEMBERED = 5
"""The way is taken to last as long as the median of so many that were seen."""

Imagine = Callable[[Sequence[Candidate]], Plan]
"""A plan of these candidates in which every node may become anybody's."""


class LeaseWay:
    """How long a node is on its way from one owner's lease to another's.

    Args:
        expected_s: until one was seen, seconds.
        longest_s: one that took longer went elsewhere in between, and says nothing of the way.
    """

    def __init__(self, expected_s: float, longest_s: float) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._expected_s = expected_s
        self._longest_s = longest_s
        self._began: dict[str, tuple[float, str]] = {}

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return median(self._seen) if self._seen else self._expected_s

    def begins(self, node: str, owner: str, now: float) -> None:
        """``node`` is taken from its owner for ``owner``."""
        self._began[node] = (now, owner)

    def joined(self, node: str, owner: str, now: float) -> None:
        """A lease of ``owner`` on ``node`` is up."""
        began, requester = self._began.pop(node, (now, ""))
        if requester and requester == owner and now - began <= self._longest_s:
            self._seen.append(now - began)


def worth_taking(
    lacking: Mapping[str, int],
    candidates: Sequence[Candidate],
    owners: Mapping[str, str],
    tried: Callable[[str], int | None],
    way_s: float,
    imagine: Imagine,
    everything: Mapping[str, NodeInfo],
    had: Mapping[str, int],
) -> Counter[str]:
    """How many of the nodes that each pool lacks are worth taking from others.

    Args:
        lacking: pool → how many more nodes it would have in the best plan.
        candidates: of that plan.
        owners: job → whose it is.
        tried: the largest size at which it was seen what a job does (0: none); None where nothing
            has to be seen.
        way_s: how long a node is on its way.
        imagine: makes a plan.
        everything: the nodes of that plan.
        had: pool → nodes that are its own, or on their way to it.
    """
    needy = {owner_of(name) for name, count in lacking.items() if count > 0}
    if not needy:
        return Counter()
    careful = [_carefully(c, tried(c.job)) if owners[c.job] in needy else c for c in candidates]
    landed = {owner_of(name) for name, count in had.items() if count > 0}
    grow = needy & landed
    late = [c.but(late_s=way_s) if owners[c.job] in grow else c for c in careful]
    pays = _lacking(imagine(late), everything, owners, had)
    if careful == list(candidates):
        lack = Counter(lacking)
    else:
        lack = _lacking(imagine(careful), everything, owners, had)
    return Counter(
        {name: min(lacking[name], lack[name]) for name in lacking if min(pays[name], lack[name])}
    )


def _carefully(candidate: Candidate, tried: int | None) -> Candidate:
    """The job, bidding for no more than what it may have before larger sizes were seen."""
    if tried is None:
        return candidate
    smallest = candidate.smallest or candidate.min_nodes
    enough = max(smallest, 2 * tried, len(candidate.nodes))
    return candidate.but(max_nodes=min(candidate.max_nodes, enough))


def _lacking(
    plan: Plan,
    everything: Mapping[str, NodeInfo],
    owners: Mapping[str, str],
    had: Mapping[str, int],
) -> Counter[str]:
    """Pool → how many nodes the plan gives it beyond those it has."""
    used: Counter[str] = Counter()
    for job, nodes in plan.nodes.items():
        if nodes:  # all of one class
            used[pool(everything[nodes[0]].node_class, owners[job])] += len(nodes)
    return used - Counter(had)
