"""Whether a job is worth a profile, from what the controller knows of it and of its neighbours.
Pure.

Decides what a node is worth elsewhere, how long a job goes on yet, and when it can be asked at all:
once it has run for a while, so that its own level, and what its siblings say, is known. The
arithmetic is :mod:`jpa.worth`.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median

from jpa.worth import Circumstances, pays
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import named
from malletrain.core.settings import ProfilingSettings
from scavenger.horizon import SurvivalEstimator

USUAL_S = 4 * 3600.0
"""How long a job is taken to train until the site's own have ended."""
_LOOKED_AT = 12
"""Sizes whose worth is looked at."""


class ProfileWorth:
    """What is remembered of the jobs of one controller: how long they last."""

    def __init__(self, settings: ProfilingSettings) -> None:
        self._settings = settings
        self._lengths = SurvivalEstimator(prior_mean_s=USUAL_S, prior_weight=1.0, half_life=200.0)
        self._began: dict[str, float] = {}
        self._found: dict[str, tuple[object, bool]] = {}

    def began(self, job: str, now: float) -> None:
        """The job processes samples."""
        self._began.setdefault(job, now)

    def ended(self, job: str, now: float, *, done: bool) -> None:
        """The job has ended; ``done``: its work is."""
        self._found.pop(job, None)
        since = self._began.pop(job, None)
        if since is not None:
            self._lengths.observe(now - since, ended=done)

    def left_s(self, job: str, now: float) -> float:
        """How long the job goes on yet, seconds, by how long others lasted."""
        return self._lengths.expected_remaining(now - self._began.get(job, now))

    def ready(self, job: JobRecord) -> bool:
        """Whether its worth can be told: it runs, and something is known of it."""
        points = job.scaling.curve.current.points
        return bool(job.nodes) and any(p.rate > 0 for p in points)

    def pays(self, job: JobRecord, others: Iterable[JobRecord], now: float) -> bool:
        """Whether a profile of the running job is expected to pay. Looked at anew every minute, and
        when something was learned.
        """
        asked = (job.scaling.curve, len(job.nodes), int(now / 60.0))
        found = self._found.get(job.submitted.job)
        if found is None or found[0] != asked:
            found = self._found[job.submitted.job] = (asked, self._pays(job, others, now))
        return found[1]

    def _pays(self, job: JobRecord, others: Iterable[JobRecord], now: float) -> bool:
        spec, curve, costs = job.submitted, job.scaling.curve, job.scaling.costs
        sizes = job.sizes or range(spec.min_nodes, spec.max_nodes + 1)
        looked = named(sizes, ())
        looked = looked[:: max(1, len(looked) // _LOOKED_AT)] + looked[-1:]
        advisor = self._settings.advisor
        price, neighbour = _elsewhere(job, others)
        around = Circumstances(
            nodes=len(job.nodes),
            price=price,
            neighbour=neighbour,
            left_s=self.left_s(spec.job, now),
            up_s=costs.up_s,
            down_s=costs.down_s,
            visit_s=2.0 * advisor.measure.min_seconds,
            visits=min(len(looked), advisor.plan.max_steps),
        )
        return pays(curve, sorted(set(looked)), around)


def _elsewhere(job: JobRecord, others: Iterable[JobRecord]) -> tuple[float, float]:
    """What a node brings elsewhere, and what another job does with all of its nodes: of the other
    jobs that run the median and the mean, by this job's weight; nothing where none does.
    """
    each, whole = [], []
    for other in others:
        held = len(other.nodes)
        if other is not job and held and other.curve is not None:
            whole.append(other.submitted.weight * other.curve.at(held))
            each.append(whole[-1] / held)
    weight = max(job.submitted.weight, 1e-9)
    return (median(each) / weight, fmean(whole) / weight) if each else (0.0, 0.0)
