"""Stores what agents report of the work of jobs, in the database and on the daemon's disk:
progress, metrics, notices, logs.

Decides what is stored: a limited number of metric names, and only logs that an agent of the job's
owner reports of its own node. :mod:`malletrain.protocol.messages` limits single fields;
:mod:`malletrain.daemon.nodes.agent_handlers` checks that an agent reports on the job that it holds.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import structlog

from malletrain.core.change_costs import reread_changed
from malletrain.core.events import (
    BatchReported,
    DataCached,
    JobState,
    ModelChanged,
    PriorSuggested,
)
from malletrain.core.goodput import stated_batch
from malletrain.daemon.engine.agents import LeasedAgent
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.engine.unfinished_jobs import ServiceValues, UnfinishedJobs
from malletrain.daemon.jobs.admission import RequestRefused, valued
from malletrain.daemon.jobs.logsink import LogSink
from malletrain.daemon.jobs.repository import ActiveJob, GrowingSeries, Value, decode_spec
from malletrain.daemon.nodes.slow_nodes import SlowNodeWatch
from malletrain.protocol import messages
from malletrain.protocol.bounds import MAX_PROCESSES
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.records import stored_text

log = structlog.get_logger(__name__)

SAVE_EVERY_S = 2.0
"""Minimum interval at which a job's progress is stored, seconds."""
MAX_METRICS, MAX_NAME_LENGTH = 100, 100
"""Maximum number of metrics of one job, and of characters in a name."""
TOO_MANY_METRICS = (
    f"A job has {MAX_METRICS} metrics at most, with names of {MAX_NAME_LENGTH} "
    "characters at most; the others are not kept."
)
MAX_GPUS = 64
"""Assumed maximum number of processes per node if a job starts one for each GPU."""
_MAX_CACHED = 256
"""Number of ended jobs whose facts are cached."""


class AgentReports:
    """Handles the reports of every agent."""

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        jobs: UnfinishedJobs,
        values: ServiceValues,
        logs: LogSink,
        slow: SlowNodeWatch,
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._jobs = jobs
        self._values = values
        self._logs = logs
        self._slow = slow
        self._ended: OrderedDict[str, tuple[str, int, int]] = OrderedDict()

    def progress(self, agent: LeasedAgent, run: ActiveJob, message: messages.Progress) -> None:
        """Handle the counts of one worker."""
        state = self._state
        before = run.monitor.total
        run.monitor.progress(message, state.clock.now())
        run.steps.add(agent.node, message)
        self._slow.heard(agent.node, run, message)
        state.metrics.samples(run.monitor.total - before)
        self._jobs.keep_rescales(run)
        if (
            run.starting_until is not None
            and message.generation == run.rounds.generation
            and message.samples > 0
        ):
            self._jobs.first_sample(run)
        self._jobs.progressed(run, message)
        now = state.clock.now()
        if now - run.checkpointed_at > SAVE_EVERY_S:
            run.checkpointed_at = now
            self._jobs.save_soon(run)

    def metric(self, agent: LeasedAgent, run: ActiveJob, message: messages.Metric) -> None:
        """Store the value of a metric. Names that are equal in the store are one metric."""
        message = msgspec.structs.replace(message, name=stored_text(message.name))
        metrics = run.row.metrics
        with self._transactions.begin():
            if len(message.name) > MAX_NAME_LENGTH or (
                message.name not in metrics and len(metrics) >= MAX_METRICS
            ):
                self._state.repository.notice(run, TOO_MANY_METRICS)
            else:
                self._state.repository.save(run, metrics={**metrics, message.name: message.value})
                self._append_values(run, message)
                self._state.news.came(run.row.id)

    def worth(self, agent: LeasedAgent, run: ActiveJob, message: messages.Worth) -> None:
        """Handle new values of nodes for a service, which its process reports."""
        if run.spec.mode != "service":
            return
        try:
            spec = valued(run.spec, message.nodes)
        except RequestRefused as error:
            with self._transactions.begin():
                self._state.repository.notice(
                    run, f"Its process reported invalid values of nodes: {error}"
                )
            return
        lasts = message.expires_s is None and run.row.values_until is None
        if spec.curve == run.spec.curve and lasts:
            return
        with self._transactions.begin():
            self._values.set(run, spec, message.expires_s)

    def _data_cached(self, run: ActiveJob) -> None:
        """Tell the controller what reading a job's training data again would cost, if that has
        changed.
        """
        records, job = self._state.controller.nodes, run.row.id
        layout = self._state.layouts.of_round(run)
        processes = run.spec.nproc_per_node if layout is None else layout.processes
        new = self._state.data_reads.reread_s(job, run.nodes, processes)
        old = {n: records[n].info.reread_s for n in run.nodes if n in records}
        if reread_changed(new, old):
            self._transactions.feed(DataCached(job, new))

    def _append_values(self, run: ActiveJob, message: messages.Metric) -> None:
        """Append values to a metric's stored series."""
        points = message.points or (messages.MetricSample(self._state.clock.now(), message.value),)
        rank, monitor = message.rank, run.monitor
        values = [
            Value(
                point.time,
                point.value,
                point.step,
                monitor.total_at(message.generation, rank, point.samples),
                monitor.nodes,
            )
            for point in points
        ]
        table = self._state.store.series
        if message.name not in run.series:
            run.series[message.name] = GrowingSeries(table, run.row.id, message.name)
        run.series[message.name].add(message.generation, rank, values)

    def notice(self, agent: LeasedAgent, run: ActiveJob, message: messages.Notice) -> None:
        """Handle a notice for the owner, or a fact about the job."""
        state = self._state
        with self._transactions.begin():
            if message.sentence:
                state.repository.notice(run, message.sentence)
            if message.kind == "snapshot" and message.data:
                state.repository.save(run, snapshot=message.data)
            elif message.kind == "layout":
                state.layouts.learned(run, message.data)
            elif message.kind == "batch":
                if (batch := stated_batch(message.data)) is not None:
                    self._transactions.feed(BatchReported(run.row.id, batch))
            elif message.kind == "data":
                state.data_reads.add(run.row.id, message.rank, message.data)
                self._data_cached(run)
            elif message.kind == "work":
                for event in state.goals.work_left(run, message.data):
                    self._transactions.feed(event)
            elif message.kind == "profile" and state.config.profiling.enabled:
                if name := state.curves.another_model(run.row.id, message.data):
                    self._transactions.feed(ModelChanged(run.row.id, name))
                model = state.curves.described(run.row.id, run.spec, message.data)
                if model is not None:
                    self._transactions.feed(PriorSuggested(run.row.id, model))

    def log_chunk(self, agent: LeasedAgent, chunk: messages.LogChunk) -> None:
        """Store a piece of a log. The job may have ended already."""
        if not self._may_write(agent, chunk):
            log.warning(
                "log refused",
                lease=agent.lease,
                owner=agent.owner,
                job=chunk.job,
                stream=chunk.stream,
                node=chunk.node,
            )
            self._state.outbox.answer(
                agent.peer,
                messages.Error(
                    f"The log {chunk.stream} of job {chunk.job} is not this agent's to write."
                ),
            )
            return
        try:
            end = self._logs.write(
                chunk.job,
                chunk.generation,
                chunk.stream,
                chunk.node,
                chunk.offset,
                chunk.data,
                chunk.size,
            )
        except OSError as e:
            log.error("log not written", job=chunk.job, stream=chunk.stream, reason=str(e))
            return
        reached(FaultPoint.DAEMON_LOGGED)
        self._state.outbox.answer(
            agent.peer, messages.LogAck(chunk.job, chunk.generation, chunk.stream, chunk.node, end)
        )

    def log_end(self, agent: LeasedAgent, message: messages.LogEnd) -> None:
        """Close a log: missing pieces of it will not arrive."""
        if not self._may_write(agent, message):
            return
        try:
            self._logs.ended(
                message.job, message.generation, message.stream, message.node, message.size
            )
        except OSError as e:
            log.error("log not closed", job=message.job, stream=message.stream, reason=str(e))

    def _may_write(self, agent: LeasedAgent, chunk: messages.LogChunk | messages.LogEnd) -> bool:
        """Whether this agent may write the log: it is of its node, of a job of its user, and of an
        existing round and rank.
        """
        job = self._facts_of(chunk.job)
        if job is None or chunk.node != agent.node:
            return False
        owner, generation, ranks = job
        if self._state.accounts.of(owner) != agent.owner or chunk.generation > generation:
            return False
        rank = chunk.stream.removeprefix("rank")
        return rank == chunk.stream or int(rank) < ranks

    def _facts_of(self, job: str) -> tuple[str, int, int] | None:
        """Return the owner, the newest round and the maximum number of ranks of a job; None if the
        job does not exist.
        """
        run = self._state.runs.get(job)
        if run is not None:
            return run.spec.owner, run.rounds.generation, _ranks(run.spec)
        if job in self._ended:
            return self._ended[job]
        row = self._state.store.get_job(job)
        if row is None:
            return None
        facts = (row.owner, row.generation, _ranks(decode_spec(row.spec)))
        if JobState(row.state).ended:  # its facts no longer change
            self._ended[job] = facts
            while len(self._ended) > _MAX_CACHED:
                self._ended.popitem(last=False)
        return facts


def _ranks(spec: messages.JobSpec) -> int:
    if "processes" in spec.tuned:
        return spec.largest * MAX_PROCESSES
    return spec.largest * (spec.nproc_per_node or MAX_GPUS)
