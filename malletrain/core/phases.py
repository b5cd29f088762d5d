"""Detects the phase of a job's training, from the global batch size in its reports and the model
that its script states. Pure.

A phase ends when the batch size changes permanently at the same number of nodes. The smaller last
batch of an epoch does not end it, nor does another batch size at another scale, because a job may
keep its batch size per node. A phase is named after its batch size relative to the first phase
(``batch x2``), so its name is the same at every scale. A change of the model ends a phase too and
is added to the name (``batch x2, model 3e+06``).
"""

from __future__ import annotations

from collections import deque
from statistics import median

from jpa.curve import DEFAULT_PHASE

WINDOW = 15
"""Number of reports whose median is the batch size."""
_TOLERANCE = 0.02
_MODEL = ", model "


class PhaseTracker:
    """Tracks the phase of one job. ``phase``: the phase at the start, such as after a restart of
    the daemon.
    """

    def __init__(self, phase: str = DEFAULT_PHASE) -> None:
        self._batch, _, self._model = phase.partition(_MODEL)
        self._ratio = _ratio_of(self._batch)
        self._nodes = 0
        self._reference: dict[int, float] = {}
        self._recent: deque[float] = deque(maxlen=WINDOW)

    @property
    def phase(self) -> str:
        """The job's current phase."""
        return f"{self._batch}{_MODEL}{self._model}" if self._model else self._batch

    def another_model(self, name: str) -> None:
        """Start a phase with another model, as the script reports."""
        self._model = name

    def feed(self, nodes: int, batch: float) -> str:
        """Add the batch size of one report at a scale of ``nodes``. Returns the job's phase."""
        if nodes != self._nodes:
            self._nodes = nodes
            self._recent.clear()
        if batch > 0:
            self._recent.append(batch)
        if len(self._recent) == WINDOW:
            self._decide(nodes, median(self._recent))
        return self.phase

    def _decide(self, nodes: int, batch: float) -> None:
        # The batch size of the first phase at this scale is known only if the job ran here before.
        ratio = batch / self._reference.setdefault(nodes, batch / self._ratio)
        if abs(ratio / self._ratio - 1) > _TOLERANCE:
            self._ratio = 1.0 if abs(ratio - 1) <= _TOLERANCE else ratio
            self._batch = DEFAULT_PHASE if self._ratio == 1.0 else f"batch x{self._ratio:.3g}"
            self._recent.clear()


def _ratio_of(phase: str) -> float:
    try:
        return float(phase.removeprefix("batch x")) if phase.startswith("batch x") else 1.0
    except ValueError:
        return 1.0
