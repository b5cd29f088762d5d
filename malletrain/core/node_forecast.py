"""Forecasts the number of nodes from the numbers of the last days. Pure.

The model is that the past repeats. It takes the past moments whose number of nodes was closest to
the present one. The forecast is the median of the numbers that followed them, with the 10th and the
90th percentile.
"""

from __future__ import annotations

import numpy as np

from malletrain.core.forecast import Floats, like_now

QUANTILES = (0.1, 0.5, 0.9)


def nodes_ahead(past: Floats, now: float, spans: int) -> Floats:
    """Return the quantiles of the number of nodes in each of the next ``spans`` spans.

    Args:
        past: number of nodes in each past span, the oldest first. It is repeated periodically.
        now: current number of nodes.
        spans: number of spans to forecast.

    Returns:
        Array of shape (spans, 3): a column for each of :data:`QUANTILES`.
    """
    starts = like_now(past, now)
    later = (starts[None, :] + np.arange(1, spans + 1)[:, None]) % len(past)
    quantiles: Floats = np.quantile(past[later], QUANTILES, axis=1).T
    return quantiles
