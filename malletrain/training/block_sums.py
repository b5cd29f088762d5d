"""Check sums of the blocks of a file, so that a part of the file can be read and checked without
the rest.

Decides the block size. Returns no byte of a block whose check sum is wrong.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

MIN_BLOCK_BYTES = 4096
"""Minimum block size, bytes: a page, because disks and file systems read whole pages."""
MAX_BLOCKS = 1 << 14
"""Maximum number of blocks of a file; their check sums take 64 kB."""
_PIECE = 4 << 20


class BlockSums(NamedTuple):
    """Check sums of one file."""

    block: int
    """Block size, bytes; the last block may be shorter."""
    sums: bytes
    """CRC-32 of each block, 4 bytes each, little-endian."""


def block_of(size: int) -> int:
    """Return the block size, bytes, for a file of ``size`` bytes: a power of two."""
    block = MIN_BLOCK_BYTES
    while block * MAX_BLOCKS < size:
        block *= 2
    return block


def sums_of(path: str) -> tuple[int, int, BlockSums]:
    """Return (size in bytes, CRC-32, block check sums) of a file. Reads it once. Raises OSError."""
    with open(path, "rb") as file:
        block = block_of(os.fstat(file.fileno()).st_size)
        size = total = 0
        sums: list[int] = []
        while piece := file.read(max(_PIECE, block)):
            size += len(piece)
            total = zlib.crc32(piece, total)
            view = memoryview(piece)
            sums += (zlib.crc32(view[at : at + block]) for at in range(0, len(piece), block))
    return size, total, BlockSums(block, b"".join(s.to_bytes(4, "little") for s in sums))


class BlockFile:
    """Reads parts of a file. If they are read in ascending order, no block is read twice. A context
    manager that closes the file.

    Args:
        path: path of the file.
        sums: check sums of its blocks; with None only the requested bytes are read, and not
            checked.
        damaged: creates the exception for a file that is not what was written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, sums: BlockSums | None, damaged: Callable[[], Exception]) -> None:
        self._damaged = damaged
        self._block = sums.block if sums else 1
        self._sums = struct.unpack(f"<{len(sums.sums) // 4}I", sums.sums) if sums else None
        self.bytes_read = 0
        self._last_block_at, self._last_block = 0, b""
        """Offset and content of the last block that was read."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``offset``, in a writable buffer.

        Raises:
            Exception: the exception of ``damaged``, if a block is not what was written, or the file
                is too short.
            OSError: the disk's error.
        """
        if offset + length > self._size:
            raise self._damaged()
        first = offset - offset % self._block
        end = min(self._size, -(-(offset + length) // self._block) * self._block)
        data = bytearray(end - first)
        cached = 0
        if self._last_block_at <= first < self._last_block_at + len(self._last_block):
            head = self._last_block[first - self._last_block_at : end - self._last_block_at]
            cached = len(head)
            data[:cached] = head
        self._fill(first + cached, memoryview(data)[cached:])
        if self._sums is not None:
            self._last_block_at = (end - 1) // self._block * self._block if end else 0
            self._last_block = bytes(memoryview(data)[self._last_block_at - first :])
        return memoryview(data)[offset - first : offset - first + length]

    def _fill(self, at: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with whole blocks of the file from offset ``at``."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], at + done)
            if count == 0:
                raise self._damaged()
            done += count
        self.bytes_read += done
        if self._sums is None:
            return
        for number, start in enumerate(range(0, len(buffer), self._block), at // self._block):
            sum_ = zlib.crc32(buffer[start : start + self._block])
            if number >= len(self._sums) or self._sums[number] != sum_:
                raise self._damaged()
