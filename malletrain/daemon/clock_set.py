"""Handles a change of the host's clock while the daemon runs, forward or back, by a person or a
time service.

Decides from which size on a change matters. Durations that are computed from a stored time (the age
of a lease, what a budget is charged, what a share was served) leave the change out. The daemon then
restarts its components within its process (:mod:`malletrain.daemon.main`), so that everything that
waits for a time starts over. Time in which the host was suspended counts, because jobs went on. If
two services set the clock against each other, the restarts stop after some.
"""

from __future__ import annotations

from malletrain.config.units import show_duration
from malletrain.daemon.clock import LEAST_S, MOST_SETS, WITHIN_S, Clock
from malletrain.daemon.core import Core
from malletrain.store.shifted import shift_times


class ClockWasSet(RuntimeError):
    """The host's clock was set, so many seconds forward; negative: back. ``last``: that is not
    followed again for a while.
    """

    def __init__(self, by_s: float, slept_s: float = 0.0, last: bool = False) -> None:
        if slept_s >= LEAST_S:
            span = show_duration(slept_s)
            super().__init__(f"The daemon's host was suspended for {span}.")
            return
        way = "forward" if by_s > 0 else "back"
        span = show_duration(abs(by_s))
        often = (
            f" That was {MOST_SETS} times within {show_duration(WITHIN_S)}: something keeps setting"
            " it, and the daemon goes by its own time until less was set within as long."
        )
        super().__init__(
            f"The clock of the daemon's host was set {way} by {span}.{often if last else ''}"
        )


def look_at_the_clock(core: Core, clock: Clock) -> None:
    """Have the core begin anew once the host's clock is far from the core's."""
    by_s, slept_s = clock.behind_s(), clock.slept_s()
    too_often = clock.sets() >= MOST_SETS and slept_s < LEAST_S
    if abs(by_s) < LEAST_S or too_often or core.failed.done():
        return
    with core.transaction() as now:
        core.keep_shares(now)
        core.goals.keep(at_once=True)
        for run in core.runs.values():
            core.repository.save(run)
        with core.store.transaction() as connection:
            shift_times(connection, by_s - slept_s)
    core.fail(ClockWasSet(by_s, slept_s, last=clock.sets() == MOST_SETS - 1))
