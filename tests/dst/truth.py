"""One job, as it truly is: what it trained, what is on disk, what became of it. And how fast every
job trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from malletrain.protocol.messages import JobSpec

STEP_S = 0.4
"""Duration of a step in all groups, seconds. A step trains BATCH samples on each node."""
BATCH = 20.0
SNAPSHOT_EVERY = 4
"""Steps."""


@dataclass
class JobTruth:
    """One job: how long it is, what is on disk, what was trained."""

    spec: JobSpec
    length: float
    saved: float = 0.0
    """The position of the newest snapshot."""
    trained: float = 0.0
    """Samples trained in all, repetitions included."""
    reached: float = 0.0
    """The position of the state that was the furthest."""
    finished: bool = False
    groups: dict[int, Any] = field(default_factory=dict)
    crashes: int = 0
    """Number of failures of its own script."""
    cut_short: int = 0
    """Number of processes of a service that were stopped with unfinished work."""
