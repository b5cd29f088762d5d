"""Messages that come in, handed to whom they are for: agents' to the inbox, clients' to the API,
strangers' to the login. Answers go back when they are ready. One that cannot be handled costs
itself (:mod:`malletrain.daemon.mishaps`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import structlog

from malletrain.daemon.answering import Answering
from malletrain.daemon.api import Api, StepFailed
from malletrain.daemon.core import Core
from malletrain.daemon.inbox import Inbox
from malletrain.daemon.login import Login
from malletrain.daemon.mishaps import Mishap, Mishaps
from malletrain.daemon.rates import Rates, Turn
from malletrain.daemon.steps import CoreOver
from malletrain.daemon.timed import TimedCall
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.database import StatementRefused, StoreError

log = structlog.get_logger(__name__)


TOLD_PER_S = 0.1
"""Lines of the log a second about messages of one kind of sender that are none."""
PROBES_S = (0.02, 0.2)
"""When it is tried after the end of a connection whether its peer can be reached."""
WAITING = frozenset({"events", "news"})
"""Operations that may wait for news; none of them changes anything."""
AGAIN = "The daemon is beginning anew; ask again in a moment."


class MessageFailed(Exception):
    """A message tore a step: the parts of the daemon have to be made anew. The cause is what
    happened.
    """

    def __init__(self, mishap: Mishap) -> None:
        super().__init__(mishap.sentence)
        self.mishap = mishap


class ClientRequest(NamedTuple):
    """A request of a client."""

    peer: bytes
    key: str
    user: str
    request: messages.Request


class Switchboard:
    """What the transport calls, see :class:`malletrain.daemon.transport.Receiver`. ``identity``:
    whose a key is, as the key ring names it.
    """

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        api: Api,
        login: Login,
        mishaps: Mishaps,
        identity: Callable[[str], str | None],
    ) -> None:
        self._core = core
        self._mishaps = mishaps
        self._rates = Rates(core.config.daemon.request_rate, core.accounts.operates, monotonic)
        self._answering = Answering()
        self._told = Rates(TOLD_PER_S, lambda sender: False, monotonic)
        self._inbox = inbox
        self._api = api
        self._login = login
        self._identity = identity
        self.waiting: dict[asyncio.Task[None], ClientRequest] = {}
        """Those that wait for news."""
        self._answers: set[asyncio.Task[None]] = set()
        self._gone: set[bytes] = set()
        """Peers whose connections have just ended."""
        self._probes: list[asyncio.TimerHandle] = []
        """Those that are due for them."""
        self._table: dict[str, Callable[[bytes, str, Any, int, str], None]] = {
            "lease": lambda peer, name, message, size, key: inbox.handle(peer, name, message),
            "client": self._client,
            "stranger": lambda peer, name, message, size, key: self._stranger(peer, name, message),
        }

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The messages of one turn: what is to be saved for them is saved at once, and what they
        are answered goes out after it. One by one where one of them may be what the daemon failed
        at: then it shows which.
        """
        if self._mishaps.doubtful():
            yield
            return
        try:
            with self._core.turn():
                yield
        except Exception as error:
            self._core.fail(error)

    def message(self, peer: bytes, who: str, message: Any, size: int, key: str) -> None:
        """A valid message of a peer whose ``key`` is that of ``who``, as the key ring names it."""
        if self._core.failed.done():  # the next parts ask agents who they are
            if isinstance(message, messages.Request):
                self._core.transmit(peer, _failure(message, AGAIN))
            return
        request = isinstance(message, messages.Request)
        kind = message.op if request else type(message).__name__
        if refusal := self._mishaps.refusal(who, kind):
            told = _failure(message, refusal) if request else messages.Error(refusal)
            self._core.transmit(peer, told)
            return
        role, _, name = who.partition(":")
        try:
            self._table[role](peer, name, message, size, key)
        except Exception as error:
            self._failed(who, kind, error)

    def invalid(self, sentence: str) -> None:
        """Something came that is no message."""
        sender = _sender(sentence)
        self._core.metrics.invalid_message(sender)
        if self._told.at_once(sender):
            log.warning("message refused", reason=sentence)

    def withdrawn(self, peer: bytes) -> None:
        """A peer speaks whose lease has ended: it is still there (its node lost contact with the
        main scheduler), and told only that it may not speak, it would stay for ever. What it is
        told waits for the turn to be saved: the lease may have ended in this one.
        """
        self.invalid("A message came from a peer whose key is not valid any more.")
        self._core.transmit(peer, messages.Goodbye("The lease has ended."))

    def dropped(self, who: str, number: int) -> None:
        """So many messages were let go unread: too many of their sender wait."""
        sender = _sender(who)
        self._core.metrics.dropped_messages(sender, number)
        if self._told.at_once(f"dropped {sender}"):
            log.warning("messages dropped: too many of one sender wait", sender=who)

    def disconnected(self, peer: bytes) -> None:
        """A connection ended; that nothing reaches the peer any more shows a moment later. Those of
        one moment are looked at together.
        """
        if not self._gone:
            loop, probe = asyncio.get_running_loop(), self._core.guard(self._inbox.probe)
            gone: set[bytes] = set()
            self._gone = gone
            self._probes = [due for due in self._probes if due.when() > loop.time()]
            self._probes.append(loop.call_later(PROBES_S[0], self._probe, gone, probe))
            self._probes += [loop.call_later(delay, probe, gone) for delay in PROBES_S[1:]]
        self._gone.add(peer)

    def close(self) -> None:
        """Nothing happens by itself any more."""
        for due in self._probes:
            due.cancel()

    def _probe(self, gone: set[bytes], probe: Callable[[set[bytes]], None]) -> None:
        self._gone = set()
        probe(gone)

    def end_waiting(self) -> None:
        """Who waits for news with a key that was withdrawn is told so. To be called twice a
        second.
        """
        for task, asked in list(self.waiting.items()):
            if self._is_out(asked):
                task.cancel()
                self._stranger(asked.peer, asked.key, asked.request)

    def _is_out(self, asked: ClientRequest) -> bool:
        return self._identity(asked.key) != f"client:{asked.user}"

    def _client(self, peer: bytes, user: str, message: Any, size: int, key: str) -> None:
        if not isinstance(message, messages.Request):
            sentence = f"A client may not send {type(message).__name__}."
            self._core.transmit(peer, messages.Error(sentence))
        elif (turn := self._rates.next(user, size)) is not None:
            asked = ClientRequest(peer, key, user, message)
            task = self._reply(peer, f"client:{user}", message, self._in_turn(asked, turn))
            if message.op in WAITING:
                self.waiting[task] = asked
                task.add_done_callback(self.waiting.pop)
        else:  # who sends very many is not worth a task for each
            rate = self._core.config.daemon.request_rate
            sentence = (
                f"Too many of your requests wait; {rate:g} a second are answered. Wait for the "
                "answers."
            )
            refused = messages.Reply(message.id, False, error=sentence, code="busy")
            self._core.transmit(peer, refused)

    async def _in_turn(self, asked: ClientRequest, turn: Turn) -> messages.Reply:
        user, request, answer = asked.user, asked.request, None
        try:
            if turn.wait_s:
                await asyncio.sleep(turn.wait_s)
            if turn.taken_s:  # else it is an operator's, who do not wait
                await self._answering.turn(user, turn.taken_s)
            if self._is_out(asked):  # its key was withdrawn while it waited
                return await self._login.answer(asked.key, request)
            answer = TimedCall(self._api.answer(user, request))
            return await answer
        finally:
            self._rates.took(user, turn, answer.seconds if answer is not None else 0.0)

    def _stranger(self, peer: bytes, key: str, message: Any) -> None:
        if isinstance(message, messages.Request):
            self._reply(peer, f"stranger:{key}", message, self._login.answer(key, message))
        else:
            self._core.transmit(peer, messages.Goodbye("The lease has ended."))

    def _failed(self, who: str, kind: str, error: BaseException) -> None:
        """A message could not be handled. Where nothing is apart, that is all."""
        core = self._core
        if core.failed.done():
            return
        if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
            core.fail(error)  # not the message's fault
            return
        mishap = self._mishaps.of_message(who, kind, error)
        if core.torn:
            failure = MessageFailed(mishap)
            failure.__cause__ = error
            core.fail(failure)
            return
        try:
            with core.step():
                core.audit.record(
                    EventKind.MESSAGE_FAILED, f"{mishap.sentence} Nothing else came of it."
                )
        except Exception as again:
            core.fail(again)

    def _reply(
        self,
        peer: bytes,
        who: str,
        request: messages.Request,
        answer: Coroutine[Any, Any, messages.Reply],
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._answer(peer, who, request, answer))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        return task

    async def _answer(
        self,
        peer: bytes,
        who: str,
        request: messages.Request,
        answer: Coroutine[Any, Any, messages.Reply],
    ) -> None:
        try:
            reply = await answer
        except Exception as error:
            cause = (error.__cause__ or error) if isinstance(error, StepFailed) else error
            sentence = "The daemon failed at this request; its log says how."
            if isinstance(cause, CoreOver):
                sentence = AGAIN
            else:
                self._failed(who, request.op, cause)
            reply = _failure(request, sentence)
        self._core.transmit(peer, reply)


def _sender(words: str) -> str:
    """The kind of sender, of what begins with who it is."""
    return {"lease": "agent", "client": "client"}.get(words.partition(":")[0], "unknown")


def _failure(request: messages.Request, sentence: str) -> messages.Reply:
    return messages.Reply(request.id, False, error=sentence, code="internal")
