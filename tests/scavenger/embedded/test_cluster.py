"""The embedded cluster with real processes: well-behaved, stubborn, forking and killed ones."""

import csv
import json
import os
import signal
import subprocess
import sys

import pytest

from scavenger.embedded import processes
from scavenger.embedded.cluster import notice_given
from scavenger.embedded.layout import Layout
from scavenger.embedded.scavenger import ClusterProcess, LocalScavenger, start_cluster
from scavenger.horizon import SurvivalEstimator
from scavenger.interface import LeaseRequest, LeaseState, SchedulerError
from scavenger.trace.trace import Trace, write
from tests.scavenger.conftest import processes_of
from tests.waiting import until

PY = sys.executable
SLEEP = ("sleep", "600")
STUBBORN = (
    PY,
    "-S",
    "-c",
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('ready', "
    "'w')\ntime.sleep(600)",
)
# A child in a session of its own that ignores SIGTERM, and one with an empty environment; the first
# process leaves on SIGTERM.
PARENT = (
    PY,
    "-S",
    "-c",
    "import signal, subprocess, sys, time, os\n"
    "stubborn = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "time.sleep(600)'\n"
    "a = subprocess.Popen([sys.executable, '-S', '-c', stubborn], start_new_session=True)\n"
    "b = subprocess.Popen([sys.executable, '-S', '-c', stubborn], env={})\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "open('ready.tmp', 'w').write(f'{a.pid} {b.pid}')\n"
    "os.rename('ready.tmp', 'ready')\n"
    "time.sleep(600)\n",
)


def lease_of(scavenger, lease_id):
    return next(x for x in scavenger.poll().leases if x.id == lease_id)


def record_of(scavenger, lease_id):
    return json.loads(scavenger.layout.state.read_text())["leases"][lease_id]


def take(scavenger, lease_id, node, argv=SLEEP, **options):
    (lease,) = scavenger.take([LeaseRequest(lease_id, node, tuple(argv), **options)])
    return lease


def wait_clean(scavenger, lease_id):
    until(lambda: record_of(scavenger, lease_id)["clean"], f"lease {lease_id} to be cleared away")
    return record_of(scavenger, lease_id)


def wait_ready(scavenger, lease_id):
    path = scavenger.layout.lease(lease_id) / "ready"
    until(path.exists, f"the command of {lease_id} to be ready")
    return path.read_text()


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


def test_all_nodes_are_gaps_without_a_trace(cluster):
    snapshot = cluster(3).scavenger().poll()
    assert [g.node for g in snapshot.gaps] == ["n1", "n2", "n3"]
    assert (snapshot.total_nodes, snapshot.idle_nodes, snapshot.leases) == (3, 3, ())


def test_a_lease_runs_its_command_with_the_environment_asked_for(cluster):
    scavenger = cluster().scavenger()
    show = (
        "import os; print(*(os.environ[k] for k in ('MALLETRAIN_NODE', 'MALLETRAIN_LEASE', "
        "'X')), os.getcwd(), sep='|')"
    )
    lease = take(
        scavenger, "a-1", "n2", (PY, "-S", "-c", show), env={"X": "spaces and $(nothing)\n'"}
    )
    assert (lease.state, lease.node) == (LeaseState.RUNNING, "n2")
    folder = scavenger.layout.lease("a-1")
    assert wait_clean(scavenger, "a-1")["exit_status"] == 0
    assert (folder / "output.log").read_text() == f"n2|a-1|spaces and $(nothing)\n'|{folder}\n"
    assert "n2" in [g.node for g in scavenger.poll().gaps]


def test_a_lease_is_in_the_next_poll_and_its_node_no_gap(cluster):
    scavenger = cluster().scavenger()
    lease = take(scavenger, "a", "n1")
    snapshot = scavenger.poll()
    assert snapshot.leases == (lease,)
    assert [g.node for g in snapshot.gaps] == ["n2"]
    assert snapshot.idle_nodes == 2


def test_a_refused_lease_is_ended_with_the_reason_and_fails_no_other(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1")
    cases = [
        (LeaseRequest("b", "n1", SLEEP), "Node n1 is leased, not idle."),
        (LeaseRequest("b", "n9", SLEEP), "There is no node 'n9' in this cluster."),
        (LeaseRequest("b", "n2", ()), "The command must be a list of at least one string."),
        (
            LeaseRequest("b", "n2", SLEEP, duration_s=-1.0),
            "The time limit must be a positive number of seconds; got -1.0.",
        ),
        (
            LeaseRequest("../b", "n2", SLEEP),
            "The lease id '../b' is not made of 1-100 letters, digits, '.', '_' and '-'.",
        ),
        (
            LeaseRequest("", "n2", SLEEP),
            "The lease id '' is not made of 1-100 letters, digits, '.', '_' and '-'.",
        ),
    ]
    *refused, accepted = scavenger.take(
        [*(request for request, _ in cases), LeaseRequest("c", "n2", SLEEP)]
    )
    assert [(x.id, x.state, x.reason) for x in refused] == [
        (r.id, LeaseState.ENDED, reason) for r, reason in cases
    ]
    assert accepted.state is LeaseState.RUNNING


def test_asking_twice_for_one_lease_starts_one_process(cluster):
    scavenger = cluster().scavenger()
    first, second = take(scavenger, "a", "n1"), take(scavenger, "a", "n1")
    assert first == second
    assert scavenger.totals()["leases"] == 1


def test_a_command_that_cannot_be_run_ends_its_lease_and_says_where_to_look(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1", ("/no/such/command",))
    assert wait_clean(scavenger, "a")["exit_status"] == 127
    assert (
        lease_of(scavenger, "a").reason
        == "its command ended with exit status 127; see leases/a/output.log"
    )
    assert "/no/such/command" in (scavenger.layout.lease("a") / "output.log").read_text()


def test_giving_back_frees_the_node_and_twice_is_no_error(cluster):
    scavenger = cluster().scavenger()
    lease = take(scavenger, "a", "n1")
    scavenger.give_back([lease])
    assert wait_clean(scavenger, "a")["exit_status"] == -signal.SIGTERM
    scavenger.give_back([lease])
    assert lease_of(scavenger, "a").reason == "given back"
    until(lambda: len(scavenger.poll().gaps) == 2, "the node to be a gap again")


def test_what_ignores_sigterm_is_killed_after_the_grace_time(cluster):
    scavenger = cluster(grace_s=0.4).scavenger()
    lease = take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    scavenger.give_back([lease])
    leaving = lease_of(scavenger, "a")
    assert leaving.state is LeaseState.RUNNING
    assert leaving.leaving_by is not None
    record = wait_clean(scavenger, "a")
    assert (record["exit_status"], record["killed_after_grace"]) == (-signal.SIGKILL, 1)
    assert record["ended"] >= leaving.leaving_by


def test_a_time_limit_ends_a_lease(cluster):
    scavenger = cluster().scavenger()
    take(scavenger, "a", "n1", duration_s=0.3)
    assert wait_clean(scavenger, "a")["reason"] == "its time limit was reached"


def test_processes_left_behind_are_killed_and_counted(cluster):
    scavenger = cluster(grace_s=30).scavenger()
    lease = take(scavenger, "a", "n1", PARENT)
    children = [int(pid) for pid in wait_ready(scavenger, "a").split()]
    scavenger.give_back([lease])
    record = wait_clean(scavenger, "a")
    assert (record["exit_status"], record["orphans"], record["killed_after_grace"]) == (0, 2, 0)
    assert not any(processes.alive(pid) for pid in children)
    assert scavenger.totals()["orphans"] == 2


def test_a_busy_node_is_preempted_with_notice(cluster, trace_file):
    held = cluster(1, hold=True, **trace_file([(0, 0.0, 2.0)], nodes=1))
    scavenger = held.scavenger()
    take(scavenger, "a", "n1")
    held.go_on()
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
    snapshot = scavenger.poll()
    assert (snapshot.gaps, snapshot.idle_nodes) == ((), 0)
    refused = take(scavenger, "b", "n1")
    assert (refused.state, refused.reason) == (LeaseState.ENDED, "Node n1 is busy, not idle.")


def test_a_held_trace_begins_when_told(cluster, trace_file):
    held = cluster(2, **trace_file([(0, 0.0, 0.05), (1, 0.0, 900.0)]), hold=True, at_end="hold")
    scavenger = held.scavenger()
    until(lambda: scavenger.totals()["offered_node_s"] > 1.0, "half a second to pass on two nodes")
    assert {gap.node for gap in scavenger.poll().gaps} == {"n1", "n2"}
    held.go_on()
    until(lambda: {gap.node for gap in scavenger.poll().gaps} == {"n2"}, "the trace to begin")
    held.go_on()


def test_a_busy_node_is_preempted_without_notice_and_swept(cluster, trace_file):
    held = cluster(
        1, hold=True, notice_fraction=0.0, grace_s=30, **trace_file([(0, 0.0, 0.1)], nodes=1)
    )
    scavenger = held.scavenger()
    take(scavenger, "a", "n1", PARENT)
    wait_ready(scavenger, "a")
    held.go_on()
    record = wait_clean(scavenger, "a")
    assert (record["reason"], record["notice"], record["exit_status"]) == (
        "preempted without notice",
        False,
        -signal.SIGKILL,
    )
    assert record["orphans"] == 2
    assert processes_of(scavenger.layout.root) == []


def test_a_node_comes_back_after_a_preemption_and_the_history_tells_it(cluster, trace_file):
    held = cluster(1, hold=True, **trace_file([(0, 0.0, 1.0), (0, 1.4, 1000.0)], nodes=1))
    scavenger = held.scavenger()
    take(scavenger, "a", "n1")
    held.go_on()
    wait_clean(scavenger, "a")
    until(lambda: scavenger.poll().gaps, "the node to be idle again")
    assert take(scavenger, "b", "n1").state is LeaseState.RUNNING
    with open(scavenger.layout.history, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["event"], r["lease"]) for r in rows if r["node"] == "n1"] == [
        ("idle", ""),
        ("leased", "a"),
        ("preempted", "a"),
        ("ended", "a"),
        ("busy", ""),
        ("idle", ""),
        ("leased", "b"),
    ]
    assert [float(r["time"]) for r in rows] == sorted(float(r["time"]) for r in rows)


def test_stopping_preempts_everything_and_leaves_no_process(cluster):
    running = cluster(3, grace_s=0.4)
    scavenger = running.scavenger()
    take(scavenger, "a", "n1", PARENT)
    take(scavenger, "b", "n2", STUBBORN)
    take(scavenger, "c", "n3")
    wait_ready(scavenger, "a")
    wait_ready(scavenger, "b")
    running.stop()
    assert processes_of(scavenger.layout.root) == []
    state = json.loads(scavenger.layout.state.read_text())
    assert state["state"] == "stopped"
    assert {lease["state"] for lease in state["leases"].values()} == {"ended"}
    with pytest.raises(
        SchedulerError, match=r"was stopped\. Start it with: python -m scavenger\.embedded"
    ):
        scavenger.poll()
    assert scavenger.totals()["leases"] == 3


def test_a_killed_cluster_takes_its_leases_along_and_is_noticed(cluster):
    running = cluster()
    scavenger = running.scavenger()
    take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    os.kill(running.pid, signal.SIGKILL)
    until(lambda: not running.alive(), "the cluster to be gone")
    with pytest.raises(SchedulerError, match=f"process {running.pid}"):
        scavenger.take([LeaseRequest("b", "n2", SLEEP)])
    assert scavenger.check()[0][0] is False
    until(lambda: not processes_of(scavenger.layout.root), "the lease's process to be gone")


def test_a_new_cluster_clears_what_a_killed_one_left(cluster):
    running = cluster()
    scavenger = running.scavenger()
    take(scavenger, "a", "n1", PARENT)
    children = [int(pid) for pid in wait_ready(scavenger, "a").split()]
    os.kill(running.pid, signal.SIGKILL)
    until(lambda: not running.alive(), "the cluster to be gone")
    assert [processes.alive(pid) for pid in children] == [True, True]
    second = cluster()
    until(lambda: not any(processes.alive(pid) for pid in children), "the leftovers to be gone")
    assert second.scavenger().poll().leases == ()


def test_leases_outlive_the_process_that_started_the_cluster(cluster, tmp_path):
    code = (
        "import sys; from scavenger.embedded.scavenger import start_cluster; from "
        "scavenger.interface import LeaseRequest\n"
        f"c = start_cluster({str(tmp_path / 'cluster')!r}, 1, lifetime_s=60)\n"
        "c.scavenger().take([LeaseRequest('a', 'n1', ('sleep', '600'))])\n"
    )
    subprocess.run([PY, "-c", code], check=True)
    running = ClusterProcess.attach(tmp_path / "cluster")
    try:
        assert lease_of(running.scavenger(), "a").state is LeaseState.RUNNING
    finally:
        running.stop()
    assert processes_of(tmp_path / "cluster") == []


def test_a_second_cluster_in_the_directory_is_refused(cluster, tmp_path):
    first = cluster()
    with pytest.raises(SchedulerError, match=f"Another cluster \\(process {first.pid}\\) runs in"):
        start_cluster(tmp_path / "cluster", 2)
    assert first.alive()


MALFORMED = [
    "",
    "{",
    "[]",
    "\udcff",
    '{"format": 99, "kind": "take", "requests": []}',
    '{"format": 1, "kind": "dance"}',
    '{"format": 1, "kind": "take"}',
    '{"format": 1, "kind": "take", "requests": ["x", 3, {"id": "q", "node": "n1", "argv": '
    '"sleep"}]}',
]


def test_malformed_requests_are_answered_and_hurt_nobody(cluster):
    scavenger = cluster().scavenger()
    for k, text in enumerate(MALFORMED):
        scavenger.layout.spool.joinpath(f".bad{k}").write_bytes(
            text.encode(errors="surrogateescape")
        )
        scavenger.layout.spool.joinpath(f".bad{k}").rename(scavenger.layout.spool / f"bad{k}.json")
    for k in range(len(MALFORMED)):
        answer = scavenger.layout.answers / f"bad{k}.json"
        until(answer.exists, f"the answer to {MALFORMED[k]}")
        reply = json.loads(answer.read_text())
        assert reply["ok"] is False or all(
            x["state"] == "ended" and x["reason"] for x in reply["leases"]
        )
    assert list(scavenger.layout.spool.iterdir()) == []
    assert take(scavenger, "a", "n1").state is LeaseState.RUNNING


def test_a_directory_without_a_cluster_says_how_to_start_one(tmp_path):
    with pytest.raises(SchedulerError, match=f"No embedded cluster has run in {tmp_path}"):
        LocalScavenger(tmp_path).poll()
    Layout(tmp_path).state.write_text("nonsense")
    with pytest.raises(SchedulerError, match="cannot be read"):
        LocalScavenger(tmp_path).poll()


def test_a_bad_trace_is_told_in_the_clusters_own_words(cluster, tmp_path):
    (tmp_path / "bad.csv").write_text("time_s,node,event\n5,a,idle\n3,a,busy\n")
    with pytest.raises(SchedulerError, match="Time goes back from 5 s to 3 s"):
        cluster(1, trace=tmp_path / "bad.csv")
    (tmp_path / "few.csv").write_text("time_s,node,event\n5,a,idle\n")
    with pytest.raises(SchedulerError, match="fewer than the 3 wanted"):
        cluster(3, trace=tmp_path / "few.csv")


def test_check_says_what_works(cluster):
    verdicts = cluster(grace_s=0.5).scavenger().check()
    assert [ok for ok, _ in verdicts] == [True, True, False]
    assert "longer --grace" in verdicts[-1][1]


def test_a_silent_cluster_is_an_error_and_the_request_is_withdrawn(cluster):
    running = cluster()
    scavenger = LocalScavenger(running.directory, timeout_s=0.3)
    os.kill(running.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SchedulerError, match="no answer within"):
            take(scavenger, "a", "n1")
        assert list(scavenger.layout.spool.iterdir()) == []
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert scavenger.poll().leases == ()


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (0.25, 10), (0.75, 30), (1.0, 40)])
def test_the_fraction_with_notice_is_exact_and_repeatable(fraction, expected):
    for seed in range(5):
        given = [notice_given(k, fraction, seed) for k in range(40)]
        assert sum(given) == expected
        assert given == [notice_given(k, fraction, seed) for k in range(40)]


def test_gaps_have_a_horizon_when_their_lengths_are_watched(cluster, trace_file):
    running = cluster(2, **trace_file([(0, 0.0, 1.0), (1, 0.0, 1000.0)]))
    estimator = SurvivalEstimator(prior_mean_s=50.0)
    scavenger = LocalScavenger(running.directory, estimator=estimator)
    horizons = [g.horizon_s for g in scavenger.poll().gaps]
    assert horizons[1] == pytest.approx(50.0, rel=0.2)
    until(lambda: scavenger.poll() and estimator.observed, "the end of the first gap to be seen")
    assert [g.horizon_s for g in running.scavenger().poll().gaps] == [None]


def test_a_second_request_to_stop_skips_the_grace_time(cluster):
    running = cluster(grace_s=600.0)
    scavenger = running.scavenger()
    take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    os.kill(running.pid, signal.SIGTERM)
    until(lambda: lease_of(scavenger, "a").leaving_by, "the lease to be asked to leave")
    refused = take(scavenger, "b", "n2")
    assert refused.reason == "The cluster is stopping."
    os.kill(running.pid, signal.SIGTERM)
    until(lambda: not running.alive(), "the cluster to be gone")
    assert processes_of(scavenger.layout.root) == []


def test_a_cluster_ends_after_its_lifetime(cluster):
    running = cluster(lifetime_s=0.5)
    take(running.scavenger(), "a", "n1")
    until(lambda: not running.alive(), "the cluster to end by itself")
    assert json.loads(running.scavenger().layout.state.read_text())["state"] == "stopped"
