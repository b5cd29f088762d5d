"""The source of a profile's nodes: free nodes first, then one donor.

Decides how many free nodes a profile gets, and which running job gives up how many. It does not
choose nodes and does not move jobs; the controller does. Rules: at most one donor; a donor keeps at
least one node, its minimum and a size that it accepts; the donor whose last interruption is longest
ago comes first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Donor:
    """A running job that could give up nodes."""

    job: str
    """Its name."""
    nodes: int
    """Nodes that it has now."""
    min_nodes: int = 1
    """Minimum number of nodes that it accepts."""
    last_interrupted: float | None = None
    """Time at which it last gave up nodes for a profile, seconds; None for never."""
    sizes: tuple[int, ...] | None = None
    """Sizes that it accepts, None for all."""
    pool: Hashable = "default"
    """Pool of its nodes."""

    @property
    def spare(self) -> int:
        """Maximum number of nodes that it can give up and still run at an accepted size; 0 if
        none.
        """
        return max(self._releases(), default=0)

    def release(self, requested: int) -> int:
        """Return the number of nodes that it gives up for ``requested`` ones: the fewest that
        suffice, else as many as it can.

        Its accepted sizes may make the number larger than ``requested``; the rest becomes free.
        """
        if requested < 1:
            return 0
        sufficient = [r for r in self._releases() if r >= requested]
        return min(sufficient) if sufficient else self.spare

    def _releases(self) -> list[int]:
        """Return all numbers of nodes that it can give up."""
        minimum = max(1, self.min_nodes)
        smaller_sizes = (
            range(minimum, self.nodes)
            if self.sizes is None
            else [k for k in self.sizes if minimum <= k < self.nodes]
        )
        return [self.nodes - k for k in smaller_sizes]


@dataclass(frozen=True)
class Offer:
    """Additional nodes for a profile."""

    from_free: int
    """Free nodes."""
    from_donor: str | None
    """The job that gives up nodes; None: no job is interrupted."""
    count: int
    """Nodes that the donor gives up."""
    total: int
    """Additional nodes that the profile can use: the free ones and those of ``count`` that it
    needs; 0 means no offer.
    """
    reason: str
    """A sentence for the user."""


def choose_nodes(
    requested: int, free: int, running_jobs: Sequence[Donor], *, minimum: int = 1
) -> Offer:
    """Choose the additional nodes of a profile.

    Args:
        requested: nodes to add, 0 or more.
        free: idle leased nodes.
        running_jobs: possible donors, without the profiled job and without jobs that are being
            rescaled.
        minimum: minimum number of added nodes with which the profile can run.

    Returns:
        Up to ``requested`` nodes, or an empty offer if fewer than ``minimum`` are available.

    Raises:
        ValueError: if a number is negative.
    """
    if requested < 0 or free < 0 or minimum < 0:
        raise ValueError(
            f"Numbers of nodes cannot be negative: requested {requested}, free {free}, "
            f"minimum {minimum}."
        )
    from_free = min(requested, free)
    missing = requested - from_free
    if missing == 0:
        return Offer(
            from_free,
            None,
            0,
            from_free,
            f"{_nodes(from_free)} {'is' if from_free == 1 else 'are'} free.",
        )
    # A donor is interrupted only if its nodes make the profile possible.
    donors = [
        d for d in running_jobs if d.spare > 0 and from_free + min(d.spare, missing) >= minimum
    ]
    if donors:
        donor = min(donors, key=_donor_order)
        count = donor.release(missing)
        total = from_free + min(count, missing)
        history = (
            "was never interrupted before"
            if donor.last_interrupted is None
            else "was left alone for longest"
        )
        return Offer(
            from_free,
            donor.job,
            count,
            total,
            f"{_nodes(from_free)} free, {count} from job {donor.job}, which {history}.",
        )
    if from_free >= max(minimum, 1):
        return Offer(
            from_free,
            None,
            0,
            from_free,
            f"{_nodes(from_free)} of {requested} requested are free; no running job can give more.",
        )
    most = max((d.spare for d in running_jobs), default=0)
    sentence = (
        f"It needs {_nodes(max(minimum, 1))} more to be profiled; {from_free} "
        f"{'is' if from_free == 1 else 'are'} free "
        f"and no running job can give up more than {most}."
    )
    return Offer(0, None, 0, 0, sentence)


def _donor_order(donor: Donor) -> tuple[float, int, str]:
    """Return the sort key: the earliest last interruption, then the most spare nodes, then the
    name, so that the choice is deterministic.
    """
    return (
        -math.inf if donor.last_interrupted is None else donor.last_interrupted,
        -donor.spare,
        donor.job,
    )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
