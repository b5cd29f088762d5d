"""Transactions of the daemon's core, and batches of them: a decision is saved before any message
about it is sent.

A transaction is one unit of decisions; it is saved as a whole or not at all. The transactions of
one batch (all messages that the daemon reads together) share one transaction of the database,
because a commit takes several times as long as most messages. Messages and answers go out after the
commit. A transaction outside of a batch is a batch of its own.

Decides that a failed transaction leaves nothing in the store and sends no messages, and that the
earlier ones of its batch remain valid. The caller decides what a transaction does.
:class:`CommandRunner` carries out the controller's commands within a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from jpa import ProfileResult
from malletrain.core.commands import (
    Announce,
    Command,
    KeepScalingModel,
    LossExpected,
    ReclaimNodes,
    ReleaseLeases,
    Rescale,
    Start,
    Stop,
    Suspend,
    TakeLeases,
)
from malletrain.core.events import JobState
from malletrain.daemon.engine.state import DaemonState
from malletrain.daemon.jobs.repository import ActiveJob
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.database import StatementRefused, StoreError
from scavenger.hostlist import named

NO_CURVE = (
    "How the job scales could not be measured: {why} It is assumed to speed up as "
    "nodes^{exponent:g}. Call malletrain.report() at the "
    "end of every step, or give a curve with --curve."
)
ENDINGS = {
    JobState.COMPLETED: (EventKind.JOB_COMPLETED, "The job is done."),
    JobState.CANCELLED: (EventKind.JOB_CANCELLED, "The job was cancelled: {why}."),
    JobState.FAILED: (EventKind.JOB_FAILED, "The job failed: {why}"),
}
"""Final state of a job → kind and sentence of its event."""


class LeaseCommands(Protocol):
    """Takes and ends leases. All methods are called within a decision step."""

    def take(self, nodes: tuple[str, ...], owner: str) -> None:
        """Request a lease on each of these nodes for ``owner`` (empty for the daemon's user)."""

    def release(self, nodes: tuple[str, ...]) -> None:
        """End the leases of these nodes: no job needs them."""

    def reclaim(self, nodes: tuple[str, ...], within_s: float) -> None:
        """End the leases of these nodes when their jobs have moved off: another owner's jobs need
        them more. ``within_s``: maximum time until then, seconds.
        """


class CommandRunner:
    """Carries out the commands of the controller."""

    def __init__(self, state: DaemonState, leases: LeaseCommands) -> None:
        self._state = state
        self._leases = leases

    def carry_out(self, command: Command, now: float) -> None:
        """Carry out one command."""
        runs = self._state.runs
        if isinstance(command, TakeLeases):
            self._leases.take(command.nodes, command.owner)
        elif isinstance(command, ReleaseLeases):
            self._leases.release(command.nodes)
        elif isinstance(command, ReclaimNodes):
            self._leases.reclaim(command.nodes, command.within_s)
        elif isinstance(command, Stop):
            self._stop(runs[command.job], command, now)
        elif isinstance(command, Announce):
            self._announce(runs[command.job], command)
        elif isinstance(command, KeepScalingModel):
            self._state.curves.keep(command.job, runs[command.job].spec, command.scaling)
        elif isinstance(command, LossExpected):
            for node in runs[command.job].rounds.members[:1]:
                self._state.agents.tell(node, messages.ExpectLoss(command.job, command.in_s))
        elif isinstance(command, Suspend):
            self._suspend(runs[command.job], command, now)
        else:
            self._change(runs[command.job], command, now)

    def _announce(self, run: ActiveJob, announcement: Announce) -> None:
        job, state = run.row.id, self._state
        state.audit.record(announcement.kind, announcement.sentence, job=job, **announcement.data)
        if announcement.kind is EventKind.PROFILE_WAITING:
            state.curves.waits(job, announcement.sentence)
        elif announcement.kind is EventKind.GOAL_STANDING:
            state.goals.stands(job, announcement.data)
        elif announcement.kind is EventKind.NODES_DONATED:
            state.curves.interrupted(job, dict(announcement.data))
        elif (
            announcement.kind is EventKind.PROFILE_FINISHED
            and announcement.data["result"] == ProfileResult.UNKNOWN.value
        ):
            exponent = state.config.allocation.prior_exponent
            state.repository.notice(
                run, NO_CURVE.format(why=announcement.sentence, exponent=exponent)
            )
        job_state = state.controller.jobs[job].state
        if not job_state.ended and run.row.state != job_state.value:
            state.repository.save(run, state=job_state.value)

    def _suspend(self, run: ActiveJob, command: Suspend, now: float) -> None:
        record = self._state.controller.jobs[command.job]
        why = "its budget is spent" if record.halted else "waits for nodes"
        self._state.repository.save(
            run,
            state=JobState.SUSPENDED.value,
            planned_nodes=(),
            reason=why,
            tries=record.tries,
            last_broke=record.last_failure_at,
        )
        sentence = "The job has too few nodes; it keeps its place."
        if record.halted:
            sentence = "The job's budget is spent; it keeps its place."
        self._state.audit.record(EventKind.JOB_SUSPENDED, sentence, job=run.row.id)
        self._state.goals.charge(run.row.id)
        self._move(run, (), now, command.within_s)

    def _change(self, run: ActiveJob, command: Start | Rescale, now: float) -> None:
        old_nodes = run.row.planned_nodes
        record = self._state.controller.jobs[run.row.id]
        self._state.repository.save(
            run,
            state=record.state.value,
            planned_nodes=command.nodes,
            reason="",
            tries=record.tries,
            last_broke=record.last_failure_at,
            started=now if run.row.started is None else run.row.started,
        )
        self._state.goals.charge(run.row.id)
        within = command.within_s if isinstance(command, Rescale) else None
        self._state.audit.record(
            EventKind.JOB_STARTED if isinstance(command, Start) else EventKind.JOB_RESCALED,
            f"{_describe_change(len(old_nodes), len(command.nodes))}: {named(command.nodes)}.",
            job=run.row.id,
            nodes=list(command.nodes),
            before=list(old_nodes),
            within_s=within,
        )
        self._move(run, command.nodes, now, within)

    def _move(
        self, run: ActiveJob, nodes: tuple[str, ...], now: float, within_s: float | None
    ) -> None:
        run.starting_until = None
        if run.rounds.interrupts:
            run.monitor.rescale_began(run.rounds.members, nodes, now, lost=run.rounds.lost_member)
        self._state.rounds.act(run, run.rounds.move(nodes, now, within_s))

    def _stop(self, run: ActiveJob, command: Stop, now: float) -> None:
        state, job = self._state, run.row.id
        state.rounds.act(run, run.rounds.stop())
        state.repository.save(
            run,
            state=command.state.value,
            reason=command.reason,
            planned_nodes=(),
            ended=now,
            tries=state.controller.jobs[job].tries,
        )
        kind, template = ENDINGS[command.state]
        state.audit.record(
            kind, template.format(why=command.reason), job=job, samples=run.monitor.total
        )
        state.metrics.job_ended(job, command.state.value)
        state.news.came(job)
        del state.runs[job]
        state.curves.news = True  # another job is next


def _describe_change(before: int, after: int) -> str:
    nodes = f"{after} node{'s' if after != 1 else ''}"
    return f"From {before} to {nodes}" if before else f"Started on {nodes}"


class CoreOver(RuntimeError):
    """A transaction was begun on a core that has failed."""


class TransactionRunner:
    """Runs the transactions of one core. Create it within the event loop in which it is used.

    Args:
        state: the daemon's state.
        begin: called with the time at the beginning of each transaction.
        decide: called with the time at the end of each transaction, before it is saved.
        sent: called after a batch is saved and its messages are sent, with the peers that could
            not be reached.
    """

    def __init__(
        self,
        state: DaemonState,
        begin: Callable[[float], None],
        decide: Callable[[float], None],
        sent: Callable[[set[bytes]], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception once the core has failed; see :meth:`fail`."""
        self.torn = False
        """Whether a transaction has failed, so that memory and store may differ."""
        self._clock, self._store, self._outbox = state.clock, state.store, state.outbox
        self._begin, self._decide, self._sent = begin, decide, sent
        self._batch: ExitStack | None = None
        self._has_database_transaction = False
        """Whether the batch has a transaction of the database, because it has a transaction."""
        self._is_open = False
        """Whether a transaction is open."""
        self._refused: StoreError | None = None
        """Why this batch cannot be saved; None if it can."""

    @contextmanager
    def transaction(self) -> Iterator[float]:
        """Make all decisions in the body one unit: they are saved together, and their messages are
        sent after that. Transactions nest.

        Yields:
            The time, seconds since the epoch.

        Raises:
            CoreOver: the core has failed before.
        """
        now = self._clock.now()
        if self._is_open:
            yield now
            return
        if self.failed.done():
            raise CoreOver("This core has failed; another one replaces it.")
        has_own_batch = self._batch is None
        with self.batch():
            savepoint = self._outbox.savepoint()
            self._is_open = True
            try:
                with self._savepoint(has_own_batch):
                    self._begin(now)
                    yield now
                    self._decide(now)
                    reached(FaultPoint.DAEMON_DECIDED)
            except BaseException as error:
                self.torn = True
                self._outbox.rollback(savepoint)
                if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
                    self._refused = error
                raise
            finally:
                self._is_open = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Save the transactions inside together at the end, and send all messages after that.
        Batches nest.

        Raises:
            StoreError: the database refuses them; nothing is saved, and no message is sent.
        """
        if self._batch is not None:
            yield
            return
        try:
            with ExitStack() as self._batch:
                self._outbox.begin_batch()
                yield
                if self._refused is not None:
                    raise self._refused
        except BaseException:
            self.torn = True
            self._outbox.rollback()
            raise
        finally:
            saved = self._has_database_transaction
            self._batch, self._has_database_transaction, self._refused = None, False, None
            self._outbox.end_batch()
        try:
            if saved:
                reached(FaultPoint.DAEMON_SAVED)
            unreached = set(self._outbox.flush())
            if saved:
                reached(FaultPoint.DAEMON_SENT)
                self._sent(unreached)
        except BaseException:
            self.torn = True  # messages of saved decisions were not sent
            raise

    def _savepoint(self, has_own_batch: bool) -> AbstractContextManager[Any]:
        """Begin the database's transaction if the batch has none. A transaction that shares it gets
        a savepoint, to which it is rolled back alone.
        """
        assert self._batch is not None
        if not self._has_database_transaction:
            self._batch.enter_context(self._store.transaction())
            self._has_database_transaction = True
        return ExitStack() if has_own_batch else self._store.savepoint()

    # --- failures ---

    def guard(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return ``call`` as a callback of the event loop. Its exceptions reach :meth:`fail`
        instead of only the log. It is no longer called when the core has failed.
        """

        def guarded(*args: Any) -> None:
            if self.failed.done():
                return
            try:
                call(*args)
            except Exception as error:
                self.fail(error)

        return guarded

    def fail(self, error: BaseException) -> None:
        """End the core after a failure, because memory and store may differ. Only the first error
        is kept.
        """
        if not self.failed.done():
            self.failed.set_exception(error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the core if a task has failed: the done-callback of its tasks."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
