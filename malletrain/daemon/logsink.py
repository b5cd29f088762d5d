"""Logs of jobs on the daemon's disk: one file a job, round and stream, written at the offsets that
agents name.

Writing is idempotent (a chunk sent twice lands on itself), so agents may send again whatever was
not acknowledged. Reading strings the rounds of a stream together, oldest first. It does not decide
who may read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from malletrain.protocol.views import LogView

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_NAME = re.compile(r"g(\d+)-(.+?)@(.+)\.log$")
_NUMBER = re.compile(r"[0-9]{1,15}")


class LogSink:
    """The folder ``root/<job>/g<generation>-<stream>@<node>.log``; at most ``limit_bytes`` a file
    are kept.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit = limit_bytes

    def write(
        self, job: str, generation: int, stream: str, node: str, offset: int, data: bytes
    ) -> int:
        """Keep ``data`` at ``offset``; returns the offset up to which the file is whole. Raises
        OSError when the disk refuses.
        """
        folder = self._root / _safe(job)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"g{generation}-{_safe(stream)}@{_safe(node)}.log"
        end = offset + len(data)
        if offset >= self._limit:
            return end
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            if stream in ("launcher", "service") and offset == 0:
                os.ftruncate(fd, 0)  # a new launcher on the same node begins its logs anew
            if offset > size:
                return size
            os.pwrite(fd, data[: self._limit - offset], offset)
        finally:
            os.close(fd)
        return end

    def read(self, job: str, stream: str, cursor: str, limit: int, ended: bool) -> LogView:
        """Up to ``limit`` bytes of ``stream`` after ``cursor`` (empty: from the beginning;
        ``tail:N``: the last N bytes).

        Rounds are separated by a line that names them when there is more than one.
        """
        files = self._files(job, stream)
        streams = self._streams(job)
        if cursor.startswith("tail:"):
            size = cursor[5:]
            cursor = self._tail(files, int(size)) if _NUMBER.fullmatch(size) else ""
        start_key, offset = _parse(cursor)
        text: list[str] = []
        room = limit
        for index, (key, path) in enumerate(files):
            if key < start_key:
                continue
            if key > start_key:
                offset = 0
            if offset == 0 and len(files) > 1 and path.stat().st_size:
                text.append(f"--- round {key[0]} on {key[1]} ---\n")
            offset = min(offset, path.stat().st_size)
            with path.open("rb") as f:
                f.seek(offset)
                data = _whole(f.read(room), last=index == len(files) - 1)
            text.append(data.decode("utf-8", "replace"))
            room -= len(data)
            start_key, offset = key, offset + len(data)
            if room <= 0 or path.stat().st_size > offset:
                return LogView(
                    "".join(text), f"{key[0]}:{offset}:{key[1]}", bool(data), streams, ended
                )
        return LogView(
            "".join(text), f"{start_key[0]}:{offset}:{start_key[1]}", False, streams, ended
        )

    def tail(self, job: str, stream: str, size: int) -> str:
        """The last ``size`` bytes of a stream as text."""
        return self.read(job, stream, f"tail:{size}", size, ended=True).text

    def _files(self, job: str, stream: str) -> list[tuple[tuple[int, str], Path]]:
        found = [(key, path) for key, name, path in self._all(job) if name == stream]
        return sorted(found)

    def _streams(self, job: str) -> tuple[str, ...]:
        names = {name for _, name, _ in self._all(job)}
        return tuple(sorted(names, key=lambda n: (not n.startswith("rank"), len(n), n)))

    def _all(self, job: str) -> Iterator[tuple[tuple[int, str], str, Path]]:
        folder = self._root / _safe(job)
        for path in folder.glob("g*.log") if folder.is_dir() else ():
            if match := _NAME.match(path.name):
                yield (int(match[1]), match[3]), match[2], path

    @staticmethod
    def _tail(files: list[tuple[tuple[int, str], Path]], size: int) -> str:
        for (generation, node), path in reversed(files):
            length = path.stat().st_size
            if length >= size:
                return f"{generation}:{length - size}:{node}"
            size -= length
        return ""


def _safe(name: str) -> str:
    """A name that stays in its folder."""
    return _UNSAFE.sub("_", name) if name.strip(".") else "_"


def _parse(cursor: str) -> tuple[tuple[int, str], int]:
    generation, _, rest = cursor.partition(":")
    offset, _, node = rest.partition(":")
    if not (_NUMBER.fullmatch(generation) and _NUMBER.fullmatch(offset)):
        return (-1, ""), 0
    return (int(generation), node), int(offset)


def _whole(data: bytes, *, last: bool) -> bytes:
    """``data`` without a character cut in half at its end (unless nothing would be left)."""
    for cut in range(1, min(4, len(data)) + 1):
        byte = data[-cut]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-cut] if cut < need and len(data) > cut and last else data
    return data
