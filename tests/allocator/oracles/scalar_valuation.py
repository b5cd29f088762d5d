"""The value of every size of a job, computed one at a time: the reference for
:mod:`allocator.valuation`, which values all sizes of a plan together.

The arithmetic follows the order of the formulas, so that the results are equal to the last bit.
"""

from __future__ import annotations

import itertools

from allocator import BidRequest, Goal, LossForecast, ScalingCurve


def values(request: BidRequest, node_class: str) -> dict[int, float]:
    """Size → value, of the sizes that the job offers on one class; none lies beyond the curve."""
    curve = request.curves[node_class]
    current = request.current if node_class == request.current_class else 0
    unit = _single(curve) if request.goal is Goal.EFFICIENCY else 1.0
    before = curve.at(current) / unit
    forecast = (request.loss_forecasts or {}).get(node_class)
    value_of = {}
    for size in range(request.min_nodes, request.max_nodes + 1):
        if request.allowed is not None and size not in request.allowed:
            continue
        rate = read(curve, size) / unit
        if forecast is None:
            processed = request.t_fwd_s * rate
        else:
            undisturbed_s, loss_probability, remaining = expected(forecast, size)
            after = read(curve, remaining) / unit if remaining >= request.min_nodes else 0.0
            processed = undisturbed_s * rate + (forecast.window_s - undisturbed_s) * after
            processed -= loss_probability * (forecast.work_s * rate + request.cost.down_s * after)
        if current == 0:
            pause = request.cost.start_s * rate
        elif size > current:
            pause = before * request.cost.up_s
        elif size < current or request.restarting:
            pause = before * request.cost.down_s
        else:
            pause = 0.0
        value_of[size] = request.weight * (processed - pause)
    return value_of


def read(curve: ScalingCurve, size: float) -> float:
    """Throughput at a size, which need not be whole."""
    points = [(0, 0.0), *curve.points]
    for (low, below), (high, above) in itertools.pairwise(points):
        if size < high:
            return (above - below) / (high - low) * (size - low) + below
    return points[-1][1]


def expected(forecast: LossForecast, size: int) -> tuple[float, float, float]:
    """What :meth:`allocator.survival.LossForecast.expected_loss` computes, for one size."""
    counts = forecast.counts.tolist()
    if not counts:
        return forecast.window_s, 0.0, float(size)
    ends = list(itertools.accumulate(counts))
    k = next((at for at, end in enumerate(ends) if end >= size), len(ends) - 1)
    alone, odds, lost = [1.0] * 8, 0.0, 0.0
    for row, count in zip(forecast.rows[: k + 1].tolist(), counts, strict=False):
        alone = [a * there for a, there in zip(alone, row, strict=True)]
        odds += 1.0 - row[-1]
        lost += (1.0 - row[-1]) * count
    lost -= (1.0 - forecast.rows[k].tolist()[-1]) * (ends[k] - size)
    remaining = max(size - lost / max(odds, 1e-12), 0.0) if odds > 1e-12 else float(size)
    return forecast.window_s * _mean(alone), 1.0 - alone[-1], remaining


def _mean(alone: list[float]) -> float:
    """By the trapezoidal rule over these parts of the window, added up as halves of halves."""
    at = [0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0]
    steps = [0.0, *(b - a for a, b in itertools.pairwise(at)), 0.0]
    parts = [a * (0.5 * (y + x)) for a, x, y in zip(alone, steps, steps[1:], strict=False)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _single(curve: ScalingCurve) -> float:
    one = curve.at(1)
    return one if one > 0 else next((rate / n for n, rate in curve.points if rate > 0), 1.0)
