"""What the values of a variable are of, by its cell methods (CF Conventions, 7.3): the quantity
itself, its mean, or a statistic such as a maximum, which is no wind. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from windsr import WindsrError

OWN_METHODS = ("point", "mean", "median")
"""Methods whose results are of the quantity itself."""
_CELL_METHOD = re.compile(r"((?:\w+:\s*)+)(\w+)")


def _cell_methods(variable: Any) -> list[tuple[list[str], str]]:
    """Return (dimensions, method) of each cell method of a variable, without comments."""
    stated = re.sub(r"\([^()]*\)", "", str(variable.attrs.get("cell_methods", "")))
    return [(re.findall(r"\w+", dims), method) for dims, method in _CELL_METHOD.findall(stated)]


def statistic_of(variable: Any) -> str:
    """Return the method by which the values of a variable are not those of its quantity, such as
    ``maximum``; empty if there is none.
    """
    methods = (method for _, method in _cell_methods(variable))
    return next((method for method in methods if method not in OWN_METHODS), "")


def require_no_statistic(wind: Any, name: str) -> None:
    """Raise WindsrError if the values of a wind are a statistic. ``name``: that of the file."""
    statistic = statistic_of(wind).replace("_", " ")
    if statistic:
        raise WindsrError(
            f"{name}: {wind.name} is a {statistic} (cell_methods {wind.attrs['cell_methods']!r}); "
            "the wind at moments, or its mean, is needed."
        )


def require_no_mean(component: Any, name: str, is_horizontal: Callable[[str], bool]) -> None:
    """Raise WindsrError if the values of a component of the wind are means over something else than
    the cells of its grid: over time, or over members.

    Args:
        component: the component.
        name: that of the file.
        is_horizontal: whether a dimension is one of the grid.
    """
    over = [
        dim
        for dims, method in _cell_methods(component)
        for dim in dims
        if method != "point" and dim != "area" and not is_horizontal(dim)
    ]
    if over:
        raise WindsrError(
            f"{name}: {component.name} is a mean over {', '.join(over)} (cell_methods "
            f"{component.attrs['cell_methods']!r}), and the speed of a mean wind is less than the "
            "mean of the speed. Give the wind speed, or components at moments."
        )
