"""Messages that come in, handed to whom they are for: agents' to the inbox, clients' to the API,
strangers' to the login. Answers go back when they are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from malletrain.daemon.api import Api, StepFailed
from malletrain.daemon.core import Core
from malletrain.daemon.inbox import Inbox
from malletrain.daemon.login import Login
from malletrain.protocol import messages

log = structlog.get_logger(__name__)


class Switchboard:
    """What the transport calls, see :class:`malletrain.daemon.transport.Receiver`."""

    def __init__(self, core: Core, inbox: Inbox, api: Api, login: Login) -> None:
        self._core = core
        self._inbox = inbox
        self._api = api
        self._login = login
        self._answers: set[asyncio.Task[None]] = set()
        self._table: dict[str, Callable[[bytes, str, Any], None]] = {
            "lease": core.guard(inbox.handle),
            "client": core.guard(self._client),
            "stranger": core.guard(self._stranger),
        }

    def message(self, peer: bytes, who: str, message: Any) -> None:
        """A valid message of a peer whose key is that of ``who``, as the key ring names it."""
        role, _, name = who.partition(":")
        self._table[role](peer, name, message)

    def invalid(self, sentence: str) -> None:
        """Something came that is no message."""
        role = sentence.partition(":")[0]
        sender = {"lease": "agent", "client": "client"}.get(role, "unknown")
        self._core.metrics.invalid_message(sender)
        log.warning("message refused", reason=sentence)

    def disconnected(self) -> None:
        """Some connection ended; whose shows a moment later."""
        loop = asyncio.get_running_loop()
        for delay in (0.02, 0.2):
            loop.call_later(delay, self._core.guard(self._inbox.probe))

    def _client(self, peer: bytes, user: str, message: Any) -> None:
        if isinstance(message, messages.Request):
            self._reply(peer, message, self._api.answer(user, message))
        else:
            sentence = f"A client may not send {type(message).__name__}."
            self._core.transmit(peer, messages.Error(sentence))

    def _stranger(self, peer: bytes, key: str, message: Any) -> None:
        if isinstance(message, messages.Request):
            self._reply(peer, message, self._login.answer(key, message))
        else:
            self._core.transmit(peer, messages.Goodbye("The lease has ended."))

    def _reply(
        self, peer: bytes, request: messages.Request, answer: Coroutine[Any, Any, messages.Reply]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(peer, request, answer))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(
        self, peer: bytes, request: messages.Request, answer: Coroutine[Any, Any, messages.Reply]
    ) -> None:
        try:
            reply = await answer
        except Exception as error:
            log.exception("request failed", op=request.op)
            reply = messages.Reply(
                request.id,
                False,
                error="The daemon failed at this request; its log says how.",
                code="internal",
            )
            if isinstance(error, StepFailed):
                self._core.fail(error.__cause__ or error)
        self._core.transmit(peer, reply)
