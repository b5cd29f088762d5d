"""What clients may ask: one function an operation, data in, data out.

Decides what a request must look like and what is refused, with a sentence. Rendering is the command line's business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from allocator import Goal, ScalingCurve
from allocator.curves import CurveError
from jpa import new_plan
from jpa.curve import MeasuredCurve
from jpa.points import CI95
from malletrain import __version__, wire
from malletrain.daemon.books import decode_spec
from malletrain.daemon.core import Core
from malletrain.daemon.leases import Leases
from malletrain.daemon.logsink import LogSink
from malletrain.events import JobCancelled, JobState
from malletrain.learned import Learned
from malletrain.schema import JobRow, ProfileRow
from malletrain.service_rounds import ServiceRounds
from malletrain.views import (
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

MAX_WAIT_S = 10.0


class Refused(Exception):
    """The request cannot be done; ``code`` is ``refused`` or ``usage``."""

    def __init__(self, sentence: str, code: str = "refused") -> None:
        super().__init__(sentence)
        self.code = code


class Api:
    """Answers requests. ``boot`` names this start of the daemon."""

    def __init__(self, core: Core, leases: Leases, logs: LogSink, boot: str, scheduler: str) -> None:
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

    async def answer(self, user: str, request: wire.Request) -> wire.Reply:
        """The reply to one request of ``user``."""
        operation = self._table.get(request.op)
        try:
            if operation is None:
                raise Refused(f"The daemon knows no operation '{request.op}'; it knows {', '.join(sorted(self._table))}.", "usage")
            return wire.Reply(request.id, True, msgspec.to_builtins(await operation(user, request.params)))
        except Refused as e:
            return wire.Reply(request.id, False, error=str(e), code=e.code)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as e:
            return wire.Reply(request.id, False, error=f"The request '{request.op}' is not of its form: {e}.", code="usage")

    # --- jobs --------------------------------------------------------------------------------------------------------------------------

    async def _submit(self, user: str, params: Mapping[str, Any]) -> dict[str, JobView]:
        spec = msgspec.convert(params["spec"], wire.JobSpec)
        spec = msgspec.structs.replace(spec, owner=user, goal=spec.goal or self.core.config.allocation.objective)
        core = self.core
        if refusal := core.accounts.refusal(user):
            raise Refused(refusal)
        # The files of other users are theirs: the daemon may not see them, and the client has looked.
        if problem := problem_of(spec, files=not core.accounts.of(user)):
            raise Refused(problem, "usage")
        with core.step() as now:
            row = core.store.add_job(
                JobRow(core.store.new_job_id(), spec.name, user, msgspec.json.encode(spec).decode(), JobState.QUEUED.value, submitted=now)
            )
            core.trail.record("job-submitted", f"{spec.min_nodes}:{spec.max_nodes} nodes, {spec.script}", job=row.id, name=spec.name)
            core.add(row, spec)
        return {"job": self._view(core.store.get_job(row.id) or row, spec)}

    async def _cancel(self, user: str, params: Mapping[str, Any]) -> dict[str, Any]:
        results = []
        for text in msgspec.convert(params["jobs"], list[str]):
            try:
                row = self._find(text, user)
            except Refused as e:
                results.append({"job": text, "ok": False, "sentence": str(e)})
                continue
            if not self.core.accounts.may_manage(user, row.owner):
                sentence = f"Job {row.id} belongs to {row.owner}; only its owner or an operator can cancel it."
                results.append({"job": row.id, "ok": False, "sentence": sentence})
            elif JobState(row.state).ended:
                results.append({"job": row.id, "ok": False, "sentence": f"Job {row.id} is {row.state} already."})
            else:
                self.core.feed(JobCancelled(row.id))
                results.append({"job": row.id, "ok": True, "sentence": f"Job {row.id} ({row.name}) is cancelled."})
        return {"results": results}

    async def _jobs(self, user: str, params: Mapping[str, Any]) -> list[JobView]:
        return [self._view(row) for row in self.core.store.list_jobs()]

    async def _job(self, user: str, params: Mapping[str, Any]) -> JobDetail:
        row = self._find(params["job"], user)
        spec = decode_spec(row.spec)
        store = self.core.store
        if not (mine := self.core.accounts.may_manage(user, row.owner)):
            spec = msgspec.structs.replace(spec, args=(), env={}, setup=None)
        return JobDetail(
            self._view(row, spec),
            msgspec.to_builtins(spec),
            tuple(RateView(o.nodes, o.rate, o.spread, o.samples, o.seconds) for o in store.observations(row.id)),
            tuple(
                RescaleView(r.generation, r.kind, r.from_nodes, r.to_nodes, r.began, r.cost_s, dict(r.phases), r.ended)
                for r in store.rescales(row.id)
            ),
            row.notices if mine else (),
            row.failure if mine else "",
            self._profile(row, spec),
        )

    async def _members(self, user: str, params: Mapping[str, Any]) -> MembersView:
        row = self._find(params["job"], user)
        run = self.core.runs.get(row.id)
        if decode_spec(row.spec).mode != "service":
            raise Refused(f"Job {row.id} is no service; its workers are not members of anything.")
        rounds = run.rounds if run else None
        view = rounds.view if isinstance(rounds, ServiceRounds) else ()
        members = tuple(MemberView(p.node, p.host, p.address, p.leaving_in_s) for p in self.core.rounds.peers(view))
        key = self.core.rounds.key_of(row.id) if user == row.owner else ""
        return MembersView(row.id, rounds.generation if rounds else row.generation, members, key)

    def _profile(self, row: JobRow, spec: wire.JobSpec) -> ProfileView | None:
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
        interruptions = tuple(msgspec.convert(dict(i), InterruptionView) for i in kept.interruptions)
        return ProfileView(
            state, sentence, learned.curve.phase, cost.up_s, cost.down_s, cost.start_s, points, interruptions
        )

    def _find(self, text: Any, user: str) -> JobRow:
        """The job that ``user`` means by ``text``: one's own jobs come before those of others."""
        everybodys = self.core.store.find_jobs(str(text))
        found = [row for row in everybodys if row.owner == user] or everybodys
        if not found:
            raise Refused(f"There is no job '{text}'; `malletrain status` lists all jobs.")
        if len({row.name for row in found}) > 1:
            raise Refused(f"'{text}' may mean {', '.join(f'{row.id} ({row.name})' for row in found[:5])}; name one of them.")
        return found[-1]

    def _view(self, row: JobRow, spec: wire.JobSpec | None = None) -> JobView:
        spec = spec or decode_spec(row.spec)
        run = self.core.runs.get(row.id)
        now = self.core.clock.now()
        return JobView(
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
            len(self.core.store.rescales(row.id)),
            row.tries,
            row.submitted,
            row.started,
            row.ended,
            dict(row.metrics),
        )

    def _why(self, row: JobRow) -> str:
        """Why a job has no nodes, for those that wait."""
        job = self.core.controller.jobs.get(row.id)
        if job is None or job.state.ended or job.nodes:
            return ""
        nodes = len(self.core.controller.nodes)
        if nodes < job.submitted.min_nodes:
            return f"needs {job.submitted.min_nodes} nodes at least, {nodes} are held"
        return "others are served first"

    # --- the machine -------------------------------------------------------------------------------------------------------------------

    async def _nodes(self, user: str, params: Mapping[str, Any]) -> list[NodeView]:
        now = self.core.clock.now()
        rules = {e.node: e.rules for e in self.leases.snapshot.explanations} if self.leases.snapshot and params.get("explain") else {}
        views = {}
        for gap in self.leases.gaps.values():
            views[gap.node] = NodeView(gap.node, "idle", "", "", gap.idle_since, gap.horizon_s, node_class=gap.node_class)
        for row in self.leases.active.values():
            views[row.node] = NodeView(row.node, "leasing", row.id, "", row.requested, node_class=row.node_class, owner=row.owner)
        for agent in self.core.agents:
            record = self.core.controller.nodes.get(agent.node)
            state = "leaving" if agent.gone_at is not None else "job" if agent.holds else "free"
            left = None if agent.gone_at is None else max(0.0, agent.gone_at - now)
            held = self.leases.active.get(agent.lease)
            since = (held.started or held.requested) if held else now
            horizon = record.info.horizon_s if record else None
            views[agent.node] = NodeView(
                agent.node, state, agent.lease, agent.holds or "", since, horizon, left, agent.node_class, agent.owner
            )
        for node in rules.keys() - views.keys():
            views[node] = NodeView(node, "busy", "", "", now)
        ordered = sorted(views, key=_natural)
        return [msgspec.structs.replace(views[node], rules=rules.get(node, ())) for node in ordered]

    async def _events(self, user: str, params: Mapping[str, Any]) -> list[EventView]:
        since, limit = int(params.get("since", 0)), min(int(params.get("limit", 100)), 1000)
        job = self._find(params["job"], user).id if params.get("job") else None
        deadline = self.core.clock.now() + min(float(params.get("wait_s", 0)), MAX_WAIT_S)
        while not (events := self.core.trail.since(since, limit, job)) and (left := deadline - self.core.clock.now()) > 0:
            await self.core.trail.news(left)
        return events

    async def _logs(self, user: str, params: Mapping[str, Any]) -> LogView:
        row = self._find(params["job"], user)
        if not self.core.accounts.may_manage(user, row.owner):
            raise Refused(f"Job {row.id} belongs to {row.owner}; only its owner or an operator can read its logs.")
        ended = JobState(row.state).ended
        limit = max(1024, min(int(params.get("limit", 65536)), 1024 * 1024))
        return self.logs.read(row.id, str(params.get("stream", "rank0")), str(params.get("cursor", "")), limit, ended)

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


def problem_of(spec: wire.JobSpec, files: bool = True) -> str:
    """What is wrong with a job as submitted, as a sentence; empty when nothing is. ``files``: look whether its files are there."""
    if not spec.name or not spec.name.isprintable() or len(spec.name) > 200:
        return "A job needs a name of 1 to 200 printable characters."
    if not 1 <= spec.min_nodes <= spec.max_nodes:
        return f"The job asks for {spec.min_nodes}:{spec.max_nodes} nodes; give MIN:MAX with 1 <= MIN <= MAX."
    if spec.nproc_per_node < 0:
        return f"The job asks for {spec.nproc_per_node} processes a node; give 1 or more, or 0 for one on each GPU."
    if not 0 < spec.weight < float("inf"):
        return f"The job's weight is {spec.weight}; give a number above 0."
    if spec.goal not in {goal.value for goal in Goal}:
        return f"The job's goal is '{spec.goal}'; accepted is {' or '.join(goal.value for goal in Goal)}."
    if spec.mode not in ("restart", "live", "service"):
        return f"The mode '{spec.mode}' is not known; accepted is restart, live or service."
    if spec.mode == "service" and (spec.curve is None or spec.nproc_per_node != 1 or spec.launcher != "builtin"):
        return "A service runs one process on each node under the builtin launcher and says what nodes are worth to it: give --value FILE."
    if spec.mode == "live" and spec.launcher != "builtin":
        return "Live mode needs the builtin launcher: torchrun starts its workers anew in every round."
    if spec.launcher not in ("builtin", "torchrun"):
        return f"The launcher '{spec.launcher}' is not known; accepted is builtin or torchrun."
    if not os.path.isabs(spec.script) or (files and not os.path.isfile(spec.script)):
        return f"The daemon's host sees no file {spec.script}; put the script on a file system that the nodes share."
    if files and not os.path.isdir(spec.workdir):
        return f"The daemon's host sees no directory {spec.workdir}; name a working directory that the nodes share."
    if spec.curve is not None:
        try:
            ScalingCurve.of((int(k), v) for k, v in spec.curve.items())
        except (CurveError, ValueError) as e:
            return str(e)
    if spec.profile_sizes is not None:
        try:
            new_plan(spec.min_nodes, spec.max_nodes, MeasuredCurve(), chosen=spec.profile_sizes)
        except ValueError as e:
            return str(e)
    if len(spec.profile_key) > 200:
        return "A profile key has 200 characters at most."
    return ""


def _profile_state(row: JobRow, spec: wire.JobSpec, kept: ProfileRow, learned: Learned) -> tuple[str, str]:
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
        return ("known" if learned.known else "off"), "The owner wants no profile; only what is seen in passing is known."
    if JobState(row.state).ended:
        return ("known" if learned.known else "off"), "The job ended before it was profiled."
    return "waiting", kept.waits or learned.reason


def _points(learned: Learned, spec: wire.JobSpec, kappa: float) -> tuple[CurvePointView, ...]:
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
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))
