"""The configuration of fair shares, quotas and trainers.

Decides which keys exist and what a valid value is. :mod:`malletrain.core.shares` applies shares and
quotas; the daemon also applies quotas when it handles submissions.

:class:`TrainerSection`: groups of users whose jobs are planned separately, on nodes of their own,
for an objective of their own. :func:`checked` decides what a valid list of them is;
:mod:`malletrain.core.pools` decides what follows for a plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from malletrain.config.base import OFF, CountOrOff, Duration, Section, Words, key
from malletrain.config.units import format_duration
from malletrain.core.pools import REST
from malletrain.core.settings import ShareSettings

NAMES = ("users", "accounts", "groups")


class TrainerSection(Section):
    """A group of users whose jobs have a plan of their own. Written as [[trainer]], once for each.
    A job belongs to the trainer that names its owner, else the owner's account, else the owner's
    primary group, else to the one that names nobody.
    """

    name: str = key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$",
        description="Name of the trainer: at most 40 letters, digits and '_.-'; the first is a "
        "letter or a digit.",
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
        description="Classes of its nodes; a class belongs to one trainer only. Empty, for one "
        "trainer at most: the classes that no trainer names.",
    )

    @property
    def rest(self) -> bool:
        """Whether it takes the jobs of users whom no trainer names."""
        return not (self.users or self.accounts or self.groups)


def checked(trainers: Sequence[TrainerSection]) -> None:
    """Check that the trainers are disjoint: no user, account, group or node class is of two.

    Raises:
        ValidationError: two trainers have something in common; the error is at the second one.
    """
    number_of: dict[tuple[str, str], int] = {}
    for number, trainer in enumerate(trainers):
        if number_of.setdefault(("name", trainer.name), number) != number:
            sentence = '"{value}" is the name of two trainers; rename one of them'
            raise _error(sentence, number, "name", value=trainer.name)
        for name in (*NAMES, "node_classes"):
            for value in getattr(trainer, name):
                first = trainers[number_of.setdefault((name, value), number)].name
                if first != trainer.name:
                    sentence = (
                        '"{value}" is in {name} of the trainers "{first}" and "{second}"; leave it '
                        "in one of them"
                    )
                    names = {"name": name, "first": first, "second": trainer.name}
                    raise _error(sentence, number, name, value=value, **names)
    _check_rest(trainers)


def _check_rest(trainers: Sequence[TrainerSection]) -> None:
    """Check that one trainer only has the users whom no trainer names, and one only the classes."""
    rest = [number for number, trainer in enumerate(trainers) if trainer.rest]
    if len(rest) > 1:
        first, second = (trainers[number].name for number in rest[:2])
        sentence = (
            'the trainers "{first}" and "{second}" name no users, accounts or groups, so the users '
            "whom no trainer names would be of both; name some in one of them"
        )
        raise _error(sentence, rest[1], first=first, second=second)
    for number, trainer in enumerate(trainers):
        if trainer.name == REST and not trainer.rest:
            sentence = (
                'the trainer "{name}" is that of those whom nobody names; give this one another '
                "name"
            )
            raise _error(sentence, number, "name", name=REST)
    without = [number for number, trainer in enumerate(trainers) if not trainer.node_classes]
    names = [trainers[number].name for number in without]
    hint = ""
    if trainers and not rest:
        names.append(REST)
        hint = f' (a [[trainer]] "{REST}" without users is that of the users whom no trainer names)'
    if len(names) > 1:
        sentence = (
            'the trainers "{first}" and "{second}" name no node_classes, so the classes that no '
            "trainer names would be of both; name some in one of them{hint}"
        )
        raise _error(sentence, without[-1], first=names[0], second=names[1], hint=hint)


def _error(sentence: str, number: int, *keys: str, **values: str) -> ValidationError:
    """Return an error at a key of the trainer with this number, or at the trainer as a whole.

    ``values``: what stands in ``sentence`` for the names in braces.
    """
    error = PydanticCustomError("trainers", sentence, values)
    details = InitErrorDetails(type=error, loc=(number, *keys), input="")
    return ValidationError.from_exception_data("trainer", [details])


_WEIGHT = re.compile(r"\s*(\S+)\s*[:=\s]\s*(\d+(?:\.\d+)?)\s*")
_EXCEPTION = re.compile(r"\s*(user|account)\s+(\S+)\s+(off|\d{1,9})\s+(off|\d{1,9})\s*")


class SharesSection(Section):
    """How scarce nodes are shared between users, groups or accounts."""

    by: Literal["off", "user", "group", "account"] = key(
        "off",
        description="Parties whose shares are counted: users, their groups (the primary one, as "
        "the daemon's host knows it) or their accounts; off: no shares.",
    )
    weights: Words = key(
        [],
        description="The weight of each user, group or account, such as "
        '["physics 3", "chemistry 1.5"].',
    )
    others: float = key(
        1.0,
        gt=0,
        le=1e6,
        description="The weight of parties that are not named.",
    )
    weights_from: Literal["here", "slurm"] = key(
        "here",
        description="here: weights and accounts are those of this section; slurm: they are read "
        "from Slurm's associations (sacctmgr), and entries here take precedence.",
    )
    refresh: Duration = key(
        "1 h", gt=0, description="How often Slurm's associations are read again."
    )
    accounts: Words = key(
        [],
        description="The users of each account, such as "
        '["physics ann bob", "chemistry cyd"]; a user is in one account.',
    )
    half_life: Duration = key(
        format_duration(ShareSettings.half_life_s),
        gt=0,
        description="Half-life of service: service this long ago counts half.",
    )
    double_after: Duration = key(
        format_duration(ShareSettings.double_after_s),
        gt=0,
        description="The bids of a party that is behind by this much of the service due to it "
        "count double, those of one that is ahead by as much count half, and so on, "
        "up to 16 times.",
    )
    node_weights: Words = key(
        [],
        description="Weight of a node-second on each class of nodes, if it is not 1, such as "
        '["a100 4"].',
    )

    @field_validator("by", mode="before")
    @classmethod
    def _by(cls, value: object) -> object:
        return OFF if value == "none" else value

    @field_validator("weights", "node_weights")
    @classmethod
    def _weights(cls, value: Words) -> Words:
        names = set()
        for text in value:
            match = _WEIGHT.fullmatch(text)
            if match is None or not 0 < float(match[2]) <= 1e6 or match[1] in names:
                raise PydanticCustomError(
                    "weights",
                    '"{value}" is no weight; write each name once and a number above 0, such as '
                    '"physics 3"',
                    {"value": text},
                )
            names.add(match[1])
        return value

    @field_validator("accounts")
    @classmethod
    def _accounts(cls, value: Words) -> Words:
        users: set[str] = set()
        for text in value:
            words = text.replace(":", " ").replace(",", " ").split()
            twice = users.intersection(words[1:])
            if len(words) < 2 or twice:
                raise PydanticCustomError(
                    "accounts",
                    '"{value}" does not say who is in an account; write its name and its users, '
                    'each user in one account only, such as "physics ann bob"',
                    {"value": text},
                )
            users.update(words[1:])
        return value

    @property
    def weight_of(self) -> dict[str, float]:
        """User, group or account → weight."""
        return _numbers(self.weights)

    @property
    def class_weights(self) -> dict[str, float]:
        """Node class → weight of a node-second on it."""
        return _numbers(self.node_weights)

    @property
    def account_of(self) -> dict[str, str]:
        """User → account."""
        lines = (text.replace(":", " ").replace(",", " ").split() for text in self.accounts)
        return {user: account for account, *users in lines for user in users}


class Limit(NamedTuple):
    """Limits of the jobs of one user or account; infinite: any number."""

    nodes: float
    """Maximum number of simultaneous nodes."""
    jobs: float
    """Maximum number of unfinished jobs."""


class QuotasSection(Section):
    """Limits of one user or account."""

    user_nodes: CountOrOff = key(
        "off", ge=0, description="Maximum number of simultaneous nodes of one user's jobs."
    )
    user_jobs: CountOrOff = key(
        "off", ge=0, description="Maximum number of unfinished jobs of one user."
    )
    account_nodes: CountOrOff = key(
        "off", ge=0, description="Maximum number of simultaneous nodes of one account's jobs."
    )
    account_jobs: CountOrOff = key(
        "off", ge=0, description="Maximum number of unfinished jobs of one account."
    )
    own: Words = key(
        [],
        description='Exceptions for single users and accounts: name, nodes, jobs, such as ["user '
        'ann 64 10", "account physics 256 off"].',
    )

    @field_validator("own")
    @classmethod
    def _own(cls, value: Words) -> Words:
        names = set()
        for text in value:
            match = _EXCEPTION.fullmatch(text)
            if match is None or match.group(1, 2) in names:
                raise PydanticCustomError(
                    "own",
                    '"{value}" is no quota; write each user and account once, with nodes and jobs '
                    '(off: no limit), such as "user ann 64 10"',
                    {"value": text},
                )
            names.add(match.group(1, 2))
        return value

    def limit(self, kind: Literal["user", "account"], name: str) -> Limit:
        """Return the limits of this user or account."""
        for text in self.own:
            match = _EXCEPTION.fullmatch(text)
            if match is not None and match.group(1, 2) == (kind, name):
                return Limit(*(_limit(0 if n == OFF else int(n)) for n in match.group(3, 4)))
        if kind == "user":
            return Limit(_limit(self.user_nodes), _limit(self.user_jobs))
        return Limit(_limit(self.account_nodes), _limit(self.account_jobs))


def _limit(number: int) -> float:
    return number or math.inf


def _numbers(texts: Words) -> dict[str, float]:
    matches = (_WEIGHT.fullmatch(text) for text in texts)
    return {m[1]: float(m[2]) for m in matches if m}
