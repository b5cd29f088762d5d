"""A connection to one daemon with a method for each operation. Synchronous: one :class:`Connection`
serves one thread.

:class:`Channel` is its socket: it connects, sends requests and waits for a limited time.
:mod:`malletrain.client.operations` defines the operations.

:func:`upload` adds the tasks of a farm, in groups. A request whose answer is lost, or for which the
daemon has too many requests, is repeated: the daemon adds each task once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.utils.monitor

from malletrain.client import exchange, operations
from malletrain.client.errors import RETRIED, UNAUTHENTICATED, ClientError
from malletrain.client.exchange import BROKEN, TIMEOUT_S, Address, find
from malletrain.client.operations import Operation
from malletrain.protocol import messages
from malletrain.protocol.open_sockets import OpenSockets
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


class Channel:
    """The socket of one client, for one thread. Every call raises ClientError if the daemon refuses
    the request, and Unreachable if no daemon answers.

    Args:
        address: the daemon, and this client's keys.
        timeout_s: maximum time for an answer, seconds.
    """

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._context = zmq.Context()
        self._open = OpenSockets(self, self._context)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_up = False

    def call(self, op: str, params: Mapping[str, Any], wait_s: float, changes_state: bool) -> Any:
        """Return the data of the daemon's answer to one request.

        If the daemon does not know this client and accepts MUNGE, logs in first.

        Args:
            op: the operation.
            params: the parameters of the operation.
            wait_s: time for which ``params`` lets the daemon hold the request before it answers,
                seconds. Added to the timeout.
            changes_state: whether the request changes state at the daemon. If so and the answer is
                lost, the error says that the outcome is unknown.
        """
        try:
            return self._request(op, params, wait_s, changes_state)
        except ClientError as error:
            if error.code != UNAUTHENTICATED:
                raise
            data = error.data if isinstance(error.data, dict) else {}
            self._log_in(data.get("munge") is True, data.get("ignored_line") is True)
        return self._request(op, params, wait_s, changes_state)

    def _log_in(self, munge: bool, ignored_line: bool) -> None:
        """Log in with a MUNGE credential.

        Args:
            munge: whether the daemon accepts MUNGE credentials.
            ignored_line: whether its list of users has this client's key in an ignored line.
        """
        credential, why = self.address.credential(munge)
        if credential:
            try:
                self._request("login", {"credential": credential}, 0.0, False)
                return
            except ClientError as error:
                why = str(error)
        raise self.address.unknown_key(why, ignored_line)

    def _request(
        self, op: str, params: Mapping[str, Any], wait_s: float, changes_state: bool
    ) -> Any:
        request_id, frames = exchange.request(op, params)
        socket = self._connect()
        socket.send_multipart(frames)
        timeout_s = self.timeout_s + wait_s
        deadline = time.monotonic() + timeout_s
        while True:
            self._wait(socket, deadline, timeout_s, changes_state)
            answer = exchange.reply(socket.recv_multipart(), self.address)
            if answer is not None and answer.id == request_id:
                return exchange.data_of(answer)
            # Otherwise it is the answer to a call that was interrupted, for example by Ctrl-C.

    def close(self) -> None:
        """End the connection."""
        self._disconnect()
        self._open.close()

    def _disconnect(self) -> None:
        self._open.disconnect()
        self._socket = self._monitor = None
        self._is_up = False

    def _connect(self) -> zmq.Socket[bytes]:
        """Return the socket after its handshake. A request sent earlier would wait in a queue for
        a daemon that may not exist.
        """
        if self._socket is not None and self._is_up and not self._is_broken():
            return self._socket
        self._disconnect()
        self._socket = socket = self._context.socket(zmq.DEALER)
        self._open.add(socket)
        handshake = exchange.Handshake(self.address)
        try:
            self._monitor = exchange.set_up(socket, self.address)
            self._open.add(self._monitor)
            started = time.monotonic()
            while not handshake.is_hopeless(time.monotonic() - started):
                if self._monitor.poll(100) and handshake.advance(_event(self._monitor)):
                    self._is_up = True
                    return socket
        finally:
            if not self._is_up:
                self._disconnect()
        raise exchange.not_running(self.address)

    def _is_broken(self) -> bool:
        """Return whether the connection broke since the last call, such as at a restart of the
        daemon.
        """
        while self._monitor is not None and self._monitor.poll(0):
            if _event(self._monitor) in BROKEN:
                return True
        return False

    def _wait(
        self, socket: zmq.Socket[bytes], deadline: float, timeout_s: float, changes_state: bool
    ) -> None:
        """Wait until there is a message to receive. Raises Unreachable if the connection breaks or
        the time is up: ``deadline`` on the monotonic clock, ``timeout_s`` seconds after the
        request.
        """
        assert self._monitor is not None
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(remaining_s * 1000))))
            if socket in ready:
                return
            if self._monitor in ready and _event(self._monitor) in BROKEN:
                self._disconnect()
                raise exchange.went_away(self.address, changes_state)
        self._disconnect()
        raise exchange.no_answer(self.address, timeout_s, changes_state)


def _event(monitor: zmq.Socket[bytes]) -> int:
    return zmq.utils.monitor.recv_monitor_message(monitor)["event"]


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
        """Return the client of the daemon that runs in ``state_dir``; if None, of this user's own
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
        """Return the data of the daemon's answer to one request, not converted."""
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
        """Return one job by id or name (the newest of several with the same name)."""
        return self.do(operations.job(job))

    def metrics(
        self, job: str, *, names: Sequence[str] = (), since: float = 0.0, most: int = 0
    ) -> list[SeriesView]:
        """Return the metrics of a job over time. See :func:`operations.metrics`."""
        return self.do(operations.metrics(job, names=names, since=since, most=most))

    def members(self, job: str, *, since: str = "", wait_s: float = 0.0) -> MembersView:
        """Return the members of a service. See :func:`operations.members`."""
        return self.do(operations.members(job, since=since, wait_s=wait_s))

    def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """Return idle and leased nodes; with ``explain`` all nodes with the rules they passed or
        failed.
        """
        return self.do(operations.nodes(explain=explain))

    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """Return events with ``seq > since``, oldest first; if there are none, waits up to
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
        """Return a piece of a log from ``cursor`` on; if there is none, waits up to ``wait_s`` for
        one.
        """
        return self.do(
            operations.logs(job, stream=stream, cursor=cursor, limit=limit, wait_s=wait_s)
        )

    def status(self) -> StatusView:
        """Return a summary of the daemon and the machine."""
        return self.do(operations.status())

    def usage(self, **between: float) -> list[UsageView]:
        """Return the usage of leased nodes; ``since`` and ``until`` in seconds since the epoch."""
        return self.do(operations.usage(**between))

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


UPLOAD_RETRY_S = 2.0
"""Time between two attempts at a daemon that is gone or busy, seconds."""
UPLOAD_PATIENCE_S = 300.0
"""Time for which a daemon that is gone or busy is waited for, seconds: half of that after which it
cancels a farm whose tasks do not come."""


def upload(
    do: Callable[[Operation[int]], int],
    job: str,
    groups: Iterable[tuple[int, Sequence[Sequence[str]]]],
    progress: Callable[[int], None],
) -> None:
    """Add all tasks to a farm.

    Args:
        do: carries out an operation. After Unreachable, its next call looks for the daemon again.
        job: id of the farm.
        groups: number of the first task, and the values of each, in order.
        progress: called with the number of tasks that have been added.

    Raises:
        ClientError: the daemon refuses, or is gone or busy for longer than UPLOAD_PATIENCE_S.
    """
    for first, rows in groups:
        deadline = time.monotonic() + UPLOAD_PATIENCE_S
        while True:
            try:
                do(operations.add_tasks(job, first, rows))
                break
            except ClientError as error:
                if error.code not in RETRIED or time.monotonic() > deadline:
                    raise
                time.sleep(UPLOAD_RETRY_S)
        progress(first + len(rows))
