"""Determines the party, the account and the quotas of each user, and which user may act on which
jobs.

They are derived from the configuration, the system's groups and Slurm's associations.
:mod:`malletrain.core.shares` decides what follows for a plan. :class:`ShareKeeper` decides when the
counters of the service to each share are stored.
"""

from __future__ import annotations

import grp
import math
import pwd
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from malletrain.config.model import Config
from malletrain.config.shares import QuotasSection
from malletrain.core.controller import Controller
from malletrain.core.events import Quota
from malletrain.core.pools import REST
from malletrain.core.shares import PartyService
from malletrain.identity.keys import user_name
from malletrain.protocol.counting import counted
from malletrain.store.records import ServiceRow
from malletrain.store.store import Store
from scavenger.slurm.associations import Associations

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


INTERVAL_S = 60.0
"""Interval at which the counters are stored, seconds. A daemon that is killed loses what was
counted since.
"""


class ShareKeeper:
    """The counters of one controller. Call its methods within transactions."""

    def __init__(self, controller: Controller, store: Store) -> None:
        self._controller = controller
        self._store = store
        self._saved_at = 0.0

    def restore(self, now: float) -> None:
        """Pass the stored counters to the controller."""
        settings, rows = self._controller.shares.settings, self._store.services.all()
        if settings is None or not rows:
            return
        newest = max(row.updated for row in rows)
        services = {}
        for row in rows:  # an older row has decayed less and is brought to the newest time
            factor = 0.5 ** ((newest - row.updated) / settings.half_life_s)
            services[row.party] = PartyService(row.served, row.due, row.seconds).later(factor)
        # The clock may have been set back while no daemon ran.
        self._controller.shares.restore(services, min(newest, now))

    def keep(self, now: float, *, at_once: bool = False) -> None:
        """Store the counters if the interval is over, or ``at_once``."""
        shares = self._controller.shares
        if shares.settings is None or (now < self._saved_at + INTERVAL_S and not at_once):
            return
        self._saved_at = now
        for party, service in shares.services().items():
            self._store.services.put(
                ServiceRow(party, service.served, service.due, service.seconds, now)
            )


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
        if self._shares.by == "off":
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

    def size_refusal(self, user: str, min_nodes: int) -> str:
        """Return why the user may not submit a job of this size, as a sentence; empty if the user
        may.

        Args:
            user: owner of the job.
            min_nodes: minimum number of nodes of the job.
        """
        for quota in self.quotas(user):
            if min_nodes > quota.nodes:
                return (
                    f"The job needs {counted(min_nodes, 'node')} at least, and {quota.name} may "
                    f"have {quota.nodes} at once; ask for fewer, or an operator for more (quotas)."
                )
        return ""

    def jobs_refusal(self, user: str, owners: Iterable[str]) -> str:
        """Return why the user may not submit another job now, as a sentence; empty if the user
        may.

        Args:
            user: owner of the job.
            owners: owner of each unfinished job.
        """
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
