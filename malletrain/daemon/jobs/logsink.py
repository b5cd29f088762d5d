"""Stores the logs of jobs on the daemon's disk: a file for each job, round, stream and node,
written at the offsets that agents state.

Writing is idempotent, so agents may repeat unacknowledged pieces. If the end of a log is known to
be missing, a line at its end says so. Reading joins the rounds of a stream, the oldest first. It
does not decide who may read.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import structlog

from malletrain.config.units import format_size
from malletrain.protocol.views import LogView

log = structlog.get_logger(__name__)

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_NAME = re.compile(r"g(\d+)-(.+?)@(.+)\.log$")
_NUMBER = re.compile(r"[0-9]{1,15}")
JOBS_AT_ONCE = 100
"""Maximum number of jobs whose logs are deleted by one call."""


def delete_old_logs(root: Path, before: float, unfinished: Collection[str]) -> int:
    """Delete the logs of ended jobs to which nothing was written since a time.

    Args:
        root: folder with a folder of logs for each job.
        before: the time, seconds since the epoch.
        unfinished: ids of the jobs whose logs stay whatever their age.

    Returns:
        The number of jobs whose logs were deleted, at most :data:`JOBS_AT_ONCE`.
    """
    stay = {_safe(job) for job in unfinished}
    deleted = 0
    try:
        folders = list(os.scandir(root))
    except FileNotFoundError:  # no job has written one yet
        return 0
    except OSError as error:
        log.warning("old logs not deleted", folder=str(root), reason=str(error))
        return 0
    for folder in folders:
        if deleted == JOBS_AT_ONCE:
            break
        try:
            is_old = folder.is_dir(follow_symlinks=False) and _last_write(folder) < before
        except OSError:  # somebody deletes it just now, or it cannot be read
            continue
        if is_old and folder.name not in stay:
            shutil.rmtree(folder.path, ignore_errors=True)
            deleted += not os.path.lexists(folder.path)
    return deleted


def _last_write(folder: os.DirEntry[str]) -> float:
    """Return the newest time of change in a folder, epoch seconds."""
    times = [folder.stat(follow_symlinks=False).st_mtime]
    times += [file.stat(follow_symlinks=False).st_mtime for file in os.scandir(folder.path)]
    return max(times)


class LogSink:
    """The files ``root/<job>/g<generation>-<stream>@<node>.log``. Each file keeps at most
    ``limit_bytes``.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit = limit_bytes
        self._incomplete: dict[Path, tuple[str, int]] = {}
        """Incomplete log → its node, and its size on the node in bytes."""

    def write(
        self,
        job: str,
        generation: int,
        stream: str,
        node: str,
        offset: int,
        data: bytes,
        size: int = 0,
    ) -> int:
        """Write a piece of a log.

        Args:
            job: id of the job.
            generation: number of the round.
            stream: name of the stream, such as ``rank0``.
            node: node on which the log was written.
            offset: position of the piece, bytes.
            data: the piece.
            size: size of the log on its node, bytes.

        Returns:
            The offset up to which the file is complete.

        Raises:
            OSError: the file cannot be written.

        """
        path, end = self._path(job, generation, stream, node), offset + len(data)
        if offset >= self._limit:
            return end
        _unmark(path)
        end = self._write(path, offset, data)
        self._incomplete.pop(path, None)
        if end > self._limit:
            _mark(path, max(size, end) - self._limit, self._limit_reason(), at_least=True)
        elif size > end:
            self._incomplete[path] = (node, size)
        return end

    def ended(self, job: str, generation: int, stream: str, node: str, size: int) -> None:
        """Close a log: no more pieces of it arrive. If bytes are missing, its last line says so.

        Args:
            job: id of the job.
            generation: number of the round.
            stream: name of the stream.
            node: node on which the log was written.
            size: size of the log on its node, bytes.

        Raises:
            OSError: the line cannot be written.
        """
        path = self._path(job, generation, stream, node)
        self._incomplete.pop(path, None)
        _unmark(path)
        stored_bytes = path.stat().st_size if path.exists() else 0
        if stored_bytes < size:
            lost = f"{node} was given back before they were sent, and they are gone with it"
            _mark(
                path,
                size - stored_bytes,
                self._limit_reason() if stored_bytes >= self._limit else lost,
            )

    def gone(self, node: str) -> None:
        """Close the incomplete logs of a lost node. A log on a full disk, or one that an operator
        has deleted, gets no last line.
        """
        for path in [path for path, (where, _) in self._incomplete.items() if where == node]:
            _, size = self._incomplete.pop(path)
            lost = f"{node} was lost before they were sent"
            try:
                _mark(path, size - path.stat().st_size, lost, at_least=True)
            except OSError as error:
                log.warning("log not closed", file=str(path), reason=str(error))

    def _limit_reason(self) -> str:
        limit = format_size(self._limit)
        return f"of each log the first {limit} are kept ([jobs] log_limit)"

    def _path(self, job: str, generation: int, stream: str, node: str) -> Path:
        folder = self._root / _safe(job)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder / f"g{generation}-{_safe(stream)}@{_safe(node)}.log"

    def _write(self, path: Path, offset: int, data: bytes) -> int:
        end = offset + len(data)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_size
            if path.name.startswith("g0-") and offset == 0:
                os.ftruncate(fd, 0)  # a new launcher on the same node starts its logs again
            if offset > size:
                return size
            os.pwrite(fd, data[: self._limit - offset], offset)
        finally:
            os.close(fd)
        return end

    def read(self, job: str, stream: str, cursor: str, limit: int, ended: bool) -> LogView:
        """Return a piece of a stream. Several rounds are separated by lines with their names.

        Args:
            job: id of the job.
            stream: name of the stream.
            cursor: cursor of the previous answer; empty for the beginning, ``tail:N`` for the last
                N bytes.
            limit: maximum size of the piece, bytes.
            ended: whether the job has ended and the logs are complete.

        """
        files = self._files(job, stream)
        streams = self._streams(job)
        if cursor.startswith("tail:"):
            last = cursor[5:]
            cursor = self._tail(files, int(last)) if _NUMBER.fullmatch(last) else ""
        start_key, offset = _parse(cursor)
        text: list[str] = []
        remaining_bytes = limit
        for index, (key, path) in enumerate(files):
            if key < start_key:
                continue
            if key > start_key:
                offset = 0
            if offset == 0 and len(files) > 1 and path.stat().st_size:
                text.append(f"--- round {key[0]} on {key[1]} ---\n")
            size = path.stat().st_size
            offset = min(offset, size)
            with path.open("rb") as f:
                f.seek(offset)
                data = f.read(max(remaining_bytes, 4))  # at least one whole character
            grows = index == len(files) - 1 and not ended
            if offset + len(data) < size or grows:
                data = _whole(data)
            text.append(data.decode("utf-8", "replace"))
            remaining_bytes -= len(data)
            start_key, offset = key, offset + len(data)
            if remaining_bytes <= 0 or path.stat().st_size > offset:
                return LogView(
                    "".join(text), f"{key[0]}:{offset}:{key[1]}", bool(data), streams, ended
                )
        return LogView(
            "".join(text), f"{start_key[0]}:{offset}:{start_key[1]}", False, streams, ended
        )

    def _files(self, job: str, stream: str) -> list[tuple[tuple[int, str], Path]]:
        files = [(key, path) for key, name, path in self._all(job) if name == stream]
        return sorted(files)

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
    """Return the name without characters that could lead out of its folder."""
    return _UNSAFE.sub("_", name) if name.strip(".") else "_"


def _parse(cursor: str) -> tuple[tuple[int, str], int]:
    generation, _, rest = cursor.partition(":")
    offset, _, node = rest.partition(":")
    if not (_NUMBER.fullmatch(generation) and _NUMBER.fullmatch(offset)):
        return (-1, ""), 0
    return (int(generation), node), int(offset)


def _mark(path: Path, missing: int, why: str, *, at_least: bool = False) -> None:
    """Append a line to a log that says what is missing. The end of the log itself is stored in a
    file next to it, in case more pieces arrive.
    """
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        _end_of(path).write_text(str(end))
        file.seek(max(0, end - 1))
        newline = "" if file.read(1) in (b"", b"\n") else "\n"
        least = "At least " if at_least else ""
        note = f"{newline}--- {least}{missing:,} bytes of this log are missing: {why}. ---\n"
        file.write(note.encode())
    path.chmod(0o600)


def _unmark(path: Path) -> None:
    """Remove the line that :func:`_mark` has appended."""
    end_file = _end_of(path)
    if end_file.exists():
        # Empty if the disk was full: then there is no such line, nor if the log was deleted.
        if (end := end_file.read_text()).isdecimal() and path.exists():
            os.truncate(path, int(end))
        end_file.unlink()


def _end_of(path: Path) -> Path:
    return path.with_suffix(".end")


def _whole(data: bytes) -> bytes:
    """Return ``data`` without an incomplete UTF-8 character at its end, unless nothing would be
    left.
    """
    for cut in range(1, min(4, len(data)) + 1):
        byte = data[-cut]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-cut] if cut < length and len(data) > cut else data
    return data
