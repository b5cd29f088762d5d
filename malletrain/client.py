"""The client's side of the daemon's socket: find the daemon, ask, wait a bounded time, and say in a
sentence what went wrong.

Synchronous; for the command line and for scripts. The answers are those of
:mod:`malletrain.protocol.views`; this module decides nothing about jobs. One :class:`Client` serves
one thread.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.utils.monitor

from malletrain.identity.keys import CLIENT, own_key, read_key, user_name
from malletrain.identity.state_directory import (
    INFO,
    SITE_HINT,
    StateDirError,
    announced,
    default_state_dir,
    read_daemon_info,
    start_hint,
)
from malletrain.identity.users import Munge, UsersError, login_payload
from malletrain.protocol import env, messages, wire
from malletrain.protocol.views import (
    EventView,
    JobDetail,
    JobView,
    LogView,
    MembersView,
    NodeView,
    StatusView,
    UsageView,
)

TIMEOUT_S = 10.0
"""How long an answer may take beyond the time the daemon was asked to wait."""
CONNECT_S = 5.0
"""How long the encrypted connection may take to come up."""
ABSENT_S = 1.0
"""How long the address may refuse the connection before the daemon counts as not running."""

STRANGER = "stranger"
"""The code of a daemon's answer to a client whose key it does not know."""

BROKEN = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_RETRIED)
T = TypeVar("T")


class ClientError(RuntimeError):
    """The daemon refused, or could not be asked, as a sentence. ``code``: refused | usage |
    internal | unreachable | stranger.
    """

    def __init__(self, sentence: str, code: str = "refused", data: Any = None) -> None:
        super().__init__(sentence)
        self.code = code
        self.data = data


class Unreachable(ClientError):
    """No daemon answers: it does not run, or not here, or does not know this client's key."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "unreachable")


class Client:
    """A connection to one daemon.

    Args:
        endpoint: ZeroMQ address, such as ``tcp://127.0.0.1:4711``.
        server_key: public CURVE key of the daemon (Z85).
        public_key, secret_key: CURVE pair of this client (Z85).
        start_hint: sentence that says how to start the daemon, added when nothing answers.

    Usable as a context manager. Every call raises :class:`ClientError` when the daemon refuses and
    :class:`Unreachable` when there is none.
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
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._hint = f" {start_hint}" if start_hint else ""
        self._keys = (server_key, public_key, secret_key)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._up = False

    @classmethod
    def of(cls, state_dir: Path | None = None, *, timeout_s: float = TIMEOUT_S) -> Client:
        """The client of the daemon that runs in ``state_dir``; without one of this user's own
        daemon, else of that of the site.

        The connection itself is made at the first call. Raises Unreachable when there is no daemon.
        """
        try:
            site = None if state_dir else announced()
            if site is not None:
                hint = SITE_HINT
                info, pair = read_daemon_info(site, hint, site=True), own_key()
            else:
                hint, directory = start_hint(), state_dir or default_state_dir()
                info, pair = (
                    read_daemon_info(directory / INFO, hint),
                    read_key(directory / "keys" / CLIENT),
                )
        except StateDirError as error:
            raise Unreachable(str(error)) from None
        return cls(
            info.endpoint,
            info.server_key.encode("ascii"),
            pair.public.encode("ascii"),
            pair.secret.encode("ascii"),
            start_hint=hint,
            timeout_s=timeout_s,
        )

    # -- operations

    def submit(self, spec: messages.JobSpec) -> JobView:
        """Submit a job."""
        return self._job_after("submit", {"spec": msgspec.to_builtins(spec)})

    def extend(self, job: str, **changes: float | None) -> JobView:
        """Give a job other goals: ``deadline`` (seconds since the epoch), ``budget_nh`` or
        ``more_nh`` (node-hours), ``work`` (samples); None takes one away.
        """
        return self._job_after("extend", {"job": job, "changes": changes})

    def cancel(self, jobs: Sequence[str]) -> list[dict[str, Any]]:
        """Cancel jobs by id or name: one ``{"job", "ok", "sentence"}`` for each."""
        data = self.call("cancel", {"jobs": list(jobs)}, changes=True)
        return self._read(
            data.get("results") if isinstance(data, dict) else None, list[dict[str, Any]]
        )

    def jobs(self) -> list[JobView]:
        """All jobs, the oldest first."""
        return self._read(self.call("jobs"), list[JobView])

    def job(self, job: str) -> JobDetail:
        """One job by id or name (of several of one name the newest)."""
        return self._read(self.call("job", {"job": job}), JobDetail)

    def members(self, job: str) -> MembersView:
        """Who is in a service."""
        return self._read(self.call("members", {"job": job}), MembersView)

    def nodes(self, *, explain: bool = False) -> list[NodeView]:
        """Idle and leased nodes; with ``explain`` all nodes, rule by rule."""
        return self._read(self.call("nodes", {"explain": explain}), list[NodeView])

    def events(
        self, *, since: int = 0, limit: int = 500, job: str | None = None, wait_s: float = 0.0
    ) -> list[EventView]:
        """Events with ``seq > since``, oldest first; when there are none, waits up to ``wait_s``
        for one.
        """
        params = {"since": since, "limit": limit, "job": job, "wait_s": wait_s}
        return self._read(self.call("events", params, wait_s=wait_s), list[EventView])

    def logs(
        self,
        job: str,
        *,
        stream: str = "rank0",
        cursor: str = "",
        limit: int = 65536,
        wait_s: float = 0.0,
    ) -> LogView:
        """A piece of a log from ``cursor`` on; there is none: waits up to ``wait_s`` for one."""
        params = {"job": job, "stream": stream, "cursor": cursor, "limit": limit, "wait_s": wait_s}
        return self._read(self.call("logs", params, wait_s=wait_s), LogView)

    def status(self) -> StatusView:
        """The daemon and the machine at a glance."""
        return self._read(self.call("status"), StatusView)

    def usage(self, **between: float) -> list[UsageView]:
        """What was leased and what for; ``since`` and ``until`` in seconds since the epoch."""
        return self._read(self.call("usage", between), list[UsageView])

    # -- the socket

    def call(
        self,
        op: str,
        params: Mapping[str, Any] | None = None,
        *,
        wait_s: float = 0.0,
        changes: bool = False,
    ) -> Any:
        """The data of the daemon's answer to one request; the raw form of the operations above.

        ``wait_s``: time the daemon was asked to wait. ``changes``: the request changes something,
        so that a lost answer leaves open whether it was carried out, and the error says so. A
        daemon that does not know this client is told who it is, where it believes MUNGE.
        """
        try:
            return self._ask(op, params, wait_s, changes)
        except ClientError as error:
            if error.code != STRANGER:
                raise
            self._introduce(isinstance(error.data, dict) and error.data.get("munge") is True)
        return self._ask(op, params, wait_s, changes)

    def _introduce(self, munge: bool) -> None:
        """Let MUNGE tell the daemon who this is. Raises ClientError, saying what else can be
        done.
        """
        server, public, _ = (key.decode("ascii") for key in self._keys)
        why = ""
        if munge and Munge.there():
            try:
                credential = Munge(os.environ.get(env.MUNGE_SOCKET, "")).credential(
                    login_payload(server, public)
                )
                self._ask("login", {"credential": credential}, 0.0, False)
                return
            except (UsersError, ClientError) as error:
                why = f" MUNGE could not tell it who you are: {error}"
        raise ClientError(
            f"The daemon at {self.endpoint} does not know your key.{why} Give its operators "
            "this line for their list of users: "
            f"{user_name()} {public}"
        )

    def _ask(self, op: str, params: Mapping[str, Any] | None, wait_s: float, changes: bool) -> Any:
        request = messages.Request(id=uuid.uuid4().hex, op=op, params=dict(params or {}))
        try:
            frames = wire.encode(request)
        except wire.WireError as error:
            raise ClientError(str(error), "usage") from None
        socket = self._connected()
        socket.send_multipart(frames)
        deadline = time.monotonic() + self.timeout_s + wait_s
        while True:
            self._wait(socket, deadline, changes)
            try:
                answer = wire.decode(socket.recv_multipart())
            except wire.WireError as error:
                sentence = (
                    f"The daemon at {self.endpoint} answered in a form this version does "
                    f"not know: {error}"
                )
                raise ClientError(sentence, "internal") from None
            if isinstance(answer, messages.Error):
                raise ClientError(answer.sentence)
            if isinstance(answer, messages.Reply) and answer.id == request.id:
                if answer.ok:
                    return answer.data
                raise ClientError(
                    answer.error or "The daemon refused and did not say why.",
                    answer.code or "refused",
                    answer.data,
                )
            # Else: the late answer to a call given up before.

    def close(self) -> None:
        """End the connection."""
        self._drop()
        self._context.destroy(linger=0)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self._up = False

    def _connected(self) -> zmq.Socket[bytes]:
        """The socket after its handshake. Sending before that would leave a call in a queue of a
        daemon that never comes.
        """
        if self._socket is not None and self._up and not self._broke():
            return self._socket
        self._drop()
        self._socket = socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.ipv6 = "[" in self.endpoint
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self._keys
            self._monitor = socket.get_monitor_socket()
            socket.connect(self.endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            self._drop()
            why = error.strerror if isinstance(error, zmq.ZMQError) else str(error)
            raise Unreachable(
                f"The daemon's address {self.endpoint} or its key cannot be used "
                f"({why}).{self._hint}"
            ) from None
        began = time.monotonic()
        refused = False
        while (now := time.monotonic()) - began < CONNECT_S:
            if self._monitor.poll(100):
                event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._up = True
                    return socket
                if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                    self._drop()
                    raise Unreachable(
                        f"The daemon at {self.endpoint} does not accept this client's key; "
                        "use the state directory that the daemon runs with."
                    )
                refused = refused or event == zmq.EVENT_CONNECT_RETRIED
                if event == zmq.EVENT_CONNECTED:
                    refused = False
            if refused and now - began > ABSENT_S:
                break
        self._drop()
        raise Unreachable(f"No daemon answers at {self.endpoint}: it is not running.{self._hint}")

    def _broke(self) -> bool:
        """Whether the connection broke since the last call, as it does when the daemon is
        restarted.
        """
        while self._monitor is not None and self._monitor.poll(0):
            if zmq.utils.monitor.recv_monitor_message(self._monitor)["event"] in BROKEN:
                return True
        return False

    def _wait(self, socket: zmq.Socket[bytes], deadline: float, changes: bool) -> None:
        """Until there is something to receive. Raises Unreachable when the connection breaks or the
        time is up.
        """
        assert self._monitor is not None
        unknown = (
            " Whether it carried the request out is not known; look with 'malletrain status'."
            if changes
            else ""
        )
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(max(1, int(left * 1000))))
            if socket in ready:
                return
            if self._monitor in ready:
                event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
                if event in BROKEN:
                    self._drop()
                    raise Unreachable(
                        f"The daemon at {self.endpoint} went away before it "
                        f"answered.{unknown}{self._hint}"
                    )
        self._drop()
        raise Unreachable(
            f"The daemon at {self.endpoint} did not answer within {self.timeout_s:g} s.{unknown}"
        )

    def _job_after(self, op: str, params: dict[str, Any]) -> JobView:
        data = self.call(op, params, changes=True)
        return self._read(data.get("job") if isinstance(data, dict) else None, JobView)

    def _read(self, data: Any, kind: type[T]) -> T:
        try:
            return msgspec.convert(data, kind)
        except msgspec.ValidationError as error:
            raise ClientError(
                f"The daemon at {self.endpoint} answered with data this version does not "
                f"know ({error}); use one version.",
                "internal",
            ) from None
