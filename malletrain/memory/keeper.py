"""Serves the snapshots in a node's memory to the other nodes of the job, and receives the snapshots
that they hand over. Runs in a thread of the launcher, which outlives the workers.

A received file has a temporary name until it is complete and its check sum is correct. Until the
first connection there is only a port and a sleeping thread, because most jobs store nothing in
memory. Decides neither what is stored nor what is restored.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import zlib
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import zmq

from malletrain.memory.folder import MemoryFolder, remove, unfinished
from malletrain.memory.keeper_messages import (
    PIECE,
    Answer,
    KeeperRequest,
    keys,
    remove_queue_limits,
)
from malletrain.protocol.fault_points import FaultPoint, reached
from malletrain.protocol.host_listener import HostListener, listening
from malletrain.protocol.job_keys import ZAP

IDLE_S = 60.0
"""Time without data, seconds, after which a file transfer is aborted."""
_POLL_MS = 5000

log = logging.getLogger(__name__)


@dataclass
class _IncomingFile:
    """A file that is being received."""

    file: int
    temporary: Path
    final: Path
    size: int
    got: int = 0
    total: int = 0
    last_message: float = 0.0


class Keeper:
    """The keeper of one job on this node.

    Args:
        folder: the folder that it serves and fills.
        secret: secret of the job; only clients with this secret can connect.
        job: id of the job; only clients of this job can connect.
        host: address of this node for the other nodes.

    Raises:
        OSError: no port is available.
        ValueError: the secret is invalid.
    """

    def __init__(self, folder: MemoryFolder, secret: bytes, job: str, host: str) -> None:
        self._folder = folder
        self._host = host
        self._incoming: dict[tuple[bytes, str], _IncomingFile] = {}
        self._count = itertools.count()
        self._keys = keys(secret, job)
        self._port = listening(host)
        port = self._port.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """Address for the other nodes, as ``host:port``."""
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="malletrain-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the files stay. A second call does nothing."""
        if self._stopped >= 0:
            os.close(self._stopped)
            self._stopped = -1
            self._thread.join()

    # --- in the thread ---

    def _run(self) -> None:
        try:
            if self._stop not in wait([self._stop, self._port]):
                self._serve()
        finally:
            for key in list(self._incoming):
                self._abort(key)
            os.close(self._stop)
            self._port.close()

    def _serve(self) -> None:
        """Serve connections until :meth:`close`."""
        context = zmq.Context()
        try:
            zap = context.socket(zmq.REP)
            zap.bind(ZAP)
            self._router = context.socket(zmq.ROUTER)
            self._keys.serve(self._router, b"memory")
            remove_queue_limits(self._router)
            listener = HostListener(self._router, self._host, self._port)
            poller = zmq.Poller()
            for socket in (zap, self._router, self._stop, listener.monitor):
                poller.register(socket, zmq.POLLIN)
            while self._stop not in (ready := dict(poller.poll(self._timeout_ms(listener)))):
                if zap in ready:
                    zap.send_multipart(self._keys.answered(zap.recv_multipart()))
                if listener.monitor in ready or not listener.open:
                    listener.read_monitor()
                if self._router in ready:
                    self._handle(self._router.recv_multipart())
                self._abort_idle()
            listener.close()
        except zmq.ZMQError as error:  # clients cannot connect
            log.warning("no snapshots of other nodes can be taken or given: %s", error)
        finally:
            context.destroy(linger=0)

    def _timeout_ms(self, listener: HostListener) -> int | None:
        """Return the maximum time until the next turn, ms; None for no limit."""
        if listener.wait_s is not None:
            return int(listener.wait_s * 1000)
        return _POLL_MS if self._incoming else None

    def _handle(self, frames: list[bytes]) -> None:
        peer = frames[0]
        if len(frames) != 3:
            return
        try:
            ask = msgspec.msgpack.decode(frames[1], type=KeeperRequest)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        data, error_text = b"", ""
        try:
            data = self._answer(peer, ask, frames[2])
        except (OSError, ValueError) as error:
            error_text = str(error)
            self._abort((peer, ask.name))
        answer = msgspec.msgpack.encode(Answer(ask.number, error_text))
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, answer, data], zmq.DONTWAIT, copy=False)

    def _answer(self, peer: bytes, ask: KeeperRequest, data: bytes) -> bytes:
        final = self._folder.file(ask.name)
        if ask.verb == "read":
            return _read(final, ask.offset, min(ask.length, PIECE))
        if ask.verb == "begin":
            self._begin(peer, ask, final)
            return b""
        arriving = self._incoming.get((peer, ask.name))
        if arriving is None:
            raise ValueError(f"{ask.name} was not begun.")
        arriving.last_message = time.monotonic()
        if ask.verb == "write":
            self._write(arriving, ask, data)
        elif ask.verb == "end":
            self._end((peer, ask.name), arriving, ask.total)
        else:
            raise ValueError(f"A keeper does not know the request {ask.verb[:20]!r}.")
        return b""

    def _begin(self, peer: bytes, ask: KeeperRequest, final: Path) -> None:
        self._abort((peer, ask.name))
        reserved = sum(a.size - a.got for a in self._incoming.values())
        self._folder.claim(ask.length + reserved)
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = unfinished(final).with_name(f"{unfinished(final).name}-{next(self._count)}")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._incoming[peer, ask.name] = _IncomingFile(
            file, temporary, final, ask.length, last_message=time.monotonic()
        )

    def _write(self, arriving: _IncomingFile, ask: KeeperRequest, data: bytes) -> None:
        if ask.offset != arriving.got or ask.offset + len(data) > arriving.size:
            raise ValueError(f"A piece of {ask.name} came out of turn.")
        view = memoryview(data)
        while view:
            written = os.write(arriving.file, view)
            view = view[written:]
        arriving.got += len(data)
        arriving.total = zlib.crc32(data, arriving.total)

    def _end(self, key: tuple[bytes, str], arriving: _IncomingFile, total: int) -> None:
        if (arriving.got, arriving.total) != (arriving.size, total):
            raise ValueError(f"{key[1]} did not arrive as it was sent.")
        reached(FaultPoint.KEEPER_TAKES)
        os.replace(arriving.temporary, arriving.final)  # if it fails, the file is removed
        del self._incoming[key]
        os.close(arriving.file)

    def _abort_idle(self) -> None:
        oldest = time.monotonic() - IDLE_S
        for key in [
            key for key, arriving in self._incoming.items() if arriving.last_message < oldest
        ]:
            self._abort(key)

    def _abort(self, key: tuple[bytes, str]) -> None:
        arriving = self._incoming.pop(key, None)
        if arriving is not None:
            os.close(arriving.file)
            remove(arriving.temporary)


def _read(path: Path, offset: int, length: int) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return os.pread(file.fileno(), length, offset)
