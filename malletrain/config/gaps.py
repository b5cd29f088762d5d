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
    --explain` shows what every rule says.
    """

    partitions: Words = key(
        [],
        description="A node must be in one of these partitions or queues; empty: in that of the "
        "leases.",
    )
    features: Words = key([], description="A node must have all of these features or resources.")
    nodes: Words = key([], description='Only these nodes, such as "n[001-128]"; empty: all.')
    exclude: Words = key([], description='Never these nodes, such as "login[1-2]".')
    classes: Words = key(
        [],
        description="Features that tell node classes apart, such as a GPU's name; a job's nodes "
        "are of one class.",
    )
    reserve: int = key(0, ge=0, description="Idle nodes that are left to the main scheduler.")
    hours: Words = key(
        [],
        description='When leases may run, local time, such as "mon-fri 19:00-07:00" or '
        '"sat-sun"; empty: always.',
    )
    idle_for: MaybeDuration = key(
        None,
        description="How long an idle node is left to the main scheduler before it is a gap; "
        "not given: one of its backfill cycles.",
    )
    hold: MaybeDuration = key(
        None,
        description="How long no lease is asked for after the main scheduler preempted one for "
        "a job that it does not show, because that "
        "may count on idle nodes too; not given: one of its backfill cycles, 3 s at least and "
        "15 s at most.",
    )
    use_planned: bool = key(
        False,
        description="Take nodes that are held for a waiting job too, with leases that end "
        "before its expected start.",
    )
    max_at_once: int = key(200, ge=1, description="Gaps that are taken at one poll at most.")
    expected_length: Duration = key(
        "20 min",
        gt=0,
        description="How long a gap is expected to last until the site's own were seen.",
    )
    lifetimes: bool = key(
        False,
        description="Foretell how long each gap lasts yet, from what is known at that moment: "
        "which nodes are leased first, which jobs get them, and how often jobs save follows from "
        "it. Learns while the daemon runs.",
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
