"""Which moment is meant by a time as people say it, in Berlin."""

import time
from datetime import datetime

import pytest

from malletrain.submission.error import SpecError
from malletrain.submission.goals import changes_of, parse_day_time, parse_deadline

TUESDAY = "2026-11-24 12:00"
FRIDAY = "2026-11-27 12:00"
BEFORE_SUMMER, IN_SPRING = "2026-03-28 12:00", "2026-03-29 12:00"
"""On March 29 it is 03:00 after 01:59."""
BEFORE_WINTER = "2026-10-24 12:00"
"""On October 25 it is 02:00 to 02:59 twice."""


@pytest.fixture(autouse=True)
def berlin(monkeypatch):
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text, fold=0):
    return datetime.fromisoformat(text).replace(fold=fold).timestamp()


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        (TUESDAY, "18:00", "2026-11-24 18:00"),
        (TUESDAY, "at 18:00", "2026-11-24 18:00"),
        (TUESDAY, "18:00:30", "2026-11-24 18:00:30"),
        (TUESDAY, "6pm", "2026-11-24 18:00"),
        (TUESDAY, "6:30 PM", "2026-11-24 18:30"),
        (TUESDAY, "8 am", "2026-11-25 08:00"),
        (TUESDAY, "12 pm", "2026-11-25 12:00"),
        (TUESDAY, "12am", "2026-11-25 00:00"),
        (TUESDAY, "0:00", "2026-11-25 00:00"),
        (TUESDAY, "11:59", "2026-11-25 11:59"),
        (TUESDAY, "12:00", "2026-11-25 12:00"),
        ("2026-11-24 17:59:59", "18:00", "2026-11-24 18:00"),
        ("2026-11-24 18:00", "18:00", "2026-11-25 18:00"),
        ("2026-11-24 18:00:01", "18:00", "2026-11-25 18:00"),
        (TUESDAY, "today 18:00", "2026-11-24 18:00"),
        (TUESDAY, "tomorrow 08:00", "2026-11-25 08:00"),
        (TUESDAY, "08:00 tomorrow", "2026-11-25 08:00"),
        (TUESDAY, "Tomorrow", "2026-11-25 00:00"),
        ("2026-12-31 23:00", "tomorrow 08:00", "2027-01-01 08:00"),
        (TUESDAY, "friday", "2026-11-27 00:00"),
        (TUESDAY, " Friday 18:00 ", "2026-11-27 18:00"),
        (TUESDAY, "fri, 18:00", "2026-11-27 18:00"),
        (TUESDAY, "18:00 on friday", "2026-11-27 18:00"),
        (TUESDAY, "friday at 6 pm", "2026-11-27 18:00"),
        (TUESDAY, "monday", "2026-11-30 00:00"),
        (TUESDAY, "tuesday 18:00", "2026-11-24 18:00"),
        (TUESDAY, "tuesday 12:00", "2026-12-01 12:00"),
        (TUESDAY, "tue 11:00", "2026-12-01 11:00"),
        (FRIDAY, "friday 18:00", "2026-11-27 18:00"),
        (FRIDAY, "friday 11:00", "2026-12-04 11:00"),
        (BEFORE_SUMMER, "tomorrow 08:00", "2026-03-29 08:00"),
        (BEFORE_SUMMER, "sunday", "2026-03-29 00:00"),
        (BEFORE_SUMMER, "01:59", "2026-03-29 01:59"),
        (BEFORE_SUMMER, "03:00", "2026-03-29 03:00"),
        (IN_SPRING, "02:30", "2026-03-30 02:30"),
        (BEFORE_WINTER, "tomorrow 08:00", "2026-10-25 08:00"),
        (BEFORE_WINTER, "02:30", "2026-10-25 02:30"),
    ],
)
def test_the_next_such_moment_is_meant(now, text, expected):
    assert parse_deadline(text, at(now)) == at(expected)
    assert parse_deadline(text, at(now)) > at(now)


def test_days_of_a_change_of_clocks_are_23_and_25_hours_long():
    assert parse_deadline("12:00", at(BEFORE_SUMMER)) == at(BEFORE_SUMMER) + 23 * 3600
    assert parse_deadline("12:00", at(BEFORE_WINTER)) == at(BEFORE_WINTER) + 25 * 3600


def test_a_time_that_comes_twice_is_the_first_that_is_still_to_come():
    first, second = at("2026-10-25 02:30"), at("2026-10-25 02:30", fold=1)
    assert second == first + 3600
    assert parse_deadline("02:30", first - 60) == first
    assert parse_deadline("02:30", first) == second
    assert parse_deadline("today 02:30", first + 60) == second
    assert parse_deadline("02:30", second) == at("2026-10-26 02:30")


@pytest.mark.parametrize(
    ("now", "text", "sentence"),
    [
        (
            FRIDAY,
            "friday",
            'no deadline on a Friday.*"today 18:00", or 2026-12-04 for that of next',
        ),
        (FRIDAY, "today", '"today" is no deadline: a day without a time is its beginning'),
        (TUESDAY, "today 11:00", 'is over already: it is 12:00. Say "tomorrow 11:00"'),
        (TUESDAY, "25:00", "there is no such time of the day"),
        (TUESDAY, "friday 18:61", "there is no such time of the day"),
        (TUESDAY, "13 pm", "there is no such time of the day"),
        (TUESDAY, "0 am", "there is no such time of the day"),
        (BEFORE_SUMMER, "02:30", "clocks are set forward on 2026-03-29, and it is never 02:30"),
        (BEFORE_SUMMER, "sunday 02:30", "set forward on 2026-03-29"),
        (TUESDAY, "18", 'is no deadline; accepted is a time such as "18:00"'),
        (TUESDAY, "friday 18", "is no deadline; accepted is"),
        (TUESDAY, "next friday", "is no deadline; accepted is"),
        (TUESDAY, "fridays", "is no deadline; accepted is"),
        (TUESDAY, "yesterday 18:00", "is no deadline; accepted is"),
    ],
)
def test_what_is_no_moment_or_could_be_two_is_refused_with_a_sentence(now, text, sentence):
    with pytest.raises(SpecError, match=sentence):
        parse_deadline(text, at(now))


@pytest.mark.parametrize("text", ["2026-12-01", "2026-12-01T08:00", "in 6 h", "20261201", ""])
def test_other_forms_are_none_of_its(text):
    assert parse_day_time(text, at(TUESDAY)) is None


def test_a_job_is_extended_and_submitted_by_the_same_words():
    due = changes_of("tomorrow 08:00", None, None)["deadline"]
    local = time.localtime(due)
    assert (local.tm_hour, local.tm_min) == (8, 0)
    assert due > time.time()
