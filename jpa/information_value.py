"""The expected value of profiling a job, and its cost. Pure functions.

Decides whether better knowledge of a job's scaling pays over the remaining work. It does not decide
which jobs are considered.

The value is the expected value of perfect information (Raiffa and Schlaifer, *Applied Statistical
Decision Theory*, 1961, chapter 4): how much better the best size, net of the nodes' price, would be
if the curve were known. The running job itself reveals the throughput at its current size, so this
counts as known; unknown is the shape of the curve relative to it.

The uncertainty of the shape is limited to what is possible: *m* times the nodes bring m^x times the
throughput, with x uniform on 0 to 1 if nothing else is known, so the standard deviation of its
logarithm is at most ln(m)/√12, and no case counts in which the nodes bring more than *m* times as
much. A law fitted to a single size is far more uncertain than that, and without the limit a profile
would pay for every job.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jpa.curve import MeasuredCurve

_GAUSS_HERMITE = ((-math.sqrt(3.0), 1 / 6), (0.0, 2 / 3), (math.sqrt(3.0), 1 / 6))
"""Gauss-Hermite quadrature for a normal distribution: (standard deviations, weight)."""


@dataclass(frozen=True)
class ProfileContext:
    """The situation in which a job would be profiled."""

    nodes: int
    """The job's current size; its throughput there will be known without a profile."""
    node_price: float
    """Throughput that one more node would bring another job, samples/s of this job."""
    use_s: float
    """Expected time for which the knowledge is of use, summed over all jobs that share it,
    seconds.
    """
    up_s: float
    """Pause of growing, seconds."""
    down_s: float
    """Pause of shrinking, seconds."""
    visit_s: float
    """Time to measure one size, seconds."""
    visits: int
    """Sizes that a profile would visit."""
    std_factor: float = 1.0
    """Observed errors of the estimates at other sizes, as a multiple of their standard
    deviations.
    """
    donor_rate: float = 0.0
    """Throughput of the job that lends nodes for the profile and gets nodes back afterwards,
    samples/s of this job.
    """


def shape_std(curve: MeasuredCurve, size: int, known_size: int) -> float:
    """Return the uncertainty of the shape of a curve, without that of its level.

    Args:
        curve: the current knowledge.
        size: the size of interest.
        known_size: the size whose throughput counts as known.

    Returns:
        Relative standard deviation of the throughput at ``size``.
    """
    known_rate, known_std = curve.estimate(known_size)
    rate, std = curve.estimate(size)
    if rate <= 0 or known_rate <= 0:
        return 0.0
    return math.sqrt(max((std / rate) ** 2 - (known_std / known_rate) ** 2, 0.0))


def information_value(
    curve: MeasuredCurve,
    sizes: Sequence[int],
    known_size: int,
    node_price: float,
    std_factor: float = 1.0,
) -> float:
    """Return the expected gain of the best size if the shape of the curve were known.

    Args:
        curve: the current knowledge, with standard deviations.
        sizes: sizes that the job may have.
        known_size: the size whose throughput counts as known.
        node_price: samples/s that each node would bring another job.
        std_factor: factor on the standard deviations at other sizes.

    Returns:
        Samples/s.
    """
    known_rate = curve.estimate(known_size)[0]
    if not sizes or known_rate <= 0:
        return 0.0
    rates = [curve.estimate(k)[0] for k in sizes]
    log_stds = []
    for k in sizes:
        shape = std_factor * shape_std(curve, k, known_size)
        possible = math.log(k / known_size) / math.sqrt(12.0)
        log_stds.append(math.copysign(min(shape, abs(possible)), possible))
    expected = [0.0] * len(sizes)
    informed = 0.0
    for deviation, weight in _GAUSS_HERMITE:
        net_rates = [
            min(
                rate * math.exp(deviation * s - 0.5 * s * s),
                known_rate * max(1.0, k / known_size),
            )
            - node_price * k
            for k, rate, s in zip(sizes, rates, log_stds, strict=True)
        ]
        informed += weight * max(0.0, *net_rates)
        expected = [e + weight * net for e, net in zip(expected, net_rates, strict=True)]
    return max(0.0, informed - max(0.0, *expected))


def profile_cost(curve: MeasuredCurve, sizes: Sequence[int], context: ProfileContext) -> float:
    """Return the samples that a profile costs: one rescale up, the rescales down, a donor's
    rescales down and up, and the visits to sizes slower than the current one. The price of the
    nodes that the job releases meanwhile is subtracted.

    Args:
        curve: the current knowledge.
        sizes: sizes that the job may have.
        context: the situation of the job.

    Returns:
        Samples.
    """
    current_rate = curve.estimate(context.nodes)[0]
    lost = 0.0
    for k in sizes:
        rate = curve.estimate(k)[0]
        lost += max(0.0, (current_rate - rate) - context.node_price * (context.nodes - k))
    lost *= context.visit_s * context.visits / max(1, len(sizes))
    lost += context.donor_rate * (context.up_s + context.down_s)
    return lost + current_rate * (context.up_s + context.down_s * max(0, context.visits - 1))


def profile_pays(curve: MeasuredCurve, sizes: Sequence[int], context: ProfileContext) -> bool:
    """Return whether the expected value of a profile exceeds its cost.

    Args:
        curve: the current knowledge.
        sizes: sizes that the job may have.
        context: the situation of the job.
    """
    value = information_value(curve, sizes, context.nodes, context.node_price, context.std_factor)
    return value * context.use_s > profile_cost(curve, sizes, context)
