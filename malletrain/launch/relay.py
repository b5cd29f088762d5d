"""Carries bytes between connections on this host and the one that serves a round's store.

It is one thread. On this host connections come in by a
:class:`~malletrain.launch.listeners.UserListener`. Between hosts every connection is a numbered
stream over one ZeroMQ socket under CURVE; both of its keys are derived from the job's secret, so
only holders of the secret can connect. Decides neither who belongs to a round nor what the bytes
mean.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from malletrain.launch.listeners import SignedListener, UserListener
from malletrain.protocol.host_listener import HostListener
from malletrain.protocol.job_keys import ZAP
from malletrain.protocol.job_keys import RoundKeys as RoundKeys

_READ_BYTES = 1 << 18
_MOST_BYTES = 2 * _READ_BYTES
"""Of a frame between hosts, with what CURVE adds; who announces more, as strangers can, is hung up
on.
"""
_STREAM = struct.Struct(">I")
_RETRY_MS = 50
_CONNECT_MS = 2000
_REST_MS = 100
"""How long nobody is let in after somebody could not be."""
MOST_ENDS = 16_384
"""Connections on this host at one moment, beyond what any job has."""
_OVER = b""
"""Says that an end has hung up."""


class _End:
    """A connection on this host. What it does not take at once is kept."""

    def __init__(self, relay: _Relay, own: socket.socket, hang_up: Callable[[], None]) -> None:
        own.setblocking(False)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._relay = relay
        self._socket = own
        self._fd = own.fileno()
        self._hang_up = hang_up
        self._unsent = bytearray()
        self._last = False
        self._open = True
        self.far: Callable[[bytes], None] = lambda data: None
        """Takes what comes from here."""
        relay.watch(self._fd, self._ready)

    def _ready(self, events: int) -> None:
        if events & zmq.POLLOUT:
            self._flush()
        if self._open and events & ~zmq.POLLOUT:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = _OVER
            if not data:
                self.close()
            self.far(data)

    def take(self, data: bytes) -> None:
        """Send ``data`` here; nothing: the far end has hung up."""
        if not self._open:
            return
        self._unsent += data
        self._last = self._last or not data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            self.far(_OVER)
            return
        if self._last and not self._unsent:
            self.close()
        else:
            self._relay.watch(self._fd, self._ready, bool(self._unsent))

    def close(self) -> None:
        """Hang up here."""
        if self._open:
            self._open = False
            self._relay.unwatch(self._fd)
            self._hang_up()


class _Relay:
    """The thread and what it waits on. One end of the way of a round's store."""

    def __init__(self, listener: UserListener) -> None:
        self._listener = listener
        self.local_port = listener.port
        """Where processes of this user on this host reach the store."""
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[int], None]] = {}
        self._ends: set[_End] = set()
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._going = True
        self._rests_until: float | None = None
        """When callers are let in again; None: they are."""
        self._lock = threading.Lock()
        self.watch(self._stop, self._ending)
        self.watch(listener.fileno(), self._called)
        self._thread = threading.Thread(target=self._run, name="malletrain-store", daemon=True)

    def watch(self, one: Any, ready: Callable[[int], None], writing: bool = False) -> None:
        """Call ``ready`` when ``one`` can be read (``writing``: or written)."""
        self._handlers[one] = ready
        self._poller.register(one, zmq.POLLIN | (zmq.POLLOUT if writing else 0))

    def unwatch(self, one: Any) -> None:
        """Not any more."""
        if self._handlers.pop(one, None) is not None:
            self._poller.unregister(one)

    def close(self) -> None:
        """End the thread and everything that goes by it; a second time does nothing."""
        with self._lock:
            if self._stopped >= 0:
                os.close(self._stopped)
                self._stopped = -1
        if self._thread.is_alive():
            self._thread.join()

    # --- in the thread ---

    def _ending(self, _: int) -> None:
        self._going = False

    def _run(self) -> None:
        try:
            while self._going:
                self._rest_over()
                for one, events in self._poller.poll(
                    None if self._rests_until is None else _REST_MS
                ):
                    if handler := self._handlers.get(one):
                        handler(events)
        finally:
            self._listener.close()
            for end in list(self._ends):
                end.close()
            self._over()
            os.close(self._stop)
            self._context.destroy(linger=0)

    def _end(self, own: socket.socket) -> _End:
        def gone() -> None:
            self._ends.discard(end)
            own.close()

        end = _End(self, own, gone)
        self._ends.add(end)
        return end

    def _called(self, _: int) -> None:
        try:
            own = self._listener.accept()
        except OSError:  # the connection waits, and the listener stays readable
            self._rest()
            return
        if own is not None:
            self._opened(self._end(own))
        if len(self._ends) >= MOST_ENDS:
            self._rest()

    def _rest(self) -> None:
        """Let nobody in for a moment."""
        self._rests_until = time.monotonic() + _REST_MS / 1000
        self.unwatch(self._listener.fileno())

    def _rest_over(self) -> None:
        if self._rests_until is None or time.monotonic() < self._rests_until:
            return
        if len(self._ends) < MOST_ENDS:
            self._rests_until = None
            self.watch(self._listener.fileno(), self._called)

    def _opened(self, end: _End) -> None:
        """A process on this host has called."""
        raise NotImplementedError

    def _over(self) -> None:
        """The thread is about to end."""


class ServingRelay(_Relay):
    """The relay beside the store: connections of this host and streams of other hosts reach the
    store through the signed listener.

    Args:
        listeners: of the store.
        keys: of the round.
        address: where the other hosts call, an address or a name of this host.
    """

    def __init__(
        self, listeners: tuple[UserListener, SignedListener], keys: RoundKeys, address: str
    ) -> None:
        user_listener, self._signed_listener = listeners
        super().__init__(user_listener)
        self._keys = keys
        self._streams: dict[tuple[bytes, bytes], _End] = {}
        zap = self._context.socket(zmq.REP)
        zap.bind(ZAP)
        self._zap = zap
        router = self._router = self._context.socket(zmq.ROUTER)
        keys.serve(router, b"store")
        router.sndhwm = router.rcvhwm = 0  # the members are one program: what it keeps is its own
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.maxmsgsize = _MOST_BYTES
        self._host_listener = HostListener(router, address)
        self.port = self._host_listener.port
        """Where the relays of other hosts call."""
        self.watch(self._host_listener.monitor, self._host_listener.read_monitor)
        self.watch(zap, self._answer_zap)
        self.watch(router, self._heard)
        self._thread.start()

    def _answer_zap(self, _: int) -> None:
        """ZAP's question: may who has this key come in? (rfc.zeromq.org/spec/27)"""
        self._zap.send_multipart(self._keys.answered(self._zap.recv_multipart()))

    def _opened(self, end: _End) -> None:
        inner = self._inner(end.take)
        if inner is not None:
            end.far = inner.take

    def _inner(self, back: Callable[[bytes], None]) -> _End | None:
        """A connection to the store, whose bytes go ``back``."""
        try:
            inner = (
                self._end(self._signed_listener.connect()) if len(self._ends) < MOST_ENDS else None
            )
        except OSError:
            inner = None
        if inner is None:
            back(_OVER)  # it will try again
            return None
        inner.far = back
        return inner

    def _heard(self, _: int) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) == 3:
                self._stream(*frames)

    def _stream(self, peer: bytes, number: bytes, data: bytes) -> None:
        inner = self._streams.get((peer, number))
        if inner is None and data:

            def answer(back: bytes) -> None:
                if not back:
                    self._streams.pop((peer, number), None)
                self._answer([peer, number, back])

            inner = self._inner(answer)
            if inner is not None:
                self._streams[peer, number] = inner
        if inner is not None:
            if not data:
                self._streams.pop((peer, number), None)
            inner.take(data)

    def _answer(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # the host is gone; what of it is connected here goes with the round

    def _over(self) -> None:
        self._signed_listener.close()
        self._host_listener.close()


class CallingRelay(_Relay):
    """Where the store is not: every caller of this host is a stream to the host that has it.

    Args:
        keys: of the round.
        host, port: of the other end.
    """

    def __init__(self, keys: RoundKeys, host: str, port: int) -> None:
        super().__init__(UserListener())
        self._numbers = itertools.count()
        self._streams: dict[bytes, _End] = {}
        self._mine, self._its = socket.socketpair()
        self.connected = False
        """The other end has taken the key."""
        self.over = False
        """The way is closed: the other end is gone."""
        self.trouble = "it does not answer"
        """Why there is no connection so far."""
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        keys.call(dealer)
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.maxmsgsize = _MOST_BYTES
        dealer.ipv6 = ":" in host
        dealer.reconnect_ivl = _RETRY_MS
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._monitor = dealer.get_monitor_socket()
        self.watch(self._monitor, self._noticed)
        self.watch(dealer, self._heard)
        try:
            dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.trouble = error.strerror or str(error)
        self._thread.start()

    def fileno(self) -> int:
        """Can be read once ``connected`` or ``over`` is true."""
        return self._mine.fileno()

    def _noticed(self, _: int) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._its.send(b"+")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self.trouble = "it does not take this job's key"
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self._going = False  # what the store held is lost with it

    def _opened(self, end: _End) -> None:
        number = _STREAM.pack(next(self._numbers))
        self._streams[number] = end

        def away(data: bytes) -> None:
            if not data:
                self._streams.pop(number, None)
            self._dealer.send_multipart([number, data])

        end.far = away

    def _heard(self, _: int) -> None:
        while True:
            try:
                number, data = self._dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            end = self._streams.get(number) if data else self._streams.pop(number, None)
            if end is not None:
                end.take(data)

    def _over(self) -> None:
        self.connected, self.over = False, True
        self._its.close()
        self._dealer.disable_monitor()
