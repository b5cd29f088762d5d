"""How long a wrong token waits, and what is logged of it."""

from malletrain.web.guard import (
    FORGOTTEN_AFTER_S,
    LOG_EVERY_S,
    MAX_ADDRESSES,
    MAX_PAUSE_S,
    FailedLogins,
)


def test_the_pause_doubles_up_to_a_bound_and_is_forgotten():
    failed = FailedLogins()
    pauses = [failed.add("a", float(k)).pause_s for k in range(8)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, MAX_PAUSE_S, MAX_PAUSE_S]
    assert failed.add("b", 8.0).pause_s == 0.25
    assert failed.add("a", 8.0 + FORGOTTEN_AFTER_S).pause_s == 0.25


def test_a_flood_is_logged_with_its_number_now_and_then():
    failed = FailedLogins()
    lines = [failed.add("10.0.0.7", k * LOG_EVERY_S / 100).line for k in range(201)]
    assert [line.rpartition("10.0.0.7")[2] for line in lines if line] == [
        ".",
        ", 101 so far.",
        ", 201 so far.",
    ]


def test_addresses_are_bounded():
    failed = FailedLogins()
    for k in range(MAX_ADDRESSES + 1):
        failed.add(f"a{k}", 0.0)
    assert failed.add("a0", 0.0).pause_s == 0.25
    assert failed.add(f"a{MAX_ADDRESSES}", 0.0).pause_s == 0.5
