"""Whole rounds without a network."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from fedcase.clients import ClientFailure, ClientResult
from fedcase.coordinator import Coordinator, NodeReport, filled_share
from fedcase.ratio import EpsilonGreedy
from fedcase.rounds import ClientState, RoundError
from fedcase.training_state import new_state


def coordinator(clients=12, size=4, **options):
    state = new_state({"w": np.zeros(1)}, [10] * clients, Random(1))
    return Coordinator(state, EpsilonGreedy(epsilon=0.0), size, **options)


def report(attempt, loss=1.0, cached=(), used=0):
    results = tuple(ClientResult(client, 10, loss, 1.0) for client in attempt.clients)
    return NodeReport(results, frozenset(cached), used, 100, 400)


def test_a_round_with_a_loss():
    one = coordinator()
    clients = set(one.begin([7, 8]).states)
    first, second = one.assign([7, 8])
    assert {first.node, second.node} == {7, 8}
    assert len(first.clients) == len(second.clients) == 2
    assert one.accept(first, report(first, cached=first.clients))
    assert one.keep_only([first.node]) == list(second.clients)
    assert not one.accept(second, report(second)), "of a node that was given up"
    with pytest.raises(RoundError, match="not complete"):
        one.finish({"w": np.ones(1)}, 2.0)
    (third,) = one.assign([first.node])
    assert third.clients == second.clients
    assert one.accept(third, report(third, loss=3.0))
    state = one.finish({"w": np.ones(1)}, 2.0)
    record = state.rounds[-1]
    assert (record.number, set(record.clients), record.drawn_again) == (1, clients, 2)
    assert record.loss == 2.0  # of two clients 1, of two 3
    assert {r.client for r in state.records.values() if r.experienced} == clients
    assert all(r.rounds <= 1 for r in state.records.values())


def test_without_nodes_a_round_waits():
    one = coordinator()
    one.begin([])
    assert one.assign([]) == []
    (attempt,) = one.assign([5])
    assert len(attempt.clients) == 4


def test_clients_go_to_the_node_that_has_their_samples():
    one = coordinator(clients=4)
    one.begin([7, 8])
    first, second = one.assign([7, 8])
    one.accept(first, report(first, cached=first.clients))
    one.accept(second, report(second, cached=second.clients))
    one.finish({"w": np.ones(1)}, 2.0)
    one.begin([8, 7])
    assert {(a.node, frozenset(a.clients)) for a in one.assign([8, 7])} == {
        (first.node, frozenset(first.clients)),
        (second.node, frozenset(second.clients)),
    }


def test_a_result_of_other_clients_is_a_failure():
    one = coordinator(most_failures=1)
    one.begin([7])
    (attempt,) = one.assign([7])
    wrong = NodeReport(report(attempt).results[:-1], frozenset())
    assert not one.accept(attempt, wrong)
    assert sorted(one.round.of(ClientState.DROPPED)) == sorted(attempt.clients)
    with pytest.raises(RoundError, match=r"could be averaged.*does not name exactly its clients"):
        one.finish({"w": np.ones(1)}, 2.0)


def failing(attempt, *failed):
    """The report of an attempt whose clients ``failed`` raised."""
    results = tuple(r for r in report(attempt).results if r.client not in failed)
    failures = tuple(ClientFailure(client, "ValueError: no labels") for client in failed)
    return NodeReport(results, frozenset(), failures=failures)


def test_a_failing_client_costs_itself_only_and_its_reason_is_said():
    one = coordinator(most_failures=2)
    one.begin([7])
    (attempt,) = one.assign([7])
    bad, *good = attempt.clients
    assert one.accept(attempt, failing(attempt, bad))
    assert sorted(one.round.of(ClientState.AVERAGED)) == sorted(good)
    assert one.failure(bad) == (
        f"Round 1: the training of client {bad} failed (1 of 2 times; it is tried again): "
        "ValueError: no labels."
    )
    assert not one.failure(good[0])
    (again,) = one.assign([7])
    assert again.clients == (bad,)
    assert not one.accept(again, failing(again, bad)), "there is nothing to average"
    assert "(2 of 2 times; it is left out of the round)" in one.failure(bad)
    record = one.finish({"w": np.ones(1)}, 2.0).rounds[-1]
    assert record.clients == tuple(sorted(good))


def test_a_client_that_is_averaged_after_a_failure_is_no_longer_reported():
    one = coordinator()
    one.begin([7])
    (attempt,) = one.assign([7])
    bad = attempt.clients[0]
    one.accept(attempt, failing(attempt, bad))
    (again,) = one.assign([7])
    assert one.accept(again, report(again))
    assert not one.failure(bad)


def test_clients_of_a_message_that_failed_whole_are_sent_alone():
    """One of them may have ended the process. The others lose one trial, and not all."""
    one = coordinator()
    one.begin([7, 8])
    first, second = one.assign([7, 8])
    one.fail(first, "the ClientApp crashed")
    assert sorted(a.clients for a in one.assign([7, 8])) == [(c,) for c in sorted(first.clients)]
    assert one.accept(second, report(second))


def test_the_rule_learns_from_rounds_that_it_decided():
    one = coordinator(clients=40, size=4)
    loss = 8.0
    for used in (0, 50, 100, 100):
        one.begin([7])
        (attempt,) = one.assign([7])
        one.accept(attempt, report(attempt, loss, used=used))
        means = one.finish({"w": np.ones(1)}, 1.0).rule["means"]
        loss /= 2
    # Round 1 has nothing to compare with, round 2 a cold cache. Each loss is half of the last.
    assert [value for _, value in means] == [0.5, 0.5]


def test_a_training_goes_on_from_its_state():
    one, other = coordinator(), coordinator()
    for _ in range(3):
        one.begin([7])
        (attempt,) = one.assign([7])
        one.accept(attempt, report(attempt))
        state = one.finish({"w": np.ones(1)}, 1.0)
    other = Coordinator(state, EpsilonGreedy(epsilon=0.0), 4)
    assert other.begin([7]).number == 4
    assert other.begin([7]).number == 4, "a round that was not finished is made again"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], 0.0),
        ([(0, 100, 400)], 0.0),
        ([(50, 100, 400)], 0.5),  # of the node's memory
        ([(50, 100, 400), (100, 100, 400)], 0.75),
        ([(30, 100, 60), (30, 100, 60)], 1.0),  # all that could be hot
        ([(30, 100, 0)], 0.0),
        ([(500, 100, 400)], 1.0),
    ],
)
def test_the_filled_part_of_the_memory(reports, expected):
    assert filled_share([NodeReport((), frozenset(), *one) for one in reports]) == expected
