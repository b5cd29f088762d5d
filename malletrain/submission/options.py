"""The options of a job before they are checked: those that ``malletrain submit`` and ``malletrain
map`` share, and those of ``malletrain submit`` alone.

The values are the texts of the command line. :mod:`malletrain.submission.spec` and
:mod:`malletrain.submission.farm` check them and build the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from malletrain.submission.layout import Choice
from malletrain.submission.software import SoftwareOptions


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of every job, script or farm."""

    name: str | None = None
    """Name of the job. None: from the name of its script or program."""
    nodes: str | None = None
    """Number of nodes, ``N`` or ``MIN:MAX``. None: 1, or the sizes of a service's value file. At
    most one of ``nodes``, ``slots`` and ``gpus`` is given."""
    slots: str | None = None
    """Number of slots, ``N`` or ``MIN:MAX``."""
    kind: str | None = None
    """Kind of slots, or class of nodes. None: any."""
    weight: float = 1.0
    """Factor on the value of nodes to this job, above 0."""
    setup: str | None = None
    """Shell command that runs first on each node."""
    env: Sequence[str] = ()
    """Environment variables, ``NAME=VALUE``, or ``NAME`` with the value that it has now."""
    workdir: str | None = None
    """Directory in which the job runs. None: the current one."""
    software: SoftwareOptions = field(default_factory=SoftwareOptions)
    """Modules, environment and container on the nodes."""
    after: Sequence[str] = ()
    """Jobs (ids or names) that must complete before this one starts."""
    time_limit: str | None = None
    """Maximum time with nodes, such as ``"90 min"``. None: no limit."""
    notify: Sequence[str] = ()
    """Recipients of notifications, each ``RECIPIENT`` or ``EVENT,...=RECIPIENT``."""
    deadline: str | None = None
    """Time by which the job is to complete."""
    budget: str | None = None
    """Maximum charged node-hours, such as ``"200nh"``."""


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(JobOptions):
    """The options of a job that runs a script: a training or a service."""

    gpus: str | None = None
    """Number of GPUs, each a slot, ``N`` or ``MIN:MAX``."""
    as_module: bool = False
    """Whether the script is the name of a module, run as with ``python -m``."""
    launcher: str = "builtin"
    """``"builtin"`` or ``"torchrun"``."""
    live: bool = False
    """Whether the script uses malletrain.elastic."""
    on_hang: str = "tell"
    """Action when workers hang, ``"tell"`` or ``"restart"``."""

    nproc_per_node: Choice = None
    """Processes on each node, or ``"auto"``. None: one for each GPU."""
    threads: Choice = None
    """Threads of each process, or ``"auto"``. None: the cores divided by the processes."""
    loader_workers: Choice = None
    """Loader workers of each process, or ``"auto"``. None: none."""
    data_memory: str | None = None
    """Memory of each node for the script's DataCache, a percentage or a size."""

    goal: str | None = None
    """``"throughput"`` or ``"efficiency"``. None: the site's objective."""
    work: str | None = None
    """Total number of samples to train on."""
    curve: Path | None = None
    """File of the known scaling curve, nodes to samples/s."""
    profile: bool = True
    """Whether the scaling curve is measured while the job trains."""
    profile_sizes: str | None = None
    """Numbers of nodes to measure at, with commas between them."""
    profile_key: str | None = None
    """Jobs with the same key start from each other's curves."""
    model_size: str | None = None
    """Number of parameters, and after a comma the FLOPs per sample."""

    service: bool = False
    """Whether the script is a service: one process on each node, without an end."""
    value: Path | None = None
    """File of the value of nodes to a service, or ``auto``."""
    start_cost: str | None = None
    """Time until a service's process is ready: a duration, ``"auto"`` or ``"auto:DURATION"``."""
