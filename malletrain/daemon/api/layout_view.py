"""The view of the layout of a job's nodes and of the search for it. Pure."""

from __future__ import annotations

import math

from jpa.layout import Arm, LayoutSearch
from malletrain.daemon.jobs.layout_tuner import layout_of
from malletrain.protocol.views import LayoutView, TriedLayoutView
from malletrain.store.records import LayoutSearchRow


def layout_view(row: LayoutSearchRow | None, search: LayoutSearch | None) -> LayoutView | None:
    """Return the view of a job's search; None if it does not look for a layout.

    Args:
        row: its row in the store.
        search: the current state of its search; None for the stored one.
    """
    if row is None:
        return None
    if search is None:
        try:
            search = LayoutSearch.from_dict(row.search)
        except (KeyError, TypeError, ValueError, IndexError):
            return None
    layout = layout_of(row)
    if search.outcome is None:
        measured = sum(arm.count > 0 for arm in search.arms)
        sentence = (
            f"The best layout is being looked for: {measured} of {len(search.arms)} are measured, "
            f"after {search.seconds:.0f} s of {search.config.max_seconds:.0f} s at most."
        )
    elif row.source:
        sentence = search.outcome.reason
    else:
        sentence = f"{search.outcome.reason} The search took {search.seconds:.0f} s."
    return LayoutView(
        str(layout),
        f"{sentence} {search.limit}".rstrip(),
        search.outcome is None,
        search.seconds,
        row.source,
        tuple(_tried(search, index, arm) for index, arm in enumerate(search.arms)),
    )


def has_measured_loaders(view: LayoutView | None) -> bool:
    """Return whether the search for a job's layout, or that of an earlier job, has compared numbers
    of loader workers. ``view``: the view of the search.
    """
    if view is None or view.searching:
        return False
    numbers = {tried.loader_workers for tried in view.tried if tried.rate is not None}
    if view.source:
        numbers = {tried.loader_workers for tried in view.tried}
    return len(numbers) > 1


def _tried(search: LayoutSearch, index: int, arm: Arm) -> TriedLayoutView:
    outcome, half_width = search.outcome, arm.half_width(search.config.min_deviation, search.spread)
    words = [arm.out] if arm.out else []
    if outcome is not None and outcome.layout == arm.layout:
        words = ["chosen"]
    elif outcome is None and index == search.current:
        words = ["measured now"]
    elif outcome is None and not arm.out:
        words = ["in" if arm.count else "to come"]
    if index == 0:
        words.append("default")
    return TriedLayoutView(
        arm.layout.processes,
        arm.layout.threads,
        arm.layout.loader_workers,
        arm.mean if arm.count else None,
        half_width if math.isfinite(half_width) else None,
        ", ".join(words),
    )
