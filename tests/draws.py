"""The number of cases that hypothesis draws: a third in every check, all in ``make test-all`` and
``make fuzz``.
"""

from __future__ import annotations

from hypothesis import settings

EVERY_CHANGE, ALL, SEARCH = "check", "all", "fuzz"
"""The profiles of hypothesis: of ``make test``, ``make test-all`` and ``make fuzz``."""
DEFAULT = 100
FEWEST = 10


def cases(number: int) -> int:
    """Return how many of ``number`` cases a test draws in the loaded profile."""
    if settings.get_current_profile_name() != EVERY_CHANGE:
        return number
    return min(number, max(FEWEST, number // 3))


def register_profiles() -> None:
    """Register the profiles and load that of ``make test``, which draws the same cases in each
    run.
    """
    settings.register_profile(
        EVERY_CHANGE, derandomize=True, deadline=None, print_blob=True, max_examples=DEFAULT // 3
    )
    settings.register_profile(ALL, derandomize=True, deadline=None, print_blob=True)
    settings.register_profile(SEARCH, database=None, deadline=None, print_blob=True)
    settings.load_profile(EVERY_CHANGE)
