"""The configuration of what jobs meet on nodes: health checks, the network, containers, and how
leases behave that share a host with other jobs.

Decides which keys exist and what a valid value is; :mod:`malletrain.agent.health` runs the checks,
:mod:`malletrain.core.unleased_nodes` decides how long a node that fails is not leased,
:mod:`malletrain.core.slow_nodes` which nodes are slow, :mod:`malletrain.core.fabric` which network
a round uses. :mod:`malletrain.agent.software` builds the command lines of containers.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from malletrain.config.base import Duration, DurationOrOff, Section, Words, key
from malletrain.config.units import format_duration
from malletrain.core.fabric import NetworkNameError, checked
from malletrain.protocol.site_rules import IoPriority, SharingRules


class NodesSection(Section):
    """Leased nodes: which of them are fit for jobs, and the network that jobs use there."""

    health_check: Words = key(
        [],
        description="Command and arguments of the site's health check, such as "
        '["/usr/sbin/nhc", "-q"]; exit code 0: the node is fit. It runs on the node as the owner '
        "of the lease: before the node gets a job, every health_interval, and when workers fail. "
        "Empty: none.",
    )
    health_interval: Duration = key(
        "10 min", gt=0, description="Time between two health checks of a node."
    )
    health_timeout: Duration = key(
        "60 s",
        gt=0,
        description="A check that takes longer is killed with all processes that it started, and "
        "the node counts as sick.",
    )
    gpu_check: bool = key(
        True,
        description="Also ask nvidia-smi, if there are GPUs and it is installed: lost GPUs, "
        "uncorrectable memory errors, pending resets.",
    )
    sick_for: Duration = key(
        "10 min",
        gt=0,
        description="How long a node that fails a check is not leased at first. The time doubles "
        "with each further failure within sick_for_most.",
    )
    sick_for_most: Duration = key(
        "1 d",
        gt=0,
        description="Maximum time for which a node that fails repeatedly is not leased.",
    )

    slow_nodes: Literal["auto", "off", "name", "swap"] = key(
        "auto",
        description="What to do about nodes that persistently take longer for their part of a "
        "step than the other nodes of their job. name: they are named in events, "
        "show and nodes; swap: the job also continues without them where that pays, "
        "and they are not leased for a while; off: they are not looked for. auto: "
        "swap, and off on the embedded cluster, whose nodes are one machine.",
    )
    slow_factor: float = key(
        1.25,
        gt=1,
        le=100,
        description="Minimum ratio of a slow node's time to that of the other nodes.",
    )
    slow_after: Duration = key(
        "1 min",
        gt=0,
        description="Time over which nodes are compared before one counts as slow: it must be "
        "slow in five of the six parts of this time.",
    )
    slow_half_life: Duration = key(
        "1 h",
        gt=0,
        description="Half-life of a node's measured slowness: its excess time counts half after "
        "this long, a quarter after twice as long. The node is not leased as long as "
        "the result is at least slow_factor.",
    )

    link_every: DurationOrOff = key(
        "30 s",
        description="About how often each node takes part in a measurement of the link to "
        "another node of its job, or between two nodes without a job. A measurement "
        "takes a tenth of a second, one pair of a class at a time, at least one "
        "second after the previous one. A node whose link is slow with at least "
        "three others counts as slow. off, or slow_nodes off: links are not "
        "measured.",
    )

    keep_warm: DurationOrOff = key(
        "10 min",
        description="A leased node imports PyTorch before a job is chosen for it, in each Python "
        "interpreter that unfinished jobs use (two at most), and starts workers as "
        "forks of it. An interpreter that no job has used for this long ends. off: "
        "none is kept, and every job's first round waits for its imports.",
    )
    warm_wait: Duration = key(
        "60 s",
        description="Maximum time that a new node warms up before jobs get it anyway.",
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

    niceness: int = key(
        10,
        ge=0,
        le=19,
        description="Niceness of all processes of leases that are slots: where jobs of one host "
        "compete for processors, the others come first. 0: not changed.",
    )
    io_priority: IoPriority = key(
        "low",
        description="I/O priority of the same processes on local disks, with I/O schedulers that "
        "know one (bfq, mq-deadline): low: the lowest best-effort level; idle: only when no other "
        "process uses the disk; normal: not changed.",
    )
    bound_cpus: bool = key(
        True,
        description="A lease of a slot that may use more processors than the slot has, because "
        "the main scheduler does not confine jobs, restricts itself to as many.",
    )
    bound_memory: bool = key(
        True,
        description="Where the main scheduler does not limit the memory of jobs, a job that uses "
        "more than its slot has (processes, and snapshots in memory) is ended on that node.",
    )

    @field_validator("health_check")
    @classmethod
    def _check_command(cls, value: Words) -> Words:
        if value and not value[0].strip():
            raise PydanticCustomError(
                "command", 'the first word must be a command, such as "/usr/sbin/nhc"'
            )
        return value

    @field_validator("sick_for_most")
    @classmethod
    def _check_maximum(cls, value: float, info: ValidationInfo) -> float:
        min_s = info.data.get("sick_for")
        if min_s is not None and value < min_s:
            raise PydanticCustomError(
                "sick_for_most",
                "{value} is less than sick_for, {min_s}; accepted is {min_s} or more",
                {"value": format_duration(value), "min_s": format_duration(min_s)},
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

    @property
    def sharing(self) -> SharingRules:
        """How leases behave that share their host with other jobs."""
        return SharingRules(
            niceness=self.niceness,
            io_priority=self.io_priority,
            bound_cpus=self.bound_cpus,
            bound_memory=self.bound_memory,
        )

    def interface_for(self, node_class: str) -> str:
        """Return the network for nodes of a class."""
        of = dict(text.split("=", 1) for text in self.interface_of)
        return of.get(node_class, self.interface)


def _checked(network: str) -> str:
    try:
        return checked(network)
    except NetworkNameError as error:
        raise PydanticCustomError("interface", "{sentence}", {"sentence": str(error)}) from None


class ContainersSection(Section):
    """Containers of jobs. The agent stays outside; a job's processes run inside."""

    image: str = key(
        "",
        description="Image of jobs that name no environment themselves (--container, --conda, "
        "--venv or --no-container): a file or directory that the nodes share, or a "
        "name that the runtime knows; empty: none.",
    )
    runtime: Literal[
        "auto", "apptainer", "singularity", "podman-hpc", "charliecloud", "enroot", "podman"
    ] = key(
        "auto",
        description="Container runtime; auto: the first of these that a node has, in this order.",
    )
    binds: Words = key(
        [],
        description="Paths of the node that every container sees, as SRC or SRC:DST, such as "
        "\"/scratch\"; the job's working directory, its script's and the home "
        "directory are always visible.",
    )
    options: Words = key(
        [],
        description="Additional arguments of the runtime, put before the image, such as "
        '["--cgroups=disabled"] for podman. They depend on the runtime, so set that '
        "too.",
    )

    @field_validator("binds")
    @classmethod
    def _binds(cls, value: Words) -> Words:
        for text in value:
            places = text.split(":")
            if len(places) > 2 or not all(os.path.isabs(place) for place in places):
                raise PydanticCustomError(
                    "bind",
                    '"{text}" is not SRC or SRC:DST with absolute paths, such as "/scratch"',
                    {"text": text},
                )
        return value
