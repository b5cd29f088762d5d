"""Tracks the goals of one controller's jobs: charges, real throughput, standing, and bids.

Decides when a job has spent its budget and stops, when its deadline is so tight that it moves ahead
in the admission queue, and when that makes a plan due. :mod:`malletrain.core.forecast` makes
forecasts, :mod:`malletrain.core.goal_bids` changes bids, :mod:`malletrain.core.goal_record`
computes charges.

Decides also for which class of nodes a job's forecasts are made, and which jobs are assumed to
compete. A job without nodes is forecast on the most frequent class that its trainer may use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse
from typing import Any

from malletrain.core.commands import Announce, Command
from malletrain.core.events import JobState, JobSubmitted
from malletrain.core.forecast import (
    Claim,
    DeadlineDemand,
    Floats,
    NodeHistory,
    PastForecasts,
    admit,
    fair_share,
    forecast,
    least_floor,
)
from malletrain.core.gaps import Gaps
from malletrain.core.goal_bids import GoalTerms, Need, Purse, rounded, with_goals
from malletrain.core.goal_record import SENTENCES, GoalRecord, JobAccount, judged, least_yield
from malletrain.core.goals import (
    GoalsChanged,
    GoalsSoFar,
    GoalStanding,
    OwnerGoals,
    WorkReported,
    same_work,
)
from malletrain.core.planning import Candidate
from malletrain.core.pools import Pool, PoolNode, Trainers, by_class
from malletrain.core.records import JobRecord
from malletrain.core.settings import ControllerSettings
from malletrain.core.state import ControllerState
from malletrain.protocol.event_kinds import EventKind


class GoalPlaces:
    """The classes of one controller's jobs."""

    def __init__(self, state: ControllerState, history: NodeHistory, trainers: Trainers) -> None:
        self._state = state
        self._history = history
        self._trainers = trainers

    def class_of(self, job: JobRecord) -> str:
        """Return the class of its nodes, or the class that it is likely to get."""
        nodes = self._state.nodes
        own_classes = (nodes[n].pool.node_class for n in job.nodes if n in nodes)
        if current := next(own_classes, None) or job.submitted.node_class:
            return current
        trainer = self._trainers.of(job.submitted.trainer)
        return self._history.usual_class(trainer.may_use if trainer else None)

    def rivals(self, node_class: str) -> list[int]:
        """Return the maximum size of every unfinished job that may use the class, ascending."""
        trainer = self._trainers.of_class(node_class)
        return sorted(
            job.submitted.max_nodes
            for job in self._state.unfinished.values()
            if self._trainers.of(job.submitted.trainer) is trainer
            and job.submitted.node_class in ("", node_class)
        )


REVIEW_INTERVAL_S = (60.0, 1800.0)
"""Minimum and maximum time between two reviews of a job, seconds. It is reviewed at its deadline,
too.
"""
REVIEW_FRACTION = 0.05
"""Time between two reviews, as a fraction of the time to the deadline."""
MAX_REVIEWS = 4
"""Maximum number of jobs reviewed in one decision step; those that waited longest come first."""
NEED_TIME_FRACTION = 0.95
"""The need of a deadline is the number of nodes with which the job ends within this fraction of the
remaining time.
"""
FIRST_MIN_TIGHTNESS, FIRST_MAX_NODE_FRACTION = 0.8, 0.25
"""A deadline at least this tight is served first if it needs at most this fraction of the nodes:
waiting would make it too late, and it costs the others little.
"""
NEWEST_SHARE_WEIGHT = 0.2
"""Weight of the newest value in the moving average of a job's fraction of the nodes."""


class GoalKeeper:
    """The goals of one controller's jobs."""

    def __init__(self, state: ControllerState, gaps: Gaps, settings: ControllerSettings) -> None:
        self._state = state
        self._gaps = gaps
        self._settings = settings
        self.history = NodeHistory()
        self._places = GoalPlaces(state, self.history, Trainers(settings.trainers))
        self.past = PastForecasts()
        self.records: dict[str, GoalRecord] = {}
        """Records of the unfinished jobs whose goals or work are known."""
        self._moves = -1
        self._spends_at: dict[str, float] = {}
        self._admitted_of = 0
        self._useful_fraction: dict[str, float] = {}
        """Class → its number of nodes divided by the number that admitted deadlines can use, at
        most 1.
        """

    # --- events ---

    def submitted(self, job: JobRecord, event: JobSubmitted, now: float) -> None:
        """Start to track a new job, if it has goals or known work."""
        if event.goals.bind or event.goals.work is not None:
            self._begin(job, event.goals, event.progress, now)

    def _begin(self, job: JobRecord, goals: OwnerGoals, progress: GoalsSoFar, now: float) -> None:
        account = JobAccount(self._settings.charge_factor, progress.charged_s)
        self.records[job.submitted.job] = GoalRecord(
            job,
            goals,
            account,
            self._settings.planning.prior_exponent,
            progress.done,
            now,
            progress.charged_until,
            standing=progress.standing,
        )
        self._moves = -1

    def changed(self, event: GoalsChanged, now: float) -> list[Command]:
        """Store new goals of the owner, or the amount of work that became known."""
        job = self._state.unfinished.get(event.job)
        if job is None:
            return []
        record = self.records.get(event.job)
        if record is None:
            self._begin(job, event.goals, GoalsSoFar(), now)
        else:
            if (
                record.standing is GoalStanding.MISSED
                and event.goals.deadline != record.goals.deadline
            ):
                record.standing = None
            if not same_work(record.goals.work, event.goals.work):
                self.past.forget(event.job)
            record.goals, record.review_at = event.goals, -math.inf
            record.charged_for = None
        self._moves = -1
        self._state.plan_soon(now + self._settings.debounce_s)
        self._state.leases_due = True
        return []

    def reported(self, event: WorkReported, now: float) -> list[Command]:
        """Record the reported number of processed samples."""
        record = self.records.get(event.job)
        if record is not None and math.isfinite(event.done) and event.done >= 0:
            record.report(event.done, now)
        return []

    def ended(self, job: JobRecord, state: JobState, now: float) -> list[Command]:
        """Record the end of a job and its final standing."""
        name = job.submitted.job
        record = self.records.pop(name, None)
        self._spends_at.pop(name, None)
        self.past.ended(name, now, done=state is JobState.COMPLETED)
        if record is None or not record.goals.bind:
            return []
        deadline = record.goals.deadline
        good = state is JobState.COMPLETED and (deadline is None or now <= deadline)
        return self._set_standing(record, GoalStanding.MET if good else GoalStanding.MISSED, now)

    # --- reviews ---

    def notice(self, now: float) -> list[Command]:
        """Check budgets and standings. Call it after every event."""
        self.history.feed(by_class(self._state.usable_by_pool) + self._gaps.by_class(), now)
        if not self.records:
            return []
        self.settle(now)
        commands: list[Command] = []
        for name, at in list(self._spends_at.items()):
            if now >= at:
                commands += self._budget_spent(self.records[name], now)
        due = [r for r in self.records.values() if now >= r.review_at]
        due = sorted(due, key=lambda r: r.review_at)[:MAX_REVIEWS]
        for record in due:
            self._review(record, now)
        if due or len(self.records) != self._admitted_of:
            self._admit(now)
        rivals: dict[str, list[int]] = {}
        for record in due:
            self._update_forecast(record, rivals, now)
            commands += self._judge(record, now)
        return commands

    def settle(self, now: float) -> None:
        """Charge the jobs for the nodes that they had until now, if nodes have changed jobs."""
        if self._moves == self._state.moves:
            return
        self._moves = self._state.moves
        for record in self.records.values():
            record.advance(now)
            self._charge(record, now)

    def wakeups(self) -> list[float]:
        """Return the times at which :meth:`notice` is due even if no event occurs."""
        reviews = (r.review_at for r in self.records.values() if r.goals.bind)
        return [*self._spends_at.values(), *(at for at in reviews if at > -math.inf)]

    # --- budgets ---

    def _charge(self, record: GoalRecord, now: float) -> None:
        """Update the account to the nodes that the job has."""
        if record.goals.budget_s is None:
            return
        name, nodes, account = record.job.submitted.job, self._state.nodes, record.account
        if record.charged_for is record.job.nodes and not account.owed:
            return
        record.charged_for = record.job.nodes
        job_nodes = set(record.job.nodes)
        for node in account.holds.keys() - job_nodes:
            account.leaves(node, now)
        for node in [n for n in account.owed if n not in nodes]:
            account.gone(node)
        taken_nodes = [n for n in account.owed if nodes[n].job not in (None, name)]
        account.taken_over(taken_nodes, now)
        for node in filterfalse(account.holds.__contains__, record.job.nodes):
            if (lease := nodes.get(node)) is not None:
                leased = lease.due_until - self._settings.due_s
                since = now
                if record.charged_until is not None and not self._state.plans:
                    since = min(
                        now, max(record.charged_until, leased)
                    )  # it continued to run meanwhile
                price = self._price(lease.pool.node_class)
                account.takes(node, since, leased + self._settings.min_charge_s, price)
        if self._holds_unpriced(account):
            self._spends_at.pop(name, None)
        else:
            self._spends_at[name] = account.costs_more_at(record.goals.budget_s, now)
        if not account.holds:
            self._halt(record, self._cannot_pay(record, now))

    def _holds_unpriced(self, account: JobAccount) -> bool:
        """Return whether the price of a node that a job holds is not known yet."""
        nodes, unpriced = self._state.nodes, self._state.unpriced
        return bool(unpriced) and any(
            nodes[node].pool.node_class in unpriced for node in account.holds if node in nodes
        )

    def repriced(self) -> None:
        """Charge nodes at changed prices, those that jobs have now from when they got them."""
        for name, record in self.records.items():
            for node in record.account.holds:
                if node in self._state.nodes:
                    node_class = self._state.nodes[node].pool.node_class
                    record.account.reprice(node, self._price(node_class))
            record.charged_for, record.review_at = None, -math.inf
            self._spends_at.pop(name, None)
        self._moves = -1

    def _price(self, node_class: str) -> float:
        """Return the price of a class for budgets; 0 until it is known."""
        return 0.0 if node_class in self._state.unpriced else self._state.price(node_class)

    def _halt(self, record: GoalRecord, halted: bool) -> None:
        self._state.goals_say(record.job, halted=halted, pressing=record.job.pressing)

    def _cannot_pay(self, record: GoalRecord, now: float) -> bool:
        """Return whether it cannot pay its smallest size for the forward-looking time."""
        node_class = self._places.class_of(record.job)
        return self._most_payable(record, node_class, now) < min(record.sizes(), default=1)

    def least_budget_s(self, nodes: int, node_class: str = "") -> float:
        """Return the minimum remaining budget with which a job gets ``nodes`` nodes, charged
        node-seconds.

        Args:
            nodes: number of nodes.
            node_class: their class; empty: any, and the cheapest counts.
        """
        s, state = self._settings, self._state
        classes = [node_class] if node_class else ["", *state.prices, *state.unpriced]
        price = min(map(self._price, classes))
        return nodes * price * s.charge_factor * max(s.planning.t_fwd_s, s.min_charge_s)

    def _charge_of(self, node_class: str) -> float:
        """Return the node-seconds that a job is charged for one second of one node of a class."""
        return self._settings.charge_factor * self._price(node_class)

    def _most_payable(self, record: GoalRecord, node_class: str, now: float) -> float:
        """Return the maximum number of nodes of a class that it can pay for the forward-looking
        time.
        """
        if record.goals.budget_s is None:
            return math.inf
        ahead_s = self.least_budget_s(1, node_class)
        remaining_s = record.goals.budget_s - record.account.charged(now)
        return math.inf if ahead_s <= 0 else math.floor(remaining_s / ahead_s * (1 + 1e-9))

    def _budget_spent(self, record: GoalRecord, now: float) -> list[Command]:
        """Halt a job whose budget is spent. The next plan suspends it."""
        name = record.job.submitted.job
        self._spends_at.pop(name)
        self._halt(record, True)
        self._state.plan_soon(now)
        charged, budget_s = record.account.charged(now), record.goals.budget_s or 0.0
        sentence = (
            f"The budget of {budget_s / 3600:.4g} node-hours is spent; the job is suspended and "
            f"keeps its place. To continue it: malletrain extend {name} --budget +10nh"
        )
        data = {"charged_nh": charged / 3600, "budget_nh": budget_s / 3600}
        return [Announce(name, EventKind.BUDGET_SPENT, sentence, data)]

    # --- standing ---

    def _review(self, record: GoalRecord, now: float) -> None:
        """Update the record and the need of its deadline."""
        min_interval_s, max_interval_s = REVIEW_INTERVAL_S
        due = record.goals.deadline
        interval_s = max_interval_s
        if due is not None and due > now:
            interval_s = min(due - now, max(min_interval_s, REVIEW_FRACTION * (due - now)))
        record.review_at = now + min(max_interval_s, interval_s)
        record.advance(now)
        self._charge(record, now)
        rates, deadline, remaining_work = (
            record.rates(),
            record.goals.deadline,
            record.remaining_work,
        )
        record.forecast = record.need = None
        if deadline is None or deadline <= now:
            return
        if remaining_work is not None and rates is not None:
            self._set_need(record, remaining_work, rates, now)
        elif rates is None:
            # It must run so that its throughput can be measured.
            record.need, record.node_s = Need(min(record.sizes(), default=1), 1.0), 0.0

    def _set_need(
        self, record: GoalRecord, remaining_work: float, rates: Floats, now: float
    ) -> None:
        """Set the need of its deadline, if the deadline can be met."""
        node_class, within = self._places.class_of(record.job), (record.goals.deadline or now) - now
        past, nodes = self.history.nodes(node_class), self.history.now(node_class)
        best_case = forecast(remaining_work, rates, past, nodes, Claim(), now)
        if best_case.low <= now + within:
            min_nodes = least_floor(
                remaining_work, NEED_TIME_FRACTION * within, rates, past, nodes, record.sizes()
            )
            tight = min(1.0, (best_case.high - now) / within)
            record.need = Need(min_nodes, tight, record.useful())
            record.node_s = remaining_work / max(1e-300, float(rates[min_nodes])) * min_nodes

    def _update_forecast(
        self, record: GoalRecord, rivals: dict[str, list[int]], now: float
    ) -> None:
        """Make the job's forecast; the admitted deadlines must be known. ``rivals``: node class →
        maximum size of each unfinished job that may use it; missing classes are added.
        """
        node_class, remaining_work, rates = (
            self._places.class_of(record.job),
            record.remaining_work,
            record.rates(),
        )
        if remaining_work is None or rates is None:
            return
        past, nodes = self.history.nodes(node_class), self.history.now(node_class)
        current_nodes, sizes = len(record.job.nodes), record.sizes()
        if nodes > 0 and (current_nodes or record.share is not None):
            share = record.share if record.share is not None else current_nodes / nodes
            record.share = share + NEWEST_SHARE_WEIGHT * (min(1.0, current_nodes / nodes) - share)
        floor = 0.0
        if record.admitted and record.need is not None:
            floor = max(
                record.need.nodes, self._useful_fraction.get(node_class, 1.0) * record.need.useful
            )
        if node_class not in rivals:
            rivals[node_class] = self._places.rivals(node_class)
        share = max(fair_share(rivals[node_class], nodes), record.share or 0.0)
        claim = Claim(share, floor, min(sizes, default=1))
        uncorrected = forecast(remaining_work, rates, past, nodes, claim, now)
        if record.goals.budget_s is None:  # else the budget may end it
            self.past.note(record.job.submitted.job, uncorrected, now)
        record.forecast = self.past.corrected(uncorrected, now)

    def _admit(self, now: float) -> None:
        """Decide which deadlines are admitted, for the queue and the next plan."""
        self._admitted_of = len(self.records)
        groups: dict[str, list[DeadlineDemand]] = {}
        for name, record in self.records.items():
            due = record.goals.deadline
            if record.need is not None and due is not None and due > now and not record.job.halted:
                demand = DeadlineDemand(name, due - now, record.node_s, record.admitted)
                groups.setdefault(self._places.class_of(record.job), []).append(demand)
        ranks: dict[str, int] = {}
        self._useful_fraction.clear()
        for node_class, demands in groups.items():
            past, nodes = self.history.nodes(node_class), self.history.now(node_class)
            admitted = admit(demands, past, nodes)
            useful = sum(
                need.useful for n in admitted if (need := self.records[n].need) is not None
            )
            self._useful_fraction[node_class] = min(1.0, nodes / max(1, useful))
            ranks.update(admitted)
        for name, record in self.records.items():
            need, nodes = record.need, self.history.now(self._places.class_of(record.job))
            narrow = (
                need is not None
                and need.tight >= FIRST_MIN_TIGHTNESS
                and need.nodes <= FIRST_MAX_NODE_FRACTION * nodes
            )
            record.before = 0 if narrow else ranks.get(name, 0)
            self._set_admitted(record, name in ranks, now)

    def _set_admitted(self, record: GoalRecord, admitted: bool, now: float) -> None:
        """Set whether the record's deadline is admitted."""
        need, changed = record.need, admitted != record.admitted
        record.admitted = admitted
        self._state.goals_say(record.job, halted=record.job.halted, pressing=admitted)
        if changed or (admitted and need is not None and len(record.job.nodes) < need.nodes):
            self._state.plan_soon(now + self._settings.debounce_s)
            self._state.leases_due = True

    def _judge(self, record: GoalRecord, now: float) -> list[Command]:
        """Evaluate the standing and announce it if it has changed."""
        standing = judged(record, self._charge_of(self._places.class_of(record.job)), now)
        return [] if standing is None else self._set_standing(record, standing, now)

    def _set_standing(
        self, record: GoalRecord, standing: GoalStanding, now: float
    ) -> list[Command]:
        """Set the standing and announce it if it has changed."""
        if standing is record.standing:
            return []
        record.standing = standing
        name, job_forecast = record.job.submitted.job, record.forecast
        data: dict[str, Any] = {
            "standing": standing.value,
            "deadline": record.goals.deadline,
            "ends": [
                None if at is None or math.isinf(at) else round(at, 1)
                for at in (
                    (job_forecast.low, job_forecast.end, job_forecast.high)
                    if job_forecast
                    else (None, None, None)
                )
            ],
            "charged_nh": record.account.charged(now) / 3600,
        }
        if (first_forecast := self.past.of(name)) is not None:
            data["first"] = [round(at, 1) for at in first_forecast]
        return [Announce(name, EventKind.GOAL_STANDING, SENTENCES[standing], data)]

    # --- bids ---

    def bids(
        self, candidates: Sequence[Candidate], now: float, deadline_weight: float | None = None
    ) -> list[Candidate]:
        """Return the candidates of a plan, with bids that follow their goals. ``deadline_weight``:
        None for the site's weight.
        """
        if not self.records:
            return list(candidates)
        terms = {}
        for c in candidates:
            record = self.records.get(c.job)
            if record is not None and record.goals.bind:
                need = record.need if record.admitted else None
                purse = self._budget_terms(record, now)
                terms[c.job] = GoalTerms(record.bid_curve, need, purse, record.before)
        s = self._settings
        weight = s.deadline_weight if deadline_weight is None else deadline_weight
        return with_goals(candidates, terms, weight, s.deadline_ahead)

    def left_for_turns(
        self,
        candidates: Iterable[Candidate],
        free: Mapping[Pool, int],
        nodes: Mapping[str, PoolNode],
    ) -> dict[Pool, int]:
        """Return pool → number of nodes that no pressing deadline needs. Starving jobs get their
        guaranteed minimum from these.
        """
        remaining_nodes = dict(free)
        for c in candidates:
            record = self.records.get(c.job)
            if record is None or record.need is None or not record.job.pressing or c.fixed:
                continue
            own_pool = next((nodes[n].pool for n in c.nodes if n in nodes), None)
            if own_pool not in remaining_nodes:
                own_pool = max(
                    filter(c.may_use, remaining_nodes),
                    key=lambda pool: remaining_nodes[pool],
                    default=None,
                )
            if own_pool is not None:
                remaining_nodes[own_pool] = max(0, remaining_nodes[own_pool] - record.need.nodes)
        return remaining_nodes

    def _budget_terms(self, record: GoalRecord, now: float) -> Purse | None:
        if record.goals.budget_s is None:
            return None
        node_class = self._places.class_of(record.job)
        required_yield = least_yield(record, self._charge_of(node_class), now)
        pace = record.pace
        if required_yield is not None and pace is not None and record.job.curve is not None:
            required_yield = rounded(required_yield / pace, up=True)
        return Purse(required_yield, self._most_payable(record, node_class, now))
