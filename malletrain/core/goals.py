"""What a job's owner wants beyond speed: a deadline, a budget of node-time, and the amount of work.

Defines the goals, their possible standings, and the two events that carry them to the controller.
:mod:`malletrain.core.goal_keeper` decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GoalStanding(str, Enum):
    """How it stands with a job's deadline and budget."""

    ON_TRACK = "on_track"
    """Nine of ten forecasts end in time and within the budget."""
    AT_RISK = "at_risk"
    """It can be done, but more than one of ten forecasts is too late or costs too much."""
    INFEASIBLE = "infeasible"
    """With every node it could use it would end too late, or the budget is not enough."""
    MET = "met"
    """The job completed in time and within its budget."""
    MISSED = "missed"
    """The deadline has passed, or the job ended without being done."""

    @property
    def final(self) -> bool:
        """Whether nothing changes it any more but what the owner asks for."""
        return self in (GoalStanding.MET, GoalStanding.MISSED)


@dataclass(frozen=True)
class OwnerGoals:
    """What the owner of one job wants."""

    deadline: float | None = None
    """When it is to be done, on the shell's clock; None: whenever."""
    budget_s: float | None = None
    """Charged node-seconds that it may cost in all; None: any number."""
    work: float | None = None
    """Samples in all; None: not known (yet)."""

    @property
    def bind(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.deadline is not None or self.budget_s is not None


NO_GOALS = OwnerGoals()
SAME_WORK = 0.01
"""Work that is known otherwise by such a part is other work."""


def same_work(one: float | None, other: float | None) -> bool:
    """Whether both are the same work, as far as a forecast goes."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= SAME_WORK * max(one, other)


@dataclass(frozen=True)
class GoalsSoFar:
    """How far a job had come before the controller was made."""

    done: float = 0.0
    """Samples."""
    charged_s: float = 0.0
    """Node-seconds."""
    charged_until: float | None = None
    """When they were counted; None: never."""
    standing: GoalStanding | None = None


NOTHING_SO_FAR = GoalsSoFar()


@dataclass(frozen=True)
class GoalsChanged:
    """The owner wants something else, or it became known how much work there is."""

    job: str
    goals: OwnerGoals


@dataclass(frozen=True)
class WorkReported:
    """The job has processed so many samples so far, over all its restarts."""

    job: str
    done: float
