"""The store of one round, as a launcher sees it: served here, or reached at the node of rank 0.

In both cases the processes of this node reach it at a port of their loopback, which other users'
processes cannot use. :class:`ServedStore` and :class:`ReachedStore` decide how long connecting to a
store is tried, not which nodes are in a round.

:class:`ServingRelay` and :class:`CallingRelay` relay bytes between connections on this host and the
host that serves the store. A relay is one thread. On this host a
:class:`~malletrain.launch.listeners.UserListener` accepts the connections. Between hosts every
connection is a numbered stream over one ZeroMQ socket with CURVE encryption. Both of its keys are
derived from the job's secret, so only the job's launchers can connect. A relay does not decide what
the bytes mean.
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
from datetime import timedelta
from typing import Any

import zmq
from torch.distributed import TCPStore
from zmq.utils.monitor import parse_monitor_message

from malletrain.launch.listeners import USER_ADDRESS, SignedListener, UserListener, listener_pair
from malletrain.protocol.host_listener import HostListener
from malletrain.protocol.job_keys import ZAP
from malletrain.protocol.job_keys import RoundKeys as RoundKeys
from malletrain.protocol.job_keys import job_secret as job_secret
from malletrain.protocol.open_sockets import OpenSockets
from malletrain.training.torch_private import torch_release

_READ_BYTES = 1 << 18
_MAX_FRAME_BYTES = 2 * _READ_BYTES
"""Maximum size of a frame between hosts, with the bytes that CURVE adds. ZeroMQ closes the
connection of a peer that announces more, as a stranger can.
"""
_STREAM = struct.Struct(">I")
_RETRY_MS = 50
_CONNECT_MS = 2000
_PAUSE_MS = 100
"""Time in which no connection is accepted after one could not be, ms."""
MAX_CONNECTIONS = 16_384
"""Maximum number of open connections on this host, more than any job has."""
_END_OF_STREAM = b""
"""Data that reports that one end has closed its connection."""


class _End:
    """A connection on this host. Data that it cannot send at once is queued.

    Args:
        relay: the relay that watches it.
        own: the socket.
        hang_up: called once when it is closed.
    """

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
        """Called with the data that arrives on this connection."""
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
                data = _END_OF_STREAM
            if not data:
                self.close()
            self.far(data)

    def take(self, data: bytes) -> None:
        """Queue ``data`` for this connection. No data: the far end has closed its connection."""
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
            self.far(_END_OF_STREAM)
            return
        if self._last and not self._unsent:
            self.close()
        else:
            self._relay.watch(self._fd, self._ready, bool(self._unsent))

    def close(self) -> None:
        """Close this connection."""
        if self._open:
            self._open = False
            self._relay.unwatch(self._fd)
            self._hang_up()


class _Relay:
    """The thread of a relay, and the sockets on which it waits."""

    def __init__(self, listener: UserListener) -> None:
        self._listener = listener
        self.local_port = listener.port
        """Loopback port at which processes of this user on this host reach the store."""
        self._context = zmq.Context()
        self._open = OpenSockets(self, self._context)
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[int], None]] = {}
        self._ends: set[_End] = set()
        self._running = True
        self._paused_until: float | None = None
        """Time at which connections are accepted again; None if they are accepted."""
        self._lock = threading.Lock()
        self.watch(listener.fileno(), self._accept)
        self._thread = threading.Thread(target=self._run, name="malletrain-store", daemon=True)

    def _start(self) -> None:
        """Start the thread, at the end of the constructor: only the thread closes the pipe."""
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self.watch(self._stop, self._on_stop)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is available
            os.close(self._stop)
            os.close(self._stopped)
            raise

    def watch(self, source: Any, ready: Callable[[int], None], writing: bool = False) -> None:
        """Call a handler when a socket or file descriptor is ready.

        Args:
            source: the socket or file descriptor.
            ready: the handler, called with the events.
            writing: whether to call it also when ``source`` is writable.
        """
        self._handlers[source] = ready
        self._poller.register(source, zmq.POLLIN | (zmq.POLLOUT if writing else 0))

    def unwatch(self, source: Any) -> None:
        """Stop watching ``source``."""
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)

    def close(self) -> None:
        """End the thread and all its connections. A second call does nothing."""
        with self._lock:
            if self._stopped >= 0:
                os.close(self._stopped)
                self._stopped = -1
        if self._thread.is_alive():
            self._thread.join()

    # --- in the thread ---

    def _on_stop(self, _: int) -> None:
        self._running = False

    def _run(self) -> None:
        try:
            while self._running:
                self._resume_accepting()
                for source, events in self._poller.poll(self._timeout_ms()):
                    if handler := self._handlers.get(source):
                        handler(events)
                self._on_turn()
        finally:
            self._listener.close()
            for end in list(self._ends):
                end.close()
            self._close_sockets()
            os.close(self._stop)
            self._open.close()

    def _timeout_ms(self) -> int | None:
        """Return the maximum time until the next turn, ms; None for no limit."""
        return None if self._paused_until is None else _PAUSE_MS

    def _on_turn(self) -> None:
        """Do what the subclass does in each turn."""

    def _end(self, own: socket.socket) -> _End:
        def discard() -> None:
            self._ends.discard(end)
            own.close()

        end = _End(self, own, discard)
        self._ends.add(end)
        return end

    def _accept(self, _: int) -> None:
        try:
            own = self._listener.accept()
        except OSError:  # the connection waits, and the listener stays readable
            self._pause_accepting()
            return
        if own is not None:
            self._on_connection(self._end(own))
        if len(self._ends) >= MAX_CONNECTIONS:
            self._pause_accepting()

    def _pause_accepting(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_MS / 1000
        self.unwatch(self._listener.fileno())

    def _resume_accepting(self) -> None:
        if self._paused_until is None or time.monotonic() < self._paused_until:
            return
        if len(self._ends) < MAX_CONNECTIONS:
            self._paused_until = None
            self.watch(self._listener.fileno(), self._accept)

    def _on_connection(self, end: _End) -> None:
        """Handle a new connection of a process on this host."""
        raise NotImplementedError

    def _close_sockets(self) -> None:
        """Close the sockets of the subclass, before the thread ends."""


class ServingRelay(_Relay):
    """The relay on the host of the store. Connections of this host and streams of other hosts reach
    the store through the signed listener.

    Args:
        listeners: listeners of the store.
        keys: keys of the round.
        address: address or name of this host to which the other hosts connect.
    """

    def __init__(
        self, listeners: tuple[UserListener, SignedListener], keys: RoundKeys, address: str
    ) -> None:
        user_listener, self._signed_listener = listeners
        super().__init__(user_listener)
        self._keys = keys
        self._streams: dict[tuple[bytes, bytes], _End] = {}
        self._newest: dict[bytes, bytes] = {}
        """Peer → number of the stream that it began last; numbers rise."""
        zap = self._context.socket(zmq.REP)
        self._open.add(zap)
        zap.bind(ZAP)
        self._zap = zap
        router = self._router = self._context.socket(zmq.ROUTER)
        self._open.add(router)
        keys.serve(router, b"store")
        router.sndhwm = router.rcvhwm = 0  # no limit: the queued data is that of the user's own job
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.maxmsgsize = _MAX_FRAME_BYTES
        self._host_listener = HostListener(router, address)
        self.port = self._host_listener.port
        """Port to which the relays of other hosts connect."""
        self.watch(self._host_listener.monitor, self._host_listener.read_monitor)
        self.watch(zap, self._answer_zap)
        self.watch(router, self._receive)
        self._start()

    def _timeout_ms(self) -> int | None:
        paused_ms, wait_s = super()._timeout_ms(), self._host_listener.wait_s
        return paused_ms if wait_s is None or paused_ms is not None else int(wait_s * 1000)

    def _on_turn(self) -> None:
        if not self._host_listener.open:
            self._host_listener.read_monitor()

    def _answer_zap(self, _: int) -> None:
        """Answer a ZAP request: may this key connect? (rfc.zeromq.org/spec/27)"""
        self._zap.send_multipart(self._keys.answered(self._zap.recv_multipart()))

    def _on_connection(self, end: _End) -> None:
        inner = self._inner(end.take)
        if inner is not None:
            end.far = inner.take

    def _inner(self, back: Callable[[bytes], None]) -> _End | None:
        """Return a new connection to the store, whose data is passed to ``back``; None if there is
        none.
        """
        try:
            inner = (
                self._end(self._signed_listener.connect())
                if len(self._ends) < MAX_CONNECTIONS
                else None
            )
        except OSError:
            inner = None
        if inner is None:
            back(_END_OF_STREAM)  # the client tries again
            return None
        inner.far = back
        return inner

    def _receive(self, _: int) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) == 3:
                self._handle_frame(*frames)

    def _handle_frame(self, peer: bytes, number: bytes, data: bytes) -> None:
        inner = self._streams.get((peer, number))
        is_new = number > self._newest.get(peer, b"")
        if is_new:
            self._newest[peer] = number
        # What arrives on a stream that has ended here is the rest of it: the other relay does not
        # know of its end yet. It must not begin a connection to the store.
        if inner is None and data and is_new:

            def send_back(answer: bytes) -> None:
                if not answer:
                    self._streams.pop((peer, number), None)
                self._send([peer, number, answer])

            inner = self._inner(send_back)
            if inner is not None:
                self._streams[peer, number] = inner
        if inner is not None:
            if not data:
                self._streams.pop((peer, number), None)
            inner.take(data)

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # The host is lost. Its connections here are closed when the round ends.

    def _close_sockets(self) -> None:
        self._signed_listener.close()
        self._host_listener.close()


class CallingRelay(_Relay):
    """The relay on a host without the store. Every connection of this host is a stream to the host
    of the store.

    Args:
        keys: keys of the round.
        host: address of the host of the store.
        port: port of its relay.
    """

    def __init__(self, keys: RoundKeys, host: str, port: int) -> None:
        super().__init__(UserListener())
        self._numbers = itertools.count()
        self._streams: dict[bytes, _End] = {}
        self._readable_end, self._writable_end = socket.socketpair()
        self.connected = False
        """Whether the other relay has accepted the key."""
        self.over = False
        """Whether the relay has closed because the other one has ended."""
        self.trouble = "it does not answer"
        """Reason why there is no connection yet."""
        dealer = self._dealer = self._context.socket(zmq.DEALER)
        self._open.add(dealer)
        keys.call(dealer)
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.maxmsgsize = _MAX_FRAME_BYTES
        dealer.ipv6 = ":" in host
        dealer.reconnect_ivl = _RETRY_MS
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._monitor = dealer.get_monitor_socket()
        self._open.add(self._monitor)
        self.watch(self._monitor, self._on_event)
        self.watch(dealer, self._receive)
        try:
            dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.trouble = error.strerror or str(error)
        self._start()

    def fileno(self) -> int:
        """Return a file descriptor, readable once ``connected`` or ``over`` is true."""
        return self._readable_end.fileno()

    def _on_event(self, _: int) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._writable_end.send(b"+")
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self.trouble = "it does not accept this job's key"
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            self._running = False  # the contents of the store are lost with it

    def _on_connection(self, end: _End) -> None:
        number = _STREAM.pack(next(self._numbers))
        self._streams[number] = end

        def send(data: bytes) -> None:
            if not data:
                self._streams.pop(number, None)
            self._dealer.send_multipart([number, data])

        end.far = send

    def _receive(self, _: int) -> None:
        while True:
            try:
                number, data = self._dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            end = self._streams.get(number) if data else self._streams.pop(number, None)
            if end is not None:
                end.take(data)

    def _close_sockets(self) -> None:
        self.connected, self.over = False, True
        self._writable_end.close()


TIMEOUT = timedelta(seconds=300)
_UNPROTECTED = (
    "malletrain launcher: this kernel signs no TCP segments (no MD5, as under FIPS), so other "
    "users of this node can reach the store of the round. Give leases whole nodes."
)


def _keys(job: str, generation: int) -> RoundKeys:
    return RoundKeys(job_secret(), f"{job}/{generation}")


class ServedStore:
    """The store of a round, in this process."""

    def __init__(self, job: str, generation: int, host: str) -> None:
        """Serve the store.

        Args:
            job: id of the job.
            generation: number of the round.
            host: address of this node for other nodes.

        Raises:
            OSError: no port can be opened.
            ValueError: this process does not have the job's secret.
        """
        keys = _keys(job, generation)
        listeners = listener_pair()
        if not listeners[1].enforced:
            print(_UNPROTECTED, flush=True)
        self._relay = ServingRelay(listeners, keys, host)
        self.host = host
        self.port = self._relay.port
        """Port to which the launchers of other nodes connect."""
        self.local_port = self._relay.local_port
        """Loopback port to which the processes of this node connect."""
        # TCPStore's own client connects to the same port number as its server, but through the user
        # listener. So both listeners have one port number.
        self.store: TCPStore | None = None
        try:
            self.store = TCPStore(
                USER_ADDRESS,
                self.local_port,
                is_master=True,
                wait_for_workers=False,
                timeout=TIMEOUT,
                master_listen_fd=listeners[1].duplicate(),
                use_libuv=torch_release() >= (2, 8),  # that of 2.7 takes no open socket
            )
        except (OSError, RuntimeError):
            self._relay.close()
            raise

    def close(self) -> None:
        """Close the store. It ends with its last user."""
        self.store = None
        self._relay.close()


class ReachedStore:
    """The store of a round at another node."""

    def __init__(self, job: str, generation: int, host: str, port: int) -> None:
        """Start to connect. Processes that connect before that is done wait.

        Args:
            job: id of the job.
            generation: number of the round.
            host: address of the store, from the node of rank 0.
            port: its port.

        Raises:
            ValueError: this process does not have the job's secret.
        """
        self._relay = CallingRelay(_keys(job, generation), host, port)
        self.local_port = self._relay.local_port
        """Loopback port to which the processes of this node connect."""
        self.store: TCPStore | None = None
        """Client of the store; None until one is made."""

    @property
    def connected(self) -> bool:
        """Whether the other node's launcher has accepted the connection."""
        return self._relay.connected

    @property
    def trouble(self) -> str:
        """Reason why it is not connected."""
        return "it has closed the connection" if self._relay.over else self._relay.trouble

    @property
    def over(self) -> bool:
        """Whether the connection has been closed again."""
        return self._relay.over

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when the store is connected, or lost."""
        return self._relay.fileno()

    def close(self) -> None:
        """Close the connection."""
        self.store = None
        self._relay.close()


class StoreClient(threading.Thread):
    """A client of a store behind a port of this node, made in a thread that can be abandoned.

    TCPStore's constructor cannot be interrupted. If the store is lost between the connection and
    its first response, as with a node that is preempted, it tries again until its timeout.
    :meth:`fileno` becomes readable when the attempt has ended.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True, name="store-connection")
        self._port = port
        self._readable_end, self._writable_end = socket.socketpair()
        self.store: TCPStore | None = None
        """The client; None until the attempt has succeeded."""
        self.error: Exception | None = None
        """Error of the attempt; None if it has not failed."""
        self.over = False
        """Whether the attempt has ended."""
        self.start()

    def fileno(self) -> int:
        return self._readable_end.fileno()

    def run(self) -> None:
        try:
            self.store = TCPStore(
                USER_ADDRESS, self._port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        except (OSError, RuntimeError) as error:
            self.error = error
        self.over = True
        self._writable_end.close()
