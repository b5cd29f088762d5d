"""Accounts: as whom a user's leases are taken, and what one user may do with the jobs of another."""

from __future__ import annotations

from malletrain.config import Config
from malletrain.keys import user_name

ROOT = "root"


class Accounts:
    """The users of one daemon. ``daemon_user``: the one who runs it."""

    def __init__(self, config: Config, daemon_user: str | None = None) -> None:
        self._own = daemon_user or user_name()
        self._submit_as = bool(config.submit_as)
        self._operators = frozenset(config.daemon.operators)
        self.several = config.daemon.several_users

    def of(self, user: str) -> str:
        """Whose leases a job of ``user`` runs on: the user's own, or (empty) those of the daemon's user."""
        return user if self._submit_as and user != self._own else ""

    def may_manage(self, user: str, owner: str) -> bool:
        """Whether ``user`` may cancel a job of ``owner``, and see what only its owner is to see."""
        return user == owner or user in self._operators

    def refusal(self, user: str) -> str:
        """Why ``user`` may submit no jobs, as a sentence; empty: the user may."""
        if self.of(user) == ROOT:
            return "Jobs do not run as root; submit them as the user whose they are."
        return ""
