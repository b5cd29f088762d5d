"""Where the nodes of a profile come from: free ones first, then one donor.

Decides how many free nodes a profile gets and which one running job gives up how many. It does not
move anything and names no nodes; the controller does. Rules: at most one donor, never the donor's
last node, never a donor below its minimum, a size that the donor allows, the donor that was left
alone for longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Donor:
    """A running job that could give nodes."""

    job: str
    """Its name."""
    nodes: int
    """Held now."""
    min_nodes: int = 1
    """The fewest it runs on."""
    last_interrupted: float | None = None
    """When nodes were last taken from it for a profile, seconds; None for never."""
    sizes: tuple[int, ...] | None = None
    """Sizes it accepts, None for all."""
    node_class: str = "default"
    """Class of its nodes."""

    @property
    def spare(self) -> int:
        """The most nodes it can give up and still run at an allowed size; 0 when none."""
        return max(self._releases(), default=0)

    def release(self, wanted: int) -> int:
        """Nodes it gives up when ``wanted`` are asked for: the fewest that are enough, else the
        most it can; 0 when it can give none.

        Allowed sizes may force it to give more than wanted; the rest becomes free.
        """
        if wanted < 1:
            return 0
        enough = [r for r in self._releases() if r >= wanted]
        return min(enough) if enough else self.spare

    def _releases(self) -> list[int]:
        least = max(1, self.min_nodes)
        left = (
            range(least, self.nodes)
            if self.sizes is None
            else [k for k in self.sizes if least <= k < self.nodes]
        )
        return [self.nodes - k for k in left]


@dataclass(frozen=True)
class Offer:
    """Nodes for a profile."""

    from_free: int
    """Free nodes."""
    from_donor: str | None
    """The job that gives up others; None: nobody is interrupted."""
    count: int
    """Nodes that it gives up."""
    total: int
    """New nodes the profile can use: the free ones and what it needs of ``count``; 0 means no
    offer.
    """
    reason: str
    """A sentence for the user."""


def choose_nodes(
    wanted: int, free: int, running_jobs: Sequence[Donor], *, minimum: int = 1
) -> Offer:
    """Nodes for a profile that wants ``wanted`` more and is of no use with fewer than ``minimum``
    more.

    Args:
        wanted: nodes to add, 0 or more.
        free: idle leased nodes.
        running_jobs: jobs that may be asked, without the profiled one and without those that are
            being rescaled.
        minimum: fewest nodes to add that let the profile run.
    """
    if wanted < 0 or free < 0 or minimum < 0:
        raise ValueError(
            f"Nodes cannot be negative: wanted {wanted}, free {free}, minimum {minimum}."
        )
    from_free = min(wanted, free)
    missing = wanted - from_free
    if missing == 0:
        return Offer(
            from_free,
            None,
            0,
            from_free,
            f"{_nodes(from_free)} {'is' if from_free == 1 else 'are'} free.",
        )
    # Only a donor that makes the profile possible is worth interrupting.
    able = [d for d in running_jobs if d.spare > 0 and from_free + min(d.spare, missing) >= minimum]
    if able:
        donor = min(able, key=_left_alone_longest)
        count = donor.release(missing)
        total = from_free + min(count, missing)
        when = (
            "was never interrupted before"
            if donor.last_interrupted is None
            else "was left alone for longest"
        )
        return Offer(
            from_free,
            donor.job,
            count,
            total,
            f"{_nodes(from_free)} free, {count} from job {donor.job}, which {when}.",
        )
    if from_free >= max(minimum, 1):
        return Offer(
            from_free,
            None,
            0,
            from_free,
            f"{_nodes(from_free)} of {wanted} wanted are free; no running job can give more.",
        )
    most = max((d.spare for d in running_jobs), default=0)
    sentence = (
        f"It needs {_nodes(max(minimum, 1))} more to be profiled; {from_free} "
        f"{'is' if from_free == 1 else 'are'} free "
        f"and no running job can give up more than {most}."
    )
    return Offer(0, None, 0, 0, sentence)


def _left_alone_longest(donor: Donor) -> tuple[float, int, str]:
    """Sort key: longest left alone first, then the one with most to spare, then by name (so that
    the choice is repeatable).
    """
    return (
        -math.inf if donor.last_interrupted is None else donor.last_interrupted,
        -donor.spare,
        donor.job,
    )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
