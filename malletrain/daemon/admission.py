"""Validates requests of clients: their parameters, and the specification of a submitted job.

A client may be anybody's program. This module changes nothing; it refuses with a sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from allocator import Goal, ScalingCurve
from allocator.curves import CurveError
from jpa import new_plan
from jpa.curve import MeasuredCurve
from malletrain.core.events import BY_ITS_OWNER
from malletrain.core.trainers import Trainer
from malletrain.protocol import messages
from malletrain.protocol.bounds import JOB_ID, MAX_NODES

MOST_PROCESSES = 4096
"""Of one job on one node."""
MOST_SIZES = 100
"""To profile at; a profile visits far fewer."""
WEIGHTS = (1e-6, 1e6)
MOST_RATE = 1e15
"""Samples/s, and what they are worth; the planner's arithmetic is good for no more."""
LONGEST_S = 366 * 86400.0
"""Of a time limit."""
MOST_AFTER = 1000
MOST_SPEC_BYTES = 256 * 1024
MOST_TEXT = 300
"""Characters of a parameter: a job's name, a log's, a place in it."""
MOST_WHY = 100
"""The same, of why jobs are cancelled."""


class RequestRefused(Exception):
    """The request cannot be done; ``code`` is ``refused`` or ``usage``."""

    def __init__(self, sentence: str, code: str = "refused") -> None:
        super().__init__(sentence)
        self.code = code


def text(params: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """The text ``name``; without a default it has to be there."""
    value = params.get(name, default)
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise RequestRefused(
            f"The request's '{name}' is {_shown(value)}; it is a text of {MOST_TEXT} characters "
            "at most.",
            "usage",
        )
    return value


def whole(params: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """The whole number ``name``, moved into [low, high]."""
    return int(number(params, name, default, low, high))


def number(params: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """The number ``name``, moved into [low, high]."""
    value = params.get(name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise RequestRefused(
            f"The request's '{name}' is {_shown(value)}; it is a finite number.", "usage"
        )
    return min(max(value, low), high)


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    return (
        f"'{str(value)[:40]}'"
        if isinstance(value, str | int | float) and len(str(value)[:5000]) <= 40
        else f"a {type(value).__name__}"
    )


def weighed(spec: messages.JobSpec, weight: Any) -> messages.JobSpec:
    """The job with another weight, where that can be one."""
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RequestRefused(
            f"The request's 'weight' is {_shown(weight)}; it is a number.", "usage"
        )
    spec = msgspec.structs.replace(spec, weight=float(weight))
    if problem := _size_problem(spec) or _curve_problem(spec):
        raise RequestRefused(problem, "usage")
    return spec


def valued(spec: messages.JobSpec, nodes: Mapping[int, float]) -> messages.JobSpec:
    """The service to which so many nodes are worth this, where they can be. Raises
    RequestRefused.
    """
    curve = {str(size): value for size, value in sorted(nodes.items())}
    spec = msgspec.structs.replace(spec, curve=curve)
    if problem := _size_problem(spec) or _curve_problem(spec):
        raise RequestRefused(problem, "usage")
    return spec


def problem_of(spec: messages.JobSpec, files: bool = True) -> str:
    """What is wrong with a job as submitted, as a sentence; empty when nothing is. ``files``: look
    whether its files are there.
    """
    return (
        _size_problem(spec)
        or _kind_problem(spec)
        or _software_problem(spec)
        or _file_problem(spec, files)
        or _curve_problem(spec)
    )


def why_cancelled(params: Mapping[str, Any]) -> str:
    """What the request says of why it cancels jobs; may be empty. Raises RequestRefused."""
    why = text(params, "why", "")
    if not why.isprintable() or len(why) > MOST_WHY:
        raise RequestRefused(
            f"Why jobs are cancelled is told in one printable line of {MOST_WHY} characters at "
            "most.",
            "usage",
        )
    return why


def cancelled(user: str, owner: str, why: str) -> str:
    """The reason that is kept of a job of ``owner``: whose words ``why`` are stands before them."""
    by = BY_ITS_OWNER if user == owner else f"cancelled by {user}, an operator"
    return f"{by}: {why}" if why else by


def for_trainer(spec: messages.JobSpec, trainer: Trainer | None, usual: str) -> messages.JobSpec:
    """The job with the goal of its trainer, or ``usual`` where there is none, if it says none."""
    if trainer is None:
        return msgspec.structs.replace(spec, goal=spec.goal or usual)
    goal = trainer.goal.value
    if spec.goal not in ("", goal) and spec.mode != "service":
        raise RequestRefused(
            f"The job's goal is '{spec.goal}', and jobs of {spec.owner} are of trainer "
            f"{trainer.name}, which plans for {goal}; leave the goal out."
        )
    return msgspec.structs.replace(spec, goal=goal)


def _size_problem(spec: messages.JobSpec) -> str:
    if (size := len(msgspec.msgpack.encode(spec))) > MOST_SPEC_BYTES:
        return (
            f"The job's description has {size} bytes, more than {MOST_SPEC_BYTES}; put long "
            "lists into a file and name that."
        )
    if not spec.name or not spec.name.isprintable() or len(spec.name) > 200:
        return "A job needs a name of 1 to 200 printable characters."
    if JOB_ID.fullmatch(spec.name):
        return f"The name '{spec.name}' looks like the id of a job; give the job another."
    if not 1 <= spec.min_nodes <= spec.max_nodes:
        return (
            f"The job asks for {spec.min_nodes}:{spec.max_nodes} nodes; give MIN:MAX with 1 "
            "<= MIN <= MAX."
        )
    if not 0 <= spec.largest <= MAX_NODES:
        return f"The job asks for {spec.largest} nodes; {MAX_NODES} is the most."
    if not 0 <= spec.nproc_per_node <= MOST_PROCESSES:
        return (
            f"The job asks for {spec.nproc_per_node} processes a node; give 1 or more, up to "
            f"{MOST_PROCESSES}, or none for one on each GPU."
        )
    if not WEIGHTS[0] <= spec.weight <= WEIGHTS[1]:
        return (
            f"The job's weight is {spec.weight:g}; give a number above 0, from "
            f"{WEIGHTS[0]:g} to {WEIGHTS[1]:g}."
        )
    if not 0 <= spec.time_limit_s <= LONGEST_S:
        return "A time limit is a time above 0, a year at most."
    if len(spec.after) > MOST_AFTER or any(len(name) > MOST_TEXT for name in spec.after):
        return f"A job begins after {MOST_AFTER} others at most."
    if max(len(spec.profile_key), len(spec.key), len(spec.sweep)) > 200:
        return (
            "A profile key, a sweep's name and a submission's own key have 200 characters at most."
        )
    return ""


def _kind_problem(spec: messages.JobSpec) -> str:
    if spec.goal not in {goal.value for goal in Goal}:
        return (
            f"The job's goal is '{spec.goal}'; accepted is "
            f"{' or '.join(goal.value for goal in Goal)}."
        )
    if spec.mode not in ("restart", "live", "service"):
        return f"The mode '{spec.mode}' is not known; accepted is restart, live or service."
    if spec.mode == "service" and (
        spec.curve is None or spec.nproc_per_node != 1 or spec.launcher != "builtin"
    ):
        return (
            "A service runs one process on each node under the builtin launcher and says "
            "what nodes are worth to it: give --value FILE."
        )
    if spec.mode == "live" and spec.launcher != "builtin":
        return (
            "Live mode needs the builtin launcher: torchrun starts its workers anew in every round."
        )
    if spec.on_hang not in ("tell", "restart"):
        return f"What is done at a hang is 'tell' or 'restart', not '{spec.on_hang[:40]}'."
    if spec.launcher not in ("builtin", "torchrun"):
        return f"The launcher '{spec.launcher}' is not known; accepted is builtin or torchrun."
    return ""


def _software_problem(spec: messages.JobSpec) -> str:
    software = spec.software
    if software is None:
        return ""
    named = (*software.modules, software.conda, software.venv, software.container or "")
    texts = (*named, software.conda_exe, *software.binds, *software.options)
    if any(not text.isprintable() for text in texts) or "" in software.modules:
        return "A name in the job's software environment is empty, or has a character that is none."
    if any(name.startswith("-") for name in named):
        return "A module, an environment or an image of the job begins with '-', as options do."
    if software.conda and (software.venv or software.container):
        return "A conda environment goes neither with a virtual one nor with a container."
    if any(not os.path.isabs(path) for path in (software.venv, *software.binds) if path):
        return "The paths of the job's virtual environment and of its binds must be absolute."
    return ""


def _file_problem(spec: messages.JobSpec, files: bool) -> str:
    words = (
        spec.script,
        spec.workdir,
        spec.python,
        *spec.args,
        *spec.env,
        *spec.env.values(),
        spec.setup or "",
    )
    if any("\0" in word for word in words):
        return (
            "A path, an argument or a variable of the job contains a NUL character, which no "
            "process can be given."
        )
    if any(not name or "=" in name for name in spec.env):
        return "A variable of the job's environment has no name, or one with '=' in it."
    if not os.path.isabs(spec.script) or (files and not os.path.isfile(spec.script)):
        return (
            f"The daemon's host sees no file {spec.script}; put the script on a file system "
            "that the nodes share."
        )
    if files and not os.path.isdir(spec.workdir):
        return (
            f"The daemon's host sees no directory {spec.workdir}; name a working directory "
            "that the nodes share."
        )
    return ""


def _curve_problem(spec: messages.JobSpec) -> str:
    if spec.curve is not None:
        if too_long := next((k for k in spec.curve if len(k) > 10), None):
            return f"The scaling curve names '{too_long[:40]}' nodes; {MAX_NODES} is the most."
        try:
            curve = ScalingCurve.of((int(k), v) for k, v in spec.curve.items())
        except (CurveError, ValueError) as e:
            return str(e)
        if curve.largest > MAX_NODES:
            return f"The scaling curve names {curve.largest} nodes; {MAX_NODES} is the most."
        highest = max(rate for _, rate in curve.points)
        if highest * max(1.0, spec.weight) > MOST_RATE:
            return (
                f"The scaling curve goes up to {highest:g} samples/s at a weight of "
                f"{spec.weight:g}; {MOST_RATE:g} is the most."
            )
    if spec.profile_sizes is not None:
        if len(spec.profile_sizes) > MOST_SIZES:
            return (
                f"The job names {len(spec.profile_sizes)} sizes to profile at; {MOST_SIZES} "
                "is the most."
            )
        if outside := [k for k in spec.profile_sizes if not spec.min_nodes <= k <= spec.max_nodes]:
            return (
                f"{outside[0]} is not a size to profile at: the job asks for "
                f"{spec.min_nodes}:{spec.max_nodes} nodes."
            )
        try:
            new_plan(
                spec.min_nodes, spec.max_nodes, MeasuredCurve(), requested_sizes=spec.profile_sizes
            )
        except ValueError as e:
            return str(e)
    return ""
