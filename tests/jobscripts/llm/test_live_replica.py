"""Replicas as the live dispatcher keeps them."""

from __future__ import annotations

import pytest
from llmserve.live_replica import UNANSWERED_S, LiveReplica
from llmserve.replica_status import ReplicaStatus
from llmserve.replicas import Capacity
from llmserve.states import ReplicaState

ADDED_AT, LARGEST = 100.0, 1_000
SOON, LATE = ADDED_AT + UNANSWERED_S - 1, ADDED_AT + UNANSWERED_S


@pytest.mark.parametrize(
    ("state", "kv_tokens", "is_known", "now", "expected"),
    [
        # With a front: what it said last; None: it has never answered.
        (None, None, False, SOON, True),
        (None, None, False, LATE, False),
        (ReplicaState.LOADING, None, False, LATE, True),
        (ReplicaState.FAILED, None, False, LATE, True),  # its engine is started again
        (ReplicaState.READY, None, False, LATE, False),  # it cannot be reached any more
        (ReplicaState.DRAINING, None, False, LATE, False),
        (ReplicaState.GONE, None, False, LATE, False),
        # It is in the dispatcher: how much it holds is known.
        (ReplicaState.READY, None, True, SOON, False),
        (None, None, True, SOON, False),
        # Without a front: as the caller said.
        (None, LARGEST + 1, False, LATE, True),
        (None, LARGEST, False, SOON, False),
        (ReplicaState.LOADING, LARGEST, False, SOON, False),
    ],
)
def test_which_replica_may_hold_more(state, kv_tokens, is_known, now, expected):
    capacity = None if kv_tokens is None else Capacity(8, kv_tokens)
    replica = LiveReplica("n1", None, capacity, added_at=ADDED_AT, is_known=is_known)
    if state is not None:
        replica.status = ReplicaStatus(state=str(state))
    assert replica.may_hold_more(LARGEST, now) is expected
