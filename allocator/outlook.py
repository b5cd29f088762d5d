"""What is to be expected of nodes that may go: how long a job of each size is left alone, and what
is left of it afterwards.

Decides nothing and knows nothing of how the expectations came about. Nodes that are expected to
end together form a *cohort*; a job is hit when the first of its cohorts ends. Cohorts are taken to
end independently of each other, the nodes of one all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_SHARES = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0])
"""Of the window: where the survival is looked at."""
_STEPS = np.diff(_SHARES)
_MEAN = 0.5 * (np.append(_STEPS, 0.0) + np.append(0.0, _STEPS))
"""Weights of the trapezoidal rule over the window."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """Nodes that are expected to end together, and when."""

    times_s: tuple[float, ...]
    """Seconds from now, increasing, the first 0."""
    survival: tuple[float, ...]
    """The probability that they are there still at each of these times; the first 1."""

    def expected_s(self, window_s: float) -> float:
        """How long they are there within the window, seconds, expected."""
        return float(expected_s(survivals([self], window_s), window_s)[0])


def survivals(cohorts: Sequence[Cohort | None], window_s: float) -> Floats:
    """A row a cohort: its survival at the times within the window that are looked at; held after
    the last time known. No cohort: the node stays.
    """
    rows = np.ones((len(cohorts), len(_SHARES)))
    alike: dict[tuple[float, ...], list[tuple[int, Cohort]]] = {}
    for place, cohort in enumerate(cohorts):
        if cohort is not None:
            alike.setdefault(cohort.times_s, []).append((place, cohort))
    for times_s, found in alike.items():
        known = np.array([cohort.survival for _, cohort in found])
        rows[[place for place, _ in found]] = _read(known, np.array(times_s), window_s * _SHARES)
    return rows


def _read(known: Floats, times_s: Floats, at_s: Floats) -> Floats:
    """:func:`numpy.interp` for many rows of the same times."""
    last = len(times_s) - 1
    low = np.clip(times_s.searchsorted(at_s, side="right") - 1, 0, last)
    high = np.minimum(low + 1, last)
    span = times_s[high] - times_s[low]
    slope = (known[:, high] - known[:, low]) / np.where(span > 0, span, 1.0)
    read: Floats = slope * (at_s - times_s[low]) + known[:, low]
    return read


def expected_s(rows: Floats, window_s: float) -> Floats:
    """Of each row of :func:`survivals`, how long it is there within the window, seconds."""
    mean: Floats = window_s * _mean(rows)
    return mean


def _mean(rows: Floats) -> Floats:
    """The part of the window for which each is there; columns are added up pair by pair, which is
    the same for one row and for thousands.
    """
    parts: Floats = (rows * _MEAN).T
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    mean: Floats = parts[0]
    return mean


class Outlook:
    """What a job may expect within ``window_s`` seconds, by the number of nodes it has.

    Args:
        cohorts: (cohort, nodes in it) in the order in which the job would have them: its own first,
            those that last longest before the others. A node of no cohort is taken to stay.
        window_s: how far to look ahead, seconds.
        work_s: work that is lost with a node that goes, seconds of the job's throughput.
    """

    __slots__ = ("counts", "rows", "window_s", "work_s")

    def __init__(
        self, cohorts: Sequence[tuple[Cohort | None, int]], window_s: float, work_s: float
    ) -> None:
        self.rows = survivals([cohort for cohort, _ in cohorts], window_s)
        self.counts = np.array([count for _, count in cohorts], dtype=np.float64)
        self.window_s = window_s
        self.work_s = work_s

    @classmethod
    def from_arrays(cls, rows: Floats, counts: Floats, window_s: float, work_s: float) -> Outlook:
        """The same of cohorts of which :func:`survivals` were read before."""
        made = object.__new__(cls)
        made.rows, made.counts = rows, counts
        made.window_s, made.work_s = window_s, work_s
        return made

    def of(self, sizes: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """For each of ``sizes``: the seconds for which a job of that size is left alone, at most
        the window; the probability that it is hit within the window; the nodes it has then.

        Sizes beyond the last node known are as those of all nodes known.
        """
        return expectations([self], np.zeros(len(sizes), np.int64), sizes)


def expectations(
    outlooks: Sequence[Outlook], which: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[Floats, Floats, Floats]:
    """What :meth:`Outlook.of` says, of many at once: of outlook number ``which`` for each of
    ``sizes``, two arrays of one length.
    """
    wanted = sizes.astype(np.float64)
    windows = np.array([outlook.window_s for outlook in outlooks])
    lengths = np.array([len(outlook.counts) for outlook in outlooks])
    longest = int(lengths.max(initial=0))
    if not longest:
        return windows[which], np.zeros(len(sizes)), wanted
    # A row an outlook, filled up with cohorts without a node that stay.
    there = np.arange(longest) < lengths[:, None]
    rows = np.ones((*there.shape, len(_SHARES)))
    rows[there] = np.concatenate([outlook.rows for outlook in outlooks])
    counts = np.zeros(there.shape)
    counts[there] = np.concatenate([outlook.counts for outlook in outlooks])
    ends = counts.cumsum(axis=1)
    stride = int(max(ends[:, -1].max(), wanted.max(initial=0.0))) + 1
    keys = (ends + stride * np.arange(len(outlooks))[:, None]).ravel()
    at = keys.searchsorted(wanted + stride * which)
    at = np.minimum(at, which * longest + np.maximum(lengths, 1)[which] - 1)
    alone = rows.cumprod(axis=1).reshape(-1, len(_SHARES))
    goes = 1.0 - rows[:, :, -1]
    # Of the cohorts that may go, each is the one that goes by its share of the odds.
    odds = goes.cumsum(axis=1).ravel()[at]
    beyond = goes.ravel()[at] * (ends.ravel()[at] - wanted)
    lost = (goes * counts).cumsum(axis=1).ravel()[at] - beyond
    left = wanted - lost / np.maximum(odds, 1e-12)
    mean = _mean(alone)
    known = lengths[which] > 0
    return (
        windows[which] * np.where(known, mean[at], 1.0),
        (1.0 - alone[:, -1])[at],
        np.where(odds > 1e-12, np.maximum(left, 0.0), wanted),
    )
