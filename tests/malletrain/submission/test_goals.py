"""How deadlines, budgets and work are written."""

from datetime import datetime

import pytest

from malletrain.submission.error import SpecError
from malletrain.submission.goals import parse_budget, parse_deadline, parse_work

NOW = datetime(2026, 11, 22, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("in 6 h", NOW + 6 * 3600),
        ("in 90 min", NOW + 5400),
        ("In 2 d", NOW + 2 * 86400),
        ("2026-12-01T08:00", datetime(2026, 12, 1, 8, 0).timestamp()),
        ("2026-12-01 08:00:30", datetime(2026, 12, 1, 8, 0, 30).timestamp()),
        ("2026-12-01", datetime(2026, 12, 1).timestamp()),
        ("2026-12-01T08:00+01:00", 1796108400.0),
        ("2026-12-01T07:00Z", 1796108400.0),
    ],
)
def test_deadlines(text, at):
    assert parse_deadline(text, NOW) == at


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("someday", "is no deadline"),
        ("in 6", "is no deadline"),
        ("in -6 h", "is no deadline"),
        ("in 6 parsecs", "Units are"),
        ("2020-01-01", "is over already"),
        ("", "is no deadline"),
    ],
)
def test_what_is_no_deadline(text, about):
    with pytest.raises(SpecError, match=about):
        parse_deadline(text, NOW)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("200nh", (200.0, False)),
        ("0.5 nh", (0.5, False)),
        ("+50nh", (50.0, True)),
        ("12 node-hours", (12.0, False)),
    ],
)
def test_budgets(text, hours):
    assert parse_budget(text) == hours


@pytest.mark.parametrize("text", ["200", "200h", "0nh", "-5nh", "nh", "1e999nh"])
def test_what_is_no_budget(text):
    with pytest.raises(SpecError, match="node-hours"):
        parse_budget(text)


def test_work():
    assert parse_work("1.3e8") == 1.3e8
    assert parse_work("1,300,000") == 1_300_000
    for text in ("0", "-1", "much", "nan", "inf"):
        with pytest.raises(SpecError, match="samples"):
            parse_work(text)
