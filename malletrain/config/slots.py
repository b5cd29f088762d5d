"""The configuration of the kinds of slots, ``[[scheduler.KIND.slots]]``, of all kinds of scheduler.

Decides which keys exist and what a valid value is. :mod:`scavenger.batch.slots` decides which slots
of a host are idle.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Section, Size, Words, key

Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_KIND_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class SlotSection(Section):
    """A kind of slot: a share of one host as the unit of leases, for machines whose nodes are
    shared. Without this section a lease is a whole node. A job runs on slots of one kind.
    """

    name: str = key(
        description="Name of the kind, such as gpu: a letter, then letters, digits, - and _. It is "
        "the node class of its slots, which are called HOST/NAME.0, HOST/NAME.1 and so on.",
    )
    gpus: int = key(0, ge=0, le=64, description="GPUs of a slot.")
    gpu_type: str = key(
        "",
        description="Type of these GPUs as the scheduler names it, such as a100 or a MIG profile; "
        "empty: any. With Slurm only.",
    )
    gres: Words = key(
        [],
        description='Further generic resources of a slot, each as NAME:COUNT, such as "shard:4". '
        "With Slurm only.",
    )
    cpus: int = key(
        1, ge=1, le=4096, description="Processors of a slot, as the scheduler counts them."
    )
    memory: Size = key(description="Main memory of a slot, counted in whole MiB.")
    beside: str = key(
        "any",
        description="Whose jobs may run on the same host: any; own-user: jobs of the lease's user; "
        "nobody: none; partition:A,B: jobs in these partitions or queues.",
    )
    free_memory: Fraction = key(
        0.0,
        description="Part of a slot's memory that must be free on a host with other jobs, without "
        "the page cache, for the slot to be leased (FreeMem; with Slurm only). 0: not looked at.",
    )
    price: float = key(
        0.0,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="Node-hours that one hour of such a slot counts for budgets, shares and "
        "`malletrain usage`. 0: its part of a host, such as 0.25 where a host holds four.",
    )
    nodes: Words = key(
        [], description='Hosts with slots of this kind, such as "gpu[01-16]"; empty: all.'
    )
    whole_host: bool = key(
        False,
        description="Whether one job of the scheduler has a whole host and runs the leases of all "
        "its slots of this kind, as machines need on which jobs have whole nodes. The slots of a "
        "host are leased and given back together. With Slurm only.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _KIND_NAME.fullmatch(value):
            raise PydanticCustomError(
                "kind_name",
                '"{value}" is no name of a kind; accepted is a letter, then at most 31 letters, '
                "digits, - and _, such as gpu",
                {"value": value},
            )
        return value

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, value: int) -> int:
        if value < 2**20:
            raise PydanticCustomError("memory", "a slot needs 1 MiB of memory or more")
        return value

    @field_validator("gres")
    @classmethod
    def _check_gres(cls, value: Words) -> Words:
        for text in value:
            name, colon, count = text.rpartition(":")
            if not colon or not name or not count.isdecimal() or int(count) < 1:
                raise PydanticCustomError(
                    "gres",
                    '"{value}" is no generic resource with a count; write it as "shard:4"',
                    {"value": text},
                )
        return value

    @field_validator("beside")
    @classmethod
    def _check_beside(cls, value: str) -> str:
        names = value.removeprefix("partition:").split(",")
        if value in ("any", "own-user", "nobody") or (
            value.startswith("partition:") and all(name.strip() == name != "" for name in names)
        ):
            return value
        raise PydanticCustomError(
            "beside",
            '"{value}" is not known; accepted is any, own-user, nobody, or partition: followed by '
            "names with commas between them",
            {"value": value},
        )


def check_distinct(value: list[SlotSection]) -> list[SlotSection]:
    """Return the kinds of slots. Raises PydanticCustomError if two have one name."""
    names = [kind.name for kind in value]
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError(
                "slots", "two kinds of slots are called {name}", {"name": name}
            )
    return value


def check_plain(value: list[SlotSection]) -> list[SlotSection]:
    """Return the kinds of slots of a scheduler that is not Slurm. Raises PydanticCustomError."""
    for kind in check_distinct(value):
        for key_name in ("gpu_type", "gres", "free_memory", "whole_host"):
            if getattr(kind, key_name) not in ("", [], 0.0):
                raise PydanticCustomError(
                    "slots",
                    "{key} of kind {name} is for Slurm only; remove it",
                    {"key": key_name, "name": kind.name},
                )
    return value


SLOTS = "Kinds of slots; none: leases are whole nodes."
PlainSlots = Annotated[list[SlotSection], AfterValidator(check_plain)]
"""Kinds of slots of a scheduler that is not Slurm."""
