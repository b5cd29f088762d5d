"""The transitions of a rescale in restart mode and in live mode. Pure.

A row has stages, an event, a guard (empty: none), the steps, and the other stages that can follow.
Guards and steps are methods of :class:`malletrain.rounds.restart.RestartRounds` and
:class:`malletrain.rounds.live.LiveRounds`. A service has no table: its stage follows from its view
(:mod:`malletrain.rounds.service`).
"""

from __future__ import annotations

from malletrain.rounds.interface import RoundStage
from malletrain.rounds.table import RoundEvent, Row, make_table

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
