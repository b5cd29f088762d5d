"""Who waits, who is next, who is refused; and what an answer takes of the processor."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from malletrain.daemon.server.sender_limits import (
    BURST_S,
    CROWDING_BYTES,
    CROWDING_MESSAGES,
    MAX_DELAY_BY_ONE_S,
    MAX_PROCESSOR_FRACTION,
    MAX_USERS,
    MAX_WAIT_S,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    ROUND_S,
    LogLimits,
    ReceiveQueue,
    RequestLimits,
    TimedCall,
    Turn,
    sender_of,
)


def all_of(queue):
    messages = []
    while queue:
        messages.append(queue.take())
    return messages


def test_senders_take_turns_and_each_is_heard_in_its_order():
    queue = ReceiveQueue()
    for number in range(100):
        assert queue.put("flood", ("flood", number), 10)
    assert queue.put("ann", ("ann", 0), 10)
    assert queue.put("bob", ("bob", 0), 10)
    first = [queue.take() for _ in range(3)]
    assert first == [("flood", 0), ("ann", 0), ("bob", 0)]
    assert all_of(queue) == [("flood", number) for number in range(1, 100)]


def test_of_one_sender_no_more_waits_than_may_and_then_it_may_send_again():
    queue = ReceiveQueue(max_messages=3)
    assert [queue.put("a", n, 10) for n in range(5)] == [True, True, True, False, False]
    assert queue.put("b", 0, 10)
    assert len(all_of(queue)) == 4
    assert queue.put("a", 9, 10)
    assert all_of(queue) == [9]


def waiting_bytes(queue, sender, size):
    """What of ``sender`` is taken, in messages of so many bytes."""
    taken = 0
    while queue.put(sender, sender, size - MESSAGE_OVERHEAD_BYTES):
        taken += size
    return taken


def test_who_floods_leaves_as_much_free_as_it_has_itself():
    room, size = 1_000_000, 10_000
    alone = ReceiveQueue(capacity=room, guaranteed=size)
    assert waiting_bytes(alone, "a", size) == room / 2
    assert waiting_bytes(alone, "b", size) == room / 4, "who comes new finds room"
    all_of(alone)
    assert waiting_bytes(alone, "b", size) == room / 2, "all of it is free again"


def test_the_first_message_of_a_sender_has_to_find_room_too():
    queue = ReceiveQueue(capacity=1_000_000, guaranteed=10_000)
    assert not queue.put("a", 0, 600_000)
    assert queue.put("a", 0, 400_000)
    assert not queue.put("b", 0, 400_000)


def test_however_full_the_room_is_who_says_little_is_heard():
    queue = ReceiveQueue(capacity=100_000, guaranteed=20_000)
    for name in range(50):
        waiting_bytes(queue, f"flood{name}", 10_000)
    assert queue.put("ann", "ann", 20_000 - MESSAGE_OVERHEAD_BYTES)
    assert not queue.put("ann", "ann", 0)
    assert "ann" in all_of(queue)


def test_a_message_without_content_takes_room_too():
    queue = ReceiveQueue(max_messages=10**9, capacity=100 * MESSAGE_OVERHEAD_BYTES, guaranteed=0)
    assert sum(queue.put("a", n, 0) for n in range(1000)) == 50


def test_it_is_crowded_while_more_of_somebody_waits_than_is_handled():
    queue = ReceiveQueue()
    for name in range(2 * CROWDING_MESSAGES):
        queue.put(name, name, 10)
    assert not queue.crowded, "many who say one thing each crowd nobody"
    all_of(queue)
    for number in range(CROWDING_MESSAGES):
        queue.put("a", number, 10)
    assert not queue.crowded
    for name in "ab":
        queue.put(name, 0, 10)
    assert queue.crowded
    queue.take()
    assert not queue.crowded
    all_of(queue)
    for size in (CROWDING_BYTES // 2, CROWDING_BYTES // 2):
        assert queue.put("a", size, size)
    assert queue.crowded, "few large ones take as long"
    queue.take()
    assert not queue.crowded


def test_all_unauthenticated_clients_are_one_sender_whatever_keys_they_come_with():
    queue = ReceiveQueue(max_messages=3)
    who = {"k1": "unauthenticated:k1", "k2": "unauthenticated:k2", "k3": None, "ann": "client:ann"}
    taken = [
        queue.put(sender_of(key, who[key]), (key, n), 10) for n in range(2) for key in ("k1", "k2")
    ]
    assert taken == [True, True, True, False]
    assert not queue.put(sender_of("k3", who["k3"]), ("k3", 0), 10), "a key that was withdrawn"
    assert queue.put(sender_of("ann", who["ann"]), ("ann", 0), 10)
    assert all_of(queue) == [("k1", 0), ("ann", 0), ("k2", 0), ("k1", 1)]


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(0, 60)))))
def test_nothing_that_was_taken_in_is_lost_and_no_bound_is_broken(steps):
    """Steps: a message is put in, or one is taken out (None)."""
    least, room = 2 * MESSAGE_OVERHEAD_BYTES + 30, 4 * MESSAGE_OVERHEAD_BYTES + 100
    queue, model = (
        ReceiveQueue(max_messages=4, capacity=room, guaranteed=least),
        {name: [] for name in "abc"},
    )
    for number, step in enumerate(steps):
        waits = {name: len(line) for name, line in model.items() if line}
        if step is None:
            assert bool(queue) == bool(waits)
            if waits:
                name, got, size = queue.take()
                assert model[name].pop(0) == (got, size)
            continue
        name, size = step
        line = model[name]
        bytes_of = {n: sum(MESSAGE_OVERHEAD_BYTES + s for _, s in model[n]) for n in model}
        after = bytes_of[name] + MESSAGE_OVERHEAD_BYTES + size
        free = room - sum(bytes_of.values()) - MESSAGE_OVERHEAD_BYTES - size
        fits = len(line) < 4 and (after <= least or after <= free)
        assert queue.put(name, (name, number, size), size) == fits
        if fits:
            line.append((number, size))
    assert sorted(n for _, n, _ in all_of(queue)) == sorted(
        n for line in model.values() for n, _ in line
    )


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def wait_s(limits, user):
    """How long the next request of ``user`` waits; None: it is refused."""
    turn = limits.accept(user)
    return None if turn is None else turn.wait_s


def test_who_asks_too_often_waits_and_then_is_refused():
    clock = Clock()
    limits = RequestLimits(10.0, {"olga"}.__contains__, clock)
    saved_up = int(10 * BURST_S)
    assert [wait_s(limits, "ann") for _ in range(saved_up)] == [0.0] * saved_up
    waits = [wait_s(limits, "ann") for _ in range(MAX_WAITING)]
    assert None not in waits[: MAX_WAITING - 1]
    assert waits[0] == 0.1
    assert waits[9] == 1.0
    assert wait_s(limits, "ann") is None
    assert wait_s(limits, "bob") == 0.0
    assert wait_s(limits, "olga") == 0.0
    clock.now = 1.0  # ten have had their turn
    assert sum(wait_s(limits, "ann") is not None for _ in range(50)) in (9, 10)
    clock.now = 1000.0
    assert wait_s(limits, "ann") == 0.0


def test_of_one_user_so_many_bytes_wait_at_most():
    limits = RequestLimits(10.0, {"olga"}.__contains__, Clock())
    half = MAX_WAITING_BYTES // 2
    turns = [limits.accept("ann", size) for size in (half, half, 1)]
    assert [turn is None for turn in turns] == [False, False, True]
    assert limits.accept("bob", 1) is not None
    limits.end(turns[0], 0.001)
    assert limits.accept("ann", half) is not None
    assert limits.accept("ann", 1) is None
    assert limits.accept("carl", 4 * MAX_WAITING_BYTES) is not None, "alone any request may"
    assert None not in [limits.accept("olga", MAX_WAITING_BYTES) for _ in range(3)]


def test_a_client_that_waits_for_each_answer_is_never_refused():
    clock, refused = Clock(), 0
    limits = RequestLimits(10.0, lambda user: False, clock)
    for _ in range(1000):
        wait = wait_s(limits, "ann")
        refused += wait is None
        clock.now += wait or 0.0
    assert not refused
    assert clock.now > 90.0


def test_users_are_forgotten_and_those_that_ask_are_not():
    limits = RequestLimits(10.0, lambda user: False, Clock())
    for number in range(2 * MAX_USERS):
        wait_s(limits, "ann" if number % 100 == 0 else f"u{number}")
    assert wait_s(limits, "ann") > 0.0


def test_who_asks_for_what_takes_long_has_a_part_of_the_processor():
    """As many requests as it likes at a time, of 25 ms each; and another user meanwhile."""
    clock = Clock()
    limits = RequestLimits(200.0, {"olga"}.__contains__, clock)
    spent, begun, due = 0.0, 0, []
    while clock.now < 100.0:
        while len(due) < 50:
            turn = limits.accept("ann")
            due.append((clock.now + turn.wait_s, begun + len(due), turn))
        due.sort(key=lambda one: one[:2])
        at, _, turn = due.pop(0)
        clock.now = max(clock.now, at)
        limits.end(turn, 0.025)
        spent, begun = spent + 0.025, begun + 1
        if begun % 10 == 0:
            bob, olga = limits.accept("bob"), limits.accept("olga")
            assert bob.wait_s == olga.wait_s == 0.0
            limits.end(bob, 0.001)
            limits.end(olga, 10.0)
    assert (
        0.9 * MAX_PROCESSOR_FRACTION * 100
        < spent
        < MAX_PROCESSOR_FRACTION * (100 + BURST_S) + 50 * 0.025
    )


def test_several_dear_requests_at_once_have_no_more_of_the_processor():
    clock = Clock()
    limits = RequestLimits(200.0, lambda user: False, clock)
    spent = 0.0
    while clock.now < 1000.0:
        turns = [turn for turn in (limits.accept("ann") for _ in range(20)) if turn is not None]
        clock.now += max((turn.wait_s for turn in turns), default=1.0)
        for turn in turns:
            limits.end(turn, 0.2)
            spent += 0.2
    assert (
        0.8 * MAX_PROCESSOR_FRACTION * 1000
        < spent
        < MAX_PROCESSOR_FRACTION * (1000 + BURST_S) + 20 * 0.2
    )


def test_what_was_taken_for_an_answer_that_took_little_is_given_back():
    clock = Clock()
    limits = RequestLimits(200.0, lambda user: False, clock)
    for second in range(50):  # such answers are usual
        clock.now = 20.0 * second
        limits.end(limits.accept("ann"), 1.0)
    clock.now = 2000.0
    for turn in [limits.accept("ann") for _ in range(20)]:
        limits.end(turn, 0.001)
    assert wait_s(limits, "ann") == 0.0


def test_who_asks_once_for_what_takes_very_long_waits_a_moment():
    clock = Clock()
    limits = RequestLimits(200.0, lambda user: False, clock)
    turn = limits.accept("ann")
    assert turn.wait_s == 0.0
    limits.end(turn, 30.0)
    assert MAX_DELAY_BY_ONE_S <= wait_s(limits, "ann") < 2 * MAX_DELAY_BY_ONE_S
    clock.now = 60.0
    assert wait_s(limits, "ann") == 0.0


def test_who_waits_for_each_very_long_answer_is_never_refused():
    clock = Clock()
    limits = RequestLimits(200.0, lambda user: False, clock)
    for _ in range(100):
        turn = limits.accept("ann")
        assert turn.wait_s < 2 * MAX_DELAY_BY_ONE_S
        clock.now += turn.wait_s
        limits.end(turn, 30.0)


def test_what_takes_little_waits_for_nothing_but_its_turns():
    clock = Clock()
    limits = RequestLimits(200.0, lambda user: False, clock)
    for _ in range(2000):
        turn = limits.accept("ann")
        clock.now += turn.wait_s
        limits.end(turn, 0.0004)
    assert clock.now == pytest.approx((2000 - 200 * BURST_S) / 200.0, rel=0.01)


def test_a_flood_of_dear_requests_is_refused_and_soon_forgotten():
    clock = Clock()
    limits = RequestLimits(20.0, lambda user: False, clock)
    turns = []
    for second in range(600):
        clock.now = float(second)
        for _ in range(20):
            turns.append(limits.accept("ann"))
            if turns[-1] is not None:
                limits.end(turns[-1], 0.05)
    assert None in turns
    assert max(turn.wait_s for turn in turns if turn is not None) <= MAX_WAIT_S
    clock.now += MAX_WAIT_S + BURST_S
    assert wait_s(limits, "ann") == 0.0


def unlimited():
    return RequestLimits(1.0, lambda user: False, time.monotonic)


def due(user, expected_s):
    return Turn(user, 0.0, expected_s, 0)


def answered(asks, usual_s=ROUND_S):
    """In which order, and in which round of the loop, requests of these users are answered."""
    rounds, order = [0], []

    async def main():
        limits, loop = unlimited(), asyncio.get_running_loop()

        def count():
            rounds[0] += 1
            if len(order) < len(asks):
                loop.call_soon(count)

        async def ask(user):
            await limits.begin(due(user, usual_s))
            order.append((user, rounds[0]))

        loop.call_soon(count)
        await asyncio.gather(*map(ask, asks))

    asyncio.run(main())
    return order


def test_only_operators_begin_at_once():
    """Nobody can get the expected time of 0 s of an operator by answers that take no time."""
    clock = Clock()
    limits = RequestLimits(10.0, {"olga"}.__contains__, clock)
    for _ in range(5000):
        clock.now += 1.0
        turn = limits.accept("ann")
        assert turn.expected_s > 0.0
        limits.end(turn, 0.0)
    assert limits.accept("olga").expected_s == 0.0


def test_one_that_asks_alone_waits_for_nothing():
    async def main():
        begin = unlimited().begin(due("ann", 10.0))
        try:
            begin.send(None)
        except StopIteration:
            return True
        return False

    assert asyncio.run(main())


def test_users_take_turns():
    order = [user for user, _ in answered(["ann"] * 100 + ["bob"] * 2 + ["olga"])]
    assert sorted(order[1:4]) == ["ann", "bob", "olga"], "each has one before anybody has another"
    assert order.index("bob") < 4
    assert order.count("ann") == 100


def test_what_takes_long_is_not_answered_in_one_round():
    rounds = [number for _, number in answered(["ann"] * 20)]
    assert len(set(rounds)) == 20, "one a round"
    rounds = [number for _, number in answered(["ann"] * 20, ROUND_S / 5)]
    assert {rounds.count(number) for number in rounds} == {5}
    assert len(set(answered(["ann"] * 1000, 1e-9))) == 100, (
        "what costs nearly nothing counts for a little"
    )


def test_who_has_gone_takes_nobodys_turn():
    async def main():
        limits = unlimited()
        await limits.begin(due("ann", ROUND_S))
        waiting = [
            asyncio.ensure_future(limits.begin(due(user, ROUND_S)))
            for user in ("ann", "bob", "carl")
        ]
        await asyncio.sleep(0)
        waiting[1].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, gone, last = asyncio.run(main())
    assert (first, last) == (None, None)
    assert isinstance(gone, asyncio.CancelledError)


def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def answer(event, value):
    busy(0.01)
    await event.wait()
    busy(0.01)
    return value


def test_its_own_time_counts_and_what_others_do_meanwhile_does_not():
    async def both():
        event = asyncio.Event()
        timed = TimedCall(answer(event, 7))

        async def wait():
            return await timed

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert timed.seconds >= 0.01
        before = timed.seconds
        busy(0.1)
        assert timed.seconds == before
        event.set()
        return await task, timed.seconds - before

    value, later = asyncio.run(both())
    assert value == 7
    assert later >= 0.01


def test_errors_and_cancels_go_through():
    heard = []

    async def fails():
        raise KeyError("x")

    async def hears():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancel")
            raise

    async def run():
        with pytest.raises(KeyError):
            await TimedCall(fails())

        async def wait():
            await TimedCall(hears())

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert heard == ["cancel"]


def test_the_log_has_a_line_about_each_matter_now_and_then():
    clock = Clock()
    limits = LogLimits(clock)

    def lines(matter: str) -> int:
        return [limits.may_log(matter) for _ in range(1000)].count(True)

    assert (lines("agent"), lines("agent"), lines("client")) == (1, 0, 1)
    clock.now = 9.0
    assert lines("agent") == 0
    clock.now = 10.5
    assert (lines("agent"), lines("client")) == (1, 1)
