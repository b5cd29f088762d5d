"""Transactions of the daemon's core, and batches of them: a decision is saved before anybody is
told of it.

A transaction is one unit of decisions; it is saved as a whole or not at all. The transactions of
one batch (all messages that the daemon reads at one go) share one transaction of the database,
because a commit costs several times what most messages change. Messages and answers go out after
the commit. A transaction outside of a batch is a batch of its own.

Decides that a transaction that fails leaves nothing in the store and has told nobody, and that the
earlier ones of its batch hold all the same. The caller decides what a transaction does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from malletrain.daemon.parts import Parts
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.store.database import StatementRefused, StoreError


class CoreOver(RuntimeError):
    """A transaction was begun on a core that has failed."""


class TransactionRunner:
    """Runs the transactions of one core. Create it within the event loop in which it is used.

    Args:
        parts: the daemon's state.
        begin: called with the time at the beginning of each transaction.
        decide: called with the time at the end of each transaction, before it is saved.
        sent: called after a batch is saved and its messages are sent, with the peers that could
            not be reached.
    """

    def __init__(
        self,
        parts: Parts,
        begin: Callable[[float], None],
        decide: Callable[[float], None],
        sent: Callable[[set[bytes]], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception once the core has failed; see :meth:`fail`."""
        self.torn = False
        """Whether a transaction has failed, so that memory and store may differ."""
        self._clock, self._store, self._outbox = parts.clock, parts.store, parts.outbox
        self._begin, self._decide, self._sent = begin, decide, sent
        self._batch: ExitStack | None = None
        self._saving = False
        """Whether the batch has a transaction of the database, because it has a transaction."""
        self._within = False
        """Whether a transaction is open."""
        self._refused: StoreError | None = None
        """Why nothing of this batch can be saved."""

    @contextmanager
    def transaction(self) -> Iterator[float]:
        """Decide everything inside, save it together, then tell it. Transactions nest.

        Yields:
            The time, seconds since the epoch.

        Raises:
            CoreOver: the core has failed before.
        """
        now = self._clock.now()
        if self._within:
            yield now
            return
        if self.failed.done():
            raise CoreOver("This core has failed; another one takes its place.")
        alone = self._batch is None
        with self.batch():
            mark = self._outbox.mark()
            self._within = True
            try:
                with self._savepoint(alone):
                    self._begin(now)
                    yield now
                    self._decide(now)
                    reached(FaultPoint.DAEMON_DECIDED)
            except BaseException as error:
                self.torn = True
                self._outbox.forget(mark)
                if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
                    self._refused = error
                raise
            finally:
                self._within = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Save the transactions inside together at the end, and send all messages after that.
        Batches nest.

        Raises:
            StoreError: the database refuses them; nothing is saved, and nobody is told.
        """
        if self._batch is not None:
            yield
            return
        try:
            with ExitStack() as self._batch:
                self._outbox.open = True
                yield
                if self._refused is not None:
                    raise self._refused
        except BaseException:
            self.torn = True
            self._outbox.forget(0)
            raise
        finally:
            saved = self._saving
            self._batch, self._saving, self._refused = None, False, None
            self._outbox.open = False
        try:
            if saved:
                reached(FaultPoint.DAEMON_SAVED)
            unreached = set(self._outbox.flush())
            if saved:
                reached(FaultPoint.DAEMON_SENT)
                self._sent(unreached)
        except BaseException:
            self.torn = True  # something that is saved was not sent
            raise

    def _savepoint(self, alone: bool) -> AbstractContextManager[Any]:
        """Begin the database's transaction if the batch has none. A transaction that shares it gets
        a savepoint, to which it is rolled back alone.
        """
        assert self._batch is not None
        if not self._saving:
            self._batch.enter_context(self._store.transaction())
            self._saving = True
        return ExitStack() if alone else self._store.savepoint()

    # --- failures ---

    def guard(self, call: Callable[..., None]) -> Callable[..., None]:
        """``call`` as a callback of the event loop. Its exception reaches :meth:`fail` instead of
        the log only. It is not called any more once the core has failed.
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
        """The core has failed: memory and store may differ. Only the first error is kept."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Done-callback of tasks that must not fail."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
