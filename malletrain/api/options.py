"""What a job is submitted with from Python: the options of ``malletrain submit``, with Python's own
types, and the checked job that they make.

Decides the types only. What is accepted is decided in :mod:`malletrain.submission.spec`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from malletrain.protocol.messages import JobSpec
from malletrain.submission.software import SoftwareOptions
from malletrain.submission.spec import build, parse_nodes

_SOFTWARE = tuple(field.name for field in fields(SoftwareOptions))
_LISTS = ("module", "container_bind")


class SubmitOptions(TypedDict, total=False):
    """The options of ``malletrain submit`` as keywords, all of them optional."""

    name: str
    """Name of the job. Default: the script's name without its suffix."""
    nodes: int | str | tuple[int, int]
    """Nodes the job can use: ``4``, ``"1:16"`` or ``(1, 16)``. Default: 1."""
    nproc_per_node: int
    """Worker processes on each node. Default: one for each GPU, one without GPUs."""
    weight: float
    """How much the job counts beside the others. Default: 1."""
    goal: str
    """``"throughput"`` or ``"efficiency"``. Default: what the site maximises."""
    deadline: str
    """When it is to be done: ``"friday 18:00"``, ``"18:00"``, ``"2026-12-01T08:00"`` or
    ``"in 6 h"``; local time.
    """
    budget: str
    """Charged node-hours that it may cost, such as ``"200nh"``."""
    work: str
    """Samples to train on in all. Default: what the script's ``sampler.epochs(N)`` says."""
    curve: Mapping[int, float] | str | os.PathLike[str]
    """Known scaling curve, nodes → samples/s, or a file of it."""
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
    """Run in no container, whatever the site has."""
    container_runtime: str
    """What runs the image."""
    container_bind: Sequence[str]
    """Paths that the container sees too, ``SRC`` or ``SRC:DST``."""
    env: Mapping[str, str]
    """Environment variables of the script."""
    workdir: str | os.PathLike[str]
    """Directory the script runs in. Default: the present one."""
    launcher: str
    """``"builtin"`` or ``"torchrun"``."""
    profile: bool
    """Measure how the job scales while it trains. Default: yes, but not with a curve."""
    profile_sizes: Sequence[int]
    """Measure at these numbers of nodes."""
    profile_key: str
    """Jobs of one key scale alike."""
    model_size: str
    """Its model's parameters, and after a comma the FLOPs per sample: it begins with what similar
    ones showed."""
    as_module: bool
    """``script`` is the name of a module, and run as ``python -m`` runs it."""
    live: bool
    """The script uses malletrain.elastic."""
    service: bool
    """The script is a service."""
    value: str | os.PathLike[str]
    """File that says what nodes are worth to a service."""
    after: Sequence[str]
    """Begin only when these jobs (ids or names) have completed."""
    time_limit: float | str
    """Cancel it when it has had nodes for so long: seconds, or text such as ``"90 min"``."""
    on_hang: str
    """When its workers hang: ``"tell"`` its owner (default), or ``"restart"`` them too."""
    notify: Sequence[str]
    """Who is told of its start, end and failure: mail addresses, web hooks, commands."""
    resume_from: str
    """Begin from the snapshot of another job (id or name), or from this file."""


class FunctionOptions(SubmitOptions, total=False):
    """The options of a function's job."""

    tries: int
    """In how many rounds of its job the function may be called; 1: it is not called again when its
    nodes change or it fails. Default: in each round.
    """


def spec_of(
    script: str | os.PathLike[str], args: Sequence[object], options: Mapping[str, Any]
) -> JobSpec:
    """The checked job.

    Args:
        script: the Python file that runs on every node, or the name of a module (``as_module``).
        args: its arguments; made text.
        options: a :class:`SubmitOptions`, without ``resume_from``.

    Raises:
        malletrain.submission.error.SpecError: it cannot be submitted; the sentence says what is
            accepted.
        TypeError: an option that there is not.
    """
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(values.keys() - SubmitOptions.__annotations__.keys()):
        raise TypeError(
            f"submit() has no option {unknown[0]!r}; it has "
            f"{', '.join(sorted(SubmitOptions.__annotations__))}."
        )
    software = {name: values.pop(name) for name in _SOFTWARE if name in values}
    software.update({name: tuple(software[name]) for name in _LISTS if name in software})
    curve = values.pop("curve", None)
    if isinstance(curve, Mapping):
        rates = {str(int(nodes)): float(rate) for nodes, rate in curve.items()}
    else:
        rates = None
        values["curve"] = Path(curve) if curve is not None else None
    if "nodes" in values:
        values["nodes"] = _nodes(values["nodes"])
    if "profile_sizes" in values:
        values["profile_sizes"] = ",".join(map(str, values["profile_sizes"]))
    if isinstance(values.get("time_limit"), int | float):
        values["time_limit"] = f"{values['time_limit']} s"
    for name in ("after", "notify"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    if "value" in values:
        values["value"] = Path(values["value"])
    if "workdir" in values:
        values["workdir"] = os.fspath(values["workdir"])
    values["env"] = [f"{name}={value}" for name, value in values.pop("env", {}).items()]
    words = [str(arg) for arg in args]
    spec = build(os.fspath(script), words, software=SoftwareOptions(**software), **values)
    return spec if rates is None else msgspec.structs.replace(spec, curve=rates)


def limits_of(nodes: int | str | tuple[int, int]) -> tuple[int, int]:
    """The fewest and the most nodes, as :func:`spec_of` takes them."""
    return parse_nodes(_nodes(nodes))


def _nodes(nodes: int | str | tuple[int, int]) -> str:
    return ":".join(map(str, nodes)) if isinstance(nodes, tuple) else str(nodes)
