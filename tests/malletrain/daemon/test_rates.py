"""Requests wait for their turn, and too many are refused."""

from __future__ import annotations

import asyncio

import pytest

from malletrain.daemon.rates import (
    BURST_S,
    MOST_PART,
    MOST_SURPRISE_S,
    MOST_USERS,
    MOST_WAIT_S,
    MOST_WAITING,
    Rates,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_who_asks_too_often_waits_and_then_is_refused():
    clock = Clock()
    rates = Rates(10.0, {"olga"}.__contains__, clock)
    saved_up = int(10 * BURST_S)
    assert [rates.wait_s("ann") for _ in range(saved_up)] == [0.0] * saved_up
    waits = [rates.wait_s("ann") for _ in range(MOST_WAITING)]
    assert None not in waits[: MOST_WAITING - 1]
    assert waits[0] == 0.1
    assert waits[9] == 1.0
    assert rates.wait_s("ann") is None
    assert rates.wait_s("bob") == 0.0
    assert rates.wait_s("olga") == 0.0
    clock.now = 1.0  # ten have had their turn
    assert sum(rates.wait_s("ann") is not None for _ in range(50)) in (9, 10)
    clock.now = 1000.0
    assert rates.wait_s("ann") == 0.0


def test_a_client_that_waits_for_each_answer_is_never_refused():
    clock, refused = Clock(), 0
    rates = Rates(10.0, lambda user: False, clock)
    for _ in range(1000):
        wait = rates.wait_s("ann")
        refused += wait is None
        clock.now += wait or 0.0
    assert not refused
    assert clock.now > 90.0


def test_who_does_not_wait_is_told_now_and_then_and_owes_nothing():
    clock = Clock()
    rates = Rates(0.1, lambda sender: False, clock)
    assert [rates.at_once("agent") for _ in range(1000)].count(True) == 1
    clock.now = 9.0
    assert not rates.at_once("agent")
    clock.now = 10.5
    assert [rates.at_once("agent") for _ in range(1000)].count(True) == 1


def test_users_are_forgotten_and_those_that_ask_are_not():
    rates = Rates(10.0, lambda user: False, Clock())
    for number in range(2 * MOST_USERS):
        rates.wait_s("ann" if number % 100 == 0 else f"u{number}")
    assert rates.wait_s("ann") > 0.0


def test_there_is_a_turn_or_none():
    rates = Rates(1e6, lambda user: False, Clock())
    assert asyncio.run(rates.turn("ann"))


def test_who_asks_for_what_takes_long_has_a_part_of_the_processor():
    """As many requests as it likes at a time, of 25 ms each; and another user meanwhile."""
    clock = Clock()
    rates = Rates(200.0, {"olga"}.__contains__, clock)
    spent, begun, due = 0.0, 0, []
    while clock.now < 100.0:
        while len(due) < 50:
            due.append(clock.now + rates.wait_s("ann"))
        due.sort()
        clock.now = max(clock.now, due.pop(0))
        rates.took("ann", 0.025)
        spent, begun = spent + 0.025, begun + 1
        if begun % 10 == 0:
            assert rates.wait_s("bob") == rates.wait_s("olga") == 0.0
            rates.took("bob", 0.001)
            rates.took("olga", 10.0)
    assert 0.9 * MOST_PART * 100 < spent < MOST_PART * (100 + BURST_S) + 50 * 0.025


def test_who_asks_once_for_what_takes_very_long_waits_a_moment():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    assert rates.wait_s("ann") == 0.0
    rates.took("ann", 30.0)
    assert MOST_SURPRISE_S <= rates.wait_s("ann") < 2 * MOST_SURPRISE_S
    clock.now = 60.0
    assert rates.wait_s("ann") == 0.0


def test_what_takes_little_waits_for_nothing_but_its_turns():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    for _ in range(2000):
        clock.now += rates.wait_s("ann")
        rates.took("ann", 0.0004)
    assert clock.now == pytest.approx((2000 - 200 * BURST_S) / 200.0, rel=0.01)


def test_a_flood_of_dear_requests_is_refused_and_soon_forgotten():
    clock = Clock()
    rates = Rates(20.0, lambda user: False, clock)
    waits = []
    for second in range(600):
        clock.now = float(second)
        for _ in range(20):
            waits.append(rates.wait_s("ann"))
            if waits[-1] is not None:
                rates.took("ann", 0.05)
    assert None in waits
    assert max(wait for wait in waits if wait is not None) <= MOST_WAIT_S
    clock.now += MOST_WAIT_S + BURST_S
    assert rates.wait_s("ann") == 0.0
