"""The operations that clients request of the daemon (submit, cancel, jobs, nodes, events, …): one
method for each, data in, data out.

Decides what an operation does, and when a client that waits for news of its jobs is answered.
:mod:`malletrain.daemon.jobs.admission` decides which requests are valid,
:mod:`malletrain.protocol.redaction` who sees what of a job. The command line renders the answers.

A request that fails is answered with an error. After a failed transaction memory and store may
differ: see :mod:`malletrain.daemon.site.handler_failures`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from malletrain import __version__
from malletrain.core.events import JobCancelled, JobState
from malletrain.daemon.api.changes import (
    JobChanges,
    OperatorActions,
    Reload,
    arrays_of,
    dependencies,
    goals_of,
    jobs_of_array,
)
from malletrain.daemon.api.job_views import JobViews, fitting, slim, trainer_views
from malletrain.daemon.api.node_views import forecast_operations, natural, node_views
from malletrain.daemon.api.notices import refused
from malletrain.daemon.api.service_operations import (
    ArrivingFarms,
    FarmOperations,
    ServiceOperations,
    with_farm_values,
)
from malletrain.daemon.api.usage import ClassCharge, NodePower, usage_views
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Operation, OperationContext, Transactions
from malletrain.daemon.engine.unfinished_jobs import JobDependencies, ServiceValues, UnfinishedJobs
from malletrain.daemon.jobs.admission import (
    MAX_TEXT_LENGTH,
    RequestRefused,
    cancelled,
    class_problem,
    for_trainer,
    number,
    problem_of,
    text,
    whole,
    why_cancelled,
    with_site_software,
)
from malletrain.daemon.jobs.goals import goals_problem
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import decode_spec, series_views, submitted_before
from malletrain.daemon.jobs.sizes import with_kind
from malletrain.daemon.leases.reconciler import LeaseReconciler
from malletrain.daemon.nodes.commands import CommandOperations, RelayedCommands
from malletrain.daemon.nodes.farms import Farms
from malletrain.daemon.site.clock import MAX_WAIT_S
from malletrain.daemon.site.handler_failures import HandlerFailures
from malletrain.daemon.site.process import collection_disabled
from malletrain.identity.keys import user_name
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.redaction import event_for_others
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    NewsView,
    NodeView,
    SeriesView,
    StatusView,
    UsageView,
)
from malletrain.store.measurement_tables import MAX_POINTS
from malletrain.store.records import STARTED, JobRow

MAX_WATCHED_JOBS = 10_000
"""Maximum number of jobs in one request."""
_NOTHING_HEARD = -1


def news_operations(context: OperationContext, boot: str) -> dict[str, Operation]:
    """Return name → operation of clients. ``boot``: id of this start of the daemon."""
    state = context.state

    async def news(user: str, params: Mapping[str, Any]) -> NewsView:
        """Return those of ``jobs`` with news since ``cursor``: at once if there are any, else at
        the first news within ``wait_s``. With a cursor of another start of the daemon, all of them
        may have news.
        """
        jobs = msgspec.convert(params["jobs"], list[str])
        if len(jobs) > MAX_WATCHED_JOBS or any(len(job) > MAX_TEXT_LENGTH for job in jobs):
            raise RequestRefused(
                f"One request watches {MAX_WATCHED_JOBS} jobs at most, each named by "
                f"{MAX_TEXT_LENGTH} characters at most.",
                "usage",
            )
        unknown = [job for job in jobs if not _exists(context, user, job)]
        last_number = _number(text(params, "cursor", ""), boot)
        deadline = state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while True:
            jobs_ = [*unknown, *state.news.since(last_number, jobs)]
            remaining_s = deadline - state.clock.now()
            if jobs_ or remaining_s <= 0:
                return NewsView(f"{boot}:{state.news.number}", tuple(dict.fromkeys(jobs_)))
            await state.news.more(remaining_s)

    return {"news": news}


def _exists(context: OperationContext, user: str, job: str) -> bool:
    """Whether the job exists. Raises RequestRefused if the user may not manage it."""
    run = context.state.runs.get(job)
    row = run.row if run is not None else context.state.store.get_job(job)
    if row is not None and (problem := context.unmanageable(user, row, "watch it")):
        raise RequestRefused(problem)
    return row is not None


def _number(cursor: str, boot: str) -> int:
    start, _, count = cursor.rpartition(":")
    valid = start == boot and count.isascii() and count.isdigit() and len(count) < 16
    return int(count) if valid else _NOTHING_HEARD


MAX_JOBS_PER_REQUEST = 1000
"""Default number of ended jobs in one answer, and maximum number of jobs cancelled by one
request.
"""
MAX_ENDED_JOBS = 100_000
"""Maximum number of ended jobs in one answer."""
MAX_TIME = 2**53
"""Maximum time or event number in a request."""


class Api:
    """Answers the requests of clients.

    Args:
        state: the daemon's state.
        transactions: saves decisions, and sends messages after that.
        jobs: changes unfinished jobs.
        leases: requests leases from the main scheduler.
        dependencies: jobs that wait for others.
        arriving: farms whose tasks are being added.
        farms: hands out the tasks of farms.
        values: the values of nodes for services.
        logs: the logs of jobs.
        commands: relays the commands of owners.
        boot: id of this start of the daemon.
        scheduler: name of the main scheduler.
        handler_failures: messages that could not be handled.
        reload: reloads the configuration.
        users_problems: returns what is wrong with the list of users, as sentences.
    """

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        jobs: UnfinishedJobs,
        leases: LeaseReconciler,
        dependencies: JobDependencies,
        arriving: ArrivingFarms,
        farms: Farms,
        values: ServiceValues,
        logs: LogSink,
        commands: RelayedCommands,
        boot: str,
        scheduler: str,
        handler_failures: HandlerFailures,
        reload: Reload,
        users_problems: Callable[[], tuple[str, ...]],
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._context = context = OperationContext(state, transactions)
        self.dependencies = dependencies
        self.arriving = arriving
        self.views = JobViews(state)
        self.leases = leases
        self.logs = logs
        self.boot = boot
        self.scheduler = scheduler
        self.handler_failures = handler_failures
        self._users_problems = users_problems
        self.began = state.clock.now()
        self.operations: dict[str, Operation] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "jobs": self._jobs,
            "job": self._job,
            "nodes": self._nodes,
            "events": self._events,
            "logs": self._logs,
            "metrics": self._metrics,
            "status": self._status,
            "usage": self._usage,
            **JobChanges(context, jobs, self.views).operations,
            **FarmOperations(context, farms, arriving).operations,
            **ServiceOperations(context, values).operations,
            **CommandOperations(context, commands).operations,
            **forecast_operations(state),
            **news_operations(context, boot),
            **OperatorActions(context, jobs, leases, reload).operations,
        }

    async def answer(self, user: str, request: messages.Request) -> messages.Reply:
        """Return the reply to one request of ``user``."""
        operation = self.operations.get(request.op)
        try:
            if operation is None:
                raise RequestRefused(
                    f"The daemon knows no operation '{request.op}'; it knows "
                    f"{', '.join(sorted(self.operations))}.",
                    "usage",
                )
            with collection_disabled():
                params = request.parameters()
            return messages.Reply(
                request.id, True, msgspec.to_builtins(await operation(user, params))
            )
        except RequestRefused as e:
            return messages.Reply(request.id, False, error=str(e), code=e.code)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as e:
            return messages.Reply(
                request.id,
                False,
                error=f"The request '{request.op}' is malformed: {e}.",
                code="usage",
            )

    # --- jobs ---

    async def _submit(self, user: str, params: Mapping[str, Any]) -> dict[str, JobView]:
        spec = msgspec.convert(params["spec"], messages.JobSpec)
        spec, state = msgspec.structs.replace(spec, owner=user), self._state
        trainer = state.controller.trainers.of(state.parties.trainer(user))
        spec = for_trainer(spec, trainer, state.config.allocation.objective)
        if spec.farm is not None:
            spec = with_farm_values(spec)
        if spec.key and (earlier := submitted_before(state.store, spec)) is not None:
            return {"job": self.views.view(user, earlier)}
        if refusal := state.accounts.refusal(user):
            raise RequestRefused(refusal)
        # The daemon may be unable to read files of other users. Their client has checked them.
        problem = problem_of(spec, files=not state.accounts.of(user)) or class_problem(
            spec.node_class, state.config.node_classes
        )
        if problem:
            raise RequestRefused(problem, "usage")
        spec = with_kind(spec, state.config.scheduler.table.slot_sections)
        if problem := refused(spec, user, state.accounts, state.config.notify):
            raise RequestRefused(problem)
        if problem := goals_problem(goals_of(spec), spec.mode, state.clock.now()):
            raise RequestRefused(problem, "usage")
        if problem := state.goals.too_small(spec.budget_nh, spec.min_nodes, spec.node_class):
            raise RequestRefused(problem, "usage")
        if refusal := state.parties.size_refusal(user, spec.min_nodes):
            raise RequestRefused(refusal)
        unfinished = [run.spec.owner for run in state.runs.values()]
        if refusal := state.parties.jobs_refusal(user, unfinished):
            raise RequestRefused(refusal, "quota")
        spec = with_site_software(spec, state.config.containers)
        spec = msgspec.structs.replace(
            spec, after=dependencies(state, [self._context.find(name, user) for name in spec.after])
        )
        with self._context.transaction() as now:
            row = state.store.add_job(
                JobRow(
                    state.store.new_job_id(),
                    spec.name,
                    user,
                    msgspec.json.encode(spec).decode(),
                    JobState.QUEUED.value,
                    submitted=now,
                    account=state.parties.account(user),
                )
            )
            state.audit.record(
                EventKind.JOB_SUBMITTED,
                f"{spec.min_nodes}:{spec.max_nodes} {spec.size_noun}, {spec.script}",
                job=row.id,
                name=spec.name,
            )
            if spec.farm is not None:
                self.arriving.submitted(row, now)
            else:
                self.dependencies.submitted(row)
        reached(FaultPoint.DAEMON_SUBMITTED)
        return {"job": self.views.view(user, state.store.get_job(row.id) or row, spec)}

    async def _cancel(self, user: str, params: Mapping[str, Any]) -> dict[str, Any]:
        results = []
        names = msgspec.convert(params["jobs"], list[str])
        if len(names) > MAX_JOBS_PER_REQUEST or any(len(name) > MAX_TEXT_LENGTH for name in names):
            raise RequestRefused(
                f"One request cancels {MAX_JOBS_PER_REQUEST} jobs at most, each named by "
                f"{MAX_TEXT_LENGTH} characters at most.",
                "usage",
            )
        why = why_cancelled(params)
        for name in self._with_arrays(names, user):
            try:
                row = self._context.find(name, user)
            except RequestRefused as e:
                results.append({"job": name, "ok": False, "sentence": str(e)})
                continue
            if sentence := self._context.unmanageable(user, row, "cancel it"):
                results.append({"job": row.id, "ok": False, "sentence": sentence})
            elif JobState(row.state).ended:
                sentence = f"Job {row.id} is {row.state} already."
                results.append({"job": row.id, "ok": False, "sentence": sentence})
            else:
                reason = cancelled(user, row.owner, why)
                with self._context.transaction():
                    if self.arriving.waits(row.id):
                        self.arriving.cancel(row.id, reason)
                    elif self.dependencies.waits(row.id):
                        self.dependencies.cancel(row.id, reason)
                    else:
                        self._transactions.feed(JobCancelled(row.id, reason))
                sentence = f"Job {row.id} ({row.name}) is cancelled."
                results.append({"job": row.id, "ok": True, "sentence": sentence})
        return {"results": results}

    async def _jobs(self, user: str, params: Mapping[str, Any]) -> list[JobView]:
        """Return all unfinished jobs and the newest ``ended`` others, as many as fit into one
        answer.
        """
        ended = [state.value for state in JobState if state.ended]
        unfinished = [state.value for state in JobState if not state.ended]
        store = self._state.store
        rows = store.list_jobs(
            ended, newest=whole(params, "ended", MAX_JOBS_PER_REQUEST, 0, MAX_ENDED_JOBS)
        ) + store.list_jobs(unfinished)
        counts, goals = store.rescale_counts(), store.goals.all()
        views = [
            self.views.view(user, row, rescales=counts.get(row.id, 0), goal=goals.get(row.id))
            for row in sorted(rows, key=lambda row: natural(row.id))
        ]
        return fitting(views, unfinished)

    async def _job(self, user: str, params: Mapping[str, Any]) -> JobDetail:
        return self.views.detail(user, self._context.requested(user, params))

    def _with_arrays(self, names: Sequence[str], user: str) -> Iterator[str]:
        """Yield the names. A name of an array of ``user`` is replaced by the ids of the array's
        unfinished jobs.
        """
        store = self._state.store
        arrays: dict[tuple[str, int], list[str]] | None = None
        for name in names:
            if any(name in (row.id, row.name) for row in store.find_jobs(name)):
                yield name
                continue
            if arrays is None:
                unfinished = [state.value for state in JobState if not state.ended]
                rows = store.list_jobs(unfinished)
                arrays = arrays_of((r.id, decode_spec(r.spec)) for r in rows if r.owner == user)
            yield from jobs_of_array(arrays, name) or (name,)

    # --- the machine ---

    async def _nodes(self, user: str, params: Mapping[str, Any]) -> list[NodeView]:
        return node_views(self._state, self.leases, bool(params.get("explain")))

    async def _events(self, user: str, params: Mapping[str, Any]) -> list[EventView]:
        since, limit = (
            whole(params, "since", 0, -MAX_TIME, MAX_TIME),
            whole(params, "limit", 100, 0, 1000),
        )
        job = self._context.requested(user, params).id if params.get("job") else None
        deadline = self._state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        while (
            not (events := self._state.audit.since(since, limit, job))
            and (remaining_s := deadline - self._state.clock.now()) > 0
        ):
            await self._state.audit.news(remaining_s)
        visible: dict[str, bool] = {"": True}
        for event in events:
            if event.job not in visible:
                row = self._state.store.get_job(event.job)
                owner = "" if row is None else row.owner  # the events of a deleted job stay
                visible[event.job] = self._state.accounts.may_manage(user, owner)
        return slim([event if visible[event.job] else event_for_others(event) for event in events])

    async def _logs(self, user: str, params: Mapping[str, Any]) -> LogView:
        row = self._context.managed(user, params, "read its logs")
        ended = JobState(row.state).ended
        arriving = ended and self._state.agents.shipping(row.id)  # checked before the log is read
        limit = whole(params, "limit", 65536, 1024, 1024 * 1024)
        piece = self.logs.read(
            row.id,
            text(params, "stream", "rank0"),
            text(params, "cursor", ""),
            limit,
            ended and not arriving,
        )
        return msgspec.structs.replace(piece, arriving=arriving)

    async def _metrics(self, user: str, params: Mapping[str, Any]) -> list[SeriesView]:
        """Return the metrics that a job's script reported, over time."""
        row = self._context.managed(user, params, "see its metrics")
        return series_views(
            self._state.store.series,
            row,
            msgspec.convert(params.get("names", ()), list[str]),
            number(params, "since", 0.0, 0.0, MAX_TIME),
            whole(params, "most", 0, 0, MAX_POINTS),
        )

    async def _usage(self, user: str, params: Mapping[str, Any]) -> list[UsageView]:
        """Return the usage of the users whose jobs ``user`` may manage."""
        state = self._state
        now = state.clock.now()
        since, until = (
            number(params, n, d, 0.0, MAX_TIME) for n, d in (("since", 0.0), ("until", now))
        )
        watts = state.config.accounting.watts_by_class
        factor = state.config.accounting.charge_factor
        return await usage_views(
            state.store.history,
            since,
            min(until, now),
            user_name(),
            {name: NodePower(*each) for name, each in watts.items()},
            None if state.accounts.operates(user) else user,
            now,
            {
                kind.name: ClassCharge(factor * state.prices.get(kind.name, 1.0), kind.gpus)
                for kind in state.config.scheduler.table.slot_sections
            },
            ClassCharge(factor, None),
        )

    async def _status(self, user: str, params: Mapping[str, Any]) -> StatusView:
        state = self._state
        now = state.clock.now()
        totals = state.store.totals()
        unsaved = sum(run.monitor.total - run.row.samples for run in state.runs.values())
        # What was idle at the last poll may have been leased since.
        leased = {row.node for row in self.leases.active.values()}
        leased.update(agent.node for agent in state.agents)
        agents = Counter(agent.holds for agent in state.agents)
        farming = sum(agents[job] for job, run in state.runs.items() if run.spec.mode == "farm")
        return StatusView(
            __version__,
            os.getpid(),
            self.boot,
            self.began,
            now,
            self.scheduler,
            len(state.gaps.keys() - leased),
            agents.total(),
            agents.total() - agents[None] - farming,
            dict(totals.jobs),
            totals.samples + unsaved,
            sum(run.rate(now) for run in state.runs.values()),
            sum(n for kind, n in totals.rescales.items() if kind != STARTED),
            totals.events.get(EventKind.NODE_LEAVING, 0)
            + totals.events.get(EventKind.NODE_VANISHED, 0),
            self.leases.last_poll.time if self.leases.last_poll else None,
            self.leases.polls.trouble(now),
            tuple(state.rounds.measured.values()),
            self.views.shares(user),
            self.leases.restrictions.now.sentence(),
            self.handler_failures.summary() if state.accounts.operates(user) else "",
            trainer_views(state),
            self.views.late_hand_overs(user),
            self._users_problems() if state.accounts.operates(user) else (),
            farming,
            self._failed_starts(now) if state.accounts.operates(user) else (),
        )

    def _failed_starts(self, now: float) -> tuple[str, ...]:
        """Return from which leases no agent reported, a text for each user."""
        starts = self._state.controller.gaps.failed_starts
        texts = (starts.sentence(owner, now) for owner in sorted(starts.owners))
        return tuple(text for text in texts if text)
