"""The file system of ``benchmarks/datacache.py``: a server on the loopback that returns single
files, or tar shards of them, with a delay and a bandwidth; and its client.

A request is a letter and a number: ``G`` a file, ``T`` a shard, ``S`` the counts so far. The answer
is a length and that number of bytes. The server counts what it returns.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import multiprocessing
import os
import socket
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IMAGE_BYTES = 784
SHARD = 250
"""Files of a tar shard."""
_REQUEST, _LENGTH, _COUNTS = struct.Struct("<cI"), struct.Struct("<I"), struct.Struct("<QQ")


@dataclass(frozen=True)
class SourceCounts:
    """Counts of the server."""

    requests: int
    bytes: int


def fashion_mnist(folder: Path, samples: int) -> list[bytes]:
    """Return the first files of the data set: an image and its label, 785 bytes each."""
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, IMAGE_BYTES)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return [images[i].tobytes() + bytes([labels[i]]) for i in range(min(samples, len(images)))]


def tar_shards(files: list[bytes]) -> list[bytes]:
    """Return the files as tars, as WebDataset has them."""
    shards = []
    for start in range(0, len(files), SHARD):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number in range(start, min(start + SHARD, len(files))):
                info = tarfile.TarInfo(f"{number:06d}.bin")
                info.size = len(files[number])
                tar.addfile(info, io.BytesIO(files[number]))
        shards.append(buffer.getvalue())
    return shards


class SourceServer:
    """The server, in a process of its own. ``delay_s``: time to the first byte of a file;
    ``bytes_per_s``: bandwidth of all clients together.
    """

    def __init__(self, files: list[bytes], delay_s: float, bytes_per_s: float) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(listener.getsockname()[1])
        content = {b"G": files, b"T": tar_shards(files)}
        serve = multiprocessing.get_context("fork").Process(
            target=_serve, args=(listener, content, delay_s, bytes_per_s), daemon=True
        )
        serve.start()
        listener.close()
        self._process = serve

    def counts(self) -> SourceCounts:
        """Return the counts so far."""
        client = SourceClient(self.port)
        counts = SourceCounts(*_COUNTS.unpack(client.get(b"S", 0)))
        client.close()
        return counts

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.join()


def _serve(listener: socket.socket, content: Any, delay_s: float, bytes_per_s: float) -> None:
    counts = [0, 0]
    free_at = 0.0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        loop = asyncio.get_running_loop()
        try:
            while True:
                kind, number = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
                if kind == b"S":
                    data = _COUNTS.pack(*counts)
                else:
                    data = content[kind][number]
                    counts[0] += 1
                    counts[1] += len(data)
                    free_at = max(free_at, loop.time()) + len(data) / bytes_per_s
                    await asyncio.sleep(delay_s + free_at - loop.time())
                writer.write(_LENGTH.pack(len(data)) + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    asyncio.run(serve())


class SourceClient:
    """The connection of one process to the server. A forked process makes one of its own."""

    def __init__(self, port: int) -> None:
        self._port, self._process = port, 0
        self._socket: socket.socket | None = None

    def get(self, kind: bytes, number: int) -> bytes:
        """Return a file (``G``) or a shard (``T``)."""
        if self._socket is None or self._process != os.getpid():
            self._socket = socket.create_connection(("127.0.0.1", self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._process = os.getpid()
        self._socket.sendall(_REQUEST.pack(kind, number))
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        assert self._socket is not None
        data = bytearray()
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise ConnectionError("The server of the benchmark is gone.")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
