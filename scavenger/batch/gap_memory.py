"""What a site's gaps were like, kept over restarts: since when each node is in a gap, and how long
gaps last.

One JSON file, written at most once a minute; a file that is lost, old or damaged costs knowledge
and nothing else. It decides nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from scavenger.horizon import PRIOR_MEAN_S, GapWatch, SurvivalEstimator

SAVE_EVERY_S = 60.0
FRESH_S = 600.0
"""Gaps that were open when the file was written are taken to be the same ones if it is no older."""


class GapMemory:
    """``path``: the file, ``None`` for none. ``prior_mean_s``: expected length of a gap before any
    was seen.
    """

    def __init__(self, path: Path | None = None, prior_mean_s: float = PRIOR_MEAN_S) -> None:
        self.path = path
        self.since: dict[str, float] = {}
        """Node → when its gap began, for every node in a gap (idle, or leased by us)."""
        self._saved_at = 0.0
        self._carried: dict[str, float] = {}
        self._carried_at = 0.0
        estimator = self._load()
        self.watch = GapWatch(estimator or SurvivalEstimator(prior_mean_s=prior_mean_s))

    def update(self, nodes: Iterable[str], now: float) -> None:
        """The nodes that are in a gap at ``now`` (epoch seconds)."""
        known, self._carried = (
            self.since or (self._carried if 0 <= now - self._carried_at <= FRESH_S else {}),
            {},
        )
        self.since = {node: known.get(node, now) for node in nodes}
        self.watch.update(self.since, now)
        if now - self._saved_at >= SAVE_EVERY_S or now < self._saved_at:
            self._saved_at = now
            self._save(now)

    def horizon(self, node: str, now: float) -> float:
        """Expected seconds that the gap of ``node`` will still last."""
        return self.watch.horizon(self.since.get(node, now), now)

    def _load(self) -> SurvivalEstimator | None:
        if self.path is None:
            return None
        try:
            kept = json.loads(self.path.read_text("utf-8"))
            self._carried = {str(node): float(since) for node, since in kept["open"].items()}
            self._carried_at = float(kept["time"])
            return SurvivalEstimator.from_dict(kept["lengths"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._carried = {}
            return None

    def _save(self, now: float) -> None:
        if self.path is None:
            return
        kept = {"time": now, "open": self.since, "lengths": self.watch.estimator.to_dict()}
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps(kept), "utf-8")
            os.replace(temporary, self.path)
        except OSError:  # a full disk must not stop the polls
            temporary.unlink(missing_ok=True)
