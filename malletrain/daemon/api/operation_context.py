"""What operations of clients have in common: the job that a client names, and transactions.

Decides which job a name means, and that the owner of a job and operators may manage it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from malletrain.daemon.engine.state import SiteState
from malletrain.daemon.engine.transactions import Transactions
from malletrain.daemon.jobs.admission import RequestRefused, text
from malletrain.store.records import JobRow

Operation = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""(user, parameters of the request) → the data of the answer."""


class TransactionFailed(Exception):
    """A transaction failed; see the cause."""


class OperationContext:
    """What the operations of one daemon use.

    Args:
        state: the daemon's state.
        transactions: saves changes.
    """

    def __init__(self, state: SiteState, transactions: Transactions) -> None:
        self.state = state
        self._transactions = transactions

    @contextmanager
    def transaction(self) -> Iterator[float]:
        """Open a transaction, and yield its time. Raises TransactionFailed."""
        try:
            with self._transactions.begin() as now:
                yield now
        except Exception as error:
            raise TransactionFailed(str(error)) from error

    def find(self, name: str, user: str) -> JobRow:
        """Return the job with this name or id. Jobs of ``user`` come before those of others. Raises
        RequestRefused.
        """
        all_rows = self.state.store.find_jobs(name)
        rows = [row for row in all_rows if row.owner == user] or all_rows
        if not rows:
            raise RequestRefused(f"There is no job '{name}'; `malletrain status` lists all jobs.")
        if len({row.name for row in rows}) > 1:
            raise RequestRefused(
                f"'{name}' may mean {', '.join(f'{row.id} ({row.name})' for row in rows[:5])}; "
                "name one of them."
            )
        return rows[-1]

    def requested(self, user: str, params: Mapping[str, Any]) -> JobRow:
        """Return the job that a request names as ``job``. Raises RequestRefused."""
        return self.find(text(params, "job"), user)

    def managed(self, user: str, params: Mapping[str, Any], operation: str) -> JobRow:
        """Return the job that a request names as ``job``.

        Args:
            user: user of the client.
            params: parameters of the request.
            operation: what the user wants to do, such as "read its logs".

        Raises:
            RequestRefused: there is no such job, or the user may not manage it.
        """
        row = self.requested(user, params)
        if problem := self.unmanageable(user, row, operation):
            raise RequestRefused(problem)
        return row

    def unmanageable(self, user: str, row: JobRow, operation: str) -> str:
        """Return why ``user`` may not manage the job, as a sentence; empty if the user may."""
        if self.state.accounts.may_manage(user, row.owner):
            return ""
        return (
            f"Job {row.id} belongs to {row.owner}; only its owner or an operator can {operation}."
        )
