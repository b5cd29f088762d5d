"""The states of a client in a round, and what a lost node means."""

from __future__ import annotations

import pytest
from fedcase.rounds import TRANSITIONS, ClientState, FederatedRound, RoundError
from hypothesis import given
from hypothesis import strategies as st

ALLOWED = """
drawn     it is sent to a node                       training
training  the node's result has arrived whole        averaged
training  the node is lost                           drawn
training  its training fails and may be tried again  drawn
training  its training has failed too often          dropped
"""


def test_the_table_is_all_that_can_happen():
    lines = {
        tuple(part.strip() for part in line.split("  ") if part)
        for line in ALLOWED.split("\n")
        if line
    }
    assert {(a.value, e.value, b.value) for (a, e), b in TRANSITIONS.items()} == lines
    # What is averaged or dropped stays so.
    assert not {ClientState.AVERAGED, ClientState.DROPPED} & {state for state, _ in TRANSITIONS}


def test_a_lost_node_s_clients_are_drawn_again_and_its_late_result_does_not_count():
    one = FederatedRound(1, [3, 4, 5])
    first, second = one.send(7, [3, 4]), one.send(8, [5])
    assert one.result(second.number)
    assert one.lose(7) == [3, 4]
    assert one.of(ClientState.DRAWN) == [3, 4]
    again = one.send(8, [3, 4])
    assert not one.result(first.number), "a result of an attempt that was given up"
    assert one.of(ClientState.TRAINING) == [3, 4]
    assert one.result(again.number)
    assert not one.result(again.number), "the same result twice"
    assert one.complete
    assert one.lose(8) == [], "what was reported counts"


def test_a_client_that_fails_again_and_again_is_dropped():
    one = FederatedRound(1, [1, 2], most_failures=2)
    assert one.fail(one.send(7, [1]).number) == [1]
    assert one.lose(one.send(7, [1]).node) == [1], "a lost node is no failure of a client"
    assert one.fail(one.send(8, [1, 2]).number) == [2]
    assert one.states == {1: ClientState.DROPPED, 2: ClientState.DRAWN}
    assert one.result(one.send(8, [2]).number)
    assert one.complete
    assert one.fail(99) == []


def test_what_cannot_happen_is_an_error_and_changes_nothing():
    one = FederatedRound(4, [1, 2])
    one.send(7, [1])
    with pytest.raises(
        RoundError, match='Client 1 is training in round 4; "it is sent to a node" cannot'
    ):
        one.send(8, [2, 1])
    with pytest.raises(RoundError, match="Client 9 is not in round 4"):
        one.send(8, [9])
    assert one.states == {1: ClientState.TRAINING, 2: ClientState.DRAWN}
    assert len(one.open_attempts) == 1


@given(st.lists(st.tuples(st.sampled_from("srfl"), st.integers(0, 2), st.integers(1, 9))))
def test_a_client_is_averaged_by_one_attempt_only(steps):
    one, attempts, averaged = FederatedRound(1, range(4)), {}, []
    for step, node, number in steps:
        if step == "s" and one.of(ClientState.DRAWN):
            attempt = one.send(node, one.of(ClientState.DRAWN)[:2])
            attempts[attempt.number] = attempt
        elif step == "r" and one.result(number):
            averaged += attempts[number].clients
        elif step == "f":
            one.fail(number)
        elif step == "l":
            one.lose(node)
    assert len(averaged) == len(set(averaged))
    assert sorted(averaged) == sorted(one.of(ClientState.AVERAGED))


def test_a_client_that_fails_fails_alone():
    one = FederatedRound(1, [1, 2, 3], most_failures=2)
    assert one.result(one.send(7, [1, 2, 3]).number, failed={2})
    assert one.states == {
        1: ClientState.AVERAGED,
        2: ClientState.DRAWN,
        3: ClientState.AVERAGED,
    }
    assert [one.failures(client) for client in (1, 2, 3)] == [0, 1, 0]
    assert one.result(one.send(8, [2]).number, failed={2})
    assert one.states[2] is ClientState.DROPPED
    assert one.complete
