"""The configuration of gaps: which idle nodes of a batch scheduler may be leased.

Decides which keys exist and what a valid value is; :mod:`scavenger.batch` applies them.
"""

from __future__ import annotations

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, MaybeDuration, Section, Words, key
from scavenger.batch.hours import HoursError, parse_hours
from scavenger.hostlist import HostlistError, expand


class GapsSection(Section):
    """Which idle nodes of a batch scheduler are gaps, that is, may be leased. `malletrain nodes
    --explain` shows the result of each rule.
    """

    partitions: Words = key(
        [],
        description="A node must be in one of these partitions or queues; empty: in the "
        "partition or queue of the leases.",
    )
    features: Words = key([], description="A node must have all of these features or resources.")
    nodes: Words = key([], description='Only these nodes, such as "n[001-128]"; empty: all.')
    exclude: Words = key([], description='Never these nodes, such as "login[1-2]".')
    classes: Words = key(
        [],
        description="Features that distinguish node classes, such as a GPU's name; a job's nodes "
        "are of one class.",
    )
    reserve: int = key(
        0, ge=0, description="Number of idle nodes that are left to the main scheduler."
    )
    hours: Words = key(
        [],
        description='When leases may run, local time, such as "mon-fri 19:00-07:00" or '
        '"sat-sun"; empty: always.',
    )
    idle_for: MaybeDuration = key(
        None,
        description="How long an idle node is left to the main scheduler before it is a gap; not "
        "given: one backfill cycle.",
    )
    hold: MaybeDuration = key(
        None,
        description="How long to request no lease after the main scheduler preempted one for a "
        "job that it does not show, because that job may count on idle nodes too; "
        "not given: one backfill cycle, at least 3 s and at most 15 s.",
    )
    use_planned: bool = key(
        False,
        description="Also use nodes that are held for a waiting job, with leases that end before "
        "its expected start.",
    )
    max_at_once: int = key(
        200, ge=1, description="Maximum number of gaps that are taken at one poll."
    )
    expected_length: Duration = key(
        "20 min",
        gt=0,
        description="Expected length of a gap until the site's own gaps have been observed.",
    )
    lifetimes: bool = key(
        False,
        description="Forecast the remaining time of each gap from what is known at that moment. "
        "The forecast decides which nodes are leased first, which jobs get them, and "
        "how often jobs save. Learns while the daemon runs.",
    )

    @field_validator("hours")
    @classmethod
    def _hours(cls, value: Words) -> Words:
        try:
            parse_hours(value)
        except HoursError as error:
            raise PydanticCustomError(
                "hours", "{sentence}", {"sentence": str(error).rstrip(".")}
            ) from None
        return value

    @field_validator("nodes", "exclude")
    @classmethod
    def _nodes(cls, value: Words) -> Words:
        try:
            for text in value:
                expand(text)
        except HostlistError as error:
            raise PydanticCustomError(
                "nodes", "{sentence}", {"sentence": str(error).rstrip(".")}
            ) from None
        return value
