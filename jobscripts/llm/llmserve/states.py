"""The states of a request and of a replica, as tables of transitions. Pure.

queued ──▶ running ──▶ done | cancelled | failed        queued ──▶ refused
   ▲          │ notice
   │          ▼
   └─loss── moving      a request that returns goes to the front of the queue

loading ──▶ ready ──▶ draining ──▶ gone | failed
"""

from __future__ import annotations

from enum import Enum


class RequestState(str, Enum):
    """State of a request."""

    QUEUED = "queued"
    RUNNING = "running"
    """An attempt of the request is on a replica."""
    MOVING = "moving"
    """Its attempt is being stopped, to be continued on another replica."""
    DONE = "done"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """It was refused: its user exceeds a limit, or no replica large enough has become ready."""
    FAILED = "failed"

    __str__ = str.__str__


class RequestEvent(Enum):
    """Event of a request."""

    POST = "an attempt is posted to a replica"
    MOVE = "its replica leaves before the attempt can end"
    STOPPED = "the attempt was stopped on request"
    LOSE = "the attempt is lost with its replica, or fails and may be repeated"
    FINISH = "all its tokens are generated"
    CANCEL = "its client cancels it"
    REFUSE = "it is not accepted"
    GIVE_UP = "it cannot be answered"


class ReplicaState(str, Enum):
    """State of a replica: one engine on one node."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """The replica has notice of its end: it gets no new requests; its requests may end there."""
    GONE = "gone"
    """Its node is gone."""
    FAILED = "failed"
    """Its engine ended by itself."""

    __str__ = str.__str__


class ReplicaEvent(Enum):
    """Event of a replica."""

    LOAD = "the model is loaded"
    NOTICE = "its node will be taken"
    LOSE = "its node is gone"
    CRASH = "its engine ended by itself"


S, E = RequestState, RequestEvent
REQUEST_TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (S.QUEUED, E.POST): S.RUNNING,
    (S.QUEUED, E.REFUSE): S.REFUSED,
    (S.QUEUED, E.CANCEL): S.CANCELLED,
    (S.QUEUED, E.FINISH): S.DONE,
    (S.RUNNING, E.MOVE): S.MOVING,
    (S.RUNNING, E.LOSE): S.QUEUED,
    (S.RUNNING, E.FINISH): S.DONE,
    (S.RUNNING, E.CANCEL): S.CANCELLED,
    (S.RUNNING, E.GIVE_UP): S.FAILED,
    (S.MOVING, E.STOPPED): S.QUEUED,
    (S.MOVING, E.LOSE): S.QUEUED,
    (S.MOVING, E.FINISH): S.DONE,
    (S.MOVING, E.CANCEL): S.CANCELLED,
    (S.MOVING, E.GIVE_UP): S.FAILED,
}
"""(state, event) → next state. Any other event is an error of the caller. FINISH of a queued
request: it was resumed and already has all its tokens.
"""

R, T = ReplicaState, ReplicaEvent
REPLICA_TRANSITIONS: dict[tuple[ReplicaState, ReplicaEvent], ReplicaState] = {
    (R.LOADING, T.LOAD): R.READY,
    (R.LOADING, T.NOTICE): R.DRAINING,
    (R.LOADING, T.LOSE): R.GONE,
    (R.LOADING, T.CRASH): R.FAILED,
    (R.READY, T.NOTICE): R.DRAINING,
    (R.READY, T.LOSE): R.GONE,
    (R.READY, T.CRASH): R.FAILED,
    (R.DRAINING, T.NOTICE): R.DRAINING,
    (R.DRAINING, T.LOAD): R.DRAINING,
    (R.DRAINING, T.LOSE): R.GONE,
    (R.DRAINING, T.CRASH): R.FAILED,
}
"""(state, event) → next state. Any other event is an error of the caller."""

ENDED = frozenset((S.DONE, S.CANCELLED, S.REFUSED, S.FAILED))
"""Final states of a request."""
