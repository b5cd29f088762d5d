"""Whose shares would be counted, and by which weights: for ``malletrain check``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.config.model import Config

SHOWN = 5


def shares(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Weights, accounts, and whether Slurm tells its own."""
    from malletrain.daemon.batch import slurm_associations
    from malletrain.daemon.parties import Parties

    section = config.shares
    limits = config.quotas.account_nodes or config.quotas.account_jobs
    parties = Parties(config)
    if section.weights_from == "slurm":
        associations = slurm_associations(config)  # what it cannot do is told as a sentence
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
    named = ", ".join(f"{name} {weight:.3g}" for name, weight in weights[:SHOWN])
    more = f" and {len(weights) - SHOWN} more" if len(weights) > SHOWN else ""
    others = f"others {section.others:g}"
    yield (
        True,
        f"Shares are counted by {section.by}; they weigh "
        f"{f'{named}{more}, ' if named else ''}{others}.",
    )
