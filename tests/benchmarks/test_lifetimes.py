"""Scores of the forecasts by age, on gaps of known lengths, and their table."""

from __future__ import annotations

import pytest

from benchmarks.lifetimes import CONTENDERS, HORIZONS_S, judge, tell
from scavenger.trace.trace import Trace

HOUR_S = 3600.0


def test_age_tells_short_gaps_from_long_ones():
    """One node is idle for 5 minutes of each hour, another one for 5 hours of each 6: a gap that is
    10 minutes old is certain to last 5 minutes more, which the base rate does not know.
    """
    gaps = [("short", h * HOUR_S, h * HOUR_S + 300.0) for h in range(48)]
    gaps += [("long", h * HOUR_S, (h + 5) * HOUR_S) for h in range(0, 48, 6)]
    names = ("long", "short")
    trace = Trace.from_gaps(
        [names.index(name) for name, _, _ in gaps],
        [begin for _, begin, _ in gaps],
        [end for _, _, end in gaps],
        names,
        48 * HOUR_S,
    )
    rows = judge(trace, 24 * HOUR_S, 60.0, 120.0)
    at = {row["horizon_s"]: row for row in rows}
    assert list(at) == list(HORIZONS_S)
    assert at[300.0]["base rate"]["skill"] == pytest.approx(0.0)
    assert at[300.0]["by age"]["skill"] > 0.3


def test_each_contender_is_told_with_its_gain_over_the_base_rate_by_day():
    one = {"brier": 0.25, "skill": 0.031, "days": [0.02, -0.01], "calibration_error": 0.042}
    row = {"horizon_s": 300.0, "lasted": 0.738, **dict.fromkeys(CONTENDERS, one)}
    head, rule, line = tell([row])
    assert head.count("|") == rule.count("|") == line.count("|") == 5
    base, age = line.strip("| ").split(" | ")[2:]
    assert base == "0.2500; off 4.2 %"
    assert age == "0.2500, +3.1 % (+2, -1); off 4.2 %"
