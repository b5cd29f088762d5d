"""Decides which requests move off replicas that have notice of their end. Pure: no sockets, no
clock.

A request moves if its answer may not be complete before its replica ends, if it can be continued or
started again, and if another replica has room for it now. Room that moving requests will need is
kept free. A request without room elsewhere stays, and may move later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmserve.replicas import DispatcherReplica
from llmserve.states import ReplicaState, RequestState
from llmserve.tracked_request import TrackedRequest

NOTICE_MARGIN_S = 1.0
"""Seconds before the end of a replica at which its answers should be complete."""


def requests_to_move(
    requests: Mapping[str, TrackedRequest], replicas: Collection[DispatcherReplica], now: float
) -> list[TrackedRequest]:
    """Return the requests whose attempts are to be stopped now, to be continued elsewhere.

    Args:
        requests: name → request, of those that have not ended.
        replicas: all replicas, in any fixed order.
        now: seconds on the clock of the caller.
    """
    requests_to_stop: list[TrackedRequest] = []
    moving_count = count_moving(requests, replicas)
    for replica in _leaving(replicas):
        for name in replica.requests:
            tracked = requests[name]
            if tracked.state is not RequestState.RUNNING or not _should_move(tracked, replica, now):
                continue
            if moving_count + len(requests_to_stop) >= room(tracked.request.tokens, replicas):
                return requests_to_stop
            requests_to_stop.append(tracked)
    return requests_to_stop


def count_moving(
    requests: Mapping[str, TrackedRequest], replicas: Collection[DispatcherReplica]
) -> int:
    """Return the number of requests that are being stopped to be moved.

    Args:
        requests: name → request, of those that have not ended.
        replicas: all replicas.
    """
    return sum(
        requests[name].state is RequestState.MOVING
        for replica in _leaving(replicas)
        for name in replica.requests
    )


def room(tokens: int, replicas: Collection[DispatcherReplica]) -> int:
    """Return the number of requests of a size that the ready replicas could take now.

    Args:
        tokens: number that each request reserves, prompt and answer together.
        replicas: all replicas. One that is reserved for a request has no room for others.
    """
    return sum(
        min(replica.capacity.slots - len(replica.requests), replica.free_tokens // tokens)
        for replica in replicas
        if replica.state is ReplicaState.READY and replica.reserved_for is None
    )


def _leaving(replicas: Collection[DispatcherReplica]) -> list[DispatcherReplica]:
    return [replica for replica in replicas if replica.state is ReplicaState.DRAINING]


def _should_move(tracked: TrackedRequest, replica: DispatcherReplica, now: float) -> bool:
    """Return whether the answer may not be complete in time. False for a stream that has begun and
    cannot be continued.
    """
    token_s = replica.capacity.token_s
    in_time = token_s > 0 and (
        now + tracked.missing * token_s + NOTICE_MARGIN_S <= replica.lasts_until
    )
    return not in_time and (tracked.request.continuable or not tracked.delivered)
