"""What a change of nodes costs a job whose training data lie in the memory of its nodes. Pure.

The samples in the memory of a node that the job gives up are read from the data set again by the
other nodes. A node that joins owns an equal share of the samples, has none of them, and reads them
from the data set, while all nodes read theirs. Both are seconds without training, like the pause of
the rescale, so they are added to it.

Decides the seconds of the smallest change, by one node: costs of a bid do not depend on how many
nodes join or leave. Decides also how much of them counts: the times come from the job's own
processes, and no job may hold its nodes by its data alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from allocator import RescaleCost

CHANGE = 0.1
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


def differs(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    """Return whether new expected times must be reported to plans. A node that is missing in one of
    the two has no data in it.

    Args:
        new, old: node → time in which its data would be read again, seconds.
    """
    return any(
        abs(new.get(node, 0.0) - old.get(node, 0.0))
        > max(MIN_CHANGE_S, CHANGE * old.get(node, 0.0))
        for node in {*new, *old}
    )
