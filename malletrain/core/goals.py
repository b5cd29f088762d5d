"""A job's goals beyond throughput: a deadline, a budget of node-time, and the amount of work.

Defines the goals, their possible standings, and the two events that carry them to the controller.
:mod:`malletrain.core.goal_keeper` decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GoalStanding(str, Enum):
    """Standing of a job with respect to its deadline and budget."""

    ON_TRACK = "on_track"
    """At least 90 % of the forecast ends are in time and within the budget."""
    AT_RISK = "at_risk"
    """The goals can be met, but more than 10 % of the forecasts are too late or cost too much."""
    INFEASIBLE = "infeasible"
    """The job would end too late even with every node that it could use, or the budget does not
    suffice.
    """
    MET = "met"
    """The job completed in time and within its budget."""
    MISSED = "missed"
    """The deadline has passed, or the job ended without being done."""

    @property
    def final(self) -> bool:
        """Whether only new goals of the owner can change it."""
        return self in (GoalStanding.MET, GoalStanding.MISSED)


@dataclass(frozen=True)
class OwnerGoals:
    """Goals of the owner of one job."""

    deadline: float | None = None
    """Time by which it is to complete, on the shell's clock; None for no deadline."""
    budget_s: float | None = None
    """Maximum charge in total, node-seconds; None for no limit."""
    work: float | None = None
    """Total number of samples; None if not known (yet)."""

    @property
    def bind(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.deadline is not None or self.budget_s is not None


NO_GOALS = OwnerGoals()
WORK_TOLERANCE = 0.01
"""Relative difference up to which two amounts of work count as the same."""


def same_work(one: float | None, other: float | None) -> bool:
    """Return whether both amounts are the same for the purpose of a forecast."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= WORK_TOLERANCE * max(one, other)


@dataclass(frozen=True)
class GoalsSoFar:
    """Progress and charge of a job before the controller was created."""

    done: float = 0.0
    """Processed samples."""
    charged_s: float = 0.0
    """Charge, node-seconds."""
    charged_until: float | None = None
    """Time up to which the charge is counted; None if it never was."""
    standing: GoalStanding | None = None


NOTHING_SO_FAR = GoalsSoFar()


@dataclass(frozen=True)
class GoalsChanged:
    """The owner has changed the goals, or the amount of work became known."""

    job: str
    goals: OwnerGoals


@dataclass(frozen=True)
class WorkReported:
    """The job has processed ``done`` samples so far, over all its restarts."""

    job: str
    done: float
