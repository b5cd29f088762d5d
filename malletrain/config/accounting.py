"""The configuration of what leases cost: in charged time, and in energy.

Decides which keys exist and what a valid value is. What follows from a least charge is decided in
:mod:`malletrain.core.lease_planner`, what is added up in :mod:`malletrain.daemon.usage`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section, Words, key

_WATTS = re.compile(r"\s*(\S+)\s*[:=\s]\s*(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s*")


class Watts(NamedTuple):
    """What a node draws, in watts."""

    idle: float
    """While it is leased and no job runs on it."""
    busy: float
    """While a job runs on it."""


class AccountingSection(Section):
    """What leases cost. `malletrain usage` adds it up."""

    min_charge: Duration = key(
        "0 s",
        description="What the site charges for a job at least, however short it was, such as "
        '"1 h": gaps expected to be shorter are not leased, and a lease is not given back before '
        "that is used up while its user has work for it.",
    )
    charge_factor: float = key(
        1.0,
        gt=0,
        description="What the site charges for an hour of a leased node, in node-hours; budgets of "
        "jobs are counted in these.",
    )
    keep: Duration = key(
        "0 s",
        description="How long leases and ended jobs are kept for `malletrain usage` and "
        '`malletrain show`, such as "730 d"; 0 s: for ever. The audit log is kept in any case.',
    )
    watts: Words = key(
        [],
        description="What a node of each class draws, idle and with a job, in watts, such as "
        '["default 120 350", "a100 300 1600"]; for kWh in `malletrain usage` and the metrics.',
    )

    @field_validator("watts")
    @classmethod
    def _watts(cls, value: Words) -> Words:
        classes = set()
        for text in value:
            match = _WATTS.fullmatch(text)
            if match is None or float(match[2]) > float(match[3]) or match[1] in classes:
                raise PydanticCustomError(
                    "watts",
                    '"{value}" does not say what a class of nodes draws; write each class once: '
                    'its name, watts idle, watts with a job, such as "a100 300 1600"',
                    {"value": text},
                )
            classes.add(match[1])
        return value

    @property
    def watts_by_class(self) -> dict[str, Watts]:
        """Node class → what its nodes draw."""
        matches = (_WATTS.fullmatch(text) for text in self.watts)
        return {m[1]: Watts(float(m[2]), float(m[3])) for m in matches if m}
