"""What the values of a variable are of, by its cell methods (CF Conventions, 7.3): the quantity
itself, its mean, or a statistic such as a maximum, which is no wind. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from windsr import WindsrError

STATISTICS = frozenset(
    ("sum", "maximum", "maximum_absolute_value", "mid_range", "minimum", "minimum_absolute_value",
     "mean_absolute_value", "mean_of_upper_decile", "mode", "range", "root_mean_square",
     "standard_deviation", "sum_of_squares", "variance",
     "max", "min", "rms", "std", "stddev", "standard", "var", "percentile", "quantile")
)  # fmt: skip
"""Methods whose results are not of the quantity itself, in lower case (CF Conventions, appendix E),
and other words for them. Any other method, such as ``instantaneous``, says nothing.
"""
MEANS = ("mean", "median", "average")
_CELL_METHOD = re.compile(r"((?:\w+:\s*)+)(\w+)")
_COMMENT = re.compile(r"\([^()]*\)")


def _cell_methods(variable: Any) -> list[tuple[list[str], str]]:
    """Return (dimensions, method in lower case) of each cell method of a variable, without
    comments, which may have parentheses themselves.
    """
    stated, comments = str(variable.attrs.get("cell_methods", "")), 1
    while comments:
        stated, comments = _COMMENT.subn("", stated)
    methods = _CELL_METHOD.findall(stated)
    return [(re.findall(r"\w+", dims), method.lower()) for dims, method in methods]


def statistic_of(variable: Any) -> str:
    """Return the method by which the values of a variable are not those of its quantity, such as
    ``maximum``; empty if there is none.
    """
    methods = (method for _, method in _cell_methods(variable))
    return next((method for method in methods if method in STATISTICS), "")


def require_no_statistic(wind: Any, name: str) -> None:
    """Raise WindsrError if the values of a wind are a statistic. ``name``: that of the file."""
    statistic = statistic_of(wind).replace("_", " ")
    if statistic:
        raise WindsrError(
            f"{name}: {wind.name} is a {statistic} (cell_methods {wind.attrs['cell_methods']!r}); "
            "the wind at moments, or its mean, is needed."
        )


def mean_note(component: Any, name: str, is_horizontal: Callable[[str], bool]) -> str:
    """Return a sentence about a component of the wind whose values are means over something else
    than the cells of its grid: over time, or over members. Empty if they are not.

    Args:
        component: the component.
        name: that of the file.
        is_horizontal: whether a dimension is one of the grid.
    """
    over = [
        dim
        for dims, method in _cell_methods(component)
        for dim in dims
        if method in MEANS and dim != "area" and not is_horizontal(dim)
    ]
    if not over:
        return ""
    return (
        f"{name}: {component.name} is a mean over {', '.join(over)} (cell_methods "
        f"{component.attrs['cell_methods']!r}), and the speed of a mean wind is less than the "
        "mean of the speed."
    )
