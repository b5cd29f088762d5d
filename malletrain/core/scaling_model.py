"""The measured scaling of a job and the costs of its rescales, for the planner and the store.
Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocator import RescaleCost, ScalingCurve
from jpa import MeasuredCurve, RescaleCosts

MAX_POINTS = 64
"""Maximum number of sizes of a curve for the planner, which interpolates linearly between them."""


@dataclass(frozen=True)
class ScalingModel:
    """Scaling curve and rescale costs of a job, and the result of its last profile."""

    curve: MeasuredCurve = field(default_factory=MeasuredCurve)
    costs: RescaleCosts = field(default_factory=RescaleCosts)
    profiled: bool = False
    """Whether no further profile is needed."""
    result: str = ""
    """Result of the last profile; empty if there was none."""
    reason: str = ""
    """Reason of that result, as a sentence."""
    ended: float | None = None
    """End of the last profile, seconds since the epoch; None if there was none."""

    @property
    def has_data(self) -> bool:
        """Whether a throughput is measured or suggested at any size. If not, the job bids with the
        neutral prior.
        """
        return self.curve.has_data

    def bid_curve(self, sizes: Iterable[int], kappa: float) -> ScalingCurve | None:
        """Return the curve to bid with, lowered by ``kappa`` standard deviations; None without
        data.

        ``kappa`` applies only after a profile. Before it, a job measured at a single size would be
        too uncertain to be rescaled ever.
        """
        if not self.has_data:
            return None
        return self.curve.conservative(
            named(sizes, self.curve.measured_sizes), kappa if self.profiled else 0.0
        )

    @property
    def cost(self) -> RescaleCost:
        """Costs of a rescale up, a rescale down and a start, for the planner."""
        return RescaleCost(self.costs.up_s, self.costs.down_s, self.costs.start_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the store."""
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
        """Restore a model from :meth:`to_dict`; ``costs``: the site's configured costs.

        Raises:
            CurveError: the stored curve is damaged.
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
    """Return at most about MAX_POINTS of ``sizes``, evenly spaced in their logarithm, and those
    that are ``measured``.
    """
    all_sizes = sizes if isinstance(sizes, range) else sorted(set(sizes))
    if len(all_sizes) <= MAX_POINTS:
        return list(all_sizes)
    low, high = all_sizes[0], all_sizes[-1]
    marks = {round(low * (high / low) ** (i / (MAX_POINTS - 1))) for i in range(MAX_POINTS)}
    if isinstance(all_sizes, range):
        return sorted({k for k in (*marks, *measured) if k in all_sizes})
    near = {min(all_sizes, key=lambda k, m=mark: (abs(math.log(k / m)), k)) for mark in marks}  # type: ignore[misc]
    return sorted(near | (set(measured) & set(all_sizes)))
