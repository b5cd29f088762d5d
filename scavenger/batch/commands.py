"""The one place that runs the main scheduler's commands: time limit, bounded output, retries, no
shell.

:class:`Commands` decides how long a command may take, how much it may print and how often it is
retried. The caller decides what a command means and whether it may be retried (queries may,
submissions may not). Used by every scheduler that is accessed through commands.
:mod:`scavenger.batch.calls` stores the counts.

:func:`side_by_side` runs several commands in parallel. It decides how many: a command waits for the
scheduler's answer most of its time, so more in parallel would only wait longer.

:func:`require_complete` checks that an answer is complete. The commands of the main scheduler end
each line with a newline. Some sites replace them by scripts that exit with status 0 even if the
command inside fails. A truncated line can look like a valid one: lease ``l1`` instead of ``l12``.
(JSON needs no such check: truncated JSON is invalid.) :func:`raising_scheduler_error` turns errors
in reading an answer into SchedulerError.
"""

from __future__ import annotations

import math
import os
import selectors
import shlex
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from scavenger.backoff import doubled_s
from scavenger.batch.calls import (
    BUSY,
    FAILED,
    OK,
    SILENT,
    CallLog,
    command_of,
    requests_of,
    sign_in,
)
from scavenger.interface import SchedulerError

AT_A_TIME = 4
GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")


def side_by_side(call: Callable[[GivenT], MadeT], items: Sequence[GivenT]) -> list[MadeT]:
    """Return the results of ``call`` for each item, in order. Uses threads if there are several
    items.
    """
    if len(items) <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(AT_A_TIME, len(items)), thread_name_prefix="scheduler") as pool:
        return list(pool.map(call, items))


def require_complete(text: str, command: str) -> str:
    """Return ``text`` if its last line ends with a newline. Raises SchedulerError that names
    ``command`` if it does not.
    """
    if text and not text.endswith("\n"):
        last = shorten(text[text.rfind("\n") + 1 :][-1000:], 120)
        raise SchedulerError(
            f'The answer of {command} cannot be understood: it stops at "{last}", within a line. '
            "Nothing was changed."
        )
    return text


@contextmanager
def raising_scheduler_error(scheduler: str) -> Iterator[None]:
    """Context in which answers of ``scheduler`` are parsed. Turns unexpected errors of the parser
    (a number with thousands of digits, a malformed name) into SchedulerError.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise SchedulerError(
            f"An answer of {scheduler} cannot be understood: {type(error).__name__}, "
            f"{shorten(str(error), 120)} ({Path(where.filename).name}, line {where.lineno}). "
            "Nothing was changed."
        ) from error


MAX_OUTPUT_BYTES = 256 * 1024 * 1024
MAX_SHOWN_CHARACTERS = 300
STDERR_HEAD_BYTES = 4096
KILL_WAIT_S = 2.0


@dataclass(frozen=True)
class CommandPolicy:
    """Limits of commands."""

    timeout_s: float = 20.0
    """Time limit of a command, seconds; it is then killed."""
    tries: int = 2
    """Maximum number of runs of a command that may be repeated."""
    pause_s: float = 0.5
    """Pause before the second run, seconds; it doubles each time."""


@dataclass(frozen=True)
class CommandResult:
    """The output of a command that ended. Text is UTF-8. Each invalid byte is a replacement
    character: people write reasons in other encodings, and no message could hold surrogates.
    """

    argv: tuple[str, ...]
    """The command and its arguments."""
    status: int
    """Exit status, negative for a signal."""
    stdout: str
    """Its standard output."""
    stderr: str
    """Its standard error."""
    seconds: float
    """Run time, seconds."""

    @property
    def complaint(self) -> str:
        """The command's error message, on one line."""
        return shorten(self.stderr or self.stdout)


class CommandError(SchedulerError):
    """A command that could not be run, exceeded its time limit, printed too much or failed.
    ``result`` is set if the command ended by itself.
    """

    def __init__(self, sentence: str, result: CommandResult | None = None) -> None:
        super().__init__(sentence)
        self.result = result


class NoAnswerError(CommandError):
    """A command that exceeded its time limit. The message contains the beginning of its stderr."""


@dataclass
class Commands:
    """Runs commands. Safe to use from several threads."""

    policy: CommandPolicy = field(default_factory=CommandPolicy)
    """Limits of the commands."""
    environment: Mapping[str, str] | None = None
    """Environment of commands that are run without one; None: this process's."""
    sleep: Callable[[float], None] = time.sleep
    """Waits between two runs of a command."""
    calls: CallLog = field(default_factory=CallLog)
    """Log in which the commands are counted."""

    def trying_once(self) -> Commands:
        """Return the same commands with a policy that runs a command without answer only once."""
        other = copy(self)
        other.policy = replace(self.policy, tries=1)
        return other

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CommandResult:
        """Run a command once. A status other than 0 is returned, not raised.

        Args:
            argv: the command and its arguments.
            stdin: its input.
            environment: its environment; None: that of this object.
            timeout_s: time limit, seconds; None: that of the policy.

        Raises:
            CommandError: the command could not be run, exceeded the time limit or printed too much.
        """
        limit_s = self.policy.timeout_s if timeout_s is None else timeout_s
        env = self.environment if environment is None else environment
        name, requests = command_of(argv), requests_of(argv)
        try:
            result = _run(tuple(argv), stdin, env, limit_s)
        except NoAnswerError as error:
            outcome = BUSY if sign_in(str(error)) else SILENT
            self.calls.count(name, outcome, str(error), requests)
            raise
        except CommandError:
            self.calls.count(name, FAILED, requests=0)
            raise
        sign = sign_in(result.stderr)
        outcome = BUSY if sign else FAILED if result.status else OK
        self.calls.count(name, outcome, shorten(sign), requests)
        return result

    def ask(self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None) -> str:
        """Run a command that changes nothing, retry it if it fails, and return its output. Raises
        CommandError.
        """
        tries = max(1, self.policy.tries)
        for failures in range(tries):
            try:
                result = self.run(argv, environment=environment)
                if result.status == 0:
                    return result.stdout
                error = failure(result)
            except CommandError as caught:
                error = caught
                if isinstance(caught.__cause__, FileNotFoundError | PermissionError):
                    break
            if failures < tries - 1:
                self.sleep(doubled_s(self.policy.pause_s, failures, math.inf))
        raise error


def failure(result: CommandResult) -> CommandError:
    """Return the error for a command that ended with a status other than 0."""
    how = (
        f"was ended by signal {-result.status}"
        if result.status < 0
        else f"failed with status {result.status}"
    )
    complaint = f": {result.complaint}" if result.complaint else " and said nothing."
    return CommandError(f"{show(result.argv)} {how}{complaint}", result)


def refusal(result: CommandResult) -> str:
    """Return why a command was refused, in the scheduler's words. The command comes last, because
    it is long.
    """
    if not result.complaint:
        return str(failure(result))
    return f"{result.complaint} ({show(result.argv)})"


def show(argv: Sequence[str]) -> str:
    """Return a command as a user would type it, shortened."""
    return shorten(shlex.join(argv), 120)


def shorten(text: str, characters: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the printable characters of ``text`` on one line, with at most ``characters``
    characters.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * characters]).split())
    return line if len(line) <= characters else line[: characters - 1] + "…"


def _run(
    argv: tuple[str, ...], stdin: bytes, env: Mapping[str, str] | None, limit_s: float
) -> CommandResult:
    began = time.monotonic()
    stderr_head = bytearray()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        cause = (
            "is not installed or not in PATH"
            if isinstance(error, FileNotFoundError)
            else f"cannot be run: {error.strerror}"
        )
        raise CommandError(f"The command {argv[0]} {cause}.") from error
    except ValueError as error:  # a NUL in an argument
        raise CommandError(f"{show(argv)} cannot be run: {error}.") from error
    try:
        out, err = _communicate(process, stdin, began + limit_s, stderr_head)
        status = process.wait(max(0.0, began + limit_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        message = shorten(bytes(stderr_head).decode("utf-8", "replace"))
        sentence = f"{show(argv)} gave no answer within {limit_s:g} s and was stopped"
        raise NoAnswerError(f"{sentence}: {message}" if message else f"{sentence}.") from None
    except _TooMuch:
        raise CommandError(
            f"{show(argv)} printed more than {MAX_OUTPUT_BYTES:,} bytes and was stopped."
        ) from None
    finally:
        _end(process)
    seconds = time.monotonic() - began
    return CommandResult(
        argv,
        status,
        out.decode("utf-8", "replace"),
        err.decode("utf-8", "replace"),
        seconds,
    )


class _TooMuch(Exception):
    pass


def _communicate(
    process: subprocess.Popen[bytes], stdin: bytes, deadline: float, stderr_head: bytearray
) -> tuple[bytes, bytes]:
    """Feed stdin and read both outputs until they are closed. Unlike Popen.communicate it limits
    the bytes held in memory. ``stderr_head`` receives the beginning of stderr, also if the command
    exceeds its time limit.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    parts: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    results = list(parts.values())
    total, rest = 0, memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for fd in parts:
            selector.register(fd, selectors.EVENT_READ)
        if stdin:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            for key, _ in selector.select(remaining_s):
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest[:65536]) :]
                    except BrokenPipeError:  # the command closed its stdin early
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fd)
                parts[key.fd].append(data)
                if key.fd == process.stderr.fileno() and len(stderr_head) < STDERR_HEAD_BYTES:
                    stderr_head += data[:STDERR_HEAD_BYTES]
                total += len(data)
                if total > MAX_OUTPUT_BYTES:
                    raise _TooMuch
    return b"".join(results[0]), b"".join(results[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and the processes that it started, unless it has ended. If it runs as
    another user (sudo), this process may lack the permission: then it is left to end by itself.
    """
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(KILL_WAIT_S)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            pass
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
