"""The states of a replica in its own process, as a table of transitions, and when it may load.
Pure.

loading ──▶ ready ──▶ draining ──▶ gone
   ▲  └──▶ failed ◀─────┘
   └─────────┘ the engine is started again
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from llmserve.states import ReplicaState
from malletrain.membership import Member


class LifeEvent(Enum):
    """Events of a replica, as its own process sees them."""

    LOAD = "the engine answers that it is well"
    NOTICE = "its node will be taken"
    STAY = "the notice is withdrawn"
    CRASH = "the engine ended by itself"
    RESTART = "the engine is started again"
    END = "the process is asked to end"


R, T = ReplicaState, LifeEvent
LIFE_TRANSITIONS: dict[tuple[ReplicaState, LifeEvent], ReplicaState] = {
    (R.LOADING, T.LOAD): R.READY,
    (R.LOADING, T.NOTICE): R.DRAINING,
    (R.LOADING, T.STAY): R.LOADING,
    (R.LOADING, T.CRASH): R.FAILED,
    (R.LOADING, T.END): R.GONE,
    (R.READY, T.NOTICE): R.DRAINING,
    (R.READY, T.STAY): R.READY,
    (R.READY, T.CRASH): R.FAILED,
    (R.READY, T.END): R.GONE,
    (R.DRAINING, T.LOAD): R.DRAINING,
    (R.DRAINING, T.NOTICE): R.DRAINING,
    (R.DRAINING, T.STAY): R.LOADING,
    (R.DRAINING, T.CRASH): R.FAILED,
    (R.DRAINING, T.END): R.GONE,
    (R.FAILED, T.NOTICE): R.FAILED,
    (R.FAILED, T.STAY): R.FAILED,
    (R.FAILED, T.RESTART): R.LOADING,
    (R.FAILED, T.END): R.GONE,
}
"""(state, event) → next state. Any other event is an error. After a withdrawn notice the replica is
LOADING again until it is checked whether the engine has loaded."""


def may_load(members: Sequence[Member], me: Member, at_once: int) -> bool:
    """Return whether a replica may begin to load. This limits how many replicas read the model at
    the same time.

    Args:
        members: members in the newest view, in an order that is the same for all members.
        me: this member.
        at_once: maximum number of replicas that load at the same time.
    """
    before = 0
    for member in members:
        if member == me:
            break
        before += member.loading and not member.leaving
    return before < at_once
