"""Parts of messages: a job as submitted, a failure, an agent's assignment, a member of a service.

Decides their shape only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from malletrain.protocol.bounds import (
    MAX_FAILURES,
    MAX_PROCESSES,
    Amount,
    Code,
    Count,
    Duration,
    EpochSeconds,
    Id,
    MetricValue,
    Name,
    Rank,
    Sentence,
    Tail,
)
from malletrain.protocol.farm import FarmSpec
from malletrain.protocol.phases import AssignmentPhase

SIZE_NOUNS = {"": "nodes", "slots": "slots", "gpus": "GPUs"}
"""What the sizes of a job count → the noun for users."""
TUNABLE = ("processes", "threads", "loader-workers")
"""Parts of the layout of a node that can be found by measuring."""


class SoftwareEnvironment(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The software environment in which a job's processes run on a node. The agent enters it for
    each job and stays outside itself.
    """

    modules: tuple[str, ...] = ()
    """Environment modules, loaded first, in this order, outside of a container."""
    conda: str = ""
    """Name or path of the conda environment to activate."""
    conda_exe: str = ""
    """The conda of the submitting host, for nodes that do not name one."""
    venv: str = ""
    """Directory of the virtual environment whose Python runs the job, in the container if there is
    one."""
    container: str | None = None
    """The image; empty: no container; None: the site's default."""
    runtime: str = "auto"
    """Container runtime, a name in :data:`malletrain.agent.software.RUNTIMES`."""
    binds: tuple[str, ...] = ()
    """Additional bind mounts of the container: ``SRC`` or ``SRC:DST``."""
    options: tuple[str, ...] = ()
    """The site's additional arguments of the runtime."""


class Notification(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One recipient of notices about a job."""

    to: str
    """A mail address, the address of a web hook, or a command of the daemon's host."""
    kind: str
    """``mail``, ``webhook`` or ``command``."""
    on: tuple[str, ...]
    """Events to notify of: the job's ``start``, ``end``, ``failure``."""


class RoundLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the processes of a job use one node, the same on all nodes of a round."""

    processes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESSES)]
    """Number of worker processes on the node."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROCESSES)] = 0
    """Number of threads of each process; 0: the node's cores divided by the processes."""
    loader_workers: Annotated[int, msgspec.Meta(ge=0, le=MAX_PROCESSES)] = 0
    """Number of loader workers of each process; 0: as the script has it."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One malleable job as submitted. ``nproc_per_node`` 0: one process for each GPU of the node,
    one without GPUs; all nodes of a job must have the same number. ``mode``: ``restart`` |
    ``live`` | ``service`` | ``farm``. ``curve`` maps numbers of nodes (as text) to samples/s if the
    user knows them, for a service to their value; without a ``goal`` the site's objective applies.
    ``profile``: measure the scaling curve, at ``profile_sizes`` if given; jobs with the same
    ``profile_key`` start from each other's curves. ``software``: the environment in which it runs,
    None for that of the agent. ``deadline``: time by which it is to complete, seconds since the
    epoch; ``budget_nh``: maximum charged node-hours; ``work``: total number of samples.
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
    """Jobs that must have completed before it starts."""
    time_limit_s: float = 0.0
    """Maximum time with nodes, seconds, after which it is cancelled; 0: no limit."""
    notify: tuple[Notification, ...] = ()
    """Recipients of notices about its start and end."""
    sweep: str = ""
    """Name of its sweep; its owner's jobs of one sweep are one entry of the queue. Empty: none."""
    key: str = ""
    """Idempotency key of its owner: a submission with the same key is the same job. Empty: none."""
    deadline: float | None = None
    budget_nh: float | None = None
    work: float | None = None
    on_hang: str = "tell"
    """Action when its workers hang: ``tell`` notifies its owner; ``restart`` also restarts them."""
    parameters: float | None = None
    """Number of its model's parameters as submitted, before a worker reports it; None: not given.
    """
    flops: float | None = None
    """FLOPs of its model per sample, forward and backward; None: not given."""
    module: str = ""
    """Module that runs as ``python -m MODULE`` instead of ``script``, which is then the path at
    which the module was found; empty: the script runs."""
    sized_for: int = 0
    """Number of nodes for which its processes sized quantities that they cannot change, if
    ``max_nodes`` was lowered after the job started; 0: ``max_nodes``."""
    node_class: str = ""
    """Class of nodes, or kind of slots, on which it runs; empty: any one class."""
    farm: FarmSpec | None = None
    """The tasks of a farm; None for other jobs."""
    threads: int = 0
    """Threads of each process; 0: the node's cores divided by the processes, unless the job's
    environment names a number."""
    loader_workers: int = 0
    """Loader workers of each process for DataLoaders of the script that name no number; 0: none."""
    tuned: tuple[str, ...] = ()
    """Parts of the layout of a node that are found by measuring, of :data:`TUNABLE`."""
    start_cost_s: float | None = None
    """Time from the start of a service's process until it is ready, seconds; None: not given."""
    start_cost_measured: bool = False
    """Whether that time holds only until it is measured."""
    links: dict[str, str] = {}
    """Name → address of a page of the job, such as a TensorBoard. Every user sees them."""
    counts: str = ""
    """What ``min_nodes`` and ``max_nodes`` count: ``slots``, or ``gpus``, which are slots of one
    GPU. Empty: nodes, or slots of one kind."""

    @property
    def size_noun(self) -> str:
        """Noun for what its sizes count, such as ``GPUs``."""
        return SIZE_NOUNS[self.counts]

    @property
    def size_option(self) -> str:
        """Option of ``malletrain submit`` for its sizes."""
        return f"--{self.counts or 'nodes'}"

    @property
    def layout(self) -> RoundLayout:
        """The layout of a node that the job asks for. An agent replaces 0 processes by the number
        of its GPUs.
        """
        return RoundLayout(max(1, self.nproc_per_node), self.threads, self.loader_workers)

    @property
    def trains(self) -> bool:
        """Whether its workers make steps together. The nodes of a service and of a farm are
        independent.
        """
        return self.mode not in ("service", "farm")

    @property
    def largest(self) -> int:
        """Maximum number of nodes that the job can ever have. Batches and the ends of epochs depend
        on it, and must not change while it trains.
        """
        return max(self.max_nodes, self.sized_for)


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One worker process that failed. A negative ``exitcode`` is the number of a signal."""

    rank: Rank
    exitcode: Code
    time: EpochSeconds
    tail: Tail = ""
    cause: Sentence = ""
    """The cause, if more is known than the tail's last line."""


class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The state of one job on an agent; part of every Hello, so that a restarted daemon knows
    it.
    """

    job: Id
    phase: AssignmentPhase
    """One of :data:`malletrain.protocol.phases.PHASES`."""
    generation: Count = 0
    """The round that its workers belong to, 0 before the first."""
    failures: Annotated[tuple[Failure, ...], msgspec.Meta(max_length=MAX_FAILURES)] = ()
    """The workers that failed."""
    address: Name = ""
    """Address of the process of a service."""
    size: Count = 0
    """Number of nodes of that round, once all workers here have succeeded; 0: not known."""
    loading: bool = False
    """Whether the process of a service has joined and is not ready to serve yet."""
    start_s: Duration | None = None
    """Time from the start of the process of a service until it was ready, seconds; None: it is not,
    or the launcher does not measure it."""
    data_address: Name = ""
    """Address at which the node serves the samples of its data caches to the others."""


class MetricSample(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, array_like=True
):
    """One value of a metric."""

    time: EpochSeconds
    """When the script reported it."""
    value: MetricValue
    samples: Amount = 0.0
    """Samples that its process had processed in its round at that time."""
    step: Count | None = None
    """The script's own step count."""


class NodeNetwork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One interface of a node."""

    interface: Name
    address: Name
    """The node's address in this network."""
    bits: Rank
    """Length of the network prefix, bits."""
    mbit: Count = 0
    """Its speed in Mbit/s; 0: not known."""


class ProbeTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A node to be probed, and the address at which it listens for the probe."""

    node: str
    host: str
    port: int


class ProbeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of probing a node."""

    node: Name
    reached: bool
    mbit: Amount = 0.0
    """Bandwidth of one connection, Mbit/s, if it was requested."""
    trouble: Sentence = ""
    """Why it was not reached."""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One member of a service, as it is announced to the others."""

    node: str
    host: str
    address: str = ""
    gone_in_s: float | None = None
    """Maximum time until it leaves, seconds; None if no end is known."""
    lasts_s: float | None = None
    """Expected remaining time of its node, seconds; None if there is no forecast."""
    loading: bool = False
    """Whether it is not ready to serve yet."""
