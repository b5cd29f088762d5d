"""The farms of one daemon: hands out their tasks to nodes, stores results, and values their nodes.

:mod:`malletrain.core.task_queue` decides which node gets which task. Decides here what is stored
and sent: a hand-out is stored before it is sent, and a result before it is acknowledged. Everything
of one message is one transaction.

A node gets one :class:`TaskItems` at a time; the next follows when it has reported the serial of
the last. The daemon keeps no other state of a node: a :class:`TaskPull` says what it has, and what
the queue says beyond that is lost. So a restart of the daemon, the agent or the launcher is the
same as a lost message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import msgspec

from malletrain.core.events import JobCompleted, NodeRejected, NodesBusy, SoftwareLacking
from malletrain.core.failing_workers import Trust
from malletrain.core.node_values import farm_curve, nodes_filled, rate_of_node
from malletrain.core.task_history import TaskHistory
from malletrain.core.task_queue import (
    ExcusedTask,
    StoredTask,
    TaskAttempt,
    TaskQueue,
    TaskState,
    hand_out_limit,
)
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import UnfinishedJobs
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.farm import MAX_TASKS_IN_MESSAGE, FarmSpec
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.task_table import TaskChange, TaskProgress

REVALUE_EVERY_S = 3.0
"""Minimum time between two changes of a farm's bid, seconds."""
UNSTARTABLE_FIRST = 20
"""Number of first results after which a farm fails if none of these tasks could be started."""
RATE_WINDOW_S = 60.0
"""Minimum length of the window for the rate of a farm, seconds."""
MAX_ITEMS_BYTES = 2**20
"""Maximum size of the values in a message to a node, if it has more than one task."""
ITEM_OVERHEAD_BYTES = 64
_RECENT = 2000


@dataclass
class NodeSession:
    """What the daemon has sent to a launcher."""

    session: str
    serial: int
    """Serial of the newest TaskItems."""
    slots: int = 0
    capacity: int = 0
    """Number of tasks that the node wants to have."""
    sent: messages.TaskItems | None = None
    """The newest TaskItems, if the node has not reported its serial."""


@dataclass
class Farm:
    """One unfinished farm in memory."""

    spec: FarmSpec
    queue: TaskQueue
    at_once: int
    """Maximum number of tasks in a message to a node."""
    history: TaskHistory
    nodes: dict[str, NodeSession] = field(default_factory=dict)
    results: int = 0
    """Number of results since the daemon's start."""
    unstartable: int = 0
    """Number of those whose command could not be started."""
    unstartable_on: set[str] = field(default_factory=set)
    """The nodes that reported those."""
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Times of the last results, seconds."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Durations of the last tasks, seconds."""
    busy: frozenset[str] = frozenset()
    """The nodes that have tasks, as far as the controller knows."""
    unwanted: set[str] = field(default_factory=set)
    """Rejected nodes that are given back once the farm has more nodes than its minimum."""
    valued_at: float = 0.0

    @property
    def task_s(self) -> float | None:
        """Mean duration of a task, seconds; None if unknown."""
        return sum(self.durations) / len(self.durations) if self.durations else None

    def rate(self, now: float) -> float:
        """Return the tasks/s that ended lately, 0 if none did."""
        window_s = max(RATE_WINDOW_S, 3 * (self.task_s or 0.0))
        recent = [at for at in self.ends if at >= now - window_s]
        if len(recent) < 2:
            return 0.0
        return (len(recent) - 1) / max(now - recent[0], 1e-3)


def remember(history: TaskHistory, row: TaskProgress) -> None:
    """Add a stored task that has ended to the history of its farm."""
    if row.state not in (TaskState.DONE.value, TaskState.FAILED.value):
        return
    if row.started is not None and row.ended is not None:
        history.ended(row.number, row.started, row.ended, TaskState(row.state))


def failing_sentence(trust: Trust, count: int) -> str:
    """Return why a node gets only a task from time to time of a farm.

    Args:
        trust: the trust in the node.
        count: number of tasks in a row that failed on it.
    """
    if trust is Trust.REJECTED:
        rest = "at least one of them succeeds on another node."
    else:
        rest = "they run again on other nodes."
    return (
        f"{count} tasks in a row failed on the node, and {rest} It gets one task from time to time."
    )


class Farms:
    """The unfinished farms of one daemon.

    Args:
        state: the daemon's state.
        transactions: saves hand-outs and results before they are sent.
        jobs: changes unfinished jobs.
    """

    def __init__(self, state: SiteState, transactions: Transactions, jobs: UnfinishedJobs) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs
        self._farms: dict[str, Farm] = {}

    def of(self, run: ActiveJob) -> Farm:
        """Return the farm of a job, which is read from the store if necessary."""
        job, spec = run.row.id, run.spec.farm
        assert spec is not None
        if job not in self._farms:
            rows, history = [], TaskHistory(run.row.submitted)
            for row in self._state.store.tasks.progress(job):
                rows.append(StoredTask(row.number, TaskState(row.state), *row[2:6]))
                remember(history, row)
            queue = TaskQueue.restored(spec.total, rows, spec.retries, spec.duplicate_stragglers)
            item_bytes = self._state.store.tasks.longest(job) + ITEM_OVERHEAD_BYTES
            at_once = max(1, min(MAX_TASKS_IN_MESSAGE, MAX_ITEMS_BYTES // item_bytes))
            self._farms[job] = Farm(spec, queue, at_once, history)
        return self._farms[job]

    # --- messages of nodes ---

    def pull(self, agent: LeasedAgent, run: ActiveJob, message: messages.TaskPull) -> None:
        """Reconcile the tasks of a node with what it has, and hand out more."""
        if run.spec.farm is None:
            return
        state, job, node = self._state, run.row.id, agent.node
        with self._transactions.begin() as now:
            farm = self.of(run)
            queue, session = farm.queue, farm.nodes.get(node)
            if session is None or session.session != message.session:
                session = farm.nodes[node] = NodeSession(message.session, message.received)
            session.slots, session.capacity = message.slots, message.capacity
            reported = [TaskAttempt(task.number, task.attempt) for task in message.tasks]
            before = set(queue.attempts_of(node))
            obsolete = queue.adopt(node, reported)
            if adopted := [a.number for a in queue.attempts_of(node) if a not in before]:
                state.store.tasks.adopt(job, node, adopted)
            begun = [
                (task.number, min(now, task.started))
                for task in message.tasks
                if task.started is not None
                and queue.begin(node, TaskAttempt(task.number, task.attempt), task.started)
            ]
            state.store.tasks.begin(job, begun)
            present = set(reported)
            if (awaited := self._awaited(session, message.received)) is not None:
                state.agents.tell(node, awaited)
                present.update(TaskAttempt(item.number, item.attempt) for item in awaited.items)
            state.store.tasks.put_back(job, queue.lose(node, now, present))
            if obsolete:
                state.agents.tell(node, messages.TaskStop(job, tuple(obsolete)))
            self._hand_out(run, farm, now)

    def results(self, agent: LeasedAgent, run: ActiveJob, message: messages.TaskResults) -> None:
        """Store results, acknowledge them, and hand out more."""
        if run.spec.farm is None:
            return
        state, job, node = self._state, run.row.id, agent.node
        with self._transactions.begin() as now:
            farm = self.of(run)
            queue = farm.queue
            changes: list[TaskChange] = []
            excused: list[ExcusedTask] = []
            back: list[int] = []
            for result in message.results:
                seconds = max(0.0, result.ended - result.started)
                attempt = TaskAttempt(result.number, result.attempt)
                outcome = queue.finish(
                    node, attempt, result.code == 0, seconds, now, partial(self._others, run, node)
                )
                excused += outcome.excused
                back += outcome.back
                if outcome.suspected:
                    self._suspected(run, farm, node)
                for rejected in outcome.rejected:
                    self._rejected(run, farm, rejected, node, now)
                for worker, other in outcome.obsolete:
                    state.agents.tell(worker, messages.TaskStop(job, (other,)))
                if outcome.state is None:
                    continue
                farm.results += 1
                farm.unstartable += result.unstartable
                if result.unstartable:
                    farm.unstartable_on.add(node)
                farm.ends.append(now)
                farm.history.ended(result.number, now - seconds, now, outcome.state)
                if not result.unstartable:
                    farm.durations.append(seconds)
                tail = "\n".join(text for text in (result.tail, result.sentence) if text)
                changes.append(
                    TaskChange(
                        result.number,
                        outcome.state.value,
                        outcome.tries,
                        node,
                        result.code,
                        result.started,
                        result.ended,
                        tail,
                    )
                )
            state.store.tasks.finish(job, changes)
            # A later result of the message may have completed an excused or returned task.
            still = [each for each in excused if queue.state(each.number) is each.state]
            state.store.tasks.excuse(job, [(e.number, e.state.value, e.tries) for e in still])
            waiting = [number for number in back if queue.state(number) is TaskState.WAITING]
            state.store.tasks.put_back(job, waiting)
            if any(result.code for result in message.results):
                self._fails_again(farm, node)
            self._give_back(run, farm)
            farm.history.put_back(sum(each.had_failed for each in excused), now)
            reached(FaultPoint.DAEMON_COUNTS)
            acknowledged = tuple((r.number, r.attempt) for r in message.results)
            state.agents.tell(node, messages.TaskAck(job, acknowledged))
            session = farm.nodes.get(node)
            if session is not None and session.session == message.session:
                session.capacity = message.capacity
                self._awaited(session, message.received)
            if changes:
                self._progressed(run, farm, now)
            if not self._end(run, farm, changes):
                self._hand_out(run, farm, now)

    @staticmethod
    def _awaited(session: NodeSession, received: int) -> messages.TaskItems | None:
        """Return the newest message to a node if it has not received it; None if it has."""
        if received >= session.serial:
            session.sent = None
        return session.sent

    # --- time ---

    def tick(self, now: float) -> None:
        """Take tasks back from nodes that do not hold their job any more, and value the nodes of
        farms. Call it about every half second.
        """
        state = self._state
        for job in [job for job in self._farms if job not in state.runs]:
            for sentences in state.failing_tasks.values():
                sentences.pop(job, None)
            del self._farms[job]
        for run in [run for run in state.runs.values() if run.spec.farm is not None]:
            farm = self.of(run)
            lost_nodes = [
                node for node in farm.queue.workers() if not self._holds(node, run.row.id)
            ]
            with self._transactions.begin():
                for node in lost_nodes:
                    farm.nodes.pop(node, None)
                    state.store.tasks.put_back(run.row.id, farm.queue.lose(node, now))
                if lost_nodes:
                    self._hand_out(run, farm, now)
                self._give_back(run, farm)
                self._revalue(run, farm, now)
                self._note_failing(run, farm)
                if not farm.queue.unfinished:
                    self._end(run, farm, [])

    def _others(self, run: ActiveJob, node: str) -> bool:
        """Whether a farm has a node other than this one that gets all tasks that it wants."""
        farm = self.of(run)
        return any(
            other != node
            and farm.queue.failing.trust(other) is Trust.TRUSTED
            and self._holds(other, run.row.id)
            for other in farm.nodes
        )

    def _holds(self, node: str, job: str) -> bool:
        agent = self._state.agents.on(node)
        return agent is not None and agent.holds == job

    def _stays(self, node: str, job: str) -> bool:
        """Whether a node holds a job and does not leave. The launcher of one that leaves may not
        know it yet, asks for tasks, and would stop them as soon as it does.
        """
        agent = self._state.agents.on(node)
        return agent is not None and agent.holds == job and agent.gone_at is None

    # --- the owner ---

    def retry(self, run: ActiveJob, numbers: list[int] | None) -> int:
        """Put failed tasks back. Call it within a transaction.

        Args:
            run: the job.
            numbers: the tasks; None for all that failed.

        Returns:
            The number of tasks that wait again.
        """
        farm = self.of(run)
        if numbers is None:
            numbers = farm.queue.numbers(TaskState.FAILED, limit=farm.spec.total)
        back = farm.queue.retry(numbers)
        self._state.store.tasks.retry(run.row.id, back)
        now = self._state.clock.now()
        farm.history.put_back(len(back), now)
        self._hand_out(run, farm, now)
        return len(back)

    # --- inside ---

    def _hand_out(self, run: ActiveJob, farm: Farm, now: float) -> None:
        """Hand out waiting tasks to all nodes of the farm that want some and stay."""
        state, job, queue = self._state, run.row.id, farm.queue
        lasts = {node: state.controller.state.lasts_s(node) for node in farm.nodes}
        longest_s = max((s for s in lasts.values() if s is not None), default=None)
        for node, session in farm.nodes.items():
            count = hand_out_limit(
                session.capacity,
                session.slots,
                queue.count_of(node),
                sum(map(queue.count_of, queue.workers())) if farm.spec.max_running else 0,
                farm.spec.max_running,
            )
            count = min(count, farm.at_once)
            if count <= 0 or session.sent is not None or not self._stays(node, job):
                continue
            failing = queue.failing
            concerned = failing.has_excused or failing.trust(node) is not Trust.TRUSTED
            alone = concerned and not self._others(run, node)
            attempts = queue.hand_out(node, count, now, lasts[node], longest_s, alone)
            if not attempts:
                continue
            state.store.tasks.hand_out(job, node, attempts)
            reached(FaultPoint.DAEMON_HANDS_OUT)
            values = state.store.tasks.arguments(job, [a.number for a in attempts])
            session.serial += 1
            session.sent = messages.TaskItems(
                job,
                session.serial,
                tuple(
                    messages.TaskItem(a.number, a.attempt, values.get(a.number, ()))
                    for a in attempts
                ),
            )
            state.agents.tell(node, session.sent)

    # --- nodes on which tasks fail ---

    def _suspected(self, run: ActiveJob, farm: Farm, node: str) -> None:
        """Record that a node gets only a task from time to time of a farm."""
        sentence = failing_sentence(Trust.SUSPECTED, farm.queue.failing.untrusted()[node][1])
        self._state.audit.record(EventKind.TASKS_FAILING, sentence, job=run.row.id, node=node)

    def _rejected(self, run: ActiveJob, farm: Farm, node: str, works_on: str, now: float) -> None:
        """Record that tasks fail on a node that succeed on the node ``works_on``. If other jobs
        fail on it, too, it is sick.
        """
        if not self._holds(node, run.row.id):
            return
        self._state.failing.works(run.spec.script, [works_on])
        self._state.failing.failed(run.row.id, run.spec.script, node, now)
        sentence = failing_sentence(Trust.REJECTED, farm.queue.failing.untrusted()[node][1])
        self._state.audit.record(EventKind.TASKS_FAILING, sentence, job=run.row.id, node=node)
        farm.unwanted.add(node)

    def _review(self, run: ActiveJob, farm: Farm) -> bool:
        """Put the tasks back that failed on nodes on which none has ever succeeded. Return whether
        any waits again.
        """
        job, now = run.row.id, self._state.clock.now()
        excused, suspected = farm.queue.review(lambda node: self._holds(node, job), now)
        self._state.store.tasks.excuse(job, [(e.number, e.state.value, e.tries) for e in excused])
        farm.history.put_back(sum(each.had_failed for each in excused), now)
        for node in suspected:
            self._suspected(run, farm, node)
        if farm.queue.unfinished:
            self._hand_out(run, farm, now)
        return bool(farm.queue.unfinished)

    def _fails_again(self, farm: Farm, node: str) -> None:
        """Stop wanting a rejected node if a task has failed on it since the node came back."""
        if farm.queue.failing.trust(node) is Trust.REJECTED:
            farm.unwanted.add(node)

    def _give_back(self, run: ActiveJob, farm: Farm) -> None:
        """Give back the unwanted nodes of a farm, as many as it has beyond its minimum."""
        if not farm.unwanted:
            return
        job, untrusted = run.row.id, farm.queue.failing.untrusted()
        present = set(run.nodes).intersection(self._state.controller.jobs[job].nodes)
        spare = len(present) - run.spec.min_nodes
        for node in sorted(farm.unwanted):
            trust, count = untrusted.get(node, (Trust.TRUSTED, 0))
            if trust is not Trust.REJECTED or node not in present:
                farm.unwanted.discard(node)
            elif spare > 0:
                spare -= 1
                farm.unwanted.discard(node)
                sentence = failing_sentence(Trust.REJECTED, count)
                self._state.audit.record(EventKind.NODE_REJECTED, sentence, job=job, node=node)
                self._transactions.feed(NodeRejected(node))

    def _note_failing(self, run: ActiveJob, farm: Farm) -> None:
        """Update the sentences about nodes on which tasks fail."""
        job, notes = run.row.id, self._state.failing_tasks
        untrusted = farm.queue.failing.untrusted()
        for node, (trust, count) in untrusted.items():
            notes.setdefault(node, {})[job] = failing_sentence(trust, count)
        for node in [node for node in notes if node not in untrusted]:
            notes[node].pop(job, None)

    def _progressed(self, run: ActiveJob, farm: Farm, now: float) -> None:
        """Count the tasks that are done as samples."""
        state, monitor = self._state, run.monitor
        before, done = monitor.total, float(farm.queue.counts()[TaskState.DONE])
        monitor.progress(
            messages.Progress(
                run.row.id,
                run.rounds.generation,
                0,
                0,
                max(0.0, done - monitor.before),
                max(0, int(done - monitor.before)),
                1.0,
                monitor.first_sample or now - (farm.task_s or 0.0),
                now,
            )
        )
        monitor.finished_rescales()  # a farm does not pause
        state.metrics.samples(monitor.total - before)
        self._jobs.save_soon(run)

    def _end(self, run: ActiveJob, farm: Farm, changes: list[TaskChange]) -> bool:
        """End the job if all its tasks have ended, or none could be started. Return whether."""
        state, job, counts = self._state, run.row.id, farm.queue.counts()
        failed, total = counts[TaskState.FAILED], farm.spec.total
        if (
            farm.results == farm.unstartable >= UNSTARTABLE_FIRST
            and farm.queue.unfinished
            and all(n in farm.unstartable_on for n in farm.nodes if self._holds(n, job))
        ):
            sentence = (
                f"None of the first {farm.results} tasks could be started: {changes[-1].tail}"
                if changes
                else f"None of the first {farm.results} tasks could be started."
            )
        elif farm.queue.unfinished:
            return False
        elif not failed:
            reached(FaultPoint.DAEMON_ENDS_FARM)
            self._transactions.feed(JobCompleted(job))
            return True
        elif self._review(run, farm):
            return False
        else:
            sentence = (
                f"{failed:,} of {total:,} tasks failed; `malletrain tasks {job} --failed` lists "
                "them."
            )
        state.repository.save(run, failure=sentence)
        state.audit.record(EventKind.WORKERS_FAILED, sentence, job=job)
        self._transactions.feed(SoftwareLacking(job, sentence))
        return True

    def _revalue(self, run: ActiveJob, farm: Farm, now: float) -> None:
        """Change the bid of a farm, if its value of nodes has changed."""
        if now < farm.valued_at + REVALUE_EVERY_S:
            return
        queue = farm.queue
        busy = frozenset(queue.workers())
        if busy != farm.busy:
            farm.busy, farm.valued_at = busy, now
            self._transactions.feed(NodesBusy(run.row.id, busy))
        slots = max((session.slots for session in farm.nodes.values()), default=0)
        waiting = queue.counts()[TaskState.WAITING]
        filled = nodes_filled(len(busy), waiting, slots, farm.task_s, farm.spec.max_running)
        curve = farm_curve(rate_of_node(slots, farm.task_s), filled, run.spec.max_nodes)
        if curve != run.spec.curve:
            farm.valued_at = now
            self._jobs.revalue(run.row.id, msgspec.structs.replace(run.spec, curve=curve))
