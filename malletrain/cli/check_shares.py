"""The part of ``malletrain check`` for shares: which are counted, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.config.model import Config

MAX_SHOWN_WEIGHTS = 5


def shares(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Reports weights and accounts, and checks Slurm's associations."""
    from malletrain.daemon.engine.parties import Parties
    from malletrain.daemon.site.backends import slurm_associations

    section = config.shares
    limits = config.quotas.account_nodes or config.quotas.account_jobs
    parties = Parties(config)
    if section.weights_from == "slurm":
        associations = slurm_associations(config)  # errors are reported as a finding
        parties.learned(associations)
        yield True, f"Slurm tells the accounts of {len(associations.accounts)} users."
    elif (section.by == "account" or limits) and not section.account_of:
        yield (
            None,
            "No user is in an account, so accounts make no difference; name the users of each "
            '(accounts in [shares]), or have Slurm asked (weights_from = "slurm").',
        )
    if section.by == "none":
        yield True, "Nobody's share is counted (by in [shares])."
        return
    weights = sorted(parties.weights().items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} {weight:.3g}" for name, weight in weights[:MAX_SHOWN_WEIGHTS])
    more = (
        f" and {len(weights) - MAX_SHOWN_WEIGHTS} more" if len(weights) > MAX_SHOWN_WEIGHTS else ""
    )
    others = f"others {section.others:g}"
    yield (
        True,
        f"Shares are counted by {section.by}; they weigh "
        f"{f'{named}{more}, ' if named else ''}{others}.",
    )
