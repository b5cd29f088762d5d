"""The nodes that a profile can have: free nodes and donors, as the controller last reported them.

Decides which jobs may be donors now: jobs on the same class of nodes that were not interrupted
recently. It does not choose among them (:mod:`jpa.donors`).
"""

from __future__ import annotations

from dataclasses import replace

from jpa.donors import Donor, Offer, choose_nodes
from jpa.messages import NodesChanged, ProfileRequested


class NodeAvailability:
    """Free nodes and donors.

    Args:
        quiet_s: time for which a donor is left alone after an interruption, seconds.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._report = NodesChanged({})
        self._interrupted_at: dict[str, float] = {}

    def update(self, report: NodesChanged) -> None:
        """Replace the last report of the controller."""
        self._report = report

    def forget(self, job: str) -> None:
        """Forget a job that has ended."""
        self._interrupted_at.pop(job, None)

    def offer(self, request: ProfileRequested, size: int, min_size: int, now: float) -> Offer:
        """Return the nodes that would bring a job to a size.

        Args:
            request: the job's request.
            size: the size to reach, nodes.
            min_size: the smallest size that is of use, nodes.
            now: the time, seconds.

        Returns:
            What is available; ``total`` 0 if ``min_size`` cannot be reached.
        """
        others = [
            d
            for d in self._report.donors
            if d.job != request.job and d.node_class == request.node_class
        ]
        donors = [self._with_last_interruption(d) for d in others]
        quiet = [
            d
            for d in donors
            if d.last_interrupted is None or now - d.last_interrupted >= self._quiet_s
        ]
        free = self._report.free.get(request.node_class, 0)
        return choose_nodes(
            max(0, size - request.nodes), free, quiet, minimum=max(0, min_size - request.nodes)
        )

    def take(self, offer: Offer, node_class: str, now: float) -> None:
        """Subtract an accepted offer until the next report of the controller.

        Args:
            offer: the accepted offer.
            node_class: the class of its nodes.
            now: the time, seconds.
        """
        free = dict(self._report.free)
        free[node_class] = free.get(node_class, 0) - offer.from_free
        donors = tuple(_without_offer(d, offer) for d in self._report.donors)
        self._report = replace(self._report, free=free, donors=donors)
        if offer.from_donor is not None:
            self._interrupted_at[offer.from_donor] = now

    def _with_last_interruption(self, donor: Donor) -> Donor:
        """Return the donor with its latest interruption, including one that the controller has not
        reported yet.
        """
        times = [
            t
            for t in (donor.last_interrupted, self._interrupted_at.get(donor.job))
            if t is not None
        ]
        return replace(donor, last_interrupted=max(times, default=None))


def _without_offer(donor: Donor, offer: Offer) -> Donor:
    """Return the donor once the offer is taken."""
    if donor.job != offer.from_donor:
        return donor
    return replace(donor, nodes=donor.nodes - offer.count)
