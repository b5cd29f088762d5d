"""Accounts: in which account a user's leases are submitted, and who may act on whose jobs."""

from __future__ import annotations

from collections.abc import Collection

from malletrain.config.model import Config
from malletrain.identity.keys import user_name

ROOT = "root"


class Accounts:
    """The users of one daemon. ``daemon_user``: the one who runs it."""

    def __init__(self, config: Config, daemon_user: str | None = None) -> None:
        self._own = daemon_user or user_name()
        self.submits_as_others = bool(config.submit_as)
        self.appoint(config.daemon.operators)

    def appoint(self, operators: Collection[str]) -> None:
        """These are the operators from now on."""
        self._operators = frozenset(operators)

    def of(self, user: str) -> str:
        """Whose leases a job of ``user`` runs on: the user's own, or (empty) those of the daemon's
        user.
        """
        return "" if user == self._own else user

    def operates(self, user: str) -> bool:
        """Whether ``user`` may decide about the machine: who runs the daemon, and its operators."""
        return user == self._own or user in self._operators

    def may_manage(self, user: str, owner: str) -> bool:
        """Whether ``user`` may cancel a job of ``owner``, and see what only its owner is to see."""
        return user == owner or self.operates(user)

    def refusal(self, user: str) -> str:
        """Why ``user`` may submit no jobs, as a sentence; empty: the user may."""
        if not self.of(user):
            return ""
        if not self.submits_as_others:
            return (
                "This daemon serves the user who runs it only (submit_as in its "
                "configuration is empty)."
            )
        return (
            "Jobs do not run as root; submit them as the user whose they are."
            if user == ROOT
            else ""
        )
