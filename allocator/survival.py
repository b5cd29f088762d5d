"""Expected losses of nodes: how long a job of each size runs undisturbed, and what remains of it.

Decides how the survival curves of groups of nodes combine to the forecast for one job. It does not
make the curves. Nodes that are expected to end together form a *cohort*. Cohorts end independently
of each other, all nodes of one at the same time; a job is hit when the first of its cohorts ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_GRID = np.array([0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0])
"""Where survival curves are sampled, as fractions of the window."""
_INTERVALS = np.diff(_GRID)
_WEIGHTS = 0.5 * (np.append(_INTERVALS, 0.0) + np.append(0.0, _INTERVALS))
"""Weights of the trapezoidal rule over the grid."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """Nodes that are expected to end together, with their survival curve."""

    times_s: tuple[float, ...]
    """Seconds from now, increasing, the first 0."""
    survival: tuple[float, ...]
    """The probability that the nodes are still there at each of these times; the first 1."""

    def mean_survival_s(self, window_s: float) -> float:
        """Return the expected time for which the nodes are there within the window, seconds."""
        return float(mean_survival_s(survival_matrix([self], window_s), window_s)[0])


def survival_matrix(cohorts: Sequence[Cohort | None], window_s: float) -> Floats:
    """Sample survival curves on a grid over the window.

    Args:
        cohorts: the cohorts; None for nodes that stay.
        window_s: length of the window, seconds.

    Returns:
        One row for each cohort, one column for each point of the grid. A curve is constant beyond
        its last time.
    """
    rows = np.ones((len(cohorts), len(_GRID)))
    by_times: dict[tuple[float, ...], list[tuple[int, Cohort]]] = {}
    for row, cohort in enumerate(cohorts):
        if cohort is not None:
            by_times.setdefault(cohort.times_s, []).append((row, cohort))
    for times_s, group in by_times.items():
        curves = np.array([cohort.survival for _, cohort in group])
        rows[[row for row, _ in group]] = _interpolate(curves, np.array(times_s), window_s * _GRID)
    return rows


def _interpolate(curves: Floats, times_s: Floats, at_s: Floats) -> Floats:
    """Return :func:`numpy.interp` for many rows with the same times."""
    last = len(times_s) - 1
    low = np.clip(times_s.searchsorted(at_s, side="right") - 1, 0, last)
    high = np.minimum(low + 1, last)
    span = times_s[high] - times_s[low]
    slope = (curves[:, high] - curves[:, low]) / np.where(span > 0, span, 1.0)
    interpolated: Floats = slope * (at_s - times_s[low]) + curves[:, low]
    return interpolated


def mean_survival_s(rows: Floats, window_s: float) -> Floats:
    """Return the restricted mean survival time of each row of a :func:`survival_matrix`: the
    expected time for which its nodes are there within the window, seconds.
    """
    mean_s: Floats = window_s * _mean(rows)
    return mean_s


def _mean(rows: Floats) -> Floats:
    """Return the mean of each row over the window. Columns are added in pairs, so that the result
    is the same for one row and for thousands.
    """
    terms: Floats = (rows * _WEIGHTS).T
    while len(terms) > 1:
        terms = terms[::2] + terms[1::2]
    mean: Floats = terms[0]
    return mean


class ExpectedLoss(NamedTuple):
    """What happens to a job of each of several sizes within the window; one entry for each size."""

    undisturbed_s: Floats
    """The expected time until the first loss, at most the window, seconds."""
    loss_probability: Floats
    """The probability of a loss within the window."""
    remaining_nodes: Floats
    """The expected number of nodes after the loss."""


class LossForecast:
    """The losses to expect within a window, by the number of nodes of one job.

    Args:
        cohorts: (cohort, nodes in it) in the order in which the job would get them: its own first,
            those that last longest before the others. Nodes without a cohort stay.
        window_s: length of the window, seconds.
        work_s: work lost with a node, seconds of the job's throughput.
    """

    __slots__ = ("counts", "rows", "window_s", "work_s")

    def __init__(
        self, cohorts: Sequence[tuple[Cohort | None, int]], window_s: float, work_s: float
    ) -> None:
        self.rows = survival_matrix([cohort for cohort, _ in cohorts], window_s)
        self.counts = np.array([count for _, count in cohorts], dtype=np.float64)
        self.window_s = window_s
        self.work_s = work_s

    @classmethod
    def from_arrays(
        cls, rows: Floats, counts: Floats, window_s: float, work_s: float
    ) -> LossForecast:
        """Return a forecast from a :func:`survival_matrix`.

        Args:
            rows: the matrix, a row for each cohort.
            counts: nodes in each cohort.
            window_s: the window of the matrix, seconds.
            work_s: work lost with a node, seconds of the job's throughput.
        """
        forecast = object.__new__(cls)
        forecast.rows, forecast.counts = rows, counts
        forecast.window_s, forecast.work_s = window_s, work_s
        return forecast

    def expected_loss(self, sizes: npt.NDArray[np.int64]) -> ExpectedLoss:
        """Return the expected loss at each of ``sizes``. Nodes beyond those of the forecast
        stay.
        """
        return expected_losses([self], np.zeros(len(sizes), np.int64), sizes)


def expected_losses(
    forecasts: Sequence[LossForecast],
    forecast_index: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
) -> ExpectedLoss:
    """Return :meth:`LossForecast.expected_loss` for many jobs.

    Args:
        forecasts: the forecasts of the jobs.
        forecast_index: which forecast applies, for each size.
        sizes: numbers of nodes.

    Returns:
        The expected loss, one entry for each size.
    """
    nodes = sizes.astype(np.float64)
    windows_s = np.array([forecast.window_s for forecast in forecasts])
    lengths = np.array([len(forecast.counts) for forecast in forecasts])
    longest = int(lengths.max(initial=0))
    if not longest:
        return ExpectedLoss(windows_s[forecast_index], np.zeros(len(sizes)), nodes)
    # One row for each forecast, padded with cohorts that have no nodes and stay.
    is_cohort = np.arange(longest) < lengths[:, None]
    rows = np.ones((*is_cohort.shape, len(_GRID)))
    rows[is_cohort] = np.concatenate([forecast.rows for forecast in forecasts])
    counts = np.zeros(is_cohort.shape)
    counts[is_cohort] = np.concatenate([forecast.counts for forecast in forecasts])
    ends = counts.cumsum(axis=1)
    stride = int(max(ends[:, -1].max(), nodes.max(initial=0.0))) + 1
    keys = (ends + stride * np.arange(len(forecasts))[:, None]).ravel()
    # A job of each size has nodes of the cohorts up to this one.
    last = keys.searchsorted(nodes + stride * forecast_index)
    last = np.minimum(last, forecast_index * longest + np.maximum(lengths, 1)[forecast_index] - 1)
    joint_survival = rows.cumprod(axis=1).reshape(-1, len(_GRID))
    end_probability = 1.0 - rows[:, :, -1]
    # The first cohort to end is each one with a probability proportional to its own.
    total_probability = end_probability.cumsum(axis=1).ravel()[last]
    not_used = end_probability.ravel()[last] * (ends.ravel()[last] - nodes)
    lost = (end_probability * counts).cumsum(axis=1).ravel()[last] - not_used
    remaining = nodes - lost / np.maximum(total_probability, 1e-12)
    mean = _mean(joint_survival)
    has_cohorts = lengths[forecast_index] > 0
    return ExpectedLoss(
        windows_s[forecast_index] * np.where(has_cohorts, mean[last], 1.0),
        (1.0 - joint_survival[:, -1])[last],
        np.where(total_probability > 1e-12, np.maximum(remaining, 0.0), nodes),
    )
