"""What a rescale of one job costs in seconds without a sample, learnt from its own rescales.

Decides the estimate per kind of rescale. What the seconds are worth is the allocator's (its
``RescaleCost`` takes ``up_s``, ``down_s`` and ``start_s`` from here).

A rescale that hit a slow file system says little about the next one, so the estimate is a mean in
which observations further than three robust standard deviations (1.4826·MAD) from the median count
as if they stood there (Huber, "Robust Statistics", 1981, chapter 1), together with the configured
value, which weighs as much as one observation. The cost is nearly independent of how many nodes
join, so sizes are not told apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

Kind = Literal["up", "down", "start"]
KINDS: tuple[Kind, ...] = ("up", "down", "start")
_KEPT = 20
"""Observations kept per kind: older ones are forgotten."""
_PRIOR_WEIGHT = 1.0
_LEAST_SPREAD = 0.1
"""The robust standard deviation is taken to be at least this share of the median; two equal
observations are no proof of precision.
"""


@dataclass(frozen=True)
class RescaleCosts:
    """Seconds per kind of rescale."""

    up_prior_s: float = 10.0
    """Configured, to grow."""
    down_prior_s: float = 8.0
    """Configured, to shrink."""
    start_prior_s: float = 10.0
    """Configured, to start from nothing."""
    up: tuple[float, ...] = ()
    """The last observations of growing, oldest first."""
    down: tuple[float, ...] = ()
    """The last observations of shrinking, oldest first."""
    start: tuple[float, ...] = ()
    """The last observations of starting, oldest first."""

    def __post_init__(self) -> None:
        for name in ("up_prior_s", "down_prior_s", "start_prior_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The configured rescale cost {name} is {value}; give seconds, 0 or more."
                )

    def observe(self, kind: Kind, seconds: float) -> RescaleCosts:
        """With one rescale seen: ``seconds`` from the last sample at the old scale to the first at
        the new one.

        Raises:
            ValueError: on an unknown kind, or seconds that are negative or not finite.
        """
        if kind not in KINDS:
            raise ValueError(
                f"There is no rescale of kind {kind!r}; it is one of {', '.join(KINDS)}."
            )
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"A rescale cannot have taken {seconds} s; the observation is not used."
            )
        kept: tuple[float, ...] = (*getattr(self, kind), seconds)[-_KEPT:]
        if kind == "up":
            return replace(self, up=kept)
        return replace(self, down=kept) if kind == "down" else replace(self, start=kept)

    def estimate(self, kind: Kind) -> float:
        """Seconds that the next rescale of this kind will take."""
        seen: tuple[float, ...] = getattr(self, kind)
        prior: float = getattr(self, f"{kind}_prior_s")
        if not seen:
            return prior
        middle = median(seen)
        spread = max(1.4826 * median(abs(x - middle) for x in seen), _LEAST_SPREAD * middle)
        clipped = [min(max(x, middle - 3 * spread), middle + 3 * spread) for x in seen]
        return (_PRIOR_WEIGHT * prior + len(clipped) * fmean(clipped)) / (
            _PRIOR_WEIGHT + len(clipped)
        )

    @property
    def up_s(self) -> float:
        """Seconds to grow."""
        return self.estimate("up")

    @property
    def down_s(self) -> float:
        """Seconds to shrink."""
        return self.estimate("down")

    @property
    def start_s(self) -> float:
        """Seconds to start from nothing."""
        return self.estimate("start")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the store; the configured values are not kept, they are the site's."""
        return {"up": list(self.up), "down": list(self.down), "start": list(self.start)}

    def with_stored(self, data: Mapping[str, Any]) -> RescaleCosts:
        """These configured values with the observations of a stored :meth:`to_dict`; values that
        are not seconds are left out.
        """
        kept = {
            kind: tuple(
                float(x)
                for x in data.get(kind, ())
                if isinstance(x, (int, float)) and math.isfinite(x) and x >= 0
            )[-_KEPT:]
            for kind in KINDS
        }
        return replace(self, up=kept["up"], down=kept["down"], start=kept["start"])
