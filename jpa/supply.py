"""The nodes that profiles can have, as the controller told last: what is free, and which jobs may
be asked.

Decides who may be asked at this moment: only jobs of the same class of nodes that were left alone
for a while. Which of them gives is decided by :mod:`jpa.donors`.
"""

from __future__ import annotations

from dataclasses import replace

from jpa.donors import Donor, Offer, choose_nodes
from jpa.messages import NodesChanged, ProfileWanted


class Supply:
    """Free nodes and donors. ``quiet_s``: a donor is left alone for so many seconds after an
    interruption.
    """

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._told = NodesChanged({})
        self._interrupted: dict[str, float] = {}

    def changed(self, told: NodesChanged) -> None:
        """How things are now."""
        self._told = told

    def forget(self, job: str) -> None:
        """The job has ended."""
        self._interrupted.pop(job, None)

    def offer(self, wanted: ProfileWanted, size: int, least: int, now: float) -> Offer:
        """What could be had at time ``now`` (seconds) to bring the job to ``size`` nodes; fewer
        than ``least`` are of no use.
        """
        others = [
            d
            for d in self._told.donors
            if d.job != wanted.job and d.node_class == wanted.node_class
        ]
        donors = [self._remembered(d) for d in others]
        quiet = [
            d
            for d in donors
            if d.last_interrupted is None or now - d.last_interrupted >= self._quiet_s
        ]
        free = self._told.free.get(wanted.node_class, 0)
        return choose_nodes(
            max(0, size - wanted.nodes), free, quiet, minimum=max(0, least - wanted.nodes)
        )

    def take(self, offer: Offer, node_class: str, now: float) -> None:
        """Remember what the controller will take, until it says how things are."""
        free = dict(self._told.free)
        free[node_class] = free.get(node_class, 0) - offer.from_free
        donors = tuple(_shrunk(d, offer) for d in self._told.donors)
        self._told = replace(self._told, free=free, donors=donors)
        if offer.from_donor is not None:
            self._interrupted[offer.from_donor] = now

    def _remembered(self, donor: Donor) -> Donor:
        """The donor with its latest interruption, also one that the controller has not told
        of yet.
        """
        times = [
            t for t in (donor.last_interrupted, self._interrupted.get(donor.job)) if t is not None
        ]
        return replace(donor, last_interrupted=max(times, default=None))


def _shrunk(donor: Donor, offer: Offer) -> Donor:
    return (
        replace(donor, nodes=donor.nodes - offer.count) if donor.job == offer.from_donor else donor
    )
