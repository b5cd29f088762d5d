"""Steps, and turns of several: what is decided is saved before anybody hears of it.

A step is decided as one and saved whole or not at all. The steps of one turn (all messages that the
daemon takes in at one go) are saved in one transaction, and what they and the answers have to tell
goes out after it: to commit costs several times what most messages change. A step outside of a turn
is one of its own. Decides that a step that fails leaves nothing of itself in the store and has told
nobody, and that those before it in its turn hold all the same. What a step decides is its caller's.
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
    """A step was asked of a core that has failed before."""


class StepRunner:
    """The steps of one core. Make it within the loop that it is to run in.

    Args:
        parts: what the steps work on.
        begin: called with the time at the beginning of each step.
        decide: called with the time at the end of each step, before it is saved.
        told: called when what was saved has been sent, with the peers that could not be reached.
    """

    def __init__(
        self,
        parts: Parts,
        begin: Callable[[float], None],
        decide: Callable[[float], None],
        told: Callable[[set[bytes]], None],
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception when this core is over; see :meth:`fail`."""
        self.torn = False
        """A step has failed: memory and store may be apart."""
        self._clock, self._store, self._outbox = parts.clock, parts.store, parts.outbox
        self._begin, self._decide, self._told = begin, decide, told
        self._turn: ExitStack | None = None
        self._saving = False
        """The turn has a transaction: there was a step in it."""
        self._within = False
        """A step is under way."""
        self._refused: StoreError | None = None
        """Why nothing of this turn can be saved."""

    @contextmanager
    def step(self) -> Iterator[float]:
        """Everything inside is decided, saved together, then told. Yields the time. Steps nest."""
        now = self._clock.now()
        if self._within:
            yield now
            return
        if self.failed.done():
            raise CoreOver("This core has failed; another one takes its place.")
        alone = self._turn is None
        with self.turn():
            told = self._outbox.mark()
            self._within = True
            try:
                with self._part(alone):
                    self._begin(now)
                    yield now
                    self._decide(now)
                    reached(FaultPoint.DAEMON_DECIDED)
            except BaseException as error:
                self.torn = True
                self._outbox.forget(told)
                if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
                    self._refused = error
                raise
            finally:
                self._within = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The steps inside are saved together at the end, and all that is sent meanwhile goes out
        after that. Turns nest.

        Raises:
            StoreError: the database does not take it: nothing is saved, and nobody was told.
        """
        if self._turn is not None:
            yield
            return
        try:
            with ExitStack() as self._turn:
                self._outbox.open = True
                yield
                if self._refused is not None:
                    raise self._refused
        except BaseException:
            self.torn = True
            self._outbox.forget(0)
            raise
        finally:
            stepped = self._saving
            self._turn, self._saving, self._refused = None, False, None
            self._outbox.open = False
        try:
            if stepped:
                reached(FaultPoint.DAEMON_SAVED)
            unreached = set(self._outbox.flush())
            if stepped:
                reached(FaultPoint.DAEMON_SENT)
                self._told(unreached)
        except BaseException:
            self.torn = True  # not all that was saved was told
            raise

    def _part(self, alone: bool) -> AbstractContextManager[Any]:
        """The transaction of the turn, or what is undone alone where other steps are in it too."""
        assert self._turn is not None
        if not self._saving:
            self._turn.enter_context(self._store.transaction())
            self._saving = True
        return ExitStack() if alone else self._store.part()

    # --- what fails ---

    def guard(self, call: Callable[..., None]) -> Callable[..., None]:
        """``call`` as a callback of the loop whose exception is told to :meth:`fail` instead of
        vanishing in a log. Of a core that is over nothing is called.
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
        """This core is over: memory and store may be apart. The first error is the one told."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """For tasks that must not fail, as their callback."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
