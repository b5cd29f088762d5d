"""What is known of a job's scaling and of the costs of its rescales, for the planner and the store.
Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocator import RescaleCost, ScalingCurve
from jpa import MeasuredCurve, RescaleCosts

MOST_POINTS = 64
"""Sizes at which a curve is handed to the planner; between them it is read linearly."""


@dataclass(frozen=True)
class ScalingModel:
    """``profiled``: no profile is wanted any more; ``result``, ``reason``: how the last one ended,
    the reason as a sentence.

    ``ended``: when that was, seconds since the epoch (None: never).
    """

    curve: MeasuredCurve = field(default_factory=MeasuredCurve)
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    profiled: bool = False
    result: str = ""
    reason: str = ""
    ended: float | None = None

    @property
    def has_data(self) -> bool:
        """Whether a throughput is measured or suggested at any size; else the job runs with the
        neutral prior.
        """
        return self.curve.has_data

    def bid_curve(self, sizes: Iterable[int], kappa: float) -> ScalingCurve | None:
        """The curve to bid with, lowered by ``kappa`` standard deviations; None while nothing is
        known.

        ``kappa`` counts only after a profile: before it a job seen at one size only would be too
        uncertain to ever be moved.
        """
        if not self.has_data:
            return None
        return self.curve.conservative(
            named(sizes, self.curve.measured_sizes), kappa if self.profiled else 0.0
        )

    @property
    def cost(self) -> RescaleCost:
        """Seconds of a growth, a shrinkage and a start, as the planner wants them."""
        return RescaleCost(self.costs.up_s, self.costs.down_s, self.costs.start_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the store."""
        return {
            "curve": self.curve.to_dict(),
            "costs": self.costs.to_dict(),
            "profiled": self.profiled,
            "result": self.result,
            "reason": self.reason,
            "ended": self.ended,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], costs: RescaleCosts) -> ScalingModel:
        """The inverse, with the site's configured ``costs``. Raises CurveError when the stored
        curve is damaged.
        """
        return cls(
            MeasuredCurve.from_dict(data["curve"]),
            costs.with_stored(data.get("costs", {})),
            bool(data.get("profiled")),
            str(data.get("result", "")),
            str(data.get("reason", "")),
            data.get("ended"),
        )


def named(sizes: Iterable[int], measured: Iterable[int]) -> list[int]:
    """At most about MOST_POINTS of ``sizes``, evenly spaced in their logarithm, and those
    ``measured``.
    """
    every = sizes if isinstance(sizes, range) else sorted(set(sizes))
    if len(every) <= MOST_POINTS:
        return list(every)
    low, high = every[0], every[-1]
    marks = {round(low * (high / low) ** (i / (MOST_POINTS - 1))) for i in range(MOST_POINTS)}
    if isinstance(every, range):
        return sorted({k for k in (*marks, *measured) if k in every})
    near = {min(every, key=lambda k, m=mark: (abs(math.log(k / m)), k)) for mark in marks}  # type: ignore[misc]
    return sorted(near | (set(measured) & set(every)))
