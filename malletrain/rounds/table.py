"""The transition table of a rescale: what happens at which event in which stage. Pure.

:class:`RoundMachine` takes the first row of the current stage and event whose guard holds, and
carries out its steps. A pair of stage and event without a row cannot happen and raises
:class:`NoTransition`. :mod:`malletrain.rounds.transitions` has a table for each mode of jobs that
restarts or regroups workers; the modes' classes have the methods that guards and steps name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from malletrain.protocol.messages import Assignment
from malletrain.rounds.actions import Action
from malletrain.rounds.interface import RoundStage


class RoundEvent(str, Enum):
    """An event of a rescale. :data:`EVENTS` describes each."""

    PLANNED = "planned"
    ADOPTED = "adopted"
    STOPPED = "stopped"
    REPORTED = "reported"
    ENDED = "ended"
    STORE_UP = "store-up"
    DRAINED = "drained"
    RESTARTED = "restarted"
    LOST = "lost"
    TIME_OVER = "time-over"
    FAILURE_DUE = "failure-due"
    JOINERS_READY = "joiners-ready"
    ROUND_SUFFICES = "round-suffices"
    WORKERS_RUNNING = "workers-running"
    GROUP_BROKE = "group-broke"
    WORKER_FAILED = "worker-failed"
    JOINER_FAILED = "joiner-failed"
    MEMBER_LOST = "member-lost"
    REGROUP_DUE = "regroup-due"
    HAND_OVER_DUE = "hand-over-due"

    __str__ = str.__str__


EVENTS: dict[RoundEvent, str] = {
    RoundEvent.PLANNED: "The plan names the job's nodes.",
    RoundEvent.ADOPTED: "A restarted daemon has the state that the agents report.",
    RoundEvent.STOPPED: "The job has ended or has to end.",
    RoundEvent.REPORTED: "An agent reports the phase of the job on its node.",
    RoundEvent.ENDED: "The script has ended with exit code 0 on every node of one round.",
    RoundEvent.STORE_UP: "A node serves the round's store.",
    RoundEvent.DRAINED: "A node answers the drain.",
    RoundEvent.RESTARTED: "The agent of a planned node has nothing of the job any more.",
    RoundEvent.LOST: "A node is lost.",
    RoundEvent.TIME_OVER: "The time limit of the stage has passed.",
    RoundEvent.FAILURE_DUE: "The failure grace is over.",
    RoundEvent.JOINERS_READY: "The launchers of the next round are ready.",
    RoundEvent.ROUND_SUFFICES: "The nodes that are ready are those of the newest round.",
    RoundEvent.WORKERS_RUNNING: "Every member of the newest round runs.",
    RoundEvent.GROUP_BROKE: "Live workers wait in a broken group.",
    RoundEvent.WORKER_FAILED: "A live worker failed while others hold the state.",
    RoundEvent.JOINER_FAILED: "A live worker failed while it joined the others.",
    RoundEvent.MEMBER_LOST: "A node with live workers is lost.",
    RoundEvent.REGROUP_DUE: "A broken group has waited long enough for the report of a loss.",
    RoundEvent.HAND_OVER_DUE: "The time for a round in which leavers pass on the state is over.",
}
"""What each event means. Those from GROUP_BROKE on occur in live mode only."""


@dataclass(frozen=True)
class Occurrence:
    """One event with its data."""

    event: RoundEvent
    now: float
    """Seconds on the daemon's clock."""
    node: str = ""
    """The node of which the event is; empty if it is of the job."""
    assignment: Assignment | None = None
    """What the node reports."""
    within_s: float | None = None
    """Seconds until a member leaves; None if none does."""
    number: int = 0
    """Number of the round, or of the drain request, that the node answers."""

    def then(self, event: RoundEvent) -> Occurrence:
        """Return an event that follows from this one."""
        return replace(self, event=event)


@dataclass(frozen=True)
class Row:
    """One transition."""

    stages: tuple[RoundStage, ...]
    event: RoundEvent
    guard: str
    """Name of the method that decides whether this row applies; empty: it does."""
    steps: tuple[str, ...]
    """Names of the methods that carry it out, in order, until one changes the stage; none: the
    event changes nothing."""
    to: tuple[RoundStage, ...] = ()
    """Other stages in which the job can be afterwards. It can also stay in its stage."""


Table = Mapping[tuple[RoundStage, RoundEvent], tuple[Row, ...]]


def make_table(rows: Iterable[Row], base: Table | None = None) -> Table:
    """Return the rows by stage and event, in their order.

    Args:
        rows: the rows.
        base: a table whose rows follow those of the same stage and event, unless these end with a
            row without a guard.

    Raises:
        ValueError: a row can never apply, or a pair has no row without a guard.
    """
    table: dict[tuple[RoundStage, RoundEvent], tuple[Row, ...]] = {}
    for row in rows:
        for stage in row.stages:
            before = table.get((stage, row.event), ())
            if before and not before[-1].guard:
                raise ValueError(f"A row of {stage} and {row.event} follows one without a guard.")
            table[stage, row.event] = (*before, row)
    for pair, rows_of_base in (base or {}).items():
        own = table.get(pair, ())
        if not own or own[-1].guard:
            table[pair] = (*own, *rows_of_base)
    for (stage, event), of_pair in table.items():
        if of_pair[-1].guard:
            raise ValueError(f"The last row of {stage} and {event} has a guard.")
    return table


class NoTransition(RuntimeError):
    """An event cannot happen in this stage."""


class RoundMachine:
    """What carries out a table. ``stage``: the current stage."""

    table: ClassVar[Table]
    stage: RoundStage

    def handle(self, occurrence: Occurrence, table: Table | None = None) -> list[Action]:
        """Handle an event.

        Args:
            occurrence: the event.
            table: the table that applies; None for that of the mode.

        Returns:
            The actions that follow, in order.

        Raises:
            NoTransition: the table has no row for the stage and the event.
        """
        rows = (table or self.table).get((self.stage, occurrence.event))
        if rows is None:
            raise NoTransition(f"The event {occurrence.event} cannot happen while {self.stage}.")
        row = next(r for r in rows if not r.guard or getattr(self, r.guard)(occurrence))
        return self.carry_out(row, occurrence)

    def carry_out(self, row: Row, occurrence: Occurrence) -> list[Action]:
        """Carry out the steps of a row, in order, until one of them changes the stage."""
        stage, actions = self.stage, []
        for step in row.steps:
            actions += getattr(self, step)(occurrence)
            if self.stage is not stage:
                break
        return actions
