"""Which clients train, and on which node."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fedcase.clients import ClientRecord, ClientResult, after_round, scaled, scores
from fedcase.selection import experienced_count, place, select
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([3.0], [0.5]),
        ([2.0, 2.0, 2.0], [0.5, 0.5, 0.5]),  # a first round: all clients have one loss
        ([1.0, 2.0, 3.0], [0.0, 0.5, 1.0]),
        ([-1.0, 0.0, 3.0], [0.0, 0.25, 1.0]),
    ],
)
def test_values_are_scaled_by_minimum_and_maximum(values, expected):
    assert scaled(values) == expected


def client(number, loss=1.0, speed=100.0, rounds=1, samples=10):
    return ClientRecord(number, samples, rounds, loss, speed, rounds)


@pytest.mark.parametrize(
    ("clients", "weight", "expected"),
    [
        ([client(0, 1.0, 10.0), client(1, 3.0, 10.0)], 1.0, [0.0, 1.0]),
        ([client(0, 1.0, 10.0), client(1, 3.0, 30.0)], 0.0, [0.0, 1.0]),
        ([client(0, 3.0, 10.0), client(1, 1.0, 30.0)], 0.75, [0.75, 0.25]),
        ([client(0), client(1)], 0.7, [0.5, 0.5]),
    ],
)
def test_scores_weigh_loss_and_speed(clients, weight, expected):
    assert scores(clients, weight) == pytest.approx(expected)


def test_a_round_makes_a_client_experienced():
    record = after_round(ClientRecord(4, 30), ClientResult(4, 40, 1.5, 2.0), 7)
    assert record == ClientRecord(4, 40, 1, 1.5, 20.0, 7)
    assert record.experienced
    # A clock that stood still says nothing of the speed.
    assert after_round(record, ClientResult(4, 40, 1.0, 0.0), 8).samples_per_s == 20.0


@pytest.mark.parametrize(
    ("size", "share", "filled", "available", "novices", "expected"),
    [
        (20, 0.5, 1.0, 100, 100, 10),  # the rule decides
        (20, 0.75, 0.0, 100, 100, 0),  # a cold cache fills
        (20, 0.75, 0.5, 100, 100, 10),  # half filled
        (20, 0.25, 0.5, 100, 100, 5),
        (20, 0.5, 1.0, 0, 200, 0),  # round 1
        (20, 0.5, 1.0, 4, 196, 4),  # too few experienced ones
        (20, 0.5, 0.0, 198, 2, 18),  # too few novices
        (20, 0.5, 1.0, 200, 0, 20),
        (20, 0.5, 1.0, 7, 5, 7),  # fewer clients than a round has
        (20, 0.5, 1.0, 0, 0, 0),
        (20, 1.5, 2.0, 100, 100, 20),
        (20, -1.0, 1.0, 100, 100, 0),
    ],
)
def test_how_many_are_experienced(size, share, filled, available, novices, expected):
    assert experienced_count(size, share, filled, available, novices) == expected


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(0, 30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_a_round_has_as_many_different_clients_as_it_can(kinds, size, share, filled, seed):
    clients = [client(n, loss=n, rounds=int(is_old)) for n, is_old in enumerate(kinds)]
    chosen = select(clients, size, share, filled, {0, 3}, Random(seed))
    assert len(chosen) == len(set(chosen)) == min(size, len(clients))
    assert chosen == select(clients, size, share, filled, {0, 3}, Random(seed))


def test_novices_whose_data_are_cached_come_first():
    clients = [client(n, rounds=0) for n in range(30)]
    assert set(select(clients, 3, 0.5, 1.0, {5, 17, 21}, Random(0))) == {5, 17, 21}


def test_a_high_loss_is_drawn_more_often_and_none_never():
    clients = [client(n, loss=float(n)) for n in range(5)]
    random = Random(1)
    drawn = Counter(
        chosen for _ in range(500) for chosen in select(clients, 2, 1.0, 1.0, (), random)
    )
    assert drawn[4] > 2 * drawn[0] > 0


@pytest.mark.parametrize(
    ("samples", "nodes", "cached", "load", "expected"),
    [
        ({}, [], {}, {}, {}),
        ({0: 10, 1: 10}, [7, 8], {}, {}, {0: 7, 1: 8}),
        # The largest first: 30 | 20 + 10.
        ({0: 10, 1: 20, 2: 30}, [7, 8], {}, {}, {2: 7, 1: 8, 0: 8}),
        # Each to its data.
        ({0: 10, 1: 10}, [7, 8], {7: {1}, 8: {0}}, {}, {0: 8, 1: 7}),
        # One node has all the data: it gets a quarter more than its part, 1.25 · 20, and no more.
        ({0: 10, 1: 10, 2: 10, 3: 10}, [7, 8], {7: {0, 1, 2, 3}}, {}, {0: 7, 1: 7, 2: 8, 3: 8}),
        # A client larger than a part still goes to its data.
        ({0: 100, 1: 10}, [7, 8], {8: {0}}, {}, {0: 8, 1: 7}),
        # After a loss the survivors have work already.
        ({0: 10, 1: 10}, [7, 8], {}, {7: 30, 8: 10}, {0: 8, 1: 8}),
        # Data of a node that has left.
        ({0: 10}, [8], {7: {0}}, {}, {0: 8}),
    ],
)
def test_placement(samples, nodes, cached, load, expected):
    assert place(samples, nodes, cached, load) == expected


def test_clients_without_a_node_are_an_error():
    with pytest.raises(ValueError, match="there is no node"):
        place({0: 10}, [], {})
