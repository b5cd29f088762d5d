"""Converts options of ``malletrain submit`` to a checked job: sizes, scaling curve, environment,
time limit, notifications, script.

All checks that are possible on the submitting machine are made here, before the daemon is asked;
the daemon checks the job again. Raises :class:`malletrain.submission.error.SpecError` with a
sentence that says what is accepted.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from malletrain.config.units import UnitError, parse_duration
from malletrain.identity.keys import user_name
from malletrain.protocol import env
from malletrain.protocol.bounds import JOB_ID, MAX_NODES
from malletrain.protocol.messages import JobSpec, Notification, SoftwareEnvironment
from malletrain.protocol.payloads import SIZE_NOUNS
from malletrain.protocol.sizes import share_or_size
from malletrain.submission.curve_file import (
    AUTO,
    NOTHING,
    VALUE_HELP,
    read_curve,
    read_value,
    span,
)
from malletrain.submission.error import SpecError, about
from malletrain.submission.goals import parse_budget, parse_deadline, parse_work
from malletrain.submission.options import JobOptions, ScriptOptions, layout_choice
from malletrain.submission.script import module_of, script_of
from malletrain.submission.software import software_of

NOTIFY_EVENTS = ("start", "end", "failure", "at-risk")
NOTIFY_HELP = (
    "a mail address, an address such as https://example.org/hook, or command:CMD, with "
    "start,end,failure,at-risk or some of these and = before it"
)
MAX_TIME_LIMIT_S = 366 * 86400.0
_MAIL = re.compile(r"[A-Za-z0-9._%+'-]+@[A-Za-z0-9.-]+")
_EVENT = f"(?:{'|'.join(NOTIFY_EVENTS)})"
_ON = re.compile(rf"({_EVENT}(?:,{_EVENT})*)=(.*)", re.DOTALL)


def time_limit_of(text: str | None) -> float:
    """Return the seconds of ``--time-limit``; 0 if there is no limit.

    Raises:
        SpecError: the text is not a valid duration.
    """
    if text is None:
        return 0.0
    try:
        seconds = parse_duration(text)
    except UnitError as error:
        raise SpecError(f"--time-limit: {error}") from None
    if not 0 < seconds <= MAX_TIME_LIMIT_S:
        raise SpecError('--time-limit is a time above 0, a year at most, such as "90 min".')
    return seconds


def notification(text: str) -> Notification:
    """Return the notification of one ``--notify``.

    Raises:
        SpecError: the text names neither an address nor a command.
    """
    match = _ON.fullmatch(text)
    on, to = (tuple(match[1].split(",")), match[2]) if match else (NOTIFY_EVENTS, text)
    if to.startswith("command:") and to.removeprefix("command:").strip():
        return Notification(to.removeprefix("command:").strip(), "command", on)
    if re.fullmatch(r"https?://[!-~]+", to):
        return Notification(to, "webhook", on)
    if _MAIL.fullmatch(to):
        return Notification(to, "mail", on)
    raise SpecError(f'--notify: "{text}" is no receiver; accepted is {NOTIFY_HELP}.')


MAX_START_COST_S = 86400.0


def start_cost_of(text: str | None, *, service: bool) -> tuple[float | None, bool]:
    """Return the seconds of ``--start-cost``, None if they are not known, and whether they hold
    only until they are measured: ``180s``, ``auto``, ``auto:180s``.

    Raises:
        SpecError: the job is no service, or the text is not a valid duration.
    """
    if text is None:
        return None, False
    if not service:
        raise SpecError(
            "--start-cost is for services; that of a training is measured while it runs."
        )
    first, colon, rest = text.partition(":")
    measured = first == AUTO
    if measured and not colon:
        return None, True
    try:
        seconds = parse_duration(rest if measured else text)
    except UnitError as error:
        raise SpecError(
            f"--start-cost: {error} Or auto, to have it measured, or auto:180s, with a first guess."
        ) from None
    if seconds > MAX_START_COST_S:
        raise SpecError('--start-cost is a time of a day at most, such as "180 s", or auto.')
    return seconds, measured


NO_OPTIONS = ScriptOptions()
NODES_HELP = "N or MIN:MAX with 1 <= MIN <= MAX, such as 4 or 1:16"
SIZES_HELP = "numbers of nodes with commas between them, such as 8,4,2,1"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_nodes(text: str, noun: str = "nodes") -> tuple[int, int]:
    """Return (min, max) of ``--nodes``: ``"4"`` is (4, 4), ``"1:16"`` is (1, 16). ``noun``: what
    is counted.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*:\s*([0-9]{1,9}))?\s*", text)
    if match is None:
        raise SpecError(f'"{text}" is not a number of {noun}; accepted is {NODES_HELP}.')
    low = int(match[1])
    high = int(match[2]) if match[2] is not None else low
    if low < 1:
        raise SpecError(
            f'"{text}" asks for 0 {noun} at least, but a job needs 1; accepted is {NODES_HELP}.'
        )
    if high < low:
        raise SpecError(f'"{text}" has a maximum below its minimum; accepted is {NODES_HELP}.')
    if high > MAX_NODES:
        raise SpecError(f'"{text}" is more than {MAX_NODES:,} {noun}; accepted is {NODES_HELP}.')
    return low, high


def parse_sizes(text: str, low: int, high: int) -> tuple[int, ...]:
    """Return the sizes of ``--profile-sizes``, such as ``"8,4,2,1"`` in any order, largest first.
    Each must be within the limits of ``--nodes``."""
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*(,\s*[0-9]{1,9}\s*)*", text):
        raise SpecError(f'"{text}" is not a list of sizes; accepted is {SIZES_HELP}.')
    sizes = {int(part) for part in text.split(",")}
    if outside := sorted(k for k in sizes if not low <= k <= high):
        raise SpecError(
            f"{outside[0]} is not a size to profile at: the job asks for {low}:{high} nodes."
        )
    return tuple(sorted(sizes, reverse=True))


def parse_env(pairs: Iterable[str]) -> dict[str, str]:
    """Return the environment of all ``--env K=V`` options. ``K`` alone takes its current value."""
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not VARIABLE.fullmatch(name):
            raise SpecError(
                f'"{pair}" is not an environment variable; accepted is NAME=VALUE, or NAME to '
                "pass on its present value."
            )
        if not equals:
            if name not in os.environ:
                raise SpecError(
                    f"{name} is not set here, so it cannot be passed on; give a value: --env "
                    f"{name}=VALUE."
                )
            value = os.environ[name]
        if "\0" in value:
            raise SpecError(
                f"The value of {name} contains a NUL character, which no environment can hold."
            )
        variables[name] = value
    return variables


def _service_value(options: ScriptOptions) -> dict[str, float] | None:
    """Return the value of nodes to a service; None for other jobs, empty for ``auto``."""
    o = options
    if not o.service:
        if o.value is not None:
            raise SpecError(
                "--value is for services; give --service too, or --curve for a training job."
            )
        return None
    if o.value is None:
        raise SpecError(
            f"A service says what nodes are worth to it: --value FILE; accepted is {VALUE_HELP}."
        )
    one_process = o.nproc_per_node in (None, 1, "1")
    if o.live or o.launcher != "builtin" or o.curve is not None or not one_process:
        raise SpecError("A service runs one process on each node and is valued by --value; "
                        "leave --live, --launcher, --curve and "
                        "--nproc-per-node out.")  # fmt: skip
    if str(o.value) == NOTHING:
        return {"1": 0.0}
    return {} if str(o.value) == AUTO else read_value(o.value)


def default_name(path: Path) -> str:
    """Return the default name of a job: its script's name, without the suffix unless that would
    look like a job id.
    """
    stem = path.name if JOB_ID.fullmatch(path.stem) else path.stem
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", stem).strip("-._+")[:64]
    return "job" if not name or JOB_ID.fullmatch(name) else name


def checked_name(name: str, stem: str = "run") -> str:
    """Return the name of ``--name``. Raises SpecError if a job cannot have it.

    Args:
        name: the name.
        stem: end of the name that is proposed instead of one that looks like an id.
    """
    if JOB_ID.fullmatch(name):
        raise SpecError(
            f'"{name}" looks like the id of a job, so every command would take it for that job; '
            f"choose another name, such as {name}-{stem}.",
            "name",
        )
    if not NAME.fullmatch(name):
        raise SpecError(
            f'"{name}" is no name of a job; accepted are 1 to 64 letters, digits and the '
            "characters . _ + -, a letter or digit first.",
            "name",
        )
    return name


def checked_weight(weight: float) -> float:
    """Return the weight of ``--weight``. Raises SpecError if it is not above 0."""
    if not (math.isfinite(weight) and weight > 0):
        raise SpecError(
            f"A weight of {weight:g} is not possible; accepted is a number above 0 (1 is that "
            "of every job by default).",
            "weight",
        )
    return weight


def working_directory(text: str | None) -> Path:
    """Return the absolute path of ``--workdir``; None: the current directory. Raises SpecError if
    it does not exist.
    """
    directory = Path(os.path.abspath(os.path.expanduser(text or os.getcwd())))
    if not directory.is_dir():
        raise SpecError(
            f"The working directory {directory} does not exist; create it or give another with "
            "--workdir.",
            "workdir",
        )
    return directory


def _python_of(environment: SoftwareEnvironment | None) -> str:
    """Return the Python that runs the script: the environment's if there is one, else that of this
    process.
    """
    if environment is None or not (environment.venv or environment.conda or environment.container):
        return sys.executable
    return os.path.join(environment.venv, "bin", "python") if environment.venv else "python"


def parse_model_size(text: str) -> tuple[float, float | None]:
    """Return the number of parameters, and the FLOPs per sample if given, of ``--model-size``."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < x < math.inf for x in numbers):
        raise SpecError(
            f'"{text}" is no size of a model; accepted are its parameters, and after a comma its '
            "FLOPs per sample (forward and backward), such as 25.6e6 or 25.6e6,1.2e10.",
            "model_size",
        )
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def build(script: str, args: Sequence[str], options: ScriptOptions = NO_OPTIONS) -> JobSpec:
    """Return the checked job. By default it has the script's name without suffix, the current
    directory and the site's objective.

    A service has one process on each node. Its ``value`` file states the value of nodes, and by
    default the service requests the sizes of that file. With ``auto`` or ``0`` in place of a file,
    ``nodes`` says the sizes.

    Args:
        script: the script's file, or the name of a module.
        args: its arguments.
        options: the options of ``malletrain submit``.

    Raises:
        SpecError: the script or an option is invalid.
    """
    o = options
    with about("value", "service", "live", "launcher", "curve", "nproc_per_node"):
        worth = _service_value(o)
    with about("start_cost", "service"):
        start_cost_s, start_cost_measured = start_cost_of(o.start_cost, service=o.service)
    low, high, counts = _limits(o, worth)
    with about("conda", "venv", "container", "no_container", "container_bind", "module"):
        environment = software_of(o.software)
    python = _python_of(environment)
    own_python = python == sys.executable
    with about("as_module", "workdir"):
        file = str(module_of(script, o.workdir, own_python)) if o.as_module else script
    path = script_of(file, own_python=own_python)
    if o.name is None:
        name = default_name(Path(script.rpartition(".")[2] + ".py") if o.as_module else path)
    else:
        name = checked_name(o.name, path.stem)
    weight = checked_weight(o.weight)
    if o.live and o.launcher != "builtin":
        raise SpecError(
            "--live needs the builtin launcher: torchrun starts its workers anew in every round.",
            "live",
            "launcher",
        )
    directory = working_directory(o.workdir)
    with about("env"):
        variables = with_umask(parse_env(o.env))
    variables = with_data_memory(variables, o.data_memory)
    mode = "service" if o.service else "live" if o.live else "restart"
    layout = layout_choice(
        *(o.nproc_per_node, o.threads, o.loader_workers),
        mode=mode,
        launcher=o.launcher,
        has_curve=o.curve is not None,
        variables=variables,
    )
    with about("time_limit"):
        limit_s = time_limit_of(o.time_limit)
    with about("notify"):
        notifications = tuple(notification(text) for text in o.notify)
    with about("profile_sizes"):
        sizes = None if o.profile_sizes is None else parse_sizes(o.profile_sizes, low, high)
    with about("deadline"):
        due = None if o.deadline is None else parse_deadline(o.deadline)
    with about("budget"):
        hours = None if o.budget is None else parse_budget(o.budget)[0]
    with about("work"):
        samples = None if o.work is None else parse_work(o.work)
    if o.service and (due is not None or samples is not None):
        raise SpecError(
            "A service has no end, so that it can have a --budget but no --deadline and no --work.",
            "deadline",
            "work",
        )
    with about("model_size"):
        model = (None, None) if o.model_size is None else parse_model_size(o.model_size)
    if o.on_hang not in ("tell", "restart"):
        raise SpecError(
            f'What is done at a hang is "tell" or "restart", not "{o.on_hang}".', "on_hang"
        )
    with about("curve"):
        rates = worth or (read_curve(o.curve) if o.curve else None)
    if worth == {}:  # until its process reports a value
        rates = {str(low): 1.0}
    return JobSpec(
        name=name,
        owner=user_name(),
        script=str(path),
        workdir=str(directory),
        python=python,
        args=tuple(args),
        env=variables,
        setup=o.setup or None,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=1 if o.service else layout.processes,
        weight=weight,
        goal="throughput" if o.service else o.goal or "",
        curve=rates,
        launcher=o.launcher,
        mode=mode,
        profile=o.profile and not o.service,
        profile_sizes=sizes,
        profile_key=o.profile_key or "",
        software=environment,
        after=tuple(o.after),
        time_limit_s=limit_s,
        notify=notifications,
        deadline=due,
        budget_nh=hours,
        work=samples,
        on_hang=o.on_hang,
        parameters=model[0],
        flops=model[1],
        module=script if o.as_module else "",
        node_class=o.kind or "",
        threads=layout.threads,
        loader_workers=layout.loader_workers,
        tuned=layout.tuned,
        start_cost_s=start_cost_s,
        start_cost_measured=start_cost_measured,
        counts=counts,
    )


def sizes_of(options: JobOptions, usual: str = "1") -> tuple[int, int, str]:
    """Return the smallest and largest size of a job, and what they count: empty for nodes, or a
    key of :data:`malletrain.protocol.payloads.SIZE_NOUNS`.

    Args:
        options: the options of the job.
        usual: sizes of a job whose options say none.

    Raises:
        SpecError: several options say sizes, or one is not valid.
    """
    by_unit = {"": options.nodes, "slots": options.slots}
    if isinstance(options, ScriptOptions):
        by_unit["gpus"] = options.gpus
    sizes = {counts: text for counts, text in by_unit.items() if text is not None}
    if len(sizes) > 1:
        names = tuple(counts or "nodes" for counts in sizes)
        raise SpecError(
            f"{' and '.join(f'--{name}' for name in names)} each give the size of the job; give "
            "one of them: --nodes counts nodes or slots of any one kind, --slots slots of --kind, "
            "--gpus slots of one GPU.",
            *names,
        )
    counts, text = next(iter(sizes.items()), ("", usual))
    with about(counts or "nodes"):
        return *parse_nodes(text, SIZE_NOUNS[counts]), counts


def _limits(o: ScriptOptions, worth: Mapping[str, float] | None) -> tuple[int, int, str]:
    """Return the smallest and largest size, and what they count.

    Args:
        o: the options.
        worth: the value of nodes to a service, if a file has it.

    Raises:
        SpecError: the sizes are invalid, or a service without a file does not have them.
    """
    unsaid = o.nodes is None and o.slots is None and o.gpus is None
    if unsaid and str(o.value) in (AUTO, NOTHING):
        raise SpecError(
            f"--value {o.value} says nothing of how many nodes the service is to have; give "
            "--nodes MIN:MAX too.",
            "nodes",
            "value",
        )
    return sizes_of(o, span(worth) if worth else "1")


def with_data_memory(variables: Mapping[str, str], memory: str | None) -> dict[str, str]:
    """Return the environment variables of a job, with the memory for its data cache
    (``--data-memory``).

    Args:
        variables: its own variables.
        memory: a part of a node's memory, such as ``25%``, or a size, such as ``8G``; None for the
            script's own.

    Raises:
        SpecError: it is neither.
    """
    if memory is None:
        return dict(variables)
    try:
        share_or_size(memory, 1 << 40)
    except ValueError as error:
        raise SpecError(f"--data-memory: {error}", "data_memory") from None
    return {**variables, env.DATA_MEMORY: memory}


def with_umask(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a job, with the file mode creation mask of this process.
    As with sbatch, the files that a job creates have the modes that they would have if it ran where
    it was submitted. Where a process cannot read its mask, the job has that of its lease.

    Args:
        variables: its own variables.
    """
    try:
        status = Path("/proc/self/status").read_text()  # os.umask() would change it for all threads
    except OSError:  # not Linux
        status = ""
    match = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)  # since Linux 4.7
    return {env.UMASK: match[1], **variables} if match else dict(variables)
