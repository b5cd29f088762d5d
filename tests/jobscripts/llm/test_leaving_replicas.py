"""Which requests move off replicas that have notice of their end."""

from __future__ import annotations

import math

import pytest
from llmserve.generation import GenerationRequest
from llmserve.leaving_replicas import NOTICE_MARGIN_S, count_moving, requests_to_move, room
from llmserve.replicas import Capacity, DispatcherReplica
from llmserve.states import ReplicaState, RequestState
from llmserve.tracked_request import TrackedRequest

NOW, END = 100.0, 110.0


def replica(
    name: str, state: ReplicaState, slots: int = 8, kv_tokens: int = 1_000, token_s: float = 1.0
) -> DispatcherReplica:
    return DispatcherReplica(name, Capacity(slots, kv_tokens, token_s), state, lasts_until=END)


def tracked(on: DispatcherReplica, name: str = "r", tokens: int = 30, **more) -> TrackedRequest:
    """A request that runs on a replica, with one token of a prompt."""
    changes = {key: more.pop(key) for key in ("continuable", "stream") if key in more}
    request = GenerationRequest(name, "alice", (1,), tokens, **changes)
    on.hold(name, request.tokens)
    return TrackedRequest(
        request, **{"state": RequestState.RUNNING, "attempt": 1, "replica": on.name, **more}
    )


RUNNING, MOVING = RequestState.RUNNING, RequestState.MOVING
IN_TIME = int(END - NOW - NOTICE_MARGIN_S)
"""Tokens of a second each that end in time."""


@pytest.mark.parametrize(
    ("request_fields", "token_s", "moves"),
    [
        ({"tokens": IN_TIME}, 1.0, False),
        ({"tokens": IN_TIME + 1}, 1.0, True),
        ({"tokens": IN_TIME + 1, "generated": [5]}, 1.0, False),
        ({"tokens": IN_TIME + 1}, 0.5, False),
        ({"tokens": 1}, 0.0, True),  # how fast it is is not known
        ({"state": MOVING}, 1.0, False),  # it moves already
        ({"continuable": False}, 1.0, True),  # it starts again
        ({"continuable": False, "stream": True}, 1.0, True),  # so does a stream without tokens
        ({"continuable": False, "stream": True, "delivered": 1}, 1.0, False),
        ({"stream": True, "delivered": 1}, 1.0, True),
    ],
)
def test_what_may_not_end_in_time_moves_if_it_can_be_continued(request_fields, token_s, moves):
    leaving = replica("a", ReplicaState.DRAINING, token_s=token_s)
    one = tracked(leaving, **request_fields)
    replicas = [leaving, replica("b", ReplicaState.READY)]
    assert requests_to_move({"r": one}, replicas, NOW) == [one] * moves


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        (ReplicaState.LOADING, False),
        (ReplicaState.READY, False),
        (ReplicaState.DRAINING, True),
    ],
)
def test_only_replicas_with_notice_are_left(state, moves):
    on = replica("a", state)
    one = tracked(on)
    replicas = [on, replica("b", ReplicaState.READY)]
    assert requests_to_move({"r": one}, replicas, NOW) == [one] * moves


@pytest.mark.parametrize(
    ("slots", "kv_tokens", "states", "moves"),
    [
        (2, 1_000, (RUNNING, RUNNING, RUNNING), "01"),
        (8, 2 * 31, (RUNNING, RUNNING, RUNNING), "01"),
        (8, 30, (RUNNING, RUNNING, RUNNING), ""),
        (2, 1_000, (RUNNING, MOVING, RUNNING), "0"),  # one place is for the one that moves
        (1, 1_000, (RUNNING, MOVING, RUNNING), ""),
        (8, 1_000, (RUNNING, MOVING, RUNNING), "02"),
    ],
)
def test_as_many_move_as_there_is_room_for(slots, kv_tokens, states, moves):
    leaving = replica("a", ReplicaState.DRAINING)
    requests = {
        str(number): tracked(leaving, str(number), state=state)
        for number, state in enumerate(states)
    }
    replicas = [leaving, replica("b", ReplicaState.READY, slots, kv_tokens)]
    assert count_moving(requests, replicas) == states.count(MOVING)
    chosen = requests_to_move(requests, replicas, NOW)
    assert "".join(each.request.name for each in chosen) == moves


def test_requests_of_all_leaving_replicas_share_the_room():
    first, second = (replica(name, ReplicaState.DRAINING) for name in "ab")
    requests = {name: tracked(on, name) for name, on in (("x", first), ("y", second))}
    ready = replica("c", ReplicaState.READY, slots=1)
    assert requests_to_move(requests, [first, second, ready], NOW) == [requests["x"]]


@pytest.mark.parametrize(
    ("state", "reserved_for", "sizes", "places"),
    [
        (ReplicaState.READY, None, (), 4),  # slots
        (ReplicaState.READY, None, (10, 10), 2),
        (ReplicaState.READY, None, (700,), 3),  # 300 of 1,000 tokens are free
        (ReplicaState.READY, None, (950,), 0),
        (ReplicaState.READY, "suspect", (), 0),
        (ReplicaState.LOADING, None, (), 0),
        (ReplicaState.DRAINING, None, (), 0),
    ],
)
def test_room_is_slots_and_memory_of_ready_replicas(state, reserved_for, sizes, places):
    one = replica("a", state, slots=4)
    one.reserved_for = reserved_for
    for number, tokens in enumerate(sizes):
        one.hold(f"r{number}", tokens)
    assert room(100, [one]) == places
    assert room(100, [one, replica("b", ReplicaState.READY, slots=5)]) == places + 5


def test_a_replica_without_a_known_end_keeps_what_it_can_generate():
    leaving = replica("a", ReplicaState.DRAINING)
    leaving.lasts_until = math.inf
    one = tracked(leaving)
    assert requests_to_move({"r": one}, [leaving, replica("b", ReplicaState.READY)], NOW) == []
