"""Selects the cases of a parametrised test that ``make test`` runs: one or two of each kind. The
others are marked ``thorough``, for ``make test-all``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_change(cases: Iterable[Any], *representatives: Any) -> list[Any]:
    """Return marked cases for ``pytest.mark.parametrize``.

    Args:
        cases: a value each, or a tuple of them.
        representatives: those that ``make test`` runs.

    Returns:
        All cases; those that are no representatives are marked ``thorough``.
    """
    cases = list(cases)
    assert set(representatives) <= set(cases), (
        f"{set(representatives) - set(cases)} are none of the cases"
    )
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in representatives else pytest.mark.thorough,
        )
        for case in cases
    ]
