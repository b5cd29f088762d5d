"""What messages carry: a job as submitted, a failure, what a node holds, a member of a service.

Decides their shape only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import (
    MOST_FAILURES,
    Amount,
    Code,
    Count,
    Id,
    Measurement,
    Moment,
    Name,
    Rank,
    Sentence,
    Tail,
)
from malletrain.protocol.phases import AssignmentPhase


class SoftwareEnvironment(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """In which software a job's processes run on a node. It is entered anew for each job, by the
    agent, which itself stays outside.
    """

    modules: tuple[str, ...] = ()
    """Loaded first, in this order, outside of a container."""
    conda: str = ""
    """Name or path of the conda environment to activate."""
    conda_exe: str = ""
    """The conda of the submitting host, for nodes that do not name one."""
    venv: str = ""
    """Directory of the virtual environment whose Python runs the job, in the container if there is
    one."""
    container: str | None = None
    """The image; empty: none; None: what the site has by default."""
    runtime: str = "auto"
    """What runs the image, a name of :data:`malletrain.agent.containers.RUNTIMES`."""
    binds: tuple[str, ...] = ()
    """What is bound into the container besides what every job needs: ``SRC`` or ``SRC:DST``."""
    options: tuple[str, ...] = ()
    """The site's own words to the runtime."""


class Notification(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who is told of a job, and of what."""

    to: str
    """A mail address, the address of a web hook, or a command of the daemon's host."""
    kind: str
    """``mail``, ``webhook`` or ``command``."""
    on: tuple[str, ...]
    """Of its ``start``, its ``end``, its ``failure``."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One malleable job as submitted. ``nproc_per_node`` 0: one process for each GPU of the node,
    one without GPUs; all nodes of a job must come to the same number. ``mode``: ``restart`` |
    ``live`` | ``service``. ``curve`` maps nodes (as text) to samples/s where the user knows it, for
    a service to what so many nodes are worth; without a ``goal`` the site's objective counts.
    ``profile``: measure how it scales, at ``profile_sizes`` if given; jobs of one ``profile_key``
    are taken to scale alike. ``software``: in which environment it runs, None for that of the
    agent. ``deadline``: when it is to be done, seconds since the epoch; ``budget_nh``: charged
    node-hours that it may cost; ``work``: samples in all.
    """

    name: str
    owner: str
    script: str
    workdir: str
    python: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    setup: str | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    weight: float = 1.0
    goal: str = ""
    curve: dict[str, float] | None = None
    launcher: str = "builtin"
    mode: str = "restart"
    profile: bool = True
    profile_sizes: tuple[int, ...] | None = None
    profile_key: str = ""
    software: SoftwareEnvironment | None = None
    after: tuple[str, ...] = ()
    """It begins when these jobs have completed."""
    time_limit_s: float = 0.0
    """It is cancelled when it has had nodes for so long; 0: no limit."""
    notify: tuple[Notification, ...] = ()
    """Who is told of its start and end."""
    sweep: str = ""
    """Its owner's jobs of one sweep are one entry of the queue. Empty: it is in none."""
    key: str = ""
    """Its owner's name for this submission: submitted again, it is the same job. Empty: none."""
    deadline: float | None = None
    budget_nh: float | None = None
    work: float | None = None
    on_hang: str = "tell"
    """What is done when its workers hang: ``tell`` its owner, or ``restart`` them too."""
    parameters: float | None = None
    """Of its model, as its owner says before any worker does; None: not said."""
    flops: float | None = None
    """Of its model, per sample, forward and backward; None: not said."""
    module: str = ""
    """Run as ``python -m MODULE`` instead of ``script``, which is then where it was found; empty:
    the script is run."""
    sized_for: int = 0
    """Nodes for which its processes sized what they cannot change, where ``max_nodes`` was lowered
    since the job began; 0: ``max_nodes``."""

    @property
    def largest(self) -> int:
        """The most nodes that the job can ever have: batches and the ends of epochs are sized by
        it, and must not change while it trains.
        """
        return max(self.max_nodes, self.sized_for)


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker process that ended badly. A negative ``exitcode`` is a signal's."""

    rank: Rank
    exitcode: Code
    time: Moment
    tail: Tail = ""
    cause: Sentence = ""
    """What went wrong, where more is known than the tail's last line."""


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an agent holds of one job; in every Hello, so that a restarted daemon knows."""

    job: Id
    phase: AssignmentPhase
    """One of :data:`malletrain.protocol.phases.PHASES`."""
    generation: Count = 0
    """The round that its workers belong to, 0 before the first."""
    failures: Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MOST_FAILURES)] = ()
    """The workers that ended badly."""
    address: Name = ""
    """Where the process of a service can be reached."""
    size: Count = 0
    """Nodes of that round, once all workers here have ended well; 0: not known."""


class MetricSample(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, array_like=True
):
    """One value of a metric."""

    time: Moment
    """When the script reported it."""
    value: Measurement
    samples: Amount = 0.0
    """Of its process in its round, by then."""
    step: Count | None = None
    """The script's own count."""


class NodeNetwork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One interface of a node."""

    interface: Name
    address: Name
    """Of the node in it."""
    bits: Rank
    """Of the address that are the network's."""
    mbit: Count = 0
    """Its speed in Mbit/s; 0: not known."""


class ProbeTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node that is to be tried, and where it listens for that."""

    node: str
    host: str
    port: int


class ProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What came of trying a node."""

    node: Name
    reached: bool
    mbit: Amount = 0.0
    """Mbit/s that went through one connection, where that was asked for."""
    trouble: Sentence = ""
    """Why it was not reached."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One member of a service, as the others hear of it."""

    node: str
    host: str
    address: str = ""
    gone_in_s: float | None = None
    """Seconds until it leaves, at most."""
    lasts_s: float | None = None
    """Seconds that its node is expected to last yet; None where nothing is foretold."""
