"""The agent's connection to the daemon. The agent reconnects without end; training continues
without the connection.

:class:`DaemonLink` decides when the daemon counts as silent and how to reconnect: with a new
socket, after a pause that grows and is randomised. So thousands of agents do not return at the same
moment, yet return soon enough for a restarted daemon, which waits some seconds before it plans.
While the daemon is away, nothing is sent or queued, and the sender gets False. The first message
after a reconnection is a Hello with the current state.

:func:`why_no_answer` finds the reason why the daemon does not answer, as far as this node can
determine it: it resolves the daemon's name, connects to its port as the agent does, and returns the
result as sentences for the lease's output.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from malletrain.agent.config import AgentConfig, public_key
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.messages import (
    Alive,
    Heartbeat,
    Hello,
    Message,
    Welcome,
    WhoAreYou,
    daemon_of,
)
from malletrain.protocol.wire import WireError, decode, encode
from scavenger.backoff import doubled_s

TRY_S = 5.0

_SENTENCES = {
    errno.ECONNREFUSED: "nothing listens on port {port} of {host} ({address}){loopback}. Is the "
    "daemon up, and is this its address?",
    errno.EHOSTUNREACH: "there is no way from this node to {host} ({address}): a firewall or "
    "missing route. Set advertise in [daemon] to an address that nodes can reach.",
    errno.ENETUNREACH: "there is no route from this node to {host} ({address}). Set advertise in "
    "[daemon] to an address that nodes can reach.",
}


def why_no_answer(endpoint: str, try_s: float = TRY_S) -> str:
    """Return the reason why this node cannot communicate with the daemon, as sentences.

    Args:
        endpoint: ``tcp://HOST:PORT``.
        try_s: timeout for the connection, seconds.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, proto, _, socket_address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )[0]
    except (OSError, ValueError) as error:
        return (
            f"this node cannot look up {host} ({error}). Set advertise in [daemon] to an address, "
            "or to a name that the nodes know."
        )
    address = str(socket_address[0])
    try:
        with socket.socket(family, kind, proto) as probe:
            probe.settimeout(try_s)
            probe.connect(socket_address)
    except TimeoutError:
        return (
            f"{host} ({address}) does not answer on port {port}: a firewall between here and "
            "there, or the machine is down. Nodes must be able to connect to that port."
        )
    except OSError as error:
        loopback = ", which is this node itself" if _is_loopback(address) else ""
        template = _SENTENCES.get(
            error.errno or 0, "{host} ({address}) cannot be connected to: " + str(error)
        )
        return template.format(host=host, address=address, port=port, loopback=loopback)
    return (
        f"port {port} of {host} ({address}) takes connections and says nothing that is meant for "
        "this lease. Is that the daemon, and are its key and this lease's valid?"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


FIRST_ANSWER_S = (5.0, 20.0)
"""Timeout for the first answer over a connection, seconds: initial and maximum."""
MISSED_HEARTBEATS = 3
PAUSE_S = (0.1, 2.0)
"""Pause before a reconnection, seconds: initial and maximum."""
HELLO_AGAIN_S = (1.0, 8.0)
"""Interval between repeated Hellos over one connection, seconds: initial and maximum."""
_CONNECT_POLL_S = 0.05
_RECONNECT_MS = (100, 1000)
_SILENCE_WARNING_S = (15.0, 60.0)
"""Time without an answer after which a warning is logged, seconds: the first and each further."""

log = logging.getLogger("malletrain.agent")


def pause(attempt: int, chance: float) -> float:
    """Return the pause before a reconnection, seconds. It doubles with each attempt, up to a
    maximum; half of it is random.

    Args:
        attempt: number of the attempt, from 1.
        chance: random number in [0, 1).
    """
    return doubled_s(PAUSE_S[0], attempt, PAUSE_S[1]) * (0.5 + 0.5 * chance)


def first_answer_s(attempt: int) -> float:
    """Return the timeout for the first answer in attempt number ``attempt`` (from 0), seconds. It
    grows with each attempt. If thousands of agents wait for a daemon, those that it is about to
    answer must not disconnect, because its work for them would be lost.
    """
    return doubled_s(FIRST_ANSWER_S[0], attempt, FIRST_ANSWER_S[1])


def hello_again_s(hellos: int) -> float:
    """Return the time until Hello is repeated, seconds. ``hellos``: number of Hellos sent so far,
    from 1. The time doubles with each. The earlier Hello has probably arrived and is queued behind
    thousands of others, and each repetition is more work for an overloaded daemon.
    """
    return doubled_s(HELLO_AGAIN_S[0], hellos - 1, HELLO_AGAIN_S[1])


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting. Return False if the queue is full, because the peer reads nothing."""
    # With this flag the future is done at once.
    future = cast("asyncio.Future[Any]", socket.send_multipart(frames, zmq.DONTWAIT))
    return not future.done() or future.exception() is None


def resident_bytes() -> int:
    """Return the resident memory of this process, bytes (proc_pid_statm(5))."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class DaemonLink:
    """The connection to the daemon.

    Args:
        config: settings of the agent.
        hello: returns a Hello with the current state.
        on_message: called with each message of the daemon.
        on_welcome: called with the Welcome of each connection.
        warm_bytes: returns the memory of the fork servers, bytes.
        memory_bytes: returns the memory of the snapshots, bytes.
    """

    def __init__(
        self,
        config: AgentConfig,
        hello: Callable[[], Hello],
        on_message: Callable[[Any], None],
        on_welcome: Callable[[Welcome], None],
        warm_bytes: Callable[[], int],
        memory_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._config = config
        self._memory_bytes = memory_bytes
        self._hello = hello
        self._on_message = on_message
        self._on_welcome = on_welcome
        self._warm_bytes = warm_bytes
        self._context = zmq.asyncio.Context.instance()
        self._socket: zmq.asyncio.Socket | None = None
        self._boot = ""
        self._heartbeat_s = 1.0
        self._last_received_at = time.monotonic()
        self._hello_sent_at: float | None = None
        self._last_hello: Hello | None = None
        """The last Hello on this connection; None if there was none."""
        self._hello_count = 0
        """Number of Hellos since the connection was made, or since the daemon asked for one."""
        self.connected = False
        """Whether the daemon has answered on this connection."""

    @property
    def daemon(self) -> str:
        """Name of the daemon; empty before its first Welcome."""
        return daemon_of(self._boot)

    def send(self, message: Message) -> bool:
        """Send to the daemon if it is connected. Return False if the message may not have been
        sent; the next Hello then contains the state.
        """
        reached(FaultPoint.AGENT_SAYS)
        if self.connected and not self._put(message):
            self._on_disconnect()
        reached(FaultPoint.AGENT_SAID)
        return self.connected

    async def run(self) -> None:
        """Connect, and reconnect until cancelled."""
        attempt = 0
        silent_since, warning_s = time.monotonic(), _SILENCE_WARNING_S[0]
        try:
            while True:
                if await self._try_connection(first_answer_s(attempt)):
                    attempt, silent_since = 0, time.monotonic()
                    log.warning(
                        "the daemon at %s is silent; training continues", self._config.endpoint
                    )
                elif time.monotonic() - silent_since > warning_s:
                    reason = await asyncio.to_thread(why_no_answer, self._config.endpoint)
                    log.warning("no answer of the daemon for %g s: %s", warning_s, reason)
                    silent_since, warning_s = time.monotonic(), _SILENCE_WARNING_S[1]
                attempt += 1
                await asyncio.sleep(pause(attempt, random.random()))
        finally:
            self.close(0)

    def close(self, linger_ms: int) -> None:
        """Close the connection. ``linger_ms``: time in which queued messages are still sent, ms."""
        self.connected = False
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None

    async def _try_connection(self, first_answer_s: float) -> bool:
        """As :meth:`_one_connection`. If this process lacks file descriptors or memory, the
        connection ends, and the training continues.
        """
        try:
            return await self._one_connection(first_answer_s)
        except (OSError, zmq.ZMQError) as error:
            self._on_disconnect()
            self.close(0)
            log.warning("the connection to the daemon ended here: %s; training continues", error)
            return False

    async def _one_connection(self, first_answer_s: float) -> bool:
        """Open a socket and use it until the daemon is silent. Return whether the daemon has
        answered. ``first_answer_s``: timeout for its first answer, seconds.
        """
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.curve_secretkey = self._config.secret_key.encode()
        socket.curve_publickey = public_key(self._config.secret_key).encode()
        socket.curve_serverkey = self._config.server_key.encode()
        socket.linger = 0
        socket.immediate = 1
        socket.ipv6 = "[" in self._config.endpoint
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS
        socket.connect_timeout = int(1000 * FIRST_ANSWER_S[0])
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.connect(self._config.endpoint)
        self._last_received_at = time.monotonic()
        self._hello_sent_at = self._last_hello = None
        self._hello_count = 0
        answered = False
        last_beat = time.monotonic()
        try:
            while True:
                # Read before checking timeouts: if this process was stopped for a while (SIGSTOP),
                # messages that the daemon sent meanwhile count.
                wait_s = _CONNECT_POLL_S
                if self._hello_sent_at is not None:
                    wait_s = min(self._heartbeat_s, 0.5)
                poll_began_at = time.monotonic()
                ready = dict(await poller.poll(int(wait_s * 1000)))
                if monitor in ready:
                    await monitor.recv_multipart()
                    self._on_disconnect()
                elif time.monotonic() - poll_began_at > wait_s + max(
                    self._heartbeat_s * MISSED_HEARTBEATS, 1.0
                ):
                    # This process was stopped for so long that the daemon, which received nothing
                    # meanwhile, may have declared it lost.
                    self._on_disconnect()
                    self._last_received_at = time.monotonic()
                if socket in ready:
                    answered = self._receive(await socket.recv_multipart()) or answered
                now = time.monotonic()
                if not self.connected and (
                    self._hello_sent_at is None
                    or now - self._hello_sent_at > hello_again_s(self._hello_count)
                ):
                    self.send_hello()
                timeout_s = self._heartbeat_s * MISSED_HEARTBEATS if answered else first_answer_s
                if now - self._last_received_at > max(timeout_s, 1.0):
                    return answered
                if answered and now - last_beat >= self._heartbeat_s:
                    last_beat = now
                    used_bytes = self._warm_bytes(), self._memory_bytes()
                    self._put(Heartbeat(self._boot, resident_bytes(), *used_bytes))
        finally:
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(0)
            self.close(0)

    def _on_disconnect(self) -> None:
        """Note that the connection broke and messages in flight are lost. A Hello is sent as soon
        as there is a connection again.
        """
        self.connected, self._hello_sent_at, self._last_hello = False, None, None
        self._hello_count = 0

    def _receive(self, frames: list[bytes]) -> bool:
        """Handle one message. Return whether it was the daemon's Welcome."""
        self._last_received_at = time.monotonic()
        try:
            message = decode(frames, newer=True)
        except WireError as error:
            log.warning("ignored a message from the daemon: %s", error)
            return False
        if isinstance(message, Welcome):
            self._boot, self._last_hello, self._hello_count = message.boot, None, 0
            self._heartbeat_s = min(max(message.heartbeat_s, 0.05), 600.0)
            self.connected = True
            reached(FaultPoint.AGENT_WELCOMED)
            self._on_welcome(message)
            return True
        if isinstance(message, WhoAreYou) or (
            isinstance(message, Alive) and message.boot != self._boot
        ):
            if self.connected:
                self.connected, self._last_hello = False, None
                self.send_hello()
            return False
        if not isinstance(message, Alive):
            self._on_message(message)
        return False

    def send_hello(self) -> None:
        """Send a Hello: after a connection, or because the state of this agent has changed and the
        daemon may not know it.
        """
        reached(FaultPoint.AGENT_GREETS)
        hello = self._hello()
        again = hello == self._last_hello
        if self._put(replace(hello, again=True) if again else hello):
            self._hello_sent_at, self._last_hello = time.monotonic(), hello
            self._hello_count += 1

    def _put(self, message: Message) -> bool:
        if self._socket is None:
            return False
        return send_now(self._socket, encode(message))
