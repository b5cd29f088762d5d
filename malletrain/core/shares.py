"""Fair shares: raises the bids of parties that got less than was due to them. Pure.

A *party* has a share: a user, a group or an account. Decides what is due to each party, what it was
served, and the resulting factor for its bids. The factor is a weight of a bid: where there are
nodes for everybody it changes no plan.

Each party has two counters of weighted node-seconds, as FairServe's weighted service counters
(arXiv 2411.15997): *served* are the nodes that its jobs have. *Due* is its weighted part of the
nodes in use, but never more than its jobs could use (weighted max-min fairness). So nothing is due
to a party without jobs, and one that comes back cannot claim the past. Both decay with one
half-life. A party that is behind by ``double_after_s`` seconds of its own due service bids twice as
much, one that is ahead by as many half as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allocator import ScalingCurve
from malletrain.core.events import JobState
from malletrain.core.goal_bids import rounded
from malletrain.core.planning import Candidate
from malletrain.core.pools import class_of
from malletrain.core.records import JobRecord
from malletrain.core.settings import ShareSettings
from malletrain.core.state import ControllerState

MOST_DOUBLINGS = 4.0
"""A factor lies between 1/16 and 16: beyond, the plan's arithmetic would lose the small bids."""
EVEN = 1e-9
"""Weights, or counters in node-seconds, below this are none."""
FORGOTTEN = 1.0
"""Counters of a party without jobs that have decayed to so few node-seconds are dropped."""
LEAST_DOUBLINGS = 0.25
"""Factors that moved by less are worth no plan of their own."""
LEAST_S = 1.0
"""Shorter times are counted together, as what they end with: reports come many a second."""


class PartyService(NamedTuple):
    """The counters of one party, as they have decayed."""

    served: float = 0.0
    """Weighted node-seconds that its jobs had."""
    due: float = 0.0
    """Weighted node-seconds that were its part."""
    seconds: float = 0.0
    """Time in which something was due to it."""

    @property
    def behind_s(self) -> float:
        """How long it would have to be served, at the rate due to it, to be level; negative: it is
        ahead.
        """
        return self.seconds * (1.0 - self.served / self.due) if self.due > EVEN else 0.0

    def later(self, factor: float) -> PartyService:
        """After some time, of which this much is ``factor``."""
        return PartyService(self.served * factor, self.due * factor, self.seconds * factor)


@dataclass(frozen=True)
class PartyStanding:
    """How a party stands."""

    party: str
    weight: float
    service: PartyService
    factor: float
    """Of its bids."""

    def sentence(self) -> str:
        """For people; empty when it got what was due to it."""
        if abs(self.factor - 1.0) < 0.05:
            return ""
        served, due = self.service.served / 3600.0, self.service.due / 3600.0
        return (
            f"{self.party} got {served:,.1f} of the {due:,.1f} node-hours due to it of late: its "
            f"bids count {self.factor:.2g} times."
        )


def fair_parts(
    demands: Mapping[str, float], weights: Mapping[str, float], total: float
) -> dict[str, float]:
    """Weighted max-min fair parts of ``total``: in proportion to the weights, but nobody gets more
    than its demand; what one does not want is the others'.

    Args:
        demands: party → the most that it can use.
        weights: party → weight, above 0.
        total: what is there to share out; not more than the demands together is given.
    """
    parts: dict[str, float] = {}
    remaining, weight = total, sum(weights[party] for party in demands)
    # In the order in which their demands are met while the level of the water rises.
    for party in sorted(demands, key=lambda p: (demands[p] / weights[p], p)):
        mine = weights[party]
        parts[party] = min(
            demands[party], remaining * mine / weight if weight > EVEN else remaining
        )
        remaining, weight = remaining - parts[party], weight - mine
    return parts


class Shares:
    """The counters of one controller's parties. ``settings``: None where there are no shares; then
    every factor is 1.
    """

    def __init__(self, state: ControllerState, settings: ShareSettings | None) -> None:
        self.settings = settings
        self._state = state
        self._service: dict[str, PartyService] = {}
        self._at: float | None = None
        self._planned_at = 0.0
        self._wanting = 0

    # --- counting ---

    def count(self, admitted: Callable[[], Iterable[JobRecord]], now: float) -> None:
        """Count the time since the last call. Call it before anything changes.

        Args:
            admitted: the jobs that might have nodes.
            now: seconds.
        """
        if self.settings is None:
            return
        if self._at is None:
            self._at = now
        seconds = now - self._at
        if seconds < LEAST_S:
            return
        self._at = now
        served, demands = self._rates(admitted())
        self._wanting = len(demands)
        weights = {party: self.settings.weight(party) for party in demands}
        due = fair_parts(demands, weights, sum(served.values()))
        factor = 0.5 ** (seconds / self.settings.half_life_s)
        for party in {*self._service, *demands}:
            before = self._service.get(party, PartyService()).later(factor)
            if party not in demands and before.served + before.due < FORGOTTEN:
                del self._service[party]
                continue
            mine = due.get(party, 0.0)
            self._service[party] = PartyService(
                before.served + served.get(party, 0.0) * seconds,
                before.due + mine * seconds,
                before.seconds + (seconds if mine > EVEN else 0.0),
            )

    def _rates(self, admitted: Iterable[JobRecord]) -> tuple[dict[str, float], dict[str, float]]:
        """Weighted nodes of each party's jobs, and how many it could use."""
        served: dict[str, float] = {}
        demands: dict[str, float] = {}
        jobs = {job.submitted.job: job for job in admitted}
        jobs.update((n, job) for n, job in self._state.at_work.items() if job.nodes)
        for job in jobs.values():
            spec = job.submitted
            each = self._class_weight(job)
            if job.nodes:
                served[spec.party] = served.get(spec.party, 0.0) + each * len(job.nodes)
            most = max(spec.max_nodes, len(job.nodes))
            demands[spec.party] = demands.get(spec.party, 0.0) + each * most
        return served, demands

    def _class_weight(self, job: JobRecord) -> float:
        assert self.settings is not None
        classes = self.settings.classes
        if not classes or not job.nodes:
            return 1.0
        node = self._state.nodes.get(job.nodes[0])
        return classes.get(class_of(node.info.node_class), 1.0) if node is not None else 1.0

    # --- what follows ---

    def planned(self, now: float) -> None:
        """A plan was made with the factors of now."""
        self._planned_at = now

    def plan_at(self) -> float:
        """When a plan is due although nothing happens, because factors have moved; infinite while
        no two parties want nodes.
        """
        if self.settings is None or self._wanting < 2:
            return math.inf
        return self._planned_at + self.settings.double_after_s * LEAST_DOUBLINGS

    def weight(self, party: str) -> float:
        """The weight of a party."""
        return self.settings.weight(party) if self.settings is not None else 1.0

    def load(self, party: str, begun: bool) -> float:
        """Whose turn it is where there are more parties than places: what has begun goes on before
        anything else begins, then who was served least for its weight.
        """
        served = self._service.get(party, PartyService()).served
        return -1.0 if begun else served / self.weight(party)

    def factor(self, party: str) -> float:
        """What the party's bids count."""
        if self.settings is None or party not in self._service:
            return 1.0
        doublings = self._service[party].behind_s / self.settings.double_after_s
        return float(2.0 ** min(MOST_DOUBLINGS, max(-MOST_DOUBLINGS, doublings)))

    def patience(self, party: str) -> float:
        """How much longer than others' jobs those of the party wait until they starve: else turns
        of waiting jobs would give it back what its bids lose.
        """
        return 1.0 / min(1.0, self.factor(party))

    def weigh(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates, their weights those of their parties too.

        A job that is in the middle of something is not outbid for the sake of shares: on the nodes
        it has it counts as much as the least served party's. More nodes are its party's as any.
        """
        candidates = list(candidates)
        if self.settings is None or not candidates:
            return candidates
        jobs = self._state.jobs
        factors = {p: self.factor(p) for p in {jobs[c.job].submitted.party for c in candidates}}
        top = max(factors.values())
        standings = []
        for c in candidates:
            job = jobs[c.job]
            factor = factors[job.submitted.party]
            if not _midway(job):
                c = c.but(weight=c.weight * factor)
            elif c.curve is None:
                c = c.but(weight=c.weight * top)
            else:
                curve = discounted(c.curve, len(c.nodes), rounded(factor / top))
                c = c.but(weight=c.weight * top, curve=curve)
            standings.append(c)
        return standings

    # --- for the shells ---

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """The weights are others from now on."""
        if self.settings is not None:
            self.settings = replace(self.settings, weights=dict(weights))

    def restore(self, service: Mapping[str, PartyService], at: float) -> None:
        """Go on from what was kept at the time ``at``."""
        self._service, self._at = dict(service), at

    def services(self) -> dict[str, PartyService]:
        """What a restart needs, by party."""
        return dict(self._service)

    def standing(self, party: str) -> PartyStanding | None:
        """How a party stands; None where there are no shares."""
        if self.settings is None:
            return None
        return PartyStanding(
            party,
            self.settings.weight(party),
            self._service.get(party, PartyService()),
            self.factor(party),
        )

    def standings(self) -> list[PartyStanding]:
        """How all parties that have had jobs stand, by name."""
        standings = (self.standing(party) for party in sorted(self._service))
        return [each for each in standings if each is not None]


@lru_cache(maxsize=4096)
def discounted(curve: ScalingCurve, nodes: int, part: float) -> ScalingCurve:
    """The curve up to so many nodes; what more of them bring counts by ``part``."""
    have = curve.at(nodes)
    sizes, rates = curve.arrays
    rates = np.where(sizes <= nodes, rates, have + part * (rates - have))
    if nodes not in sizes:
        place = sizes.searchsorted(nodes)
        sizes, rates = np.insert(sizes, place, nodes), np.insert(rates, place, have)
    return ScalingCurve.from_arrays(sizes, rates)


def _midway(job: JobRecord) -> bool:
    """Whether the job is in the middle of something that shares do not cut."""
    return bool(job.nodes) and (job.submitted.whole or job.state is JobState.PROFILING)
