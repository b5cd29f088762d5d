"""Handles a change of the host's clock, by a person or a time service, while the daemon runs.

Decides which changes matter. Stored times are shifted, so that durations computed from them (the
age of a lease, the charge to a budget, the service to a share) exclude the change. The daemon then
restarts its components within its process (:mod:`malletrain.daemon.main`), so that all timers start
again. The time of a suspension of the host counts, because jobs continued. If two services set the
clock against each other, the daemon ignores their changes after the first ``MAX_CHANGES``.
"""

from __future__ import annotations

from malletrain.config.units import show_duration
from malletrain.daemon.clock import CHANGES_PERIOD_S, MAX_CHANGES, MIN_CHANGE_S, Clock
from malletrain.daemon.core import Core
from malletrain.store.shifted import shift_times


class ClockWasSet(RuntimeError):
    """The host's clock was set.

    Args:
        by_s: change of the clock, seconds; negative if it was set back.
        slept_s: time for which the host was suspended, seconds.
        last: whether the daemon does not follow the next changes for a while.

    """

    def __init__(self, by_s: float, slept_s: float = 0.0, last: bool = False) -> None:
        if slept_s >= MIN_CHANGE_S:
            span = show_duration(slept_s)
            super().__init__(f"The daemon's host was suspended for {span}.")
            return
        direction = "forward" if by_s > 0 else "back"
        span = show_duration(abs(by_s))
        often = (
            f" That was {MAX_CHANGES} times within {show_duration(CHANGES_PERIOD_S)}: something "
            "keeps setting it, and the daemon keeps its own time until changes are less frequent."
        )
        super().__init__(
            f"The clock of the daemon's host was set {direction} by {span}.{often if last else ''}"
        )


def look_at_the_clock(core: Core, clock: Clock) -> None:
    """Make the core restart if the host's clock differs by at least ``MIN_CHANGE_S``."""
    by_s, slept_s = clock.behind_s(), clock.slept_s()
    too_often = clock.sets() >= MAX_CHANGES and slept_s < MIN_CHANGE_S
    if abs(by_s) < MIN_CHANGE_S or too_often or core.failed.done():
        return
    with core.transaction() as now:
        core.keep_shares(now)
        core.goals.keep(at_once=True)
        for run in core.runs.values():
            core.repository.save(run)
        with core.store.transaction() as connection:
            shift_times(connection, by_s - slept_s)
    core.fail(ClockWasSet(by_s, slept_s, last=clock.sets() == MAX_CHANGES - 1))
