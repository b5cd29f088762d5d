"""History of a site's gaps, preserved over restarts: the start of each gap, and the distribution of
gap lengths.

One JSON file, written at most once a minute. If the file is lost, old or damaged, only the history
is lost. It decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from scavenger.horizon import PRIOR_MEAN_S, GapForecast, GapWatch, SurvivalEstimator

SAVE_INTERVAL_S = 60.0
MAX_FILE_AGE_S = 600.0
"""Maximum age of the file, seconds, at which gaps that were open when it was written are taken to
be open since then.
"""


class GapMemory:
    """``path``: the file, None for none. ``prior_mean_s``: expected length of a gap before the
    first observation, seconds.
    """

    def __init__(self, path: Path | None = None, prior_mean_s: float = PRIOR_MEAN_S) -> None:
        self.path = path
        self.since: dict[str, float] = {}
        """Node in a gap (idle or leased by us) → start of its gap, epoch seconds."""
        self._saved_at = 0.0
        self._carried: dict[str, float] = {}
        self._carried_at = 0.0
        self.watch = GapWatch(self._load() or SurvivalEstimator(prior_mean_s=prior_mean_s))

    def update(self, nodes: Iterable[str], now: float) -> None:
        """Note the nodes that are in a gap at ``now``, epoch seconds."""
        previous, self._carried = (
            self.since or (self._carried if 0 <= now - self._carried_at <= MAX_FILE_AGE_S else {}),
            {},
        )
        self.since = {node: previous.get(node, now) for node in nodes}
        self.watch.update(self.since, now)
        if now - self._saved_at >= SAVE_INTERVAL_S or now < self._saved_at:
            self._saved_at = now
            self._save(now)

    def horizon(self, node: str, now: float) -> float:
        """Return the expected remaining seconds of the gap of ``node``."""
        return self.watch.horizon(self.since.get(node, now), now)

    def forecasts(self, now: float) -> dict[str, GapForecast]:
        """Return the forecasts of the gaps of the latest update, leased nodes included."""
        return self.watch.forecasts(now)

    def _load(self) -> SurvivalEstimator | None:
        if self.path is None:
            return None
        try:
            saved = json.loads(self.path.read_text("utf-8"))
            self._carried = {str(node): float(since) for node, since in saved["open"].items()}
            self._carried_at = float(saved["time"])
            return SurvivalEstimator.from_dict(saved["lengths"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._carried = {}
            return None

    def _save(self, now: float) -> None:
        if self.path is None:
            return
        state = {"time": now, "open": self.since, "lengths": self.watch.estimator.to_dict()}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(state), "utf-8")
            os.replace(temporary, self.path)
        except OSError:  # a full or read-only disk must not stop the polls
            with contextlib.suppress(OSError):
                temporary.unlink()
