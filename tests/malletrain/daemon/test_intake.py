"""Who waits, who is next, and who has too much waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.daemon.intake import MANY, MANY_BYTES, MESSAGE_BYTES, Intake, sender_of


def all_of(intake):
    found = []
    while intake:
        found.append(intake.take())
    return found


def test_senders_take_turns_and_each_is_heard_in_its_order():
    intake = Intake()
    for number in range(100):
        assert intake.put("flood", ("flood", number), 10)
    assert intake.put("ann", ("ann", 0), 10)
    assert intake.put("bob", ("bob", 0), 10)
    first = [intake.take() for _ in range(3)]
    assert first == [("flood", 0), ("ann", 0), ("bob", 0)]
    assert all_of(intake) == [("flood", number) for number in range(1, 100)]


def test_of_one_sender_no_more_waits_than_may_and_then_it_may_send_again():
    intake = Intake(most=3)
    assert [intake.put("a", n, 10) for n in range(5)] == [True, True, True, False, False]
    assert intake.put("b", 0, 10)
    assert len(all_of(intake)) == 4
    assert intake.put("a", 9, 10)
    assert all_of(intake) == [9]


def waiting_bytes(intake, sender, size):
    """What of ``sender`` is taken, in messages of so many bytes."""
    taken = 0
    while intake.put(sender, sender, size - MESSAGE_BYTES):
        taken += size
    return taken


def test_who_floods_leaves_as_much_free_as_it_has_itself():
    room, size = 1_000_000, 10_000
    alone = Intake(room=room, least=size)
    assert waiting_bytes(alone, "a", size) == room / 2
    assert waiting_bytes(alone, "b", size) == room / 4, "who comes new finds room"
    all_of(alone)
    assert waiting_bytes(alone, "b", size) == room / 2, "all of it is free again"


def test_the_first_message_of_a_sender_has_to_find_room_too():
    intake = Intake(room=1_000_000, least=10_000)
    assert not intake.put("a", 0, 600_000)
    assert intake.put("a", 0, 400_000)
    assert not intake.put("b", 0, 400_000)


def test_however_full_the_room_is_who_says_little_is_heard():
    intake = Intake(room=100_000, least=20_000)
    for name in range(50):
        waiting_bytes(intake, f"flood{name}", 10_000)
    assert intake.put("ann", "ann", 20_000 - MESSAGE_BYTES)
    assert not intake.put("ann", "ann", 0)
    assert "ann" in all_of(intake)


def test_a_message_without_content_takes_room_too():
    intake = Intake(most=10**9, room=100 * MESSAGE_BYTES, least=0)
    assert sum(intake.put("a", n, 0) for n in range(1000)) == 50


def test_it_is_crowded_while_more_of_somebody_waits_than_is_handled():
    intake = Intake()
    for name in range(2 * MANY):
        intake.put(name, name, 10)
    assert not intake.crowded, "many who say one thing each crowd nobody"
    all_of(intake)
    for number in range(MANY):
        intake.put("a", number, 10)
    assert not intake.crowded
    for name in "ab":
        intake.put(name, 0, 10)
    assert intake.crowded
    intake.take()
    assert not intake.crowded
    all_of(intake)
    for size in (MANY_BYTES // 2, MANY_BYTES // 2):
        assert intake.put("a", size, size)
    assert intake.crowded, "few large ones take as long"
    intake.take()
    assert not intake.crowded


def test_all_strangers_are_one_sender_whatever_keys_they_come_with():
    intake = Intake(most=3)
    who = {"k1": "stranger:k1", "k2": "stranger:k2", "k3": None, "ann": "client:ann"}
    taken = [
        intake.put(sender_of(key, who[key]), (key, n), 10) for n in range(2) for key in ("k1", "k2")
    ]
    assert taken == [True, True, True, False]
    assert not intake.put(sender_of("k3", who["k3"]), ("k3", 0), 10), "a key that was withdrawn"
    assert intake.put(sender_of("ann", who["ann"]), ("ann", 0), 10)
    assert all_of(intake) == [("k1", 0), ("ann", 0), ("k2", 0), ("k1", 1)]


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from("abc"), st.integers(0, 60)))))
def test_nothing_that_was_taken_in_is_lost_and_no_bound_is_broken(steps):
    """None: one is taken out."""
    least, room = 2 * MESSAGE_BYTES + 30, 4 * MESSAGE_BYTES + 100
    intake, model = Intake(most=4, room=room, least=least), {name: [] for name in "abc"}
    for number, step in enumerate(steps):
        waits = {name: len(line) for name, line in model.items() if line}
        if step is None:
            assert bool(intake) == bool(waits)
            if waits:
                name, got, size = intake.take()
                assert model[name].pop(0) == (got, size)
            continue
        name, size = step
        line = model[name]
        held = {n: sum(MESSAGE_BYTES + s for _, s in model[n]) for n in model}
        after = held[name] + MESSAGE_BYTES + size
        free = room - sum(held.values()) - MESSAGE_BYTES - size
        fits = len(line) < 4 and (after <= least or after <= free)
        assert intake.put(name, (name, number, size), size) == fits
        if fits:
            line.append((number, size))
    assert sorted(n for _, n, _ in all_of(intake)) == sorted(
        n for line in model.values() for n, _ in line
    )
