"""The pauses of one job's rescales, estimated from its own rescales.

Decides the estimate for each kind of rescale. It does not value the seconds; the allocator does
(its ``RescaleCost`` takes ``up_s``, ``down_s`` and ``start_s`` from here).

The estimate is a winsorised mean: observations further than three robust standard deviations
(1.4826·MAD) from the median are moved to that distance (Huber, "Robust Statistics", 1981, chapter
1), because a rescale that met a slow file system says little about the next one. The configured
value counts as one more observation. The pause hardly depends on how many nodes join, so sizes are
not distinguished.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Literal

RescaleKind = Literal["up", "down", "start"]
RESCALE_KINDS: tuple[RescaleKind, ...] = ("up", "down", "start")
_MAX_OBSERVATIONS = 20
"""Observations of each kind; older ones are dropped."""
_PRIOR_WEIGHT = 1.0
"""Weight of the configured value, in observations."""
_MIN_RELATIVE_STD = 0.1
"""Lower bound on the robust standard deviation, as a fraction of the median: two equal observations
do not prove precision.
"""


@dataclass(frozen=True)
class RescaleCosts:
    """Observed pauses by kind of rescale, seconds. Immutable: a change returns a new object.

    Raises:
        ValueError: if a configured value is negative or not finite.
    """

    up_prior_s: float = 10.0
    """The configured pause of growing, seconds."""
    down_prior_s: float = 8.0
    """The configured pause of shrinking, seconds."""
    start_prior_s: float = 10.0
    """The configured pause of a start, seconds."""
    up: tuple[float, ...] = ()
    """The last pauses of growing, seconds, oldest first."""
    down: tuple[float, ...] = ()
    """The last pauses of shrinking, seconds, oldest first."""
    start: tuple[float, ...] = ()
    """The last pauses of starts, seconds, oldest first."""

    def __post_init__(self) -> None:
        for name in ("up_prior_s", "down_prior_s", "start_prior_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"The configured rescale cost {name} is {value}; give seconds, 0 or more."
                )

    def observe(self, kind: RescaleKind, seconds: float) -> RescaleCosts:
        """Add one observation.

        Args:
            kind: the kind of rescale.
            seconds: from the last sample at the old scale to the first at the new one.

        Raises:
            ValueError: if the kind is unknown, or the seconds are negative or not finite.
        """
        if kind not in RESCALE_KINDS:
            raise ValueError(
                f"There is no rescale of kind {kind!r}; it is one of {', '.join(RESCALE_KINDS)}."
            )
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"A rescale cannot have taken {seconds} s; the observation is not used."
            )
        observations: tuple[float, ...] = (*getattr(self, kind), seconds)[-_MAX_OBSERVATIONS:]
        if kind == "up":
            return replace(self, up=observations)
        if kind == "down":
            return replace(self, down=observations)
        return replace(self, start=observations)

    def estimate(self, kind: RescaleKind) -> float:
        """Return the expected pause of the next rescale of this kind, seconds."""
        observations: tuple[float, ...] = getattr(self, kind)
        prior: float = getattr(self, f"{kind}_prior_s")
        if not observations:
            return prior
        center = median(observations)
        robust_std = max(
            1.4826 * median(abs(x - center) for x in observations), _MIN_RELATIVE_STD * center
        )
        clipped = [
            min(max(x, center - 3 * robust_std), center + 3 * robust_std) for x in observations
        ]
        return (_PRIOR_WEIGHT * prior + len(clipped) * fmean(clipped)) / (
            _PRIOR_WEIGHT + len(clipped)
        )

    @property
    def up_s(self) -> float:
        """Expected pause of growing, seconds."""
        return self.estimate("up")

    @property
    def down_s(self) -> float:
        """Expected pause of shrinking, seconds."""
        return self.estimate("down")

    @property
    def start_s(self) -> float:
        """Expected pause of a start, seconds."""
        return self.estimate("start")

    def to_dict(self) -> dict[str, Any]:
        """Return the observations as plain values for the store. The configured values are not
        stored: they come from the site's configuration.
        """
        return {"up": list(self.up), "down": list(self.down), "start": list(self.start)}

    def with_stored(self, data: Mapping[str, Any]) -> RescaleCosts:
        """Return these configured values with the observations of a stored :meth:`to_dict`. Values
        that are not valid durations are ignored.
        """
        observations = {
            kind: tuple(
                float(x)
                for x in data.get(kind, ())
                if isinstance(x, (int, float)) and math.isfinite(x) and x >= 0
            )[-_MAX_OBSERVATIONS:]
            for kind in RESCALE_KINDS
        }
        return replace(
            self, up=observations["up"], down=observations["down"], start=observations["start"]
        )
