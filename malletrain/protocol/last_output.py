"""The last output of a process that failed: its log without known noise, and the line of its first
error. Decides by the text alone; :mod:`malletrain.protocol.failures` decides whose fault it is.
"""

from __future__ import annotations

import re

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
