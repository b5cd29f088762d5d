"""What a site's gaps were like, kept over restarts: since when each node is in a gap, how long gaps
last, and, where that is wished for, what foretells how long each lasts yet.

One JSON file, written at most once a minute; a file that is lost, old or damaged costs knowledge
and nothing else. It decides nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scavenger.horizon import PRIOR_MEAN_S, GapWatch, SurvivalEstimator
from scavenger.lifetimes import Foretelling, Lifetimes

SAVE_EVERY_S = 60.0
FRESH_S = 600.0
"""Gaps that were open when the file was written are taken to be the same ones if it is no older."""


class GapMemory:
    """``path``: the file, ``None`` for none. ``prior_mean_s``: expected length of a gap before any
    was seen. ``foretells``: gaps are foretold one by one (:mod:`scavenger.lifetimes`), and not by
    their age alone.
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
        """Node → when its gap began, for every node in a gap (idle, or leased by us)."""
        self._saved_at = 0.0
        self._carried: dict[str, float] = {}
        self._carried_at = 0.0
        self._saved_lifetimes: Any = None
        estimator = self._load() or SurvivalEstimator(prior_mean_s=prior_mean_s)
        self.watch = GapWatch(estimator)
        self.lifetimes = self._lifetimes(estimator) if foretells else None
        self.foretold: Foretelling = {}
        """How long every gap of the latest update lasts yet; empty where nothing is foretold."""

    def update(self, nodes: Iterable[str], now: float, requested: float | None = None) -> None:
        """The nodes that are in a gap at ``now`` (epoch seconds). ``requested``: how many the
        waiting jobs of the main scheduler request; None: not shown.
        """
        previous, self._carried = (
            self.since or (self._carried if 0 <= now - self._carried_at <= FRESH_S else {}),
            {},
        )
        self.since = {node: previous.get(node, now) for node in nodes}
        if self.lifetimes is None:
            self.watch.update(self.since, now)
        else:  # which feeds the lengths of gaps as well
            self.lifetimes.update(self.since, now, requested)
            self.foretold = self.lifetimes.foretell(now)
        if now - self._saved_at >= SAVE_EVERY_S or now < self._saved_at:
            self._saved_at = now
            self._save(now)

    def horizon(self, node: str, now: float) -> float:
        """Expected seconds that the gap of ``node`` will still last."""
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
