"""Helpers for the tables of the controller: events as input, commands as output."""

from __future__ import annotations

from allocator import RescaleCost
from malletrain.core.controller import Controller
from malletrain.core.events import (
    GapsSeen,
    JobSubmitted,
    NodeJoined,
    RescaleFinished,
    Tick,
)
from malletrain.core.settings import ControllerSettings, PlanningSettings

CHEAP = RescaleCost(up_s=1.0, down_s=1.0, start_s=1.0)


def controller(**changes):
    planning = PlanningSettings(cost=CHEAP, max_running=changes.pop("max_running", 20))
    patience = {"starvation_s": 100.0, "min_interval_s": 0.0, "notice_debounce_s": 1.0}
    return Controller(ControllerSettings(planning, **{**patience, **changes}))


def play(c, script):
    """Feed lines of ``(time, event)`` or ``(time, event, commands)``; return all commands.

    ``commands`` are exactly those that the controller gives for the event and for the ticks since
    the line before. Ticks happen where the controller asks for them.
    """
    all_commands = []
    for time, event, *expected in script:
        commands = []
        while (due := c.next_wakeup()) is not None and due < time:
            commands += c.handle(Tick(), due)
        commands += c.handle(event, time)
        if expected:
            assert commands == expected[0], f"until {time}: {commands}"
        all_commands += commands
    return all_commands


def nodes(*names, at=0.0, **more):
    return [(at, NodeJoined(name, **more)) for name in names]


def job(name="j", low=1, high=4, **more):
    return JobSubmitted(name, low, high, **more)


def running(c, low=1, high=4, on=("a", "b"), name="j"):
    """A job that runs on nodes; return the time."""
    now = 0.0
    play(
        c,
        [
            (now, job(name, low, high)),
            *nodes(*on),
            (1.0, Tick()),
            (5.0, RescaleFinished(name)),
            (6.5, Tick()),
        ],
    )
    assert set(c.jobs[name].nodes) == set(on)
    return 10.0


def gaps(*names, horizon=None, node_class="default"):
    return GapsSeen(dict.fromkeys(names, (horizon, node_class)))
