"""What a change of nodes costs a job in a plan besides the pause of the rescale: the start of a
service's process, and the reading of data again. Pure.

The start of a training is a pause, which a plan charges in full against the forward-looking time
(``t_fwd``). The process of a service may load for longer than ``t_fwd``, such as a model of 100 GB,
and then works for as long as its node lasts. So a plan charges the fraction of ``t_fwd`` that the
start (its expected duration ``start``) takes of the time for which the node is expected to last
(``horizon``; unlimited without a forecast):

    charged = t_fwd · min(1, start / min(horizon, max(t_fwd, PAYBACK_FACTOR · start)))

Nodes that are expected to be gone before the process is ready are not offered to the service. Its
other processes continue meanwhile, so that growth is charged for the added nodes only.

A job whose training data lie in the memory of its nodes reads the samples of a node that it gives
up from the data set again, by the other nodes. A node that joins owns an equal share of the
samples, has none of them, and reads them from the data set, while all nodes read theirs. Both are
seconds without training, like the pause of the rescale, so they are added to it. Decides the
seconds of the smallest change, by one node: costs of a bid do not depend on how many nodes join or
leave. They are capped at :data:`MAX_SHARE` of the forward-looking time, because the job's own
processes report them: a job cannot keep its nodes by claiming costly data.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from allocator import RescaleCost
from malletrain.core.pools import Pool, PoolNode

ASSUMED_START_S = 5.0
"""Start of a service of which nothing is known, seconds."""
PAYBACK_FACTOR = 4.0
"""Time for which a node without a forecast is taken to last, as a multiple of the start, if that is
longer than the forward-looking time.
"""
MAX_MEASURED = 9
"""Maximum number of measured starts of one job on one class of nodes; older ones are dropped. Their
median is the expected start.
"""


@dataclass(frozen=True)
class StartCost:
    """Time from the start of a service's process on a node until the process is ready."""

    assumed_s: float = ASSUMED_START_S
    """Assumed as long as it is not measured, seconds."""
    measured_s: Mapping[str, float] = field(default_factory=dict)
    """Node class → expected by its measurements there, seconds."""

    def expected_s(self, node_class: str) -> float:
        """Return the expected time on a class of nodes, seconds: where it is not measured, the
        longest of other classes.
        """
        elsewhere_s = max(self.measured_s.values(), default=self.assumed_s)
        return self.measured_s.get(node_class, elsewhere_s)


def append_measured(measured_s: Sequence[float], seconds: float) -> tuple[float, ...]:
    """Return the last measured starts, oldest first, with one more.

    Args:
        measured_s: the measured starts before it, oldest first, seconds.
        seconds: duration of the newest one.
    """
    return (*measured_s, seconds)[-MAX_MEASURED:]


def expected_start_s(measured_s: Iterable[float]) -> float:
    """Return the expected duration of the next start, seconds: the median of ``measured_s``. One
    slow file system, or one warm page cache, does not move it.
    """
    return median(measured_s)


def charged_s(start_s: float, t_fwd_s: float, horizon_s: float | None) -> float:
    """Return the part of a start that a plan charges, seconds.

    Args:
        start_s: expected duration of the start.
        t_fwd_s: forward-looking time of the plan.
        horizon_s: expected remaining time of the nodes; None without a forecast.
    """
    lasts_s = max(t_fwd_s, PAYBACK_FACTOR * start_s)
    if horizon_s is not None:
        lasts_s = min(lasts_s, horizon_s)
    return t_fwd_s * min(1.0, start_s / lasts_s) if lasts_s > 0 else t_fwd_s


@dataclass(frozen=True)
class StartTerms:
    """The effect of the start of one job on its bid in one pool."""

    cost: RescaleCost
    """Pauses of its rescales there."""
    limit: int
    """Maximum number of nodes: its own, and those that outlast a start."""


class NodeLifetimes:
    """How long the nodes of one plan are expected to last, by pool.

    Args:
        nodes: node → its properties.
    """

    def __init__(self, nodes: Mapping[str, PoolNode]) -> None:
        self._nodes = nodes
        self._sorted: dict[Pool, list[float]] = {}

    def start_terms(
        self,
        pool: Pool,
        own_nodes: Sequence[str],
        start_s: float,
        t_fwd_s: float,
        base: RescaleCost,
    ) -> StartTerms:
        """Return the effect of a start on the bid of a job.

        Args:
            pool: pool of nodes.
            own_nodes: present nodes of the job. It has paid for their start.
            start_s: expected duration of its start there, seconds.
            t_fwd_s: forward-looking time of the plan, seconds.
            base: its other pauses.
        """
        horizons = self._horizons(pool)
        outlasting = horizons[bisect_right(horizons, start_s) :]
        middle = outlasting[len(outlasting) // 2] if outlasting else math.inf
        charged = charged_s(start_s, t_fwd_s, middle if middle < math.inf else None)
        cost = replace(base, start_s=charged, join_s=charged)
        return StartTerms(cost, self._limit(pool, own_nodes, start_s))

    def enough_outlast_start(
        self,
        start: StartCost,
        own_nodes: Sequence[str],
        smallest: float,
        may_use: Callable[[Pool], bool],
    ) -> bool:
        """Return whether enough nodes of a pool outlast a start of a job for it to run.

        Args:
            start: time until a process of the job is ready.
            own_nodes: present nodes of the job.
            smallest: minimum number of nodes on which it can run.
            may_use: returns whether it may run on nodes of a pool.
        """
        return any(
            self._limit(pool, own_nodes, start.expected_s(pool.node_class)) >= smallest
            for pool in {info.pool for info in self._nodes.values()}
            if may_use(pool)
        )

    def _limit(self, pool: Pool, own_nodes: Sequence[str], start_s: float) -> int:
        """Return how many nodes of a pool a job can have: its own, and those that outlast a
        start.
        """
        own = [self._nodes[n] for n in own_nodes if n in self._nodes]
        loaded = sum(o.pool == pool and _horizon(o) <= start_s for o in own)
        horizons = self._horizons(pool)
        return loaded + len(horizons) - bisect_right(horizons, start_s)

    def _horizons(self, pool: Pool) -> list[float]:
        """Return the horizons of the nodes of a pool, the shortest first; infinite without a
        forecast.
        """
        if pool not in self._sorted:
            in_pool = (info for info in self._nodes.values() if info.pool == pool)
            self._sorted[pool] = sorted(map(_horizon, in_pool))
        return self._sorted[pool]


def _horizon(info: PoolNode) -> float:
    return math.inf if info.horizon_s is None else info.horizon_s


MIN_RELATIVE_CHANGE = 0.1
"""Minimum relative change of an expected time that is reported to plans."""
MAX_SHARE = 0.5
"""Maximum pause for reading again that counts, relative to the forward-looking time."""
MIN_CHANGE_S = 1.0
"""Minimum change of an expected time that is reported to plans, seconds."""


def reread_s(present: Mapping[str, int], sample_s: float) -> dict[str, float]:
    """Return node → time in which the other nodes would read again the samples in its memory,
    seconds. A job's only node would read them itself, on another node.

    Args:
        present: node of the job → number of samples in its memory.
        sample_s: time of a node to read one sample from the data set, seconds.
    """
    readers = max(1, len(present) - 1)
    return {node: count * sample_s / readers for node, count in present.items()}


def with_reread(cost: RescaleCost, reread: Sequence[float], t_fwd_s: float) -> RescaleCost:
    """Return the pauses of a job's changes with the time in which data are read again.

    Args:
        cost: the pauses without it.
        reread: for each node of the job, the time in which its data would be read again, seconds
            (:func:`reread_s`).
        t_fwd_s: forward-looking time of the plan, seconds.
    """
    nodes, total_s = len(reread), sum(reread)
    if not total_s:
        return cost
    # One node reads all samples in the sum times the readers of each. With one node more there are
    # nodes + 1 readers of the new node's share, which is 1 / (nodes + 1) of all samples.
    growing_s = total_s * max(1, nodes - 1) / (nodes + 1) ** 2
    most_s = MAX_SHARE * t_fwd_s
    return replace(
        cost,
        up_s=cost.up_s + min(growing_s, most_s),
        down_s=cost.down_s + min(*reread, most_s),
    )


def reread_changed(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    """Return whether new expected times must be reported to plans. A node that is missing in one of
    the two has no data in it.

    Args:
        new, old: node → time in which its data would be read again, seconds.
    """
    return any(
        abs(new.get(node, 0.0) - old.get(node, 0.0))
        > max(MIN_CHANGE_S, MIN_RELATIVE_CHANGE * old.get(node, 0.0))
        for node in {*new, *old}
    )
