"""What the description of a variable says of its values: that they are gusts, or of another height,
or that a terrain is the floor of the sea. Decides what is refused, and what is only noted.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windsr import WindsrError

DEEPEST_LAND_M = -30.0
"""Height below which terrain is noted: little land is as low (the shores of the Caspian Sea)."""
_HEIGHT = re.compile(
    r"(?<![\d.,-])(\d+(?:\.\d+)?)[ -]?(?:m|met(?:re|er)s?)(?![\w/^*.]|[ ]?(?:/|s\b|s-|s\^|per\b))"
)
_GUST = re.compile(r"\bgusts?\b")
_NO_GUST = re.compile(r"\b(?:no|non|not|without|excluding|except)\b")
log = logging.getLogger("windsr")


def check_description(wind: Any, name: str, height: int) -> None:
    """Note if the description of a wind (``long_name``) says another height than this one, m, or
    speaks of gusts.

    Args:
        wind: a variable.
        name: name of its file.
        height: the height at which its values are taken to be.

    Raises:
        WindsrError: its ``standard_name`` is that of gusts, which are maxima.
    """
    standard, text = (
        str(wind.attrs.get(key, "")).lower() for key in ("standard_name", "long_name")
    )
    if "of_gust" in standard:
        raise WindsrError(
            f"{name}: {wind.name} is a wind of gusts (standard_name "
            f"{wind.attrs['standard_name']!r}); the wind at moments, or its mean, is needed."
        )
    if _GUST.search(text) and not _NO_GUST.search(text):
        log.warning(
            "note: %s: %s may be a wind of gusts (long_name %r); the wind at moments, or its mean, "
            "is needed.",
            *(name, wind.name, wind.attrs["long_name"]),
        )
    stated = {float(match[1]) for match in _HEIGHT.finditer(text)}
    if len(stated) == 1 and "resolution" not in text and not np.isclose(stated.pop(), height):
        log.warning(
            "note: %s: %s is taken to be at %g m, and its long_name is %r; say its height with "
            "--height.",
            *(name, wind.name, height, wind.attrs["long_name"]),
        )


def check_terrain(heights: NDArray[np.floating], name: str) -> None:
    """Note if a terrain, m, is so low that it is the floor of a sea, on which the wind does not
    depend.
    """
    lowest = float(np.nanmin(heights, initial=0.0))
    if lowest < DEEPEST_LAND_M:
        log.warning(
            "note: %s: the terrain is down to %.0f m. If that is the floor of a sea, as in "
            "bathymetries, set the sea to 0 m first.",
            *(name, lowest),
        )
