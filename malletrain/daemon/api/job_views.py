"""Creates the views of jobs and trainers for clients, from their rows and the daemon's memory, and
cuts them to the size of one answer.

:mod:`malletrain.protocol.redaction` decides what each client may see. Changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from jpa.points import CI95
from malletrain.config.units import format_duration
from malletrain.core import state_memory
from malletrain.core.events import JobState
from malletrain.core.pools import Trainer
from malletrain.core.records import JobRecord
from malletrain.core.scaling_model import ScalingModel
from malletrain.core.shares import PartyStanding
from malletrain.core.state_memory import HandOverTime, in_memory
from malletrain.core.step_times import Bottleneck, RankTimes, advice_with_measured_loaders
from malletrain.daemon.api.service_operations import nodes_outlast_start, plan_pauses
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.jobs.layout_tuner import has_measured_loaders, layout_view
from malletrain.daemon.jobs.repository import ActiveJob, decode_spec
from malletrain.daemon.jobs.worker_counts import step_times_record
from malletrain.protocol import messages, wire
from malletrain.protocol.counting import counted
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.redaction import detail_for_others, job_for_others
from malletrain.protocol.views import (
    CurvePointView,
    DataCacheView,
    EventView,
    InterruptionView,
    JobDetail,
    JobView,
    LayoutView,
    ProfileView,
    RankTimesView,
    RateView,
    RescaleView,
    ShareView,
    StepTimesView,
    TrainerView,
)
from malletrain.store.records import STARTED, GoalRow, JobRow, ObservationRow, ProfileRow


def trainer_views(state: SiteState) -> tuple[TrainerView, ...]:
    """Return the views of all trainers with a summary of their jobs; empty if there is only one
    plan.
    """
    controller, now = state.controller, state.clock.now()
    views = []
    for trainer in controller.trainers:
        if trainer is None:
            continue
        jobs = [
            job for job in controller.state.unfinished.values() if trainer_of(state, job) is trainer
        ]
        views.append(
            TrainerView(
                trainer.name,
                trainer.objective,
                tuple(sorted(trainer.node_classes or ())),
                sum(bool(job.nodes) for job in jobs),
                sum(not job.nodes for job in jobs),
                sum(len(job.nodes) for job in jobs),
                sum(_rate(state, job, now) for job in jobs),
                f"{trainer.phrase()}.",
            )
        )
    return tuple(views)


def trainer_of(state: SiteState, job: JobRecord) -> Trainer | None:
    """Return the trainer in whose plan a job is; None if there is only one plan."""
    return state.controller.trainers.of(job.submitted.trainer)


def _rate(state: SiteState, job: JobRecord, now: float) -> float:
    run = state.runs.get(job.submitted.job)
    return run.rate(now) if run else 0.0


def of_job(state: SiteState, job: str) -> str:
    """Return the trainer of a job as a phrase; empty if there is none or the job has ended."""
    record = state.controller.jobs.get(job)
    trainer = trainer_of(state, record) if record is not None else None
    return trainer.phrase() if trainer is not None else ""


def of_class(state: SiteState, node_class: str) -> str:
    """Return the trainer of the nodes of a class; empty if they belong to none."""
    trainer = state.controller.trainers.of_class(node_class)
    return trainer.name if trainer is not None else ""


ROOM_BYTES = wire.MAX_MESSAGE_BYTES * 3 // 4
"""Maximum size of the jobs or events in one answer."""
SLIM_CHARACTERS, SLIM_BYTES = 300, 1000
"""Maximum length of an event's sentence and size of its data, if a page of events has to be cut. A
thousand such events fit.
"""


def fitting(
    jobs: Sequence[JobView], unfinished: Collection[str], max_bytes: int = ROOM_BYTES
) -> list[JobView]:
    """Select as many jobs as fit into one answer.

    Unfinished jobs are selected first, then the newest. When half of the size is used, further jobs
    come without their metrics.

    Args:
        jobs: views of the jobs, the oldest first.
        unfinished: states of unfinished jobs.
        max_bytes: maximum size of the selection, bytes.

    Returns:
        The selected jobs, in the same order.
    """
    views: dict[str, JobView] = {}
    used = 0
    newest = list(reversed(jobs))
    for job in sorted(newest, key=lambda j: j.state not in unfinished):
        size = _size(job)
        if used + size > max_bytes / 2:
            job = msgspec.structs.replace(job, metrics={})
            size = _size(job)
        if used + size <= max_bytes:
            views[job.id] = job
            used += size
    return [views[job.id] for job in jobs if job.id in views]


def slim(events: Sequence[EventView], max_bytes: int = ROOM_BYTES) -> list[EventView]:
    """Return the events. If they exceed ``max_bytes``, long sentences are shortened and large data
    are left out.
    """
    if sum(map(_size, events)) <= max_bytes:
        return list(events)
    return [_slimmed(event) for event in events]


def _slimmed(event: EventView) -> EventView:
    sentence, data = event.sentence, event.data
    if len(sentence) > SLIM_CHARACTERS:
        sentence = sentence[: SLIM_CHARACTERS - 1] + "…"
    return msgspec.structs.replace(
        event, sentence=sentence, data=data if _size(data) <= SLIM_BYTES else {}
    )


def _size(shown: object) -> int:
    return len(msgspec.msgpack.encode(shown))


def missing_nodes_clause(
    needed: int,
    present: int,
    warming_up: int,
    backing_off: Mapping[str, float] | None = None,
    noun: str = "nodes",
) -> str:
    """Return the nodes that a job still lacks, as a clause: ``needs 4 nodes at least, 1 is held``.

    Args:
        needed: minimum number of nodes of the job.
        present: number of nodes that are held.
        warming_up: number of nodes that warm up.
        backing_off: idle node that is left alone after failures → seconds until it is requested
            again.
        noun: what is counted, as the owner of the job said it.
    """
    nodes = f"1 {noun.removesuffix('s')}" if needed == 1 else f"{needed} {noun} at least"
    have = {0: "none is held", 1: "1 is held"}.get(present, f"{present} are held")
    more = {0: "", 1: ", 1 warms up"}.get(warming_up, f", {warming_up} warm up")
    addition = ""
    if backing_off:
        which = (
            f"{min(backing_off)} is"
            if len(backing_off) == 1
            else f"{len(backing_off)} idle nodes are"
        )
        until = format_duration(math.ceil(min(backing_off.values())))
        first = "" if len(backing_off) == 1 else "the first "
        addition = f"; {which} left alone after failures, {first}for {until} more"
    return f"needs {nodes}, {have}{more}{addition}"


def pending_leases_clause(reasons: Sequence[str]) -> str:
    """Return how many leases are pending in the main scheduler and why, as a clause that begins
    with ``;``. Empty if none is pending.

    Args:
        reasons: the main scheduler's reason for each lease; empty if it gives none.
    """
    if not reasons:
        return ""
    words = ", ".join(sorted({reason for reason in reasons if reason and reason != "None"}))
    which = "1 lease waits" if len(reasons) == 1 else f"{len(reasons)} leases wait"
    return f"; {which} in the main scheduler ({words or 'no reason given'})"


def steps_view(record: Mapping[str, Any]) -> StepTimesView | None:
    """Return the view of a record of step times; None if it is empty."""
    if not record:
        return None
    return StepTimesView(
        record["step_s"],
        dict(record["shares"]),
        record["advice"],
        msgspec.convert(
            [RankTimes(*each) for each in record["ranks"]],
            tuple[RankTimesView, ...],
            from_attributes=True,
        ),
        record.get("cause", ""),
        record.get("rank_count", len(record["ranks"])),
    )


BETWEEN_EPOCHS = "its script runs the code after an epoch; a rescale waits for that"
FINISHING = "its script is about to exit; a rescale waits for that"


class JobViews:
    """Views of the jobs of one daemon."""

    def __init__(
        self,
        state: SiteState,
    ) -> None:
        self._state = state

    def view(
        self,
        user: str,
        row: JobRow,
        spec: messages.JobSpec | None = None,
        rescales: int | None = None,
        goal: GoalRow | None = None,
    ) -> JobView:
        """Return the parts of a job that ``user`` may see.

        Args:
            user: user of the client.
            row: row of the job.
            spec: its specification; None to decode it from the row.
            rescales: number of its rescales. None: read it from the store, and the goals, too, if
                ``goal`` is None.
            goal: its goals; None if it has none.

        """
        spec = spec or decode_spec(row.spec)
        if rescales is None and goal is None:
            goal = self._state.store.goals.of(row.id)
        run = self._state.runs.get(row.id)
        now = self._state.clock.now()
        view = JobView(
            row.id,
            row.name,
            row.owner,
            row.state,
            self._reason(row),
            run.nodes if run else (),
            spec.min_nodes,
            spec.max_nodes,
            run.rate(now) if run else 0.0,
            run.monitor.total if run else row.samples,
            self._rescales(row) if rescales is None else rescales,
            row.tries,
            row.submitted,
            row.started,
            row.ended,
            dict(row.metrics),
            self._state.goals.view(row.id, goal),
            run.step_shares() if run else {},
            spec.mode,
            spec.counts,
        )
        return view if self._state.accounts.may_manage(user, row.owner) else job_for_others(view)

    def _rescales(self, row: JobRow) -> int:
        return sum(r.kind != STARTED for r in self._state.store.rescales(row.id))

    def _reason(self, row: JobRow) -> str:
        """Return why the job is in its state. For a suspended job the current reason to wait says
        more than the stored one.
        """
        if row.state == JobState.SUSPENDED.value:
            return self._waiting_reason(row) or row.reason
        run = self._state.runs.get(row.id)
        if run is not None and run.rounds.finishing:
            return FINISHING
        if run is not None and run.rounds.between_epochs and not row.reason:
            return BETWEEN_EPOCHS
        return row.reason or self._waiting_reason(row)

    def _lease_failure(self, owner: str, now: float) -> str:
        """Return why the last lease of ``owner`` failed, as words; empty if none did lately."""
        failed = self._state.controller.gaps.failed_starts.last(owner, now)
        return failed.reason if failed else self._state.refusals.get(owner, "")

    def _waiting_reason(self, row: JobRow) -> str:
        """Return why a waiting job has no nodes; empty for others."""
        job = self._state.controller.jobs.get(row.id)
        if job is None or job.state.ended or job.nodes:
            return ""
        if job.halted:
            return "its budget is spent"
        if job.worthless:
            return "nodes are worth nothing to it now"
        owner, gaps = job.submitted.owner, self._state.controller.gaps
        now = self._state.clock.now()
        if gaps.backing_off(owner, now):
            why = self._lease_failure(owner, now) or "'malletrain events' says why"
            whose = f" as {owner}" if owner else ""
            return f"leases{whose} fail ({why}); tried again later"
        if (quota := self._state.controller.quotas.full(job)) is not None:
            allowed = counted(quota.nodes, "node")
            return f"{quota.name} may have {allowed} at once, and other jobs have them"
        behind = self._share_reason(job.submitted.party)
        trainer = trainer_of(self._state, job)
        kind = job.submitted.node_class
        nodes = sum(
            node.owner == owner
            and (trainer is None or trainer.may_use(node.pool.node_class))
            and node.pool.is_of_class(kind)
            for node in self._state.controller.nodes.values()
        )
        if nodes < job.submitted.min_nodes:
            refused = self._lease_failure(owner, now)
            why = f"; the last lease failed: {refused}"
            for_trainer = f" of kind {kind}" if kind else ""
            for_trainer += f" for trainer {trainer.name}" if trainer is not None else ""
            warming_up = sum(
                a.owner == owner
                and bool(a.awaited)
                and (trainer is None or trainer.may_use(a.node_class))
                and kind in ("", a.node_class)
                for a in self._state.agents
            )
            left_alone = gaps.left_alone(owner, now)
            noun = run.spec.size_noun if (run := self._state.runs.get(row.id)) else "nodes"
            least = job.submitted.min_nodes
            missing = missing_nodes_clause(least, nodes, warming_up, left_alone, noun)
            pending = pending_leases_clause(
                [
                    reason
                    for lease_owner, reason in self._state.pending_leases.values()
                    if lease_owner == owner
                ]
            )
            return f"{missing}{for_trainer}{pending or (why if refused else behind)}"
        if not nodes_outlast_start(self._state, job):
            return "the nodes are expected to be gone before its processes would be ready"
        return f"others are served first{behind}"

    def _share_reason(self, party: str) -> str:
        """Return why others come before a party that got more than its due share; empty if it did
        not.
        """
        shares = self._state.controller.shares
        standing = shares.standing(party)
        if (
            standing is None
            or standing.factor >= 1
            or not any(other.factor > standing.factor for other in shares.standings())
        ):
            return ""
        return f"; {standing.sentence()}".rstrip(".; ")

    def detail(self, user: str, row: JobRow) -> JobDetail:
        """Return all details of a job that ``user`` may see."""
        spec = decode_spec(row.spec)
        store = self._state.store
        may_manage = self._state.accounts.may_manage(user, row.owner)
        observations = store.observations(row.id)
        layout = self._layout(row, spec)
        steps = self._step_times(row, observations)
        if (
            steps is not None
            and steps.cause == Bottleneck.DATA.value
            and has_measured_loaders(layout)
        ):
            advice = advice_with_measured_loaders(steps.shares.get("data", 0.0))
            steps = msgspec.structs.replace(steps, advice=advice)
        detail = JobDetail(
            self.view(user, row, spec),
            msgspec.to_builtins(spec),
            tuple(
                RateView(o.nodes, o.rate, o.spread, o.samples, o.seconds, steps_view(o.step_times))
                for o in observations
            ),
            msgspec.convert(store.rescales(row.id), tuple[RescaleView, ...], from_attributes=True),
            row.notices,
            row.failure,
            self._profile(row, spec),
            self._network(row),
            self._memory(row),
            self.share(self._state.parties.party(row.owner)) if may_manage else None,
            self._stacks(row),
            self._slow(row),
            of_job(self._state, row.id),
            steps,
            layout,
            self._data(row),
        )
        return detail if may_manage else detail_for_others(detail)

    def _step_times(
        self, row: JobRow, observations: Sequence[ObservationRow]
    ) -> StepTimesView | None:
        """Return where the time of its steps goes: now, or at the scale that was measured last."""
        run = self._state.runs.get(row.id)
        if run is not None and run.nodes:
            now = step_times_record(run.steps.ranks(run.rounds.generation))
            if now:
                return steps_view(now)
        newest = max(observations, key=lambda each: each.time, default=None)
        return None if newest is None else steps_view(newest.step_times)

    def _data(self, row: JobRow) -> tuple[DataCacheView, ...]:
        """Return where the samples of its data caches came from."""
        run = self._state.runs.get(row.id)
        return self._state.data_reads.views(row.id, run.nodes if run is not None else ())

    def _layout(self, row: JobRow, spec: messages.JobSpec) -> LayoutView | None:
        """Return the layout of its nodes and the search for it."""
        run = self._state.runs.get(row.id)
        if run is not None and run.tuner is not None:
            return layout_view(run.tuner.row, run.tuner.search)
        return layout_view(self._state.store.layout_search(row.id) if spec.tuned else None, None)

    def share(self, party: str) -> ShareView | None:
        """Return the share of a party; None if shares are not counted."""
        standing = self._state.controller.shares.standing(party)
        return None if standing is None else _share(standing)

    def shares(self, user: str) -> tuple[ShareView, ...]:
        """Return the share of the user's party; all shares for an operator."""
        state = self._state
        own_party = state.parties.party(user)
        return tuple(
            _share(standing)
            for standing in state.controller.shares.standings()
            if standing.party == own_party or state.accounts.operates(user)
        )

    def _stacks(self, row: JobRow) -> dict[str, str]:
        """Return the stacks of its workers at the last hang; none for a completed job."""
        if row.state == JobState.COMPLETED.value:
            return {}
        hung = self._state.store.job_events(row.id, [EventKind.JOB_HUNG])
        return dict(hung[-1].data.get("stacks", {})) if hung else {}

    def _network(self, row: JobRow) -> str:
        """Return which network the job uses and how fast it was measured, as sentences."""
        run = self._state.runs.get(row.id)
        if run is None or run.fabric is None or not run.rounds.members:
            return ""
        agent = self._state.agents.on(run.rounds.members[0])
        measured = self._state.rounds.measured.get(agent.node_class) if agent else None
        return f"{run.fabric.sentence} {measured.sentence if measured else ''}".strip()

    def _memory(self, row: JobRow) -> str:
        """Return the memory of its nodes that its snapshots occupy, as a sentence."""
        run = self._state.runs.get(row.id)
        if run is None:
            return ""
        bytes_by_node = [agent.memory_bytes for agent in self._with_snapshots(run)]
        return in_memory(bytes_by_node, row.snapshot, self._hand_over_time(run))

    def late_hand_overs(self, user: str) -> dict[str, str]:
        """Return job → warning, for the jobs of which a node could not hand over its part of the
        snapshot in memory in time if it had to leave. For an operator all jobs are included, else
        the user's own.
        """
        may_manage = self._state.accounts.may_manage
        warnings = {
            job: state_memory.late(run.row.snapshot, self._hand_over_time(run))
            for job, run in self._state.runs.items()
            if may_manage(user, run.row.owner) and self._with_snapshots(run)
        }
        return {job: sentence for job, sentence in warnings.items() if sentence}

    def _with_snapshots(self, run: ActiveJob) -> list[LeasedAgent]:
        agents = (self._state.agents.on(node) for node in run.rounds.members)
        return [agent for agent in agents if agent is not None and agent.memory_bytes]

    def _hand_over_time(self, run: ActiveJob) -> HandOverTime:
        """Return the time in which its nodes can hand over a snapshot."""
        return self._state.rounds.hand_over(run.rounds.members)

    def _slow(self, row: JobRow) -> tuple[str, ...]:
        """Return a sentence about each of its slow nodes."""
        run, slow = self._state.runs.get(row.id), self._state.slow.current(self._state.clock.now())
        members = run.rounds.members if run else ()
        return tuple(slow[node].sentence for node in members if node in slow)

    def _profile(self, row: JobRow, spec: messages.JobSpec) -> ProfileView | None:
        settings = self._state.config.profiling
        if not settings.enabled:
            return None
        profile = self._state.store.profile(row.id) or ProfileRow(row.id)
        model = self._state.curves.read(profile)
        state, sentence = _profile_state(row, spec, profile, model)
        if spec.curve is not None:
            stated = sorted((int(k), v) for k, v in spec.curve.items())
            points = tuple(CurvePointView(k, v, 0.0, False, v) for k, v in stated)
        else:
            points = _points(model, spec, settings.kappa)
        cost = plan_pauses(self._state, row.id) or model.cost
        interruptions = tuple(
            msgspec.convert(dict(i), InterruptionView) for i in profile.interruptions
        )
        return ProfileView(
            state,
            sentence,
            model.curve.phase,
            cost.up_s,
            cost.down_s,
            cost.start_s,
            points,
            interruptions,
        )


def _share(standing: PartyStanding) -> ShareView:
    service = standing.service
    return ShareView(
        standing.party,
        standing.weight,
        service.due / 3600.0,
        service.served / 3600.0,
        standing.factor,
        standing.sentence(),
    )


def _profile_state(
    row: JobRow, spec: messages.JobSpec, profile: ProfileRow, model: ScalingModel
) -> tuple[str, str]:
    """Return the state of a job's profile as a word and a sentence."""
    if row.state == JobState.PROFILING.value:
        return "profiling", ""
    if spec.curve is not None:
        return "off", "The scaling curve is the owner's."
    if model.result and (model.profiled or JobState(row.state).ended):
        return model.result, model.reason
    if spec.min_nodes == spec.max_nodes:
        return "off", "The job can use only one number of nodes."
    if not spec.profile:
        return (
            "known" if model.has_data else "off"
        ), "The owner wants no profile; only its ordinary progress is measured."
    if JobState(row.state).ended:
        return ("known" if model.has_data else "off"), "The job ended before it was profiled."
    return "waiting", profile.waits or model.reason


def _points(
    model: ScalingModel, spec: messages.JobSpec, kappa: float
) -> tuple[CurvePointView, ...]:
    """Return the points of the curve: every size, or selected sizes if there are many. Empty if
    nothing is known.
    """
    bids = model.bid_curve(range(spec.min_nodes, spec.max_nodes + 1), kappa)
    if bids is None:
        return ()
    measured = set(model.curve.measured_sizes)
    points = []
    for k, bid in bids.points:
        rate, std = model.curve.estimate(k)
        points.append(CurvePointView(k, rate, CI95 * std, k in measured, bid))
    return tuple(points)
