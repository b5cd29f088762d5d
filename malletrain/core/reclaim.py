"""Decides how many nodes to take from one owner for another owner's jobs. Pure.

Between two leases no job has the node: the old lease ends, the main scheduler finds the node idle
and runs a backfill cycle, then the new lease starts. Two rules follow:

* That time is subtracted from the forward-looking time in which a node is useful. A node is not
  taken if nothing remains. The rule does not apply to an owner without nodes, because its first
  node costs that time whenever it comes.
* The curve of an unmeasured job is only an assumption. Such a job first gets only its smallest
  size, and later at most twice the largest size at which it has run.

:mod:`malletrain.core.lease_planner` decides which nodes are taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from allocator import NodeInfo
from malletrain.core.planning import Candidate, Plan
from malletrain.core.pools import owner_of, pool

MAX_MEASUREMENTS = 5
"""Number of last measurements whose median is the expected time."""

Imagine = Callable[[Sequence[Candidate]], Plan]
"""Makes a hypothetical plan of these candidates, in which every job can get every node."""


class LeaseWay:
    """Measures the time of a node between the leases of two owners.

    Args:
        expected_s: assumed time until one is measured, seconds.
        longest_s: longer times are ignored, because the node was used otherwise in between,
            seconds.
    """

    def __init__(self, expected_s: float, longest_s: float) -> None:
        self._seen: deque[float] = deque(maxlen=MAX_MEASUREMENTS)
        self._expected_s = expected_s
        self._longest_s = longest_s
        self._began: dict[str, tuple[float, str]] = {}

    @property
    def seconds(self) -> float:
        """Expected time between the leases, seconds."""
        return median(self._seen) if self._seen else self._expected_s

    def begins(self, node: str, owner: str, now: float) -> None:
        """Note that ``node`` is taken from its owner for ``owner``."""
        self._began[node] = (now, owner)

    def joined(self, node: str, owner: str, now: float) -> None:
        """Note that a lease of ``owner`` on ``node`` has started."""
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
    """Return how many of the nodes that each pool lacks are worth taking from other owners.

    Args:
        lacking: pool → number of additional nodes in the best plan.
        candidates: candidates of that plan.
        owners: job → its owner.
        tried: returns the largest measured size of a job (0 for none); None if no measurement is
            required.
        way_s: time of a node between two leases, seconds.
        imagine: makes a hypothetical plan.
        everything: nodes of that plan.
        had: pool → number of nodes that it has or that are on their way to it.

    Returns:
        Pool → number of nodes.
    """
    needy = {owner_of(name) for name, count in lacking.items() if count > 0}
    if not needy:
        return Counter()
    careful = [_carefully(c, tried(c.job)) if owners[c.job] in needy else c for c in candidates]
    has_nodes = {owner_of(name) for name, count in had.items() if count > 0}
    growing = needy & has_nodes
    late = [c.but(late_s=way_s) if owners[c.job] in growing else c for c in careful]
    pays = _lacking(imagine(late), everything, owners, had)
    if careful == list(candidates):
        shortage = Counter(lacking)
    else:
        shortage = _lacking(imagine(careful), everything, owners, had)
    return Counter(
        {
            name: min(lacking[name], shortage[name])
            for name in lacking
            if min(pays[name], shortage[name])
        }
    )


def _carefully(candidate: Candidate, tried: int | None) -> Candidate:
    """Return the job, limited to the sizes that it can have before larger ones are measured."""
    if tried is None:
        return candidate
    smallest = candidate.smallest or candidate.min_nodes
    max_size = max(smallest, 2 * tried, len(candidate.nodes))
    return candidate.but(max_nodes=min(candidate.max_nodes, max_size))


def _lacking(
    plan: Plan,
    everything: Mapping[str, NodeInfo],
    owners: Mapping[str, str],
    had: Mapping[str, int],
) -> Counter[str]:
    """Return pool → number of nodes that the plan gives it in addition to those in ``had``."""
    used: Counter[str] = Counter()
    for job, nodes in plan.nodes.items():
        if nodes:  # all of one class
            used[pool(everything[nodes[0]].node_class, owners[job])] += len(nodes)
    return used - Counter(had)
