"""The process of an embedded cluster: started, stopped, killed, and refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from scavenger.embedded import processes
from scavenger.embedded.cluster import Record
from scavenger.embedded.cluster_process import ClusterProcess, start_cluster
from scavenger.embedded.layout import LEASE_LOG, Layout
from scavenger.embedded.scavenger import LocalScavenger
from scavenger.interface import LeaseRequest, LeaseState, SchedulerError
from tests.disks import fill, small_disk
from tests.scavenger.conftest import processes_of
from tests.scavenger.embedded.leases import PARENT, PY, SLEEP, STUBBORN, lease_of, take, wait_ready
from tests.waiting import NEVER_S, PATIENCE_S, until


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
        "import sys; from scavenger.embedded.cluster_process import start_cluster; from "
        "scavenger.interface import LeaseRequest\n"
        f"c = start_cluster({str(tmp_path / 'cluster')!r}, 1, lifetime_s={NEVER_S})\n"
        "c.scavenger().take([LeaseRequest('a', 'n1', ('sleep', '600'))])\n"
    )
    subprocess.run([PY, "-c", code], check=True)
    running = ClusterProcess.attach(tmp_path / "cluster")
    try:
        assert lease_of(running.scavenger(), "a").state is LeaseState.RUNNING
    finally:
        running.stop()
    assert processes_of(tmp_path / "cluster") == []


def test_leases_have_the_umask_with_which_the_cluster_was_started(cluster, tmp_path):
    """The files of the cluster are private. Those of jobs were, whatever the user had set."""
    code = "import os; mask = os.umask(0); print(f'{mask:03o}', flush=True)"
    before = os.umask(0o027)
    try:
        running = cluster()
    finally:
        os.umask(before)
    take(running.scavenger(), "a", "n1", (PY, "-c", code))
    output = running.scavenger().layout.lease_directory("a") / LEASE_LOG
    until(lambda: output.exists() and "\n" in output.read_text(), "the lease to print its mask")
    assert output.read_text() == "027\n"
    assert running.scavenger().layout.state.stat().st_mode & 0o077 == 0


def test_a_second_cluster_in_the_directory_is_refused(cluster, tmp_path):
    first = cluster()
    with pytest.raises(SchedulerError, match=f"Another cluster \\(process {first.pid}\\) runs in"):
        start_cluster(tmp_path / "cluster", 2)
    assert first.alive()


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


def test_a_second_request_to_stop_skips_the_grace_time(cluster):
    running = cluster(grace_s=600.0)
    scavenger = running.scavenger()
    take(scavenger, "a", "n1", STUBBORN)
    wait_ready(scavenger, "a")
    os.kill(running.pid, signal.SIGTERM)
    until(lambda: lease_of(scavenger, "a").gone_at, "the lease to be asked to leave")
    refused = take(scavenger, "b", "n2")
    assert refused.reason == "The cluster is stopping."
    os.kill(running.pid, signal.SIGTERM)
    until(lambda: not running.alive(), "the cluster to be gone")
    assert processes_of(scavenger.layout.root) == []


def test_a_cluster_ends_after_its_lifetime(cluster):
    for lifetime_s in (0.5, 5.0, 50.0, PATIENCE_S):  # until there is time for a lease
        with contextlib.suppress(SchedulerError):
            running = cluster(lifetime_s=lifetime_s)
            if take(running.scavenger(), "a", "n1").state is LeaseState.RUNNING:
                break
    until(lambda: not running.alive(), "the cluster to end by itself")
    assert json.loads(running.scavenger().layout.state.read_text())["state"] == "stopped"


def test_a_cluster_on_a_full_disk_says_so(tmp_path):
    with small_disk(tmp_path):
        fill(tmp_path)
        with pytest.raises(SchedulerError, match="No space left on device; make room on its file"):
            start_cluster(tmp_path / "cluster", 1)


def test_a_cluster_whose_disk_fills_goes_on(tmp_path, monkeypatch):
    """Its log, to which it complains, is on the same disk."""
    with small_disk(tmp_path):
        layout = Layout(tmp_path / "cluster")
        layout.create()
        record = Record(layout)
        record.open()
        assert record.state({"state": "running"})
        with (tmp_path / "log").open("w") as log:
            monkeypatch.setattr(sys, "stderr", log)
            fill(tmp_path)
            for _ in range(300):
                record.log("n1", "busy", reason="a job of the main scheduler" * 9)
            assert not record.state({"state": "running", "much": "x" * 9000})
            (tmp_path / "full").unlink()
            assert record.state({"state": "running", "much": "x" * 9000})
            record.log("n1", "idle")
            fill(tmp_path)
            for _ in range(300):
                record.log("n1", "busy", reason="a job of the main scheduler" * 9)
            record.close()
            monkeypatch.undo()
            (tmp_path / "full").unlink()
        assert ",n1,idle," in layout.history.read_text()
