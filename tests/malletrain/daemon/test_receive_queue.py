"""Who waits, who is next, and who has too much waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.daemon.server.receive_queue import (
    CROWDING_BYTES,
    CROWDING_MESSAGES,
    MESSAGE_OVERHEAD_BYTES,
    ReceiveQueue,
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
