"""The configuration of fair shares and quotas.

Decides which keys exist and what a valid value is. :mod:`malletrain.core.shares` applies shares;
:mod:`malletrain.core.shares` and the daemon's handling of submissions apply quotas.
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
_EXCEPTION = re.compile(r"\s*(user|account)\s+(\S+)\s+(\d{1,9})\s+(\d{1,9})\s*")


class SharesSection(Section):
    """How scarce nodes are shared between users, groups or accounts."""

    by: Literal["none", "user", "group", "account"] = key(
        "none",
        description="Parties whose shares are counted: users, their groups (the primary one, as "
        "the daemon's host knows it) or their accounts; none: no shares.",
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
        format_duration(defaults.SHARES_HALF_LIFE_S),
        gt=0,
        description="Half-life of service: service this long ago counts half.",
    )
    double_after: Duration = key(
        format_duration(defaults.SHARES_DOUBLE_AFTER_S),
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
    """Limits of one user or account, 0: any number."""

    user_nodes: int = key(
        0, ge=0, description="Maximum number of simultaneous nodes of one user's jobs."
    )
    user_jobs: int = key(0, ge=0, description="Maximum number of unfinished jobs of one user.")
    account_nodes: int = key(
        0, ge=0, description="Maximum number of simultaneous nodes of one account's jobs."
    )
    account_jobs: int = key(
        0, ge=0, description="Maximum number of unfinished jobs of one account."
    )
    own: Words = key(
        [],
        description='Exceptions for single users and accounts: name, nodes, jobs, such as ["user '
        'ann 64 10", "account physics 256 0"].',
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
                    '(0: any number), such as "user ann 64 10"',
                    {"value": text},
                )
            names.add(match.group(1, 2))
        return value

    def limit(self, kind: Literal["user", "account"], name: str) -> Limit:
        """Returns the limits of this user or account."""
        for text in self.own:
            match = _EXCEPTION.fullmatch(text)
            if match is not None and match.group(1, 2) == (kind, name):
                return Limit(_limit(int(match[3])), _limit(int(match[4])))
        if kind == "user":
            return Limit(_limit(self.user_nodes), _limit(self.user_jobs))
        return Limit(_limit(self.account_nodes), _limit(self.account_jobs))


def _limit(number: int) -> float:
    return number or math.inf


def _numbers(texts: Words) -> dict[str, float]:
    matches = (_WEIGHT.fullmatch(text) for text in texts)
    return {m[1]: float(m[2]) for m in matches if m}
