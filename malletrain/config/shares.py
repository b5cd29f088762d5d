"""The configuration of fair shares and quotas: what is due to whom, and what nobody may exceed.

Decides which keys exist and what a valid value is. What follows from shares is decided in
:mod:`malletrain.core.shares`, from quotas in :mod:`malletrain.core.quotas` and where jobs are
submitted.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section, Words, key
from malletrain.config.units import format_duration
from malletrain.core import defaults

_WEIGHT = re.compile(r"\s*(\S+)\s*[:=\s]\s*(\d+(?:\.\d+)?)\s*")
_OWN = re.compile(r"\s*(user|account)\s+(\S+)\s+(\d{1,9})\s+(\d{1,9})\s*")


class SharesSection(Section):
    """How much of the nodes is due to whom while they are scarce."""

    by: Literal["none", "user", "group", "account"] = key(
        "none",
        description="Whose shares are counted: those of users, of their groups (the primary one, "
        "as the daemon's host knows it) or of their accounts; none: nobody's.",
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
        description="The weight of those that are not named.",
    )
    weights_from: Literal["here", "slurm"] = key(
        "here",
        description="here: weights and accounts are those of this section; slurm: they are read "
        "from Slurm's associations (sacctmgr), and what is named here goes before them.",
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
        format_duration(defaults.SHARES_HALF_LIFE_S),
        gt=0,
        description="Service of so long ago counts half.",
    )
    double_after: Duration = key(
        format_duration(defaults.SHARES_DOUBLE_AFTER_S),
        gt=0,
        description="The bids of who is behind by so much of the service due to it count double, "
        "those of who is ahead by as much count half, and so on, up to 16 times.",
    )
    node_weights: Words = key(
        [],
        description="What a node-second of a class of nodes counts where it is not 1, such as "
        '["a100 4"].',
    )

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
        """Node class → what a second of one of its nodes counts."""
        return _numbers(self.node_weights)

    @property
    def account_of(self) -> dict[str, str]:
        """User → account."""
        lines = (text.replace(":", " ").replace(",", " ").split() for text in self.accounts)
        return {user: account for account, *users in lines for user in users}


class Limit(NamedTuple):
    """The most that jobs of one user or account may have; infinite: any number."""

    nodes: float
    """At once."""
    jobs: float
    """That have not ended."""


class QuotasSection(Section):
    """The most that one user or account may have, 0: any number."""

    user_nodes: int = key(0, ge=0, description="Nodes at once of one user's jobs.")
    user_jobs: int = key(0, ge=0, description="Jobs of one user that have not ended.")
    account_nodes: int = key(0, ge=0, description="Nodes at once of the jobs of one account.")
    account_jobs: int = key(0, ge=0, description="Jobs of one account that have not ended.")
    own: Words = key(
        [],
        description="What holds for one user or account instead: its name, nodes, jobs, such as "
        '["user ann 64 10", "account physics 256 0"].',
    )

    @field_validator("own")
    @classmethod
    def _own(cls, value: Words) -> Words:
        names = set()
        for text in value:
            match = _OWN.fullmatch(text)
            if match is None or match.group(1, 2) in names:
                raise PydanticCustomError(
                    "own",
                    '"{value}" is no quota; write each user and account once, with nodes and jobs '
                    '(0: any number), such as "user ann 64 10"',
                    {"value": text},
                )
            names.add(match.group(1, 2))
        return value

    def limit(self, kind: Literal["user", "account"], name: str) -> Limit:
        """What holds for this user or account."""
        for text in self.own:
            match = _OWN.fullmatch(text)
            if match is not None and match.group(1, 2) == (kind, name):
                return Limit(_most(int(match[3])), _most(int(match[4])))
        if kind == "user":
            return Limit(_most(self.user_nodes), _most(self.user_jobs))
        return Limit(_most(self.account_nodes), _most(self.account_jobs))


def _most(number: int) -> float:
    return number or math.inf


def _numbers(texts: Words) -> dict[str, float]:
    matches = (_WEIGHT.fullmatch(text) for text in texts)
    return {m[1]: float(m[2]) for m in matches if m}
