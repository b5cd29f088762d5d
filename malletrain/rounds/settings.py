"""How long each step of a rescale may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundSettings:
    """Time limits in seconds. ``warmup_s``: for joiners to come up while the others train, or
    nobody can without them; ``warmup_broken_s``: while those that could train stand still;
    ``verdict_s``: how long a failure waits for the news that a node was lost; ``linger_s``: how
    long nodes that the main scheduler wants back wait for joiners without whom the job cannot go
    on; ``stop_s``: between SIGTERM and SIGKILL.
    """

    warmup_s: float = 60.0
    warmup_broken_s: float = 15.0
    drain_s: float = 10.0
    join_s: float = 60.0
    verdict_s: float = 2.5
    linger_s: float = 1.0
    stop_s: float = 5.0
