"""A farm, its tasks, and the messages about them.

A farm is a malleable job whose nodes take tasks from a queue. Decides the shape of what crosses a
socket only: :mod:`malletrain.core.task_queue` decides which node gets which task, and
:mod:`malletrain.launch.farm` runs the tasks of a node.

The messages are level-triggered. A :class:`TaskPull` says what a node can take and what it has; it
may be repeated at any time. :class:`TaskResults` is repeated until a :class:`TaskAck` names its
results. ``(number, attempt)`` is the fence: each time a task is handed out it gets the next attempt
number, and a message about an earlier attempt is not about the current one.

The template of a farm's tasks is words of a command, or a path, in which names in braces stand for
values:

    {name}   the value of the task in that column      {index}   the task's number, from 0
    {}       the only column                           {{  }}    a brace

A column called ``index`` replaces the task's number. A closing brace on its own is a brace. Decides
what a name means and which names are unknown. Values are inserted as they are: no shell reads them,
and braces in a value have no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec

from malletrain.protocol.bounds import Code, Count, EpochSeconds, Id, Message, Sentence

MAX_TASKS = 1_000_000
"""Maximum number of tasks of a farm."""
MAX_COLUMNS = 100
"""Maximum number of values of a task."""
MAX_VALUE_LENGTH = 32 * 1024
"""Maximum length of one value of a task, in characters."""
MAX_ROWS = 10_000
"""Maximum number of tasks that one request adds, and that one answer shows."""
MAX_TASKS_IN_MESSAGE = 250
"""Maximum number of tasks in a message between a node and the daemon."""
MAX_HELD = 20_000
"""Maximum number of tasks that a node has: running, waiting there, and ended but not
acknowledged."""
MAX_TAIL = 4096
"""Maximum length of the end of a failed task's output, in bytes as UTF-8."""

TaskNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TASKS)]
"""Number of a task in its farm, from 0."""
TaskTail = Annotated[str, msgspec.Meta(max_length=MAX_TAIL)]


class FarmSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the tasks of a farm run, and how. The patterns are templates
    (:mod:`malletrain.protocol.farm`). Relative paths start at the job's ``workdir``.
    """

    command: tuple[str, ...]
    """Words of the command, templates. No shell reads them."""
    columns: tuple[str, ...]
    """Names of the values of a task."""
    total: int
    """Number of tasks."""
    log: str
    """Pattern of the file of a task's stdout and stderr, different for each task."""
    cpus: int = 0
    """Cores of a task; 0: one task a node at a time."""
    gpus: int = 0
    """GPUs of a task."""
    memory_bytes: int = 0
    """Memory of a task; 0: not counted."""
    retries: int = 0
    """Number of failures after which a task is tried again. Losing its node is no failure."""
    time_s: float = 0.0
    """Time limit of one try, seconds; 0: none. A task that exceeds it is stopped, and has failed.
    """
    drain_s: float = 0.0
    """Time for which running tasks may go on after their node's notice, before they get SIGTERM,
    seconds; it ends with the time that the node has left. 0: they get it at once."""
    output: str = ""
    """Pattern of the result file. ``{output}`` in the command is a temporary name beside it, which
    is renamed when the task has exited with code 0. Empty: none."""
    checkpoint: str = ""
    """Pattern of a directory that is created and passed to each try of the task. Empty: none."""
    array_env: bool = False
    """Whether tasks get the variables of a Slurm and a PBS job array."""
    array_range: tuple[int, int, int] | None = None
    """Smallest and largest index of that array, and the step between its indices. None: the numbers
    of the tasks."""
    duplicate_stragglers: bool = False
    """Whether a task that is late is also run on a second node; the first result counts."""
    max_running: Annotated[int, msgspec.Meta(ge=0, le=MAX_TASKS)] = 0
    """Maximum number of tasks that run at a time, on all nodes together; 0: no limit."""


class TaskItem(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, array_like=True
):
    """A task for a node."""

    number: TaskNumber
    attempt: Count
    """How often the task has been handed out, with this time."""
    values: tuple[str, ...] = ()


class HeldTask(msgspec.Struct, frozen=True, array_like=True):
    """A task that a node has: running, waiting there, or ended and not acknowledged."""

    number: TaskNumber
    attempt: Count
    running: bool = False
    """Whether its process runs."""
    started: EpochSeconds | None = None
    """When its process was started."""


class TaskResult(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, array_like=True
):
    """The end of one attempt of a task."""

    number: TaskNumber
    attempt: Count
    code: Code
    """Exit code; negative: the number of a signal."""
    started: EpochSeconds
    ended: EpochSeconds
    tail: TaskTail = ""
    """End of the output of a task that failed."""
    sentence: Sentence = ""
    """Why it failed, if that is not its own exit code: it was not found, or exceeded its limit."""
    unstartable: bool = False
    """Whether its command could not be started."""


class TaskPull(Message, frozen=True):
    """A node's state: how many tasks it runs at a time, how many it wants to have in all, and which
    it has. Sent when a launcher starts, after a reconnection, and when a node needs tasks.
    """

    job: Id
    session: Id
    """Identifies the launcher. The tasks of an earlier launcher on this node are gone."""
    slots: Annotated[int, msgspec.Meta(ge=0, le=MAX_HELD)]
    """Number of tasks that run at a time."""
    capacity: Annotated[int, msgspec.Meta(ge=0, le=MAX_HELD)]
    """Number of tasks that it wants to have in all; 0: it leaves the job."""
    tasks: Annotated[tuple[HeldTask, ...], msgspec.Meta(max_length=MAX_HELD)] = ()
    received: Count = 0
    """Serial of the newest TaskItems that it has received; 0: none."""


class TaskResults(Message, frozen=True):
    """Results of a node, and what it wants then. Repeated until they are acknowledged."""

    job: Id
    session: Id
    """As in TaskPull."""
    results: Annotated[tuple[TaskResult, ...], msgspec.Meta(max_length=MAX_TASKS_IN_MESSAGE)]
    capacity: Annotated[int, msgspec.Meta(ge=0, le=MAX_HELD)]
    """As in TaskPull."""
    received: Count = 0
    """As in TaskPull."""


class TaskItems(Message, frozen=True):
    """Tasks for a node. The next message to this node follows when the node has reported this
    ``serial``; until then the same one is repeated. A node ignores a serial that it has received.
    """

    job: Id
    serial: int
    items: tuple[TaskItem, ...]


class TaskAck(Message, frozen=True):
    """The results of these attempts are stored; the node forgets them."""

    job: Id
    attempts: tuple[tuple[int, int], ...]


class TaskStop(Message, frozen=True):
    """Stop these attempts without a result: they are not current any more."""

    job: Id
    attempts: tuple[tuple[int, int], ...]


class TaskQuery(Message, frozen=True):
    """Report what you have, with a TaskPull: messages may have been lost."""

    job: Id


INDEX = "index"
"""Name of the task's number."""
OUTPUT = "output"
"""Name of the temporary result file in the command of a farm that has one."""

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|\{")
_NOTHING: Mapping[str, str] = MappingProxyType({})


def expand(
    words: Sequence[str],
    columns: Sequence[str],
    values: Sequence[str],
    index: int,
    more: Mapping[str, str] = _NOTHING,
) -> list[str]:
    """Return the words with the values of one task.

    Args:
        words: words of the template.
        columns: names of the values.
        values: the task's values, one for each column.
        index: the task's number, from 0.
        more: further names, such as that of the result file, and what they stand for.

    Raises:
        ValueError: the template has an unknown name; :func:`template_problems` says which.
    """
    value_of = {INDEX: str(index), **more, **dict(zip(columns, values, strict=True))}
    if len(columns) == 1:
        value_of.setdefault("", values[0])

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None or match[1] not in value_of:
            raise ValueError(template_problems(words, columns, tuple(more)))
        return value_of[match[1]]

    return [_FIELD.sub(value, word) for word in words]


def template_problems(
    words: Sequence[str], columns: Sequence[str], more: Sequence[str] = ()
) -> str:
    """Return what is wrong with a template, as a sentence; empty if nothing is.

    Args:
        words: words of the template.
        columns: names of the values.
        more: further known names.
    """
    defined = [*dict.fromkeys([*columns, *more, INDEX])]
    names = ", ".join(f"{{{name}}}" for name in defined)
    for word in words:
        for match in _FIELD.finditer(word):
            name = match[1]
            if match[0] in ("{{", "}}") or name in defined or (name == "" and len(columns) == 1):
                continue
            if name is None:
                return (
                    f"'{_short(word)}' has an opening brace without a closing one; write {{{{ for "
                    "a brace."
                )
            if name == "":
                return (
                    f"{{}} in '{_short(word)}' means the only column, and the tasks have "
                    f"{len(columns)}; known are {names}."
                )
            return (
                f"{{{_short(name)}}} in '{_short(word)}' is no column of the tasks; known are "
                f"{names}. Write {{{{ and }}}} for braces."
            )
    return ""


def escaped(text: str) -> str:
    """Return a template that stands for this text as it is."""
    return text.replace("{", "{{").replace("}", "}}")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"
