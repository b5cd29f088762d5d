"""Transactions of the daemon's core, and batches of them: a decision is saved before any message
about it is sent.

A transaction is one unit of decisions; it is saved as a whole or not at all. The transactions of
one batch (all messages that the daemon reads together) share one transaction of the database,
because a commit takes several times as long as most messages. Messages and answers go out after the
commit. A transaction outside of a batch is a batch of its own.

Decides that a failed transaction leaves nothing in the store and sends no messages, and that the
earlier ones of its batch remain valid. The caller decides what a transaction does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from malletrain.daemon.daemon_state import DaemonState
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.database import StatementRefused, StoreError


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
