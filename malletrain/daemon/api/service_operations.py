"""The operations on services, and on farms, which are services with tasks.

Services: their members, and what nodes are worth to them. Decides who may value nodes: only the
owner of the service. Decides also when a client that waits for a change of the members is answered:
at once if the version that it knows is not the present one, else at the next change. For views of
the job: what a start costs in plans, and whether nodes outlast it
(:mod:`malletrain.core.change_costs`).

Farms: their tasks, and the farms whose tasks are being added. Decides who may add, see and retry
tasks, and that a farm waits until all its tasks have been added.
:mod:`malletrain.daemon.nodes.farms` hands them out.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import msgspec

from allocator import RescaleCost
from malletrain.core.change_costs import NodeLifetimes
from malletrain.core.events import JobState
from malletrain.core.node_values import farm_curve, with_next_nodes
from malletrain.core.pools import Pool
from malletrain.core.records import JobRecord
from malletrain.core.task_history import TaskCounts, TaskHistory
from malletrain.core.task_queue import TaskState
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Operation, OperationContext, Transactions
from malletrain.daemon.engine.unfinished_jobs import JobDependencies, ServiceValues
from malletrain.daemon.jobs.admission import RequestRefused, number, text, valued, whole
from malletrain.daemon.jobs.repository import decode_spec, is_arriving
from malletrain.daemon.nodes.farms import Farms, failing_sentence, remember
from malletrain.protocol.bounds import MAX_NODES, MAX_WORTH_SIZES
from malletrain.protocol.farm import MAX_ROWS, MAX_TASKS, MAX_VALUE_LENGTH, FarmSpec, expand
from malletrain.protocol.messages import JobSpec
from malletrain.protocol.views import MembersView, MemberView, TaskHistoryView, TasksView, TaskView
from malletrain.store.records import JobRow, TaskRow

MAX_MEMBERS_WAIT_S = 60.0
"""Maximum time for which a request for members waits, seconds."""
MIN_EXPIRES_S, MAX_EXPIRES_S = 1.0, 366 * 86400.0
"""Bounds of the time after which values lapse, seconds."""


class ServiceOperations:
    """The operations on services.

    Args:
        context: finds jobs, and opens transactions.
        values: the values of nodes for services.
    """

    def __init__(self, context: OperationContext, values: ServiceValues) -> None:
        self._state, self._context = context.state, context
        self._values = values
        self.operations: dict[str, Operation] = {
            "members": self._members,
            "worth": self._worth,
        }

    async def _members(self, user: str, params: Mapping[str, Any]) -> MembersView:
        row = self._context.requested(user, params)
        if decode_spec(row.spec).mode != "service":
            raise RequestRefused(
                f"Job {row.id} is no service; its workers are not members of anything."
            )
        last_version = text(params, "since", "")
        deadline = self._state.clock.now() + number(params, "wait_s", 0.0, 0.0, MAX_MEMBERS_WAIT_S)
        while True:
            version = self._version(row)
            remaining_s = deadline - self._state.clock.now()
            if not version or version != last_version or remaining_s <= 0:
                return self._view(user, row, version)
            await self._state.member_news.more(row.id, remaining_s)

    def _version(self, row: JobRow) -> str:
        """Return a text that is different after each change of the members or of what nodes are
        worth, also over restarts of the daemon; empty if the service has ended. ``row``: its row,
        not necessarily the newest.
        """
        run = self._state.runs.get(row.id)
        if run is not None:
            generation, curve = run.rounds.generation, run.spec.curve
        else:
            newest = self._state.store.get_job(row.id) or row
            if JobState(newest.state).ended:
                return ""
            generation, curve = newest.generation, decode_spec(newest.spec).curve
        return f"{generation}-{crc32(json.dumps(curve, sort_keys=True).encode()):08x}"

    def _view(self, user: str, row: JobRow, version: str) -> MembersView:
        state, run = self._state, self._state.runs.get(row.id)
        if run is not None:
            newest, spec, generation = run.row, run.spec, run.rounds.generation
            peers, until = state.rounds.peers(run.rounds.view), run.row.values_until
        else:
            newest = state.store.get_job(row.id) or row
            spec, generation = decode_spec(newest.spec), newest.generation
            peers, until = (), None
        return MembersView(
            row.id,
            generation,
            tuple(
                MemberView(p.node, p.host, p.address, p.gone_in_s, p.loading, p.lasts_s)
                for p in peers
            ),
            state.rounds.job_key_of(row.id) if user == row.owner else "",
            version,
            newest.state,
            {int(nodes): value for nodes, value in (spec.curve or {}).items()},
            None if until is None else max(0.0, until - state.clock.now()),
        )

    async def _worth(self, user: str, params: Mapping[str, Any]) -> dict[str, str]:
        """Set what numbers of nodes are worth to a service."""
        row = self._context.requested(user, params)
        if row.owner != user:
            raise RequestRefused(
                f"Job {row.id} belongs to {row.owner}; only its owner can say what nodes are worth "
                "to it. An operator can change its weight."
            )
        run = self._state.runs.get(row.id)
        spec = decode_spec(row.spec)
        if spec.mode != "service":
            raise RequestRefused(
                f"Job {row.id} is no service; what nodes are worth to it is measured."
            )
        if JobState(row.state).ended:
            raise RequestRefused(f"Job {row.id} is {row.state} already.")
        if run is None:
            raise RequestRefused(
                f"Job {row.id} waits for other jobs; say what nodes are worth once they have "
                "completed."
            )
        spec = valued(run.spec, self._stated(run.spec, row.id, params))
        expires_s = None
        if params.get("expires_s") is not None:
            expires_s = number(params, "expires_s", 0.0, -math.inf, math.inf)
            if not MIN_EXPIRES_S <= expires_s <= MAX_EXPIRES_S:
                raise RequestRefused(
                    f"Values lapse after {MIN_EXPIRES_S:g} s at least and a year at most, not "
                    f"after {expires_s:g} s.",
                    "usage",
                )
        with self._context.transaction():
            sentence = self._values.set(run, spec, expires_s, user)
        return {"sentence": f"Job {row.id} ({row.name}): {sentence}"}

    def _stated(self, spec: JobSpec, job: str, params: Mapping[str, Any]) -> dict[int, float]:
        """Return the values that a request states. Raises RequestRefused."""
        if ("values" in params) == ("next_each" in params):
            raise RequestRefused(
                "Say either what numbers of nodes are worth, or what each of the next nodes is "
                "worth.",
                "usage",
            )
        if "values" in params:
            values = msgspec.convert(params["values"], dict[int, float])
            if not 1 <= len(values) <= MAX_WORTH_SIZES:
                raise RequestRefused(
                    f"The values name {len(values)} sizes; name 1 to {MAX_WORTH_SIZES}.", "usage"
                )
            return values
        each = number(params, "next_each", 0.0, -math.inf, math.inf)
        count = number(params, "next_count", 1, -math.inf, math.inf)
        if each < 0:
            raise RequestRefused(f"A node is worth 0 or more, not {each:g}.", "usage")
        if not (float(count).is_integer() and 1 <= count <= MAX_NODES):
            raise RequestRefused(
                f"The number of the next nodes is 1 to {MAX_NODES:,}, not {count:g}.", "usage"
            )
        present = len(self._state.controller.jobs[job].nodes)
        return with_next_nodes(spec.curve, present, each, int(count))


def nodes_outlast_start(state: SiteState, job: JobRecord) -> bool:
    """Return whether enough of the present nodes outlast a start of a job; True for a job that
    states no start cost.
    """
    spec = job.submitted
    if job.start is None:
        return True

    def may_use(pool: Pool) -> bool:
        return pool.owner == spec.owner and pool.is_of_class(spec.node_class)

    lifetimes = NodeLifetimes(state.controller.state.usable)
    return lifetimes.enough_outlast_start(job.start, job.nodes, job.smallest, may_use)


def plan_pauses(state: SiteState, job_id: str) -> RescaleCost | None:
    """Return the pauses with which plans count for an unfinished service or farm; None for other
    jobs.
    """
    job, run = state.controller.jobs.get(job_id), state.runs.get(job_id)
    if job is None or run is None or run.spec.trains or job.cost is None:
        return None
    if job.start is None:
        return job.cost
    nodes = state.controller.nodes
    node_class = next((nodes[n].pool.node_class for n in job.nodes if n in nodes), "default")
    return replace(job.cost, start_s=job.start.expected_s(node_class))


ARRIVAL_LIMIT_S = 600.0
"""Time without a new task after which a farm whose tasks are being added is cancelled, seconds."""
MAX_ANSWER_CHARACTERS = 1_000_000
"""Maximum length of the texts in one answer."""
CANCELLED = "cancelled"
"""State of a task that waited or ran when its job ended."""
STATES = (*(state.value for state in TaskState), CANCELLED)
SLOWEST = 5
"""Number of tasks that are shown because they run longest."""
ROWS_BETWEEN_PAUSES = 5000
"""Number of rows after which the reading of a history lets other work run."""
MAX_HISTORIES = 20
"""Number of histories of ended farms that are kept."""
_OPEN = (TaskState.WAITING.value, TaskState.RUNNING.value)


def with_farm_values(spec: JobSpec) -> JobSpec:
    """Return a submitted farm with what follows from its tasks: they are its samples and its work,
    and nodes are worth the same to it until it runs.
    """
    assert spec.farm is not None
    return msgspec.structs.replace(
        spec,
        goal="throughput",
        profile=False,
        work=float(spec.farm.total),
        curve=farm_curve(1.0, max(1, spec.farm.total), max(1, spec.max_nodes)),
    )


class ArrivingFarms:
    """The farms whose tasks are being added. They are not in any plan yet."""

    def __init__(
        self, state: SiteState, transactions: Transactions, dependencies: JobDependencies
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._dependencies = dependencies
        self._arrivals: dict[str, float] | None = None
        """Farm → time of its last tasks, seconds. None: not read from the store yet."""

    def submitted(self, row: JobRow, now: float) -> None:
        """Let a newly stored farm wait for its tasks. Call it within a transaction."""
        self._all()[row.id] = now
        self._note(row, 0)

    def waits(self, job: str) -> bool:
        """Whether tasks of the job are being added."""
        return job in self._all()

    def add(self, row: JobRow, first: int, rows: Sequence[Sequence[str]], now: float) -> int:
        """Add tasks, and start the farm if they are the last ones. Call it within a transaction.

        Args:
            row: the farm.
            first: number of the first task.
            rows: values of the tasks.
            now: time, seconds.

        Returns:
            The number of tasks that it has.
        """
        store, farm = self._state.store, decode_spec(row.spec).farm
        assert farm is not None
        count = store.tasks.count(row.id)
        new = rows[max(0, count - first) :]
        store.tasks.add(row.id, count, new)
        count += len(new)
        self._all()[row.id] = now
        if count < farm.total:
            self._note(row, count)
        else:
            del self._all()[row.id]
            self._dependencies.submitted(store.update_job(row.id, reason=""))
        return count

    def cancel(self, job: str, reason: str) -> None:
        """Cancel a farm whose tasks are being added. Call it within a transaction."""
        del self._all()[job]
        self._dependencies.cancel(job, reason)

    def check(self) -> None:
        """Cancel the farms for which no more tasks come. Call it regularly."""
        now = self._state.clock.now()
        for job, at in list(self._all().items()):
            if now >= at + ARRIVAL_LIMIT_S:
                with self._transactions.begin():
                    reason = f"no task of it was added for {ARRIVAL_LIMIT_S / 60:.0f} minutes"
                    self.cancel(job, reason)

    def _note(self, row: JobRow, count: int) -> None:
        farm = decode_spec(row.spec).farm
        assert farm is not None
        reason = f"Its tasks are being added ({count:,} of {farm.total:,})."
        self._state.store.update_job(row.id, reason=reason)

    def _all(self) -> dict[str, float]:
        if self._arrivals is None:
            now, store = self._state.clock.now(), self._state.store
            rows = store.list_jobs([JobState.QUEUED.value])
            self._arrivals = {
                row.id: now for row in rows if is_arriving(store, row, decode_spec(row.spec))
            }
        return self._arrivals


class FarmOperations:
    """The operations on the tasks of a farm.

    Args:
        context: finds jobs, and opens transactions.
        farms: the unfinished farms.
        arriving: farms whose tasks are being added.
    """

    def __init__(self, context: OperationContext, farms: Farms, arriving: ArrivingFarms) -> None:
        self._state, self._context = context.state, context
        self._farms = farms
        self._arriving = arriving
        self._histories: dict[str, TaskHistory] = {}
        """Farm that has ended → its history, for those that were read from the store last."""
        self.operations: dict[str, Operation] = {
            "add_tasks": self._add_tasks,
            "tasks": self._tasks,
            "task_history": self._task_history,
            "retry": self._retry,
        }

    async def _add_tasks(self, user: str, params: Mapping[str, Any]) -> dict[str, int]:
        row, farm = self._farm(user, params, "add tasks to it")
        first = whole(params, "first", 0, 0, MAX_TASKS)
        rows = msgspec.convert(params["rows"], list[list[str]])
        present = self._state.store.tasks.count(row.id)
        if problem := rows_problem(farm, first, rows, present):
            raise RequestRefused(problem, "usage")
        if first + len(rows) <= present:  # the request was repeated
            return {"present": present}
        if not self._arriving.waits(row.id):
            raise RequestRefused(f"Job {row.id} is {row.state}; it takes no more tasks.")
        with self._context.transaction() as now:
            return {"present": self._arriving.add(row, first, rows, now)}

    async def _tasks(self, user: str, params: Mapping[str, Any]) -> TasksView:
        row, farm = self._farm(user, params, "see its tasks")
        state = text(params, "state", "")
        if state not in ("", *STATES):
            raise RequestRefused(
                f"A task is never '{state[:40]}'; its states are {', '.join(STATES)}.", "usage"
            )
        after = whole(params, "after", -1, -1, MAX_TASKS)
        limit = whole(params, "limit", MAX_ROWS, 0, MAX_ROWS)
        store, run = self._state.store.tasks, self._state.runs.get(row.id)
        ended = JobState(row.state).ended
        counts = dict.fromkeys(STATES, 0)
        if run is None:
            counts |= store.counts(row.id)
        else:
            queue = self._farms.of(run).queue
            counts |= {each.value: count for each, count in queue.counts().items()}
            fetched = counts[TaskState.RUNNING.value] - len(queue.begun())
            counts[TaskState.RUNNING.value] -= fetched
            counts[TaskState.WAITING.value] += fetched
        if ended:
            counts[CANCELLED] = sum(counts[each] for each in _OPEN)
            counts |= dict.fromkeys(_OPEN, 0)
        rows: list[TaskRow] = []
        if limit and not (ended and state in _OPEN) and (ended or state != CANCELLED):
            states = _OPEN if state == CANCELLED else (state,) if state else ()
            rows = store.listed(row.id, states, after, limit)
        views = _fitting([_task_view(farm, each, ended) for each in rows])
        if run is None:
            return TasksView(row.id, farm.columns, farm.total, counts, views)
        live, now = self._farms.of(run), self._state.clock.now()
        rate = live.rate(now)
        begun = live.queue.begun()
        numbers = heapq.nsmallest(SLOWEST, begun, key=begun.__getitem__)
        return TasksView(
            row.id,
            farm.columns,
            farm.total,
            counts,
            views,
            rate,
            now + live.queue.unfinished / rate if rate > 0 else None,
            tuple(_task_view(farm, each, ended=False) for each in store.rows(row.id, numbers)),
            tuple(
                f"{node}: {failing_sentence(trust, count)}"
                for node, (trust, count) in sorted(live.queue.failing.untrusted().items())
            ),
        )

    async def _task_history(self, user: str, params: Mapping[str, Any]) -> TaskHistoryView:
        row, farm = self._farm(user, params, "see its tasks")
        store, run = self._state.store.tasks, self._state.runs.get(row.id)
        if run is None:
            history = await self._stored_history(row)
            points = history.counts()
        else:
            live, now = self._farms.of(run), self._state.clock.now()
            history, counts = live.history, live.queue.counts()
            begun = live.queue.begun()
            points = [each for each in history.counts(begun.values()) if each.time < now]
            if points:
                done, failed = counts[TaskState.DONE], counts[TaskState.FAILED]
                points.append(TaskCounts(now, done, failed, len(begun)))
        slowest = history.slowest()
        views = {
            each.number: _task_view(farm, each, JobState(row.state).ended)
            for each in store.rows(row.id, slowest)
        }
        return TaskHistoryView(
            row.id,
            tuple(points),
            tuple(views[number] for number in slowest if number in views),
        )

    async def _stored_history(self, row: JobRow) -> TaskHistory:
        """Return the history of a farm that has ended."""
        if row.id not in self._histories:
            history = TaskHistory(row.submitted)
            for count, each in enumerate(self._state.store.tasks.progress(row.id), 1):
                remember(history, each)
                if count % ROWS_BETWEEN_PAUSES == 0:
                    await asyncio.sleep(0)
            self._histories[row.id] = history
            while len(self._histories) > MAX_HISTORIES:
                del self._histories[next(iter(self._histories))]
        return self._histories[row.id]

    async def _retry(self, user: str, params: Mapping[str, Any]) -> dict[str, int]:
        row, farm = self._farm(user, params, "retry its tasks")
        numbers = msgspec.convert(params.get("numbers", ()), list[int])
        state = text(params, "state", "")
        if bool(numbers) == (state == TaskState.FAILED.value) or len(numbers) > MAX_ROWS:
            raise RequestRefused(
                f"Name the tasks to be tried again, {MAX_ROWS:,} at most, or all that failed.",
                "usage",
            )
        run = self._state.runs.get(row.id)
        if run is None:
            raise RequestRefused(
                f"Job {row.id} is {row.state}; `malletrain map` takes the rows of its failed tasks "
                "again, as another job."
            )
        if outside := [number for number in numbers if not 0 <= number < farm.total]:
            raise RequestRefused(
                f"Job {row.id} has no task {outside[0]}; they are numbered from 0 to "
                f"{farm.total - 1}.",
                "usage",
            )
        with self._context.transaction():
            return {"retried": self._farms.retry(run, numbers or None)}

    def _farm(self, user: str, params: Mapping[str, Any], what: str) -> tuple[JobRow, FarmSpec]:
        row = self._context.managed(user, params, what)
        farm = decode_spec(row.spec).farm
        if farm is None:
            raise RequestRefused(f"Job {row.id} is no farm; it has no tasks.")
        return row, farm


def rows_problem(farm: FarmSpec, first: int, rows: Sequence[Sequence[str]], present: int) -> str:
    """Return why tasks cannot be added, as a sentence; empty if they can.

    Args:
        farm: the farm.
        first: number of the first task.
        rows: values of the tasks.
        present: number of tasks that it has.
    """
    if not 1 <= len(rows) <= MAX_ROWS:
        return f"One request adds 1 to {MAX_ROWS:,} tasks, not {len(rows):,}."
    if first > present:
        return f"The farm has {present:,} tasks, so that the next one is {present}, not {first}."
    if first + len(rows) > farm.total:
        return f"The farm was submitted with {farm.total:,} tasks, and these are more."
    for task, row in enumerate(rows, first):
        if len(row) != len(farm.columns):
            return f"Task {task} has {len(row)} values; the farm has {len(farm.columns)} columns."
        if any(len(value) > MAX_VALUE_LENGTH or "\0" in value for value in row):
            return (
                f"A value of task {task} is longer than {MAX_VALUE_LENGTH} characters, or "
                "contains a NUL character."
            )
    return ""


def _task_view(farm: FarmSpec, row: TaskRow, ended: bool) -> TaskView:
    [log] = expand([farm.log], farm.columns, row.arguments, row.number)
    return TaskView(
        row.number,
        row.arguments,
        _shown_state(row, ended),
        row.tries,
        row.exit_code,
        row.node,
        row.started,
        row.ended,
        log if row.attempt else "",
        row.tail,
    )


def _shown_state(row: TaskRow, ended: bool) -> str:
    if row.state in _OPEN and ended:
        return CANCELLED
    if row.state == TaskState.RUNNING.value and row.started is None:
        return TaskState.WAITING.value  # on its node
    return row.state


def _fitting(views: Sequence[TaskView]) -> tuple[TaskView, ...]:
    """Return as many of the first views as fit into an answer, one at least."""
    length = 0
    for count, view in enumerate(views):
        length += len(view.tail) + len(view.log) + sum(map(len, view.values)) + 200
        if length > MAX_ANSWER_CHARACTERS and count:
            return tuple(views[:count])
    return tuple(views)
