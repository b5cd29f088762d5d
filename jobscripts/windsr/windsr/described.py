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
_NO_GUST = re.compile(r"\b(?:no|non|not|without|excluding|except)\b")
log = logging.getLogger("windsr")


def check_description(wind: Any, name: str, height: int) -> None:
    """Note if the description of a wind (``long_name``) says another height than this one, m.

    Args:
        wind: a variable.
        name: name of its file.
        height: the height at which its values are taken to be.

    Raises:
        WindsrError: it is a wind of gusts, which is a maximum.
    """
    standard, text = (
        str(wind.attrs.get(key, "")).lower() for key in ("standard_name", "long_name")
    )
    if "of_gust" in standard or ("gust" in text and not _NO_GUST.search(text)):
        which = "standard_name" if "of_gust" in standard else "long_name"
        raise WindsrError(
            f"{name}: {wind.name} is a wind of gusts ({which} {wind.attrs[which]!r}); the wind at "
            "moments, or its mean, is needed."
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
    lowest = float(np.nanmin(heights)) if heights.size else 0.0
    if lowest < DEEPEST_LAND_M:
        log.warning(
            "note: %s: the terrain is down to %.0f m. If that is the floor of a sea, as in "
            "bathymetries, set the sea to 0 m first.",
            *(name, lowest),
        )
