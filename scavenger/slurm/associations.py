"""Slurm's associations, as sacctmgr prints them: the account of each user, and the shares of users
and accounts.

Decides what fraction of the machine a share amounts to (fair share as in Slurm's multifactor
plugin: an account's fraction of its siblings' shares, times that of its parent, and so on to the
root). :class:`scavenger.batch.commands.Commands` runs the commands. The caller decides what follows
from shares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scavenger.batch.commands import Commands

ASSOCIATIONS = ("account", "parentname", "user", "share", "partition")
"""Fields of ``sacctmgr show associations``. The line of an account has a parent and no user."""
ROOT = "root"
MIN_SHARES = 1e-9
"""Minimum of a user's or an account's shares, so that the weight of their jobs is above 0."""


@dataclass(frozen=True)
class Associations:
    """Slurm's users and accounts."""

    accounts: dict[str, str] = field(default_factory=dict)
    """User → default account."""
    account_shares: dict[str, float] = field(default_factory=dict)
    """Account → its fraction of the machine, 0 to 1."""
    user_shares: dict[str, float] = field(default_factory=dict)
    """User → the user's fraction through the default account, 0 to 1."""

    def account(self, user: str) -> str:
        """Return the user's default account; empty if none is known. Slurm's database stores user
        names in lower case, even if the operating system has them in mixed case.
        """
        return self.accounts.get(user) or self.accounts.get(user.lower(), "")


def read_associations(commands: Commands) -> Associations:
    """Read the associations. Raises SchedulerError if Slurm does not answer, for example because it
    has no accounting.
    """
    configured = commands.ask(["scontrol", "show", "config"])
    settings = (line.partition("=") for line in configured.splitlines())
    cluster = next(
        (value.strip() for name, _, value in settings if name.strip() == "ClusterName"), ""
    )
    where = ["where", f"cluster={cluster}"] if cluster else []
    tree = commands.ask(
        ["sacctmgr", "-nP", "show", "associations", *where, f"format={','.join(ASSOCIATIONS)}"]
    )
    users = commands.ask(["sacctmgr", "-nP", "show", "user", "format=user,defaultaccount"])
    return parse_associations(tree, users)


def parse_associations(tree: str, users: str) -> Associations:
    """Return the associations in the output of sacctmgr.

    Args:
        tree: lines with the fields of :data:`ASSOCIATIONS`.
        users: lines with users and their default accounts.
    """
    rows = [line.split("|") for line in tree.splitlines() if line.count("|") >= 4]
    accounts = {row[0]: row[1] for row in rows if not row[2]}
    shares = {row[0]: _share(row[3]) for row in rows if not row[2]}
    members: dict[tuple[str, str], float] = {}
    for account, _, user, share, _ in (row[:5] for row in rows):
        if user:  # with a line per partition, too, the first line counts
            members.setdefault((account, user), _share(share))
    totals: dict[str, float] = {}
    for account, parent in accounts.items():
        if parent and account != parent:
            totals[parent] = totals.get(parent, 0.0) + shares[account]
    for (account, _), raw in members.items():
        totals[account] = totals.get(account, 0.0) + raw

    def fraction(account: str, visited: Sequence[str] = ()) -> float:
        parent = accounts.get(account, "")
        if not parent or parent == account or account in visited:
            return 1.0
        return shares[account] / (totals[parent] or 1.0) * fraction(parent, (*visited, account))

    default = _defaults(users, accounts.__contains__)
    return Associations(
        default,
        {account: fraction(account) for account in accounts if account != ROOT},
        {
            user: fraction(account) * members[account, user] / (totals[account] or 1.0)
            for user, account in default.items()
            if (account, user) in members
        },
    )


def _defaults(users: str, exists: Callable[[str], bool]) -> dict[str, str]:
    defaults = {}
    for line in users.splitlines():
        user, _, account = line.partition("|")
        if user and exists(account.rstrip("|")):
            defaults[user] = account.rstrip("|")
    return defaults


def _share(text: str) -> float:
    """Return the raw shares, at least :data:`MIN_SHARES`. ``parent`` (use the parent's shares)
    counts as one.
    """
    try:
        return max(MIN_SHARES, float(text))
    except ValueError:
        return 1.0
