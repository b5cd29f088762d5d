"""Decides in which account a user's leases are submitted, and which user may act on which jobs."""

from __future__ import annotations

from collections.abc import Collection

from malletrain.config.model import Config
from malletrain.identity.keys import user_name

ROOT = "root"


class Accounts:
    """The users of one daemon. ``daemon_user``: the user who runs it."""

    def __init__(self, config: Config, daemon_user: str | None = None) -> None:
        self._own = daemon_user or user_name()
        self.submits_as_others = bool(config.submit_as)
        self.appoint(config.daemon.operators)

    def appoint(self, operators: Collection[str]) -> None:
        """Replace the set of operators."""
        self._operators = frozenset(operators)

    def of(self, user: str) -> str:
        """Return the owner of the leases on which jobs of ``user`` run: the user; empty for the
        daemon's user.
        """
        return "" if user == self._own else user

    def operates(self, user: str) -> bool:
        """Whether ``user`` may act on the whole machine: the daemon's user and the operators
        may.
        """
        return user == self._own or user in self._operators

    def may_manage(self, user: str, owner: str) -> bool:
        """Whether ``user`` may cancel a job of ``owner`` and see what is private to its owner."""
        return user == owner or self.operates(user)

    def refusal(self, user: str) -> str:
        """Return why ``user`` may not submit jobs, as a sentence; empty if the user may."""
        if not self.of(user):
            return ""
        if not self.submits_as_others:
            return (
                "This daemon serves the user who runs it only (submit_as in its "
                "configuration is empty)."
            )
        return "Jobs do not run as root; submit them as their owner." if user == ROOT else ""
