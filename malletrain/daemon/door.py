"""The door: what a client may do whose key nobody knows yet. It may say who it is, and is told how.

Decides nothing but whom to believe; the keys of the users who came in are the key ring's.
"""

from __future__ import annotations

import asyncio

import structlog

from malletrain import wire
from malletrain.config import Config
from malletrain.keys import KeyRing
from malletrain.users import Munge, UsersError, login_payload

log = structlog.get_logger(__name__)

STRANGER = "stranger"
"""The code of answers to those who have to say who they are first."""


class Door:
    """Answers strangers. Credentials are checked one at a time."""

    def __init__(self, config: Config, keys: KeyRing) -> None:
        self._keys = keys
        self._munge = Munge(config.daemon.munge_socket) if config.daemon.munge else None
        self._one = asyncio.Lock()

    async def answer(self, key: str, request: wire.Request) -> wire.Reply:
        """The reply to one request of the client with this key."""
        if request.op != "login" or self._munge is None:
            data = {"munge": self._munge is not None}
            return wire.Reply(request.id, False, data, "The daemon does not know your key.", STRANGER)
        try:
            credential = str(request.params.get("credential", ""))
            async with self._one:
                user = await asyncio.to_thread(self._munge.user, credential, login_payload(self._keys.server.public, key))
        except UsersError as error:
            log.warning("login refused", reason=str(error))
            return wire.Reply(request.id, False, error=str(error))
        self._keys.accept_client(key, user)
        log.info("login", user=user)
        return wire.Reply(request.id, True, {"user": user})
