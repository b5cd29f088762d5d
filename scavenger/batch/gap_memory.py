"""History of a site's gaps, preserved over restarts: the start of each gap, the distribution of gap
lengths and, if configured, the model that forecasts each gap.

One JSON file, written at most once a minute. If the file is lost, old or damaged, only the history
is lost. It decides nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scavenger.horizon import PRIOR_MEAN_S, GapWatch, SurvivalEstimator
from scavenger.lifetimes import Forecasts, Lifetimes

SAVE_INTERVAL_S = 60.0
MAX_FILE_AGE_S = 600.0
"""Maximum age of the file, seconds, at which gaps that were open when it was written are taken to
be open since then.
"""


class GapMemory:
    """``path``: the file, None for none. ``prior_mean_s``: expected length of a gap before the
    first observation, seconds. ``foretells``: whether gaps are forecast individually
    (:mod:`scavenger.lifetimes`), and not by their age alone.
    """

    def __init__(
        self,
        path: Path | None = None,
        prior_mean_s: float = PRIOR_MEAN_S,
        *,
        foretells: bool = False,
    ) -> None:
        self.path = path
        self.since: dict[str, float] = {}
        """Node in a gap (idle or leased by us) → start of its gap, epoch seconds."""
        self._saved_at = 0.0
        self._carried: dict[str, float] = {}
        self._carried_at = 0.0
        self._saved_lifetimes: Any = None
        estimator = self._load() or SurvivalEstimator(prior_mean_s=prior_mean_s)
        self.watch = GapWatch(estimator)
        self.lifetimes = self._lifetimes(estimator) if foretells else None
        self.foretold: Forecasts = {}
        """Forecasts for the gaps of the latest update; empty if there are no forecasts."""

    def update(self, nodes: Iterable[str], now: float, requested: float | None = None) -> None:
        """Note the nodes in a gap.

        Args:
            nodes: nodes that are in a gap at ``now``.
            now: epoch seconds.
            requested: number of nodes that the waiting jobs of the main scheduler request; None if
                it is not shown.
        """
        previous, self._carried = (
            self.since or (self._carried if 0 <= now - self._carried_at <= MAX_FILE_AGE_S else {}),
            {},
        )
        self.since = {node: previous.get(node, now) for node in nodes}
        if self.lifetimes is None:
            self.watch.update(self.since, now)
        else:  # this also feeds the lengths of gaps
            self.lifetimes.update(self.since, now, requested)
            self.foretold = self.lifetimes.forecast(now)
        if now - self._saved_at >= SAVE_INTERVAL_S or now < self._saved_at:
            self._saved_at = now
            self._save(now)

    def horizon(self, node: str, now: float) -> float:
        """Return the expected remaining seconds of the gap of ``node``."""
        if node in self.foretold:
            return self.foretold[node][0]
        return self.watch.horizon(self.since.get(node, now), now)

    def _lifetimes(self, lengths: SurvivalEstimator) -> Lifetimes:
        try:
            return Lifetimes.from_dict(self._saved_lifetimes, lengths)
        except ValueError:  # none yet, or of another version
            return Lifetimes(lengths)

    def _load(self) -> SurvivalEstimator | None:
        if self.path is None:
            return None
        try:
            saved = json.loads(self.path.read_text("utf-8"))
            self._carried = {str(node): float(since) for node, since in saved["open"].items()}
            self._carried_at = float(saved["time"])
            self._saved_lifetimes = saved.get("lifetimes")
            return SurvivalEstimator.from_dict(saved["lengths"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._carried = {}
            return None

    def _save(self, now: float) -> None:
        if self.path is None:
            return
        state = {"time": now, "open": self.since, "lengths": self.watch.estimator.to_dict()}
        if self.lifetimes is not None:
            state["lifetimes"] = self.lifetimes.to_dict()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(state), "utf-8")
            os.replace(temporary, self.path)
        except OSError:  # a full disk must not stop the polls
            temporary.unlink(missing_ok=True)
