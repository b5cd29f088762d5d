"""The part of ``malletrain check`` for trainers: which jobs are planned together, on which
nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from malletrain.config.model import Config


def trainers(config: Config) -> Iterator[tuple[bool | None, str]]:
    """Reports each trainer, and possible mistakes."""
    from malletrain.core.trainers import REST
    from malletrain.daemon.site.settings import trainers as made

    if not config.trainer:
        yield True, "There is one plan for all jobs (no [[trainer]])."
        return
    sections = {section.name: section for section in config.trainer}
    for trainer in made(config):
        section = sections.get(trainer.name)
        named = [
            f"{kind} {', '.join(names)}"
            for kind in ("users", "accounts", "groups")
            if section is not None and (names := getattr(section, kind))
        ]
        whose = " and ".join(named) or "whom no other trainer names"
        yield True, f"{trainer.phrase()}; its jobs are those of {whose}."
    if not config.daemon.several_users and len(made(config)) > 1:
        yield (
            None,
            "This daemon serves one user, so all jobs are of one trainer; with users or munge in "
            "[daemon] it serves several.",
        )
    accounts = [name for section in config.trainer for name in section.accounts]
    unknown = sorted(set(accounts) - set(config.shares.account_of.values()))
    if unknown and config.shares.weights_from == "here":
        yield (
            None,
            f"Nobody is in account {', '.join(unknown)}; name the users of each account (accounts "
            'in [shares]), or have Slurm asked (weights_from = "slurm").',
        )
    if config.shares.by != "none":
        yield (
            None,
            "Shares are counted over all nodes, whoever may use them; where trainers have nodes "
            f"of their own, use weights for parties of one trainer ({REST} or another) only.",
        )
