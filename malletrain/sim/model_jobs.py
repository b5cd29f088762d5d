"""A model job: what it processes, what a rescale costs it, and what it reports to the controller.

:class:`SimRun` decides when a job processes samples, what it loses, and the cause of each loss. It
decides nothing about nodes: the controller starts, rescales and suspends jobs, and the trace takes
nodes away. Two semantics:

``freetrain`` (arXiv 2106.12091, section 3): starting from zero is free. A rescale costs the old
throughput × its time. A preemption costs the throughput on the remaining nodes × ``down_s``, once
for any number of lost nodes. Both are subtracted at once, and the job continues without a pause.
There are no snapshots and no notice.

``real`` (MalleTrain): during a start, a rescale and after a preemption the job processes nothing.
Without notice, work since the last snapshot is lost (``restart`` mode) or the step under way
(``live`` mode, as long as one node survives). With notice the job takes a snapshot and loses only
the pause. If workers must be restarted before they were up, their pause starts again.

Losses are in samples, as in the bids of :mod:`allocator.valuation`: at the throughput before the
change; for a start, at that after it; for a preemption, at that on the remaining nodes.

Reports have the noise of a measured throughput. MalleTrain's own code measures, profiles and passes
the curves of earlier jobs on. A job that is being profiled reports every :data:`MEASURED_EVERY_S`.
Another job reports only in its first window at each size. A real job reports all the time, but the
throughput of a model job never changes, so later windows would contain nothing new.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from allocator import RescaleCost
from jpa import MeasuredCurve, ModelSize, Prior, RescaleCosts
from malletrain.core import defaults, siblings
from malletrain.core.commands import KeepScalingModel
from malletrain.core.controller import Controller
from malletrain.core.events import PriorSuggested, Progressed
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.siblings import Sibling, SizedJob, suggestions
from malletrain.sim.workloads import SimJob, WorkloadError
from malletrain.training.snapshot_pace import snapshot_every

Semantics = Literal["freetrain", "real"]
Mode = Literal["restart", "live"]
MEASURED_EVERY_S = 0.5
OBSERVED_FOR_S = 45.0
"""A window of 30 s and its warm-up."""
NOISE = 0.02
"""Relative standard deviation of the samples of one report."""
_EXACT = 1e-3
"""Relative standard deviation of revealed curves."""
MAX_CURVES = 200
"""Maximum number of stored curves of earlier jobs; the newest are kept."""


class Cause(str, Enum):
    """Cause of a time in which a job with nodes processes no samples."""

    START = "start"
    RESCALE = "rescale"
    PREEMPTION = "preemption"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class CostModel:
    """The costs in the simulation, in seconds.

    The defaults are measurements on Summit (up 17-19 s, down 11-13 s) and the interval of
    MalleTrain's library (a snapshot per minute).

    Attributes:
        semantics: ``freetrain`` or ``real``, see above.
        up_s: pause of a rescale to more nodes.
        down_s: pause of a rescale to fewer nodes.
        start_s: pause of a start.
        snapshot_every_s: time between two snapshots; the maximum of it if losses are forecast.
        notice_s: time between the notice and the end of a preempted node; 0 for no notice.
        mode: ``restart`` or ``live``; for ``real``.
        step_s: time of a training step, which ``live`` mode loses.
        snapshot_s: time for which a snapshot stops the training.
    """

    semantics: Semantics = "real"
    up_s: float = defaults.RESCALE_UP_S
    down_s: float = defaults.RESCALE_DOWN_S
    start_s: float = defaults.START_S
    snapshot_every_s: float = 60.0
    notice_s: float = 0.0
    mode: Mode = "restart"
    step_s: float = 0.5
    snapshot_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s", "start_s", "notice_s", "step_s", "snapshot_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise WorkloadError(f"The cost {name} is {value}; give seconds, 0 or more.")
        if self.snapshot_s and not self.snapshot_every_s >= 2 * self.snapshot_s:
            raise WorkloadError(
                f"A snapshot of {self.snapshot_s:g} s every {self.snapshot_every_s:g} s leaves no "
                "time to train; take them more rarely."
            )
        if not self.snapshot_every_s >= 0:
            raise WorkloadError(
                f"The time between snapshots is {self.snapshot_every_s}; give seconds, 0 or more."
            )

    def cost_for_planner(self) -> RescaleCost:
        """Return the costs for the planner."""
        return RescaleCost(
            self.up_s, self.down_s, 0.0 if self.semantics == "freetrain" else self.start_s
        )


@dataclass
class KindUse:
    """Use of the slots of one kind by one job."""

    trained_s: float = 0.0
    """Slot-seconds in which the job processed samples."""
    allocated_s: float = 0.0
    """Slot-seconds in which the job had slots, pauses included, except slots that it is leaving."""


class SimRun:
    """One model job in a simulation. Times are of the virtual clock and never decrease.

    Attributes:
        done: samples processed and not lost.
        allocated_s: time with nodes, seconds.
        resumes_at: end of the current pause; None without a pause.
        version: number of changes, by which an outdated completion event is recognised.
        node_s: node-seconds of training (key None) and of pauses by cause, without leaving nodes.
        redone_node_s: node-seconds of training whose work was lost.
        lost: lost samples by cause.
        longest_wait_s: longest time as an admitted job without nodes, seconds.
        emptied_at: time at which it last lost its last node.
        kind: kind of the slots that it has.
        use: kind → use of its slots.
    """

    __slots__ = (
        "allocated_s",
        "cause",
        "costs",
        "done",
        "emptied_at",
        "ended_at",
        "first_start",
        "job",
        "kind",
        "leaving",
        "longest_wait_s",
        "lost",
        "node_s",
        "nodes",
        "pause_rate",
        "preemptions",
        "rate",
        "rates",
        "redone_node_s",
        "rescales",
        "resumes_at",
        "saved_at",
        "since",
        "snapshot_every_s",
        "starting",
        "starts",
        "training",
        "training_since",
        "use",
        "version",
    )

    def __init__(self, job: SimJob, rates: Sequence[float], costs: CostModel) -> None:
        self.job = job
        self.rates = rates
        self.costs = costs
        self.nodes: set[str] = set()
        self.leaving = 0
        self.done = 0.0
        self.allocated_s = 0.0
        self.rate = 0.0
        self.training = False
        self.since = 0.0
        self.cause: Cause | None = None
        self.pause_rate = 0.0
        self.resumes_at: float | None = None
        self.starting = False
        self.training_since = 0.0
        self.version = 0
        self.snapshot_every_s = costs.snapshot_every_s
        self.saved_at = 0.0
        self.lost = dict.fromkeys(Cause, 0.0)
        self.node_s: dict[Cause | None, float] = {None: 0.0, **dict.fromkeys(Cause, 0.0)}
        self.redone_node_s = 0.0
        self.starts = self.rescales = self.preemptions = 0
        self.first_start: float | None = None
        self.longest_wait_s = 0.0
        self.emptied_at = 0.0
        self.ended_at: float | None = None
        self.kind = ""
        self.use: defaultdict[str, KindUse] = defaultdict(KindUse)

    # --- time ---

    def accrue(self, now: float) -> None:
        """Add the samples, losses and node-seconds since the last change of state."""
        dt = now - self.since
        if dt > 0 and self.nodes:
            self.allocated_s += dt
            offered = len(self.nodes) - self.leaving
            use = self.use[self.kind]
            use.allocated_s += offered * dt
            if self.training:
                use.trained_s += offered * (1.0 - self.saving) * dt
                saving = self.saving
                self.done += self.rate * (1.0 - saving) * dt
                self.node_s[None] += offered * (1.0 - saving) * dt
                self.lost[Cause.SNAPSHOT] += self.rate * saving * dt
                self.node_s[Cause.SNAPSHOT] += offered * saving * dt
            elif self.cause is not None:
                self.lost[self.cause] += self.pause_rate * dt
                self.node_s[self.cause] += offered * dt
        self.since = now

    def done_at(self) -> float:
        """Return the time of completion if nothing changes; infinite while no samples are
        processed.
        """
        if not self.training or self.rate <= 0:
            return math.inf
        rate = self.rate * (1.0 - self.saving)
        return self.since + max(0.0, self.job.samples - self.done) / rate

    @property
    def saving(self) -> float:
        """Fraction of the time in which snapshots are taken."""
        return self.costs.snapshot_s / self.snapshot_every_s if self.costs.snapshot_s else 0.0

    # --- commands of the controller ---

    def start(self, nodes: Sequence[str], now: float) -> None:
        """Start on ``nodes``; the job had none."""
        self.accrue(now)
        self.starts += 1
        self.first_start = now if self.first_start is None else self.first_start
        self._seat(nodes)
        if self.costs.semantics == "freetrain":
            self._train(now)
        else:
            self.starting = True
            self._pause(Cause.START, self.rate, self.costs.start_s, now)

    def waited(self, since: float | None, now: float) -> None:
        """Update the longest wait. ``since``: time since which the job is admitted; None if it is
        not. It has had no nodes until ``now``.
        """
        if since is not None:
            waited = now - max(since, self.emptied_at)
            self.longest_wait_s = max(self.longest_wait_s, waited)

    def rescale(self, nodes: Sequence[str], now: float) -> None:
        """Move to exactly ``nodes``, some of which the job has."""
        self.accrue(now)
        before, rate, forced = (
            len(self.nodes),
            self.rate,
            self.cause is Cause.PREEMPTION or self.leaving > 0,
        )
        moved = self.nodes != set(nodes)
        self.rescales += moved
        pause_rate = rate if self.training else self.pause_rate
        self._seat(nodes)
        seconds = self.costs.up_s if len(nodes) > before else self.costs.down_s
        if self.costs.semantics == "freetrain":
            if moved:
                self._charge(Cause.RESCALE, rate, seconds, before)
            self._train(now)
            return
        cause = Cause.PREEMPTION if forced else Cause.START if self.starting else Cause.RESCALE
        self._pause(cause, pause_rate, self.costs.start_s if self.starting else seconds, now)

    def suspend(self, now: float) -> None:
        """Release all nodes. If it has any, the job loses no work."""
        self.accrue(now)
        self._seat(())
        self._idle()

    def resumed(self, now: float) -> None:
        """End the pause: samples are processed from now on."""
        self.accrue(now)
        self._train(now)

    def ended(self, now: float) -> None:
        """End the job, whether its work is done or not."""
        self.accrue(now)
        self.done = min(self.done, self.job.samples)
        self.ended_at = now
        self._seat(())
        self._idle()

    def expects_loss(self, in_s: float, now: float) -> None:
        """Adapt the snapshot interval to a loss of a node that is expected in ``in_s`` seconds on
        average.
        """
        if self.costs.semantics == "freetrain":
            return
        self.accrue(now)
        if self.training:
            self.saved_at = now - self._unsaved_s(now)
            self.version += 1
        max_interval_s = self.costs.snapshot_every_s
        self.snapshot_every_s = snapshot_every(self.costs.snapshot_s, in_s, max_interval_s)

    # --- events of the trace ---

    def leaves(self, now: float) -> None:
        """Note that one of the nodes got a notice of preemption."""
        self.accrue(now)
        if self.leaving == 0:
            self.preemptions += 1
        self.leaving += 1

    def loses(self, nodes: Sequence[str], now: float) -> None:
        """Remove lost nodes."""
        self.accrue(now)
        announced, before = self.leaving > 0, len(self.nodes)
        self.nodes.difference_update(nodes)
        self.leaving = max(0, self.leaving - len(nodes))
        self.preemptions += not announced
        if self.training and self.costs.semantics == "real":
            self._lose_work(now, before)
        self.rate = self.pause_rate = self.rates[len(self.nodes)]
        if self.costs.semantics == "freetrain":
            self._charge(Cause.PREEMPTION, self.rate, self.costs.down_s, len(self.nodes))
            self.version += 1
        else:
            self._stop(Cause.PREEMPTION)
        if not self.nodes:
            self._idle()

    # --- steps ---

    def _lose_work(self, now: float, nodes: int) -> None:
        if self.costs.mode == "live" and self.nodes:
            seconds = min(self.costs.step_s, now - self.training_since)
        else:
            seconds = self._unsaved_s(now)
        lost = min(self.rate * seconds, self.done)
        self.done -= lost
        self.lost[Cause.PREEMPTION] += lost
        self.redone_node_s += nodes * seconds

    def _unsaved_s(self, now: float) -> float:
        """Return the time since the last snapshot, seconds."""
        trained, interval_s = now - self.saved_at, self.snapshot_every_s
        return (
            trained % interval_s
            if 0 < interval_s < math.inf
            else 0.0
            if interval_s == 0
            else trained
        )

    def _charge(self, cause: Cause, rate: float, seconds: float, nodes: int) -> None:
        self.done -= rate * seconds
        self.lost[cause] += rate * seconds
        self.use[self.kind].trained_s -= nodes * seconds
        self.node_s[None] -= nodes * seconds
        self.node_s[cause] += nodes * seconds

    def _seat(self, nodes: Sequence[str]) -> None:
        self.nodes = set(nodes)
        self.leaving = 0
        self.rate = self.rates[len(nodes)]

    def _train(self, now: float) -> None:
        self.training, self.cause, self.resumes_at = bool(self.nodes), None, None
        self.starting, self.training_since, self.saved_at = False, now, now
        self.version += 1

    def _pause(self, cause: Cause, rate: float, seconds: float, now: float) -> None:
        self._stop(cause)
        self.pause_rate = rate
        self.resumes_at = now + seconds

    def _stop(self, cause: Cause) -> None:
        self.training, self.cause, self.resumes_at = False, cause, None
        self.version += 1

    def _idle(self) -> None:
        self.emptied_at = self.since
        self.starting = False
        self.training, self.cause, self.resumes_at, self.rate = False, None, None, 0.0
        self.version += 1


@dataclass
class _Round:
    """The reports of a job in its current round."""

    version: int
    began: float
    samples: float = 0.0
    at: float = 0.0


class Memory:
    """A :class:`malletrain.core.siblings.SiblingStorage` of the newest curves."""

    def __init__(self) -> None:
        self._newest: dict[str, Sibling] = {}

    def put(self, sibling: Sibling) -> None:
        """Store it."""
        self._newest.pop(sibling.key, None)
        self._newest[sibling.key] = sibling
        if len(self._newest) > MAX_CURVES:
            del self._newest[next(iter(self._newest))]

    def of_key(self, key: str) -> Sibling | None:
        """Return the newest of this key; None if there is none."""
        return self._newest.get(key)

    def others(self, key: str) -> list[Sibling]:
        """Return those of other keys, the newest first."""
        return [sibling for sibling in reversed(self._newest.values()) if sibling.key != key]


class Reports:
    """The reports of all jobs of one simulation.

    Args:
        seed: seed of the noise.
        revealed: whether a job's true curve becomes known when it first runs.
        sized: whether the size of a job's model is known before it runs (:class:`SimSettings`).
    """

    def __init__(self, seed: int, *, revealed: bool = False, sized: bool = False) -> None:
        self._revealed = revealed
        self._sized = sized
        self._rng = np.random.default_rng((seed, 2))
        self._rounds: dict[str, _Round] = {}
        self._seen: dict[str, set[int]] = {}
        self._curves = Memory()
        self._introduced: set[str] = set()
        self.news = False
        """Whether curves or waiting jobs have changed since the last call of
        :meth:`for_waiting`.
        """

    def due(self, run: SimRun, now: float, *, profiled: bool) -> float | None:
        """Return the time of the next report; None if the job has nothing new to report.

        Args:
            run: a job that processes samples from now on.
            now: time of the virtual clock, seconds.
            profiled: whether the job is being profiled.
        """
        if profiled:
            return now + MEASURED_EVERY_S
        return (
            now + OBSERVED_FOR_S if len(run.nodes) not in self._seen.get(run.job.name, ()) else None
        )

    def report(self, run: SimRun, now: float) -> list[Progressed]:
        """Return the job's reports at this time: samples since its round began, on all its
        nodes.
        """
        name, nodes = run.job.name, len(run.nodes)
        current = self._rounds.get(name)
        events = []
        if current is None or current.version != run.version:
            current = self._rounds[name] = _Round(
                run.version, run.training_since, at=run.training_since
            )
            events.append(Progressed(name, nodes, current.began, 0.0, run.job.batch))
        # Several equal steps in between, so that one late report is a window of several.
        steps = max(1, math.ceil((now - current.at) / 5.0))
        for k in range(1, steps + 1):
            at = current.at + (now - current.at) * k / steps
            step = (at - (current.at + (now - current.at) * (k - 1) / steps)) * run.rate
            current.samples += max(0.0, step * (1 + NOISE * float(self._rng.standard_normal())))
            events.append(Progressed(name, nodes, at, current.samples, run.job.batch))
        current.at = now
        if now - current.began >= OBSERVED_FOR_S * (1 - 1e-9):
            self._seen.setdefault(name, set()).add(nodes)
        return events

    def keep(self, job: SimJob, command: KeepScalingModel) -> None:
        """Store the scaling model of a job for later jobs of its kind."""
        sibling = Sibling(kind_of(job), job.name, command.scaling, _size(job))
        self.news = siblings.keep(self._curves, sibling) or self.news

    def starts_with(self, job: SimJob) -> ScalingModel | None:
        """Return the scaling model of a job at its submission: the newest curve of its own model;
        else, if its owner stated the model's size, a prior from models of other sizes; else None.
        """
        if not job.model:
            return None
        scaling = siblings.starts_with(self._curves, kind_of(job))
        if scaling is None and self._sized and job.parameters is not None:
            return siblings.suggested(self._curves, kind_of(job), _size(job), RescaleCosts())
        return scaling

    def for_waiting(
        self, controller: Controller, runs: Mapping[str, SimRun]
    ) -> list[PriorSuggested]:
        """Return priors for waiting jobs whose owners stated the size of their models, as in the
        daemon.
        """

        def sized(name: str) -> SizedJob | None:
            job = runs[name].job
            if job.parameters is None:
                return None
            return SizedJob(kind_of(job), _size(job), self._curves, RescaleCosts())

        due, self.news = self.news and self._sized, False
        unfinished, max_jobs = controller.state.unfinished.values(), controller.queue.max_running
        return suggestions(unfinished, max_jobs, sized) if due else []

    def described(self, job: SimJob) -> PriorSuggested | None:
        """Return a prior from jobs with similar models, once the job's workers have reported the
        model's size. Return it only in the first call for the job.
        """
        if job.name in self._introduced or (job.parameters is None and not self._revealed):
            return None
        self._introduced.add(job.name)
        if self._revealed:
            points = tuple((k, rate) for k, rate in job.curve.points if k and rate > 0)
            exact = Prior(points, level_std=_EXACT, shape_std=_EXACT, source="the simulator")
            return PriorSuggested(job.name, ScalingModel(MeasuredCurve.from_prior(exact)))
        scaling = siblings.suggested(self._curves, kind_of(job), _size(job), RescaleCosts())
        return PriorSuggested(job.name, scaling) if scaling else None


def kind_of(job: SimJob) -> str:
    """Return the kind of a job: that of its model, or of its model's size if it has one."""
    return (
        job.model
        if job.parameters is None
        else f"{job.model} {job.parameters:.0f} {job.flops or 0:.0f}"
    )


def _size(job: SimJob) -> ModelSize:
    return ModelSize(job.parameters, job.flops)
