"""Who waits, who is next, and who has too much waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from malletrain.daemon.intake import Intake, sender_of


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
    intake = Intake(most=3, most_bytes=100)
    assert [intake.put("a", n, 10) for n in range(5)] == [True, True, True, False, False]
    assert [intake.put("b", n, 45) for n in range(3)] == [True, True, False]
    assert intake.put("c", 0, 10_000), "one of any size, or it would never be heard"
    assert not intake.put("c", 1, 1)
    assert len(all_of(intake)) == 6
    assert intake.put("a", 9, 10)
    assert all_of(intake) == [9]


def test_all_strangers_are_one_sender_whatever_keys_they_come_with():
    intake = Intake(most=3, most_bytes=1000)
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
    intake, model = Intake(most=4, most_bytes=100), {name: [] for name in "abc"}
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
        fits = not line or (len(line) < 4 and sum(s for _, s in line) + size <= 100)
        assert intake.put(name, (name, number, size), size) == fits
        if fits:
            line.append((number, size))
    assert sorted(n for _, n, _ in all_of(intake)) == sorted(
        n for line in model.values() for n, _ in line
    )
