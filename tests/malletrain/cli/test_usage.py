"""`malletrain usage`: what is added up and how it is shown."""

import csv
import io
import json

import pytest

from malletrain.protocol.views import UsageView

ROWS = [
    UsageView("2026-10", "ann", "a100", 10.0, 8.0, 0.5, 0.25, 0.25, 1.0, 1000.0, 12.0, "lab"),
    UsageView("2026-10", "bob", "a100", 2.0, 1.0, 0.0, 0.0, 0.0, 1.0, 50.0, 2.0),
    UsageView("2026-11", "ann", "default", 4.0, 3.0, 0.5, 0.0, 0.0, 0.5, 30.0, None),
]


@pytest.fixture
def usage(run, daemon):
    daemon.answers["usage"] = lambda params: ROWS
    return lambda *words: run("usage", *words)


def by(rows, field):
    return {row[field]: (row["leased_nh"], row["kwh"], row["samples"]) for row in rows}


def test_by_user_and_in_all(usage):
    lines = usage().stdout.splitlines()
    assert lines[0].split()[:3] == ["USER", "LEASED", "TRAINED"]
    assert [line.split()[:3] for line in lines[2:]] == [
        ["ann", "14.0", "11.0"],
        ["bob", "2.0", "1.0"],
        ["all", "16.0", "12.0"],
    ]
    assert lines[2].split()[-1] == "?", "of a part of it nobody knows what it drew"
    assert lines[3].split()[-1] == "2.0"


def test_json_by_what_is_asked_for(usage):
    rows = json.loads(usage("--json", "--by", "month").stdout)
    assert by(rows, "month") == {"2026-10": (12.0, 14.0, 1050.0), "2026-11": (4.0, None, 30.0)}
    rows = json.loads(usage("--json", "--by", "class").stdout)
    assert by(rows, "node_class") == {"a100": (12.0, 14.0, 1050.0), "default": (4.0, None, 30.0)}
    rows = json.loads(usage("--json", "--by", "month", "--by", "user").stdout)
    assert len(rows) == 3
    rows = json.loads(usage("--json", "--by", "account").stdout)
    assert by(rows, "account") == {"": (6.0, None, 80.0), "lab": (10.0, 12.0, 1000.0)}


def test_csv(usage):
    rows = list(csv.DictReader(io.StringIO(usage("--csv", "--by", "user").stdout)))
    assert [(row["user"], row["leased_nh"], row["kwh"]) for row in rows] == [
        ("ann", "14", ""),
        ("bob", "2", "2"),
    ]
    assert rows[0]["month"] == rows[0]["node_class"] == "all"


def test_times_are_passed_on_in_utc(usage, daemon):
    assert usage("--since", "2026-11-01", "--until", "2026-11-02T12:00").exit_code == 0
    [params] = [params for op, params in daemon.seen if op == "usage"]
    assert params == {"since": 1793491200.0, "until": 1793620800.0}


@pytest.mark.parametrize(
    "words", [("--csv", "--json"), ("--since", "2026-11-02", "--until", "2026-11-01")]
)
def test_what_makes_no_sense_is_refused(usage, words):
    assert usage(*words).exit_code == 2


def test_nothing_was_leased(run, daemon):
    daemon.answers["usage"] = lambda params: []
    assert run("usage").stdout.strip() == "No node was leased in that time."


def test_a_first_try_of_some_seconds_is_not_nothing(run, daemon):
    short = UsageView(
        "2026-11", "ann", "default", 0.0052, 0.0002, 0.002, 0.0, 0.0, 0.003, 9.0, None
    )
    daemon.answers["usage"] = lambda params: [short]
    shown = run("usage").stdout.splitlines()[2].split()
    assert shown[:4] == ["ann", "0.005", "0.000", "0.002"]
    assert shown[4] == "0.0"


def test_what_is_no_date_is_told_by_examples(usage):
    refused = usage("--since", "yesterday")
    assert refused.exit_code == 2
    assert "'yesterday' is no date; write 2026-11-01" in refused.output


SLOTS = [
    UsageView("2026-10", "ann", "gpu", 8.0, *[0.0] * 5, charged_nh=2.0, gpu_h=8.0),
    UsageView("2026-10", "ann", "cpu", 3.0, *[0.0] * 5, charged_nh=0.5, gpu_h=0.0),
    UsageView("2026-10", "ann", "default", 1.0, *[0.0] * 5, charged_nh=1.0),
]


def test_slots_show_what_they_count_and_their_gpu_hours(run, daemon):
    daemon.answers["usage"] = lambda params: SLOTS
    lines = run("usage", "--by", "class").stdout.splitlines()
    assert lines[0].split()[:4] == ["CLASS", "LEASED", "CHARGED", "GPU-H"]
    rows = {line.split()[0]: line.split()[1:4] for line in lines[2:]}
    assert rows["gpu"] == ["8.0", "2.0", "8.0"]
    assert rows["cpu"] == ["3.0", "0.500", "0"] or rows["cpu"] == ["3.0", "0.500", "0.0"]
    assert rows["default"][:2] == ["1.0", "1.0"]
    assert rows["all"] == ["12.0", "3.5", "8.0"]


def test_whole_nodes_have_no_columns_of_slots(usage):
    assert "GPU-H" not in usage().stdout
