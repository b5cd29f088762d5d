"""Search for a job's best layout (processes, threads and loader workers of a node), fed with its
progress records, and its view for ``malletrain show``. Pure: times come with the data.

Decides what of a round is measured for the search, and the sentences about it.
:mod:`jpa.layout` decides which layout comes next, :mod:`malletrain.daemon.jobs.layouts` when the
job gets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from jpa.layout import Arm, BatchMeans, LayoutSearch, NodeLayout
from malletrain.daemon.jobs.monitor import SampleCount
from malletrain.protocol.messages import JobSpec, Progress, RoundLayout
from malletrain.protocol.views import LayoutView, TriedLayoutView
from malletrain.store.records import LayoutSearchRow

COUNT_EVERY_S = 0.1
"""Minimum time between two sums over the ranks, seconds."""
MAX_GAP_S = 30.0
"""Maximum time between two counts that belongs to the search, seconds. In a longer one the job was
suspended or its daemon was away.
"""


def layout_of(row: LayoutSearchRow) -> NodeLayout:
    """Return the layout of the newest round."""
    return NodeLayout(**row.layout)


def layout_record(layout: NodeLayout) -> dict[str, int]:
    """Return a layout as it is stored."""
    return {
        "processes": layout.processes,
        "threads": layout.threads,
        "loader_workers": layout.loader_workers,
    }


def node_layout(layout: NodeLayout, spec: JobSpec) -> RoundLayout:
    """Return a layout as a launcher gets it. A number of threads that neither the job's owner nor
    the search has chosen is left to the launcher, because the owner's environment may name one.
    """
    chosen = spec.threads or "threads" in spec.tuned
    return RoundLayout(layout.processes, layout.threads if chosen else 0, layout.loader_workers)


class LayoutTuner:
    """The search of one job for the layout of its nodes.

    Args:
        row: its row in the store.
        search: the search in that row.
    """

    def __init__(self, row: LayoutSearchRow, search: LayoutSearch) -> None:
        self.row = row
        self.search = search
        self.is_limited = False
        """Whether the layouts are left out that the script's facts exclude."""
        self.is_announced = search.outcome is not None
        """Whether the end of the search is announced."""
        self.requested_at = -math.inf
        """Time at which the change to the search's layout was last requested, seconds."""
        self._generation = 0
        self._counts = SampleCount()
        self._means = BatchMeans()
        self._counted_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the search is over and the job has the layout that it has found."""
        return self.is_announced and not self.must_change

    @property
    def must_change(self) -> bool:
        """Whether the job should have another layout than its newest round."""
        return self.search.layout != layout_of(self.row)

    def record(self) -> LayoutSearchRow:
        """Return the row with the current state of the search."""
        return replace(self.row, search=self.search.to_dict())

    def batch_rate(
        self, record: Progress, generation: int, step_s: Callable[[], float | None], now: float
    ) -> float | None:
        """Add the counts of one worker, and the time since the last ones to that of the search.

        Args:
            record: cumulative counts of the worker.
            generation: the newest round.
            step_s: returns the mean duration of its steps, seconds; None if unknown.
            now: time, seconds.

        Returns:
            The throughput of a batch that ends with them; None if none does.
        """
        if record.generation != generation:
            return None
        if generation != self._generation:
            self._generation, self._means = generation, BatchMeans()
        self._counts.add_report(record)
        since_s = math.inf if self._counted_at is None else now - self._counted_at
        if 0 <= since_s < COUNT_EVERY_S or not self._counts.advance():
            return None
        if self._counted_at is not None:
            self.search = self.search.spent(min(MAX_GAP_S, since_s))
        self._counted_at = now
        if self.search.outcome is not None or self.must_change:
            return None
        return self._means.feed(self._counts.time, self._counts.samples, step_s() or 0.0)


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
