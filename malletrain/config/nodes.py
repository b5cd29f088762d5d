"""The configuration of nodes: how their health is looked after, and which network jobs use there.

Decides which keys exist and what a valid value is; :mod:`malletrain.agent.health` runs the checks,
:mod:`malletrain.core.sick_nodes` decides how long a node that fails is left alone,
:mod:`malletrain.core.slow_nodes` and :mod:`malletrain.core.slow_links` which nodes are slow,
:mod:`malletrain.core.fabric` which network a round goes by.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, Section, Words, key
from malletrain.config.units import format_duration
from malletrain.core.fabric import NetworkNameError, checked


class NodesSection(Section):
    """The leased nodes: which of them are fit for jobs, and the network of the jobs there."""

    health_check: Words = key(
        [],
        description="Command and arguments of the site's health check, such as "
        '["/usr/sbin/nhc", "-q"]; exit code 0: the node is fit. It runs on the node as the owner '
        "of the lease: before the node gets a job, every health_interval, and when workers fail. "
        "Empty: none.",
    )
    health_interval: Duration = key(
        "10 min", gt=0, description="Time from one look at a node's health to the next."
    )
    health_timeout: Duration = key(
        "60 s",
        gt=0,
        description="A check that takes longer is killed with all it started, and the node counts "
        "as sick.",
    )
    gpu_check: bool = key(
        True,
        description="Ask nvidia-smi too, where there are GPUs and it is installed: lost GPUs, "
        "uncorrectable memory errors, pending resets.",
    )
    sick_for: Duration = key(
        "10 min",
        gt=0,
        description="How long a node that fails is left alone at first; twice as long each time "
        "that it fails again within sick_for_most.",
    )
    sick_for_most: Duration = key(
        "1 d", gt=0, description="How long a node that fails again and again is left alone at most."
    )

    slow_nodes: Literal["auto", "off", "name", "swap"] = key(
        "auto",
        description="Nodes that take lastingly longer for their part of a step than the other "
        "nodes of their job. name: they are named in events, show and nodes; swap: the job also "
        "goes on without them where that pays, and they are left alone for a while; off: nobody "
        "looks. auto: swap, and off on the embedded cluster, whose nodes are one machine.",
    )
    slow_factor: float = key(
        1.25,
        gt=1,
        le=100,
        description="How many times as long a slow node takes at least.",
    )
    slow_after: Duration = key(
        "1 min",
        gt=0,
        description="Over how long nodes are compared before one is slow: it is in five of the six "
        "parts of that time.",
    )
    slow_half_life: Duration = key(
        "1 h",
        gt=0,
        description="What a node takes beyond the others is half believed after this long, a "
        "quarter after twice as long. While that is still slow_factor the node is left alone.",
    )

    link_every: Duration = key(
        "30 s",
        description="About how often each node takes part in measuring the way to another of its "
        "job, or to another that has none: for a tenth of a second, one pair of a class at a time, "
        "and no sooner than a second after the last. A node whose link is slow with at least three "
        "of them counts as slow. 0 s, and slow_nodes off: links are not measured.",
    )

    keep_warm: Duration = key(
        "10 min",
        description="A leased node imports PyTorch before a job is chosen for it, in each Python "
        "that unfinished jobs use (two at most), and starts workers as forks of that. One that no "
        "job has used for this long ends. 0 s: none is kept, and every job's first round waits "
        "for its imports.",
    )
    warm_wait: Duration = key(
        "60 s",
        description="How long a new node is left to warm up before jobs get it all the same.",
    )

    interface: str = key(
        "",
        description='The network of a job: rendezvous, gloo and NCCL. An interface ("ib0"), a '
        'network ("10.1.0.0/16"), or "auto": the fastest that all members of a round share. '
        "Empty: that on which a node reaches the daemon; NCCL then chooses by itself.",
    )
    interface_of: Words = key(
        [],
        description='The same for single node classes, such as ["a100=ib0", "cpu=auto"].',
    )

    @field_validator("health_check")
    @classmethod
    def _names_a_command(cls, value: Words) -> Words:
        if value and not value[0].strip():
            raise PydanticCustomError(
                "command", 'the first word must be a command, such as "/usr/sbin/nhc"'
            )
        return value

    @field_validator("sick_for_most")
    @classmethod
    def _longer_than_at_first(cls, value: float, info: ValidationInfo) -> float:
        least = info.data.get("sick_for")
        if least is not None and value < least:
            raise PydanticCustomError(
                "sick_for_most",
                "{value} is less than sick_for, {least}; accepted is {least} or more",
                {"value": format_duration(value), "least": format_duration(least)},
            )
        return value

    @field_validator("interface")
    @classmethod
    def _interface(cls, value: str) -> str:
        return _checked(value)

    @field_validator("interface_of")
    @classmethod
    def _by_class(cls, value: Words) -> Words:
        for text in value:
            name, equals, network = text.partition("=")
            if not name or not equals:
                raise PydanticCustomError(
                    "interface", '"{text}" is not of the form CLASS=INTERFACE', {"text": text}
                )
            _checked(network)
        return value

    def interface_for(self, node_class: str) -> str:
        """The network for nodes of a class."""
        of = dict(text.split("=", 1) for text in self.interface_of)
        return of.get(node_class, self.interface)


def _checked(network: str) -> str:
    try:
        return checked(network)
    except NetworkNameError as error:
        raise PydanticCustomError("interface", "{sentence}", {"sentence": str(error)}) from None
