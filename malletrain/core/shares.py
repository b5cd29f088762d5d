"""Fair shares and quotas. Pure.

Fair shares raise the bids of parties that were served less than was due to them. A *party* has a
share: a user, a group or an account. Decides what is due to each party, what it was served, and the
resulting factor for its bids. The factor is a weight of a bid. If there are enough nodes for all
jobs, it changes no plan.

Each party has two counters of weighted node-seconds, as FairServe's weighted service counters
(arXiv 2411.15997): *served* counts the nodes that its jobs have. *Due* counts its weighted part of
the nodes in use, but never more than its jobs could use (weighted max-min fairness). So nothing is
due to a party without jobs, and a returning party cannot claim the past. Both decay with the same
half-life. A party that is behind by ``double_after_s`` seconds of its own due service bids twice as
much; a party that is ahead by the same time bids half as much.

Quotas limit the number of nodes that the jobs of a user or an account have at once. The bid of one
job cannot express a limit over several jobs. So the limit is divided before the bids are made, and
each job bids for at most its part. First each job gets its smallest size: jobs that must run, then
jobs with nodes, then the others in order of admission. The rest is divided equally. A job with
fixed nodes counts with its current size, a profiled job with its largest. The shell decides which
job is under which limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from allocator import ScalingCurve
from malletrain.core.events import JobState, Quota
from malletrain.core.goal_bids import rounded
from malletrain.core.planning import Candidate
from malletrain.core.records import JobRecord
from malletrain.core.settings import ShareSettings
from malletrain.core.state import ControllerState


class Quotas:
    """The quotas of one controller's jobs."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state

    def within(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates, each limited to its part. Those without room for their smallest
        size are left out.
        """
        jobs = self._state.jobs
        limited = [c for c in candidates if jobs[c.job].submitted.quotas]
        if not limited:
            return list(candidates)
        parts = _parts(limited, [jobs[c.job] for c in limited])
        return [
            c if c.fixed or c.job not in parts else c.but(max_nodes=parts[c.job])
            for c in candidates
            if c.fixed or parts.get(c.job, 1)
        ]

    def may_profile(self, job: JobRecord) -> bool:
        """Return whether its quotas allow the job its largest size, given the nodes of the other
        jobs under them.
        """
        for quota in job.submitted.quotas:
            used_nodes = sum(
                len(other.nodes)
                for other in self._state.at_work.values()
                if other is not job and quota in other.submitted.quotas
            )
            if used_nodes + job.submitted.max_nodes > quota.nodes:
                return False
        return True

    def full(self, job: JobRecord) -> Quota | None:
        """Return the quota that prevents a job without nodes from running; None if none does."""
        for quota in job.submitted.quotas:
            used_nodes = sum(
                len(other.nodes)
                for other in self._state.at_work.values()
                if quota in other.submitted.quotas
            )
            if used_nodes + job.smallest > quota.nodes:
                return quota
        return None


def _parts(candidates: Sequence[Candidate], jobs: Sequence[JobRecord]) -> dict[str, int]:
    """Return job → maximum number of nodes that it may bid for; 0 if there is no room for its
    smallest size.
    """
    quotas = {c.job: job.submitted.quotas for c, job in zip(candidates, jobs, strict=True)}
    room = {quota: quota.nodes for job_quotas in quotas.values() for quota in job_quotas}
    parts: dict[str, int] = {}

    def give(name: str, more: int) -> None:
        parts[name] = parts.get(name, 0) + more
        for quota in quotas[name]:
            room[quota] -= more

    def remaining(name: str) -> int:
        return min(room[quota] for quota in quotas[name])

    for c, job in zip(candidates, jobs, strict=True):
        if c.fixed:
            profiled = job.state is JobState.PROFILING
            give(c.job, max(len(c.nodes), c.max_nodes if profiled else 0))
    rest = sorted(
        (c for c in candidates if not c.fixed), key=lambda c: (not c.must_run, not c.nodes)
    )
    for c in rest:
        smallest = c.smallest
        give(c.job, smallest if smallest is not None and smallest <= remaining(c.job) else 0)
    growing = [c for c in rest if parts[c.job]]
    while growing := [c for c in growing if parts[c.job] < c.max_nodes and remaining(c.job) > 0]:
        sharing = Counter(quota for c in growing for quota in quotas[c.job])
        for c in growing:
            sharing_jobs = max(sharing[quota] for quota in quotas[c.job])
            more = min(
                c.max_nodes - parts[c.job],
                remaining(c.job),
                max(1, remaining(c.job) // sharing_jobs),
            )
            give(c.job, max(0, more))
    return parts


MAX_DOUBLINGS = 4.0
"""Maximum of the factor's base-2 logarithm, so it lies between 1/16 and 16. Beyond that, the plan's
arithmetic would lose small bids.
"""
EPSILON = 1e-9
"""Weights and counters (node-seconds) up to this value count as 0."""
MIN_COUNTER = 1.0
"""Counters of a party without jobs are dropped below this value, node-seconds."""
MIN_DOUBLINGS_CHANGE = 0.25
"""Minimum change of a factor's base-2 logarithm that justifies a plan."""
MIN_INTERVAL_S = 1.0
"""Minimum time between two counts, seconds, because many reports arrive per second. A count uses
the state at the end of its interval.
"""


class PartyService(NamedTuple):
    """The decayed counters of one party."""

    served: float = 0.0
    """Weighted node-seconds of its jobs."""
    due: float = 0.0
    """Weighted node-seconds that were due to it."""
    seconds: float = 0.0
    """Time in which something was due to it, seconds."""

    @property
    def behind_s(self) -> float:
        """Due service that it lacks, in seconds at the rate due to it; negative if it is ahead."""
        return self.seconds * (1.0 - self.served / self.due) if self.due > EPSILON else 0.0

    def later(self, factor: float) -> PartyService:
        """Return the counters, decayed by ``factor``."""
        return PartyService(self.served * factor, self.due * factor, self.seconds * factor)


@dataclass(frozen=True)
class PartyStanding:
    """The counters of a party and the resulting factor."""

    party: str
    weight: float
    service: PartyService
    """Its counters."""
    factor: float
    """Factor on its bids."""

    def sentence(self) -> str:
        """Return a sentence for users; empty if its factor is close to 1."""
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
    """Return the weighted max-min fair parts of ``total``. They are in proportion to the weights,
    but no party gets more than its demand; the others get the rest.

    Args:
        demands: party → maximum that it can use.
        weights: party → weight, above 0.
        total: amount to divide. At most the sum of the demands is assigned.
    """
    parts: dict[str, float] = {}
    remaining, weight = total, sum(weights[party] for party in demands)
    # Water-filling: parties in the order in which the rising level meets their demands.
    for party in sorted(demands, key=lambda p: (demands[p] / weights[p], p)):
        party_weight = weights[party]
        parts[party] = min(
            demands[party], remaining * party_weight / weight if weight > EPSILON else remaining
        )
        remaining, weight = remaining - parts[party], weight - party_weight
    return parts


class Shares:
    """The counters of one controller's parties. ``settings``: None without shares; then every
    factor is 1.
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
        """Add the time since the last call to the counters. Call it before anything changes.

        Args:
            admitted: returns the jobs that might have nodes.
            now: time on the shell's clock, seconds.
        """
        if self.settings is None:
            return
        if self._at is None:
            self._at = now
        seconds = now - self._at
        if seconds < MIN_INTERVAL_S:
            return
        self._at = now
        served, demands = self._rates(admitted())
        self._wanting = len(demands)
        weights = {party: self.settings.weight(party) for party in demands}
        due = fair_parts(demands, weights, sum(served.values()))
        factor = 0.5 ** (seconds / self.settings.half_life_s)
        for party in {*self._service, *demands}:
            before = self._service.get(party, PartyService()).later(factor)
            if party not in demands and before.served + before.due < MIN_COUNTER:
                del self._service[party]
                continue
            part = due.get(party, 0.0)
            self._service[party] = PartyService(
                before.served + served.get(party, 0.0) * seconds,
                before.due + part * seconds,
                before.seconds + (seconds if part > EPSILON else 0.0),
            )

    def _rates(self, admitted: Iterable[JobRecord]) -> tuple[dict[str, float], dict[str, float]]:
        """Return two maps: party → weighted nodes of its jobs, and → weighted nodes it could
        use.
        """
        served: dict[str, float] = {}
        demands: dict[str, float] = {}
        jobs = {job.submitted.job: job for job in admitted}
        jobs.update((n, job) for n, job in self._state.at_work.items() if job.nodes)
        for job in jobs.values():
            spec = job.submitted
            class_weight = self._class_weight(job)
            if job.nodes:
                served[spec.party] = served.get(spec.party, 0.0) + class_weight * len(job.nodes)
            max_nodes = max(spec.max_nodes, len(job.nodes))
            demands[spec.party] = demands.get(spec.party, 0.0) + class_weight * max_nodes
        return served, demands

    def _class_weight(self, job: JobRecord) -> float:
        assert self.settings is not None
        classes = self.settings.classes
        if not (classes or self._state.prices) or not job.nodes:
            return 1.0
        node = self._state.nodes.get(job.nodes[0])
        if node is None:
            return 1.0
        node_class = node.pool.node_class
        return classes.get(node_class, self._state.price(node_class))

    # --- what follows ---

    def planned(self, now: float) -> None:
        """Note that a plan was made with the current factors."""
        self._planned_at = now

    def plan_at(self) -> float:
        """Return the time at which changed factors require a plan even if no event occurs; infinite
        while fewer than two parties want nodes.
        """
        if self.settings is None or self._wanting < 2:
            return math.inf
        return self._planned_at + self.settings.double_after_s * MIN_DOUBLINGS_CHANGE

    def weight(self, party: str) -> float:
        """Return the weight of a party."""
        return self.settings.weight(party) if self.settings is not None else 1.0

    def load(self, party: str, begun: bool) -> float:
        """Return the sort key of a party for a place in the queue; the lowest comes first. Parties
        with nodes (``begun``) come first, then those served least for their weight.
        """
        served = self._service.get(party, PartyService()).served
        return -1.0 if begun else served / self.weight(party)

    def factor(self, party: str) -> float:
        """Return the factor on the party's bids."""
        if self.settings is None or party not in self._service:
            return 1.0
        doublings = self._service[party].behind_s / self.settings.double_after_s
        return float(2.0 ** min(MAX_DOUBLINGS, max(-MAX_DOUBLINGS, doublings)))

    def patience(self, party: str) -> float:
        """Return the factor on the time until the party's jobs starve, at least 1. Without it,
        guaranteed turns would return to a party what its lower bids lose.
        """
        return 1.0 / min(1.0, self.factor(party))

    def weigh(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates, with weights multiplied by their parties' factors.

        Shares do not interrupt a job that must not be cut (see :func:`_midway`): its current nodes
        count as much as those of the least served party. Additional nodes count with its own
        party's factor.
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
        """Replace the parties' weights."""
        if self.settings is not None:
            self.settings = replace(self.settings, weights=dict(weights))

    def restore(self, service: Mapping[str, PartyService], at: float) -> None:
        """Restore counters that were stored at the time ``at``."""
        self._service, self._at = dict(service), at

    def services(self) -> dict[str, PartyService]:
        """Return party → counters, which a restart needs."""
        return dict(self._service)

    def standing(self, party: str) -> PartyStanding | None:
        """Return the standing of a party; None without shares."""
        if self.settings is None:
            return None
        return PartyStanding(
            party,
            self.settings.weight(party),
            self._service.get(party, PartyService()),
            self.factor(party),
        )

    def standings(self) -> list[PartyStanding]:
        """Return the standings of all parties that have had jobs, by name."""
        standings = (self.standing(party) for party in sorted(self._service))
        return [each for each in standings if each is not None]


@lru_cache(maxsize=4096)
def discounted(curve: ScalingCurve, nodes: int, part: float) -> ScalingCurve:
    """Return the curve with the gain beyond ``nodes`` nodes multiplied by ``part``."""
    rate_at_nodes = curve.at(nodes)
    sizes, rates = curve.arrays
    rates = np.where(sizes <= nodes, rates, rate_at_nodes + part * (rates - rate_at_nodes))
    if nodes not in sizes:
        position = sizes.searchsorted(nodes)
        sizes, rates = np.insert(sizes, position, nodes), np.insert(rates, position, rate_at_nodes)
    return ScalingCurve.from_arrays(sizes, rates)


def _midway(job: JobRecord) -> bool:
    """Return whether shares must not cut the job: it has nodes, and is profiled or
    ``exempt_from_shares``.
    """
    return bool(job.nodes) and (job.submitted.exempt_from_shares or job.state is JobState.PROFILING)
