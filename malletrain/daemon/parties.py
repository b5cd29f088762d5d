"""Whose share counts a user's jobs, in which account the user is, and which quotas hold for the
user.

Derives that from the configuration, the system's groups and Slurm's associations.
:mod:`malletrain.core.shares` and :mod:`malletrain.core.quotas` decide what follows for a plan.
"""

from __future__ import annotations

import grp
import math
import pwd
from collections import Counter
from collections.abc import Callable, Iterable

from malletrain.config.model import Config
from malletrain.config.shares import QuotasSection
from malletrain.core.events import Quota
from malletrain.core.trainers import REST
from scavenger.slurm.associations import Associations

NO_ACCOUNT, NO_GROUP = "(no account)", "(no group)"
"""Those who are in none are one party."""


def primary_group(user: str) -> str:
    """The user's primary group as this host knows it; empty when it does not know the user."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return ""


class Parties:
    """The users of one daemon. ``group_of``: user → primary group, empty if there is none."""

    def __init__(self, config: Config, group_of: Callable[[str], str] = primary_group) -> None:
        self._shares, self._quotas = config.shares, config.quotas
        self._trainers = config.trainer
        self._group_of = group_of
        self._slurms = Associations()

    def learned(self, associations: Associations) -> None:
        """What Slurm knows now."""
        self._slurms = associations

    # --- shares ---

    def account(self, user: str) -> str:
        """The user's account; empty if there is none."""
        return self._shares.account_of.get(user) or self._slurms.account(user)

    def party(self, user: str) -> str:
        """From whose share the user's jobs are served; empty where shares are not counted."""
        if self._shares.by == "none":
            return ""
        if self._shares.by == "user":
            slurms = user not in self._shares.weight_of and user not in self._slurms.user_shares
            return user.lower() if slurms and user.lower() in self._slurms.user_shares else user
        if self._shares.by == "group":
            return self._group_of(user) or NO_GROUP
        return self.account(user) or NO_ACCOUNT

    def weights(self) -> dict[str, float]:
        """Party → weight, of those that are not others. Slurm's parts are told as multiples of
        their mean, so that somebody whom Slurm does not know counts as an average one.
        """
        slurms = {"user": self._slurms.user_shares, "account": self._slurms.account_shares}
        parts = slurms.get(self._shares.by, {})
        mean = sum(parts.values()) / len(parts) if parts else 1.0
        least = 1e-6
        return {
            **{name: max(least, part / mean) for name, part in parts.items()},
            **self._shares.weight_of,
        }

    # --- trainers ---

    def trainer(self, user: str) -> str:
        """The trainer of the user's jobs; empty where there is none."""
        whose = (("users", user), ("accounts", self.account(user)), ("groups", None))
        for what, name in whose:
            for section in self._trainers:
                named = getattr(section, what)
                if named and (self._group_of(user) if name is None else name) in named:
                    return section.name
        rest = (section.name for section in self._trainers if section.rest)
        return next(rest, REST if self._trainers else "")

    # --- quotas ---

    def limit(self, quotas: QuotasSection) -> None:
        """These quotas hold from now on, for what is submitted."""
        self._quotas = quotas

    def quotas(self, user: str) -> tuple[Quota, ...]:
        """The limits of nodes that the user's jobs are under."""
        account = self.account(user)
        limits = [(f"user {user}", self._quotas.limit("user", user).nodes)]
        if account:
            limits.append((f"account {account}", self._quotas.limit("account", account).nodes))
        return tuple(Quota(name, int(nodes)) for name, nodes in limits if nodes < math.inf)

    def refusal(self, user: str, min_nodes: int, owners: Iterable[str]) -> str:
        """Why the user may not submit a job of so many nodes, as a sentence; empty: the user may.

        Args:
            user: who submits.
            min_nodes: the fewest that the job can use.
            owners: whose the jobs are that have not ended.
        """
        for quota in self.quotas(user):
            if min_nodes > quota.nodes:
                return (
                    f"The job needs {min_nodes} nodes at least, and {quota.name} may have "
                    f"{quota.nodes} at once; ask for fewer, or an operator for more (quotas)."
                )
        jobs = Counter(owners)
        account = self.account(user)
        counted = [("user", user, jobs[user])]
        if account:
            mates = sum(count for owner, count in jobs.items() if self.account(owner) == account)
            counted.append(("account", account, mates))
        for kind, name, count in counted:
            most = self._quotas.limit(kind, name).jobs  # type: ignore[arg-type]
            if count >= most:
                jobs_there = "1 job that has" if count == 1 else f"{count} jobs that have"
                return (
                    f"The {kind} {name} has {jobs_there} not ended, and {most:.0f} is the most; "
                    "submit when one has ended, or cancel one."
                )
        return ""
