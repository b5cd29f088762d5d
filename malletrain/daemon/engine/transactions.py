"""Transactions of the daemon, and batches of them: a decision is saved before any message about it
is sent.

The order in a transaction: an event occurs → the controller and the rounds decide → the store is
written → messages are sent. A transaction is one unit of decisions; it is saved as a whole or not
at all. The transactions of one batch (all messages that the daemon reads together) share one
transaction of the database, because a commit takes several times as long as most messages.
Messages and answers go out after the commit. A transaction outside of a batch is a batch of its
own. A daemon that is killed between two batches loses nothing. One that is killed within a batch
has not sent any message of it.

Decides that a failed transaction leaves nothing in the store and sends no messages, and that the
earlier ones of its batch remain valid. After a failed transaction memory and store may differ: this
engine ends (:meth:`Transactions.fail`), and another one starts from the store, as after a restart.
Jobs continue meanwhile. Decides also when the engine wakes although no event arrives
(:class:`Alarm`). The caller decides what a transaction does, and
:mod:`malletrain.daemon.engine.decisions` what follows from its events.

Operations of clients begin here, too (:class:`OperationContext`): with the job that a client names,
if the user may manage it, and with a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from malletrain.core.events import Event
from malletrain.daemon.engine.decisions import Decisions
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.jobs.admission import RequestRefused, text
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.database import StatementRefused, StoreError
from malletrain.store.records import JobRow

MIN_DELAY_S = 0.005
"""Minimum delay of a call, seconds, so that calls do not monopolise the loop."""


class Alarm:
    """The timer of one engine. Create it within the loop in which it is used.

    Args:
        guard: wraps a function as a callback of the loop.
        now: returns the time, seconds.
        when: returns the next due time, seconds; None if nothing is due.
        ring: called at that time.
    """

    def __init__(
        self,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
        now: Callable[[], float],
        when: Callable[[], float | None],
        ring: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._set_timer_guarded, self._ring = guard(self._set_timer), guard(ring)
        self._now, self._when = now, when
        self._pending_update: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Compute the due time again, once in this round of the loop."""
        if self._pending_update is None:
            self._pending_update = self._loop.call_soon(self._set_timer_guarded)

    def close(self) -> None:
        """Cancel all pending calls."""
        for handle in (self._pending_update, self._timer):
            if handle is not None:
                handle.cancel()
        self._pending_update = self._timer = None

    def _set_timer(self) -> None:
        self._pending_update = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due := self._when()) is not None:
            delay = max(MIN_DELAY_S, due - self._now())
            self._timer = self._loop.call_later(delay, self._ring)


class EngineEnded(RuntimeError):
    """A transaction was begun after the engine had failed."""


class Transactions:
    """Runs the transactions of one engine. Create it within the event loop in which it is used.

    Args:
        state: the daemon's state.
        decisions: decides what follows from the events of each transaction.
    """

    def __init__(self, state: SiteState, decisions: Decisions) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception once the engine has failed; see :meth:`fail`."""
        self.torn = False
        """Whether a transaction has failed, so that memory and store may differ."""
        self._clock, self._store, self._outbox = state.clock, state.store, state.outbox
        self._events, self._decisions = state.events, decisions
        self._alarm = Alarm(self.guard, self._clock.now, decisions.next_due_at, self.tick)
        self._batch: ExitStack | None = None
        self._has_database_transaction = False
        """Whether the batch has a transaction of the database, because it has a transaction."""
        self._is_open = False
        """Whether a transaction is open."""
        self._refused: StoreError | None = None
        """Why this batch cannot be saved; None if it can."""

    @contextmanager
    def begin(self) -> Iterator[float]:
        """Make all decisions in the body one unit: they are saved together, and their messages are
        sent after that. Transactions nest.

        Yields:
            The time, seconds since the epoch.

        Raises:
            EngineEnded: the engine has failed before.
        """
        now = self._clock.now()
        if self._is_open:
            yield now
            return
        if self.failed.done():
            raise EngineEnded("This engine has failed; another one replaces it.")
        has_own_batch = self._batch is None
        with self.batch():
            savepoint = self._outbox.savepoint()
            self._is_open = True
            try:
                with self._savepoint(has_own_batch):
                    self._decisions.begin(now)
                    yield now
                    self._decisions.decide(now)
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
                self._decisions.saved(unreached)
                self._alarm.set()
        except BaseException:
            self.torn = True  # messages of saved decisions were not sent
            raise

    def feed(self, event: Event) -> None:
        """Pass an event to the controller, in this transaction or one of its own."""
        with self.begin():
            self._events.append(event)

    def tick(self) -> None:
        """Act on all time limits that have passed."""
        with self.begin() as now:
            self._decisions.tick(now)

    def close(self) -> None:
        """Cancel the alarm."""
        self._alarm.close()

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
        instead of only the log. It is no longer called when the engine has failed.
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
        """End the engine after a failure, because memory and store may differ. Only the first error
        is kept.
        """
        if not self.failed.done():
            self.failed.set_exception(error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the engine if a task has failed: the done-callback of its tasks."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


Operation = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""(user, parameters of the request) → the data of the answer."""


class TransactionFailed(Exception):
    """A transaction failed; see the cause."""


class OperationContext:
    """What the operations of one daemon use.

    Args:
        state: the daemon's state.
        transactions: saves changes.
    """

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self.state = state
        self._transactions = transactions

    @contextmanager
    def transaction(self) -> Iterator[float]:
        """Open a transaction, and yield its time. Raises TransactionFailed."""
        try:
            with self._transactions.begin() as now:
                yield now
        except Exception as error:
            raise TransactionFailed(str(error)) from error

    def find(self, name: str, user: str) -> JobRow:
        """Return the job with this name or id. Jobs of ``user`` come before those of others. Raises
        RequestRefused.
        """
        all_rows = self.state.store.find_jobs(name)
        rows = [row for row in all_rows if row.owner == user] or all_rows
        if not rows:
            raise RequestRefused(f"There is no job '{name}'; `malletrain status` lists all jobs.")
        if len({row.name for row in rows}) > 1:
            raise RequestRefused(
                f"'{name}' may mean {', '.join(f'{row.id} ({row.name})' for row in rows[:5])}; "
                "name one of them."
            )
        return rows[-1]

    def requested(self, user: str, params: Mapping[str, Any]) -> JobRow:
        """Return the job that a request names as ``job``. Raises RequestRefused."""
        return self.find(text(params, "job"), user)

    def managed(self, user: str, params: Mapping[str, Any], operation: str) -> JobRow:
        """Return the job that a request names as ``job``.

        Args:
            user: user of the client.
            params: parameters of the request.
            operation: what the user wants to do, such as "read its logs".

        Raises:
            RequestRefused: there is no such job, or the user may not manage it.
        """
        row = self.requested(user, params)
        if problem := self.unmanageable(user, row, operation):
            raise RequestRefused(problem)
        return row

    def unmanageable(self, user: str, row: JobRow, operation: str) -> str:
        """Return why ``user`` may not manage the job, as a sentence; empty if the user may."""
        if self.state.accounts.may_manage(user, row.owner):
            return ""
        return (
            f"Job {row.id} belongs to {row.owner}; only its owner or an operator can {operation}."
        )
