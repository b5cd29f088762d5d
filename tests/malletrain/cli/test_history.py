"""`malletrain events`: pages, following, and the trace of nodes held. `malletrain usage`: what is
added up and how it is shown.
"""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from malletrain.cli import history
from malletrain.cli.history import HEADER, lease_trace
from malletrain.client import ClientError, Unreachable
from malletrain.protocol.event_kinds import EventKind
from malletrain.protocol.views import EventView, UsageView
from scavenger.trace import files
from tests.draws import cases
from tests.malletrain.cli.fake_daemon import Refuse, event_view


def test_events(run, daemon):
    result = run("events")
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["rescaled"] * 3
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  rescaled", result.stdout)
    assert "train n1" in result.stdout


def test_events_json_is_a_line_each(run, daemon):
    lines = run("events", "--json", "--since", 1).stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [2, 3]


def test_events_follow_goes_on(run, daemon):
    """Three pages, then the daemon goes away, which ends the command with a sentence."""
    served = []

    def events(params):
        served.append(params["since"])
        if len(served) == 4:
            raise Refuse("The daemon stops.")
        return [event_view(params["since"] + 1)]

    daemon.answers["events"] = events
    result = run("events", "--follow", "--job", "train")
    assert result.exit_code == 1
    assert served == [0, 1, 2, 3]
    assert len(result.stdout.splitlines()) == 3


def test_events_follow_the_daemon_that_is_started_anew(run, daemon, monkeypatch):
    served = []

    def events(self, since, **options):
        served.append(since)
        if len(served) == 2:
            raise Unreachable("The daemon is gone.")
        if len(served) == 4:
            raise ClientError("Too many of your requests wait.", "busy")
        if len(served) == 5:
            raise ClientError("Enough.")
        return [event_view(since + 1)]

    refusals = [ClientError("Too many of your requests wait.", "busy"), Unreachable("It is gone.")]

    def status(self):
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr("malletrain.client.Connection.status", status)
    monkeypatch.setattr("malletrain.client.Connection.events", events)
    monkeypatch.setattr(history, "RETRY_INTERVAL_S", 0.0)
    contexts = []

    class Context(zmq.Context):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            contexts.append(self)

    monkeypatch.setattr(zmq, "Context", Context)
    result = run("events", "--follow")
    # The garbage collector waits for ever for an open socket that goes with its context.
    assert [context.closed for context in contexts] == [True] * 4
    assert result.exit_code == 1
    assert served == [0, 1, 1, 2, 2]
    assert "The daemon is gone. Its events follow" in result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_events_as_a_trace_are_simulated(run, daemon, tmp_path):
    """From the audit log of one daemon to a simulation, through files and pages as a person does
    it.
    """
    nodes = [f"n{k}" for k in range(6)]
    happened = [(100.0 + k, "node-joined", node) for k, node in enumerate(nodes)]
    happened += [(1500.0, "job-started", ""), (1900.0, "node-lost", "n0")]
    happened += [(3700.0 + k, "node-lost", node) for k, node in enumerate(nodes[1:])]
    log = [
        event_view(seq, kind, node=node, job="", time=time)
        for seq, (time, kind, node) in enumerate(happened, start=1)
    ]
    daemon.answers["events"] = lambda p: [e for e in log if e.seq > p["since"]][:5]
    file = tmp_path / "held.csv"
    assert run("events", "--as-trace", "-o", file).exit_code == 0
    text = file.read_text()
    assert text.splitlines()[:2] == ["time_s,node,event", "0.000,n0,idle"]
    assert "1800.000,n0,busy" in text
    assert run("events", "--as-trace").stdout == text
    done = run("simulate", "--trace", file, "--jobs", 5, "--costs", "freetrain", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["samples"] > 0
    assert data["preemptions"] >= 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--as-trace", "--follow"], "without a filter"),
        (["--as-trace", "--job", "train"], "without a filter"),
        (["--output", "x.csv"], "--output is for --as-trace"),
        (["--as-trace"], "No node has been held yet"),
        (["--as-trace", "-o", "/nowhere/x.csv"], "/nowhere/x.csv"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_in_a_sentence(run, daemon, words, sentence):
    if words[1:2] == ["-o"]:
        daemon.answers["events"] = lambda p: [event_view(1, "node-joined")][p["since"] :]
    result = run("events", *words)
    assert result.exit_code != 0
    assert sentence in result.stderr
    assert not isinstance(result.exception, OSError)


JOINED, LOST = EventKind.NODE_JOINED.value, EventKind.NODE_LOST.value


def event(time: float, kind: str, node: str) -> EventView:
    return EventView(0, time, kind, "", node, "", "")


def test_the_audit_log_becomes_a_trace():
    events = [
        event(100.0, LOST, "a"),  # never held: no row
        event(100.5, JOINED, "a"),
        event(100.5, JOINED, "b"),
        event(103.0, "job-started", "a"),
        event(104.25, JOINED, "a"),  # adopted again after a restart
        event(105.0, LOST, "a"),
        event(105.0, JOINED, "a"),  # back within a millisecond
        event(90.0, LOST, "b"),  # the clock was set back
    ]
    assert list(lease_trace(events, 106.5)) == [
        "time_s,node,event",
        "0.000,a,idle",
        "0.000,b,idle",
        "4.500,a,busy",
        "4.501,a,idle",
        "4.501,b,busy",
        "6.000,a,busy",  # held until it was asked for
    ]


def test_no_event_no_row():
    assert list(lease_trace([], 5.0)) == [HEADER]


@settings(max_examples=cases(40), deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([JOINED, LOST]), st.sampled_from("abc")),
        max_size=15,
    )
)
def test_every_exported_trace_is_a_valid_one(changes):
    now, events = 1e9, []
    for step, kind, node in changes:
        now += step
        events.append(event(now, kind, node))
    lines = list(lease_trace(events, now))
    if len(lines) > 1:
        read = files.parse("\n".join(lines) + "\n")
        assert read.duration_s > 0
        assert not read.idle_at(read.duration_s).any()
        assert len(read.names) == len({line.split(",")[1] for line in lines[1:]})


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
