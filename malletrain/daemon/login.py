"""What a client with an unknown key may do: it may identify itself, and is told how.

Decides only whether to believe it; the key ring keeps the keys of users who logged in.
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
"""The code of answers to those who have to say who they are first."""
MOST_WAITING = 20
"""Logins that wait while one is checked; unauthenticated clients can send as many as they like."""


class Credentials(Protocol):
    """Who can say whose a credential is."""

    def user(self, credential: str, payload: str) -> str:
        """The user who made the credential over ``payload``. Raises UsersError."""
        ...


class Login:
    """Answers unauthenticated clients. Checks credentials one at a time; a few may wait for that.

    Args:
        munge: who vouches for the machine's users; None: nobody, so that nobody logs in.
    """

    def __init__(self, keys: KeyRing, munge: Credentials | None) -> None:
        self._keys = keys
        self._munge = munge
        self._one = asyncio.Lock()
        self._waiting = 0

    async def answer(self, key: str, request: messages.Request) -> messages.Reply:
        """The reply to one request of the client with this key. Whatever goes wrong with what the
        client sent is said in it.
        """
        if request.op != "login" or self._munge is None:
            data = {"munge": self._munge is not None}
            return messages.Reply(
                request.id, False, data, "The daemon does not know your key.", UNAUTHENTICATED
            )
        if self._waiting > MOST_WAITING:
            return messages.Reply(
                request.id,
                False,
                error="Too many users are just logging in; try again in a moment.",
            )
        self._waiting += 1
        try:
            credential = str(request.parameters().get("credential", ""))
            async with self._one:
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
