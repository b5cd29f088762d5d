"""The agent's connection to the daemon: kept up for ever, and never needed by the training.

Decides when the daemon counts as silent and how to come back: a fresh socket after a pause that grows and is spread by chance, so that
thousands of agents do not return in the same instant. While it is away nothing but Hello is sent, and who sends is told (False).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, cast

import zmq
import zmq.asyncio

from malletrain.agent.config import AgentConfig, public_key
from malletrain.wire import Alive, Heartbeat, Hello, Message, Welcome, WhoAreYou, WireError, decode, encode

FIRST_ANSWER_S = 5.0
MISSED_HEARTBEATS = 3
PAUSE_S = (0.2, 10.0)
_HELLO_INTERVAL_S = 0.5
_QUIET_COMPLAINT_S = 60.0

log = logging.getLogger("malletrain.agent")


def pause(attempt: int, chance: float) -> float:
    """Seconds before attempt number ``attempt`` (from 1), for a random number in [0, 1): doubling up to a limit, half of it by chance."""
    longest = min(PAUSE_S[1], PAUSE_S[0] * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * chance)


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting. False when the queue is full: the other end takes nothing."""
    future = cast("asyncio.Future[Any]", socket.send_multipart(frames, zmq.DONTWAIT))  # done at once with this flag
    return not future.done() or future.exception() is None


def resident_bytes() -> int:
    """Memory of this process (proc_pid_statm(5))."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class DaemonLink:
    """``hello`` makes the Hello of this moment; ``on_message`` takes what the daemon says; ``on_welcome`` hears of every connection."""

    def __init__(
        self, config: AgentConfig, hello: Callable[[], Hello], on_message: Callable[[Any], None], on_welcome: Callable[[Welcome], None]
    ) -> None:
        self._config = config
        self._hello = hello
        self._on_message = on_message
        self._on_welcome = on_welcome
        self._context = zmq.asyncio.Context.instance()
        self._socket: zmq.asyncio.Socket | None = None
        self._boot = ""
        self._heartbeat_s = 1.0
        self._heard = time.monotonic()
        self._said_hello = 0.0
        self.connected = False

    def send(self, message: Message) -> bool:
        """Send to the daemon if it is there."""
        return self.connected and self._put(message)

    def announce(self) -> None:
        """Say Hello now, whether or not the daemon is known to be there: something about this agent has changed for good."""
        self._put(self._hello())

    async def run(self) -> None:
        """Keep connected until cancelled."""
        attempt = 0
        quiet_since = time.monotonic()
        try:
            while True:
                if await self._one_connection():
                    attempt, quiet_since = 0, time.monotonic()
                    log.warning("the daemon at %s is silent; training goes on", self._config.endpoint)
                elif time.monotonic() - quiet_since > _QUIET_COMPLAINT_S:
                    quiet_since = time.monotonic()
                    log.warning(
                        "no answer from %s for %g s: is the daemon up, and are its key and this lease's valid?",
                        self._config.endpoint, _QUIET_COMPLAINT_S,
                    )  # fmt: skip
                attempt += 1
                await asyncio.sleep(pause(attempt, random.random()))
        finally:
            self.close(0)

    def close(self, linger_ms: int) -> None:
        """Close, giving what was sent last some time to get out."""
        self.connected = False
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None

    async def _one_connection(self) -> bool:
        """Open a socket and use it until the daemon is silent. Returns whether it ever answered."""
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.curve_secretkey = self._config.secret_key.encode()
        socket.curve_publickey = public_key(self._config.secret_key).encode()
        socket.curve_serverkey = self._config.server_key.encode()
        socket.linger = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.connect(self._config.endpoint)
        self._heard = time.monotonic()
        self._said_hello = 0.0
        self._say_hello()
        answered = False
        last_beat = time.monotonic()
        try:
            while True:
                # Reading comes first: after this process was stopped for a while (SIGSTOP), what the daemon said meanwhile counts.
                if await socket.poll(int(min(self._heartbeat_s, 0.5) * 1000)):
                    answered = self._take(await socket.recv_multipart()) or answered
                now = time.monotonic()
                patience = self._heartbeat_s * MISSED_HEARTBEATS if answered else FIRST_ANSWER_S
                if now - self._heard > max(patience, 1.0):
                    return answered
                if answered and now - last_beat >= self._heartbeat_s:
                    last_beat = now
                    self._put(Heartbeat(self._boot, resident_bytes()))
        finally:
            self.close(0)

    def _take(self, frames: list[bytes]) -> bool:
        """One message. Returns whether it was the daemon's Welcome."""
        self._heard = time.monotonic()
        try:
            message = decode(frames)
        except WireError as error:
            log.warning("ignored a message from the daemon: %s", error)
            return False
        if isinstance(message, Welcome):
            self._boot = message.boot
            self._heartbeat_s = min(max(message.heartbeat_s, 0.05), 600.0)
            self.connected = True
            self._on_welcome(message)
            return True
        if isinstance(message, WhoAreYou) or (isinstance(message, Alive) and message.boot != self._boot):
            self.connected = False
            self._say_hello()
            return False
        if not isinstance(message, Alive):
            self._on_message(message)
        return False

    def _say_hello(self) -> None:
        if time.monotonic() - self._said_hello >= _HELLO_INTERVAL_S:
            self._said_hello = time.monotonic()
            self._put(self._hello())

    def _put(self, message: Message) -> bool:
        if self._socket is None:
            return False
        return send_now(self._socket, encode(message))
