"""Checks the events of a trace, and describes each problem in a sentence. Pure functions of the
event arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_PROBLEMS = 20

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class TraceError(ValueError):
    """An invalid trace.

    Args:
        where: its file; empty if unknown.
        problems: sentences, each with the number of the line.
        total: number of problems, if ``problems`` has only the first ones.
    """

    def __init__(self, where: str, problems: Sequence[str], total: int | None = None) -> None:
        self.problems = tuple(problems)
        self.total = len(problems) if total is None else total
        lines = list(problems[:MAX_PROBLEMS])
        if self.total > len(lines):
            lines.append(f"... and {self.total - len(lines)} more.")
        text = lines[0] if len(lines) == 1 else f"{self.total} problems.\n  " + "\n  ".join(lines)
        super().__init__(f"{where}: {text}" if where else text)


def order_problems(time: FloatArray) -> list[tuple[int, str]]:
    """Return (event, sentence) for times that are invalid or earlier than the time before."""
    problems = [
        (int(k), f"The time must be 0 or more and finite; got {time[k]:g}.")
        for k in np.flatnonzero(~np.isfinite(time) | (time < 0))
    ]
    back = np.flatnonzero(np.diff(time) < 0) + 1
    problems += [
        (
            int(k),
            f"Time goes back from {time[k - 1]:g} s to {time[k]:g} s; sort the rows by time_s.",
        )
        for k in back
    ]
    return problems


def node_problems(
    time: FloatArray, node: IntArray, idle: BoolArray, names: Sequence[str]
) -> list[tuple[int, str]]:
    """Return (event, sentence) for each violation of a rule: the events of a node alternate, begin
    with idle, and have different times.

    Args:
        time: time of each event, seconds.
        node: index of its node.
        idle: whether the node becomes idle.
        names: names of the nodes.
    """
    order = np.argsort(node, kind="stable")
    n, i, t = node[order], idle[order], time[order]
    first = np.ones(len(n), dtype=np.bool_)
    first[1:] = n[1:] != n[:-1]
    previous = np.zeros(len(n), dtype=np.bool_)
    previous[1:] = i[:-1] & ~first[1:]
    problems: list[tuple[int, str]] = []
    for k in np.flatnonzero(i == previous).tolist():
        name, state = names[int(n[k])], "idle" if i[k] else "busy"
        since = "from the start" if first[k] else f"since {t[k - 1]:g} s"
        problems.append(
            (int(order[k]), f"Node {name} becomes {state} at {t[k]:g} s but is {state} {since}.")
        )
    same = np.flatnonzero(~first[1:] & (t[1:] == t[:-1]) & (i[1:] != i[:-1])) + 1
    for k in same.tolist():
        problems.append(
            (
                int(order[k]),
                f"Node {names[int(n[k])]} becomes idle and busy at the same time, {t[k]:g} s.",
            )
        )
    return problems


def numbers(words: list[str]) -> tuple[FloatArray, list[int]]:
    """Return the words as numbers, and the positions of invalid ones (with value 0)."""
    try:
        return np.array(words, dtype=np.float64), []
    except ValueError:
        values, bad = np.zeros(len(words)), []
        for k, word in enumerate(words):
            try:
                values[k] = float(word)
            except ValueError:
                bad.append(k)
        return values, bad
