"""Stores the tasks of farms. :mod:`malletrain.core.task_queue` decides their states.

A farm may have a million tasks, so rows are written in bulk, and only the requested ones are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from malletrain.store import schema
from malletrain.store.records import TaskRow, decode, stored_text
from malletrain.store.session import Session

WAITING, RUNNING = "waiting", "running"
NUMBERS_AT_ONCE = 500
"""Number of tasks in one query by number."""
TASKS_AT_ONCE = 50_000
"""Maximum number of tasks that one call deletes. The daemon is blocked meanwhile."""
_ROWS_AT_ONCE = 10_000

table = schema.tasks
_PROGRESS = (table.c.number, table.c.state, table.c.tries, table.c.attempt, table.c.node)
_OF_TASK = (table.c.job == bindparam("of_job"), table.c.number == bindparam("of_number"))


class TaskProgress(NamedTuple):
    """The part of a task's row that a queue is restored from."""

    number: int
    state: str
    tries: int
    attempt: int
    node: str
    started: float | None
    ended: float | None


class TaskChange(NamedTuple):
    """The result of an attempt."""

    number: int
    state: str
    tries: int
    node: str
    exit_code: int
    started: float
    ended: float
    tail: str


class TaskTable:
    """Reads and writes tasks. A task is a job and a number."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def add(self, job: str, first: int, rows: Sequence[Sequence[str]]) -> None:
        """Add waiting tasks.

        Args:
            job: id of the job.
            first: number of the first one.
            rows: the values of each.
        """
        values = [
            {
                "job": job,
                "number": number,
                "arguments": json.dumps([stored_text(each) for each in row]),
                "state": WAITING,
                "tries": 0,
                "attempt": 0,
                "node": "",
                "tail": "",
            }
            for number, row in enumerate(rows, first)
        ]
        if values:
            with self._db.transaction() as connection:
                connection.execute(insert(table), values)

    def hand_out(self, job: str, node: str, attempts: Iterable[tuple[int, int]]) -> None:
        """Store that tasks were handed out. ``attempts``: (number, attempt) of each."""
        self._update(
            job,
            [
                {"of_number": number, "attempt": attempt, "node": node}
                for number, attempt in attempts
            ],
            state=RUNNING,
            started=None,
            ended=None,
            exit_code=None,
        )

    def finish(self, job: str, changes: Iterable[TaskChange]) -> None:
        """Store the results of attempts."""
        self._update(
            job,
            [
                {
                    "of_number": change.number,
                    **{name: value for name, value in change._asdict().items() if name != "number"},
                    "tail": stored_text(change.tail),
                }
                for change in changes
            ],
        )

    def begin(self, job: str, starts: Iterable[tuple[int, float]]) -> None:
        """Store that nodes have begun tasks. ``starts``: number and time, seconds since the
        epoch.
        """
        self._update(job, [{"of_number": number, "started": at} for number, at in starts])

    def excuse(self, job: str, excused: Iterable[tuple[int, str, int]]) -> None:
        """Store that failures of tasks do not count: number, state and tries of each."""
        rows = [{"of_number": n, "state": state, "tries": tries} for n, state, tries in excused]
        self._update(job, rows)

    def put_back(self, job: str, numbers: Iterable[int]) -> None:
        """Store that tasks wait again because their worker was lost."""
        self._update(job, [{"of_number": number} for number in numbers], state=WAITING)

    def retry(self, job: str, numbers: Iterable[int]) -> None:
        """Store that failed tasks wait again, with all their tries."""
        self._update(job, [{"of_number": number} for number in numbers], state=WAITING, tries=0)

    def adopt(self, job: str, node: str, numbers: Iterable[int]) -> None:
        """Store that a worker that was lost still has tasks."""
        rows = [{"of_number": number, "node": node} for number in numbers]
        self._update(job, rows, state=RUNNING)

    def count(self, job: str) -> int:
        """Return the number of a farm's stored tasks. They are numbered from 0 without gaps."""
        with self._db.transaction() as connection:
            query = select(func.max(table.c.number)).where(table.c.job == job)
            newest = connection.execute(query).scalar()
        return 0 if newest is None else int(newest) + 1

    def longest(self, job: str) -> int:
        """Return the maximum length of a task's values, as they are encoded; 0 without tasks."""
        with self._db.transaction() as connection:
            query = select(func.max(func.length(table.c.arguments))).where(table.c.job == job)
            return int(connection.execute(query).scalar() or 0)

    def counts(self, job: str) -> dict[str, int]:
        """Return state → number of the farm's tasks, without states that no task has."""
        return self._db.counts(table, "state", table.c.job == job)

    def progress(self, job: str) -> Iterator[TaskProgress]:
        """Yield what a queue is restored from, in order of the numbers: the tasks that were handed
        out at least once.
        """
        handed_out = (table.c.job == job, table.c.attempt > 0)
        query = (
            select(*_PROGRESS, table.c.started, table.c.ended)
            .where(*handed_out, table.c.number >= bindparam("first"))
            .order_by(table.c.number)
            .limit(_ROWS_AT_ONCE)
        )
        first = 0
        while True:
            with self._db.transaction() as connection:
                rows = connection.execute(query, {"first": first}).all()
            for number, state, tries, attempt, node, started, ended in rows:
                yield TaskProgress(number, state, tries, attempt, node, started, ended)
            if len(rows) < _ROWS_AT_ONCE:
                return
            first = rows[-1].number + 1

    def arguments(self, job: str, numbers: Collection[int]) -> dict[int, tuple[str, ...]]:
        """Return number → values of tasks."""
        values: dict[int, tuple[str, ...]] = {}
        query = select(table.c.number, table.c.arguments).where(
            table.c.job == job, table.c.number.in_(bindparam("some", expanding=True))
        )
        with self._db.transaction() as connection:
            for some in _parts(numbers):
                for number, text in connection.execute(query, {"some": some}):
                    values[number] = tuple(json.loads(text))
        return values

    def rows(self, job: str, numbers: Collection[int]) -> list[TaskRow]:
        """Return tasks by their numbers, in order."""
        rows: list[TaskRow] = []
        for some in _parts(sorted(numbers)):
            query = select(table).where(table.c.job == job, table.c.number.in_(some))
            rows += self._read(query.order_by(table.c.number))
        return rows

    def listed(self, job: str, states: Collection[str], after: int, limit: int) -> list[TaskRow]:
        """Return tasks in order.

        Args:
            job: id of the job.
            states: their states; empty for any. A task that its node has not begun waits.
            after: number before the first one.
            limit: maximum number of tasks.
        """
        query = select(table).where(table.c.job == job, table.c.number > after)
        if states:
            query = query.where(or_(*(_in_state(state) for state in states)))
        return self._read(query.order_by(table.c.number).limit(limit))

    def _read(self, query: Select[Any]) -> list[TaskRow]:
        with self._db.transaction() as connection:
            result = connection.execute(query)
            return decode(TaskRow, list(result.keys()), result.all())

    def _update(self, job: str, rows: list[dict[str, Any]], **values: Any) -> None:
        """Change tasks: the columns of ``values`` equally, those of ``rows`` each."""
        if not rows:
            return
        columns: dict[str, Any] = {name: bindparam(name) for name in rows[0] if name != "of_number"}
        statement = update(table).where(*_OF_TASK).values({**columns, **values})
        with self._db.transaction() as connection:
            connection.execute(statement, [{**row, "of_job": job} for row in rows])


def _in_state(state: str) -> ColumnElement[bool]:
    """Return the condition for a task to be shown in a state."""
    in_state, begun = table.c.state == state, table.c.started.is_not(None)
    if state == RUNNING:
        return and_(in_state, begun)
    if state == WAITING:
        return or_(in_state, and_(table.c.state == RUNNING, ~begun))
    return in_state


def _parts(numbers: Iterable[int]) -> Iterator[list[int]]:
    every = list(numbers)
    for first in range(0, len(every), NUMBERS_AT_ONCE):
        yield every[first : first + NUMBERS_AT_ONCE]


def forget_tasks(db: Session, jobs: Sequence[str]) -> int:
    """Delete tasks of these jobs, :data:`TASKS_AT_ONCE` at most. Return how many numbers were
    deleted at most; 0 if none is left.
    """
    deleted = 0
    first_row = select(table.c.job, table.c.number).where(table.c.job.in_(jobs))
    with db.transaction() as connection:
        while deleted < TASKS_AT_ONCE:
            row = connection.execute(
                first_row.order_by(table.c.job, table.c.number).limit(1)
            ).first()
            if row is None:
                break
            end = row.number + TASKS_AT_ONCE - deleted
            query = delete(table).where(table.c.job == row.job, table.c.number < end)
            deleted += connection.execute(query).rowcount
    return deleted
