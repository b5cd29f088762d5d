"""Reads rows of many jobs together. A starting daemon needs the rows of all unfinished jobs, and
one query per job would take many times as long.
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
"""Number of rows per query. SQLite and PostgreSQL limit the number of parameters to some
thousands.
"""


class ManyRows:
    """Reads rows by their keys. Keys without a row are missing in the results."""

    def __init__(self, session: Session) -> None:
        self._db = session

    def jobs(self, ids: Iterable[str]) -> dict[str, JobRow]:
        """Return id → job."""
        return {row.id: row for row in self._of(schema.jobs.c.id, JobRow, ids)}

    def profiles(self, jobs: Iterable[str]) -> dict[str, ProfileRow]:
        """Return job → its profile."""
        return {row.job: row for row in self._of(schema.profiles.c.job, ProfileRow, jobs)}

    def goals(self, jobs: Iterable[str]) -> dict[str, GoalRow]:
        """Return job → its goals."""
        return {row.job: row for row in self._of(schema.goals.c.job, GoalRow, jobs)}

    def curves(self, keys: Iterable[str]) -> dict[str, CurveRow]:
        """Return profile key → its curve."""
        return {row.key: row for row in self._of(schema.curves.c.key, CurveRow, keys)}

    def _of(self, column: Column[Any], kind: type[Row], values: Iterable[str]) -> Iterator[Row]:
        keys = sorted(set(values))
        for first in range(0, len(keys), AT_ONCE):
            some = keys[first : first + AT_ONCE]
            yield from self._db.all(_query(column), kind, {"some": some})


@cache
def _query(column: Column[Any]) -> Select[Any]:
    """Return the query for the rows in which this column has one of the values of the parameter
    ``some``.
    """
    return select(column.table).where(column.in_(bindparam("some", expanding=True)))
