"""A connection to one daemon with a method for each operation. Synchronous: one
:class:`Connection` serves one thread.

The operations are in :mod:`malletrain.client.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from malletrain.client import operations
from malletrain.client.address import Address, find
from malletrain.client.channel import Channel
from malletrain.client.exchange import TIMEOUT_S
from malletrain.client.operations import Operation
from malletrain.protocol import messages
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    MembersView,
    NodeView,
    SeriesView,
    StatusView,
    UsageView,
)

T = TypeVar("T")


class Connection:
    """A connection to one daemon, established at the first call.

    Args:
        endpoint: ZeroMQ address, such as ``tcp://127.0.0.1:4711``.
        server_key: public CURVE key of the daemon (Z85).
        public_key, secret_key: CURVE pair of this client (Z85).
        start_hint: sentence that says how to start the daemon, added when nothing answers.
        timeout_s: how long an answer may take, seconds.

    Usable as a context manager. Every call raises :class:`malletrain.client.ClientError` when the
    daemon refuses and :class:`malletrain.client.Unreachable` when there is none.
    """

    def __init__(
        self,
        endpoint: str,
        server_key: bytes,
        public_key: bytes,
        secret_key: bytes,
        *,
        start_hint: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        hint = f" {start_hint}" if start_hint else ""
        self._channel = Channel(
            Address(endpoint, server_key, public_key, secret_key, hint), timeout_s
        )

    @classmethod
    def of(cls, state_dir: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> Connection:
        """Returns the client of the daemon that runs in ``state_dir``; if None, of this user's own
        daemon, else of the site's. Raises Unreachable if there is no daemon.
        """
        at = find(state_dir)
        return cls(
            at.endpoint,
            at.server_key,
            at.public_key,
            at.secret_key,
            start_hint=at.hint.strip(),
            timeout_s=timeout_s,
        )

    @property
    def endpoint(self) -> str:
        """The daemon's address."""
        return self._channel.address.endpoint

    def do(self, operation: Operation[T]) -> T:
        """Carry out one operation."""
        data = self.call(
            operation.op, operation.params, wait_s=operation.wait_s, changes=operation.changes
        )
        return operation.read(data, self.endpoint)

    def call(
        self,
        op: str,
        params: Mapping[str, Any] | None = None,
        *,
        wait_s: float = 0.0,
        changes: bool = False,
    ) -> Any:
        """Returns the data of the daemon's answer to one request, not converted."""
        return self._channel.call(op, params or {}, wait_s, changes)

    def submit(self, spec: messages.JobSpec) -> JobView:
        """Submit a job."""
        return self.do(operations.submit(spec))

    def cancel(self, jobs: Sequence[str]) -> list[dict[str, Any]]:
        """Cancel jobs by id or name: one ``{"job", "ok", "sentence"}`` for each."""
        return self.do(operations.cancel(jobs))

    def extend(self, job: str, **changes: float | None) -> JobView:
        """See :func:`operations.extend`."""
        return self.do(operations.extend(job, **changes))

    def jobs(self, **which: Any) -> list[JobView]:
        """Unfinished jobs and the newest of the others, the oldest first."""
        return self.do(operations.jobs(**which))

    def job(self, job: str) -> JobDetail:
        """Returns one job by id or name (the newest of several with the same name)."""
        return self.do(operations.job(job))

    def metrics(
        self, job: str, *, names: Sequence[str] = (), since: float = 0.0, most: int = 0
    ) -> list[SeriesView]:
        """Returns the metrics of a job over time. See :func:`operations.metrics`."""
        return self.do(operations.metrics(job, names=names, since=since, most=most))

    def members(self, job: str) -> MembersView:
        """Returns the members of a service."""
        return self.do(operations.members(job))

    def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """Returns idle and leased nodes; with ``explain`` all nodes with the rules they passed or
        failed.
        """
        return self.do(operations.nodes(explain=explain))

    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """Returns events with ``seq > since``, oldest first; if there are none, waits up to
        ``wait_s`` for one.
        """
        return self.do(operations.events(since=since, limit=limit, job=job, wait_s=wait_s))

    def logs(
        self,
        job: str,
        *,
        stream: str = "rank0",
        cursor: str = "",
        limit: int = 65536,
        wait_s: float = 0.0,
    ) -> LogView:
        """Returns a piece of a log from ``cursor`` on; if there is none, waits up to ``wait_s`` for
        one.
        """
        return self.do(
            operations.logs(job, stream=stream, cursor=cursor, limit=limit, wait_s=wait_s)
        )

    def status(self) -> StatusView:
        """Returns a summary of the daemon and the machine."""
        return self.do(operations.status())

    def usage(self, **between: float) -> list[UsageView]:
        """Returns the usage of leased nodes; ``since`` and ``until`` in seconds since the epoch."""
        return self.do(operations.usage(**between))

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
