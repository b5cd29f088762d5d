"""Check sums of the blocks of a file, so that a part of it can be read and checked alone.

Decides how large the blocks are, and that no byte is handed on whose block is not what was written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

SMALLEST = 4096
"""Bytes of the smallest block: a page, of which disks and file systems read whole ones."""
MOST = 1 << 14
"""Blocks of a file, at most: 64 kB of check sums."""
_PIECE = 4 << 20


class BlockSums(NamedTuple):
    """Of one file."""

    block: int
    """Bytes of a block; the last one may be shorter."""
    sums: bytes
    """CRC-32 of each block, 4 bytes each, little-endian."""


def block_of(size: int) -> int:
    """Bytes of a block of a file of ``size`` bytes: a power of two."""
    block = SMALLEST
    while block * MOST < size:
        block *= 2
    return block


def sums_of(path: str) -> tuple[int, int, BlockSums]:
    """(size, CRC-32, those of the blocks) of a file, which is read once. Raises OSError."""
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
    """A file of which parts are read, in ascending order best: no block is read twice then. A
    context: it is closed at its end.

    Args:
        path: of the file.
        sums: of its blocks; without them exactly what is asked for is read, and not checked.
        damaged: makes the exception for a file that is not what was written.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, sums: BlockSums | None, damaged: Callable[[], Exception]) -> None:
        self._damaged = damaged
        self._block = sums.block if sums else 1
        self._sums = struct.unpack(f"<{len(sums.sums) // 4}I", sums.sums) if sums else None
        self.bytes_read = 0
        self._last_block_at, self._last_block = 0, b""
        """The last block that was read."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._size = os.fstat(self._file).st_size

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, offset: int, length: int) -> memoryview:
        """So many bytes from there, which may be written to.

        Raises:
            Exception: what ``damaged`` makes, for a block that is not what was written, or a file
                that is too short.
            OSError: the disk's reason.
        """
        if offset + length > self._size:
            raise self._damaged()
        first = offset - offset % self._block
        end = min(self._size, -(-(offset + length) // self._block) * self._block)
        data = bytearray(end - first)
        had = 0
        if self._last_block_at <= first < self._last_block_at + len(self._last_block):
            head = self._last_block[first - self._last_block_at : end - self._last_block_at]
            had = len(head)
            data[:had] = head
        self._fill(first + had, memoryview(data)[had:])
        if self._sums is not None:
            self._last_block_at = (end - 1) // self._block * self._block if end else 0
            self._last_block = bytes(memoryview(data)[self._last_block_at - first :])
        return memoryview(data)[offset - first : offset - first + length]

    def _fill(self, at: int, room: memoryview) -> None:
        """Have ``room`` be what the file has at ``at``, whole blocks of it."""
        done = 0
        while done < len(room):
            count = os.preadv(self._file, [room[done:]], at + done)
            if count == 0:
                raise self._damaged()
            done += count
        self.bytes_read += done
        if self._sums is None:
            return
        for number, start in enumerate(range(0, len(room), self._block), at // self._block):
            sum_ = zlib.crc32(room[start : start + self._block])
            if number >= len(self._sums) or self._sums[number] != sum_:
                raise self._damaged()
