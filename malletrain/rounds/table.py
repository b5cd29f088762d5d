"""The transition tables of a rescale: what happens at which event in which stage. Pure.

:class:`RoundMachine` takes the first row of the current stage and event whose guard holds, and
carries out its steps. A pair of stage and event without a row cannot happen and raises
:class:`NoTransition`.

There is a table for each mode of jobs that restarts or regroups workers. A row has stages, an
event, a guard (empty: none), the steps, and the other stages that can follow. Guards and steps are
methods of :class:`malletrain.rounds.restart.RestartRounds` and
:class:`malletrain.rounds.live.LiveRounds`. A service has no table: its stage follows from its view
(:mod:`malletrain.rounds.service`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from malletrain.protocol.messages import Assignment
from malletrain.rounds.interface import Action, RoundStage


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


IDLE, WARMING, DRAINING, FORMING, RUNNING, FINISHING, COMPLETED = RoundStage
UNFINISHED = (IDLE, WARMING, DRAINING, FORMING, RUNNING, FINISHING)
ANY = (*UNFINISHED, COMPLETED)
AFTER_JOINERS = (IDLE, WARMING, DRAINING, FORMING, RUNNING)
"""Stages after a check of the joiners: some are missing, a failure, a drain, a round, or nothing
has to change."""
AFTER_FORM = (IDLE, WARMING, FORMING)
"""Stages after a round was to be formed: without nodes, with too few, or with enough."""

_PLANNED = (
    Row((COMPLETED,), RoundEvent.PLANNED, "", ()),
    Row((WARMING, DRAINING, RUNNING, FINISHING), RoundEvent.PLANNED, "finishing_now",
        ("await_end",), (FINISHING,)),
    # The job moves to the target after this round is formed.
    Row((FORMING,), RoundEvent.PLANNED, "keeps_round", ("request_nodes",)),
    Row((DRAINING,), RoundEvent.PLANNED, "all_at_work", ("request_nodes", "drain_sooner")),
    Row((DRAINING,), RoundEvent.PLANNED, "", ("request_nodes", "form"), AFTER_FORM),
    Row((IDLE, WARMING, FORMING, RUNNING, FINISHING), RoundEvent.PLANNED, "has_target",
        ("request_nodes", "await_joiners"), AFTER_JOINERS),
    Row((IDLE, WARMING, FORMING, RUNNING, FINISHING), RoundEvent.PLANNED, "",
        ("request_nodes", "drain"), (IDLE, DRAINING)),
)  # fmt: skip

_REPORTED = (
    Row((IDLE, COMPLETED), RoundEvent.REPORTED, "", ()),
    Row((WARMING, DRAINING), RoundEvent.REPORTED, "finishing_now", ("await_end",), (FINISHING,)),
    Row((WARMING,), RoundEvent.REPORTED, "", ("check_failures", "check_joiners"), AFTER_JOINERS),
    Row((DRAINING,), RoundEvent.REPORTED, "all_at_work", ()),
    Row((DRAINING,), RoundEvent.REPORTED, "", ("form",), AFTER_FORM),
    Row((FORMING,), RoundEvent.REPORTED, "all_at_work", ("run",), AFTER_JOINERS),
    Row((FORMING,), RoundEvent.REPORTED, "", ("check_failures", "invite_reporter"),
        (IDLE,)),
    Row((RUNNING,), RoundEvent.REPORTED, "", ("check_failures",), (IDLE,)),
    Row((FINISHING,), RoundEvent.REPORTED, "finishing_now", ()),
    Row((FINISHING,), RoundEvent.REPORTED, "all_at_work", ("move_on",), AFTER_JOINERS),
    Row((FINISHING,), RoundEvent.REPORTED, "changes_nodes", ("form",), AFTER_FORM),
    Row((FINISHING,), RoundEvent.REPORTED, "", ("check_failures",), (IDLE,)),
)  # fmt: skip

_NODES_AND_TIME = (
    Row((FORMING,), RoundEvent.STORE_UP, "is_newest_store", ("invite_others",)),
    Row(ANY, RoundEvent.STORE_UP, "", ()),
    Row((DRAINING,), RoundEvent.DRAINED, "answers_drain", ("form",), AFTER_FORM),
    Row(ANY, RoundEvent.DRAINED, "", ()),
    Row((DRAINING,), RoundEvent.RESTARTED, "", ("form",), AFTER_FORM),
    Row((WARMING, FORMING, RUNNING, FINISHING), RoundEvent.RESTARTED, "", ("await_joiners",),
        AFTER_JOINERS),
    Row((DRAINING,), RoundEvent.LOST, "all_at_work", ()),
    Row((DRAINING,), RoundEvent.LOST, "", ("form",), AFTER_FORM),
    Row((WARMING,), RoundEvent.LOST, "", ("check_joiners",), AFTER_JOINERS),
    # No plan follows if the lost node was not in the newest one.
    Row((FINISHING,), RoundEvent.LOST, "has_lost_member", ("await_plan",)),
    # Until the next plan, only a rescale in progress continues.
    Row((IDLE, FORMING, RUNNING, FINISHING, COMPLETED), RoundEvent.LOST, "", ()),
    Row((WARMING,), RoundEvent.TIME_OVER, "", ("check_joiners",), AFTER_JOINERS),
    Row((DRAINING,), RoundEvent.TIME_OVER, "drains_after_epoch", ("extend_drain",)),
    Row((DRAINING, FINISHING), RoundEvent.TIME_OVER, "", ("form",), AFTER_FORM),
    Row((FORMING,), RoundEvent.TIME_OVER, "has_lost_member", ("await_joiners",), AFTER_JOINERS),
    Row((FORMING,), RoundEvent.TIME_OVER, "has_unreachable_member", ("extend_by_grace",)),
    Row((FORMING,), RoundEvent.TIME_OVER, "lacks_members", ("fail_join",), (IDLE,)),
    Row((FORMING,), RoundEvent.TIME_OVER, "", ("form_without_absent",), AFTER_FORM),
    Row((WARMING, DRAINING, FORMING, RUNNING, FINISHING), RoundEvent.FAILURE_DUE, "",
        ("check_failures",), (IDLE,)),
    Row((WARMING,), RoundEvent.ROUND_SUFFICES, "", ("resume",), (RUNNING,)),
    Row((WARMING,), RoundEvent.JOINERS_READY, "", ("drain",), (DRAINING, *AFTER_FORM)),
    Row((RUNNING,), RoundEvent.WORKERS_RUNNING, "changes_nodes_of_round",
        ("await_joiners",), AFTER_JOINERS),
    Row((RUNNING,), RoundEvent.WORKERS_RUNNING, "", ()),
    Row((IDLE,), RoundEvent.ADOPTED, "round_continues", ("take_over",),
        (FINISHING, *AFTER_JOINERS)),
    Row((IDLE,), RoundEvent.ADOPTED, "", ()),
    Row(UNFINISHED, RoundEvent.ENDED, "", ("complete",), (COMPLETED,)),
    Row((COMPLETED,), RoundEvent.ENDED, "", ()),
    Row(ANY, RoundEvent.STOPPED, "", ("release_all",), (IDLE,)),
)  # fmt: skip

RESTART_TABLE = make_table((*_PLANNED, *_REPORTED, *_NODES_AND_TIME))
"""The transitions of restart mode."""

LIVE_TABLE = make_table(
    (
        Row((FORMING,), RoundEvent.PLANNED, "passes_on_state",
            ("request_nodes", "limit_hand_over")),
        Row(UNFINISHED, RoundEvent.GROUP_BROKE, "has_unreachable_member",
            ("continue_without_unreachable",), (FORMING,)),
        Row(UNFINISHED, RoundEvent.GROUP_BROKE, "", ("await_loss",)),
        Row(UNFINISHED, RoundEvent.WORKER_FAILED, "", ("continue_without_failed",), (FORMING,)),
        Row(UNFINISHED, RoundEvent.JOINER_FAILED, "",
            ("count_failed_join", "continue_without_failed"), (FORMING,)),
        # While DRAINING no member stays, so none continues.
        Row((DRAINING, COMPLETED), RoundEvent.MEMBER_LOST, "", ()),
        Row((IDLE, WARMING, FORMING, RUNNING, FINISHING), RoundEvent.MEMBER_LOST, "has_survivors",
            ("continue_without_node",), (FORMING,)),
        Row((IDLE, WARMING, FORMING, RUNNING, FINISHING), RoundEvent.MEMBER_LOST, "", ()),
        Row(UNFINISHED, RoundEvent.REGROUP_DUE, "", ("continue_in_new_group",), (FORMING,)),
        Row((FORMING,), RoundEvent.HAND_OVER_DUE, "", ("move_without_hand_over",), AFTER_JOINERS),
        Row((IDLE, WARMING, DRAINING, RUNNING, FINISHING, COMPLETED), RoundEvent.HAND_OVER_DUE, "",
            ()),
        Row((FORMING,), RoundEvent.TIME_OVER, "joins_after_steps", ("extend_join",)),
        Row((FORMING,), RoundEvent.TIME_OVER, "has_late_joiners", ("form_without_late",),
            AFTER_FORM),
        Row((FORMING,), RoundEvent.TIME_OVER, "may_be_in_step", ("extend_step",)),
        Row((FORMING,), RoundEvent.TIME_OVER, "waits_for_members", ("abort_step",), AFTER_JOINERS),
    ),
    base=RESTART_TABLE,
)  # fmt: skip
"""The transitions of live mode: these, and those of restart mode."""
