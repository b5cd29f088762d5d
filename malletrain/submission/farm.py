"""Converts the options of ``malletrain map`` to a checked farm.

Decides the default name and log of a farm, and which command the nodes run. All checks that are
possible on the submitting machine are made here. Raises
:class:`malletrain.submission.error.SpecError` with a sentence that says what is accepted.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from malletrain.config.units import UnitError, parse_duration, parse_size
from malletrain.identity.keys import user_name
from malletrain.protocol.farm import (
    INDEX,
    MAX_TASKS,
    OUTPUT,
    FarmSpec,
    escaped,
    expand,
    template_problems,
)
from malletrain.protocol.messages import JobSpec, SoftwareEnvironment
from malletrain.submission.error import SpecError, about
from malletrain.submission.goals import parse_budget, parse_deadline
from malletrain.submission.options import JobOptions
from malletrain.submission.software import software_of
from malletrain.submission.spec import (
    MAX_TIME_LIMIT_S,
    checked_name,
    checked_weight,
    default_name,
    notification,
    parse_env,
    sizes_of,
    time_limit_of,
    with_umask,
    working_directory,
)
from malletrain.submission.task_lists import not_utf8

NO_OPTIONS = JobOptions()
LOGS = "malletrain-logs"
"""Folder of the logs of farms, in the working directory."""
LARGEST_SCRIPT_BYTES = 1024 * 1024
"""Size up to which the head of a script is read."""
MAX_PER_TASK = 1_000_000
"""Maximum number of cores, or GPUs, of a task."""


@dataclass(frozen=True)
class TaskOptions:
    """The options of ``malletrain map`` for its tasks."""

    cpus: int | None = None
    """Processors of a task. None: without ``gpus`` one task a node at a time."""
    gpus: int = 0
    """GPUs of a task."""
    memory: str | int | None = None
    """Memory of a task: a size, or bytes."""
    time: str | float | None = None
    """Time limit of a try: a duration, or seconds."""
    drain: str | float | None = None
    """Time that running tasks have after their node's notice: a duration, or seconds."""
    retries: int = 0
    """Number of failures after which a task is tried again."""
    output: str | None = None
    """Pattern of the result file."""
    log: str | None = None
    """Pattern of the log. ``{name}`` is the farm's name, unless a column has that name."""
    checkpoint: str | None = None
    """Pattern of the directory for a task's checkpoints."""
    array_env: bool = False
    """Whether tasks get the variables of a job array."""
    array_range: tuple[int, int, int] | None = None
    """Smallest and largest index of the array, and its step."""
    duplicate_stragglers: bool = False
    """Whether a late task is run a second time elsewhere."""
    max_running: int = 0
    """Maximum number of tasks that run at a time on all nodes together; 0: no limit."""


def build_farm(
    command: Sequence[str],
    columns: Sequence[str],
    total: int,
    tasks: TaskOptions,
    options: JobOptions = NO_OPTIONS,
) -> tuple[JobSpec, list[str]]:
    """Return the checked farm, and notes for the person who submits it.

    Args:
        command: words of the command, templates.
        columns: names of the values of a task.
        total: number of tasks.
        tasks: what a task needs and writes.
        options: the other options of ``malletrain map``.

    Raises:
        SpecError: an option or the command is invalid.
    """
    o = options
    for word in (*command, tasks.output or "", tasks.log or "", tasks.checkpoint or ""):
        if problem := not_utf8(word):
            raise SpecError(f"A word of the command or of a pattern {problem}.")
    low, high, counts = sizes_of(o)
    environment = software_of(o.software)
    directory = working_directory(o.workdir)
    program, notes = program_of(command[0], environment, bool(o.setup))
    words = (program, *command[1:])
    farm_name = default_name(Path(_named_by(command))) if o.name is None else checked_name(o.name)
    named = {} if "name" in columns else {"name": farm_name}
    [log] = _with_name([tasks.log or _default_log(farm_name)], named)
    patterns = {
        "--log": log,
        "--output": tasks.output or "",
        "--checkpoint": tasks.checkpoint or "",
    }
    more = (OUTPUT,) if tasks.output else ()
    task_names = {*columns, *more, INDEX}
    if problem := template_problems(words, columns, more):
        if not tasks.output and problem.startswith("{output}"):
            problem = "{output} in the command is the result file; give its name with --output."
        raise SpecError(problem)
    for option, pattern in patterns.items():
        if problem := template_problems([pattern], columns):
            raise SpecError(f"{option}: {problem}")
    if OUTPUT in columns and tasks.output:
        raise SpecError(f"A column is called {OUTPUT}, as is the result file; rename it.", "output")
    for option in ("--log", "--output"):
        pattern = patterns[option]
        if pattern and total > 1 and not _changes_with(task_names, pattern, columns):
            raise SpecError(
                f"{option}: all tasks would write to {pattern}; add {{index}} or a column to its "
                "name."
            )
    all_words = "\n".join(words)
    if (
        total > 1
        and not tasks.array_env
        and not _changes_with(task_names, all_words, columns, more)
    ):
        notes.append(
            "Note: the command has no {name} of a column, so all tasks run the same one; "
            "$MALLETRAIN_TASK is the number of the task."
        )
    if tasks.checkpoint and total > 1 and not _changes_with(task_names, tasks.checkpoint, columns):
        notes.append(
            f"Note: all tasks have the same directory for checkpoints, {tasks.checkpoint}; with "
            "{index} in its name each has its own."
        )
    farm = FarmSpec(
        command=words,
        columns=tuple(columns),
        total=total,
        log=log,
        cpus=_count(tasks.cpus or 0, "cpus"),
        gpus=_count(tasks.gpus, "gpus"),
        memory_bytes=_memory(tasks.memory),
        retries=_count(tasks.retries, "retries"),
        time_s=_seconds(tasks.time, "time"),
        drain_s=_seconds(tasks.drain, "drain"),
        output=tasks.output or "",
        checkpoint=tasks.checkpoint or "",
        array_env=tasks.array_env,
        array_range=tasks.array_range,
        duplicate_stragglers=tasks.duplicate_stragglers,
        max_running=min(_count(tasks.max_running, "max_running"), MAX_TASKS),
    )
    with about("env"):
        variables = with_umask(parse_env(o.env))
    spec = JobSpec(
        name=farm_name,
        owner=user_name(),
        script=program if "{" in command[0] else program.replace("{{", "{").replace("}}", "}"),
        workdir=str(directory),
        python="python",
        env=variables,
        setup=o.setup or None,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=1,
        weight=checked_weight(o.weight),
        mode="farm",
        profile=False,
        software=environment,
        after=tuple(o.after),
        time_limit_s=time_limit_of(o.time_limit),
        notify=tuple(notification(text) for text in o.notify),
        deadline=None if o.deadline is None else parse_deadline(o.deadline),
        budget_nh=None if o.budget is None else parse_budget(o.budget)[0],
        node_class=o.kind or "",
        farm=farm,
        counts=counts,
    )
    return spec, notes


def check_files(farm: FarmSpec, groups: Iterable[tuple[int, Sequence[Sequence[str]]]]) -> None:
    """Check that each task has a log and a result file of its own.

    Args:
        farm: the farm.
        groups: the tasks in groups: number of the first one, and the values of each.

    Raises:
        SpecError: two tasks have the same one.
    """
    unique_names = {INDEX} if INDEX not in farm.columns or farm.array_range is not None else set()
    """Names whose values no two tasks have in common."""
    patterns = {
        option: pattern
        for option, pattern in (("--log", farm.log), ("--output", farm.output))
        if pattern
        # A later ".." may remove the number from the path.
        and (f"{os.sep}.." in pattern or not _changes_with(unique_names, pattern, farm.columns))
    }
    if not patterns:
        return
    before: dict[str, set[int]] = {option: set() for option in patterns}
    """Option → hashes of the paths of earlier tasks."""
    for first, rows in groups:
        for number, values in enumerate(rows, first):
            for option, pattern in patterns.items():
                [path] = expand([pattern], farm.columns, values, number)
                key = hash(os.path.normpath(path))
                if key in before[option]:
                    raise SpecError(
                        f"{option}: task {number} (counted from 0) would use {path}, as an earlier "
                        "task does; add {index} or another column to its name."
                    )
                before[option].add(key)


def program_of(
    word: str, environment: SoftwareEnvironment | None, setup: bool
) -> tuple[str, list[str]]:
    """Return the program that the nodes run for the first word of the command, as a template, and
    notes. Without an environment of its own a farm runs the program that this shell would run.

    Raises:
        SpecError: it is a path, and there is no such program.
    """
    if "{" in word or (environment is not None and environment.container):
        return word, []
    text = os.path.expanduser(word)
    in_folder = os.sep not in text and shutil.which(text) is None and os.path.isfile(text)
    if os.sep in text or in_folder:
        path = os.path.abspath(text)
        if os.path.isdir(path):
            raise SpecError(f"{path} is a directory; after -- comes the command of a task.")
        if not os.path.exists(path):
            raise SpecError(f"There is no program {path}; after -- comes the command of a task.")
        if not os.access(path, os.X_OK):
            raise SpecError(
                f"{path} is not executable; make it so with chmod +x, or name the program that "
                f"reads it, such as: -- bash {word}"
            )
        return escaped(path), []
    if environment is not None or setup:
        return word, []
    program = shutil.which(text)
    if program is None:
        return word, [
            f"Warning: {word} is not found on this host. If the nodes do not have it either, all "
            "tasks fail; --module, --conda and --setup make programs known to them."
        ]
    return escaped(os.path.abspath(program)), []


def script_words(command: Sequence[str]) -> tuple[list[str], str]:
    """Return the command with the interpreter of a script that is not executable, and the text of
    the script; the command itself and no text if it is not a script.
    """
    path = os.path.abspath(os.path.expanduser(command[0]))
    if os.sep not in command[0] and shutil.which(command[0]) is not None:
        return list(command), ""
    try:
        with open(path, "rb") as file:
            text = file.read(LARGEST_SCRIPT_BYTES).decode(errors="replace")
    except OSError:
        return list(command), ""
    if not text.startswith("#!"):
        return list(command), ""
    if os.access(path, os.X_OK):
        return [*command], text
    interpreter = shlex.split(text.splitlines()[0][2:])
    return [*interpreter, escaped(path), *command[1:]], text


def command_line(spec: FarmSpec, values: Sequence[str], number: int) -> str:
    """Return the command of one task as a line for a shell."""
    more = {}
    if spec.output:
        [more[OUTPUT]] = expand([spec.output], spec.columns, values, number)
    return shlex.join(expand(spec.command, spec.columns, values, number, more))


def _named_by(command: Sequence[str]) -> str:
    """Return the file from which a farm has its name: the program, or the script that it reads."""
    interpreters = ("python", "bash", "sh", "perl", "Rscript", "julia", "env")
    if not os.path.basename(command[0]).startswith(interpreters):
        return command[0]
    words = (word for word in command[1:] if not word.startswith("-"))
    script = next(words, "")
    return script if os.path.isfile(os.path.expanduser(script)) else command[0]


def new_stamp() -> str:
    """Return the time, for the names of a submission's files, with some digits that distinguish it
    from others in the same second.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _default_log(name: str) -> str:
    return os.path.join(LOGS, f"{name}-{new_stamp()}", "{index}.log")


def _with_name(patterns: list[str], named: dict[str, str]) -> list[str]:
    """Return patterns in which ``{name}`` is replaced by the farm's name."""
    return [text.replace("{name}", named["name"]) if named else text for text in patterns]


def _changes_with(
    names: Collection[str], pattern: str, columns: Sequence[str], more: Sequence[str] = ()
) -> bool:
    """Return whether a template changes when the values of some names change.

    Args:
        names: these names.
        pattern: the template.
        columns: names of the values of a task.
        more: further names that the template may have.
    """

    def expanded(number: int) -> list[str]:
        value_of = {name: str(number) if name in names else "" for name in (*columns, *more)}
        index = number if INDEX in names else 0
        extra = {name: value_of[name] for name in more}
        return expand([pattern], columns, [value_of[name] for name in columns], index, extra)

    return expanded(0) != expanded(1)


def _count(number: int, option: str) -> int:
    if not 0 <= number <= MAX_PER_TASK:
        name = option.replace("_", "-")
        raise SpecError(f"--{name} is {number}; accepted is 0 or more.", option)
    return number


def _memory(value: str | int | None) -> int:
    try:
        return value if isinstance(value, int) else 0 if value is None else parse_size(value)
    except UnitError as error:
        raise SpecError(f"--memory: {error}", "memory") from None


def _seconds(value: str | float | None, option: str) -> float:
    try:
        seconds = parse_duration(value) if isinstance(value, str) else value or 0.0
    except UnitError as error:
        raise SpecError(f"--{option}: {error}", option) from None
    if isinstance(value, str) and not 0 < seconds <= MAX_TIME_LIMIT_S:
        raise SpecError(f"--{option} is a time above 0, a year at most.", option)
    return seconds
