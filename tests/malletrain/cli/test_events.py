"""`malletrain events`: pages, following, and the trace of nodes held."""

import importlib
import json
import re
import sys

import pytest
import zmq

from malletrain.client import ClientError, Unreachable
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
            raise ClientError("Enough.")
        return [event_view(since + 1)]

    monkeypatch.setattr("malletrain.client.Connection.events", events)
    importlib.import_module("malletrain.cli.events")  # its command has the name, too
    monkeypatch.setattr(sys.modules["malletrain.cli.events"], "RETRY_INTERVAL_S", 0.0)
    contexts = []

    class Context(zmq.Context):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            contexts.append(self)

    monkeypatch.setattr(zmq, "Context", Context)
    result = run("events", "--follow")
    # The garbage collector waits for ever for an open socket that goes with its context.
    assert [context.closed for context in contexts] == [True, True]
    assert result.exit_code == 1
    assert served == [0, 1, 1, 2]
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
