"""Forecasts the number of nodes from that of the last days. Pure.

The model is that the past repeats: the forecast is the median, with the tenth and the ninetieth
percentile, of what followed the past moments with a number of nodes most like the present one.
"""

from __future__ import annotations

import numpy as np

from malletrain.core.forecast import Floats, like_now

QUANTILES = (0.1, 0.5, 0.9)


def nodes_ahead(past: Floats, now: float, spans: int) -> Floats:
    """The quantiles of the nodes in each of the next ``spans`` spans: a row for each span, a column
    for each of :data:`QUANTILES`.

    Args:
        past: nodes there were, a span each, the oldest first; it comes again and again.
        now: how many there are now.
        spans: how far to look.
    """
    starts = like_now(past, now)
    later = (starts[None, :] + np.arange(1, spans + 1)[:, None]) % len(past)
    quantiles: Floats = np.quantile(past[later], QUANTILES, axis=1).T
    return quantiles
