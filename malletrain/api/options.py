"""The options of ``malletrain submit`` as Python types, and their conversion to a job
specification.

Decides only the types. :mod:`malletrain.submission.spec` decides which values are valid.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from malletrain.protocol.messages import JobSpec
from malletrain.submission.farm import TaskOptions, build_farm
from malletrain.submission.options import JobOptions, ScriptOptions
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build, parse_nodes

_SOFTWARE_OPTIONS = tuple(field.name for field in fields(SoftwareOptions))
_TUPLE_OPTIONS = ("module", "container_bind")
_SIZE_OPTIONS = ("nodes", "slots", "gpus")


class SubmitOptions(TypedDict, total=False):
    """The options of ``malletrain submit`` as keywords, all of them optional."""

    name: str
    """Name of the job. Default: the script's name without its suffix."""
    nodes: int | str | tuple[int, int]
    """Nodes the job can use: ``4``, ``"1:16"`` or ``(1, 16)``. Default: 1."""
    slots: int | str | tuple[int, int]
    """Slots the job can use, in place of ``nodes``."""
    gpus: int | str | tuple[int, int]
    """GPUs the job can use, in place of ``nodes``, where slots have one GPU."""
    kind: str
    """Kind of slots, or class of nodes, on which the job runs. Default: any."""
    nproc_per_node: int | str
    """Worker processes on each node, or ``"auto"``: found by measuring. Default: one for each GPU,
    one without GPUs.
    """
    threads: int | str
    """Threads of each process, or ``"auto"``. Default: the cores divided by the processes."""
    loader_workers: int | str
    """Loader workers of each process, for DataLoaders that name no number, or ``"auto"``. Default:
    none.
    """
    data_memory: str
    """Memory of each node for the script's DataCache, such as ``"25%"`` or ``"8G"``, unless the
    script itself says ``memory=``. Default: 25 %.
    """
    weight: float
    """How much the job counts beside the others. Default: 1."""
    goal: str
    """``"throughput"`` or ``"efficiency"``. Default: the site's ``objective``."""
    deadline: str
    """Time by which the job is to complete: ``"friday 18:00"``, ``"18:00"``, ``"2026-12-01T08:00"``
    or ``"in 6 h"``; local time.
    """
    budget: str
    """Maximum charged node-hours, such as ``"200nh"``."""
    work: str
    """Total number of samples to train on. Default: from the script's ``sampler.epochs(N)``."""
    curve: Mapping[int, float] | str | os.PathLike[str]
    """Known scaling curve, nodes → samples/s, or the path of a file with one."""
    setup: str
    """Shell command run before Python on each node."""
    module: Sequence[str]
    """Environment modules to load on each node."""
    conda: str
    """Conda environment to run in, by name or path."""
    venv: str
    """Virtual environment to run in."""
    container: str
    """Container image to run in."""
    no_container: bool
    """Run without a container, even if the site configures one."""
    container_runtime: str
    """Container runtime that runs the image, such as ``"apptainer"``."""
    container_bind: Sequence[str]
    """Additional paths that the container sees, ``SRC`` or ``SRC:DST``."""
    env: Mapping[str, str]
    """Environment variables of the script."""
    workdir: str | os.PathLike[str]
    """Directory the script runs in. Default: the current directory."""
    launcher: str
    """``"builtin"`` or ``"torchrun"``."""
    profile: bool
    """Measure how the job scales while it trains. Default: True, but a job with ``curve`` is not
    profiled."""
    profile_sizes: Sequence[int]
    """Measure at these numbers of nodes."""
    profile_key: str
    """Jobs with the same key start from each other's scaling curves."""
    model_size: str
    """Number of model parameters, optionally followed by a comma and the FLOPs per sample. The job
    starts from the scaling curves of similar jobs."""
    as_module: bool
    """``script`` is the name of a module, which runs as with ``python -m``."""
    live: bool
    """The script uses malletrain.elastic."""
    service: bool
    """The script is a service."""
    value: str | os.PathLike[str]
    """File with the value of each number of nodes to a service; ``"auto"``: its process says it;
    ``"0"``: no node until :meth:`malletrain.Client.worth` says otherwise."""
    start_cost: float | str
    """Time from the start of a service's process on a node until it is ready: seconds, or text such
    as ``"180 s"``; ``"auto"``: measured; ``"auto:180 s"``: taken to be 180 s until then. Default: 5
    s."""
    after: Sequence[str]
    """Start only after these jobs (ids or names) have completed."""
    time_limit: float | str
    """Maximum time with nodes, after which the job is cancelled: seconds, or text such as ``"90
    min"``."""
    on_hang: str
    """Action when workers hang: ``"tell"`` notifies the owner (default); ``"restart"`` also
    restarts the workers."""
    notify: Sequence[str]
    """Recipients of notices about its start, end and failure: mail addresses, web hooks,
    commands."""
    resume_from: str
    """Start from the snapshot of another job (id or name), or from this file."""


class FunctionOptions(SubmitOptions, total=False):
    """The options of a function's job."""

    tries: int
    """Maximum number of rounds in which the function is called. With 1 it is not called again after
    a rescale or a failure. Default: no limit.
    """


class MapOptions(TypedDict, total=False):
    """The options of :meth:`malletrain.Client.map`, all of them optional. Those that
    :class:`SubmitOptions` has too mean the same.
    """

    name: str
    """Name of the farm. Default: the function's name."""
    nodes: int | str | tuple[int, int]
    """Nodes the farm can use: ``4``, ``"1:16"`` or ``(1, 16)``. Default: 1."""
    slots: int | str | tuple[int, int]
    """Slots the farm can use, in place of ``nodes``."""
    kind: str
    """Kind of slots, or class of nodes."""
    cpus: int
    """Processors of a process, as the scheduler counts them. Default: 1. 0: one process a node."""
    gpus: int
    """GPUs of a process."""
    memory: str
    """Memory of a process, such as ``"4 GB"``."""
    time: str
    """Maximum duration of a task, such as ``"30 min"``."""
    retries: int
    """Number of times that a task whose process died is tried again. An exception of the function
    is a result, and not tried again."""
    max_running: int
    """Maximum number of processes that run at a time on all nodes together."""
    weight: float
    """How much the farm counts beside other jobs. Default: 1."""
    deadline: str
    """Time by which it is to complete."""
    budget: str
    """Maximum charged node-hours."""
    setup: str
    """Shell command run first on each node."""
    module: Sequence[str]
    """Environment modules to load on each node."""
    conda: str
    """Conda environment to run in."""
    venv: str
    """Virtual environment to run in."""
    container: str
    """Container image to run in; it has malletrain and cloudpickle."""
    no_container: bool
    """Run without a container."""
    container_runtime: str
    """Container runtime that runs the image."""
    container_bind: Sequence[str]
    """Additional paths that the container sees."""
    env: Mapping[str, str]
    """Environment variables of the processes."""
    workdir: str | os.PathLike[str]
    """Directory in which the function is called; the nodes share it. Default: the current one."""
    after: Sequence[str]
    """Start only after these jobs have completed."""
    time_limit: float | str
    """Maximum time with nodes, after which the farm is cancelled."""
    notify: Sequence[str]
    """Recipients of notices."""


_TASK_OPTIONS = ("gpus", "memory", "time", "retries", "max_running")


def farm_of(
    command: Sequence[str],
    columns: Sequence[str],
    total: int,
    output: str,
    log: str,
    options: Mapping[str, Any],
) -> JobSpec:
    """Return the validated specification of a farm.

    Args:
        command: words of the command, templates.
        columns: names of the values of a task.
        total: number of tasks.
        output: pattern of the result file.
        log: pattern of the log.
        options: a :class:`MapOptions`.

    Raises:
        malletrain.submission.error.SpecError: an option is invalid; the message says what is valid.
        TypeError: an option does not exist.
    """
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(values.keys() - MapOptions.__annotations__.keys()):
        raise TypeError(
            f"map() has no option {unknown[0]!r}; it has "
            f"{', '.join(sorted(MapOptions.__annotations__))}."
        )
    of_tasks = {name: values.pop(name) for name in _TASK_OPTIONS if name in values}
    tasks = TaskOptions(cpus=values.pop("cpus", 1), output=output, log=log, **of_tasks)
    software, values = _plain(values)
    return build_farm(command, columns, total, tasks, JobOptions(software=software, **values))[0]


def _plain(values: dict[str, Any]) -> tuple[SoftwareOptions, dict[str, Any]]:
    """Return the options for the software environment, and the others as on the command line."""
    software = {name: values.pop(name) for name in _SOFTWARE_OPTIONS if name in values}
    software.update({name: tuple(software[name]) for name in _TUPLE_OPTIONS if name in software})
    for name in _SIZE_OPTIONS:
        if name in values:
            values[name] = _nodes_text(values[name])
    if isinstance(values.get("time_limit"), int | float):
        values["time_limit"] = f"{values['time_limit']} s"
    if isinstance(values.get("start_cost"), int | float):
        values["start_cost"] = f"{values['start_cost']} s"
    for name in ("after", "notify"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    if "workdir" in values:
        values["workdir"] = os.fspath(values["workdir"])
    values["env"] = [f"{name}={value}" for name, value in values.pop("env", {}).items()]
    return SoftwareOptions(**software), values


def spec_of(
    script: str | os.PathLike[str], args: Sequence[object], options: Mapping[str, Any]
) -> JobSpec:
    """Return the validated job specification.

    Args:
        script: the Python file that runs on every node, or the name of a module (``as_module``).
        args: its arguments, converted by ``str()``.
        options: a :class:`SubmitOptions`, without ``resume_from``.

    Raises:
        malletrain.submission.error.SpecError: an option is invalid; the message says what is valid.
        TypeError: an option does not exist.
    """
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(values.keys() - SubmitOptions.__annotations__.keys()):
        raise TypeError(
            f"submit() has no option {unknown[0]!r}; it has "
            f"{', '.join(sorted(SubmitOptions.__annotations__))}."
        )
    curve = values.pop("curve", None)
    if isinstance(curve, Mapping):
        rates = {str(int(nodes)): float(rate) for nodes, rate in curve.items()}
    else:
        rates = None
        values["curve"] = Path(curve) if curve is not None else None
    software, values = _plain(values)
    if "profile_sizes" in values:
        values["profile_sizes"] = ",".join(map(str, values["profile_sizes"]))
    if "value" in values:
        values["value"] = Path(values["value"])
    arguments = [str(arg) for arg in args]
    spec = build(os.fspath(script), arguments, ScriptOptions(software=software, **values))
    return spec if rates is None else msgspec.structs.replace(spec, curve=rates)


def limits_of(nodes: int | str | tuple[int, int]) -> tuple[int, int]:
    """Return the minimum and maximum number of nodes in the ``nodes`` option."""
    return parse_nodes(_nodes_text(nodes))


def size_limits(
    options: Mapping[str, Any], names: Sequence[str] = _SIZE_OPTIONS
) -> tuple[int, int]:
    """Return the minimum and maximum size of a job.

    Args:
        options: keywords of the job; the first of ``names`` that is among them counts.
        names: the keywords that say a size.
    """
    sizes = (options[name] for name in names if options.get(name) is not None)
    return limits_of(next(sizes, 1))


def _nodes_text(nodes: int | str | tuple[int, int]) -> str:
    return ":".join(map(str, nodes)) if isinstance(nodes, tuple) else str(nodes)
