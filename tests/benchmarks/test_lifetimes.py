"""The table of forecasts in docs/lifetimes.md."""

from __future__ import annotations

from benchmarks.lifetimes import CONTENDERS, tell


def test_each_contender_is_told_with_its_gain_over_the_base_rate_by_day():
    one = {"brier": 0.25, "skill": 0.031, "days": [0.02, -0.01], "calibration_error": 0.042}
    row = {"horizon_s": 300.0, "lasted": 0.738, **dict.fromkeys(CONTENDERS, one)}
    head, rule, line = tell({"rows": [row]})
    assert head.count("|") == rule.count("|") == line.count("|") == 7
    base, *others = line.strip("| ").split(" | ")[2:]
    assert base == "0.2500; off 4.2 %"
    assert set(others) == {"0.2500, +3.1 % (+2, -1); off 4.2 %"}
