"""The decision core: a state machine, ``handle(event, now) -> [command]``. No I/O, no clock, no
threads.

Decides when to plan (node events close together lead to one plan), which commands follow from a
plan, how many leases to take, which to release, and when a job has finally failed. It does not
decide how many nodes a job gets (:mod:`malletrain.core.planning`, :mod:`allocator`) nor how a
rescale is carried out (:mod:`malletrain.rounds`). The daemon and the simulator are its two shells.

Invariants, tested with random sequences of events:

* A node belongs to at most one job, and no job has more nodes than its maximum.
* A job with fewer nodes than its minimum is suspended by the next plan and keeps its place in the
  queue. It does not fail.
* A node that is leaving or gone is in no new plan.
* A job has nodes of its owner's leases only.
* Jobs are admitted in order of submission, the owners in rotation. Jobs that could not run on the
  present nodes are skipped.
* An admitted job that has had no nodes for long has its minimum guaranteed for a while.

If a daemon serves several owners (:mod:`malletrain.core.pools`), it plans twice. In the first plan
every job can get every node; it decides for which owners leases are taken and reclaimed. In the
second plan each job can get only its owner's nodes; it decides what runs now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from malletrain.core.bidders import Bidders
from malletrain.core.commands import Command, ReleaseLeases, Stop
from malletrain.core.events import (
    BatchReported,
    CurveChanged,
    DataCached,
    Event,
    ForecastsUpdated,
    GapsSeen,
    JobCancelled,
    JobCompleted,
    JobState,
    JobSubmitted,
    LayoutDue,
    LayoutFound,
    LeaseDeferred,
    LeaseNotTaken,
    LeaseUnheard,
    LimitsChanged,
    ModelChanged,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    NodeRejected,
    NodesBusy,
    PricesChanged,
    PriorSuggested,
    Progressed,
    RescaleCostMeasured,
    RescaleFinished,
    RoundInterrupted,
    SoftwareLacking,
    StartCostChanged,
    Tick,
    WeightChanged,
    WorkersFailed,
    WorkersStarted,
)
from malletrain.core.gaps import Gaps, least_horizon_s
from malletrain.core.goal_keeper import GoalKeeper
from malletrain.core.goals import GoalsChanged, WorkReported
from malletrain.core.lease_planner import LeasePlanner
from malletrain.core.loss_forecast import LossForecasts
from malletrain.core.planning import Plan, Planner, make_plan, plan_each_trainer
from malletrain.core.pools import Trainers
from malletrain.core.profile_runner import ProfileRunner
from malletrain.core.queueing import AdmissionQueue
from malletrain.core.records import JobRecord, NodeRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.shares import Quotas, Shares
from malletrain.core.state import ControllerState

__all__ = ["Controller", "ControllerSettings", "JobRecord", "NodeRecord"]

_AT_WORK = (JobState.RUNNING, JobState.PROFILING)


class Controller:
    """The state machine. Only :meth:`handle`, :meth:`handle_all` and :meth:`hold` change it; the
    other public methods read it.
    """

    def __init__(
        self, settings: ControllerSettings | None = None, planner: Planner = make_plan
    ) -> None:
        self.settings = s = settings or ControllerSettings()
        self.state = ControllerState(s.release_after_s, s.due_s)
        self.profiles = ProfileRunner(self.state, s)
        self.last_plan: Plan | None = None
        self.trainers = Trainers(s.trainers)
        self._planner = planner = partial(plan_each_trainer, planner) if s.trainers else planner
        self.gaps = Gaps(least_horizon_s(s), s.lease_wait_s, s.rejected_s, s.whole_host_classes)
        self.goals = GoalKeeper(self.state, self.gaps, s)
        self.shares = Shares(self.state, s.shares)
        self.queue = AdmissionQueue(
            self.state,
            self.gaps,
            s.planning.max_running,
            s.starvation_s,
            self.shares if s.shares is not None else None,
            self.trainers,
            s.turns_apart,
            s.planning.start_pays,
        )
        self.quotas = Quotas(self.state)
        self._bidders = Bidders(
            self.state,
            self.gaps,
            self.queue,
            self.profiles,
            self.goals,
            self.shares,
            self.quotas,
            self.trainers,
            s,
        )
        self._leases = LeasePlanner(self.state, self.gaps, self._bidders, planner, s)
        self._losses = LossForecasts(self.state)
        self._hold_until = 0.0
        self._table: dict[type, Callable[[Any, float], Iterable[Command]]] = {
            NodeJoined: self._node_joined,
            NodeLeaving: self._node_leaving,
            NodeLost: self._node_lost,
            NodeRejected: self._node_rejected,
            GapsSeen: self._gaps_seen,
            PricesChanged: self._prices_changed,
            ForecastsUpdated: self._forecasts_updated,
            LeaseNotTaken: self._lease_not_taken,
            LeaseDeferred: self._lease_deferred,
            LeaseUnheard: self._lease_unheard,
            JobSubmitted: self._job_submitted,
            JobCompleted: lambda event, now: self._end(event.job, JobState.COMPLETED, "", now),
            WorkersFailed: self._workers_failed,
            SoftwareLacking: lambda event, now: self._end(
                event.job, JobState.FAILED, event.reason, now
            ),
            RoundInterrupted: self._round_interrupted,
            JobCancelled: lambda event, now: self._end(
                event.job, JobState.CANCELLED, event.reason, now
            ),
            WeightChanged: self._weight_changed,
            LimitsChanged: self._limits_changed,
            CurveChanged: self._curve_changed,
            StartCostChanged: self._start_cost_changed,
            DataCached: self._data_cached,
            NodesBusy: self._nodes_busy,
            RescaleFinished: self._rescale_finished,
            LayoutDue: self._layout_due,
            LayoutFound: self._layout_found,
            Progressed: self.profiles.progressed,
            RescaleCostMeasured: self.profiles.rescale_cost_measured,
            WorkersStarted: self.profiles.workers_started,
            PriorSuggested: self.profiles.prior_suggested,
            ModelChanged: self.profiles.model_changed,
            BatchReported: self.profiles.batch_reported,
            GoalsChanged: self.goals.changed,
            WorkReported: self.goals.reported,
            Tick: lambda event, now: (),
        }

    # --- reading ---

    @property
    def jobs(self) -> dict[str, JobRecord]:
        """All jobs ever submitted, by name."""
        return self.state.jobs

    @property
    def nodes(self) -> dict[str, NodeRecord]:
        """The leased nodes, by name."""
        return self.state.nodes

    @property
    def plans(self) -> int:
        """Number of plans made so far."""
        return self.state.plans

    def next_wakeup(self) -> float | None:
        """Return the time at which to send a Tick if no event occurs before; None for never."""
        state = self.state
        again_at = self._leases.again_at
        due = [again_at] if state.leases_due else []
        if state.plan_at is not None:
            due.append(state.plan_at)
        else:
            due += [max(state.nodes[name].review_at, again_at) for name in state.idle]
        if (profile := self.profiles.next_wakeup()) is not None:
            due.append(profile)
        due += [*self.queue.wakeups(), self.shares.plan_at()]
        wakeup_times = [*(max(at, self._hold_until) for at in due), *self.goals.wakeups()]
        return min(wakeup_times) if wakeup_times and min(wakeup_times) < math.inf else None

    # --- events in, commands out ---

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle one event and return the commands that follow, in order.

        Events about unknown nodes are ignored, because they may be late.

        Args:
            event: what happened.
            now: time on the shell's clock, not before that of the previous call.

        Raises:
            KeyError: the event is about a job that was never submitted.
        """
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """Handle events of one instant like :meth:`handle`, with at most one plan for all."""
        self.shares.count(self.queue.in_reach, now)
        commands = [command for event in events for command in self._table[type(event)](event, now)]
        commands += self.goals.notice(now)
        if now < self._hold_until:
            return commands
        self.queue.notice(now)
        if now >= self.shares.plan_at():
            self.state.plan_soon(now)
        if self.state.plan_at is not None and now >= self.state.plan_at:
            commands += self._plan(now)
        elif (due := self.profiles.next_wakeup()) is not None and now >= due:
            commands += self._review_profiles(now)
        commands += self._leases.review(now)
        self.goals.settle(now)
        return commands

    def hold(self, until: float) -> None:
        """Make no plan and check no waiting job before ``until``. After a restart, leases and jobs
        return one by one, and each would cause a scan of all jobs.
        """
        self._hold_until = until
        self.state.plan_soon(until)

    # --- nodes ---

    def _node_joined(self, event: NodeJoined, now: float) -> Iterable[Command]:
        self._node_gone(event.node, now)
        self.gaps.joined(event.node, event.owner)
        self._leases.joined(event.node, event.owner, now)
        self.state.node_joined(event, now)
        others_coming = self.gaps.comes(self.nodes, event.owner)
        others_coming = others_coming and not self.queue.all_awaited(event.owner)
        wait = max(self.settings.debounce_s, self.settings.arrival_s if others_coming else 0.0)
        self.state.plan_soon(now + wait)
        return ()

    def _node_leaving(self, event: NodeLeaving, now: float) -> Iterable[Command]:
        if event.node in self.nodes and self.state.node_leaving(event.node, now + event.notice_s):
            self.state.plan_soon(now + self.settings.notice_wait(event.notice_s))
        return ()

    def _node_lost(self, event: NodeLost, now: float) -> Iterable[Command]:
        self.gaps.over(event.node)
        self._node_gone(event.node, now)
        return ()

    def _node_rejected(self, event: NodeRejected, now: float) -> Iterable[Command]:
        node = self.nodes.get(event.node)
        if node is None:
            return ()
        self._node_gone(event.node, now, breaks=False)  # the job's rounds continue without it
        self.gaps.rejected(event.node, node.owner, now)
        return [ReleaseLeases((event.node,))]

    def _node_gone(self, name: str, now: float, *, breaks: bool = True) -> None:
        if self.state.node_gone(name, breaks=breaks) is not None:
            self.state.plan_soon(now + self.settings.debounce_s)
            if breaks:
                self._plan_at_once(now)

    def _prices_changed(self, event: PricesChanged, now: float) -> Iterable[Command]:
        self.state.prices, self.state.unpriced = event.prices, event.unknown
        self.goals.repriced()
        return ()

    def _gaps_seen(self, event: GapsSeen, now: float) -> Iterable[Command]:
        self.gaps.seen(event.gaps, now, event.max_new_leases)
        self.state.leases_due = True
        return ()

    def _forecasts_updated(self, event: ForecastsUpdated, now: float) -> Iterable[Command]:
        self.state.forecasts_updated(event.nodes)
        return ()

    def _lease_not_taken(self, event: LeaseNotTaken, now: float) -> Iterable[Command]:
        self.gaps.refused(event.node, event.owner, now, event.failure)
        return ()

    def _lease_deferred(self, event: LeaseDeferred, now: float) -> Iterable[Command]:
        self.gaps.put_off(event.node, event.owner)
        return ()

    def _lease_unheard(self, event: LeaseUnheard, now: float) -> Iterable[Command]:
        self.gaps.rejected(event.node, event.owner, now)
        if event.failure:
            self.gaps.failed_starts.failed(event.owner, event.node, event.failure, now)
        return ()

    # --- jobs ---

    def _job_submitted(self, event: JobSubmitted, now: float) -> Iterable[Command]:
        job = self.state.submit(event)
        self.profiles.submitted(job, event.scaling)
        self.goals.submitted(job, event, now)
        if not job.state.ended:
            self._bids_changed(now)
        return ()

    def _weight_changed(self, event: WeightChanged, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        self.state.weigh(job, event.weight)
        if not job.state.ended:
            self._bids_changed(now)
        return ()

    def _workers_failed(self, event: WorkersFailed, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.state.ended:
            return ()
        counts = not self.profiles.blames_size(job)
        self.state.workers_failed(job, now, self.settings.retry_window_s, counts=counts)
        if job.tries >= self.settings.max_tries:
            return self._end(event.job, JobState.FAILED, event.reason, now)
        self.state.break_round(job, now)
        return self.profiles.crashed(job, now)

    def _round_interrupted(self, event: RoundInterrupted, now: float) -> Iterable[Command]:
        self.state.break_round(self.jobs[event.job], now)
        return ()

    def _limits_changed(self, event: LimitsChanged, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.state.ended or self.profiles.holds(job):
            return ()
        self.state.limit(job, event.min_nodes, event.max_nodes)
        self._bids_changed(now)
        return self.profiles.limited(job, now)

    def _curve_changed(self, event: CurveChanged, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        self.state.value_nodes(
            job, event.curve, event.cost or job.cost, returns_useless=event.returns_useless
        )
        if not job.state.ended:
            self._bids_changed(now)
        return ()

    def _start_cost_changed(self, event: StartCostChanged, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        self.state.start_costs(job, event.start)
        if not job.state.ended:
            self._bids_changed(now)
        return ()

    def _data_cached(self, event: DataCached, now: float) -> Iterable[Command]:
        self.state.data_cached(self.jobs[event.job], event.reread_s)
        return ()

    def _nodes_busy(self, event: NodesBusy, now: float) -> Iterable[Command]:
        self.state.nodes_busy(self.jobs[event.job], event.nodes)
        return ()

    def _rescale_finished(self, event: RescaleFinished, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if not self.state.rescaled(job, now):
            return ()
        if job.planned != self.plans:  # a plan made meanwhile could not change it
            wait = max(self.settings.debounce_s, self.settings.min_interval_s)
            self.state.plan_soon(now + wait)
        return [*self.profiles.rescaled(job, now), *self._losses.resumed(job)]

    def _layout_due(self, event: LayoutDue, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        busy = job.rescaling or job.broken or not job.nodes or self.profiles.holds(job)
        if job.state.ended or busy or not self.state.none_leaves(job.nodes):
            return ()
        return self.state.change_layout(job, now)

    def _layout_found(self, event: LayoutFound, now: float) -> Iterable[Command]:
        job = self.jobs[event.job]
        if job.state.ended or not job.seeks_layout:
            return ()
        self.state.layout_found(job)
        self._bids_changed(now)  # it may be profiled now
        if event.changed:
            self.profiles.another_layout(job, event.changed)
        return ()

    def _end(self, name: str, state: JobState, reason: str, now: float) -> Iterable[Command]:
        job = self.jobs[name]
        if job.state.ended:
            return []  # a late event
        # The advisor first: its answers refer to a job that must still exist.
        commands = self.profiles.ended(job, now, done=state is JobState.COMPLETED)
        commands = [*commands, *self.goals.ended(job, state, now)]
        self.state.end(name, state, now)
        self._bids_changed(now)
        if self.queue.all_awaited(job.submitted.owner):
            self._plan_at_once(now)
        return [*commands, Stop(name, state, reason)]

    # --- planning ---

    def _bids_changed(self, now: float) -> None:
        """Schedule a plan and a review of the leases, because the jobs may need other nodes now."""
        self.state.plan_soon(now + self.settings.debounce_s)
        self.state.leases_due = True

    def _plan_at_once(self, now: float) -> None:
        """Schedule a plan with a shorter delay, because jobs can use idle nodes now."""
        settings = self.settings
        self.state.plan_soon(now + min(settings.debounce_s, settings.idle_debounce_s))

    def _review_profiles(self, now: float) -> list[Command]:
        """Report the current jobs and nodes to the advisor, which starts, continues or ends a
        profile.
        """
        admitted = self.queue.admitted(+self.state.usable_by_pool, shared=False)
        jobs = [
            job
            for job in admitted
            if self.profiles.holds(job) or (self.quotas.may_profile(job) and not job.seeks_layout)
        ]
        return self.profiles.review(jobs, self.gaps.comes(self.nodes), now)

    def _plan(self, now: float) -> list[Command]:
        state = self.state
        profile = self._review_profiles(now)
        state.plan_at = None
        candidates = self._bidders.for_current_nodes(now)
        granted = {c.job for c in candidates if c.must_run}
        self.last_plan = plan = self._planner(candidates, state.usable, self.settings.planning)
        state.plan_made()
        self.shares.planned(now)
        changes: dict[str, tuple[str, ...]] = {}
        growing: set[str] = set()
        concerned = {*state.at_work, *(name for name, new in plan.nodes.items() if new)}
        for job in sorted((state.jobs[name] for name in concerned), key=lambda job: job.order):
            name, new = job.submitted.job, plan.nodes.get(job.submitted.job, ())
            if new and job.starving:
                state.guarantee(job, now + self.settings.starvation_s if name in granted else 0.0)
            if not new and not job.nodes and job.state not in _AT_WORK:
                state.unplanned(name)
            elif new != job.nodes or job.broken or not new:
                changes[name] = new
                if len(new) > len(job.nodes):
                    growing.add(name)
        commands = state.assign(changes, now)
        return [
            *profile,
            *(c for c in commands if c.job not in growing),
            *(c for c in commands if c.job in growing),
            *self._losses.review(),
        ]
