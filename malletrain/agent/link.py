"""The agent's connection to the daemon. It is kept up for ever; the training never needs it.

Decides when the daemon counts as silent and how to reconnect: with a new socket after a pause that
grows and is randomised, so that thousands of agents do not return at the same moment, yet soon
enough for a restarted daemon, which waits some seconds before it plans. While the daemon is away
nothing is sent or queued, and the sender gets False: the first message after a reconnection is a
Hello with the state of that moment.
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
from msgspec.structs import replace

from malletrain.agent.config import AgentConfig, public_key
from malletrain.agent.reach import why_no_answer
from malletrain.protocol.boot import daemon_of
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.messages import (
    Alive,
    Heartbeat,
    Hello,
    Message,
    Welcome,
    WhoAreYou,
)
from malletrain.protocol.wire import WireError, decode, encode

FIRST_ANSWER_S = (5.0, 20.0)
"""Seconds for which the first answer over a connection is waited for, and the longest."""
MISSED_HEARTBEATS = 3
PAUSE_S = (0.1, 2.0)
HELLO_AGAIN_S = (1.0, 8.0)
"""Seconds after which a Hello without an answer is said again over the same connection, and the
longest.
"""
_CONNECT_POLL_S = 0.05
_RECONNECT_MS = (100, 1000)
_QUIET_COMPLAINT_S = (15.0, 60.0)
"""Seconds without an answer after which it is said, at first and then again."""

log = logging.getLogger("malletrain.agent")


def pause(attempt: int, chance: float) -> float:
    """Seconds before attempt number ``attempt`` (from 1), for a random number in [0, 1): doubling
    up to a limit, half of it by chance.
    """
    longest = min(PAUSE_S[1], PAUSE_S[0] * 2.0 ** min(attempt, 16))
    return longest * (0.5 + 0.5 * chance)


def first_answer_s(attempt: int) -> float:
    """Seconds for which attempt number ``attempt`` (from 0) waits for its first answer: longer each
    time, so that a daemon with thousands of waiting agents is not left by those whose turn is
    about to come. What it has done for them by then would be in vain.
    """
    return min(FIRST_ANSWER_S[1], FIRST_ANSWER_S[0] * 2.0 ** min(attempt, 16))


def hello_again_s(hellos: int) -> float:
    """Seconds until a Hello is said again that was said so many times (from 1): twice as long each
    time. It is there already, most likely, with thousands of others before it, and each more is
    work for a daemon that has too much of it.
    """
    return min(HELLO_AGAIN_S[1], HELLO_AGAIN_S[0] * 2.0 ** min(hellos - 1, 16))


def send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send without waiting. False when the queue is full: the other end takes nothing."""
    future = cast(
        "asyncio.Future[Any]", socket.send_multipart(frames, zmq.DONTWAIT)
    )  # done at once with this flag
    return not future.done() or future.exception() is None


def resident_bytes() -> int:
    """Memory of this process (proc_pid_statm(5))."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class DaemonLink:
    """``hello`` makes the Hello of this moment; ``on_message`` takes what the daemon says;
    ``on_welcome`` hears of every connection; ``warm_bytes`` is the memory of the fork servers,
    ``memory_bytes`` that of snapshots.
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
        self._heard = time.monotonic()
        self._greeted_at: float | None = None
        self._greeting: Hello | None = None
        """What was said last on this connection."""
        self._greetings = 0
        """How often, since the connection was made or the daemon asked."""
        self.connected = False

    @property
    def daemon(self) -> str:
        """The daemon's name; empty before its first Welcome."""
        return daemon_of(self._boot)

    def send(self, message: Message) -> bool:
        """Send to the daemon if it is there. False: not sent, or not for sure; the Hello that
        follows makes up for it.
        """
        reached(FaultPoint.AGENT_SAYS)
        if self.connected and not self._put(message):
            self._out_of_touch()
        reached(FaultPoint.AGENT_SAID)
        return self.connected

    def announce(self) -> None:
        """Say Hello now: something about this agent has changed that the daemon may not know."""
        self._greet()

    async def run(self) -> None:
        """Keep connected until cancelled."""
        attempt = 0
        quiet_since, complaint_s = time.monotonic(), _QUIET_COMPLAINT_S[0]
        try:
            while True:
                if await self._one_connection(first_answer_s(attempt)):
                    attempt, quiet_since = 0, time.monotonic()
                    log.warning(
                        "the daemon at %s is silent; training goes on", self._config.endpoint
                    )
                elif time.monotonic() - quiet_since > complaint_s:
                    why = await asyncio.to_thread(why_no_answer, self._config.endpoint)
                    log.warning("no answer of the daemon for %g s: %s", complaint_s, why)
                    quiet_since, complaint_s = time.monotonic(), _QUIET_COMPLAINT_S[1]
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

    async def _one_connection(self, first_answer_s: float) -> bool:
        """Open a socket and use it until the daemon is silent, ``first_answer_s`` at first. Returns
        whether it ever answered.
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
        self._heard = time.monotonic()
        self._greeted_at = self._greeting = None
        self._greetings = 0
        answered = False
        last_beat = time.monotonic()
        try:
            while True:
                # Reading comes first: after this process was stopped for a while (SIGSTOP), what
                # the daemon said meanwhile counts.
                wait = _CONNECT_POLL_S if self._greeted_at is None else min(self._heartbeat_s, 0.5)
                turn = time.monotonic()
                ready = dict(await poller.poll(int(wait * 1000)))
                if monitor in ready:
                    await monitor.recv_multipart()
                    self._out_of_touch()
                elif time.monotonic() - turn > wait + max(
                    self._heartbeat_s * MISSED_HEARTBEATS, 1.0
                ):
                    # This process stood still for so long that the daemon may have given it up, and
                    # could not hear it meanwhile.
                    self._out_of_touch()
                    self._heard = time.monotonic()
                if socket in ready:
                    answered = self._take(await socket.recv_multipart()) or answered
                now = time.monotonic()
                if not self.connected and (
                    self._greeted_at is None
                    or now - self._greeted_at > hello_again_s(self._greetings)
                ):
                    self._greet()
                patience = self._heartbeat_s * MISSED_HEARTBEATS if answered else first_answer_s
                if now - self._heard > max(patience, 1.0):
                    return answered
                if answered and now - last_beat >= self._heartbeat_s:
                    last_beat = now
                    taken = self._warm_bytes(), self._memory_bytes()
                    self._put(Heartbeat(self._boot, resident_bytes(), *taken))
        finally:
            if not socket.closed:
                socket.disable_monitor()
            monitor.close(0)
            self.close(0)

    def _out_of_touch(self) -> None:
        """The connection broke, and with it went what was on the way: say Hello as soon as there is
        one again.
        """
        self.connected, self._greeted_at, self._greeting = False, None, None
        self._greetings = 0

    def _take(self, frames: list[bytes]) -> bool:
        """One message. Returns whether it was the daemon's Welcome."""
        self._heard = time.monotonic()
        try:
            message = decode(frames)
        except WireError as error:
            log.warning("ignored a message from the daemon: %s", error)
            return False
        if isinstance(message, Welcome):
            self._boot, self._greeting, self._greetings = message.boot, None, 0
            self._heartbeat_s = min(max(message.heartbeat_s, 0.05), 600.0)
            self.connected = True
            reached(FaultPoint.AGENT_WELCOMED)
            self._on_welcome(message)
            return True
        if isinstance(message, WhoAreYou) or (
            isinstance(message, Alive) and message.boot != self._boot
        ):
            if self.connected:
                self.connected, self._greeting = False, None
                self._greet()
            return False
        if not isinstance(message, Alive):
            self._on_message(message)
        return False

    def _greet(self) -> None:
        reached(FaultPoint.AGENT_GREETS)
        hello = self._hello()
        again = hello == self._greeting
        if self._put(replace(hello, again=True) if again else hello):
            self._greeted_at, self._greeting = time.monotonic(), hello
            self._greetings += 1

    def _put(self, message: Message) -> bool:
        if self._socket is None:
            return False
        return send_now(self._socket, encode(message))
