"""The process of an engine: started on a Unix socket in a folder that only its user may enter."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from llmserve.engines import engine_environment
from malletrain.waits import time_limit

LAST_LINES = 20
"""Maximum number of lines of an engine's output that are kept for messages."""
ERROR_LINES = 5
"""Maximum number of lines with errors that are also kept: after an error, an engine of many
processes may print hundreds of lines.
"""
_NAMES_ERROR = re.compile(r"^(?!.*\b(?:WARNING|INFO)\b).*\b\w*(?:Error|Exception): ")
MAX_LINE_BYTES = 1 << 20
STOP_S = 3.0
"""Seconds that an engine has between SIGTERM and SIGKILL."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class EngineProcess:
    """One run of an engine. Its output is printed here, too.

    Args:
        words: its command.
        socket: path on which it listens; an existing file is removed before it starts.
    """

    def __init__(self, words: Sequence[str], socket: Path) -> None:
        self.words, self.socket = list(words), socket
        self.lines: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
        """Its last lines, with the number of each."""
        self.errors: deque[tuple[int, str]] = deque(maxlen=ERROR_LINES)
        """The last lines that name an error."""
        self._printed = 0
        """Number of lines."""
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.ReadTransport | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: the command cannot be run.
        """
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        self.lines.clear()
        self.errors.clear()
        # A pipe of its own: asyncio's Process.wait() ends with the last process that has one of
        # asyncio's pipes, and the children of an engine may outlive it.
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=engine_environment(os.environ),
                preexec_fn=_begin,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        output = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb", 0)
        )
        self._reader = asyncio.create_task(self._read(output))

    async def wait(self) -> str:
        """Wait until it has ended, and end its children, which hold the memory that its next run
        needs. Return a sentence with its errors and its last lines.
        """
        assert self._process is not None
        code = await self._process.wait()
        _signal(self._process.pid, signal.SIGKILL)
        if self._reader is not None:
            # A child that left the group may keep the pipe open.
            await asyncio.wait([self._reader], timeout=1.0)
        self._close_output()
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        sentence = f"The engine ended ({how})."
        first = self.lines[0][0] if self.lines else 0
        errors = [text for number, text in self.errors if number < first]
        if errors:
            sentence += "\n".join([" Its last errors:", *errors]) + "\n"
        if self.lines:
            last = [text for _, text in self.lines]
            sentence += "\n".join(["Its last lines:" if errors else " Its last lines:", *last])
        return sentence

    def kill(self) -> None:
        """Kill it and its children, because it does not answer properly. :meth:`wait` then
        returns.
        """
        if self._process is not None and self._process.returncode is None:
            _signal(self._process.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or was never started."""
        return self._process is None or self._process.returncode is not None

    async def stop(self) -> None:
        """End it and its children."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                async with time_limit(STOP_S):
                    await process.wait()
        _signal(process.pid, signal.SIGKILL)  # also children that outlive it
        await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None

    async def _read(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a line longer than the limit, which is dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\n")
            self._printed += 1
            self.lines.append((self._printed, text))
            if _NAMES_ERROR.search(text):
                self.errors.append((self._printed, text))
            print(text, file=sys.stderr, flush=True)


def _begin() -> None:
    """Prepare the engine's process: a group of its own, which ends with the process that started
    it.
    """
    os.setpgrp()
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
