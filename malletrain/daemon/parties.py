"""Determines the party, the account and the quotas of each user.

They are derived from the configuration, the system's groups and Slurm's associations.
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
"""Parties of all users without an account, and of all without a group."""


def primary_group(user: str) -> str:
    """Return the user's primary group on this host; empty if the host does not know the user."""
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return ""


class Parties:
    """The parties of one daemon's users. ``group_of``: returns the primary group of a user, empty
    if there is none.
    """

    def __init__(self, config: Config, group_of: Callable[[str], str] = primary_group) -> None:
        self._shares, self._quotas = config.shares, config.quotas
        self._trainers = config.trainer
        self._group_of = group_of
        self._slurms = Associations()

    def learned(self, associations: Associations) -> None:
        """Replace Slurm's associations."""
        self._slurms = associations

    # --- shares ---

    def account(self, user: str) -> str:
        """Return the user's account; empty if there is none."""
        return self._shares.account_of.get(user) or self._slurms.account(user)

    def party(self, user: str) -> str:
        """Return the party from whose share the user's jobs are served; empty if shares are not
        counted.
        """
        if self._shares.by == "none":
            return ""
        if self._shares.by == "user":
            slurms = user not in self._shares.weight_of and user not in self._slurms.user_shares
            return user.lower() if slurms and user.lower() in self._slurms.user_shares else user
        if self._shares.by == "group":
            return self._group_of(user) or NO_GROUP
        return self.account(user) or NO_ACCOUNT

    def weights(self) -> dict[str, float]:
        """Return party → weight, for parties without the default weight. Slurm's shares are divided
        by their mean, so that a user whom Slurm does not know has the weight of an average one.
        """
        slurms = {"user": self._slurms.user_shares, "account": self._slurms.account_shares}
        slurm_shares = slurms.get(self._shares.by, {})
        mean = sum(slurm_shares.values()) / len(slurm_shares) if slurm_shares else 1.0
        min_weight = 1e-6
        return {
            **{name: max(min_weight, part / mean) for name, part in slurm_shares.items()},
            **self._shares.weight_of,
        }

    # --- trainers ---

    def trainer(self, user: str) -> str:
        """Return the trainer of the user's jobs; empty if there is none."""
        memberships = (("users", user), ("accounts", self.account(user)), ("groups", None))
        for key, name in memberships:
            for section in self._trainers:
                named = getattr(section, key)
                if named and (self._group_of(user) if name is None else name) in named:
                    return section.name
        rest = (section.name for section in self._trainers if section.rest)
        return next(rest, REST if self._trainers else "")

    # --- quotas ---

    def limit(self, quotas: QuotasSection) -> None:
        """Replace the quotas, for jobs that are submitted from now on."""
        self._quotas = quotas

    def quotas(self, user: str) -> tuple[Quota, ...]:
        """Return the node quotas that apply to the user's jobs."""
        account = self.account(user)
        limits = [(f"user {user}", self._quotas.limit("user", user).nodes)]
        if account:
            limits.append((f"account {account}", self._quotas.limit("account", account).nodes))
        return tuple(Quota(name, int(nodes)) for name, nodes in limits if nodes < math.inf)

    def refusal(self, user: str, min_nodes: int, owners: Iterable[str]) -> str:
        """Return why the user may not submit a job of this size, as a sentence; empty if the user
        may.

        Args:
            user: owner of the job.
            min_nodes: minimum number of nodes of the job.
            owners: owner of each unfinished job.
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
            account_jobs = sum(
                count for owner, count in jobs.items() if self.account(owner) == account
            )
            counted.append(("account", account, account_jobs))
        for kind, name, count in counted:
            max_jobs = self._quotas.limit(kind, name).jobs  # type: ignore[arg-type]
            if count >= max_jobs:
                jobs_phrase = "1 job that has" if count == 1 else f"{count} jobs that have"
                return (
                    f"The {kind} {name} has {jobs_phrase} not ended, and {max_jobs:.0f} is the "
                    "most; submit when one has ended, or cancel one."
                )
        return ""
