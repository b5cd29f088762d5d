"""report() and its neighbours: cumulative, throttled, silent without an agent, and never a reason
for training to stop.
"""

import json
import math
import os
import signal
import subprocess
import sys

import numpy
import pytest
import torch

import malletrain
from malletrain.protocol.worker_channel import (
    ModelFacts,
    OwnerNotice,
    ScriptMetric,
    StartupMark,
    WorkerProgress,
)
from malletrain.training import report
from tests.malletrain.agent.node_side import eventually
from tests.malletrain.training.worker_side import as_plain_script, as_worker
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def agent(monkeypatch):
    with as_worker(monkeypatch, rank=2, world=4) as agent:
        yield agent


def test_the_first_report_is_sent_at_once_and_the_rest_together(agent):
    for _ in range(1000):
        malletrain.report(32)
    early = agent.received(WorkerProgress)
    assert (early[0].samples, early[0].steps, early[0].batch) == (32, 1, 32)
    assert early[0].sender.job == "job-1"
    assert (early[0].sender.generation, early[0].sender.rank, early[0].sender.pid) == (
        3,
        2,
        os.getpid(),
    )
    malletrain.report(7)
    report.flush()
    last = agent.received(WorkerProgress)[-1]
    assert (last.samples, last.steps, last.batch) == (32007, 1001, 7)
    assert last.first == early[0].first <= last.last


def test_nothing_new_sends_nothing(agent):
    malletrain.report(1)
    agent.received()
    report.flush()
    assert agent.received() == []


def test_lost_datagrams_lose_nothing(agent, monkeypatch):
    monkeypatch.setattr(
        report, "SEND_INTERVAL_S", 0
    )  # every report is a datagram: the agent's queue soon is full
    for _ in range(2000):
        malletrain.report(2)
    agent.received()
    malletrain.report(2)
    last = agent.received(WorkerProgress)[-1]
    assert (last.samples, last.steps) == (4002, 2001)
    assert last.unsent > 0


def test_what_an_agent_that_stands_still_does_not_take_comes_without_another_report(
    agent, monkeypatch
):
    """The worker may wait for its peers by then, and be stopped there."""
    monkeypatch.setattr(report, "SEND_INTERVAL_S", 0)
    for _ in range(2000):
        malletrain.report(2)
    worker = report._worker  # noqa: SLF001
    assert worker is not None
    assert worker.sent_steps < 2000, "nobody has read, and the queue is full"
    reports = agent.received(WorkerProgress)
    eventually(
        lambda: reports.extend(agent.received(WorkerProgress)) or reports[-1].steps == 2000, "all"
    )


def test_what_was_not_taken_in_a_round_that_is_over_keeps_nobody_waiting(agent, monkeypatch):
    monkeypatch.setattr(report, "SEND_INTERVAL_S", 0)
    for _ in range(2000):
        malletrain.report(2)
    worker = report._worker  # noqa: SLF001
    assert worker is not None
    assert worker.agent_is_slow()
    report.entered(4, 2, 4)
    agent.received()
    assert not worker.agent_is_slow()


STOPPED = """
import os, signal, time
import malletrain
malletrain.report(2)
time.sleep(0.02)  # a step
malletrain.report(2)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_worker_that_is_stopped_right_after_a_step_has_reported_it(agent):
    """As a rank that is stopped because rank 0 has saved."""
    ended = subprocess.run([sys.executable, "-c", STOPPED], check=False)
    assert ended.returncode == -signal.SIGTERM
    assert [report.samples for report in agent.received(WorkerProgress)] == [2, 4]


ENDS = """
import os, sys
import malletrain
from malletrain.training import report

report.SEND_INTERVAL_S, report.EXIT_TIMEOUT_S = 0, float(sys.argv[1])
for _ in range(2000):
    malletrain.report(2)
os.write(1, b"over")
"""


def test_a_process_that_ends_waits_until_its_agent_has_taken_the_last_report(agent):
    argv = [sys.executable, "-c", ENDS, str(PATIENCE_S)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"over"
        reports = []
        while child.poll() is None:
            reports += agent.received(WorkerProgress)
    reports += agent.received(WorkerProgress)
    assert (reports[-1].steps, reports[-1].samples) == (2000, 4000)


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        (3, 3),
        (0, 0),
        (2.5, 2.5),
        (numpy.int64(4), 4),
        (numpy.float32(1.5), 1.5),
        (torch.tensor(5), 5),
        (numpy.array([6]), 6),
    ],
)
def test_what_a_script_may_pass(agent, value, counted):
    malletrain.report(value)
    assert agent.received(WorkerProgress)[-1].samples == counted


class Hostile:
    def item(self):
        raise ZeroDivisionError

    def __repr__(self):
        raise ZeroDivisionError


NAN, INF, HUGE = float("nan"), float("inf"), pytest.param(10**5000, id="huge")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "32",
        -1,
        -0.5,
        NAN,
        INF,
        HUGE,
        True,
        [1],
        torch.ones(3),
        numpy.ones(2),
        Hostile(),
        Hostile,
    ],
)
def test_what_a_script_may_not_pass_is_told_once_and_ignored(agent, capsys, value):
    malletrain.report(value)
    malletrain.report(value)
    assert capsys.readouterr().err.count("report() takes the number of samples") == 1
    assert agent.received(WorkerProgress) == []


@pytest.mark.parametrize("in_sweep", [True, False])
def test_steps_that_decrease_are_told_to_a_sweeps_trial(in_sweep, agent, monkeypatch, capsys):
    """A sweep would prune its trials by the curves of their first epochs, without a word. Elsewhere
    steps may begin again, such as in each fold of a cross-validation.
    """
    monkeypatch.setattr("malletrain.training.report._last_steps", {})
    monkeypatch.setattr("malletrain.training.report.sentence_keys", set())
    if in_sweep:
        monkeypatch.setenv("MALLETRAIN_TRIAL", "3")
    for epoch in range(2):
        for step in range(3):
            malletrain.metric("within", 1.0, step=step)
            malletrain.metric("on", 1.0, step=epoch * 3 + step)
        malletrain.metric("constant", 1.0, step=1)
    for step in (10, 5, 4):
        malletrain.metric("remaining", 1.0, step=step)
    for generation, steps in enumerate(([500, 520], [498, 530]), 1):
        monkeypatch.setenv("MALLETRAIN_GENERATION", str(generation))
        for step in steps:  # a live job that has lost a node repeats steps
            malletrain.metric("repeated", 1.0, step=step)
    names = [line.split()[3] for line in capsys.readouterr().err.splitlines()]
    assert names == ["within", "remaining"] * in_sweep
    notices = []
    if in_sweep:
        until(
            lambda: notices.extend(agent.received(OwnerNotice)) or len(notices) == 2,
            "they are in malletrain show, too",
        )


def test_metrics_marks_and_facts(agent, capsys):
    malletrain.metric("accuracy", torch.tensor(0.5))
    malletrain.mark("ready", at=12.5)
    malletrain.describe(parameters=1234, flops_per_sample=5e6)
    malletrain.metric("loss", 1e301)
    malletrain.metric("", 1)
    malletrain.metric("shape", [1, 2])
    malletrain.metric("loss", 1.0, step=-1)
    messages = agent.received()
    assert [(type(m), getattr(m, "name", None)) for m in messages] == [
        (ScriptMetric, "accuracy"),
        (StartupMark, "ready"),
        (ModelFacts, None),
    ]
    assert messages[0].value == 0.5
    assert messages[1].time == 12.5
    assert (messages[2].parameters, messages[2].flops_per_sample) == (1234, 5e6)
    assert capsys.readouterr().err.count("ignored") == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_passed_on(agent, capsys, value):
    malletrain.metric("loss", torch.tensor(value), step=3)
    (message,) = agent.received()
    assert str(message.value) == str(value)
    assert capsys.readouterr().err == ""


def test_nonsense_is_told_and_never_raised(agent, capsys):
    malletrain.mark(Hostile())
    malletrain.mark("ready", at="noon")
    malletrain.describe(parameters=-1)
    malletrain.describe(parameters="many")
    malletrain.metric(Hostile(), 1.0)
    malletrain.metric("big", 10**5000)
    assert agent.received() == []
    assert capsys.readouterr().err.count("ignored") == 6


def test_an_agent_that_goes_away_and_comes_back_changes_nothing(agent):
    malletrain.report(1)
    agent.received()
    os.rename(agent.path, agent.path + ".gone")
    for _ in range(5):
        malletrain.report(1)
    malletrain.metric("accuracy", 0.9)
    os.rename(agent.path + ".gone", agent.path)
    report.flush()
    messages = agent.received()
    assert [m.value for m in messages if isinstance(m, ScriptMetric)] == [0.9]
    assert [m.samples for m in messages if isinstance(m, WorkerProgress)] == [6]


def test_without_an_agent_everything_is_a_no_op(monkeypatch, capsys):
    with as_plain_script(monkeypatch):
        malletrain.report(32)
        malletrain.metric("accuracy", 1.0)
        malletrain.mark("ready")
        malletrain.describe(parameters=1)
        report.flush()
        assert report.totals() == (0, 0)
        assert report.open_flags() is None
    assert capsys.readouterr().err == ""


def test_flags_that_cannot_be_read_are_told_and_do_no_harm(agent, monkeypatch, capsys):
    monkeypatch.setenv("MALLETRAIN_FLAGS", "/nowhere/flags")
    assert report.open_flags() is None
    assert "Snapshots on demand are off" in capsys.readouterr().err


def test_a_forked_child_is_not_its_parent(agent):
    malletrain.report(5)
    agent.received()
    child = os.fork()
    if child == 0:
        malletrain.report(7)
        os._exit(0)
    os.waitpid(child, 0)
    (message,) = agent.received(WorkerProgress)
    assert (message.sender.pid, message.samples, message.steps) == (child, 7, 1)
    malletrain.report(1)
    report.flush()
    assert agent.received(WorkerProgress)[-1].samples == 6


def test_a_worker_marks_its_start_and_sends_the_rest_when_it_ends(agent):
    script = (
        "import malletrain\nfor _ in range(100): "
        "malletrain.report(3)\nmalletrain.metric('accuracy', 0.75)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    messages = agent.received()
    assert [m.name for m in messages if isinstance(m, StartupMark)] == ["start", "import", "first"]
    start, imported, first = (m.time for m in messages if isinstance(m, StartupMark))
    assert start <= imported + 0.02  # the kernel tells the start to 10 ms
    assert imported <= first
    assert [m.value for m in messages if isinstance(m, ScriptMetric)] == [0.75]
    assert [m for m in messages if isinstance(m, WorkerProgress)][-1].samples == 300


def test_what_a_worker_did_before_it_was_stopped_in_a_collective_is_known(agent):
    """A worker on another node than rank 0's is stopped while it waits for rank 0, which stands
    still: it says nothing more by itself.
    """
    script = "import malletrain, os, sys\nfor _ in range(100): malletrain.report(3)\nos.read(0, 1)"
    worker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        counts = []
        eventually(
            lambda: (
                counts.extend(m.samples for m in agent.received(WorkerProgress))
                or (counts and counts[-1] == 300)
            ),
            "the last count",
        )
        assert worker.poll() is None
    finally:
        worker.terminate()
        worker.communicate()
    assert worker.returncode == -signal.SIGTERM


def test_importing_malletrain_imports_the_standard_library_only():
    script = (
        "import sys; before = set(sys.modules); import malletrain, json\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "malletrain.report(1)\n"
        "then = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps([sorted(new), sorted(then), dir(malletrain)]))"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLETRAIN")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env=clean,
    )
    imported, then, names = json.loads(done.stdout)
    assert set(imported) <= set(sys.stdlib_module_names) | {"malletrain"}
    assert set(then) <= set(sys.stdlib_module_names) | {"malletrain"}
    assert {"report", "metric", "Snapshot", "ElasticSampler"} <= set(names)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'reprot'"):
        malletrain.reprot  # noqa: B018
