"""Quantiles of Student's t distribution: half widths of confidence intervals of measured means.
Pure.
"""

from __future__ import annotations

import math

_DEGREES = 30
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T995 = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


def t975(degrees: float) -> float:
    """Return the 97.5 % quantile, for a 95 % interval.

    Args:
        degrees: degrees of freedom, rounded down, at least 1; beyond 30 the quantile is that of the
            normal distribution.
    """
    return _T975[_index(degrees)] if degrees < _DEGREES + 1 else 1.960


def t995(degrees: float) -> float:
    """Return the 99.5 % quantile, for a 99 % interval. ``degrees``: see :func:`t975`."""
    return _T995[_index(degrees)] if degrees < _DEGREES + 1 else 2.576


def _index(degrees: float) -> int:
    return max(0, math.floor(degrees) - 1)
