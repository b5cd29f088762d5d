"""Reads and writes trace files.

The file is CSV with the header ``time_s,node,event``: seconds from the start, a node name, ``idle``
or ``busy``. Rows at time 0 are the nodes that are idle at the start; all other nodes are busy then.
A further column ``amount`` is for shared nodes, see :mod:`scavenger.trace.amounts`.
The file is compressed if its name ends in ``.gz``. :mod:`scavenger.trace.trace` decides which
traces are valid.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scavenger.trace.trace import (
    MAX_PROBLEMS,
    Trace,
    TraceError,
    node_problems,
    numbers,
    order_problems,
)

HEADER = "time_s,node,event"


def read(
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    duration_s: float | None = None,
) -> Trace:
    """Read a trace file (CSV; gzip is detected by the content, not by the name).

    Args:
        path: the file.
        names: the machine's nodes, if some of them may have no event; None: the nodes in the file,
            in order of appearance.
        duration_s: end of the observation, seconds; None: the last event.

    Raises:
        TraceError: the file cannot be read or has errors; the text has the line number of each
            problem (the first 20).
    """
    text = read_text(path)
    return parse(text, names=names, duration_s=duration_s, where=str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a trace file, which may be compressed. Raises TraceError if it cannot be
    read.
    """
    where = str(path)
    try:
        raw = Path(path).read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise TraceError(where, ["There is no such file."]) from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(
            where, [f"The gzip file is damaged ({error}). Fetch or write it again."]
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(
            where, [f"Not a text file (byte {error.start} is not UTF-8). A trace is CSV: {HEADER}."]
        ) from None
    except OSError as error:
        raise TraceError(where, [f"The file cannot be read: {error.strerror or error}."]) from None


def parse(
    text: str,
    *,
    names: Sequence[str] | None = None,
    duration_s: float | None = None,
    where: str = "trace",
) -> Trace:
    """Return the trace in the CSV ``text``.

    Args:
        text: content of the file.
        names, duration_s: see :func:`read`.
        where: name of the trace in messages.
    """
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise TraceError(
            where,
            [f"The file is empty. A trace is CSV with the header {HEADER} and a row per event."],
        )
    if lines[0].replace(" ", "") != HEADER:
        raise TraceError(where, [f"line 1: The header must be '{HEADER}'; got '{lines[0][:60]}'."])
    rows = [line.split(",") for line in lines[1:]]
    if not rows:
        raise TraceError(
            where, ["There is a header but no event below it. A trace has a row per event."]
        )
    problems: list[tuple[int, str]] = []
    good: list[list[str]] = []
    line_of: list[int] = []
    index: dict[str, int] = {name: k for k, name in enumerate(names or ())}
    for line_number, row in enumerate(rows, start=2):
        if len(row) != 3:
            problems.append(
                (line_number, f"A row has 3 columns ({HEADER}); this one has {len(row)}.")
            )
            continue
        good.append(row)
        line_of.append(line_number)
    time, bad_times = numbers([row[0] for row in good])
    problems += [
        (line_of[k], f"The time is not a number of seconds: '{good[k][0][:40]}'.")
        for k in bad_times
    ]
    node = np.zeros(len(good), dtype=np.int32)
    idle = np.zeros(len(good), dtype=np.bool_)
    for k, (_, raw_name, raw_event) in enumerate(good):
        name, event = raw_name.strip(), raw_event.strip()
        if event == "idle":
            idle[k] = True
        elif event != "busy":
            problems.append((line_of[k], f"The event must be idle or busy; got '{event[:40]}'."))
        if not name:
            problems.append((line_of[k], "The node name is missing."))
        number = index.get(name)
        if number is None:
            if names is not None and name:
                problems.append(
                    (line_of[k], f"Node {name[:60]} is not in the node list of {len(names)} nodes.")
                )
            number = index[name] = len(index)
        node[k] = number
    if not bad_times:
        lines_at = np.asarray(line_of)
        unsorted = order_problems(time)
        problems += [(int(lines_at[k]), s) for k, s in unsorted]
        # In an unsorted file, statements about the order of a node's events are meaningless. So the
        # order is checked only if the file is sorted.
        if not unsorted and not problems:
            problems += [
                (int(lines_at[k]), s) for k, s in node_problems(time, node, idle, list(index))
            ]
    if problems:
        problems.sort()
        raise TraceError(
            where, [f"line {n}: {s}" for n, s in problems[:MAX_PROBLEMS]], len(problems)
        )
    return Trace.validated(time, node, idle, tuple(index), duration_s, where=where, first_line=2)


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace as CSV, compressed if the name ends in ``.gz``. The file is written
    atomically.
    """
    out = io.StringIO()
    out.write(HEADER + "\n")
    words = np.where(trace.idle, "idle", "busy").tolist()
    for t, n, word in zip(trace.time.tolist(), trace.node.tolist(), words, strict=True):
        out.write(f"{_short(t)},{trace.names[n]},{word}\n")
    data = out.getvalue().encode()
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    # mtime 0: the same trace produces the same bytes.
    temporary.write_bytes(gzip.compress(data, mtime=0) if target.name.endswith(".gz") else data)
    temporary.replace(target)


def read_names(path: str | os.PathLike[str]) -> list[str]:
    """Return the node names in a file, one per line. Raises TraceError if the file cannot be read
    or contains none.
    """
    try:
        names = [
            line.strip() for line in Path(path).read_text("utf-8").splitlines() if line.strip()
        ]
    except OSError as error:
        why = error.strerror or error
        raise TraceError(str(path), [f"The node list cannot be read: {why}."]) from None
    except UnicodeDecodeError:
        raise TraceError(str(path), ["The node list is not text in UTF-8."]) from None
    if not names:
        raise TraceError(str(path), ["The node list is empty; it has one node name per line."])
    return names


def _short(value: float) -> str:
    """Return the shortest text that parses to the same number, without '.0'."""
    return str(int(value)) if value.is_integer() else repr(value)
