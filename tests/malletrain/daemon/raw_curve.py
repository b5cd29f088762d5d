"""A client of CURVE that is not libzmq's (RFC 23 and 26 of ZeroMQ): it may begin a message and
never end it, which libzmq's own clients keep to themselves.
"""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import zmq
from zmq.utils import z85

from malletrain.identity.keys import KeyPair

KEY, MAC, NONCE = 32, 16, 24
MORE = 1
LONG, COMMAND = 2, 4


def sodium() -> ctypes.CDLL:
    """The library that pyzmq's libzmq encrypts with."""
    [path] = Path(zmq.__file__).parents[1].glob("pyzmq.libs/libsodium*")
    return ctypes.CDLL(str(path))


class RawClient:
    """Connected to ``endpoint``, once its key was accepted."""

    def __init__(self, endpoint: str, server: str, own: KeyPair) -> None:
        self._sodium = sodium()
        self._count = 0
        self._server, self._own = z85.decode(server.encode()), own
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self._file = self.socket.makefile("rb")
        self.socket.sendall(
            b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        )
        self._file.read(64)
        self._shake_hands()

    def send(self, data: bytes, more: bool = False) -> None:
        """One frame of a message."""
        body = bytes([MORE if more else 0]) + data
        self._frame(0, b"\x07MESSAGE" + self._sealed(b"CurveZMQMESSAGEC", body, self._theirs))

    def _shake_hands(self) -> None:
        public, self._secret = ctypes.create_string_buffer(KEY), ctypes.create_string_buffer(KEY)
        self._sodium.crypto_box_keypair(public, self._secret)
        hello = self._sealed(b"CurveZMQHELLO---", bytes(64), self._server)
        self._frame(COMMAND, b"\x05HELLO\x01\x00" + bytes(72) + public.raw + hello)
        welcome = self._read()[8:]
        opened = ctypes.create_string_buffer(128)
        nonce, box = b"WELCOME-" + welcome[:16], welcome[16:]
        assert not self._sodium.crypto_box_open_easy(
            opened, box, len(box), nonce, self._server, self._secret
        )
        self._theirs, cookie = opened.raw[:KEY], opened.raw[KEY:]
        salt = os.urandom(16)
        vouch = self._box(
            public.raw + self._server,
            b"VOUCH---" + salt,
            self._theirs,
            z85.decode(self._own.secret.encode()),
        )
        metadata = b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
        plaintext = z85.decode(self._own.public.encode()) + salt + vouch + metadata
        initiate = self._sealed(b"CurveZMQINITIATE", plaintext, self._theirs)
        self._frame(COMMAND, b"\x08INITIATE" + cookie + initiate)
        assert self._read().startswith(b"\x05READY")

    def _sealed(self, prefix: bytes, data: bytes, to: bytes) -> bytes:
        self._count += 1
        nonce = self._count.to_bytes(8, "big")
        return nonce + self._box(data, prefix + nonce, to, self._secret.raw)

    def _box(self, data: bytes, nonce: bytes, to: bytes, secret: bytes) -> bytes:
        assert len(nonce) == NONCE
        box = ctypes.create_string_buffer(len(data) + MAC)
        self._sodium.crypto_box_easy(box, data, ctypes.c_ulonglong(len(data)), nonce, to, secret)
        return box.raw

    def _frame(self, flags: int, data: bytes) -> None:
        if len(data) < 256:
            head = bytes([flags, len(data)])
        else:
            head = bytes([flags | LONG]) + len(data).to_bytes(8, "big")
        self.socket.sendall(head + data)

    def _read(self) -> bytes:
        flags = self._file.read(1)[0]
        size = int.from_bytes(self._file.read(8 if flags & LONG else 1), "big")
        return self._file.read(size)

    def wait_for_the_end(self) -> None:
        """Wait until the other side has ended the connection."""
        while self._file.read(1):
            pass

    def close(self) -> None:
        self.socket.close()
