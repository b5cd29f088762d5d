"""The configuration of the costs of leases: charged time and energy.

Decides which keys exist and what a valid value is. :mod:`malletrain.core.lease_planner` takes the
minimum charge into account; :mod:`malletrain.daemon.api.usage` adds up the costs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section, Words, key

_WATTS = re.compile(r"\s*(\S+)\s*[:=\s]\s*(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s*")


class Watts(NamedTuple):
    """Power of a node, in watts."""

    idle: float
    """While it is leased and no job runs on it."""
    busy: float
    """While a job runs on it."""


class AccountingSection(Section):
    """Costs of leases. `malletrain usage` adds them up."""

    min_charge: Duration = key(
        "0 s",
        description="Minimum time that the site charges for a job, however short it was, such as "
        '"1 h". Gaps expected to be shorter are not leased. A lease is not given '
        "back earlier while its user has work for it.",
    )
    charge_factor: float = key(
        1.0,
        gt=0,
        description="Node-hours that the site charges for one hour of a leased node; budgets of "
        "jobs are counted in these.",
    )
    keep: Duration = key(
        "0 s",
        description="How long `malletrain usage` and `malletrain show` keep leases and ended "
        'jobs, such as "730 d"; 0 s: forever. The audit log is always kept.',
    )
    watts: Words = key(
        [],
        description="Power of a node of each class, idle and with a job, in watts, such as "
        '["default 120 350", "a100 300 1600"]; for kWh in `malletrain usage` and the '
        "metrics.",
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
        """Node class → power of one of its nodes."""
        matches = (_WATTS.fullmatch(text) for text in self.watts)
        return {m[1]: Watts(float(m[2]), float(m[3])) for m in matches if m}
