"""Validates requests of clients: their parameters, and the specification of a submitted job. Pure.

Clients are not trusted: any program can send a request. This module changes nothing; it refuses
with a sentence. It decides also whether a job uses the site's image, and how images are run. The
result is stored in the job, so that a change of the configuration does not affect it.

The links of a job are pages of its own, such as a TensorBoard, that its owner names. Browsers of
other users show them, so only addresses of web pages are valid, without a password.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from allocator import Goal, ScalingCurve
from allocator.curves import CurveError
from jpa import new_plan
from jpa.curve import MeasuredCurve
from malletrain.config.nodes import ContainersSection
from malletrain.core.events import BY_ITS_OWNER
from malletrain.core.pools import Trainer
from malletrain.daemon.jobs.user_files import is_file, is_folder
from malletrain.protocol import messages
from malletrain.protocol.bounds import JOB_ID, MAX_NODES, MAX_PROCESSES
from malletrain.protocol.farm import MAX_COLUMNS, MAX_TASKS, OUTPUT, expand, template_problems
from malletrain.protocol.messages import FarmSpec, JobSpec, SoftwareEnvironment
from malletrain.protocol.payloads import SIZE_NOUNS, TUNABLE


def with_site_software(spec: JobSpec, site: ContainersSection) -> JobSpec:
    """Return the job with the site's image, unless it names an environment. If it has an image, the
    site's binds and options of the runtime are added.
    """
    software = spec.software or SoftwareEnvironment()
    image = software.container
    if image is None:
        image = "" if software.conda or software.venv else site.image
    if not image:
        return spec
    runtime = software.runtime
    if runtime == "auto":
        runtime = site.runtime
    software = msgspec.structs.replace(
        software,
        container=image,
        runtime=runtime,
        binds=(*software.binds, *site.binds),
        options=tuple(site.options) if runtime == site.runtime else (),
    )
    python = spec.python if software.venv else "python"
    return msgspec.structs.replace(spec, software=software, python=python)


"""Maximum number of processes of one job on one node."""
MAX_PROFILE_SIZES = 100
"""Maximum number of sizes to profile at. A profile visits far fewer."""
WEIGHT_RANGE = (1e-6, 1e6)
"""Minimum and maximum weight of a job."""
MAX_RATE = 1e15
"""Maximum throughput, samples/s, and its weighted value. Larger values exceed the precision of the
planner.
"""
MAX_TIME_LIMIT_S = 366 * 86400.0
"""Maximum time limit of a job, seconds."""
MAX_START_COST_S = 86400.0
"""Maximum start cost of a service, seconds."""
MAX_RETRIES = 1000
"""Maximum number of tries of a task after its first."""
MAX_AFTER = 1000
"""Maximum number of jobs that one job waits for."""
MAX_SPEC_BYTES = 256 * 1024
"""Maximum size of an encoded job specification."""
MAX_TEXT_LENGTH = 300
"""Maximum length of a text parameter, such as the name of a job or log, in characters."""
MAX_REASON_LENGTH = 100
"""Maximum length of the reason for which jobs are cancelled, in characters."""


class RequestRefused(Exception):
    """A request is invalid or not permitted. ``code`` is ``usage``, ``refused`` or, for a job that
    its owner may submit when another one has ended, ``quota``.
    """

    def __init__(self, sentence: str, code: str = "refused") -> None:
        super().__init__(sentence)
        self.code = code


def text(params: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return the text parameter ``name``.

    Args:
        params: parameters of the request.
        name: name of the parameter.
        default: value of a missing parameter; None if the parameter is required.

    Raises:
        RequestRefused: it is missing, too long or not text.
    """
    value = params.get(name, default)
    if not isinstance(value, str) or len(value) > MAX_TEXT_LENGTH:
        raise RequestRefused(
            f"The request's '{name}' is {_shown(value)}; it is a text of {MAX_TEXT_LENGTH} "
            "characters at most.",
            "usage",
        )
    return value


def whole(params: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """Like :func:`number`, but the value is truncated to an integer."""
    return int(number(params, name, default, low, high))


def number(params: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Return the numeric parameter ``name``, clamped to [low, high].

    Args:
        params: parameters of the request.
        name: name of the parameter.
        default: value of a missing parameter.
        low: minimum value that is returned.
        high: maximum value that is returned.

    Raises:
        RequestRefused: it is not a finite number.
    """
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
    """Return the job with another weight. Raises RequestRefused if the weight is invalid."""
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise RequestRefused(
            f"The request's 'weight' is {_shown(weight)}; it is a number.", "usage"
        )
    spec = msgspec.structs.replace(spec, weight=float(weight))
    if problem := _size_problem(spec) or _curve_problem(spec):
        raise RequestRefused(problem, "usage")
    return spec


def valued(spec: messages.JobSpec, nodes: Mapping[int, float]) -> messages.JobSpec:
    """Return the service with another value for each number of nodes. Raises RequestRefused if a
    value is invalid.
    """
    curve = {str(size): value for size, value in sorted(nodes.items())}
    spec = msgspec.structs.replace(spec, curve=curve)
    if problem := _size_problem(spec) or _curve_problem(spec):
        raise RequestRefused(problem, "usage")
    return spec


def problem_of(spec: messages.JobSpec, files: bool = True) -> str:
    """Return what is wrong with a submitted job, as a sentence; empty if it is valid. ``files``:
    whether to check that its files exist.
    """
    return (
        _size_problem(spec)
        or _kind_problem(spec)
        or _software_problem(spec)
        or _file_problem(spec, files)
        or _curve_problem(spec)
        or links_problem(spec.links)
    )


def linked(spec: messages.JobSpec, name: str, url: str) -> messages.JobSpec:
    """Return the job with a link. Raises RequestRefused if it is invalid.

    Args:
        spec: specification of the job.
        name: of the link; one of this name is replaced.
        url: address; empty: the job has no link of this name.
    """
    links = {each: address for each, address in spec.links.items() if each != name}
    if url:
        links[name] = url
    if problem := links_problem(links):
        raise RequestRefused(problem, "usage")
    return msgspec.structs.replace(spec, links=links)


def why_cancelled(params: Mapping[str, Any]) -> str:
    """Return the reason that the request gives for cancelling jobs; may be empty. Raises
    RequestRefused if it is too long or not printable.
    """
    why = text(params, "why", "")
    if not why.isprintable() or len(why) > MAX_REASON_LENGTH:
        raise RequestRefused(
            f"The reason for cancelling jobs is one printable line of {MAX_REASON_LENGTH} "
            "characters at most.",
            "usage",
        )
    return why


def cancelled(user: str, owner: str, why: str) -> str:
    """Return the reason to store for a cancelled job of ``owner``: ``why``, preceded by who
    cancelled it.

    Args:
        user: user who cancels.
        owner: owner of the job.
        why: reason given by the user; may be empty.
    """
    by = BY_ITS_OWNER if user == owner else f"cancelled by {user}, an operator"
    return f"{by}: {why}" if why else by


def for_trainer(spec: messages.JobSpec, trainer: Trainer | None, usual: str) -> messages.JobSpec:
    """Fill in the goal of a job that has none.

    Args:
        spec: specification of the job.
        trainer: trainer of the job's owner; None if there is none.
        usual: goal for jobs without a trainer.

    Returns:
        The specification with the goal of the trainer, or with ``usual``.

    Raises:
        RequestRefused: the job's goal differs from the trainer's.
    """
    if trainer is None:
        return msgspec.structs.replace(spec, goal=spec.goal or usual)
    goal = trainer.goal.value
    if spec.goal not in ("", goal) and spec.trains:
        raise RequestRefused(
            f"The job's goal is '{spec.goal}', and jobs of {spec.owner} are of trainer "
            f"{trainer.name}, which plans for {goal}; leave the goal out."
        )
    return msgspec.structs.replace(spec, goal=goal)


def class_problem(node_class: str, site_classes: Sequence[str]) -> str:
    """Return why no job can ask for this kind of nodes; empty if it can.

    Args:
        node_class: class of nodes, or kind of slots, that a job asks for; empty: any.
        site_classes: classes that the configuration names.
    """
    if node_class in ("", "default", *site_classes):
        return ""
    if not site_classes:
        return (
            f"The job asks for kind '{node_class[:40]}', and this site distinguishes no kinds of "
            "nodes; leave --kind out."
        )
    return f"There is no kind '{node_class[:40]}' here; the site has {', '.join(site_classes)}."


def _size_problem(spec: messages.JobSpec) -> str:
    if (size := len(msgspec.msgpack.encode(spec))) > MAX_SPEC_BYTES:
        return (
            f"The job's description has {size} bytes, more than {MAX_SPEC_BYTES}; put long "
            "lists into a file and name that."
        )
    if not spec.name or not spec.name.isprintable() or len(spec.name) > 200:
        return "A job needs a name of 1 to 200 printable characters."
    if JOB_ID.fullmatch(spec.name):
        return f"The name '{spec.name}' looks like the id of a job; give the job another."
    if spec.counts not in SIZE_NOUNS:
        return (
            f"The sizes of a job count slots or gpus, or nodes if nothing is said, and not "
            f"'{spec.counts[:40]}'."
        )
    if not 1 <= spec.min_nodes <= spec.max_nodes:
        return (
            f"The job asks for {spec.min_nodes}:{spec.max_nodes} nodes; give MIN:MAX with 1 "
            "<= MIN <= MAX."
        )
    if not 0 <= spec.largest <= MAX_NODES:
        return f"The job asks for {spec.largest} nodes; {MAX_NODES} is the most."
    if not 0 <= spec.nproc_per_node <= MAX_PROCESSES:
        return (
            f"The job asks for {spec.nproc_per_node} processes a node; give 1 or more, up to "
            f"{MAX_PROCESSES}, or none for one on each GPU."
        )
    if not WEIGHT_RANGE[0] <= spec.weight <= WEIGHT_RANGE[1]:
        return (
            f"The job's weight is {spec.weight:g}; give a number above 0, from "
            f"{WEIGHT_RANGE[0]:g} to {WEIGHT_RANGE[1]:g}."
        )
    if not 0 <= spec.time_limit_s <= MAX_TIME_LIMIT_S:
        return "A time limit is a time above 0, a year at most."
    if len(spec.after) > MAX_AFTER or any(len(name) > MAX_TEXT_LENGTH for name in spec.after):
        return f"A job can wait for {MAX_AFTER} others at most."
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
    if spec.mode not in ("restart", "live", "service", "farm"):
        return f"The mode '{spec.mode}' is not known; accepted is restart, live, service or farm."
    if (spec.mode == "farm") != (spec.farm is not None):
        return "A farm, and no other job, says what its tasks run."
    if spec.farm is not None and (problem := farm_problem(spec, spec.farm)):
        return problem
    if spec.mode == "service" and (
        spec.curve is None or spec.nproc_per_node != 1 or spec.launcher != "builtin"
    ):
        return (
            "A service runs one process on each node under the builtin launcher and says "
            "what nodes are worth to it: give --value FILE."
        )
    if spec.mode == "live" and spec.launcher != "builtin":
        return "Live mode needs the builtin launcher: torchrun restarts its workers in every round."
    if problem := _layout_problem(spec) or _start_cost_problem(spec):
        return problem
    if spec.on_hang not in ("tell", "restart"):
        return f"The action at a hang is 'tell' or 'restart', not '{spec.on_hang[:40]}'."
    if spec.launcher not in ("builtin", "torchrun"):
        return f"The launcher '{spec.launcher}' is not known; accepted is builtin or torchrun."
    return ""


def _start_cost_problem(spec: messages.JobSpec) -> str:
    """Return what is wrong with the start cost, as a sentence; empty if nothing is."""
    has_start_cost = spec.start_cost_s is not None or spec.start_cost_measured
    if has_start_cost and spec.mode != "service":
        return "A start cost is for services; that of a training is measured while it runs."
    if spec.start_cost_s is not None and not 0 <= spec.start_cost_s <= MAX_START_COST_S:
        return f"The start cost is {spec.start_cost_s:g} s; it is a time of a day at most."
    return ""


def _layout_problem(spec: messages.JobSpec) -> str:
    """Return what is wrong with the layout of a node, as a sentence; empty if nothing is."""
    for number, what in ((spec.threads, "threads"), (spec.loader_workers, "loader workers")):
        if not 0 <= number <= MAX_PROCESSES:
            return f"A process has 0 to {MAX_PROCESSES} {what}, not {number}; 0 for the default."
    unknown = sorted(set(spec.tuned) - set(TUNABLE))
    if unknown or len(set(spec.tuned)) < len(spec.tuned):
        return f"What is found by measuring is some of {', '.join(TUNABLE)}, each once."
    if spec.tuned and (not spec.trains or spec.launcher != "builtin"):
        return (
            "The layout of a node is found by measuring only for trainings under the builtin "
            "launcher; give numbers instead of auto."
        )
    if spec.tuned and spec.curve is not None:
        return "A given curve holds for one layout of the nodes; give numbers instead of auto."
    return ""


def farm_problem(spec: JobSpec, farm: FarmSpec) -> str:
    """Return what is wrong with the tasks of a farm, as a sentence; empty if nothing is."""
    if spec.launcher != "builtin" or spec.nproc_per_node != 1:
        return "A farm has the builtin launcher, and runs tasks instead of processes of a job."
    if not farm.command or not spec.script:
        return "A farm runs a command for each task; give one."
    if not 1 <= farm.total <= MAX_TASKS:
        return f"A farm has 1 to {MAX_TASKS:,} tasks, not {farm.total:,}; split it."
    columns = farm.columns
    if not 1 <= len(columns) <= MAX_COLUMNS or len(set(columns)) < len(columns):
        return f"The tasks of a farm have 1 to {MAX_COLUMNS} columns, each of another name."
    if OUTPUT in columns and farm.output:
        return f"A column is called {OUTPUT}, which is the name of the result file; rename it."
    if farm.cpus < 0 or farm.gpus < 0 or farm.memory_bytes < 0:
        return "The cores, GPUs and memory of a task are 0 or more."
    if not 0 <= farm.retries <= MAX_RETRIES:
        return f"A task is tried again 0 to {MAX_RETRIES} times, not {farm.retries}."
    if not 0 <= farm.time_s <= MAX_TIME_LIMIT_S:
        return "The time limit of a task is a time above 0, a year at most; 0 for none."
    if not 0 <= farm.drain_s <= MAX_TIME_LIMIT_S:
        return "The drain time of tasks is a time above 0, a year at most; 0 for none."
    patterns = (farm.log, farm.output, farm.checkpoint)
    if any("\0" in word for word in (*farm.command, *patterns)):
        return "The command or a path of the tasks contains a NUL character."
    if not farm.log:
        return "The log of the tasks has no name; give a pattern such as logs/{index}.log."
    more = (OUTPUT,) if farm.output else ()
    problem = template_problems(farm.command, columns, more) or template_problems(patterns, columns)
    if problem or farm.total == 1:
        return problem
    for name, pattern in (("log", farm.log), ("result file", farm.output)):
        one, other = (
            expand([pattern], columns, [text] * len(columns), k) for k, text in ((0, "a"), (1, "b"))
        )
        if pattern and one == other:
            return f"All tasks have the same {name}, {pattern}; add {{index}} to its name."
    return ""


def _software_problem(spec: messages.JobSpec) -> str:
    software = spec.software
    if software is None:
        return ""
    named = (*software.modules, software.conda, software.venv, software.container or "")
    texts = (*named, software.conda_exe, *software.binds, *software.options)
    if any(not text.isprintable() for text in texts) or "" in software.modules:
        return "A name in the job's software environment is empty, or has an unprintable character."
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
    # The command of a farm is looked for on the nodes.
    seen = os.path.isabs(spec.script) and (not files or is_file(spec.script))
    if spec.farm is None and not seen:
        return (
            f"The daemon's host sees no file {spec.script}; put the script on a file system "
            "that the nodes share."
        )
    if files and not is_folder(spec.workdir):
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
        if highest * max(1.0, spec.weight) > MAX_RATE:
            return (
                f"The scaling curve goes up to {highest:g} samples/s at a weight of "
                f"{spec.weight:g}; {MAX_RATE:g} is the most."
            )
    if spec.profile_sizes is not None:
        if len(spec.profile_sizes) > MAX_PROFILE_SIZES:
            return (
                f"The job names {len(spec.profile_sizes)} sizes to profile at; {MAX_PROFILE_SIZES} "
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


MAX_LINKS = 8
"""Maximum number of links of a job."""
MAX_LINK_NAME_LENGTH = 40
"""Maximum number of characters of a link's name."""
MAX_LINK_URL_LENGTH = 300
"""Maximum number of characters of a link's address."""
_URL = re.compile(r"[!-~]+")


def links_problem(links: Mapping[str, str]) -> str:
    """Return what is wrong with the links of a job, as a sentence; empty if they are valid.

    Args:
        links: name → address.
    """
    if len(links) > MAX_LINKS:
        return f"A job has {MAX_LINKS} links at most, not {len(links)}; remove one."
    for name, url in links.items():
        if not (
            0 < len(name) <= MAX_LINK_NAME_LENGTH and name.isprintable() and name.strip() == name
        ):
            return (
                f"The name of a link is 1 to {MAX_LINK_NAME_LENGTH} printable characters, without "
                "spaces at its ends."
            )
        if len(url) > MAX_LINK_URL_LENGTH:
            return f"The address of a link has {MAX_LINK_URL_LENGTH} characters at most."
        if problem := _url_problem(url):
            return f"The address of the link {name!r} {problem}."
    return ""


def _url_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not _URL.fullmatch(url) or not has_host or parts.scheme not in ("http", "https"):
        return "is not one of a web page, such as https://host.example.org:6006/"
    if parts.username is not None:
        return "contains a user name; every user sees the links of a job, so leave it out"
    return ""
