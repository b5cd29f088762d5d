"""Routes incoming messages: those of agents to their handlers, those of clients to the API, those
of unauthenticated peers to the login. Answers are sent when they are ready. A message whose handler
fails costs only itself (:mod:`malletrain.daemon.site.handler_failures`).

Clients with unknown keys may log in, and the answers say how. :class:`Login` decides only whether a
credential is valid; the key ring stores the keys of users who logged in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, Protocol

import structlog

from malletrain.daemon.api.operations import Api
from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import EngineEnded, TransactionFailed, Transactions
from malletrain.daemon.nodes.agent_handlers import AgentHandlers
from malletrain.daemon.server.sender_limits import LogLimits, RequestLimits, TimedCall, Turn
from malletrain.daemon.site.handler_failures import HandlerFailure, HandlerFailures
from malletrain.identity.keys import KeyRing
from malletrain.identity.users import UsersError, login_payload
from malletrain.protocol import messages
from malletrain.protocol.event_kinds import EventKind
from malletrain.store.database import StatementRefused, StoreError

log = structlog.get_logger(__name__)

UNAUTHENTICATED = "unauthenticated"
"""Error code of answers to clients that have to log in first."""
MAX_WAITING = 20
"""Maximum number of logins that wait while one is checked. Unauthenticated clients can send any
number.
"""


class Credentials(Protocol):
    """Verifies credentials."""

    def user(self, credential: str, payload: str) -> str:
        """Return the user who created the credential over ``payload``. Raises UsersError."""
        ...


class Login:
    """Answers unauthenticated clients. Checks one credential at a time; a few may wait.

    Args:
        keys: keys of the daemon and its clients.
        munge: verifies credentials of the machine's users; None if logins are not possible.
        is_ignored: returns whether the list of users has a key only in lines that are ignored; None
            if there is no list.
    """

    def __init__(
        self,
        keys: KeyRing,
        munge: Credentials | None,
        is_ignored: Callable[[str], bool] | None = None,
    ) -> None:
        self._keys = keys
        self._munge = munge
        self._is_ignored = is_ignored
        self._check_lock = asyncio.Lock()
        self._waiting = 0

    async def answer(self, key: str, request: messages.Request) -> messages.Reply:
        """Return the reply to one request of the client with this key. Errors in the request are
        reported in the reply. Of the list of users, the reply reveals only whether the client's own
        key is in an ignored line.
        """
        if request.op != "login" or self._munge is None:
            data = {"munge": self._munge is not None}
            if self._is_ignored is not None and self._is_ignored(key):
                data["ignored_line"] = True
            return messages.Reply(
                request.id, False, data, "The daemon does not know your key.", UNAUTHENTICATED
            )
        if self._waiting > MAX_WAITING:
            return messages.Reply(
                request.id,
                False,
                error="Too many users are just logging in; try again in a moment.",
            )
        self._waiting += 1
        try:
            credential = str(request.parameters().get("credential", ""))
            async with self._check_lock:
                user = await asyncio.to_thread(
                    self._munge.user, credential, login_payload(self._keys.server.public, key)
                )
        except UsersError as error:
            log.warning("login refused", reason=str(error))
            return messages.Reply(request.id, False, error=str(error))
        except Exception as error:
            log.error("login failed", reason=f"{type(error).__name__}: {error}")
            return messages.Reply(
                request.id,
                False,
                error="The daemon could not check your credential; its log says why.",
                code="internal",
            )
        finally:
            self._waiting -= 1
        self._keys.accept_client(key, user)
        log.info("login", user=user)
        return messages.Reply(request.id, True, {"user": user})


PROBES_S = (0.02, 0.2)
"""Delays after the end of a connection at which the daemon probes the peer, seconds."""
LONG_POLLS = frozenset({"events", "news", "members", "command-output", "command-input"})
"""Operations that may wait for news. They can be repeated."""
RESTARTING = "The daemon is restarting; ask again in a moment."


class MessageFailed(Exception):
    """The handler of a message failed within a transaction, so the daemon's components have to be
    replaced. ``__cause__`` is the exception.
    """

    def __init__(self, handler_failure: HandlerFailure) -> None:
        super().__init__(handler_failure.sentence)
        self.handler_failure = handler_failure


class ClientRequest(NamedTuple):
    """A request of a client."""

    peer: bytes
    """Address of the connection."""
    key: str
    """Public key of the client, z85."""
    user: str
    """User of the client."""
    request: messages.Request
    """The request."""


class MessageRouter:
    """Receives from the transport, see :class:`malletrain.daemon.server.transport.Receiver`.

    Args:
        state: the daemon's state.
        transactions: saves decisions, and sends messages after that.
        agent_handlers: handles messages of agents.
        api: answers requests of clients.
        login: answers unauthenticated peers.
        handler_failures: records messages whose handler failed.
        identity: returns the owner of a public key, as named by the key ring; None if there is
            none.
    """

    def __init__(
        self,
        state: SiteState,
        transactions: Transactions,
        agent_handlers: AgentHandlers,
        api: Api,
        login: Login,
        handler_failures: HandlerFailures,
        identity: Callable[[str], str | None],
    ) -> None:
        self._state = state
        self._transactions = transactions
        self._handler_failures = handler_failures
        rate = state.config.daemon.request_rate
        self._request_limits = RequestLimits(rate, state.accounts.operates, monotonic)
        self._log_limits = LogLimits(monotonic)
        """The log lines that may be written now, by kind of sender."""
        self._agent_handlers = agent_handlers
        self._api = api
        self._login = login
        self._identity = identity
        self.long_polls: dict[asyncio.Task[None], ClientRequest] = {}
        """Requests that wait for news."""
        self._answers: set[asyncio.Task[None]] = set()
        self._disconnected: set[bytes] = set()
        """Peers whose connections have just ended."""
        self._probes: list[asyncio.TimerHandle] = []
        """Timers of their probes."""
        self._table: dict[str, Callable[[bytes, str, Any, int, str], None]] = {
            "lease": lambda peer, name, message, size, key: agent_handlers.handle(
                peer, name, message
            ),
            "client": self._client,
            "unauthenticated": lambda peer, name, message, size, key: self._unauthenticated(
                peer, name, message
            ),
        }

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context for the messages that are read together: their changes are saved together before
        the answers are sent. If the daemon has failed lately for an unknown reason, messages are
        handled one by one, so that the message that causes the failure is found.
        """
        if self._handler_failures.doubtful():
            yield
            return
        try:
            with self._transactions.batch():
                yield
        except Exception as error:
            self._transactions.fail(error)

    def message(self, peer: bytes, who: str, message: Any, size: int, key: str) -> None:
        """Handle a valid message.

        Args:
            peer: address of the connection.
            who: owner of the key, as named by the key ring.
            message: the decoded message.
            size: size of the message, bytes.
            key: public key of the sender, z85.
        """
        if self._transactions.failed.done():  # agents identify themselves to the next engine
            if isinstance(message, messages.Request):
                self._state.outbox.answer(peer, _failure(message, RESTARTING))
            return
        request = isinstance(message, messages.Request)
        kind = message.op if request else type(message).__name__
        if refusal := self._handler_failures.refusal(who, kind):
            answer = _failure(message, refusal) if request else messages.Error(refusal)
            self._state.outbox.answer(peer, answer)
            return
        role, _, name = who.partition(":")
        try:
            self._table[role](peer, name, message, size, key)
        except Exception as error:
            self._failed(who, kind, error)

    def invalid(self, sentence: str) -> None:
        """Count and log bytes that are not a message; ``sentence`` says why."""
        sender = _sender(sentence)
        self._state.metrics.invalid_message(sender)
        if self._log_limits.may_log(sender):
            log.warning("message refused", reason=sentence)

    def withdrawn(self, peer: bytes) -> None:
        """Tell a peer that its lease has ended. Otherwise it would never exit if its node has lost
        contact with the main scheduler. The answer waits until the batch is saved in which the
        lease may have ended.
        """
        self.invalid("A message came from a peer whose key is no longer valid.")
        self._state.outbox.answer(peer, messages.Goodbye("The lease has ended."))

    def dropped(self, who: str, number: int) -> None:
        """Count and log messages that were dropped unread because too many of their sender wait."""
        sender = _sender(who)
        self._state.metrics.dropped_messages(sender, number)
        if self._log_limits.may_log(f"dropped {sender}"):
            log.warning("messages dropped: too many of one sender wait", sender=who)

    def disconnected(self, peer: bytes) -> None:
        """Schedule probes of a peer whose connection ended. Only after a moment do messages to it
        fail. Connections that end at about the same time share the probes.
        """
        if not self._disconnected:
            loop, probe = (
                asyncio.get_running_loop(),
                self._transactions.guard(self._agent_handlers.probe),
            )
            ended_peers: set[bytes] = set()
            self._disconnected = ended_peers
            self._probes = [timer for timer in self._probes if timer.when() > loop.time()]
            self._probes.append(loop.call_later(PROBES_S[0], self._probe, ended_peers, probe))
            self._probes += [loop.call_later(delay, probe, ended_peers) for delay in PROBES_S[1:]]
        self._disconnected.add(peer)

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._probes:
            timer.cancel()

    def _probe(self, ended_peers: set[bytes], probe: Callable[[set[bytes]], None]) -> None:
        self._disconnected = set()
        probe(ended_peers)

    def end_waiting(self) -> None:
        """Answer the long polls whose key has been withdrawn. Call it twice a second."""
        for task, request in list(self.long_polls.items()):
            if self._is_withdrawn(request):
                task.cancel()
                self._unauthenticated(request.peer, request.key, request.request)

    def _is_withdrawn(self, request: ClientRequest) -> bool:
        return self._identity(request.key) != f"client:{request.user}"

    def _client(self, peer: bytes, user: str, message: Any, size: int, key: str) -> None:
        if not isinstance(message, messages.Request):
            sentence = f"A client may not send {type(message).__name__}."
            self._state.outbox.answer(peer, messages.Error(sentence))
        elif (turn := self._request_limits.accept(user, size)) is not None:
            request = ClientRequest(peer, key, user, message)
            task = self._reply(peer, f"client:{user}", message, self._answer_in_turn(request, turn))
            if message.op in LONG_POLLS:
                self.long_polls[task] = request
                task.add_done_callback(self.long_polls.pop)
        else:  # a flood of requests must not create a task for each
            rate = self._state.config.daemon.request_rate
            sentence = (
                f"Too many of your requests wait; {rate:g} a second are answered. Wait for the "
                "answers."
            )
            reply = messages.Reply(message.id, False, error=sentence, code="busy")
            self._state.outbox.answer(peer, reply)

    async def _answer_in_turn(self, client: ClientRequest, turn: Turn) -> messages.Reply:
        answer = None
        try:
            await self._request_limits.begin(turn)
            if self._is_withdrawn(client):  # while it waited
                return await self._login.answer(client.key, client.request)
            answer = TimedCall(self._api.answer(client.user, client.request))
            return await answer
        finally:
            self._request_limits.end(turn, answer.seconds if answer is not None else 0.0)

    def _unauthenticated(self, peer: bytes, key: str, message: Any) -> None:
        if isinstance(message, messages.Request):
            self._reply(peer, f"unauthenticated:{key}", message, self._login.answer(key, message))
        else:
            self._state.outbox.answer(peer, messages.Goodbye("The lease has ended."))

    def _failed(self, who: str, kind: str, error: BaseException) -> None:
        """Record a message whose handler failed. If memory and store may differ, the engine
        ends.
        """
        state = self._state
        if self._transactions.failed.done():
            return
        if isinstance(error, StoreError) and not isinstance(error, StatementRefused):
            self._transactions.fail(error)  # the database's fault, not the message's
            return
        handler_failure = self._handler_failures.of_message(who, kind, error)
        if self._transactions.torn:
            failure = MessageFailed(handler_failure)
            failure.__cause__ = error
            self._transactions.fail(failure)
            return
        try:
            with self._transactions.begin():
                state.audit.record(
                    EventKind.MESSAGE_FAILED, f"{handler_failure.sentence} It had no other effect."
                )
        except Exception as again:
            self._transactions.fail(again)

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
            cause = (error.__cause__ or error) if isinstance(error, TransactionFailed) else error
            sentence = "The daemon failed to handle this request; its log has the cause."
            if isinstance(cause, EngineEnded):
                sentence = RESTARTING
            else:
                self._failed(who, request.op, cause)
            reply = _failure(request, sentence)
        self._state.outbox.answer(peer, reply)


def _sender(words: str) -> str:
    """Return the kind of sender. ``words`` begin with its role."""
    return {"lease": "agent", "client": "client"}.get(words.partition(":")[0], "unknown")


def _failure(request: messages.Request, sentence: str) -> messages.Reply:
    return messages.Reply(request.id, False, error=sentence, code="internal")
