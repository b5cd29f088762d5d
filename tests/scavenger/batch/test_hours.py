import time

import pytest

from scavenger.batch.hours import HoursError, parse_hours


def at(day, clock):
    """Epoch seconds of a weekday (0: Monday) of a week without a change of clocks."""
    hour, minute = map(int, clock.split(":"))
    return time.mktime((2026, 6, 1 + day, hour, minute, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("texts", "day", "clock", "remaining_s"),
    [
        ([], 0, "12:00", None),
        (["mon-sun"], 3, "12:00", None),
        (["mon-fri 19:00-07:00"], 0, "19:00", 12 * 3600),
        (["mon-fri 19:00-07:00"], 1, "06:30", 1800),
        (["mon-fri 19:00-07:00"], 0, "06:30", 0),
        (["mon-fri 19:00-07:00"], 5, "06:00", 3600),
        (["mon-fri 19:00-07:00"], 2, "12:00", 0),
        (["sat-sun"], 5, "00:00", 48 * 3600),
        (["sat"], 6, "00:00", 0),
        (["22:00-06:00"], 6, "23:00", 7 * 3600),
        (["22:00-06:00"], 0, "01:00", 5 * 3600),
        (["fri-mon"], 6, "12:00", 36 * 3600),
        (["sat", "SUN 00:00-12:00"], 5, "12:00", 24 * 3600),
        (["08:00-24:00"], 2, "23:00", 3600),
    ],
)
def test_seconds_left(texts, day, clock, remaining_s):
    assert parse_hours(texts).remaining_s(at(day, clock)) == remaining_s


@pytest.mark.parametrize(
    "text", ["", "always", "mon-", "25:00-26:00", "10:60-11:00", "mon 10", "10:00"]
)
def test_nonsense_is_refused_with_what_is_accepted(text):
    with pytest.raises(HoursError, match="accepted is"):
        parse_hours([text])


@pytest.mark.parametrize(
    ("evening", "hours_left"),
    [("2026-03-27", 7), ("2026-03-28", 6), ("2026-10-24", 8)],
    ids=["an ordinary night", "to daylight saving time", "from it"],
)
def test_the_night_of_a_change_to_or_from_daylight_saving_time(monkeypatch, evening, hours_left):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        now = time.mktime(time.strptime(f"{evening} 23:00", "%Y-%m-%d %H:%M"))
        left_s = parse_hours(["22:00-06:00"]).remaining_s(now)
    time.tzset()
    assert left_s == hours_left * 3600
