"""``Client.map``: calls a function for each item of a list, as tasks of a farm, and iterates over
the results.

Decides how items are grouped into tasks, and when a result is there. It is there when its file is:
the node renames it when the process has ended with exit code 0.
:func:`malletrain.training.functions.call_for_each` runs on the nodes.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from malletrain.api.following import AGAIN_S, ENDED
from malletrain.api.function_job import MAX_VISIBILITY_DELAY_S, name_of, new_folder
from malletrain.api.functions import JobSubmitter
from malletrain.api.job import Job
from malletrain.api.options import farm_of, size_limits
from malletrain.client import ClientError, Unreachable, operations
from malletrain.client.connection import upload
from malletrain.protocol.farm import MAX_ROWS, MAX_TASKS, escaped
from malletrain.protocol.views import TasksView, TaskView
from malletrain.submission.error import SpecError
from malletrain.training.functions import (
    EACH_SCRIPT,
    FunctionLost,
    FunctionOutcome,
    outcomes,
    pack,
)

R = TypeVar("R")

TASKS_PER_NODE = 64
"""Number of tasks for each node into which items are grouped by default."""
POLL_S = 0.5
"""Time between two looks for results, seconds."""
MAX_OUTAGE_S = 300.0
"""Time after the end of a farm for which results that cannot be read are waited for, seconds: as
long as a file server needs to restart. The results are there, and the farm need not run again.
"""
COLUMN = "items"
"""Name of the only column: the file with the items of a task."""
LAST_WORDS = 1000
"""Characters of the end of a failed task's output in an error message."""


class MapResults(Iterator[R], Generic[R]):
    """Results of a function for each item. As a context manager, it cancels the farm when the block
    ends before all results have arrived.

    ``next()`` raises what the function raised for an item, with the traceback on the node as the
    cause, and :class:`malletrain.training.functions.FunctionLost` if its process died. The results
    of the other items remain available.

    Args:
        client: the client that submitted the farm.
        job: the farm; None if there are no items.
        folder: its folder.
        sizes: number of items of each task.
        ordered: whether results are in the order of the items; if not, in the order of arrival.
        progress: called with the numbers of finished and of all items.
    """

    def __init__(
        self,
        client: JobSubmitter,
        job: Job | None,
        folder: Path,
        sizes: list[int],
        ordered: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.job = job
        """The farm: its state, and ``cancel()``. None: there are no items."""
        self.total = sum(sizes)
        """Number of items."""
        self.done = 0
        """Number of items whose outcome is known."""
        self._client = client
        self._folder = folder
        self._sizes = sizes
        self._ordered = ordered
        self._progress = progress
        self._pending = dict.fromkeys(range(len(sizes)))
        """Tasks whose results have not been taken, in order."""
        self._outcomes: dict[int, list[FunctionOutcome]] = {}
        """Task → outcomes of its items."""
        self._ready: deque[FunctionOutcome] = deque()
        self._unreadable_since: float | None = None
        """Time since which results cannot be read; None if they can."""
        self._has_warned = False
        """The user was told that they cannot be read."""
        self._ended_at = math.inf
        """Time at which the farm was known to have ended."""

    def __next__(self) -> R:
        while not self._ready:
            if not self._pending:
                raise StopIteration
            while (number := self._available()) is None:
                self._look()
            del self._pending[number]
            self._ready.extend(self._outcomes.pop(number))
        result: R = self._ready.popleft().result()
        return result

    def cancel(self) -> None:
        """Cancel the farm if it has not ended."""
        if self.job is not None:
            self.job.cancel()

    def __enter__(self) -> MapResults[R]:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pending:
            self.cancel()

    def _available(self) -> int | None:
        """Return the task whose outcomes come next; None if they are not known yet."""
        if not self._ordered:
            return next(iter(self._outcomes), None)
        first = next(iter(self._pending))
        return first if first in self._outcomes else None

    def _look(self) -> None:
        """Read the results that are there. If the next is not, ask the daemon for tasks without
        results, and wait.
        """
        assert self.job is not None
        if self._read_files() and self._available() is not None:
            return
        try:
            state = self.job.refresh().state  # first: an ended job's counts are final
            view = self._client.do(operations.tasks(self.job.id, limit=0))
            if view.counts["failed"]:
                self._set_failed(self.job)
        except Unreachable:  # such as during a restart of the daemon
            time.sleep(AGAIN_S)
            return
        if state in ENDED:
            self._set_missing(self.job, view, state)
        elif self._available() is None:
            time.sleep(POLL_S)

    def _read_files(self) -> int:
        """Read new results. Return the number of tasks whose results are new."""
        count, trouble = 0, None
        try:
            for number in _numbers_in(self._folder / "results"):
                if number in self._pending and number not in self._outcomes:
                    try:
                        items = outcomes(self._folder / "results" / f"{number}.pkl")
                    except OSError as error:
                        trouble = error
                    else:
                        self._set(number, items)
                        count += 1
        except OSError as error:
            trouble = error
        if trouble is None:
            self._unreadable_since, self._has_warned = None, False
        else:
            self._note_unreadable(trouble)
        return count

    def _note_unreadable(self, error: OSError) -> None:
        """Tell the user once that results cannot be read for long. Raise ``error`` if they have
        been waited for long enough: an error that passes, such as of a file server that restarts,
        must not end a program whose farm is still running.
        """
        now = time.monotonic()
        if self._unreadable_since is None:
            self._unreadable_since = now
        is_gone = isinstance(error, FileNotFoundError)
        limit_s = MAX_VISIBILITY_DELAY_S if is_gone else MAX_OUTAGE_S
        if isinstance(error, PermissionError) or now >= self._ended_at + limit_s:
            raise error
        if not self._has_warned and now >= self._unreadable_since + MAX_VISIBILITY_DELAY_S:
            self._has_warned = True
            warnings.warn(
                f"The results of job {self.job.id if self.job else ''} in {self._folder} cannot be "
                f"read ({error.strerror or error}). The job goes on, and they are read as soon as "
                "that is possible.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _set(self, number: int, items: list[FunctionOutcome]) -> None:
        self._outcomes[number] = items
        self.done += len(items)
        if self._progress is not None:
            self._progress(self.done, self.total)

    def _set_failed(self, job: Job) -> None:
        """Set the outcome of tasks that failed for good."""
        after = -1
        while True:
            view = self._client.do(operations.tasks(job.id, state="failed", after=after))
            if not view.tasks:
                return
            for task in view.tasks:
                if task.number in self._pending and task.number not in self._outcomes:
                    lost = FunctionLost(_why(job, task))
                    self._set(task.number, [FunctionOutcome(error=lost)] * self._sizes[task.number])
            after = view.tasks[-1].number

    def _set_missing(self, job: Job, view: TasksView, state: str) -> None:
        """Set the outcome of tasks without results of a farm that has ended, after the time that a
        shared file system may need to show them.
        """
        self._ended_at = min(self._ended_at, time.monotonic())
        is_awaited = view.counts["done"] and state != "cancelled"
        until = time.monotonic() + (MAX_VISIBILITY_DELAY_S if is_awaited else 0.0)
        while self._missing():
            if self._read_files():
                continue
            if self._unreadable_since is None and time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        reason = job.view.reason or "nothing more is known"
        for number in self._missing():
            lost = FunctionLost(
                f"Job {job.id} ({job.name}) was {state} without a result of task {number}: {reason}"
            )
            self._set(number, [FunctionOutcome(error=lost)] * self._sizes[number])

    def _missing(self) -> list[int]:
        return [number for number in self._pending if number not in self._outcomes]


def _numbers_in(folder: Path) -> list[int]:
    """Return the tasks whose results are in ``folder``, in order. Raises OSError."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    return sorted(int(name.removesuffix(".pkl")) for name in names if name.endswith(".pkl"))


def start_map(
    client: JobSubmitter,
    function: Callable[..., R],
    items: Iterable[Any],
    ordered: bool,
    chunk: int,
    progress: Callable[[int, int], None] | None,
    options: Mapping[str, Any],
) -> MapResults[R]:
    """Submit a farm that calls a function for each item.

    Args:
        client: submits the farm.
        function, items, ordered, chunk, progress: see :meth:`malletrain.Client.map`.
        options: options of the farm.
    """
    values = list(items)
    if not values:
        return MapResults(client, None, Path(), [], ordered, progress)
    if chunk < 0:
        raise SpecError(f"chunk is {chunk}; accepted is 1 or more, or 0 for a choice.", "chunk")
    _, most = size_limits(options, ("nodes", "slots"))
    size = chunk or max(1, math.ceil(len(values) / (most * TASKS_PER_NODE)))
    groups = [values[first : first + size] for first in range(0, len(values), size)]
    if len(groups) > MAX_TASKS:
        raise SpecError(
            f"{len(groups):,} tasks are more than {MAX_TASKS:,}; give a larger chunk.", "chunk"
        )
    name = name_of(function, options.get("name"))
    workdir = Path(os.path.abspath(os.path.expanduser(options.get("workdir", "."))))
    folder = new_folder(workdir, name)
    script = pack(folder, "each", function, (), {}, text=EACH_SCRIPT)
    (folder / "results").mkdir()
    _write_items(folder, groups)
    own_python = not any(options.get(key) for key in ("venv", "conda", "container"))
    python = sys.executable if own_python else "python"
    place = escaped(str(folder))
    command = [escaped(python), escaped(str(script))]
    spec = farm_of(
        [*command, f"{place}/items/{{{COLUMN}}}", "{output}"],
        (COLUMN,),
        len(groups),
        f"{place}/results/{{index}}.pkl",
        f"{place}/logs/{{index}}.log",
        {**options, "name": name},
    )
    job = client.submit_spec(spec)
    rows = [(f"{number}.pkl",) for number in range(len(groups))]
    try:
        upload(
            client.do,
            job.id,
            ((k, rows[k : k + MAX_ROWS]) for k in range(0, len(rows), MAX_ROWS)),
            lambda count: None,
        )
    except (ClientError, KeyboardInterrupt):
        job.cancel()
        raise
    return MapResults(client, job, folder, [len(group) for group in groups], ordered, progress)


def _write_items(folder: Path, groups: list[list[Any]]) -> None:
    """Write the items of each task. Raises TypeError if one cannot be pickled."""
    import cloudpickle

    (folder / "items").mkdir()
    for number, group in enumerate(groups):
        try:
            data = cloudpickle.dumps(group)
        except Exception as error:
            raise TypeError(f"An item cannot be sent to another process: {error}.") from error
        (folder / "items" / f"{number}.pkl").write_bytes(data)


def _why(job: Job, task: TaskView) -> str:
    """Return why a task has no result."""
    code = task.exit_code or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    tail = f"\n{task.tail[-LAST_WORDS:]}" if task.tail else ""
    return f"The process of task {task.number} of job {job.id} {how}.{tail}"
