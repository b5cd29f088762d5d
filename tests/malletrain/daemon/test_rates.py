"""Requests wait for their turn, and too many are refused."""

from __future__ import annotations

import pytest

from malletrain.daemon.server.rates import (
    BURST_S,
    MAX_DELAY_BY_ONE_S,
    MAX_PROCESSOR_FRACTION,
    MAX_USERS,
    MAX_WAIT_S,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    Rates,
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def wait_s(rates, user):
    """How long the next request of ``user`` waits; None: it is refused."""
    turn = rates.next(user)
    return None if turn is None else turn.wait_s


def test_who_asks_too_often_waits_and_then_is_refused():
    clock = Clock()
    rates = Rates(10.0, {"olga"}.__contains__, clock)
    saved_up = int(10 * BURST_S)
    assert [wait_s(rates, "ann") for _ in range(saved_up)] == [0.0] * saved_up
    waits = [wait_s(rates, "ann") for _ in range(MAX_WAITING)]
    assert None not in waits[: MAX_WAITING - 1]
    assert waits[0] == 0.1
    assert waits[9] == 1.0
    assert wait_s(rates, "ann") is None
    assert wait_s(rates, "bob") == 0.0
    assert wait_s(rates, "olga") == 0.0
    clock.now = 1.0  # ten have had their turn
    assert sum(wait_s(rates, "ann") is not None for _ in range(50)) in (9, 10)
    clock.now = 1000.0
    assert wait_s(rates, "ann") == 0.0


def test_of_one_user_so_many_bytes_wait_at_most():
    rates = Rates(10.0, {"olga"}.__contains__, Clock())
    half = MAX_WAITING_BYTES // 2
    turns = [rates.next("ann", size) for size in (half, half, 1)]
    assert [turn is None for turn in turns] == [False, False, True]
    assert rates.next("bob", 1) is not None
    rates.took("ann", turns[0], 0.001)
    assert rates.next("ann", half) is not None
    assert rates.next("ann", 1) is None
    assert rates.next("carl", 4 * MAX_WAITING_BYTES) is not None, "alone any request may"
    assert None not in [rates.next("olga", MAX_WAITING_BYTES) for _ in range(3)]


def test_a_client_that_waits_for_each_answer_is_never_refused():
    clock, refused = Clock(), 0
    rates = Rates(10.0, lambda user: False, clock)
    for _ in range(1000):
        wait = wait_s(rates, "ann")
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
    for number in range(2 * MAX_USERS):
        wait_s(rates, "ann" if number % 100 == 0 else f"u{number}")
    assert wait_s(rates, "ann") > 0.0


def test_who_asks_for_what_takes_long_has_a_part_of_the_processor():
    """As many requests as it likes at a time, of 25 ms each; and another user meanwhile."""
    clock = Clock()
    rates = Rates(200.0, {"olga"}.__contains__, clock)
    spent, begun, due = 0.0, 0, []
    while clock.now < 100.0:
        while len(due) < 50:
            turn = rates.next("ann")
            due.append((clock.now + turn.wait_s, begun + len(due), turn))
        due.sort(key=lambda one: one[:2])
        at, _, turn = due.pop(0)
        clock.now = max(clock.now, at)
        rates.took("ann", turn, 0.025)
        spent, begun = spent + 0.025, begun + 1
        if begun % 10 == 0:
            bob, olga = rates.next("bob"), rates.next("olga")
            assert bob.wait_s == olga.wait_s == 0.0
            rates.took("bob", bob, 0.001)
            rates.took("olga", olga, 10.0)
    assert (
        0.9 * MAX_PROCESSOR_FRACTION * 100
        < spent
        < MAX_PROCESSOR_FRACTION * (100 + BURST_S) + 50 * 0.025
    )


def test_several_dear_requests_at_once_have_no_more_of_the_processor():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    spent = 0.0
    while clock.now < 1000.0:
        turns = [turn for turn in (rates.next("ann") for _ in range(20)) if turn is not None]
        clock.now += max((turn.wait_s for turn in turns), default=1.0)
        for turn in turns:
            rates.took("ann", turn, 0.2)
            spent += 0.2
    assert (
        0.8 * MAX_PROCESSOR_FRACTION * 1000
        < spent
        < MAX_PROCESSOR_FRACTION * (1000 + BURST_S) + 20 * 0.2
    )


def test_what_was_taken_for_an_answer_that_took_little_is_given_back():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    for second in range(50):  # such answers are usual
        clock.now = 20.0 * second
        rates.took("ann", rates.next("ann"), 1.0)
    clock.now = 2000.0
    for turn in [rates.next("ann") for _ in range(20)]:
        rates.took("ann", turn, 0.001)
    assert wait_s(rates, "ann") == 0.0


def test_who_asks_once_for_what_takes_very_long_waits_a_moment():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    turn = rates.next("ann")
    assert turn.wait_s == 0.0
    rates.took("ann", turn, 30.0)
    assert MAX_DELAY_BY_ONE_S <= wait_s(rates, "ann") < 2 * MAX_DELAY_BY_ONE_S
    clock.now = 60.0
    assert wait_s(rates, "ann") == 0.0


def test_who_waits_for_each_very_long_answer_is_never_refused():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    for _ in range(100):
        turn = rates.next("ann")
        assert turn.wait_s < 2 * MAX_DELAY_BY_ONE_S
        clock.now += turn.wait_s
        rates.took("ann", turn, 30.0)


def test_what_takes_little_waits_for_nothing_but_its_turns():
    clock = Clock()
    rates = Rates(200.0, lambda user: False, clock)
    for _ in range(2000):
        turn = rates.next("ann")
        clock.now += turn.wait_s
        rates.took("ann", turn, 0.0004)
    assert clock.now == pytest.approx((2000 - 200 * BURST_S) / 200.0, rel=0.01)


def test_a_flood_of_dear_requests_is_refused_and_soon_forgotten():
    clock = Clock()
    rates = Rates(20.0, lambda user: False, clock)
    turns = []
    for second in range(600):
        clock.now = float(second)
        for _ in range(20):
            turns.append(rates.next("ann"))
            if turns[-1] is not None:
                rates.took("ann", turns[-1], 0.05)
    assert None in turns
    assert max(turn.wait_s for turn in turns if turn is not None) <= MAX_WAIT_S
    clock.now += MAX_WAIT_S + BURST_S
    assert wait_s(rates, "ann") == 0.0
