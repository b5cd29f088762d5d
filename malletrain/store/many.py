"""Rows of many jobs, read at once: a daemon that starts wants them of every unfinished job, and a
query of its own for each costs many times what the rows do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from sqlalchemy import Column, Select, bindparam, select

from malletrain.store import schema
from malletrain.store.records import CurveRow, GoalRow, JobRow, ProfileRow
from malletrain.store.rows import Row
from malletrain.store.session import Session

AT_ONCE = 500
"""Rows of one query: SQLite and PostgreSQL take thousands of parameters, and not any number."""


class ManyRows:
    """Reads rows by their keys; of keys without a row there is nothing in the answers."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def jobs(self, ids: Iterable[str]) -> dict[str, JobRow]:
        """The jobs with these ids, by id."""
        return {row.id: row for row in self._of(schema.jobs.c.id, JobRow, ids)}

    def profiles(self, jobs: Iterable[str]) -> dict[str, ProfileRow]:
        """What is known of the scaling of these jobs, by job."""
        return {row.job: row for row in self._of(schema.profiles.c.job, ProfileRow, jobs)}

    def goals(self, jobs: Iterable[str]) -> dict[str, GoalRow]:
        """The goals of these jobs, by job."""
        return {row.job: row for row in self._of(schema.goals.c.job, GoalRow, jobs)}

    def curves(self, keys: Iterable[str]) -> dict[str, CurveRow]:
        """The curves of these kinds of jobs, by key."""
        return {row.key: row for row in self._of(schema.curves.c.key, CurveRow, keys)}

    def _of(self, column: Column[Any], kind: type[Row], values: Iterable[str]) -> Iterator[Row]:
        keys = sorted(set(values))
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            yield from self._db.all(_reading(column), kind, {"some": some})


@cache
def _reading(column: Column[Any]) -> Select[Any]:
    """The rows in which this column has one of the values that are given as ``some``."""
    return select(column.table).where(column.in_(bindparam("some", expanding=True)))
