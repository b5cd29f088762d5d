"""What clients may ask: one function an operation, data in, data out.

Decides what is done and what others may see of it. What a request must be like is decided in
:mod:`malletrain.daemon.admission`, who sees what of a job in :mod:`malletrain.daemon.redaction`.
Rendering is the command line's business.

A request that fails outside of a step of the core costs its sender an error and nothing else; a
failed step (:class:`StepFailed`) leaves the core's memory and its store apart, and ends the daemon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from jpa.points import CI95
from malletrain import __version__
from malletrain.core.events import JobCancelled, JobState
from malletrain.core.scaling_model import ScalingModel
from malletrain.daemon.admission import MOST_TEXT, Refused, number, problem_of, text, whole
from malletrain.daemon.core import Core
from malletrain.daemon.job_repository import decode_spec
from malletrain.daemon.leases import Leases
from malletrain.daemon.logsink import LogSink
from malletrain.daemon.redaction import event_for_others, fitting, job_for_others, slim
from malletrain.protocol import messages
from malletrain.protocol.views import (
    CurvePointView,
    EventView,
    InterruptionView,
    JobDetail,
    JobView,
    LogView,
    MembersView,
    MemberView,
    NodeView,
    ProfileView,
    RateView,
    RescaleView,
    StatusView,
)
from malletrain.store.schema import JobRow, ProfileRow

MAX_WAIT_S = 10.0


MOST_JOBS = 1000
"""Ended jobs in one answer, and jobs cancelled by one request, unless asked for otherwise."""
MOST_ENDED = 100_000
LAST = 2**53


class StepFailed(Exception):
    """A step of the core did not come to its end; the cause is what happened."""


class Api:
    """Answers requests. ``boot`` names this start of the daemon."""

    def __init__(
        self, core: Core, leases: Leases, logs: LogSink, boot: str, scheduler: str
    ) -> None:
        self.core = core
        self.leases = leases
        self.logs = logs
        self.boot = boot
        self.scheduler = scheduler
        self.began = core.clock.now()
        self._table: dict[str, Callable[[str, Mapping[str, Any]], Awaitable[Any]]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "jobs": self._jobs,
            "job": self._job,
            "nodes": self._nodes,
            "events": self._events,
            "logs": self._logs,
            "members": self._members,
            "status": self._status,
        }

    async def answer(self, user: str, request: messages.Request) -> messages.Reply:
        """The reply to one request of ``user``."""
        operation = self._table.get(request.op)
        try:
            if operation is None:
                raise Refused(
                    f"The daemon knows no operation '{request.op}'; it knows "
                    f"{', '.join(sorted(self._table))}.",
                    "usage",
                )
            return messages.Reply(
                request.id, True, msgspec.to_builtins(await operation(user, request.params))
            )
        except Refused as e:
            return messages.Reply(request.id, False, error=str(e), code=e.code)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as e:
            return messages.Reply(
                request.id,
                False,
                error=f"The request '{request.op}' is not of its form: {e}.",
                code="usage",
            )

    @contextmanager
    def _step(self) -> Iterator[float]:
        try:
            with self.core.step() as now:
                yield now
        except Exception as error:
            raise StepFailed(str(error)) from error

    # --- jobs ---

    async def _submit(self, user: str, params: Mapping[str, Any]) -> dict[str, JobView]:
        spec = msgspec.convert(params["spec"], messages.JobSpec)
        spec = msgspec.structs.replace(
            spec, owner=user, goal=spec.goal or self.core.config.allocation.objective
        )
        core = self.core
        if refusal := core.accounts.refusal(user):
            raise Refused(refusal)
        # The files of other users are theirs: the daemon may not see them, and the client has
        # looked.
        if problem := problem_of(spec, files=not core.accounts.of(user)):
            raise Refused(problem, "usage")
        with self._step() as now:
            row = core.store.add_job(
                JobRow(
                    core.store.new_job_id(),
                    spec.name,
                    user,
                    msgspec.json.encode(spec).decode(),
                    JobState.QUEUED.value,
                    submitted=now,
                )
            )
            core.trail.record(
                "job-submitted",
                f"{spec.min_nodes}:{spec.max_nodes} nodes, {spec.script}",
                job=row.id,
                name=spec.name,
            )
            core.add(row, spec)
        return {"job": self._view(user, core.store.get_job(row.id) or row, spec)}

    async def _cancel(self, user: str, params: Mapping[str, Any]) -> dict[str, Any]:
        results = []
        names = msgspec.convert(params["jobs"], list[str])
        if len(names) > MOST_JOBS or any(len(name) > MOST_TEXT for name in names):
            raise Refused(
                f"One request cancels {MOST_JOBS} jobs at most, each named by {MOST_TEXT} "
                "characters at most.",
                "usage",
            )
        for name in names:
            try:
                row = self._find(name, user)
            except Refused as e:
                results.append({"job": name, "ok": False, "sentence": str(e)})
                continue
            if not self.core.accounts.may_manage(user, row.owner):
                sentence = (
                    f"Job {row.id} belongs to {row.owner}; only its owner or an operator "
                    "can cancel it."
                )
                results.append({"job": row.id, "ok": False, "sentence": sentence})
            elif JobState(row.state).ended:
                results.append(
                    {
                        "job": row.id,
                        "ok": False,
                        "sentence": f"Job {row.id} is {row.state} already.",
                    }
                )
            else:
                with self._step():
                    self.core.feed(JobCancelled(row.id))
                results.append(
                    {
                        "job": row.id,
                        "ok": True,
                        "sentence": f"Job {row.id} ({row.name}) is cancelled.",
                    }
                )
        return {"results": results}

    async def _jobs(self, user: str, params: Mapping[str, Any]) -> list[JobView]:
        """All unfinished jobs and the newest ``ended`` others, as many as one answer holds."""
        ended = [state.value for state in JobState if state.ended]
        unfinished = [state.value for state in JobState if not state.ended]
        store = self.core.store
        rows = store.list_jobs(
            ended, newest=whole(params, "ended", MOST_JOBS, 0, MOST_ENDED)
        ) + store.list_jobs(unfinished)
        counts = store.rescale_counts()
        views = [
            self._view(user, row, rescales=counts.get(row.id, 0))
            for row in sorted(rows, key=lambda row: _natural(row.id))
        ]
        return fitting(views, unfinished)

    async def _job(self, user: str, params: Mapping[str, Any]) -> JobDetail:
        row = self._find(text(params, "job"), user)
        spec = decode_spec(row.spec)
        store = self.core.store
        if not (mine := self.core.accounts.may_manage(user, row.owner)):
            spec = msgspec.structs.replace(spec, args=(), env={}, setup=None)
        return JobDetail(
            self._view(user, row, spec),
            msgspec.to_builtins(spec),
            tuple(
                RateView(o.nodes, o.rate, o.spread, o.samples, o.seconds)
                for o in store.observations(row.id)
            ),
            tuple(
                RescaleView(
                    r.generation,
                    r.kind,
                    r.from_nodes,
                    r.to_nodes,
                    r.began,
                    r.cost_s,
                    dict(r.phases),
                    r.ended,
                )
                for r in store.rescales(row.id)
            ),
            row.notices if mine else (),
            row.failure if mine else "",
            self._profile(row, spec),
        )

    async def _members(self, user: str, params: Mapping[str, Any]) -> MembersView:
        row = self._find(text(params, "job"), user)
        run = self.core.runs.get(row.id)
        if decode_spec(row.spec).mode != "service":
            raise Refused(f"Job {row.id} is no service; its workers are not members of anything.")
        rounds = run.rounds if run else None
        view = rounds.view if rounds else ()
        members = tuple(
            MemberView(p.node, p.host, p.address, p.leaving_in_s)
            for p in self.core.rounds.peers(view)
        )
        key = self.core.rounds.key_of(row.id) if user == row.owner else ""
        return MembersView(row.id, rounds.generation if rounds else row.generation, members, key)

    def _profile(self, row: JobRow, spec: messages.JobSpec) -> ProfileView | None:
        settings = self.core.config.profiling
        if not settings.enabled:
            return None
        kept = self.core.store.profile(row.id) or ProfileRow(row.id)
        learned = self.core.curves.read(kept)
        state, sentence = _profile_state(row, spec, kept, learned)
        if spec.curve is not None:
            given = sorted((int(k), v) for k, v in spec.curve.items())
            points = tuple(CurvePointView(k, v, 0.0, False, v) for k, v in given)
        else:
            points = _points(learned, spec, settings.kappa)
        cost = learned.cost
        interruptions = tuple(
            msgspec.convert(dict(i), InterruptionView) for i in kept.interruptions
        )
        return ProfileView(
            state,
            sentence,
            learned.curve.phase,
            cost.up_s,
            cost.down_s,
            cost.start_s,
            points,
            interruptions,
        )

    def _find(self, name: str, user: str) -> JobRow:
        """The job that ``user`` means by ``name``: one's own jobs come before those of others."""
        everybodys = self.core.store.find_jobs(name)
        found = [row for row in everybodys if row.owner == user] or everybodys
        if not found:
            raise Refused(f"There is no job '{name}'; `malletrain status` lists all jobs.")
        if len({row.name for row in found}) > 1:
            raise Refused(
                f"'{name}' may mean {', '.join(f'{row.id} ({row.name})' for row in found[:5])}; "
                "name one of them."
            )
        return found[-1]

    def _view(
        self,
        user: str,
        row: JobRow,
        spec: messages.JobSpec | None = None,
        rescales: int | None = None,
    ) -> JobView:
        spec = spec or decode_spec(row.spec)
        run = self.core.runs.get(row.id)
        now = self.core.clock.now()
        view = JobView(
            row.id,
            row.name,
            row.owner,
            row.state,
            row.reason or self._why(row),
            run.rounds.members if run else (),
            spec.min_nodes,
            spec.max_nodes,
            run.monitor.rate(now) if run else 0.0,
            run.monitor.total if run else row.samples,
            len(self.core.store.rescales(row.id)) if rescales is None else rescales,
            row.tries,
            row.submitted,
            row.started,
            row.ended,
            dict(row.metrics),
        )
        return view if self.core.accounts.may_manage(user, row.owner) else job_for_others(view)

    def _why(self, row: JobRow) -> str:
        """Why a job has no nodes, for those that wait."""
        job = self.core.controller.jobs.get(row.id)
        if job is None or job.state.ended or job.nodes:
            return ""
        owner = job.submitted.owner
        if self.core.controller.backing_off(owner, self.core.clock.now()):
            return (
                f"leases as {owner} come to nothing ('malletrain events' says why); tried "
                "again later"
            )
        nodes = sum(node.owner == owner for node in self.core.controller.nodes.values())
        if nodes < job.submitted.min_nodes:
            return f"needs {job.submitted.min_nodes} nodes at least, {nodes} are held"
        return "others are served first"

    # --- the machine ---

    async def _nodes(self, user: str, params: Mapping[str, Any]) -> list[NodeView]:
        now = self.core.clock.now()
        rules = (
            {e.node: e for e in self.leases.snapshot.explanations}
            if self.leases.snapshot and params.get("explain")
            else {}
        )
        views = {}
        for gap in self.leases.gaps.values():
            views[gap.node] = NodeView(
                gap.node, "idle", "", "", gap.idle_since, gap.horizon_s, node_class=gap.node_class
            )
        for row in self.leases.active.values():
            views[row.node] = NodeView(
                row.node,
                "leasing",
                row.id,
                "",
                row.requested,
                node_class=row.node_class,
                owner=row.owner,
            )
        for agent in self.core.agents:
            record = self.core.controller.nodes.get(agent.node)
            state = "leaving" if agent.gone_at is not None else "job" if agent.holds else "free"
            left = None if agent.gone_at is None else max(0.0, agent.gone_at - now)
            held = self.leases.active.get(agent.lease)
            since = (held.started or held.requested) if held else now
            horizon = record.info.horizon_s if record else None
            views[agent.node] = NodeView(
                agent.node,
                state,
                agent.lease,
                agent.holds or "",
                since,
                horizon,
                left,
                agent.node_class,
                agent.owner,
            )
        for node in rules.keys() - views.keys():
            idle = all(
                passed for rule, passed, _ in rules[node].rules if rule in ("idle", "usable")
            )
            views[node] = NodeView(node, "idle" if idle else "busy", "", "", now)
        ordered = sorted(views, key=_natural)
        told = {node: explanation.rules for node, explanation in rules.items()}
        return [msgspec.structs.replace(views[node], rules=told.get(node, ())) for node in ordered]

    async def _events(self, user: str, params: Mapping[str, Any]) -> list[EventView]:
        since, limit = whole(params, "since", 0, -LAST, LAST), whole(params, "limit", 100, 0, 1000)
        job = self._find(text(params, "job"), user).id if params.get("job") else None
        deadline = self.core.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while (
            not (events := self.core.trail.since(since, limit, job))
            and (left := deadline - self.core.clock.now()) > 0
        ):
            await self.core.trail.news(left)
        mine: dict[str, bool] = {"": True}
        for event in events:
            if event.job not in mine:
                row = self.core.store.get_job(event.job)
                mine[event.job] = row is None or self.core.accounts.may_manage(user, row.owner)
        return slim([event if mine[event.job] else event_for_others(event) for event in events])

    async def _logs(self, user: str, params: Mapping[str, Any]) -> LogView:
        row = self._find(text(params, "job"), user)
        if not self.core.accounts.may_manage(user, row.owner):
            raise Refused(
                f"Job {row.id} belongs to {row.owner}; only its owner or an operator can read "
                "its logs."
            )
        ended = JobState(row.state).ended
        limit = whole(params, "limit", 65536, 1024, 1024 * 1024)
        return self.logs.read(
            row.id, text(params, "stream", "rank0"), text(params, "cursor", ""), limit, ended
        )

    async def _status(self, user: str, params: Mapping[str, Any]) -> StatusView:
        core = self.core
        now = core.clock.now()
        totals = core.store.totals()
        unsaved = sum(run.monitor.total - run.row.samples for run in core.runs.values())
        return StatusView(
            __version__,
            os.getpid(),
            self.boot,
            self.began,
            now,
            self.scheduler,
            len(self.leases.gaps),
            sum(1 for _ in core.agents),
            sum(agent.holds is not None for agent in core.agents),
            dict(totals.jobs),
            totals.samples + unsaved,
            sum(run.monitor.rate(now) for run in core.runs.values()),
            sum(totals.rescales.values()),
            totals.events.get("node-leaving", 0) + totals.events.get("node-vanished", 0),
            self.leases.snapshot.time if self.leases.snapshot else None,
            self.leases.poll_error,
        )


def _profile_state(
    row: JobRow, spec: messages.JobSpec, kept: ProfileRow, learned: ScalingModel
) -> tuple[str, str]:
    """In a word and a sentence, how the profile of a job stands."""
    if row.state == JobState.PROFILING.value:
        return "profiling", ""
    if spec.curve is not None:
        return "off", "The scaling curve is the owner's."
    if learned.result and (learned.profiled or JobState(row.state).ended):
        return learned.result, learned.reason
    if spec.min_nodes == spec.max_nodes:
        return "off", "The job can use one number of nodes only."
    if not spec.profile:
        return (
            "known" if learned.known else "off"
        ), "The owner wants no profile; only what is seen in passing is known."
    if JobState(row.state).ended:
        return ("known" if learned.known else "off"), "The job ended before it was profiled."
    return "waiting", kept.waits or learned.reason


def _points(
    learned: ScalingModel, spec: messages.JobSpec, kappa: float
) -> tuple[CurvePointView, ...]:
    """The curve at every size, or at a selection of many; nothing while nothing is known."""
    bids = learned.bid_curve(range(spec.min_nodes, spec.max_nodes + 1), kappa)
    if bids is None:
        return ()
    measured = set(learned.curve.measured_sizes)
    points = []
    for k, bid in bids.points:
        rate, std = learned.curve.estimate(k)
        points.append(CurvePointView(k, rate, CI95 * std, k in measured, bid))
    return tuple(points)


def _natural(name: str) -> tuple[Any, ...]:
    """n2 before n10."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    )
