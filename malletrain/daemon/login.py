"""Handles clients with unknown keys: they may log in, and the answers say how.

Decides only whether a credential is valid. The key ring stores the keys of users who logged in.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog

from malletrain.identity.keys import KeyRing
from malletrain.identity.users import UsersError, login_payload
from malletrain.protocol import messages

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
    """

    def __init__(self, keys: KeyRing, munge: Credentials | None) -> None:
        self._keys = keys
        self._munge = munge
        self._check_lock = asyncio.Lock()
        self._waiting = 0

    async def answer(self, key: str, request: messages.Request) -> messages.Reply:
        """Return the reply to one request of the client with this key. Errors in the request are
        reported in the reply.
        """
        if request.op != "login" or self._munge is None:
            data = {"munge": self._munge is not None}
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
