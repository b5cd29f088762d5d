"""Why workers failed: which failure was the first cause, described in one sentence.

Decides which failures are consequences of others, and which part of the last output of a process
says what failed: its log without known noise, and the line of its first error.
:mod:`malletrain.rounds` decides whether a failure is the job's fault at all: it waits for reports
of lost nodes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from itertools import groupby

from malletrain.protocol.messages import Assignment, Failure
from malletrain.protocol.phases import RESTART_CODE, AssignmentPhase

NOISE: tuple[tuple[str, str], ...] = (
    (r"\[W\d{3,4} .*?\]", "warnings of c10 (c10/util/Logging.cpp), at every shutdown of a group"),
    (r"\[[IWE]\d{3,4} .*TCPStore\.cpp:\d+\]", "a store's peers that ended first (TCPStore.cpp)"),
    (r"W\d{4} [\d:.]+ \d+ ", "warnings of torch.distributed's Python side (torch/_logging)"),
    (r"frame #\d+: ", "C++ backtraces of c10::Error (c10/util/Backtrace.cpp)"),
    (r"Exception raised from \w+ at ", "the head of such a backtrace"),
    (r"terminate called ", "libstdc++, when threads live on while the interpreter ends"),
    (r".*resource_tracker: There appear to be ", "multiprocessing/resource_tracker.py, at exit"),
    (r"\s*warnings\.warn\(", "the source line below a warning (warnings.py)"),
    (r".*:\d+: \w*Warning: ", "warnings of Python (warnings.py)"),
    (r"malletrain (launcher|worker|fork server): ", "our own processes"),
)
"""(pattern of the beginning of such a line, origin)"""

IGNORED = "Exception ignored in"
"""First line of the interpreter's report of an error during shutdown: a block up to the line of the
error (CPython, PyErr_WriteUnraisable).
"""

_NOISE = re.compile("|".join(f"(?:{pattern})" for pattern, _ in NOISE))
_RANK = re.compile(r"\[rank\d+\]: ?")
"""Prefix that torch.distributed puts before every line of a traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$")
_USAGE = re.compile(r"\S+: error: ")
"""Message of argparse and click for wrong arguments."""
_CHAINED = ("During handling of the above", "The above exception was the direct cause")


def without_noise(text: str) -> str:
    """Return ``text`` without the lines that do not concern the script; all of it if no line is
    left."""
    lines, ignoring = [], False
    for line in text.splitlines():
        line = _RANK.sub("", line, count=1) if line.startswith("[rank") else line
        if line.startswith(IGNORED):
            ignoring = True
        elif ignoring:
            ignoring = line.startswith((" ", _TRACEBACK)) or not line
        elif not _NOISE.match(line):
            lines.append(line)
    return "\n".join(lines).strip("\n") or text.strip("\n")


def without_repeats(text: str) -> str:
    """Return ``text`` with equal lines that follow each other as one line with their number:
    ``No such file. (7 times)``."""
    lines = []
    for line, repeats in groupby(text.removesuffix("\n").split("\n")):
        number = len(list(repeats))
        counted = number > 1 and line.strip()
        lines += [f"{line} ({number} times)"] if counted else [line] * number
    return "\n".join(lines)


_FRAME = re.compile(r'\s+File "(.+)", line (\d+), in (.+)')
"""A line of a traceback (CPython, traceback.c)."""


def raised(text: str) -> str:
    """Return the exception of the last traceback in ``text``, with its innermost frame:
    ``ValueError: no data (train.py, line 12, in load)``. Empty if there is none.
    """
    lines = without_noise(text).splitlines()
    frames = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return ""
    path, number, name = _FRAME.match(lines[frames[-1]]).groups()  # type: ignore[union-attr]
    below = (line for line in lines[frames[-1] + 1 :] if line and not line[0].isspace())
    error = next(below, "")
    where = f"{path.rpartition('/')[2]}, line {number}, in {name.removeprefix('<').rstrip('>')}"
    return f"{error.rstrip('.')} ({where})" if error else ""


def first_error(text: str) -> str:
    """Return the line of the first error. Of an error with a chain of causes it is the line of the
    last one. If there is no error, returns the last line; empty if there is none.
    """
    lines = without_noise(text).splitlines()
    error = ""
    for index, line in enumerate(lines):
        if _USAGE.match(line):
            return error or line
        if _ERROR.match(line):
            error = line
            rest = [later for later in lines[index + 1 :] if later.strip()]
            if not (rest and rest[0].startswith(_CHAINED)):
                return error
    return error or next((line.strip() for line in reversed(lines) if line.strip()), "")


PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "DistBackendError",
    "DistNetworkError",
    "Connect timeout",
    "failed to connect",
    "Connection refused",
)
"""Parts of a worker's last output if it failed because a peer failed (messages of gloo, NCCL and
TCPStore).
"""
_NO_WAY = re.compile(r"(?<!\] )(?:No route to host|Network is unreachable|Host is unreachable)")
"""The same if there is no route to the peer: a node is down, or a firewall rejects packets.
Messages with an errno in front ("[Errno 101] Network is unreachable") come from Python's own
sockets, such as a download, and do not match.
"""
CANNOT_START = 126
"""Exit code of a supervisor or a fork server that could not start its process."""
UNFIT = 78
"""Exit code of a launcher whose job's software environment cannot be used (EX_CONFIG of
sysexits.h); its output ends with one sentence, which is the cause of the failure. A script that
ends with this code has no cause."""
SCRIPT_ENDED = "The script itself ended with this code."
"""Cause of a failure with RESTART_CODE if the worker had not asked to be started again. It says
nothing more than the code, so that the output describes the failure.
"""
LAUNCHER_KILLED = "The launcher was killed"
"""Beginning of the cause of a failure whose launcher was killed by something other than its agent.
"""
NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def unfit(assignment: Assignment) -> bool:
    """Return whether the launcher found that the job's software is not available on the node."""
    has_started = assignment.generation > 0 or assignment.phase is not AssignmentPhase.EXITED
    return not has_started and any(f.exitcode == UNFIT and f.cause for f in assignment.failures)


def starts_again(failure: Failure) -> bool:
    """Return whether the worker asked to be started again. Then its launcher reports no cause; for
    a script that uses the same exit code it does.
    """
    return failure.exitcode == RESTART_CODE and not failure.cause


def no_way(text: str) -> bool:
    """Return whether the last output of a worker says that there is no route to a peer."""
    return bool(_NO_WAY.search(text))


def peer_lost(text: str) -> bool:
    """Return whether the last output of a worker, or an error message, names a lost peer."""
    return any(words in text for words in PEER_LOST) or no_way(text)


def secondary(failure: Failure) -> bool:
    """Return whether the worker was stopped by a signal or failed because of a peer: never the
    first cause.
    """
    return failure.exitcode == -15 or peer_lost(failure.tail)


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures, first causes first, then in order of time."""
    return tuple(sorted(failures, key=lambda f: (secondary(f), f.time, f.rank)))


def describe(failures: Iterable[Failure]) -> str:
    """Return one sentence on the first cause of a failure."""
    first = next(iter(failures))
    if first.exitcode in (CANNOT_START, UNFIT) and first.cause:
        return first.cause
    exit_text = (
        f"was killed by signal {-first.exitcode}"
        if first.exitcode < 0
        else f"exited with code {first.exitcode}"
    )
    if first.cause and first.cause != SCRIPT_ENDED:
        return f"Rank {first.rank} {exit_text}: {first.cause}{_advice(first.cause)}"
    if first.exitcode > 0 and (error := raised(first.tail)):
        return f"Rank {first.rank} {exit_text}: {error}{_advice(error) or '.'}"
    if first.exitcode == -signal.SIGKILL:
        exit_text += "; often the node ran out of memory"
    last = next((line.strip() for line in reversed(first.tail.splitlines()) if line.strip()), "")
    return (
        f"Rank {first.rank} {exit_text}."
        + (f" Its last line: {last}" if last else "")
        + _advice(last)
    )


def _advice(words: str) -> str:
    """Return advice on a failure with this message, empty if there is none."""
    if NO_PACKAGE.search(words):
        return (
            ". Install it for the Python that runs the job (PYTHON -m pip install …; `malletrain "
            "show` names PYTHON), or submit from an environment that has it."
        )
    return ""
