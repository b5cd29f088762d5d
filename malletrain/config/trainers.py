"""The configuration of trainers: groups of users whose jobs are planned separately, on certain
nodes, for an objective of their own.

Decides which keys exist and what a valid list is. :mod:`malletrain.core.trainers` and
:mod:`malletrain.core.trainer_plans` decide what follows for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic_core import PydanticCustomError

from malletrain.config.base import Section, Words, key
from malletrain.core.trainers import REST

NAMES = ("users", "accounts", "groups")


class TrainerSection(Section):
    """A group of users whose jobs have a plan of their own. Written as [[trainer]], once for each.
    A job belongs to the trainer that names its owner, else the owner's account, else the owner's
    primary group, else to the one that names nobody.
    """

    name: str = key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$",
        description="Name of the trainer: letters, digits and '_.-'.",
    )
    objective: Literal["throughput", "efficiency", "deadlines"] = key(
        "throughput",
        description="What its plan maximises. throughput: samples per second; efficiency: "
        "samples per second relative to one node; deadlines: the earliest deadlines "
        "that can be met come first, the remaining nodes are planned for efficiency.",
    )
    users: Words = key([], description="Users whose jobs belong to this trainer.")
    accounts: Words = key([], description="Accounts ([shares]) whose users' jobs belong to it.")
    groups: Words = key([], description="Primary groups whose users' jobs belong to it.")
    node_classes: Words = key(
        [],
        description="Node classes of this trainer alone, or shared with the trainers that name "
        "exactly the same ones. Empty: the classes that no trainer names.",
    )
    part: float = key(
        1.0,
        gt=0,
        le=1e6,
        description="Its proportion of nodes that several trainers may use; nodes for which one "
        "trainer has no use go to the others.",
    )

    @property
    def rest(self) -> bool:
        """Whether it takes the jobs of users whom no trainer names."""
        return not (self.users or self.accounts or self.groups)


def checked(trainers: Sequence[TrainerSection]) -> None:
    """Check that the trainers are disjoint. Raises PydanticCustomError if they are not."""
    _check_unique([trainer.name for trainer in trainers], "the name of two trainers")
    for what in NAMES:
        named = [name for trainer in trainers for name in getattr(trainer, what)]
        _check_unique(
            named, f"named in {what} of two trainers, or twice; a job is of one trainer only"
        )
    if sum(trainer.rest for trainer in trainers) > 1:
        raise PydanticCustomError(
            "trainers",
            "two trainers name no users, accounts or groups; the jobs of those whom nobody names "
            "are of one trainer only",
        )
    if any(trainer.name == REST and not trainer.rest for trainer in trainers):
        raise PydanticCustomError(
            "trainers",
            'the trainer "{name}" is that of those whom nobody names; give this one another name',
            {"name": REST},
        )
    own = [frozenset(trainer.node_classes) for trainer in trainers if trainer.node_classes]
    for classes in own:
        for others in own:
            if classes != others and (both := classes & others):
                raise PydanticCustomError(
                    "trainers",
                    'class "{name}" is of two trainers that do not name the same node_classes; '
                    "name the same ones, or none twice",
                    {"name": min(both)},
                )


def _check_unique(names: Sequence[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError(
                "trainers", '"{name}" is {what}', {"name": name, "what": what}
            )
