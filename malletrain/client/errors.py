"""The errors of a client: a daemon refuses, or does not answer."""

from __future__ import annotations

from typing import Any

UNAUTHENTICATED = "unauthenticated"
"""The code of a daemon's answer to a client whose key it does not know."""

QUOTA = "quota"
"""The code of a daemon's answer to a submission by an owner, or for an account, with too many
unfinished jobs. The same submission succeeds when some have ended.
"""

TRANSIENT = frozenset(("unreachable", "busy", "internal"))
"""Codes of errors that say nothing about the request itself: the daemon is away, has too many
requests, or failed. The same request may succeed later.
"""


RETRIED = frozenset(("unreachable", "busy"))
"""Codes of errors after which the daemon is asked again while a job's end is awaited."""


class ClientError(RuntimeError):
    """The daemon refused, or could not be reached. The text is a sentence; ``code``: refused |
    usage | quota | busy | internal | unreachable | unauthenticated.
    """

    def __init__(self, sentence: str, code: str = "refused", data: Any = None) -> None:
        super().__init__(sentence)
        self.code = code
        self.data = data


class Unreachable(ClientError):
    """No daemon answers: it does not run, or not here, or does not know this client's key."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "unreachable")
