"""What a change of scale costs a model job, and the model job itself.

Decides when a job processes samples, what it loses and on whose account that goes. It decides
nothing about nodes: the controller says start, rescale, suspend; the trace says that a node is
gone. Two semantics:

``freetrain`` (arXiv 2106.12091, section 3): starting from zero is free; a rescale costs the old
throughput × its time, a preemption the throughput of what is left × ``down_s``, once however many
nodes are lost. Both are taken off at once and the job goes on without a pause. There are no
snapshots and no notice in this world.

``real`` (the product): during a start, a rescale and after a preemption the job processes nothing.
Without notice, work since the last snapshot is lost (``restart`` mode) or the step under way
(``live`` mode, as long as one node survives). With notice the job takes a snapshot and loses
nothing but the pause. Workers that have to be restarted before they were up begin their pause anew.

Losses are in samples, at the throughput the job had before, as in the bids of
:mod:`allocator.valuation` (a start: will have; a preemption: has with the nodes that are left).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from allocator import RescaleCost
from malletrain.core import defaults
from malletrain.sim.workloads import SimJob, WorkloadError
from malletrain.training.pace import snapshot_every

Semantics = Literal["freetrain", "real"]
Mode = Literal["restart", "live"]


class Cause(str, Enum):
    """Why a job with nodes processes no samples."""

    START = "start"
    RESCALE = "rescale"
    PREEMPTION = "preemption"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class CostModel:
    """The costs of the simulated world, in seconds.

    ``up_s``, ``down_s``, ``start_s``: pause of a growth, of a shrinkage, of a start from nothing.
    ``snapshot_every_s``: time between two snapshots of a training job; where a loss is foretold, at
    most. ``snapshot_s``: how long one stops the training. ``notice_s``: how long before it goes a
    preempted node says so (0: not at all). ``step_s``: one training step, which is what ``live``
    mode loses. The defaults are what Summit showed (up 17-19 s, down 11-13 s) and what the
    product's library does (a snapshot a minute).
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

    @property
    def work_at_risk_s(self) -> float:
        """Work that a node takes with it when it goes without notice, seconds, on average."""
        if self.semantics != "real" or self.notice_s > 0:
            return 0.0
        if self.mode == "live":
            return self.step_s
        return min(self.snapshot_every_s / 2, defaults.LOST_WORK_S * 10)

    def cost_for_planner(self) -> RescaleCost:
        """The same costs in the planner's words."""
        return RescaleCost(
            self.up_s, self.down_s, 0.0 if self.semantics == "freetrain" else self.start_s
        )


class SimRun:
    """One model job while it is simulated. Times are of the virtual clock and never go back.

    ``done``: samples processed and not lost. ``resumes_at``: when the pause under way ends (None:
    none is). ``version`` counts changes, so that a completion foreseen earlier is known to be out
    of date. ``node_s``: node-seconds spent training (key None) and in pauses, by cause, on nodes
    that the main scheduler does not want; ``redone_node_s``: of those spent training, the ones
    whose work was lost; ``lost``: samples, by cause. ``longest_wait_s``: longest time with a place
    and without nodes; ``emptied_at``: when it last lost its last node.
    """

    __slots__ = (
        "cause",
        "costs",
        "done",
        "emptied_at",
        "ended_at",
        "first_start",
        "job",
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
        "version",
    )

    def __init__(self, job: SimJob, rates: Sequence[float], costs: CostModel) -> None:
        self.job = job
        self.rates = rates
        self.costs = costs
        self.nodes: set[str] = set()
        self.leaving = 0
        self.done = 0.0
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

    # --- time ---

    def accrue(self, now: float) -> None:
        """Count what happened since the last change of state."""
        dt = now - self.since
        if dt > 0 and self.nodes:
            offered = len(self.nodes) - self.leaving
            if self.training:
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
        """When the work is done if nothing changes any more, infinite while nothing is
        processed.
        """
        if not self.training or self.rate <= 0:
            return math.inf
        rate = self.rate * (1.0 - self.saving)
        return self.since + max(0.0, self.job.samples - self.done) / rate

    @property
    def saving(self) -> float:
        """The share of the time in which snapshots are taken."""
        return self.costs.snapshot_s / self.snapshot_every_s if self.costs.snapshot_s else 0.0

    # --- what the controller says ---

    def start(self, nodes: Sequence[str], now: float) -> None:
        """Run on ``nodes``; the job had none."""
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
        """It has had a place since then (None: it has none yet), and has no nodes up to now."""
        if since is not None:
            waited = now - max(since, self.emptied_at)
            self.longest_wait_s = max(self.longest_wait_s, waited)

    def rescale(self, nodes: Sequence[str], now: float) -> None:
        """Go to exactly ``nodes``, some of which the job has."""
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
        """Let go of all nodes; with nodes still there, in an orderly way."""
        self.accrue(now)
        self._seat(())
        self._idle()

    def resumed(self, now: float) -> None:
        """The pause is over: samples are processed."""
        self.accrue(now)
        self._train(now)

    def ended(self, now: float) -> None:
        """The work is done, or will not be done any more."""
        self.accrue(now)
        self.done = min(self.done, self.job.samples)
        self.ended_at = now
        self._seat(())
        self._idle()

    def expects_loss(self, in_s: float, now: float) -> None:
        """A node will be lost within so many seconds on average: save as often as that is worth."""
        if self.costs.semantics == "freetrain":
            return
        self.accrue(now)
        if self.training:
            self.saved_at = now - self._unsaved_s(now)
            self.version += 1
        most = self.costs.snapshot_every_s
        self.snapshot_every_s = snapshot_every(self.costs.snapshot_s, in_s, most)

    # --- what the trace says ---

    def leaves(self, now: float) -> None:
        """One of the nodes says that it will be taken."""
        self.accrue(now)
        if self.leaving == 0:
            self.preemptions += 1
        self.leaving += 1

    def loses(self, nodes: Sequence[str], now: float) -> None:
        """These nodes are gone."""
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
        """How long ago the last snapshot was, seconds."""
        trained, every = now - self.saved_at, self.snapshot_every_s
        return trained % every if 0 < every < math.inf else 0.0 if every == 0 else trained

    def _charge(self, cause: Cause, rate: float, seconds: float, nodes: int) -> None:
        self.done -= rate * seconds
        self.lost[cause] += rate * seconds
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
