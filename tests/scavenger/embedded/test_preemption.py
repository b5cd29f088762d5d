"""The embedded cluster follows a trace and preempts."""

import csv
import signal

import pytest

from scavenger.embedded.scavenger import LocalScavenger
from scavenger.horizon import SurvivalEstimator
from scavenger.interface import LeaseState
from scavenger.trace.files import write
from scavenger.trace.trace import Trace
from tests.scavenger.conftest import processes_of
from tests.scavenger.embedded.leases import (
    PARENT,
    take,
    wait_clean,
    wait_ready,
)
from tests.waiting import NEVER_S, until

pytestmark = pytest.mark.slow


@pytest.fixture
def trace_file(tmp_path):
    """(node, from, to) idle intervals → a trace file of these virtual nodes."""

    def make(intervals, nodes=2, duration=1000.0):
        names = [f"n{k + 1}" for k in range(nodes)]
        columns = list(zip(*intervals, strict=True))
        trace = Trace.from_gaps(columns[0], columns[1], columns[2], names, duration)
        write(trace, tmp_path / "trace.csv")
        return {"trace": tmp_path / "trace.csv", "trace_end_s": duration}

    return make


PREEMPTED = [("idle", ""), ("leased", "a"), ("preempted", "a"), ("ended", "a")]


def history_of(scavenger, node):
    """Events of the node in the history, in order: event, lease."""
    with open(scavenger.layout.history, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["time"]) for r in rows] == sorted(float(r["time"]) for r in rows)
    return [(r["event"], r["lease"]) for r in rows if r["node"] == node]


def test_a_busy_node_is_preempted_with_notice(cluster, trace_file):
    embedded = cluster(1, hold=True, grace_s=NEVER_S, **trace_file([(0, 0.0, 2.0)], nodes=1))
    scavenger = embedded.scavenger()
    take(scavenger, "a", "n1")
    embedded.go_on()
    record = wait_clean(scavenger, "a")
    assert (record["reason"], record["notice"], record["exit_status"]) == (
        "preempted with notice",
        True,
        -signal.SIGTERM,
    )
    until(lambda: scavenger.totals()["offered_node_s"] >= 1.9, "the books")
    totals = scavenger.totals()
    assert (totals["preemptions_with_notice"], totals["preemptions_without_notice"]) == (1, 0)
    assert 0 < totals["leased_node_s"] <= totals["offered_node_s"]
    polled = scavenger.poll()
    assert (polled.gaps, polled.idle_nodes) == ((), 0)
    refused = take(scavenger, "b", "n1")
    assert (refused.state, refused.reason) == (LeaseState.ENDED, "Node n1 is busy, not idle.")
    assert history_of(scavenger, "n1") == [*PREEMPTED, ("busy", "")]


def test_a_held_trace_begins_when_told(cluster, trace_file):
    embedded = cluster(2, **trace_file([(0, 0.0, 0.05), (1, 0.0, 900.0)]), hold=True, at_end="hold")
    scavenger = embedded.scavenger()
    until(lambda: scavenger.totals()["offered_node_s"] > 1.0, "half a second to pass on two nodes")
    assert {gap.node for gap in scavenger.poll().gaps} == {"n1", "n2"}
    embedded.go_on()
    until(lambda: {gap.node for gap in scavenger.poll().gaps} == {"n2"}, "the trace to begin")
    embedded.go_on()


def test_a_busy_node_is_preempted_without_notice_and_swept(cluster, trace_file):
    embedded = cluster(
        1, hold=True, notice_fraction=0.0, grace_s=30, **trace_file([(0, 0.0, 0.1)], nodes=1)
    )
    scavenger = embedded.scavenger()
    take(scavenger, "a", "n1", PARENT)
    wait_ready(scavenger, "a")
    embedded.go_on()
    record = wait_clean(scavenger, "a")
    assert (record["reason"], record["notice"], record["exit_status"]) == (
        "preempted without notice",
        False,
        -signal.SIGKILL,
    )
    assert record["orphans"] == 2
    assert processes_of(scavenger.layout.root) == []


def test_a_node_comes_back_after_a_preemption_and_the_history_tells_it(cluster, trace_file):
    gaps = trace_file([(0, 0.0, 0.2), (0, 1.0, 1000.0)], nodes=1)
    embedded = cluster(1, hold=True, grace_s=NEVER_S, **gaps)
    scavenger = embedded.scavenger()
    take(scavenger, "a", "n1")
    embedded.go_on()
    wait_clean(scavenger, "a")
    until(lambda: scavenger.poll().gaps, "the node to be idle again")
    assert take(scavenger, "b", "n1").state is LeaseState.RUNNING
    again = [("idle", ""), ("leased", "b")]
    # It may be idle again before the processes of its lease are gone.
    assert history_of(scavenger, "n1") in (
        [*PREEMPTED, ("busy", ""), *again],
        [*PREEMPTED, *again],
    )


def test_gaps_have_a_horizon_when_their_lengths_are_watched(cluster, trace_file):
    running = cluster(2, hold=True, **trace_file([(0, 0.0, 1.0), (1, 0.0, 1000.0)]))
    estimator = SurvivalEstimator(prior_mean_s=50.0)
    scavenger = LocalScavenger(running.directory, estimator=estimator)
    horizons = [g.horizon_s for g in scavenger.poll().gaps]
    assert horizons[1] == pytest.approx(50.0, rel=0.2)
    running.go_on()
    until(lambda: scavenger.poll() and estimator.observed, "the end of the first gap to be seen")
    assert [g.horizon_s for g in running.scavenger().poll().gaps] == [None]
